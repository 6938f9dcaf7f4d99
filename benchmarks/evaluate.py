"""Evaluation: recorded scores, intervals, all benchmarks end to end, the whole test mix, kills, ranks, batches.

    make bench-evaluate                                  needs SAPO_TEST_DATA, the folder of real questions and passages
    PYTHONPATH=. python benchmarks/evaluate.py [--limit 10] [--rows 51713] [--passages 4000] [--batch-questions 16]

1. Every recorded score (EM, sub-EM, F1) of scoring/ again.
2. Intervals: how often they cover the truth of 1,000 simulated evaluations of 125 questions at EM .2.
3. The seven benchmarks by evaluate.py with SmolLM2-135M and a real E5 over wiki-18 passages, `--limit` questions each,
   as search agent and as each baseline. So small a model answers next to nothing: the tables show that all of it runs.
4. The whole test mix of 51,713 rows with a tiny random model in float64, where no rounding can decide: uninterrupted,
   killed by SIGKILL and started again, and on two ranks. Questions that SAPO_TEST_DATA lacks are repeated under new ids
   up to the count.
5. SmolLM2 and the tiny model, greedy in batches of several sizes, in float64 and float32; where float32 differs, the
   gap between the two best logits at the first differing token, from a float64 forward.

The last line is one JSON object: vectors_wrong, coverage, rows_per_s (part 4, one rank), peak_rss_bytes,
resume_identical, ranks_identical (predictions byte for byte, scores equal), batch_identical (float64 identical, and
every float32 difference at a gap below 1e-4), float32_differing, float32_largest_gap, and em by agent and benchmark.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml

from retriever.service import open_retriever
from retriever.types import Retriever
from sapo.agents import AGENTS, rollout_agent
from sapo.assemble import keep_freed_memory, quieten, record_evaluation
from sapo.data import BENCHMARKS, load_benchmarks
from sapo.data import main as data_main
from sapo.distributed import setup
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY
from sapo.policy import load_policy
from sapo.protocol import PROTOCOLS
from sapo.reward import em, f1, sub_em
from sapo.rollout import Budget, rollout
from sapo.statistics import coverage
from sapo.types import Question, Trajectory
from tests.test_engine import tiny_model
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent
FILES = {
    "nq": "nq_open_dev", "triviaqa": "triviaqa_test", "popqa": "popqa_1k_flashrag", "hotpotqa": "hotpotqa_dev_full",
    "2wikimultihopqa": "2wiki_dev_full", "musique": "musique_dev_full", "bamboogle": "bamboogle",
}  # fmt: skip
GAP = 1e-4  # below it float32 may decide otherwise
TINY_BUDGET = Budget(256, 16, 64, 2, 440)
SMOL_BUDGET = Budget(384, 64, 256, 2, 1088)
KILL_SHARE = 0.4  # of the rows, when the whole test mix is killed
PREDICTIONS, RESULT = "mix.predictions.jsonl", "mix.json"


def check_vectors(data: Path) -> int:
    """Return how many recorded scores come out otherwise."""
    text = (data / "scoring" / "em_f1_vectors.jsonl").read_text(encoding="utf-8")
    rows = [json.loads(line) for line in text.split("\n") if line]
    scores = {"em": em, "sub_em": sub_em, "f1": f1}
    wrong = sum(
        score(row["pred"], row["golden_answers"]) != row[name] for row in rows for name, score in scores.items()
    )
    print(f"vectors: {len(rows)} answers, {len(rows) * len(scores)} scores, {wrong} wrong", flush=True)
    return wrong


def run_benchmarks(options: argparse.Namespace, data: Path, work: Path) -> dict[str, dict[str, float]]:
    """Evaluate SmolLM2 on a sample of each benchmark as each agent; return EM by agent and benchmark."""
    corpus = work / "passages.jsonl"
    lines = (data / "corpora" / "wiki18_slice.jsonl").read_bytes().split(b"\n")[: options.passages]
    corpus.write_bytes(b"\n".join(line for line in lines if line) + b"\n")
    config = {
        "name": "smollm2",
        "model": {"path": options.model, "threads": options.threads},
        "data": {"train": ["none.jsonl"]},
        "protocol": {"template": "search_r1"},
        "retriever": {"corpus": str(corpus), "index": str(work / "index"), "encoder": options.encoder, "top_k": 3},
        "rollout": {
            "max_rows": options.batch,
            "questions_per_step": 4,
            "group_size": 2,
            **{key: getattr(SMOL_BUDGET, key) for key in SMOL_BUDGET.__dataclass_fields__},
            "max_trajectory_tokens": 3200,  # room for the documents of the baselines
        },
        "optim": {"minibatch_responses": 8},
    }
    (work / "smollm2.yaml").write_text(yaml.safe_dump(config))
    scores: dict[str, dict[str, float]] = {}
    for agent in options.agents:
        began = time.perf_counter()
        arguments = ["--config", str(work / "smollm2.yaml"), "--model", options.model, "--benchmarks", "all"]
        arguments += ["--data-dir", str(work / "data"), "--out", str(work / "evals"), "--agent", agent]
        arguments += ["--limit", str(options.limit), "--label", f"SmolLM2-135M, {agent}"]
        finish(subprocess.Popen([sys.executable, str(ROOT / "evaluate.py"), *arguments]))
        result = json.loads((work / "evals" / f"{agent}_greedy.json").read_text())
        scores[agent] = {name: part["em"] for name, part in result["benchmarks"].items()}
        print(f"{agent}: {result['n']} questions, {time.perf_counter() - began:.0f} s in all\n", flush=True)
    return scores


def mix_questions(work: Path, rows: int) -> list[Question]:
    """Return the test mix in its real sizes, at most `rows` questions: what is not there is repeated under new ids."""
    questions, _ = load_benchmarks(work / "data", list(BENCHMARKS))
    mix = []
    for name, known in BENCHMARKS.items():
        part = [question for question in questions if question.source == name]
        count = max(1, round(known.rows * rows / sum(b.rows for b in BENCHMARKS.values())))
        mix += [replace(part[n % len(part)], id=f"{name}:{n}") for n in range(count)]
    return mix[:rows] if rows < len(mix) else mix


def worker(options: argparse.Namespace) -> None:
    """Evaluate the tiny model on the test mix, into --out: what the processes of part 4 run."""
    torch.set_num_threads(1)
    work, out = Path(options.work), Path(options.out)
    dist = setup(dtype="float64")
    model, tokenizer = load_policy(work / "tiny", dtype=torch.float64)
    retriever = open_retriever(work / "tiny.jsonl", work / "tiny-index", encoder="hashed")
    answer = rollout_agent(
        HFEngine(model, tokenizer), retriever, PROTOCOLS["plain"], budget=TINY_BUDGET, sampling=GREEDY, top_k=3, seed=0
    )
    record_evaluation(
        dist,
        answer,
        mix_questions(work, options.rows),
        {"model": "tiny", "decoding": {"temperature": 0}},
        out,
        "mix",
        batch_questions=options.tiny_batch // dist.world_size,
        resume=True,
    )
    if dist.is_main:
        (out / "peak.json").write_text(str(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024))
    dist.end()


def start_worker(options: argparse.Namespace, work: Path, out: Path, ranks: int) -> subprocess.Popen[bytes]:
    """Start the evaluation of the test mix on `ranks` processes."""
    launcher = (
        ["-m", "torch.distributed.run", "--nproc_per_node", str(ranks), "--master_port", "29571"] if ranks > 1 else []
    )
    command = [sys.executable, *launcher, __file__, "--worker", "--work", str(work), "--out", str(out)]
    command += ["--rows", str(options.rows), "--tiny-batch", str(options.tiny_batch)]
    alone = {key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE", "MASTER_ADDR")}
    alone |= {"OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(ROOT)}
    out.mkdir(parents=True, exist_ok=True)
    return subprocess.Popen(command, env=alone)


def finish(process: subprocess.Popen[bytes]) -> None:
    if process.wait():
        raise SystemExit("an evaluation failed; its error is above")


def outcome(out: Path) -> tuple[bytes, dict[str, Any]]:
    """Return the predictions and all of the result but its times."""
    result = json.loads((out / RESULT).read_text())
    return (out / PREDICTIONS).read_bytes(), {key: value for key, value in result.items() if key != "time"}


def run_mix(options: argparse.Namespace, data: Path, work: Path) -> dict[str, Any]:
    """Evaluate the whole mix: uninterrupted, killed and resumed, on two ranks."""
    tokenizer = tiny_tokenizer()
    tiny_model(tokenizer, seed=1).save_pretrained(work / "tiny")
    tokenizer.save_pretrained(work / "tiny")
    lines = (data / "corpora" / "wiki18_slice.jsonl").read_bytes().split(b"\n")[:1000]
    (work / "tiny.jsonl").write_bytes(b"\n".join(lines) + b"\n")
    whole, killed, two = (work / name for name in ("whole", "killed", "two"))
    finish(start_worker(options, work, whole, 1))
    timed = json.loads((whole / RESULT).read_text())["time"]
    peak = int((whole / "peak.json").read_text())
    print(f"test mix: {timed['rows']:,} rows in {timed['seconds']:.0f} s, peak {peak / 1e6:.0f} MB", flush=True)

    process = start_worker(options, work, killed, 1)
    size = (whole / PREDICTIONS).stat().st_size
    while process.poll() is None:
        file = killed / PREDICTIONS
        if file.is_file() and file.stat().st_size > KILL_SHARE * size:
            process.send_signal(signal.SIGKILL)
            break
        time.sleep(0.02)
    process.wait()
    left = (killed / PREDICTIONS).read_bytes().count(b"\n")
    with (killed / PREDICTIONS).open("ab") as torn:
        torn.write(b'{"id": "nq:1", "quest')
    finish(start_worker(options, work, killed, 1))
    resumed = json.loads((killed / RESULT).read_text())["time"]["resumed_rows"]
    print(f"killed after {left:,} rows, {resumed:,} of them kept", flush=True)

    finish(start_worker(options, work, two, 2))
    seconds = json.loads((two / RESULT).read_text())["time"]["seconds"]
    print(f"two ranks: {seconds:.0f} s", flush=True)
    return {
        "rows": timed["rows"],
        "rows_per_s": round(timed["rows_per_s"], 2),
        "rows_per_s_two_ranks": round(timed["rows"] / seconds, 2),
        "peak_rss_bytes": peak,
        "predictions_bytes": size,
        "resumed_rows": resumed,
        "resume_identical": resumed > 0 and outcome(killed) == outcome(whole),
        "ranks_identical": outcome(two) == outcome(whole),
    }


@dataclass(frozen=True)
class Contestant:
    """What is rolled out in batches of several sizes: a model folder and how it answers."""

    name: str
    path: Path
    template: str
    budget: Budget
    questions: list[Question]
    sizes: list[int]
    retriever: Retriever

    def engine(self, dtype: torch.dtype) -> HFEngine:
        return HFEngine(*load_policy(self.path, dtype=dtype))

    def roll_out(self, engine: HFEngine, size: int) -> list[Trajectory]:
        trajectories = []
        for start in range(0, len(self.questions), size):
            part, _ = rollout(
                engine, self.retriever, engine.tokenizer, PROTOCOLS[self.template],
                self.questions[start : start + size], group_size=1, budget=self.budget, sampling=GREEDY, top_k=3,
                seed=0, step=0,
            )  # fmt: skip
            trajectories += part
        return trajectories


def top_gap(exact: HFEngine, left: Trajectory, right: Trajectory) -> float:
    """Return the difference of the two best logits where two trajectories first differ, from a float64 forward."""
    place = next(n for n, (a, b) in enumerate(zip(left.ids, right.ids)) if a != b)
    with torch.no_grad():
        logits = exact.model(torch.tensor([left.ids[:place]])).logits[0, -1]
    best = logits.topk(2).values
    return float(best[0] - best[1])


def differing(contestant: Contestant, engine: HFEngine, dtype: torch.dtype) -> list[tuple[Trajectory, Trajectory]]:
    """Return the pairs of trajectories of one question that differ between the first batch size and another."""
    began = time.perf_counter()
    first, *others = [contestant.roll_out(engine, size) for size in contestant.sizes]
    pairs = [pair for run in others for pair in zip(first, run, strict=True) if pair[0].ids != pair[1].ids]
    tokens = sum(sum(trajectory.loss_mask) for trajectory in first)
    print(
        f"{contestant.name}, {dtype}, batches of {contestant.sizes}: {len(first):,} questions, {tokens:,} sampled "
        f"tokens, {len(pairs)} of {len(first) * len(others):,} trajectories differ "
        f"({time.perf_counter() - began:.0f} s)",
        flush=True,
    )
    return pairs


def check_batches(options: argparse.Namespace, work: Path) -> dict[str, Any]:
    """Roll out the same questions in batches of each size, in float64 and float32, with both models."""
    mix = mix_questions(work, 51713)
    passages = open_retriever(work / "passages.jsonl", work / "index")
    tiny = open_retriever(work / "tiny.jsonl", work / "tiny-index")
    few, many = (mix[:: len(mix) // max(n, 1)][:n] for n in (options.batch_questions, options.tiny_questions))
    contestants = [
        Contestant("SmolLM2", Path(options.model), "search_r1", SMOL_BUDGET, few, options.batch_sizes, passages),
        Contestant("tiny", work / "tiny", "plain", TINY_BUDGET, many, [32, 512], tiny),
    ]
    identical, gaps = True, []
    for contestant in (one for one in contestants if one.questions):
        exact = contestant.engine(torch.float64)
        identical &= not differing(contestant, exact, torch.float64)
        pairs = differing(contestant, contestant.engine(torch.float32), torch.float32)
        gaps += [top_gap(exact, *pair) for pair in pairs]
    print(
        "gaps of the two best logits at the first differing token:", ", ".join(f"{gap:.1e}" for gap in gaps) or "none"
    )
    return {
        "batch_identical": identical and all(gap < GAP for gap in gaps),
        "float32_differing": len(gaps),
        "float32_largest_gap": max(gaps, default=0.0),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--limit", type=int, default=10, help="questions of each benchmark for SmolLM2")
    parser.add_argument("--agents", nargs="*", default=list(AGENTS), choices=AGENTS)
    parser.add_argument("--passages", type=int, default=4000, help="wiki-18 passages to encode, of 9,569")
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"))
    parser.add_argument("--encoder", default=str(ROOT / "models" / "multilingual-e5-small"))
    parser.add_argument("--batch", type=int, default=20, help="questions at a time for SmolLM2")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, default=51713, help="rows of the test mix for the tiny model")
    parser.add_argument("--tiny-batch", type=int, default=512, help="questions at a time for the tiny model, all ranks")
    parser.add_argument("--batch-questions", type=int, default=16, help="questions rolled out in each batch size")
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--tiny-questions", type=int, default=10000, help="the same for the tiny model")
    parser.add_argument("--work", help="folder to work in, kept; default: a temporary one")
    parser.add_argument("--out", help=argparse.SUPPRESS)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    quieten()
    keep_freed_memory()
    if options.worker:
        worker(options)
        return 0
    if "SAPO_TEST_DATA" not in os.environ:
        print("SAPO_TEST_DATA does not name the folder of real questions and passages", file=sys.stderr)
        return 1
    data = Path(os.environ["SAPO_TEST_DATA"])
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as temporary:
        work = Path(options.work or temporary).resolve()
        work.mkdir(parents=True, exist_ok=True)
        files = [f"--file={name}={data / 'qa' / file}.jsonl" for name, file in FILES.items()]
        if data_main(["prepare", "--out", str(work / "data"), "--train", "", "--partial", *files]):
            return 1
        report: dict[str, Any] = {"vectors_wrong": check_vectors(data), "coverage": coverage()}
        print(f"coverage of 95 % intervals: {report['coverage']:.3f}", flush=True)
        report |= {"em": run_benchmarks(options, data, work)}
        report |= run_mix(options, data, work)
        report |= check_batches(options, work)
    print(json.dumps(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
