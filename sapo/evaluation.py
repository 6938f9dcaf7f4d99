"""Evaluate anything that answers questions: each question once, on any number of ranks, over any number of starts.

An `Answer` takes questions and returns prediction rows; `sapo/agents.py` has several. The rows of a batch are written
as soon as all ranks have them, in the order of the questions, so what a killed evaluation leaves is the beginning of
the whole file, and it goes on from there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapo.data import BENCHMARKS
from sapo.reward import cover_em, score
from sapo.statistics import mean_interval
from sapo.types import Question, Trajectory

Row = dict[str, Any]
Answer = Callable[[Sequence[Question]], list[Row]]  # the rows of a question's samples stand together
GatherRanks = Callable[[list[Any]], list[list[Any]]]  # this rank's rows -> the rows of every rank
Progress = Callable[[int, int, float], None]  # questions done, of how many, running EM

_TEXTS = ("question", "golden_answers", "answer", "turns")  # what a row holds beside its figures
_MEANS = (
    "em", "f1", "cover_em", "em_folded", "searches", "hit_rate", "prompt_tokens", "response_tokens", "sampled_tokens",
)  # fmt: skip


def prediction_row(
    question: Question,
    sample: int,
    answer: str | None,
    turns: Sequence[Mapping[str, Any]],
    *,
    truncated: bool,
    prompt_tokens: int,
    response_tokens: int,
    sampled_tokens: int,
) -> Row:
    """Return one readable JSON row: the question, what was done, and the scores of the answer.

    turns: text, action, content, finish, forged, passages (ids) and observation of each; one whose text is empty was a
    search that the agent did not ask for. `hit_rate` is 1 when a golden answer stands, as whole tokens, in one of the
    observations.
    """
    found = (turn["observation"] for turn in turns if turn["action"] == "search" and turn["observation"])
    return {
        "id": question.id,
        "question": question.question,
        "golden_answers": list(question.golden_answers),
        "source": question.source,
        "hops": question.hops,
        "sample": sample,
        "answer": answer,
        **score(answer, question.golden_answers)._asdict(),
        "searches": sum(turn["action"] == "search" and turn["observation"] != "" for turn in turns),
        "hit_rate": max((cover_em(text, question.golden_answers) for text in found), default=0.0),
        "written_turns": sum(turn["text"] != "" for turn in turns),
        "invalid_turns": sum(turn["action"] == "invalid" for turn in turns),
        "forged_turns": sum(turn["forged"] for turn in turns),
        "answered": answer is not None,
        "truncated": truncated,
        "prompt_tokens": prompt_tokens,
        "response_tokens": response_tokens,
        "sampled_tokens": sampled_tokens,
        "turns": [dict(turn) for turn in turns],
    }


def trajectory_row(trajectory: Trajectory) -> Row:
    """Return a trajectory as a prediction row."""
    turns = [
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
    ]
    return prediction_row(
        trajectory.question,
        trajectory.sample,
        trajectory.answer,
        turns,
        truncated=trajectory.truncated,
        prompt_tokens=len(trajectory.prompt_ids),
        response_tokens=len(trajectory.response_ids),
        sampled_tokens=sum(trajectory.loss_mask),
    )


def figures_of(row: Row) -> Row:
    """Return a row without its texts: what `summarise` needs, a tenth of the memory or less."""
    return {key: value for key, value in row.items() if key not in _TEXTS}


def per_question(rows: Sequence[Row], name: str) -> np.ndarray:
    """Return the mean of a figure over the samples of each question [questions], in the order of the rows."""
    sums: dict[str, list[float]] = {}
    for row in rows:
        sums.setdefault(row["id"], []).append(float(row[name]))
    return np.array([np.mean(values) for values in sums.values()])


def summarise(rows: Sequence[Row]) -> dict[str, Any]:
    """Return the figures of all rows, by number of hops where known, by benchmark, and averages over benchmarks.

    Scores are means over questions of the mean over samples (mean@k); with several samples `pass_em` is the share of
    questions with a right one (pass@k). Intervals are 95 % bootstrap intervals over questions. `averages` weighs each
    benchmark the same, as papers do, and says which ones it is of.
    """
    if not rows:
        raise ValueError("there are no questions to evaluate")
    hops = sorted({row["hops"] for row in rows if row["hops"] is not None})
    by_hops = {}
    for hop in hops:
        ems = per_question([row for row in rows if row["hops"] == hop], "em")
        by_hops[str(hop)] = {"n": len(ems), "em": float(ems.mean())}
    by_source: dict[str, list[Row]] = {}
    for row in rows:
        by_source.setdefault(row["source"], []).append(row)
    whole = _figures(rows)
    one = len(by_source) == 1
    benchmarks = {name: whole if one else _figures(part) for name, part in by_source.items()}
    return whole | {"by_hops": by_hops, "benchmarks": benchmarks, "averages": _averages(by_source)}


def _figures(rows: Sequence[Row]) -> dict[str, Any]:
    questions = len({row["id"] for row in rows})
    turns = sum(row["written_turns"] for row in rows)
    figures: dict[str, Any] = {"n": questions}
    for name in _MEANS:
        figures[name] = float(per_question(rows, name).mean())
    for name in ("em", "f1"):
        figures[f"{name}_interval"] = list(mean_interval(per_question(rows, name)))
    if len(rows) > questions:
        right: dict[str, bool] = {}
        for row in rows:
            right[row["id"]] = right.get(row["id"], False) or row["em"] == 1
        figures |= {"samples": len(rows) // questions, "pass_em": sum(right.values()) / questions}
        figures["pass_em_interval"] = list(mean_interval(np.array(list(right.values()))))
    return figures | {
        "turns": turns / len(rows),
        "invalid_frac": sum(row["invalid_turns"] for row in rows) / max(turns, 1),
        "forged_frac": sum(row["forged_turns"] for row in rows) / max(turns, 1),
        "answered_frac": sum(row["answered"] for row in rows) / len(rows),
        "truncated_frac": sum(row["truncated"] for row in rows) / len(rows),
    }


def _averages(by_source: Mapping[str, Sequence[Row]]) -> dict[str, Any]:
    known = [name for name in BENCHMARKS if name in by_source]
    groups = {
        "single_hop": [name for name in known if not BENCHMARKS[name].multi_hop],
        "multi_hop": [name for name in known if BENCHMARKS[name].multi_hop],
        "macro": known,
    }
    averages: dict[str, Any] = {}
    for group, names in groups.items():
        if not names:
            continue
        averages[group] = {"benchmarks": names}
        for score_name in ("em", "f1"):
            strata = [per_question(by_source[name], score_name) for name in names]
            averages[group][score_name] = float(np.mean([stratum.mean() for stratum in strata]))
            averages[group][f"{score_name}_interval"] = list(mean_interval(*strata))
    return averages


def evaluate_questions(
    answer: Answer,
    questions: Sequence[Question],
    *,
    batch_questions: int = 256,
    rank: int = 0,
    world_size: int = 1,
    gather: GatherRanks = lambda rows: [rows],
    done: Sequence[Row] = (),
    take: Callable[[list[Row]], None] = lambda rows: None,
    progress: Progress | None = None,
) -> list[Row]:
    """Answer every question once and return the figures of all rows, in the order of `questions`.

    Batches of batch_questions * world_size questions are dealt to the ranks in turn, and all ranks gather after each,
    so they make the same number of collective calls. done: figures of the rows of the first questions, whole batches.
    take: called with the rows of each batch, texts included. Every rank returns all.
    """
    figures = list(done)
    answered = len({row["id"] for row in figures})
    right = sum(row["em"] for row in figures)
    for start in range(answered, len(questions), batch_questions * world_size):
        batch = questions[start : start + batch_questions * world_size]
        mine = batch[rank::world_size]
        rows: dict[str, list[Row]] = {question.id: [] for question in batch}
        for part in gather(answer(mine) if mine else []):
            for row in part:
                rows[row["id"]].append(row)
        ordered = [row for question in batch for row in rows[question.id]]
        take(ordered)
        figures += map(figures_of, ordered)
        right += sum(row["em"] for row in ordered)
        if progress is not None:
            progress(start + len(batch), len(questions), right / len(figures))
    return figures


# Files ------------------------------------------------------------------------------------------------------------


def write_atomically(path: Path, text: str) -> None:
    """Write a text file so that a reader or a kill sees the old content or the new, never a part."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    os.replace(temporary, path)


def as_lines(rows: Iterable[Row]) -> str:
    """Return rows as JSONL."""
    return "".join(json.dumps(row) + "\n" for row in rows)


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as JSONL, atomically."""
    write_atomically(path, as_lines(rows))


class EvaluationFiles:
    """The files of one evaluation: `<name>.predictions.jsonl`, and `<name>.json` once it is complete.

    Until then `<name>.started.json` holds its conditions, so that nothing else is appended to its rows. Only one rank
    writes.
    """

    def __init__(self, folder: Path, name: str, conditions: Mapping[str, Any]) -> None:
        self.predictions = folder / f"{name}.predictions.jsonl"
        self.result = folder / f"{name}.json"
        self.started = folder / f"{name}.started.json"
        self.conditions: dict[str, Any] = json.loads(json.dumps(conditions))

    def finished(self) -> dict[str, Any] | None:
        """Return the result of a complete evaluation under the same conditions, None where there is none.

        Raises ValueError when the files are of an evaluation under other conditions, complete or not.
        """
        for path in (self.result, self.started):
            if not path.is_file():
                continue
            saved = json.loads(path.read_text(encoding="utf-8"))
            other = [key for key, value in self.conditions.items() if saved.get(key) != value]
            if other:
                details = "; ".join(
                    f"{key} is {_short(saved.get(key))} there, {_short(self.conditions[key])} here" for key in other
                )
                raise ValueError(
                    f"{path} is of another evaluation ({details}): give another --out, or --fresh to replace it"
                )
            if path == self.result:
                return saved
        if not self.started.is_file() and self.predictions.is_file() and self.predictions.stat().st_size:
            raise ValueError(
                f"{self.predictions} is there without {self.started.name} or {self.result.name}, so nobody knows what it "
                "is of: give another --out, or --fresh to replace it"
            )
        return None

    def begin(self) -> None:
        """Start anew. After a kill at any point no old row stands beside the new conditions."""
        self.result.unlink(missing_ok=True)
        self.predictions.parent.mkdir(parents=True, exist_ok=True)
        self.predictions.write_bytes(b"")
        write_atomically(self.started, json.dumps(self.conditions, indent=1) + "\n")

    def resume(self, questions: Sequence[Question], samples: int, batch: int) -> list[Row]:
        """Return the figures of the rows to keep, whole batches of `batch` questions, and cut the file after them.

        Rows count up to the first that is torn or not the next one; a batch that is not whole is computed again, so
        that its questions are rolled out together as in a run that was never stopped.
        """
        if not self.started.is_file() or not self.predictions.is_file():
            self.begin()
            return []
        kept: list[Row] = []
        ends = [0]
        with self.predictions.open("rb") as file:
            for number, line in enumerate(file):
                question = questions[number // samples] if number < samples * len(questions) else None
                try:
                    row = json.loads(line) if line.endswith(b"\n") else {}
                except ValueError:
                    break
                if question is None or (row.get("id"), row.get("sample")) != (question.id, number % samples):
                    break
                kept.append(figures_of(row))
                ends.append(ends[-1] + len(line))
        whole = len(kept) // samples
        if whole < len(questions):
            whole -= whole % batch
        os.truncate(self.predictions, ends[whole * samples])
        return kept[: whole * samples]

    def append(self, rows: Sequence[Row]) -> None:
        """Append rows, on the disk when this returns."""
        with self.predictions.open("ab") as file:
            file.write(as_lines(rows).encode())
            file.flush()
            os.fsync(file.fileno())

    def finish(self, result: Mapping[str, Any]) -> None:
        """Write the result, which makes the evaluation complete."""
        write_atomically(self.result, json.dumps(result, indent=1) + "\n")
        self.started.unlink(missing_ok=True)


def read_predictions(path: Path) -> Iterator[Row]:
    """Yield the rows of a predictions file. Raises ValueError naming a line that is no row."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            try:
                row = json.loads(line)
            except ValueError:
                row = None
            if not isinstance(row, dict) or not {"id", "sample", "em"} <= set(row):
                raise ValueError(f"{path}, line {number}: not a prediction row; evaluate again with --fresh")
            yield row


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 200 else f"{text[:200]}..."
