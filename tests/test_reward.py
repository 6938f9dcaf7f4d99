import json
import os
from pathlib import Path

import pytest

from retriever.types import Passage
from sapo.protocol import PROTOCOLS, parse_turn
from sapo.reward import cover_em, em, em_folded, f1, fold, normalize, reward, score, token_f1
from sapo.types import Question, Trajectory, Turn

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
    assert [reward(name, None, ["the"]) for name in ("f1", "em", "cover_em", "em_folded")] == [0.0] * 4


def test_rewards_by_name() -> None:
    answer, golden = "the Beyoncé Knowles", ["Beyoncé", "beyonce knowles"]
    assert score(answer, golden) == (0.0, 2 / 3, 1.0, 1.0)
    assert [reward(name, answer, golden) for name in ("em", "f1", "cover_em", "em_folded")] == [0.0, 2 / 3, 1.0, 1.0]
    with pytest.raises(ValueError, match="Unknown reward 'F1': use one of f1, em, cover_em, em_folded"):
        reward("F1", answer, golden)


def test_a_bare_string_is_one_golden_answer() -> None:
    assert score("s", "Paris") == (0.0, 0.0, 0.0, 0.0)
    assert score("paris", "Paris") == (1.0, 1.0, 1.0, 1.0)


def test_example_answer_of_the_prompt_is_not_an_answer() -> None:
    for name, example in (("sapo", "Donald Trump"), ("search_r1", "Beijing")):
        assert f"<answer> {example} </answer>" in PROTOCOLS[name].prompt("Who?")
        trajectory = _trajectory(["<think> I do not know </think>"], name, [example])
        assert score(trajectory.answer, trajectory.question.golden_answers) == (0.0, 0.0, 0.0, 0.0)


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
