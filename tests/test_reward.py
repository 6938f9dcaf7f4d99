import json
import os
import re
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retriever.types import Passage
from sapo.protocol import PROTOCOLS, parse_turn
from sapo.reward import (
    REWARDS,
    autorefine,
    cover_em,
    em,
    em_folded,
    f1,
    fold,
    format_score,
    normalize,
    reward,
    score,
    search_r1_em,
    sub_em,
    tag_contents,
    token_f1,
)
from sapo.types import Question, Trajectory, Turn
from tests.tiny import tiny_tokenizer

DATA = os.environ.get("SAPO_TEST_DATA")
needs_data = pytest.mark.skipif(DATA is None, reason="SAPO_TEST_DATA does not name the real-data folder")


@needs_data
def test_em_and_f1_equal_flashrag_bit_for_bit() -> None:
    rows = _vectors()
    assert len(rows) == 2130
    wrong = [
        row
        for row in rows
        if em(row["pred"], row["golden_answers"]) != row["em"] or f1(row["pred"], row["golden_answers"]) != row["f1"]
    ]
    assert wrong == []


@needs_data
def test_sub_em_equals_the_vectors_bit_for_bit() -> None:
    rows = _vectors()
    assert [row for row in rows if sub_em(row["pred"], row["golden_answers"]) != row["sub_em"]] == []
    assert (sub_em("I know", ["no"]), sub_em(None, ["a"])) == (1.0, 0.0)


@needs_data
def test_cover_em_differs_from_substring_em_only_inside_words_and_on_empty_golden_answers() -> None:
    rows = _vectors()
    covered = [cover_em(row["pred"], row["golden_answers"]) for row in rows]
    assert all(ours <= row["sub_em"] for ours, row in zip(covered, rows, strict=True))
    lost = {row["pred"] for ours, row in zip(covered, rows, strict=True) if ours < row["sub_em"]}
    # "Mercian" holds "Mercia"; for "many" the golden answer is "---", a substring of anything once normalised.
    assert {"Mercian", "many"} <= lost
    assert sum(covered) == 783 and sum(row["sub_em"] for row in rows) == 797


@needs_data
def test_folding_never_loses_an_exact_match() -> None:
    rows = [row for row in _vectors() if row["em"] == 1.0]
    assert len(rows) == 720
    assert all(em_folded(row["pred"], row["golden_answers"]) == 1.0 for row in rows)


@needs_data
def test_t5_squad_vectors() -> None:
    vectors = json.loads(Path(DATA, "scoring", "t5_squad_vectors.json").read_text(encoding="utf-8"))
    assert len(vectors["normalize_squad"]) == 2
    for text, expected in vectors["normalize_squad"]:
        assert normalize(text) == expected
    for case in vectors["qa_metrics"]:
        pairs = list(zip(case["predictions"], case["targets"], strict=True))
        # These F1 figures are of raw tokens, so the token count is compared without normalisation.
        best = [max(token_f1(pred.split(), golden.split()) for golden in targets) for pred, targets in pairs]
        assert 100 * sum(best) / len(best) == pytest.approx(case["f1"], abs=1e-12)
        assert 100 * sum(em(pred, targets) for pred, targets in pairs) / len(pairs) == case["em"]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The Beatles", "beatles"),
        ("an A.B. a the THE", "ab"),  # punctuation goes first: "A.B." is no article
        ("theatre and anthem", "theatre and anthem"),
        ("don't", "dont"),
        ("a-b", "ab"),  # deleted, not replaced by a space; the "a" is then no word
        ("1990–1995", "1990–1995"),
        ("“Paris”", "“paris”"),
        ("\tx \n\u3000y\u00a0z ", "x y z"),
        ("The", ""),
        ("!?", ""),
    ],
)
def test_normalize(text: str, expected: str) -> None:
    assert normalize(text) == expected


def test_f1_is_the_best_over_golden_answers() -> None:
    # Common tokens: 1 of 3 and 1 of 1; 2 of 3 and 2 of 4.
    assert f1("new york city", ["york"]) == 2 * (1 / 3) * 1 / (1 / 3 + 1)
    assert f1("new york city", ["york", "city of new orleans"]) == 2 * (2 / 3) * (2 / 4) / (2 / 3 + 2 / 4)
    assert f1("new york city", ["boston"]) == 0.0
    assert f1("new york city", []) == 0.0


def test_f1_counts_repeated_tokens_with_multiplicity() -> None:
    assert f1("paris paris", ["paris"]) == pytest.approx(2 / 3, abs=1e-15)
    assert f1("paris paris", ["paris paris"]) == 1.0


@pytest.mark.parametrize(
    ("answer", "golden", "expected"),
    [
        ("No", ["no man's land"], 0.0),  # 1 common token of 1 and 3 would give 0.5
        ("no man's land", ["no"], 0.0),
        ("yes", ["yes it is"], 0.0),
        ("noanswer", ["noanswer given"], 0.0),
        ("yes", ["no"], 0.0),
        ("Yes.", ["yes"], 1.0),
        ("the yes", ["Yes!"], 1.0),  # the rule looks at normalised text
        ("no", ["no man's land", "no"], 1.0),  # each golden answer by itself
        ("yes it is", ["yes", "it is"], 0.8),
        ("no answer", ["no answer given"], 0.8),  # two words: not the closed answer "noanswer"
    ],
)
def test_f1_of_closed_answers(answer: str, golden: list[str], expected: float) -> None:
    assert f1(answer, golden) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("answer", "golden", "covered"),
    [
        ("I know", ["no"], 0.0),
        ("no I do not", ["no"], 1.0),
        ("it is Paris, France", ["Paris"], 1.0),
        ("the city of New York", ["New York"], 1.0),
        ("new big york", ["New York"], 0.0),  # adjacent
        ("york new", ["New York"], 0.0),  # in order
        ("Mercian", ["Mercia"], 0.0),
        ("anything", ["The"], 0.0),
        ("", ["The"], 0.0),
        ("", ["Paris"], 0.0),
        ("lyon", ["Paris", "Lyon"], 1.0),
    ],
)
def test_cover_em_matches_whole_tokens(answer: str, golden: list[str], covered: float) -> None:
    assert cover_em(answer, golden) == covered


@pytest.mark.parametrize(
    ("answer", "golden"),
    [
        ("“Paris”", "Paris"),
        ("don’t", "don't"),
        ("don´t", "dont"),
        ("1990–1995", "1990-1995"),
        ("1990—1995", "1990-1995"),
        ("−5 degrees", "-5 degrees"),
        ("Beyoncé", "Beyonce"),
        ("Beyonce\u0301", "Beyoncé"),
        ("３", "3"),
        ("Ｐａｒｉｓ （Ｔｅｘａｓ）", "Paris (Texas)"),
        ("Łódź", "Lodz"),
        ("Ásgarðr", "Asgardr"),
        ("Straße", "Strasse"),
        ("co\u00adoperate\u200b", "cooperate"),
        ("ﬁnance", "finance"),
        ("½", "1/2"),
        ("À la carte", "A la carte"),
        ("«Guernica»", "Guernica"),
    ],
)
def test_em_folded_accepts_typography_that_em_does_not(answer: str, golden: str) -> None:
    assert (em(answer, [golden]), em_folded(answer, [golden])) == (0.0, 1.0)
    assert (em(golden, [answer]), em_folded(golden, [answer])) == (0.0, 1.0)


@pytest.mark.parametrize(("answer", "golden"), [("ばか", "はか"), ("की", "का"), ("Paris", "Pari"), ("é", "e’s")])
def test_em_folded_keeps_different_answers_apart(answer: str, golden: str) -> None:
    assert (em_folded(answer, [golden]), em_folded(answer, [answer])) == (0.0, 1.0)


def test_fold_of_plain_text_only_lowers_it() -> None:
    text = "".join(map(chr, range(128)))
    assert fold(text) == text.lower()


@pytest.mark.parametrize("empty", ["", "the", " ... ", "\u200b"])
def test_empty_prediction_is_never_correct_except_in_em(empty: str) -> None:
    scores = score(empty, ["The", "", "an"])
    assert scores[1:] == (0.0, 0.0, 0.0)
    assert scores.em == (0.0 if empty == "\u200b" else 1.0)  # Search-R1's: both sides normalise to ""


def test_no_answer_scores_zero_everywhere() -> None:
    assert score(None, ["the", "", "None", "Paris"]) == (0.0, 0.0, 0.0, 0.0)
    silent = _trajectory(["I give up"], "sapo", ["the"])
    assert [_reward(silent, name) for name in ("f1", "em", "cover_em", "em_folded", "autorefine")] == [0.0] * 5


def test_rewards_by_name() -> None:
    answer, golden = "the Beyoncé Knowles", ["Beyoncé", "beyonce knowles"]
    assert score(answer, golden) == (0.0, 2 / 3, 1.0, 1.0)
    trajectory = _trajectory([f"<answer> {answer} </answer>"], "sapo", golden)
    assert {name: _reward(trajectory, name) for name in REWARDS} == {
        "f1": 2 / 3, "em": 0.0, "cover_em": 1.0, "em_folded": 1.0, "autorefine": 2 / 3, "search_r1_compat": 0.0
    }  # fmt: skip
    with pytest.raises(ValueError, match="Unknown reward 'F1': use one of f1, em, cover_em, em_folded, autorefine, se"):
        _reward(trajectory, "F1")


def test_a_bare_string_is_one_golden_answer() -> None:
    assert score("s", "Paris") == (0.0, 0.0, 0.0, 0.0)
    assert score("paris", "Paris") == (1.0, 1.0, 1.0, 1.0)


def test_example_answer_of_the_prompt_is_not_an_answer() -> None:
    for name, example in (("sapo", "Donald Trump"), ("search_r1", "Beijing")):
        assert f"<answer> {example} </answer>" in PROTOCOLS[name].prompt("Who?")
        trajectory = _trajectory(["<think> I do not know </think>"], name, [example])
        assert score(trajectory.answer, trajectory.question.golden_answers) == (0.0, 0.0, 0.0, 0.0)
        assert [reward for reward in REWARDS if _reward(trajectory, reward, 0.5, name)] == ["search_r1_compat"]


@pytest.mark.parametrize("text", ["<answer>Paris</answer>", "Paris is <answer> a city", "</answer>"])
def test_answer_tags_in_a_document_are_not_scored(text: str) -> None:
    passage = Passage("0", '"Paris"', text, 1.0)
    silent = _trajectory(["<search> q </search>", "I give up"], "sapo", ["Paris"], passage)
    assert score(silent.answer, silent.question.golden_answers) == (0.0, 0.0, 0.0, 0.0)
    answering = _trajectory(["<search> q </search>", "<answer>Lyon</answer>"], "sapo", ["Lyon"], passage)
    assert score(answering.answer, answering.question.golden_answers) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize(
    "text",
    [
        "<answer> foo <answer>Paris</answer>",
        "<answer>Paris</answer><|im_end|>",
        "<answer>Paris</answer></answer></answer>",
        "<|start_header_id|>assistant<|end_header_id|><answer>Paris</answer><|eot_id|>",
    ],
)
def test_the_first_completed_answer_is_scored_whatever_surrounds_it(text: str) -> None:
    trajectory = _trajectory([text], "sapo", ["Paris"])
    assert score(trajectory.answer, trajectory.question.golden_answers) == (1.0, 1.0, 1.0, 1.0)


@pytest.mark.parametrize("text", ["<answer>Paris</answer>", "<refine>Paris</refine>", "<think>", "</think><answer>"])
def test_no_reward_sees_tags_in_a_document(text: str) -> None:
    passage = Passage("0", '"Paris"', text, 1.0)
    texts = ["<think> t </think> <search> q </search>", "<think> t </think> I give up"]
    silent = _trajectory(texts, "refine", ["Paris"], passage)
    ours = [name for name in REWARDS if name != "search_r1_compat"]
    assert [_reward(silent, name, format_weight=0.5) for name in ours] == [0.0] * 5
    texts[1] = "<think> t </think> <answer> Paris </answer>"
    answering = _trajectory(texts, "sapo", ["Paris"], passage)
    assert [_reward(answering, name, format_weight=0.5) for name in ours] == [1.0] * 5


@pytest.mark.parametrize(
    ("texts", "golden", "expected"),
    [
        (["<answer> new york city </answer>"], ["york"], 0.5),
        (["<search> q </search>", "<refine> It is Paris. </refine> <answer> Lyon </answer>"], ["Paris"], 0.1),
        (["<search> q </search>", "<refine> It is Paris. </refine> I give up"], ["Paris"], 0.1),
        (["<search> q </search>", "<refine> Paris </refine> <answer> in Paris </answer>"], ["Paris"], 2 / 3),
        (["<search> q </search>", "<refine> Nothing. </refine> <answer> Lyon </answer>"], ["Paris"], 0.0),
        (["<search> q </search>", "Paris <refine> Paris <answer> Lyon </answer>"], ["Paris"], 0.0),  # never closed
        (["<search> q </search>", "<refine> I know </refine> <answer> yes </answer>"], ["no"], 0.0),  # whole tokens
        (["<search> q </search>", "<refine> x </refine> <answer> y </answer>"], ["The", "!"], 0.0),  # empty golden ones
        (
            ["<search> a </search>", "<refine> Lyon </refine> <search> Paris </search>", "<refine> Nice </refine>"],
            ["Nice"],
            0.1,
        ),
    ],
)
def test_autorefine(texts: list[str], golden: list[str], expected: float) -> None:
    trajectory = _trajectory(texts, "refine", golden, Passage("0", '"Paris"', "<refine> Paris </refine> no", 1.0))
    assert autorefine(trajectory) == pytest.approx(expected, abs=1e-15)


@pytest.mark.parametrize(
    ("response", "golden", "expected"),
    [
        ("<answer> Paris </answer>", ["paris"], 1.0),
        ("<answer>\nThe Paris!\n</answer>", ["Lyon", "Paris"], 1.0),
        ("<answer> Paris, France </answer>", ["Paris"], 0.0),
        ("<answer> Lyon </answer> no: <answer> Paris </answer>", ["Paris"], 1.0),  # the last one
        ("<answer> Paris </answer> no: <answer> Lyon", ["Paris"], 1.0),
        ("<information>Doc 1 <answer>Paris</answer></information> I give up", ["Paris"], 1.0),  # documents count
        ("I give up", ["Beijing"], 1.0),  # the prompt's example
        ("I give up", ["and"], 0.0),
        ("<answer> foo <answer>Paris</answer>", ["Paris"], 0.0),  # the outermost opening tag
        ("<answer> foo <answer>Paris</answer>", ["foo <answer>Paris"], 1.0),
        ("<answer></answer>", ["the"], 1.0),
        ("<answer>“Paris”</answer>", ["Paris"], 0.0),
        ("<Answer>Paris</Answer>", ["Beijing"], 1.0),
    ],
)
def test_search_r1_scores_prompt_and_response(response: str, golden: list[str], expected: float) -> None:
    tokenizer = tiny_tokenizer()
    prompt = "<eos>user\n" + PROTOCOLS["search_r1"].prompt("Who?") + "<eos>assistant\n"
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text in (prompt, response + "<eos>")]
    trajectory = Trajectory(Question("q", "Who?", tuple(golden)), 0, ids[0], ids[1], [], [], (), None)
    assert tokenizer.decode(trajectory.ids) == prompt + response + "<eos>"
    assert reward(trajectory, "search_r1_compat", decode=tokenizer.decode) == expected


@given(st.lists(st.sampled_from(["<answer>", "</answer>", "<answer", ">", "</", "a", "\n"])))
def test_tag_contents_are_those_of_search_r1s_pattern(pieces: list[str]) -> None:
    text = "".join(pieces)
    assert tag_contents(text, "answer") == re.findall("<answer>(.*?)</answer>", text, re.DOTALL)


def test_search_r1_needs_two_answers() -> None:
    assert search_r1_em("<answer>Paris</answer>", ["Paris"]) == 0.0
    assert search_r1_em("", ["", "the"]) == 0.0
    assert search_r1_em("<answer>Paris</answer>" * 2, "Paris") == 1.0


@needs_data
def test_search_r1_em_equals_the_vectors_bit_for_bit() -> None:
    prompt = "<|im_start|>user\n" + PROTOCOLS["search_r1"].prompt("Who?") + "<|im_end|>\n<|im_start|>assistant\n"
    rows = _vectors()
    assert len(rows) == 2130 and not any("<answer>" in row["pred"] or "</answer>" in row["pred"] for row in rows)
    for row in rows:
        response = f"<think> t </think>\n<answer> {row['pred']} </answer>"
        assert search_r1_em(prompt + response, row["golden_answers"]) == row["em"], row
        assert search_r1_em(response, row["golden_answers"]) == 0.0  # without the prompt's examples
        assert search_r1_em(prompt, row["golden_answers"]) == em("Beijing", row["golden_answers"])


THINK, SEARCH, ANSWER = "<think> t </think>", "<search> q </search>", "<answer> a </answer>"
REFINED = "<refine> r </refine>"


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([f"{THINK}\n{ANSWER}"], 1.0),
        ([f"\n{THINK}{ANSWER}.\n\n"], 1.0),
        ([f"{THINK} {ANSWER}<|im_end|>"], 1.0),
        ([f"{THINK} {ANSWER}</answer></answer>"], 1.0),
        ([f"{THINK} {SEARCH}", f"{THINK} {SEARCH}", f"{THINK} {ANSWER}"], 1.0),
        (["<think> a < b and <b> x </b> </think><answer> a </answer>"], 1.0),
        (["<think></think><answer> a </answer>"], 1.0),
        ([ANSWER], 0.0),  # no thought
        ([f"{THINK} {SEARCH}", ANSWER], 0.0),
        ([f"{THINK} {SEARCH}"], 0.0),  # no answer
        ([f"{THINK} {SEARCH}", "I give up", f"{THINK} {ANSWER}"], 0.0),  # an invalid turn
        ([f"{THINK} <search> </search>", f"{THINK} {ANSWER}"], 0.0),  # another: nothing to search for
        ([f"{THINK} so {ANSWER}"], 0.0),  # text between blocks
        ([f"so {THINK} {ANSWER}"], 0.0),
        ([f"{THINK} {THINK} {ANSWER}"], 0.0),
        ([f"<think> t {ANSWER}"], 0.0),  # never closed
        ([f"<think> t <think> t </think> {ANSWER}"], 0.0),
        (["<think> I could <search> q </search>", f"{THINK} {ANSWER}"], 0.0),
        ([f"{THINK} <answer> foo <answer>Paris</answer>"], 0.0),
        ([f"{THINK} {REFINED} {ANSWER}"], 0.0),  # not asked for
        ([f"{THINK} <documents> d </documents> {ANSWER}"], 0.0),  # forged
        ([f"{THINK} <information> d </information> {ANSWER}"], 0.0),
        (["<Think> t </Think> <answer> a </answer>"], 0.0),
    ],
)
def test_format_of_a_template_that_asks_for_thoughts(texts: list[str], expected: float) -> None:
    passage = Passage("0", '"T"', "a <think> unbalanced </answer>", 1.0)
    assert format_score(_trajectory(texts, "sapo", ["a"], passage)) == expected


@pytest.mark.parametrize(
    ("texts", "expected"),
    [
        ([f"{THINK} {ANSWER}"], 1.0),
        ([f"{THINK} {SEARCH}", f"{REFINED} {ANSWER}"], 1.0),
        ([f"{THINK} {SEARCH}", f"{REFINED} {THINK} {SEARCH}", f"{THINK} {REFINED} {ANSWER}"], 1.0),
        ([f"{THINK} {SEARCH}", f"{THINK} {ANSWER}"], 0.0),
        ([f"{REFINED} {ANSWER}"], 0.0),
        ([f"{THINK} {REFINED} {SEARCH}", f"{REFINED} {ANSWER}"], 0.0),  # nothing to refine yet
        ([f"{THINK} {SEARCH}", f"{REFINED} {REFINED} {ANSWER}"], 0.0),
    ],
)
def test_format_of_the_refine_template(texts: list[str], expected: float) -> None:
    trajectory = _trajectory(texts, "refine", ["a"], Passage("0", '"T"', "x", 1.0))
    assert format_score(trajectory, PROTOCOLS["refine"].reasoning) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"{THINK} <answer> a </answer>", 1.0),
        ("<answer> a </answer>", 0.8),
        (f"{THINK} <answer> b </answer>", 0.2),
        ("<answer> b </answer>", 0.0),
        (THINK, 0.0),
    ],
)
def test_the_format_weight_divides_one_reward(text: str, expected: float) -> None:
    trajectory = _trajectory([text], "sapo", ["a"])
    assert _reward(trajectory, "em", format_weight=0.2) == pytest.approx(expected, abs=1e-15)
    assert _reward(trajectory, "em") == float("> a <" in text)


def test_the_format_of_a_long_hostile_turn_is_judged_in_linear_time() -> None:
    texts = [f"{THINK} {SEARCH}", "<think>" + "<think" * 20_000 + "</think> <answer> a </answer>"]
    began = time.process_time()
    assert format_score(_trajectory(texts, "sapo", ["a"])) == 1.0
    assert autorefine(_trajectory(["<refine>" * 20_000], "refine", ["a"])) == 0.0
    assert time.process_time() - began < 2


def _reward(trajectory: Trajectory, name: str, format_weight: float = 0.0, template: str = "search_r1") -> float:
    """The reward of a trajectory whose prompt and observations are texts: its ids are never looked at."""
    prompt = PROTOCOLS[template].prompt(trajectory.question.question)
    text = prompt + "".join(turn.text + turn.observation for turn in trajectory.turns)
    return reward(trajectory, name, decode=lambda ids: text, format_weight=format_weight)


def _vectors() -> list[dict]:
    text = Path(DATA, "scoring", "em_f1_vectors.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.split("\n") if line]


def _trajectory(texts: list[str], protocol: str, golden: list[str], passage: Passage | None = None) -> Trajectory:
    """A trajectory whose model wrote `texts`; `passage` is what every search returned."""
    passages = () if passage is None else (passage,)
    turns = []
    for text in texts:
        parsed = parse_turn(text, PROTOCOLS[protocol])
        observation = PROTOCOLS[protocol].observation(passages) if parsed.action == "search" else ""
        turns.append(
            Turn(0, 0, text, parsed.action, parsed.content, "stop", passages=passages, observation=observation)
        )
    answer = turns[-1].content if turns[-1].action == "answer" else None
    return Trajectory(Question("q", "Who?", tuple(golden)), 0, [], [], [], [], tuple(turns), answer)
