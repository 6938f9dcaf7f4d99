import json

import pytest

from retriever.types import Passage
from sapo.agents import rollout_agent
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY, Sampling
from sapo.evaluation import EvaluationFiles, evaluate_questions, figures_of, summarise, trajectory_row
from sapo.protocol import PROTOCOLS
from sapo.rollout import Budget
from sapo.types import Question, Trajectory, Turn
from tests.test_engine import tiny_model
from tests.tiny import DictRetriever, tiny_tokenizer

QUESTIONS = [Question(f"q{i}", f"question {i}", ("Paris",), "test", 1 + i % 2) for i in range(7)]


def agent(sampling=GREEDY, samples=1):
    tokenizer = tiny_tokenizer()
    engine = HFEngine(tiny_model(tokenizer, seed=1), tokenizer)
    return rollout_agent(
        engine, DictRetriever({}), PROTOCOLS["plain"], budget=Budget(64, 12, 40, 2, 200), sampling=sampling, top_k=1,
        seed=0, samples=samples,
    )  # fmt: skip


def trajectory(question, answer, searches=1, sample=0, observation="\n<documents> t x </documents>\n", forged=False):
    search = Turn(0, 2, "s", "search", "q", "stop", False, (Passage("1", "t", "x", 1.0),), observation, 3)
    last = Turn(5, 7, "a", "answer" if answer else "invalid", answer or "", "stop", forged)
    return Trajectory(
        question, sample, [1], [2] * 7, [1, 1, 0, 0, 0, 1, 1], [0.0] * 7, (search,) * searches + (last,), answer
    )


def row_of(question, answer, **options):
    return figures_of(trajectory_row(trajectory(question, answer, **options)))


def test_scores_are_means_over_questions():
    answers = ["Paris", "the Paris", "Paris, France", None, "Rome", "paris.", "x"]
    summary = summarise([row_of(q, a) for q, a in zip(QUESTIONS, answers)])
    assert summary["n"] == 7 and summary["em"] == pytest.approx(3 / 7) and summary["cover_em"] == pytest.approx(4 / 7)
    assert summary["f1"] == pytest.approx((3 + 2 / 3) / 7)
    # questions 0, 2, 4, 6 have one hop, 1, 3, 5 two
    assert summary["by_hops"] == {"1": {"n": 4, "em": 1 / 4}, "2": {"n": 3, "em": 2 / 3}}
    assert summary["invalid_frac"] == pytest.approx(1 / 14) and summary["answered_frac"] == pytest.approx(6 / 7)
    assert (summary["searches"], summary["turns"], summary["sampled_tokens"], summary["response_tokens"]) == (
        1,
        2,
        4,
        7,
    )
    low, high = summary["em_interval"]
    assert 0 < low < 3 / 7 < high < 0.85
    assert summary["averages"] == {} and set(summary["benchmarks"]) == {"test"}
    with pytest.raises(ValueError, match="no questions"):
        summarise([])


def test_a_hit_is_a_golden_answer_in_an_observation():
    def hit(observation, **options):
        return row_of(QUESTIONS[0], "x", observation=observation, **options)["hit_rate"]

    assert hit("Doc 1: The city of Paris.") == 1.0
    assert hit("Parisians") == 0.0  # whole tokens
    assert hit("Paris", searches=0) == 0.0
    rows = [row_of(QUESTIONS[0], None, forged=True), row_of(QUESTIONS[1], "Paris")]
    assert summarise(rows)["forged_frac"] == 0.25


def test_samples_are_averaged_within_their_question():
    answers = [("Paris", "Rome"), ("Rome", "Rome"), ("Paris", "Paris")]
    rows = [row_of(q, a, sample=n) for q, pair in zip(QUESTIONS, answers) for n, a in enumerate(pair)]
    summary = summarise(rows)
    assert (summary["n"], summary["samples"], summary["em"]) == (3, 2, 0.5)
    assert summary["pass_em"] == pytest.approx(2 / 3)


def test_averages_weigh_benchmarks_the_same():
    def rows(source, right, wrong):
        questions = [Question(f"{source}{i}", "q", ("Paris",), source) for i in range(right + wrong)]
        return [row_of(q, "Paris" if i < right else "no") for i, q in enumerate(questions)]

    summary = summarise(rows("nq", 1, 3) + rows("bamboogle", 1, 1) + rows("hotpotqa", 6, 0))
    assert summary["em"] == pytest.approx(8 / 12)
    averages = summary["averages"]
    assert averages["single_hop"]["em"] == 0.25 and averages["single_hop"]["benchmarks"] == ["nq"]
    assert averages["multi_hop"]["em"] == 0.75 and averages["multi_hop"]["benchmarks"] == ["hotpotqa", "bamboogle"]
    assert averages["macro"]["em"] == pytest.approx((0.25 + 0.5 + 1) / 3)
    assert {name: part["n"] for name, part in summary["benchmarks"].items()} == {"nq": 4, "bamboogle": 2, "hotpotqa": 6}


def test_every_question_once_and_in_order_for_any_batch_and_any_ranks():
    sampled = Sampling()
    taken = []
    figures = evaluate_questions(agent(sampled), QUESTIONS, take=taken.extend)
    assert [row["id"] for row in taken] == [q.id for q in QUESTIONS] and figures == list(map(figures_of, taken))
    small = []
    assert evaluate_questions(agent(sampled), QUESTIONS, batch_questions=2, take=small.extend) == figures
    assert small == taken
    # three ranks in turn: what each answers in the batches of six questions, then all of it gathered for each
    answered = {0: [], 1: [], 2: []}
    for rank in answered:

        def gather(mine, rank=rank):
            answered[rank].append(mine)
            return [taken]  # rows of other batches are not this batch's

        with pytest.raises(KeyError):
            evaluate_questions(agent(sampled), QUESTIONS, batch_questions=2, rank=rank, world_size=3, gather=gather)
    assert [[row["id"] for row in parts[0]] for parts in answered.values()] == [
        ["q0", "q3"],
        ["q1", "q4"],
        ["q2", "q5"],
    ]

    def gather_all(batch_of_rank):
        calls = {rank: iter(parts) for rank, parts in batch_of_rank.items()}
        return lambda mine: [next(parts) for parts in calls.values()]

    batches = {rank: [taken[rank:6:3], taken[6:][rank::3]] for rank in range(3)}
    for rank in range(3):
        rows = []
        evaluate_questions(
            agent(sampled), QUESTIONS, batch_questions=2, rank=rank, world_size=3, gather=gather_all(batches),
            take=rows.extend,
        )  # fmt: skip
        assert rows == taken


def test_samples_of_a_question_stand_together():
    taken = []
    evaluate_questions(agent(Sampling(), samples=3), QUESTIONS, batch_questions=2, take=taken.extend)
    assert [(row["id"], row["sample"]) for row in taken] == [(q.id, n) for q in QUESTIONS for n in range(3)]


def test_progress_counts_questions_and_running_em():
    shown = []

    def answer(questions):
        return [trajectory_row(trajectory(q, "Paris" if q.id in ("q0", "q1", "q5") else "no")) for q in questions]

    evaluate_questions(answer, QUESTIONS, batch_questions=3, progress=lambda *now: shown.append(now))
    assert shown == [(3, 7, pytest.approx(2 / 3)), (6, 7, 0.5), (7, 7, pytest.approx(3 / 7))]


# Files ------------------------------------------------------------------------------------------------------------


def rows_of(questions, samples=1):
    return [trajectory_row(trajectory(q, "a\ud800\u2028b", sample=n)) for q in questions for n in range(samples)]


def started(folder, conditions=None):
    return EvaluationFiles(folder, "x", conditions or {"model": "m", "top_k": 3})


def test_a_torn_line_and_a_half_batch_are_cut_and_no_row_comes_twice(tmp_path):
    files = started(tmp_path)
    assert files.resume(QUESTIONS, 1, 2) == []
    rows = rows_of(QUESTIONS)
    for part in (rows[:2], rows[2:4], rows[4:5]):  # the last one is not the whole batch
        files.append(part)
    whole = files.predictions.read_bytes()
    files.predictions.write_bytes(whole + json.dumps(rows[5]).encode()[:50])
    again = started(tmp_path)
    assert again.finished() is None
    assert [row["id"] for row in again.resume(QUESTIONS, 1, 2)] == ["q0", "q1", "q2", "q3"]
    assert again.predictions.read_bytes() == b"".join(whole.splitlines(keepends=True)[:4])
    again.append(rows[4:])
    assert again.predictions.read_text().count("\n") == 7  # the line separator within a text ends no row
    assert [row["id"] for row in started(tmp_path).resume(QUESTIONS, 1, 2)] == [q.id for q in QUESTIONS]


@pytest.mark.parametrize(("damage", "kept"), [("swap", 2), ("repeat", 4), ("garbage", 2), ("too many", 6)])
def test_rows_count_up_to_the_first_that_is_not_the_next(tmp_path, damage, kept):
    files = started(tmp_path)
    files.begin()
    rows = rows_of(QUESTIONS[:3], samples=2)
    lines = [json.dumps(row) + "\n" for row in rows]
    if damage == "swap":
        lines[2], lines[3] = lines[3], lines[2]
    elif damage == "repeat":
        lines.insert(4, lines[3])
    elif damage == "garbage":
        lines[3] = "{}\n"
    else:
        lines += lines[:2]
    files.predictions.write_text("".join(lines))
    assert len(files.resume(QUESTIONS[:3], 2, 1)) == kept
    assert files.predictions.read_text() == "".join(lines[:kept])


def test_files_of_other_conditions_are_refused_and_complete_ones_returned(tmp_path):
    files = started(tmp_path)
    files.begin()
    files.append(rows_of(QUESTIONS))
    with pytest.raises(ValueError, match=r"x.started.json .*top_k is 3 there, 5 here.*--fresh"):
        started(tmp_path, {"model": "m", "top_k": 5}).finished()
    files.finish({"model": "m", "top_k": 3, "em": 1.0})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.json", "x.predictions.jsonl"]
    assert started(tmp_path).finished() == {"model": "m", "top_k": 3, "em": 1.0}
    with pytest.raises(ValueError, match=r'x.json .*model is "m" there, "n" here'):
        started(tmp_path, {"model": "n", "top_k": 3}).finished()
    files.result.unlink()
    with pytest.raises(ValueError, match="x.predictions.jsonl is there without x.started.json or x.json"):
        started(tmp_path).finished()
    started(tmp_path, {"model": "n", "top_k": 3}).begin()  # --fresh
    assert sorted(p.name for p in tmp_path.iterdir()) == ["x.predictions.jsonl", "x.started.json"]
    assert files.predictions.read_bytes() == b""
