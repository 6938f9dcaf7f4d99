"""Score a policy on questions: one trajectory each, every question exactly once whatever the number of ranks."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from retriever.types import Retriever
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.protocol import Protocol
from sapo.reward import score
from sapo.rollout import Budget, rollout
from sapo.types import Question, Trajectory

GatherRanks = Callable[[list[Any]], list[list[Any]]]  # this rank's rows -> the rows of every rank


def trajectory_row(trajectory: Trajectory) -> dict[str, Any]:
    """Return a trajectory as one readable JSON row, with the scores of its answer."""
    question = trajectory.question
    return {
        "id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "source": question.source,
        "hops": question.hops,
        "sample": trajectory.sample,
        "answer": trajectory.answer,
        **score(trajectory.answer, question.golden_answers)._asdict(),
        "searches": trajectory.searches,
        "invalid_turns": trajectory.invalid_turns,
        "truncated": trajectory.truncated,
        "prompt_tokens": len(trajectory.prompt_ids),
        "response_tokens": len(trajectory.response_ids),
        "turns": [
            {
                "text": turn.text,
                "action": turn.action,
                "content": turn.content,
                "finish": turn.finish,
                "forged": turn.forged,
                "passages": [passage.id for passage in turn.passages],
                "observation": turn.observation,
            }
            for turn in trajectory.turns
        ],
    }


def summarise(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the means over prediction rows: scores, searches, shares, and EM by number of hops where known."""
    if not rows:
        raise ValueError("there are no questions to evaluate")
    count = len(rows)
    turns = sum(len(row["turns"]) for row in rows)
    hops = sorted({row["hops"] for row in rows if row["hops"] is not None})
    by_hops = {}
    for hop in hops:
        ems = [row["em"] for row in rows if row["hops"] == hop]
        by_hops[str(hop)] = {"n": len(ems), "em": sum(ems) / len(ems)}
    means = {name: sum(row[name] for row in rows) / count for name in ("em", "f1", "cover_em", "em_folded", "searches")}
    return {
        "n": count,
        **means,
        "invalid_frac": sum(row["invalid_turns"] for row in rows) / max(turns, 1),
        "answered_frac": sum(row["answer"] is not None for row in rows) / count,
        "truncated_frac": sum(row["truncated"] for row in rows) / count,
        "by_hops": by_hops,
    }


def evaluate_questions(
    engine: HFEngine,
    retriever: Retriever,
    tokenizer: PreTrainedTokenizerBase,
    protocol: Protocol,
    questions: Sequence[Question],
    *,
    budget: Budget,
    sampling: Sampling,
    top_k: int,
    seed: int,
    think_aware: bool = False,
    batch_questions: int = 256,
    rank: int = 0,
    world_size: int = 1,
    gather: GatherRanks = lambda rows: [rows],
    progress: Callable[[int, int], None] | None = None,
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Roll out one trajectory a question and return (summary, prediction rows in the order of `questions`).

    Each rank takes every world_size-th question, at most `batch_questions` at a time; `progress(done, of)` is called
    after each batch with this rank's counts. Every rank gets the whole result.
    """
    mine = list(questions[rank::world_size])
    rows: list[dict[str, Any]] = []
    for start in range(0, len(mine), batch_questions):
        trajectories, _ = rollout(
            engine,
            retriever,
            tokenizer,
            protocol,
            mine[start : start + batch_questions],
            group_size=1,
            budget=budget,
            sampling=sampling,
            top_k=top_k,
            seed=seed,
            step=0,
            think_aware=think_aware,
        )
        rows += [trajectory_row(trajectory) for trajectory in trajectories]
        if progress is not None:
            progress(len(rows), len(mine))
    by_id = {row["id"]: row for part in gather(rows) for row in part}
    ordered = [by_id[question.id] for question in questions]
    return summarise(ordered), ordered


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader or a kill sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def write_rows(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows as JSONL, atomically."""
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows))


def write_evaluation(folder: Path, name: str, result: dict[str, Any], rows: Sequence[dict[str, Any]]) -> None:
    """Write `<name>.json` and `<name>.predictions.jsonl` into `folder`; the summary last, so it means complete."""
    write_rows(folder / f"{name}.predictions.jsonl", rows)
    write_atomically(folder / f"{name}.json", json.dumps(result, indent=1) + "\n")
