"""Evaluate a run, or any model, on held-out questions.

    python evaluate.py --run runs/quickstart                       the world's or the config's held-out questions
    python evaluate.py --run runs/quickstart --data my.jsonl       rows of {id, question, golden_answers}
    python evaluate.py --config configs/qwen7b.yaml --model PATH   a model that was not trained here

Greedy by default. Writes <run>/eval/<name>.json (scores, decoding, template, corpus, commit) and
<name>.predictions.jsonl, prints a table, and with --json one JSON object as the last line.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from retriever.service import NullRetriever
from retriever.types import Retriever
from sapo.assemble import (
    connect_retriever_in_turn,
    evaluate_engine,
    evaluation_conditions,
    keep_freed_memory,
    load_sources,
    print_user_error,
    quieten,
    rollout_sampling,
)
from sapo.checkpoint import checkpoint_step, list_checkpoints
from sapo.config import Config, load_config
from sapo.data import load_questions
from sapo.distributed import Distributed, setup
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY
from sapo.policy import load_policy
from sapo.report import write_report
from sapo.types import Question


@dataclasses.dataclass(frozen=True)
class Job:
    """One evaluation: which model answers which way. `name` is that of its files, `label` that of its table row."""

    label: str
    name: str
    model: Path | str
    step: int | None
    decoding: str = "greedy"
    retrieval: bool = True


class Evaluator:
    """Runs jobs on one set of questions and keeps their results; one on disk with the same conditions is reused."""

    def __init__(
        self,
        config: Config,
        dist: Distributed,
        questions: list[Question],
        retriever: Retriever,
        folder: Path,
        fresh: bool,
    ) -> None:
        self.config = config
        self.dist = dist
        self.questions = questions
        self.retriever = retriever
        self.folder = folder
        self.fresh = fresh

    def run(self, job: Job) -> dict[str, Any]:
        """Return the result of one job, from disk or computed."""
        sampling = GREEDY if job.decoding == "greedy" else rollout_sampling(self.config)
        corpus = self.retriever.info() if job.retrieval else None
        conditions = evaluation_conditions(self.config, self.questions, sampling, str(job.model), job.step, corpus)
        saved = self.folder / f"{job.name}.json"
        if not self.fresh and saved.is_file():
            result = json.loads(saved.read_text(encoding="utf-8"))
            if all(result.get(key) == value for key, value in conditions.items()):
                return result
        model, tokenizer = load_policy(
            job.model, dtype=self.dist.weights_dtype, attn_implementation=self.config.model.attn_implementation
        )
        engine = HFEngine(model.to(self.dist.device), tokenizer, prefill_tokens=self.config.rollout.prefill_tokens)
        result = evaluate_engine(
            self.config,
            self.dist,
            engine,
            self.retriever if job.retrieval else NullRetriever(),
            self.questions,
            sampling,
            conditions,
            self.folder,
            job.name,
            progress=lambda done, of: self.say(f"\r{job.label}: {done}/{of} questions", end=""),
        )
        self.say("\r\x1b[K", end="")
        return result

    def say(self, text: str, end: str = "\n") -> None:
        """Print progress for people, on a terminal of the first rank only."""
        if self.dist.is_main and sys.stderr.isatty():
            print(text, end=end, file=sys.stderr, flush=True)


def plan_jobs(
    checkpoint: Path | None,
    start_model: str,
    fault_free: str | None,
    prefix: str,
    only: str | None,
    no_retrieval: bool,
    start_label: str = "before",
) -> list[Job]:
    """Return the evaluations: before and after, greedy and sampled, and what they are compared with."""
    decodings = ("greedy", "sampled") if only is None else (only,)
    after = start_model if checkpoint is None else checkpoint / "model"
    step = 0 if checkpoint is None else checkpoint_step(checkpoint)
    jobs = []
    for decoding in decodings:
        jobs.append(Job(start_label, f"{prefix}step_0_{decoding}", start_model, 0, decoding))
        if checkpoint is not None:
            jobs.append(Job(f"after {step} steps", f"{prefix}step_{step}_{decoding}", after, step, decoding))
        if fault_free:
            jobs.append(Job("fault-free warm start", f"{prefix}fault_free_{decoding}", fault_free, None, decoding))
    if no_retrieval and "greedy" in decodings:
        jobs.append(Job("after, nothing retrieved", f"{prefix}no_retrieval_greedy", after, step, "greedy", False))
    return jobs


def print_table(results: Sequence[tuple[Job, dict[str, Any]]]) -> None:
    """Print one line an evaluation, and under it the conditions that all share."""
    hops = sorted({hop for _, result in results for hop in result["by_hops"]})
    head = ["", "decoding", "EM", *(f"{hop}-hop" for hop in hops), "F1", "cover-EM", "searches", "invalid"]
    lines = [head]
    for job, result in results:
        by_hops = [f"{result['by_hops'][hop]['em']:.3f}" if hop in result["by_hops"] else "" for hop in hops]
        scores = [f"{result[name]:.3f}" for name in ("f1", "cover_em")]
        shares = [f"{result['searches']:.2f}", f"{result['invalid_frac']:.3f}"]
        lines.append([job.label, job.decoding, f"{result['em']:.3f}", *by_hops, *scores, *shares])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(w) if c == 0 else cell.rjust(w) for c, (cell, w) in enumerate(zip(line, widths))))
    result = results[0][1]
    corpus = result["corpus"] or {"passages": 0, "corpus_id": "none", "encoder": "none"}
    print(
        f"n={result['n']} from {', '.join(result['sources'])}; template {result['template']}, top-{result['top_k']} of "
        f"{corpus['passages']} passages (corpus {corpus['corpus_id'][:12]}, encoder {corpus['encoder']})"
    )


def run(options: argparse.Namespace) -> None:
    """Evaluate what the command line asks for."""
    if options.run:
        saved = Path(options.run) / "config.yaml"
        if not saved.is_file():
            raise ValueError(f"{options.run} is not a run folder: it has no config.yaml; train first, or correct --run")
        config = load_config(saved, options.overrides)
        folder = Path(options.run)
        record = folder / "run.json"
        models = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
        if "start_model" not in models:
            raise ValueError(f"{folder} stopped before its first step: go on with train.py --config {saved} --resume")
        start_model, fault_free = models["start_model"], models.get("fault_free_model")
        checkpoint = choose_checkpoint(folder, options.checkpoint)
    else:
        config = load_config(options.config, options.overrides)
        folder, checkpoint, start_model, fault_free = Path(options.out), None, options.model, None
    dist = setup(zero_stage=0, dtype=config.model.dtype, seed=config.seed)
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    sources = load_sources(config, write=dist.is_main)
    questions = load_questions([options.data]) if options.data else sources.heldout
    prefix = f"{Path(options.data).stem}_" if options.data else ""
    prefix += f"first_{options.questions}_" if options.questions else ""
    questions = questions[: options.questions or (None if options.data else config.eval.questions)]
    if not questions:
        raise ValueError("there are no held-out questions: give --data FILE, or set data.eval in the config")
    retriever = connect_retriever_in_turn(config, sources, dist)
    evaluator = Evaluator(config, dist, questions, retriever, folder / "eval", options.fresh)
    own = bool(options.run) and not options.data  # the run's own held-out questions: with everything to compare with
    jobs = plan_jobs(
        checkpoint,
        start_model,
        fault_free if own else None,
        prefix,
        options.decoding,
        no_retrieval=own and config.world is not None,
        start_label="before" if own or checkpoint is not None else "model",
    )
    results = [(job, evaluator.run(job)) for job in jobs]
    if dist.is_main:
        print_table(results)
        if options.run:
            print(f"report: {write_report(folder)}")
        if options.json:
            rows = [{"label": job.label, "decoding_name": job.decoding, **result} for job, result in results]
            print(json.dumps({"folder": str(folder / "eval"), "results": rows}))
        else:
            greedy = [result for job, result in results if job.decoding == "greedy" and job.retrieval]
            ends = [result for result in greedy if result["step"] is not None]
            if checkpoint is not None and len(ends) >= 2:
                before, after = ends[0], ends[1]
                print(f"held-out EM: before {before['em']:.3f} after {after['em']:.3f} (greedy, n={after['n']})")
    dist.end()


def choose_checkpoint(folder: Path, step: int | None) -> Path | None:
    """Return the newest checkpoint of a run, or the one of `step`; None for step 0, the starting model."""
    checkpoints = list_checkpoints(folder)
    if step == 0:
        return None
    if not checkpoints:
        raise ValueError(f"{folder} has no checkpoint yet: go on with --resume, or evaluate its start: --checkpoint 0")
    if step is None:
        return checkpoints[-1]
    for checkpoint in checkpoints:
        if checkpoint_step(checkpoint) == step:
            return checkpoint
    kept = ", ".join(str(checkpoint_step(checkpoint)) for checkpoint in checkpoints)
    raise ValueError(f"{folder} has no checkpoint of step {step}; it has {kept} (checkpoint.keep decides)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", help="a run folder; its config, starting model and newest checkpoint are used")
    parser.add_argument("--checkpoint", type=int, help="step of the run's checkpoint; 0 is the starting model")
    parser.add_argument("--config", help="without --run: the config to take template, budgets and retriever from")
    parser.add_argument("--model", help="with --config: Hugging Face folder or hub id")
    parser.add_argument("--out", help="with --config: folder for the results")
    parser.add_argument("--data", help="JSONL of {id, question, golden_answers} in place of the held-out questions")
    parser.add_argument("--questions", type=int, help="the first so many questions only")
    parser.add_argument("--decoding", choices=("greedy", "sampled"), help="one of the two; default: both")
    parser.add_argument("--fresh", action="store_true", help="compute again what is on disk already")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that differ from the config")
    options = parser.parse_intermixed_args(arguments)
    quieten()
    keep_freed_memory()
    if bool(options.run) == bool(options.config):
        parser.error("give either --run or --config with --model and --out")
    if options.config and not (options.model and options.out):
        parser.error("--config needs --model and --out")
    if options.questions is not None and options.questions < 1:
        parser.error("--questions is at least 1")
    try:
        run(options)
    except Exception as error:
        return print_user_error(error)
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
