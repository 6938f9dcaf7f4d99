"""Build the parts of a run from its config: what `train.py` and `evaluate.py` share. Only they see the whole Config."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from retriever.service import open_retriever
from retriever.types import IndexInfo, Retriever
from sapo.config import Config, ConfigError
from sapo.data import load_questions
from sapo.distributed import Distributed
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import GREEDY, Sampling
from sapo.evaluation import evaluate_questions, write_evaluation
from sapo.protocol import PROTOCOLS
from sapo.rollout import Budget
from sapo.types import Question
from sapo.world import make_world, write_corpus, write_questions

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
PACKAGES = ("torch", "transformers", "accelerate", "deepspeed", "faiss-cpu", "faiss-gpu", "numpy")


@dataclass(frozen=True)
class Sources:
    """Where questions and passages come from. heldout may be empty when the config names no held-out files."""

    train: list[Question]
    heldout: list[Question]
    corpus: Path | None
    index: Path | None


def quieten() -> None:
    """Keep libraries from drawing progress bars and notices over the run's own lines."""
    transformers.logging.disable_progress_bar()
    if not torch.cuda.is_available():
        os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed warns when it has to find that out itself


def keep_freed_memory() -> None:
    """Let malloc keep what is freed on a CPU (glibc), for the next tensor of that size.

    glibc hands each large buffer back to the system, which must clear its pages again for the next one: that takes most
    of the time of an operation with large temporaries. The process stays as large as it has ever been.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not torch.cuda.is_available():
        mallopt(M_MMAP_MAX, 0)
        mallopt(M_TRIM_THRESHOLD, 1 << 30)


def cache_folder(config: Config, kind: str, *parts: Any) -> Path:
    """Return the folder under <output_dir>/cache that belongs to these settings, and to no others."""
    digest = hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()[:12]
    return config.output_dir / "cache" / f"{kind}-{digest}"


def load_sources(config: Config, *, write: bool = True) -> Sources:
    """Load or make the questions and the corpus. `write`: make the world's files (one rank does).

    Raises ConfigError or ValueError naming the file, key or row that is wrong.
    """
    if config.world is None:
        train = load_questions(config.data.train, config.data.train_questions)
        heldout = load_questions(config.data.eval, config.data.eval_questions) if config.data.eval else []
        if len(train) < config.rollout.questions_per_step:
            raise ConfigError(
                f"data.train holds {len(train)} questions, but rollout.questions_per_step = "
                f"{config.rollout.questions_per_step} different ones are drawn at each step: lower it or add questions"
            )
        if len(train) == config.rollout.questions_per_step and config.rollout.resample_tries:
            raise ConfigError(
                f"data.train holds just the rollout.questions_per_step = {len(train)} questions that every step draws, "
                "so rollout.resample_tries has no other to replace one with: set it to 0, draw fewer or add questions"
            )
        return Sources(train, heldout, config.retriever.corpus, config.retriever.index)
    world = make_world(config.world, config.seed)
    folder = cache_folder(config, "world", config.world.model_dump(), config.seed)
    corpus = folder / "corpus.jsonl"
    if write and not (folder / "complete").exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_corpus(world, corpus)
        write_questions(world.train_questions, folder / "train.jsonl")
        write_questions(world.heldout_questions, folder / "heldout.jsonl")
        (folder / "complete").touch()
    return Sources(list(world.train_questions), list(world.heldout_questions), corpus, folder / "index")


def connect_retriever(config: Config, sources: Sources) -> Retriever:
    """Open the retriever that the config names. Raises RetrieverError or ConfigError when it cannot answer."""
    settings = config.retriever
    if settings.url:
        from retriever.client import RetrieverClient

        client = RetrieverClient(settings.url, timeout_s=settings.timeout_s, max_query_chars=settings.max_query_chars)
        client.search(["is anybody there?"], 1)  # an unreachable server is found before any long work
        return client
    if sources.corpus is None or sources.index is None:
        raise ConfigError("no retriever: set retriever.url, or retriever.corpus and retriever.index")
    return open_retriever(
        sources.corpus, sources.index, encoder=settings.encoder, max_query_chars=settings.max_query_chars
    )


def connect_retriever_in_turn(config: Config, sources: Sources, dist: Distributed) -> Retriever:
    """Open the retriever on every rank, the first rank before the others: it builds a small index that is missing."""
    retriever = connect_retriever(config, sources) if dist.is_main else None
    dist.barrier()
    return retriever or connect_retriever(config, sources)


def rollout_budget(config: Config) -> Budget:
    """Return the token budgets of a trajectory."""
    r = config.rollout
    return Budget(
        max_prompt_tokens=r.max_prompt_tokens,
        max_turn_tokens=r.max_turn_tokens,
        max_observation_tokens=r.max_observation_tokens,
        max_searches=r.max_searches,
        max_trajectory_tokens=r.max_trajectory_tokens,
    )


def rollout_sampling(config: Config) -> Sampling:
    """Return how training rollouts draw their tokens."""
    r = config.rollout
    return Sampling(
        temperature=r.temperature, top_p=r.top_p, top_k=r.top_k, min_p=r.min_p, logprobs=r.logprobs
    )


def eval_decodings(config: Config) -> dict[str, Sampling]:
    """Return the decodings of an evaluation during training, by the name of their result files."""
    temperature = config.eval.temperature
    decodings = {"greedy": GREEDY} if temperature == 0 else {"sampled": Sampling(temperature=temperature)}
    if config.eval.sampled:
        decodings["sampled"] = rollout_sampling(config)
    return decodings


def evaluation_conditions(
    config: Config,
    questions: Sequence[Question],
    sampling: Sampling,
    model: str,
    step: int | None,
    corpus: IndexInfo | None,
) -> dict[str, Any]:
    """Return everything that decides an evaluation's scores but the code; it is recorded with them.

    step: training steps behind the model, None when it is not of this run. corpus: None when nothing is retrieved.
    """
    content = json.dumps([(question.question, question.golden_answers) for question in questions])
    return {
        "step": step,
        "model": model,
        "decoding": dataclasses.asdict(sampling) | {"seed": config.seed},
        "n": len(questions),
        "questions_sha256": hashlib.sha256(content.encode()).hexdigest(),
        "sources": sorted({question.source for question in questions}),
        "template": config.protocol.template,
        "think_aware": config.protocol.think_aware,
        "budget": dataclasses.asdict(rollout_budget(config)),
        "top_k": config.retriever.top_k,
        "corpus": None if corpus is None else dataclasses.asdict(corpus),
    }


def evaluate_engine(
    config: Config,
    dist: Distributed,
    engine: HFEngine,
    retriever: Retriever,
    questions: Sequence[Question],
    sampling: Sampling,
    conditions: dict[str, Any],
    folder: Path,
    name: str,
    progress: Callable[[int, int], None] | None = None,
) -> dict[str, Any]:
    """Score the engine's model, write `<name>.json` and its predictions into `folder`, and return the result.

    conditions: of `evaluation_conditions`, recorded with the scores. All ranks must call; each gets the whole result.
    """
    summary, rows = evaluate_questions(
        engine,
        retriever,
        engine.tokenizer,
        PROTOCOLS[config.protocol.template],
        questions,
        budget=rollout_budget(config),
        sampling=sampling,
        top_k=config.retriever.top_k,
        seed=config.seed,
        think_aware=config.protocol.think_aware,
        batch_questions=config.rollout.max_rows
        or max(1, config.rollout.questions_per_step * config.rollout.group_size // dist.world_size),
        rank=dist.rank,
        world_size=dist.world_size,
        gather=dist.gather_objects,
        progress=progress,
    )
    result = conditions | summary | {"commit": source_commit()}
    if dist.is_main:
        write_evaluation(folder, name, result, rows)
    return result


@functools.cache
def source_commit() -> str | None:
    """Return the git commit of the code, with "+" when files differ from it; None outside a checkout."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")) != root:
            return None
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def package_versions() -> dict[str, str]:
    """Return the versions of Python and of the packages that decide a result."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return versions


def print_user_error(error: Exception) -> int:
    """Print an error that this project raised itself as one paragraph, re-raise any other; return exit status 1.

    An error of our own names the file, key or row and the fix; for a fault in the code the traceback is the message.
    """
    frame = traceback.extract_tb(error.__traceback__)[-1]
    root = Path(__file__).resolve().parent.parent
    own = Path(frame.filename).resolve().parent in (root, root / "sapo", root / "sapo" / "engine", root / "retriever")
    if not own or not isinstance(error, (ValueError, RuntimeError, FloatingPointError)):
        raise error
    print(f"error: {error}", file=sys.stderr, flush=True)
    return 1
