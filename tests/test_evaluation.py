import json

import pytest

from retriever.types import Passage
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY, Sampling
from sapo.evaluation import evaluate_questions, summarise, trajectory_row, write_evaluation
from sapo.protocol import PROTOCOLS
from sapo.rollout import Budget
from sapo.types import Question, Trajectory, Turn
from tests.test_engine import tiny_model
from tests.tiny import DictRetriever, tiny_tokenizer

QUESTIONS = [Question(f"q{i}", f"question {i}", ("Paris",), "test", 1 + i % 2) for i in range(7)]


def evaluate(sampling=GREEDY, **options):
    tokenizer = tiny_tokenizer()
    engine = HFEngine(tiny_model(tokenizer, seed=1), tokenizer)
    return evaluate_questions(
        engine, DictRetriever({}), tokenizer, PROTOCOLS["plain"], QUESTIONS, budget=Budget(64, 12, 40, 2, 200),
        sampling=sampling, top_k=1, seed=0, **options
    )  # fmt: skip


def trajectory(question, answer, searches=1):
    search = Turn(0, 2, "s", "search", "q", "stop", passages=(Passage("1", "t", "x", 1.0),), observation_tokens=3)
    last = Turn(5, 7, "a", "answer" if answer else "invalid", answer or "", "stop")
    return Trajectory(
        question, 0, [1], [2] * 7, [1, 1, 0, 0, 0, 1, 1], [0.0] * 7, (search,) * searches + (last,), answer
    )


def test_scores_are_means_over_questions():
    answers = ["Paris", "the Paris", "Paris, France", None, "Rome", "paris.", "x"]
    rows = [trajectory_row(trajectory(q, a)) for q, a in zip(QUESTIONS, answers)]
    summary = summarise(rows)
    assert summary["n"] == 7 and summary["em"] == pytest.approx(3 / 7) and summary["cover_em"] == pytest.approx(4 / 7)
    assert summary["f1"] == pytest.approx((3 + 2 / 3) / 7)
    # questions 0, 2, 4, 6 have one hop, 1, 3, 5 two
    assert summary["by_hops"] == {"1": {"n": 4, "em": 1 / 4}, "2": {"n": 3, "em": 2 / 3}}
    assert summary["invalid_frac"] == pytest.approx(1 / 14) and summary["answered_frac"] == pytest.approx(6 / 7)
    assert summary["searches"] == 1.0
    with pytest.raises(ValueError, match="no questions"):
        summarise([])


def test_every_question_once_and_in_order_for_any_batch_and_any_ranks():
    sampled = Sampling()
    summary, rows = evaluate(sampled)
    assert [row["id"] for row in rows] == [q.id for q in QUESTIONS]
    assert evaluate(sampled, batch_questions=2) == (summary, rows)
    parts = [evaluate(sampled, rank=r, world_size=3, gather=lambda part: [part, [{**row} for row in rows]])
             for r in range(3)]  # fmt: skip
    assert all(part == (summary, rows) for part in parts)
    only_mine = []
    for r in range(3):
        evaluate(sampled, rank=r, world_size=3, gather=lambda part: only_mine.append(part) or [rows])
    assert [len(part) for part in only_mine] == [3, 2, 2]
    assert sorted(row["id"] for part in only_mine for row in part) == [q.id for q in QUESTIONS]


def test_results_are_written_with_hostile_text_whole(tmp_path):
    row = trajectory_row(trajectory(QUESTIONS[0], "a\ud800\u2028b"))
    write_evaluation(tmp_path / "eval", "step_0_greedy", {"em": 1.0}, [row])
    lines = (tmp_path / "eval" / "step_0_greedy.predictions.jsonl").read_text().split("\n")
    assert len(lines) == 2 and json.loads(lines[0])["answer"] == "a\ud800\u2028b"
    assert json.loads((tmp_path / "eval" / "step_0_greedy.json").read_text()) == {"em": 1.0}
    assert sorted(p.name for p in (tmp_path / "eval").iterdir()) == [
        "step_0_greedy.json", "step_0_greedy.predictions.jsonl"
    ]  # fmt: skip
