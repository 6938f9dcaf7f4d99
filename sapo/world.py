"""The synthetic knowledge world of the quick start: invented people, towns and companies that only a search can connect.

Every entity has one passage holding its two facts. A question composes 1 to 3 relations, so the answer to an n-hop question
takes n searches. The entities are split into train, held-out and distractor groups, and no fact crosses a group: train
and held-out questions share no entity, although one index holds all passages.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from sapo.types import Question


@dataclass(frozen=True)
class Relation:
    """One kind of fact. `sentence` states it with {subject} and {object}; `name` is its noun in questions and queries."""

    name: str
    subject: str
    object: str
    sentence: str


# The object is always of another type than the subject, so a passage never offers two candidates of one type.
RELATIONS: tuple[Relation, ...] = (
    Relation("birthplace", "person", "town", "{subject} was born in {object}."),
    Relation("employer", "person", "company", "{subject} works for {object}."),
    Relation("mayor", "town", "person", "{subject} is governed by {object}."),
    Relation("sponsor", "town", "company", "{subject} is sponsored by {object}."),
    Relation("headquarters", "company", "town", "{subject} is based in {object}."),
    Relation("founder", "company", "person", "{subject} was set up by {object}."),
)
TYPES: tuple[str, ...] = ("person", "town", "company")
_ONSETS = "b d f g h j k l m n p r s t v z br dr fr kr pl st tr".split()
_VOWELS = "a e i o u".split()
_CODAS = "b d k l m n r s t v".split()
_ENDINGS = {
    "person": (("a", "o", "en", "i"), ("sen", "ski", "ley", "ard")),
    "town": (("e", "or", "ar", "u"), ("ton", "burg", "wick", "ham")),
    "company": (("ix", "um", "on", "ax"), ("corp", "works", "tech", "ium")),
}


class WorldSettings(BaseModel):
    """Size and difficulty of the synthetic world."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    entities: int = Field(1600, ge=60, le=200_000, description="people, towns and companies that questions ask about")
    heldout_frac: float = Field(0.25, gt=0, lt=1, description="share of `entities` kept for held-out questions")
    distractors: int = Field(400, ge=0, description="extra passages, named almost like a question entity")
    pool_words: int = Field(64, ge=8, le=1000, description="name words per entity type and position")
    hop_shares: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.35, 0.4, 0.25), min_length=1, max_length=3, description="share of 1-, 2- and 3-hop questions; normalised"
    )
    comparison_share: float = Field(
        0.0, ge=0, le=1, description="share of yes/no questions that compare a fact of two entities (2 hops)"
    )
    train_questions: int = Field(3000, ge=1, description="train questions, at most")
    heldout_questions: int = Field(1000, ge=1, description="held-out questions, at most")

    @model_validator(mode="after")
    def _check(self) -> WorldSettings:
        if sum(self.hop_shares) <= 0:
            raise ValueError("world.hop_shares are all zero: give at least one number of hops a positive share")
        names = len(TYPES) * self.pool_words**2
        if 2 * (self.entities + self.distractors) > names:
            raise ValueError(
                f"world.pool_words={self.pool_words} makes {names} names, too few for {self.entities} entities and "
                f"{self.distractors} distractors (half of the names stay free): raise pool_words"
            )
        return self


@dataclass(frozen=True)
class Fact:
    """`relation` of `subject` is `object` (two entity names)."""

    subject: str
    relation: Relation
    object: str


@dataclass(frozen=True)
class World:
    """All passages and questions, and what it takes to invent more entities in the same words.

    passages: rows {id, title, contents} in index order · pools: the first and second name words of each type ·
    heldout_names: names that no demonstration may use · hop_shares: how often 1, 2, 3 hops are asked.
    """

    passages: tuple[dict[str, str], ...]
    train_questions: tuple[Question, ...]
    heldout_questions: tuple[Question, ...]
    pools: dict[str, tuple[tuple[str, ...], tuple[str, ...]]]
    heldout_names: frozenset[str]
    hop_shares: tuple[float, ...]


def relations_of(subject_type: str) -> tuple[Relation, ...]:
    """Return the relations whose subject is of this type."""
    return tuple(relation for relation in RELATIONS if relation.subject == subject_type)


def relation_paths(hops: int) -> list[tuple[Relation, ...]]:
    """Return every chain of `hops` relations, in the order they are looked up."""
    return [
        path
        for path in product(RELATIONS, repeat=hops)
        if all(left.object == right.subject for left, right in zip(path, path[1:]))
    ]


def passage_text(facts: Iterable[Fact]) -> str:
    """State the facts of one entity, one sentence each, in the given order.

    >>> passage_text([Fact("Bela Todsen", RELATIONS[1], "Kolix Ramcorp")])
    'Bela Todsen works for Kolix Ramcorp.'
    """
    return " ".join(fact.relation.sentence.format(subject=fact.subject, object=fact.object) for fact in facts)


def ask_path(subject: str, path: Sequence[Relation]) -> str:
    """Ask for the end of a relation path that starts at `subject`.

    >>> ask_path("Bela Todsen", (RELATIONS[1], RELATIONS[5]))
    'Who is the founder of the employer of Bela Todsen?'
    """
    chain = " of ".join(f"the {relation.name}" for relation in reversed(path))
    return f"{'Who' if path[-1].object == 'person' else 'What'} is {chain} of {subject}?"


def ask_same(left: str, right: str, relation: Relation) -> str:
    """Ask whether two entities share the object of one relation; the answer is yes or no."""
    return f"Is the {relation.name} of {left} also the {relation.name} of {right}?"


def make_pools(words: int, rng: random.Random) -> dict[str, tuple[tuple[str, ...], tuple[str, ...]]]:
    """Invent `words` distinct name words for each type and position; no word serves twice."""
    used: set[str] = set()

    def pool(endings: Sequence[str]) -> tuple[str, ...]:
        made: list[str] = []
        while len(made) < words:
            parts = (rng.choice(_ONSETS), rng.choice(_VOWELS), rng.choice(_CODAS), rng.choice(endings))
            word = "".join(parts).capitalize()
            if word not in used:
                used.add(word)
                made.append(word)
        return tuple(made)

    return {kind: (pool(_ENDINGS[kind][0]), pool(_ENDINGS[kind][1])) for kind in TYPES}


def make_world(settings: WorldSettings, seed: int) -> World:
    """Build the world: the same settings and seed give the same world, word for word.

    Fewer questions than asked for are returned only when the entities do not admit more of that number of hops.
    """
    rng = random.Random(f"world-{seed}")
    pools = make_pools(settings.pool_words, rng)
    names = {kind: [" ".join(pair) for pair in product(*pools[kind])] for kind in TYPES}
    for kind in TYPES:
        rng.shuffle(names[kind])
    heldout_count = round(settings.entities * settings.heldout_frac)
    train = _take(names, settings.entities - heldout_count)
    heldout = _take(names, heldout_count)
    distractors = _near_misses(names, [train, heldout], settings.distractors, rng)

    facts: dict[str, list[Fact]] = {}
    for group in (train, heldout, distractors):
        for kind in TYPES:
            for subject in group[kind]:
                facts[subject] = [
                    Fact(subject, relation, rng.choice(group[relation.object] or train[relation.object]))
                    for relation in relations_of(kind)
                ]
    passages = []
    for index, subject in enumerate(sorted(facts, key=lambda _: rng.random())):
        stated = facts[subject]
        rng.shuffle(stated)
        passages.append({"id": str(index), "title": subject, "contents": f'"{subject}"\n{passage_text(stated)}'})
    return World(
        passages=tuple(passages),
        train_questions=_questions("train", train, facts, settings, settings.train_questions, rng),
        heldout_questions=_questions("heldout", heldout, facts, settings, settings.heldout_questions, rng),
        pools=pools,
        heldout_names=frozenset(name for kind in TYPES for name in heldout[kind]),
        hop_shares=settings.hop_shares,
    )


def _take(names: dict[str, list[str]], count: int) -> dict[str, list[str]]:
    """Remove `count` unused names from `names`, spread evenly over the types."""
    sizes = [count // len(TYPES) + (index < count % len(TYPES)) for index in range(len(TYPES))]
    return {kind: [names[kind].pop() for _ in range(size)] for kind, size in zip(TYPES, sizes)}


def _near_misses(
    names: dict[str, list[str]], groups: Sequence[dict[str, list[str]]], count: int, rng: random.Random
) -> dict[str, list[str]]:
    """Take `count` unused names that share a first or second word with an entity of `groups`."""
    taken: dict[str, list[str]] = {kind: [] for kind in TYPES}
    for index in range(count):
        kind = TYPES[index % len(TYPES)]
        first, second = rng.choice([name for group in groups for name in group[kind]]).split()
        close = [name for name in names[kind] if (name.split()[0] == first) != (name.split()[1] == second)]
        name = rng.choice(close or names[kind])
        names[kind].remove(name)
        taken[kind].append(name)
    return taken


def _questions(
    split: str,
    group: dict[str, list[str]],
    facts: dict[str, list[Fact]],
    settings: WorldSettings,
    count: int,
    rng: random.Random,
) -> tuple[Question, ...]:
    """Draw up to `count` distinct questions about one group, in random order, in the wanted shares."""
    objects = {(fact.subject, fact.relation.name): fact.object for stated in facts.values() for fact in stated}
    total = sum(settings.hop_shares)
    drawn: list[tuple[str, str, int]] = []
    for hops, share in enumerate(settings.hop_shares, start=1):
        starts = [(name, path) for path in relation_paths(hops) for name in group[path[0].subject]]
        wanted = round(count * (1 - settings.comparison_share) * share / total)
        for subject, path in rng.sample(starts, min(wanted, len(starts))):
            answer = subject
            for relation in path:
                answer = objects[answer, relation.name]
            drawn.append((ask_path(subject, path), answer, hops))
    drawn += _comparisons(group, objects, round(count * settings.comparison_share), rng)
    rng.shuffle(drawn)
    return tuple(
        Question(id=f"{split}-{index}", question=text, golden_answers=(answer,), source=f"world_{split}", hops=hops)
        for index, (text, answer, hops) in enumerate(drawn)
    )


def _comparisons(
    group: dict[str, list[str]], objects: dict[tuple[str, str], str], count: int, rng: random.Random
) -> list[tuple[str, str, int]]:
    """Draw `count` comparison questions, as far as pairs exist, half of them answered by yes."""
    pairs: dict[str, list[tuple[str, str, Relation]]] = {"yes": [], "no": []}
    for relation in RELATIONS:
        names = group[relation.subject]
        for left in names:
            alike = [n for n in names if n != left and objects[n, relation.name] == objects[left, relation.name]]
            pairs["yes"] += [(left, right, relation) for right in alike]
            right = rng.choice(names)
            if right != left and right not in alike:
                pairs["no"].append((left, right, relation))
    return [
        (ask_same(*pair), answer, 2)
        for answer, made in pairs.items()
        for pair in rng.sample(made, min(count // 2, len(made)))
    ]


def write_corpus(world: World, path: Path) -> None:
    """Write the passages as JSON lines {"id", "contents"}, the corpus format of the retriever."""
    _write_rows(path, ({"id": row["id"], "contents": row["contents"]} for row in world.passages))


def write_questions(questions: Iterable[Question], path: Path) -> None:
    """Write questions as JSON lines {"id", "question", "golden_answers", "hops"}."""
    _write_rows(
        path,
        (
            {"id": q.id, "question": q.question, "golden_answers": list(q.golden_answers), "hops": q.hops}
            for q in questions
        ),
    )


def _write_rows(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
