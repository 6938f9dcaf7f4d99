"""The world's promises, checked on the text it writes: passages and questions are parsed anew, not taken from its tables."""

import json
import re
from collections import Counter

import pytest
from pydantic import ValidationError

from sapo.world import (
    RELATIONS,
    World,
    WorldSettings,
    ask_path,
    make_world,
    relation_paths,
    write_corpus,
    write_questions,
)

SMALL = WorldSettings(entities=240, distractors=60, pool_words=16, train_questions=300, heldout_questions=200)


def stated_facts(world: World) -> dict[tuple[str, str], str]:
    """Read {(subject, relation name): object} back from the passages."""
    facts = {}
    for row in world.passages:
        subject, text = row["contents"].split("\n")
        subject = subject.strip('"')
        for sentence in text.split(". "):
            for relation in RELATIONS:
                before, after = relation.sentence.removesuffix(".").format(subject=subject, object="|").split("|")
                if sentence.startswith(before) and not after:
                    facts[subject, relation.name] = sentence.removeprefix(before).removesuffix(".")
    return facts


def entities_of(question: str, facts: dict[tuple[str, str], str]) -> list[str]:
    """Walk a question through the facts: its subject, every entity on the way, the answer."""
    chain, _, subject = question.removesuffix("?").rpartition(" of ")
    entities = [subject]
    for name in reversed(re.findall(r"the (\w+)", chain)):
        entities.append(facts[entities[-1], name])
    return entities


@pytest.fixture(scope="module")
def world() -> World:
    return make_world(SMALL, seed=3)


def test_two_builds_are_equal_and_another_seed_is_another_world(world):
    assert make_world(SMALL, seed=3) == world
    assert make_world(SMALL, seed=4).passages != world.passages


def test_passages_are_corpus_rows_with_two_facts_each(world):
    assert len(world.passages) == 300
    assert [row["id"] for row in world.passages] == [str(i) for i in range(300)]
    assert len({row["title"] for row in world.passages}) == 300
    assert all(row["contents"].startswith(f'"{row["title"]}"\n') for row in world.passages)
    assert len(stated_facts(world)) == 600


def test_the_answer_follows_from_the_passages_in_as_many_steps_as_hops(world):
    facts = stated_facts(world)
    for question in world.train_questions + world.heldout_questions:
        entities = entities_of(question.question, facts)
        assert question.golden_answers == (entities[-1],)
        assert question.hops == len(entities) - 1


def test_train_and_heldout_questions_share_no_entity(world):
    facts = stated_facts(world)
    met = [
        {name for question in questions for name in entities_of(question.question, facts)}
        for questions in (world.train_questions, world.heldout_questions)
    ]
    assert not met[0] & met[1]
    assert met[1] <= world.heldout_names
    assert not met[0] & world.heldout_names


def test_question_ids_are_unique_and_hops_come_in_the_wanted_shares(world):
    both = world.train_questions + world.heldout_questions
    assert len({question.id for question in both}) == len(both) == 500
    assert len({question.question for question in both}) == 500
    # 240 entities of which 60 are held out: 120 held-out 1-hop questions exist, more than the 70 wanted
    assert Counter(question.hops for question in world.heldout_questions) == {1: 70, 2: 80, 3: 50}


def test_the_default_world_has_a_thousand_heldout_questions():
    assert len(make_world(WorldSettings(), seed=0).heldout_questions) == 1000


def test_distractors_share_one_word_with_an_entity_and_answer_no_question():
    sparse = WorldSettings(entities=60, distractors=30, pool_words=100, train_questions=100, heldout_questions=50)
    world, plain = (make_world(sparse.model_copy(update={"distractors": count}), seed=3) for count in (30, 0))
    entities = {row["title"] for row in plain.passages}
    extra = {row["title"] for row in world.passages} - entities
    assert len(extra) == 30
    words = {word for name in entities for word in name.split()}  # 90 of 600: a random name rarely has one of them
    assert all(len(set(name.split()) & words) >= 1 for name in extra)
    facts = stated_facts(world)
    for question in world.train_questions + world.heldout_questions:
        assert not extra & set(entities_of(question.question, facts))


def test_relation_paths_connect():
    assert [len(relation_paths(hops)) for hops in (1, 2, 3)] == [6, 12, 24]
    assert all(a.object == b.subject for path in relation_paths(3) for a, b in zip(path, path[1:]))


def test_a_question_names_its_relations_from_the_last_to_the_first():
    founder, mayor = RELATIONS[5], RELATIONS[2]
    headquarters = RELATIONS[4]
    assert ask_path("Kolix Ramcorp", (headquarters, mayor)) == "Who is the mayor of the headquarters of Kolix Ramcorp?"
    assert ask_path("Kolix Ramcorp", (headquarters,)) == "What is the headquarters of Kolix Ramcorp?"
    assert ask_path("Kolix Ramcorp", (founder,)) == "Who is the founder of Kolix Ramcorp?"


def test_comparisons_are_true_of_the_passages_and_half_of_them_yes():
    settings = SMALL.model_copy(update={"comparison_share": 0.5})
    world = make_world(settings, seed=1)
    facts = stated_facts(world)
    asked = [q for q in world.heldout_questions if q.golden_answers[0] in ("yes", "no")]
    for question in asked:
        relation, left, right = re.match(r"Is the (\w+) of (.+) also the \w+ of (.+)\?", question.question).groups()
        same = facts[left, relation] == facts[right, relation]
        assert question.golden_answers == (("yes",) if same else ("no",))
        assert {left, right} <= world.heldout_names
    assert Counter(q.golden_answers[0] for q in asked) == {"yes": 50, "no": 50}


def test_files_hold_exactly_the_documented_keys(world, tmp_path):
    write_corpus(world, tmp_path / "new" / "corpus.jsonl")
    write_questions(world.heldout_questions, tmp_path / "heldout.jsonl")
    rows = [json.loads(line) for line in (tmp_path / "new" / "corpus.jsonl").read_text().splitlines()]
    assert rows == [{"id": row["id"], "contents": row["contents"]} for row in world.passages]
    asked = [json.loads(line) for line in (tmp_path / "heldout.jsonl").read_text().splitlines()]
    first = world.heldout_questions[0]
    assert asked[0] == {
        "id": "heldout-0",
        "question": first.question,
        "golden_answers": list(first.golden_answers),
        "hops": first.hops,
    }
    assert len(asked) == 200


def test_settings_that_cannot_work_say_what_to_change():
    with pytest.raises(ValidationError, match="raise pool_words"):
        WorldSettings(pool_words=8)
    with pytest.raises(ValidationError, match="hop_shares are all zero"):
        WorldSettings(hop_shares=(0.0, 0.0))
    with pytest.raises(ValidationError, match="entitys"):
        WorldSettings(entitys=100)
