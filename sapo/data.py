"""Question files -> `Question`s with unique ids, and the order in which training draws them.

Files: JSONL of {id, question, golden_answers}, or parquet with the columns of Search-R1 (question, golden_answers or
reward_model.ground_truth.target, data_source).
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from sapo.types import Question

_SPARE = 1  # keys the draw of spare questions apart from that of the epochs


def load_questions(paths: Sequence[str | Path], limit: int | None = None) -> list[Question]:
    """Read the concatenation of `paths`, at most its first `limit` questions.

    A question's id is "<file stem>:<row>", rows counted from 1 (for JSONL the line number); a stem that occurs again
    gets "#2", "#3", ... The `id` field of a file is not used: it may repeat within and across files. `source` is the
    row's data_source, else the file stem; `hops` is the row's, if it is there.
    Raises ValueError naming file and row for a row without a question or answers, or that cannot be read.
    """
    questions: list[Question] = []
    stems: Counter[str] = Counter()
    for path in map(Path, paths):
        stems[path.stem] += 1
        name = path.stem if stems[path.stem] == 1 else f"{path.stem}#{stems[path.stem]}"
        for row, record in _records(path):
            if limit is not None and len(questions) == limit:
                return questions
            questions.append(_question(record, f"{name}:{row}", path.stem, f"{path}, row {row}"))
    return questions


def step_questions(questions: Sequence[Question], step: int, per_step: int, seed: int | None) -> list[Question]:
    """Return the `per_step` different questions of training step `step` (counted from 1).

    Each epoch is a permutation keyed by (seed, epoch), or the given order when `seed` is None, cut into
    len(questions) // per_step whole steps: no question repeats within an epoch, and the remainder of an epoch is left
    out (another one each time). The step number is the whole cursor, so a resumed run draws what it would have drawn.
    """
    if step < 1:
        raise ValueError(f"step is {step}: steps count from 1")
    if per_step > len(questions):
        raise ValueError(
            f"there are {len(questions)} training questions, but rollout.questions_per_step = {per_step} different "
            "ones are drawn at each step: add questions or lower it"
        )
    epoch, place = divmod(step - 1, len(questions) // per_step)
    chosen = slice(place * per_step, (place + 1) * per_step)
    if seed is None:
        return list(questions[chosen])
    order = np.random.default_rng((seed, epoch)).permutation(len(questions))
    return [questions[i] for i in order[chosen]]


def spare_questions(questions: Sequence[Question], step: int, per_step: int, seed: int | None) -> Iterator[Question]:
    """Yield the questions that step `step` does not draw, each once, to replace those of its own that teach nothing.

    Their order is a permutation keyed by (seed, step), or with `seed` None the given order from the step's questions
    on, round to the start. It depends on nothing else, and what `step_questions` draws does not depend on how many are
    taken here, so a resumed run draws what it would have drawn.
    """
    drawn = {question.id for question in step_questions(questions, step, per_step, seed)}
    if seed is None:
        start = (step - 1) % (len(questions) // per_step) * per_step
        order = [*range(start, len(questions)), *range(start)]
    else:
        order = np.random.default_rng((seed, step, _SPARE)).permutation(len(questions))
    return (questions[i] for i in order if questions[i].id not in drawn)


def _records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (row number from 1, row) of one file; blank lines are skipped but counted."""
    if path.suffix not in (".jsonl", ".parquet"):
        raise ValueError(f"{path}: question files are .jsonl or .parquet; convert it or rename it")
    if not path.is_file():
        raise ValueError(f"{path}: no such question file; correct the path in the config")
    if path.suffix == ".parquet":
        yield from _parquet_records(path)
        return
    with path.open("rb") as file:  # bytes: a text file would also be read for other encodings' line ends
        for row, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                record = json.loads(line.decode("utf-8-sig"))
            except ValueError as error:
                raise ValueError(f"{path}, row {row}: not a line of JSON in UTF-8 ({error})") from None
            if not isinstance(record, dict):
                raise ValueError(f"{path}, row {row}: a row is an object with question and golden_answers: {record!r}")
            yield row, record


def _parquet_records(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        file = pyarrow.parquet.ParquetFile(path)
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a parquet file ({error})") from None
    with file:
        wanted = ("question", "golden_answers", "reward_model", "data_source", "hops")
        columns = [name for name in file.schema_arrow.names if name in wanted]
        row = 0
        for batch in file.iter_batches(batch_size=4096, columns=columns):
            for record in batch.to_pylist():
                row += 1
                yield row, record


def _question(record: dict[str, Any], unique_id: str, stem: str, where: str) -> Question:
    question = record.get("question")
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: 'question' is {question!r}; give a text that is not empty or remove the row")
    answers = record.get("golden_answers")
    if answers is None:
        answers = _search_r1_target(record)
    if isinstance(answers, str):
        answers = [answers]
    texts = isinstance(answers, list) and all(isinstance(answer, str) for answer in answers)
    if not texts or not any(answer.strip() for answer in answers):
        raise ValueError(
            f"{where}: 'golden_answers' is {answers!r}; give a text or a list of texts, at least one not empty, "
            "or remove the row"
        )
    source = record.get("data_source") or stem
    hops = record.get("hops")
    if not isinstance(source, str) or not (hops is None or type(hops) is int):
        raise ValueError(f"{where}: 'data_source' must be a text and 'hops' an integer: {source!r}, {hops!r}")
    try:
        "".join((question, source, *answers)).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{where}: holds half of a surrogate pair, which no tokenizer takes ({error})") from None
    return Question(id=unique_id, question=question, golden_answers=tuple(answers), source=source, hops=hops)


def _search_r1_target(record: dict[str, Any]) -> Any:
    """Return reward_model.ground_truth.target, or None where a level is missing."""
    value: Any = record
    for key in ("reward_model", "ground_truth", "target"):
        value = value.get(key) if isinstance(value, dict) else None
    return value
