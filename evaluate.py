"""Evaluate a run, any model, or a baseline: on held-out questions or on the seven benchmarks of the paper.

    python evaluate.py --run runs/quickstart                       the world's or the config's held-out questions
    python evaluate.py --run runs/quickstart --data my.jsonl       rows of {id, question, golden_answers}
    python evaluate.py --config configs/qwen3b-instruct.yaml --model PATH --benchmarks all --data-dir data --out evals/a
    python evaluate.py compare evals/a evals/b                     paired bootstrap and McNemar, and what flipped

With --config or --benchmarks each question is answered once (--samples k times), greedily or as --sampling says. The
predictions go into --out as they come, then the scores, a table beside the paper's and a page of transcripts; after a
stop the same command goes on. docs/evaluate.md has the details.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from retriever.service import NullRetriever
from retriever.types import Retriever
from sapo.agents import (
    AGENTS,
    Completer,
    EngineCompleter,
    chat_search_agent,
    direct_agent,
    ircot_agent,
    rag_agent,
    rollout_agent,
)
from sapo.assemble import (
    Sources,
    connect_retriever_in_turn,
    evaluate_engine,
    evaluation_batch,
    evaluation_conditions,
    keep_freed_memory,
    load_sources,
    model_sha256,
    print_user_error,
    quieten,
    record_evaluation,
    rollout_budget,
    rollout_sampling,
)
from sapo.checkpoint import checkpoint_step, list_checkpoints
from sapo.config import Config, load_config
from sapo.data import BENCHMARKS, load_benchmarks, load_questions
from sapo.distributed import Distributed, setup
from sapo.endpoint import Endpoint
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY, Sampling
from sapo.eval_report import TRANSCRIPTS, compare_evaluations, comparison_markdown, markdown, write_page
from sapo.evaluation import Answer, Progress, write_atomically
from sapo.metrics import format_duration
from sapo.policy import load_policy
from sapo.protocol import PROTOCOLS
from sapo.report import write_report
from sapo.types import Question

# Search-R1 asks for greedy validation, but the flag is lost on the way and its scores are of samples at temperature 1.
SEARCH_R1_SAMPLING = Sampling(temperature=1.0)
SAMPLINGS = ("greedy", "rollout", "search-r1")
LINE_EVERY_S = 60.0  # where progress is no live line


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
        engine = load_engine(self.config, self.dist, job.model)
        return evaluate_engine(
            self.config,
            self.dist,
            engine,
            self.retriever if job.retrieval else NullRetriever(),
            self.questions,
            sampling,
            conditions,
            self.folder,
            job.name,
            progress=show_progress(self.dist, job.label),
        )


def load_engine(config: Config, dist: Distributed, model: Path | str) -> HFEngine:
    """Load a model in the config's type and put the engine around it."""
    weights, tokenizer = load_policy(
        model, dtype=getattr(torch, config.model.dtype), attn_implementation=config.model.attn_implementation
    )
    return HFEngine(weights.to(dist.device), tokenizer, prefill_tokens=config.rollout.prefill_tokens)


def show_progress(dist: Distributed, label: str) -> Progress:
    """Return what shows questions done, running EM and the time left: a live line, or a line a minute."""
    began = shown = time.perf_counter()
    first: int | None = None  # done when the first batch of this start was: the resumed ones took no time

    def show(done: int, of: int, em: float) -> None:
        nonlocal shown, first, began
        if not dist.is_main:
            return
        now = time.perf_counter()
        rate = (done - first) / (now - began) if first is not None else 0.0
        left = f", {rate:.2f} a second, {format_duration((of - done) / rate)} left" if rate > 0 and done < of else ""
        if first is None:
            first, began = done, now
        line = f"{label}: {done:,}/{of:,} questions, EM {em:.3f}{left}"
        if sys.stderr.isatty():
            print(f"\r\x1b[K{line}" if done < of else "\r\x1b[K", end="", file=sys.stderr, flush=True)
        elif now - shown >= LINE_EVERY_S:
            shown = now
            print(line, file=sys.stderr, flush=True)

    return show


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


def load_run(options: argparse.Namespace) -> tuple[Config, dict[str, Any]]:
    """Return the config and the record of the run folder that --run names."""
    folder = Path(options.run)
    saved, record = folder / "config.yaml", folder / "run.json"
    if not saved.is_file():
        raise ValueError(f"{options.run} is not a run folder: it has no config.yaml; train first, or correct --run")
    config = load_config(saved, options.overrides)
    models = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else {}
    if "start_model" not in models:
        raise ValueError(f"{folder} stopped before its first step: go on with train.py --config {saved} --resume")
    return config, models


def start(config: Config) -> Distributed:
    """Join the other ranks, with the config's number of threads."""
    dist = setup(zero_stage=0, dtype=config.model.dtype, seed=config.seed)
    if config.model.threads is not None:
        torch.set_num_threads(config.model.threads)
    return dist


def evaluate_run(options: argparse.Namespace) -> None:
    """Evaluate a run before and after, greedy and sampled, beside what it is compared with."""
    config, models = load_run(options)
    folder = Path(options.run)
    checkpoint = choose_checkpoint(folder, options.checkpoint)
    dist = start(config)
    sources = load_sources(config, write=dist.is_main)
    questions = load_questions([options.data]) if options.data else sources.heldout
    prefix = f"{Path(options.data).stem}_" if options.data else ""
    prefix += f"first_{options.questions}_" if options.questions else ""
    questions = questions[: options.questions or (None if options.data else config.eval.questions)]
    if not questions:
        raise ValueError("there are no held-out questions: give --data FILE, or set data.eval in the config")
    retriever = connect_retriever_in_turn(config, sources, dist)
    evaluator = Evaluator(config, dist, questions, retriever, folder / "eval", options.fresh)
    own = not options.data  # the run's own held-out questions: with everything to compare with
    jobs = plan_jobs(
        checkpoint,
        models["start_model"],
        models.get("fault_free_model") if own else None,
        prefix,
        options.decoding,
        no_retrieval=own and config.world is not None,
        start_label="before" if own or checkpoint is not None else "model",
    )
    results = [(job, evaluator.run(job)) for job in jobs]
    if dist.is_main:
        print_table(results)
        print(f"report: {write_report(folder)}")
        if options.json:
            rows = [{"label": job.label, "decoding_name": job.decoding, **result} for job, result in results]
            print(json.dumps({"folder": str(folder / "eval"), "results": rows}))
        else:
            greedy = [result for job, result in results if job.decoding == "greedy" and job.retrieval]
            ends = [result for result in greedy if result["step"] is not None]
            if checkpoint is not None and len(ends) >= 2:
                before, after = ends[0], ends[1]
                what = Path(options.data).name if options.data else "held-out"
                print(f"{what} EM: before {before['em']:.3f} after {after['em']:.3f} (greedy, n={after['n']})")
    dist.end()


def evaluate_agent(options: argparse.Namespace) -> None:
    """Evaluate one agent on benchmarks or question files; go on with what an earlier start left."""
    if options.run:
        config, models = load_run(options)
        checkpoint = choose_checkpoint(Path(options.run), options.checkpoint)
        model = str(checkpoint / "model") if checkpoint is not None else models["start_model"]
        step = 0 if checkpoint is None else checkpoint_step(checkpoint)
        folder = Path(options.out) if options.out else Path(options.run) / "benchmarks" / f"step_{step}"
        label = options.label or f"{config.name}, step {step}"
    else:
        config, model, step, folder = (
            load_config(options.config, options.overrides),
            options.model,
            None,
            Path(options.out),
        )
        label = options.label or Path(model).name
    sampling = {"greedy": GREEDY, "rollout": rollout_sampling(config), "search-r1": SEARCH_R1_SAMPLING}[
        options.sampling
    ]
    questions, splits = agent_questions(options, config)
    dist = start(config)
    retriever: Retriever = NullRetriever()
    if options.agent != "direct":
        sources = Sources([], [], config.retriever.corpus, config.retriever.index)
        if config.world is not None:
            sources = load_sources(config, write=dist.is_main)
        retriever = connect_retriever_in_turn(config, sources, dist)
    corpus = None if options.agent == "direct" else retriever.info()
    answer, identity = make_agent(options, config, dist, model, retriever, sampling)
    conditions = evaluation_conditions(config, questions, sampling, model, step, corpus) | {
        "agent": options.agent,
        "template": config.protocol.template
        if options.agent == "search"
        else None,  # baselines have prompts of their own
        "sampling": options.sampling,
        "samples": options.samples,
        "splits": splits,
        "retriever": {
            "kind": config.retriever.kind,
            "reranker": config.retriever.reranker,
            "max_query_chars": config.retriever.max_query_chars,
        },
        **identity,
    }
    name = f"{options.agent}_{options.sampling}"
    result = record_evaluation(
        dist,
        answer,
        questions,
        conditions,
        folder,
        name,
        batch_questions=evaluation_batch(config, dist, options.samples),
        samples=options.samples,
        resume=not options.fresh,
        progress=show_progress(dist, label),
    )
    if dist.is_main:
        tables = markdown(result, label)
        write_atomically(folder / f"{name}.md", tables)
        page = write_page(folder, name, result, label, options.transcripts)
        print(f"{tables}\n{folder / name}.json, .predictions.jsonl, .md and {page}")
        if options.json:
            print(json.dumps({"folder": str(folder), "name": name, **result}))
    dist.end()


def agent_questions(options: argparse.Namespace, config: Config) -> tuple[list[Question], dict[str, str]]:
    """Return the questions that the command line names, and the split of each benchmark."""
    splits: dict[str, str] = {}
    if options.benchmarks:
        names = list(BENCHMARKS) if options.benchmarks == "all" else options.benchmarks.split(",")
        questions, splits = load_benchmarks(options.data_dir, names)
    elif options.data:
        questions = load_questions([options.data])
    else:
        questions = load_sources(config, write=False).heldout if config.world else load_questions(config.data.eval)
    if options.questions:
        sources = dict.fromkeys(question.source for question in questions)
        each = [[question for question in questions if question.source == source] for source in sources]
        questions = [question for part in each for question in part[: options.questions]]
    if not questions:
        raise ValueError(
            "there are no questions: give --benchmarks with --data-dir, --data FILE, or set data.eval in the config"
        )
    return questions, splits


def make_agent(
    options: argparse.Namespace,
    config: Config,
    dist: Distributed,
    model: str,
    retriever: Retriever,
    sampling: Sampling,
) -> tuple[Answer, dict[str, Any]]:
    """Return the agent that the command line names, and what identifies its model."""
    template, budget, top_k = PROTOCOLS[config.protocol.template], rollout_budget(config), config.retriever.top_k
    completer: Completer
    if options.endpoint:
        key = os.environ.get(options.api_key_env)
        completer = Endpoint(
            options.endpoint, model, sampling, max_tokens=budget.max_turn_tokens, seed=config.seed, key=key
        )
        identity: dict[str, Any] = {
            "endpoint": completer.url,
            "model_sha256": None,
            "chat_template": True,
            "dtype": None,
        }
    else:
        engine = load_engine(config, dist, model)
        if options.raw:
            engine.tokenizer.chat_template = None
        digest = dist.gather_objects(model_sha256(model) if dist.is_main else None)[0]
        identity = {
            "endpoint": None,
            "model_sha256": digest,
            "chat_template": bool(engine.tokenizer.chat_template),
            "dtype": config.model.dtype,
        }
        if options.agent == "search":
            agent = rollout_agent(
                engine,
                retriever,
                template,
                budget=budget,
                sampling=sampling,
                top_k=top_k,
                seed=config.seed,
                samples=options.samples,
                think_aware=config.protocol.think_aware,
            )
            return agent, identity
        completer = EngineCompleter(engine, sampling, budget, config.seed)
    if options.agent == "direct":
        return direct_agent(completer, samples=options.samples), identity
    if options.agent == "rag":
        return rag_agent(completer, retriever, top_k=top_k, samples=options.samples), identity
    searches = budget.max_searches
    if options.agent == "ircot":
        return ircot_agent(completer, retriever, top_k=top_k, max_searches=searches, samples=options.samples), identity
    agent = chat_search_agent(
        completer,
        retriever,
        template,
        top_k=top_k,
        max_searches=searches,
        samples=options.samples,
        think_aware=config.protocol.think_aware,
    )
    return agent, identity


def compare(arguments: Sequence[str]) -> None:
    """Compare two finished evaluations; print tables, and with --out write everything as JSON."""
    parser = argparse.ArgumentParser(
        prog="evaluate.py compare", description="Compare two evaluations of the same questions."
    )
    parser.add_argument("a", type=Path, help="result file of an evaluation (.json), or a folder that holds one")
    parser.add_argument("b", type=Path)
    parser.add_argument("--out", type=Path, help="JSON file for the comparisons and all questions that flipped")
    parser.add_argument("--flips", type=int, default=10, help="questions shown of those gained, and of those lost")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    options = parser.parse_args(arguments)
    comparison = compare_evaluations(result_file(options.a), result_file(options.b))
    print(comparison_markdown(comparison, options.flips))
    if options.out:
        write_atomically(options.out, json.dumps(comparison, indent=1) + "\n")
    if options.json:
        print(json.dumps(comparison))


def result_file(path: Path) -> Path:
    """Return the result file that a path names, itself or the only one in it."""
    if not path.is_dir():
        return path
    found = [file for file in sorted(path.glob("*.json")) if file.with_suffix(".predictions.jsonl").is_file()]
    if len(found) != 1:
        names = ", ".join(file.name for file in found) or "none"
        raise ValueError(f"{path} should hold one finished evaluation, it holds {names}: name the .json file")
    return found[0]


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
    raise ValueError(f"{folder} has no checkpoint of step {step}; it has {kept} (checkpoint.keep_last decides)")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; return the exit status."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["compare"]:
            compare(arguments[1:])
            return 0
        options = parse(arguments)
        quieten()
        keep_freed_memory()
        if options.config or options.benchmarks:
            evaluate_agent(options)
        else:
            evaluate_run(options)
    except Exception as error:
        return print_user_error(error)
    except KeyboardInterrupt:
        return 130
    return 0


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Return the options of an evaluation; leave with a message where they cannot be combined."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--run", help="a run folder; its config, starting model and newest checkpoint are used")
    parser.add_argument("--checkpoint", type=int, help="step of the run's checkpoint; 0 is the starting model")
    parser.add_argument("--config", help="without --run: the config to take template, budgets and retriever from")
    parser.add_argument("--model", help="with --config: Hugging Face folder or hub id, or its name at the --endpoint")
    parser.add_argument("--out", help="with --config or --benchmarks: folder for the results")
    parser.add_argument("--data", help="JSONL of {id, question, golden_answers} in place of the held-out questions")
    parser.add_argument("--questions", "--limit", type=int, help="the first so many questions (of each benchmark) only")
    parser.add_argument("--fresh", action="store_true", help="compute again what is on disk already")
    parser.add_argument("--json", action="store_true", help="print one JSON object as the last line")
    parser.add_argument("--decoding", choices=("greedy", "sampled"), help="of --run: one of the two; default: both")
    group = parser.add_argument_group("one agent on benchmarks (--config, or --run with --benchmarks)")
    group.add_argument("--benchmarks", help=f"'all', or of {', '.join(BENCHMARKS)}, joined by commas")
    group.add_argument("--data-dir", default="data", help="folder that python -m sapo.data prepare made")
    group.add_argument(
        "--sampling",
        choices=SAMPLINGS,
        default="greedy",
        help="rollout: as the config's rollouts; search-r1: temperature 1, which is how Search-R1's scores are sampled",
    )
    group.add_argument("--samples", type=int, default=1, help="answers to each question, for mean@k and pass@k")
    group.add_argument(
        "--agent",
        choices=AGENTS,
        default="search",
        help="search: with the config's template; baselines: direct answer, naive RAG, IRCoT-style",
    )
    group.add_argument("--raw", action="store_true", help="bare prompts, even where the tokenizer has a chat template")
    group.add_argument("--endpoint", help="base URL of an OpenAI-compatible server, as http://127.0.0.1:8000/v1")
    group.add_argument("--api-key-env", default="OPENAI_API_KEY", help="environment variable of the server's key")
    group.add_argument("--label", help="name of the row in the table")
    group.add_argument("--transcripts", type=int, default=TRANSCRIPTS, help="of each benchmark on the page")
    parser.add_argument("overrides", nargs="*", metavar="key.sub=value", help="settings that differ from the config")
    options = parser.parse_intermixed_args(arguments)
    if bool(options.run) == bool(options.config):
        parser.error("give either --run or --config with --model and --out")
    if options.config and not (options.model and options.out):
        parser.error("--config needs --model and --out")
    if options.questions is not None and options.questions < 1:
        parser.error("--questions is at least 1")
    if options.samples < 1 or (options.samples > 1 and options.sampling == "greedy"):
        parser.error(
            "--samples is at least 1, and more than 1 needs --sampling rollout or search-r1: greedy repeats itself"
        )
    if options.config or options.benchmarks:
        if options.decoding:
            parser.error("--decoding is for the held-out questions of --run: give --sampling")
    elif (
        options.sampling != "greedy"
        or options.samples > 1
        or options.agent != "search"
        or options.raw
        or options.endpoint
    ):
        parser.error("--sampling, --samples, --agent, --raw and --endpoint go with --benchmarks or --config")
    if options.config and options.checkpoint is not None:
        parser.error("--checkpoint chooses one of --run: give its folder as --model")
    if options.benchmarks and options.data:
        parser.error("give either --benchmarks or --data")
    if options.endpoint and options.raw:
        parser.error("--raw is for a model in this process: the server of --endpoint applies its own chat template")
    return options


if __name__ == "__main__":
    sys.exit(main())
