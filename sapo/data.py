"""Question files -> `Question`s with unique ids, the order in which training draws them, and a command to make them.

Files: JSONL of {id, question, golden_answers}, or parquet with the columns of Search-R1 (question or prompt,
golden_answers or reward_model.ground_truth.target, data_source). `python -m sapo.data prepare` makes one format of
FlashRAG's benchmarks, Search-R1's parquet and such files: {id, question, golden_answers, data_source, split}.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sapo.types import Question

_SPARE = 1  # keys the draw of spare questions apart from that of the epochs


@dataclass(frozen=True)
class Benchmark:
    """A test set as FlashRAG has it. split: where its questions come from; of three benchmarks no test set is public.

    questions_sha256: beginning of `questions_hash` of the copy that was looked at, "" where none was.
    """

    split: str
    rows: int
    multi_hop: bool
    questions_sha256: str = ""


BENCHMARKS = {
    "nq": Benchmark("test", 3610, False, "e99d3dac82ff"),
    "triviaqa": Benchmark("test", 11313, False, "1a3a1470d833"),
    "popqa": Benchmark("test", 14267, False),
    "hotpotqa": Benchmark("dev", 7405, True, "aadf6640c3c4"),
    "2wikimultihopqa": Benchmark("dev", 12576, True, "95b21e3c115f"),
    "musique": Benchmark("dev", 2417, True, "c9dbaa99d3e6"),
    "bamboogle": Benchmark("test", 125, True, "a43831aefc82"),
}
TRAIN_ROWS = {"nq": 79168, "hotpotqa": 90447}
HUB = "RUC-NLPIR/FlashRAG_datasets"
HELD_OUT = 500  # training questions that validate, as in the paper


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
        raise ValueError(
            f"{path}: no such question file; correct the path in the config (data.train, data.eval). The paper's files are "
            "made by `python -m sapo.data prepare --out data`"
        )
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
        names = file.schema_arrow.names
        wanted = {"id", "question", "golden_answers", "reward_model", "data_source", "hops", "split"}
        columns = [name for name in names if name in wanted or name == "prompt" and "question" not in names]
        row = 0
        for batch in file.iter_batches(batch_size=4096, columns=columns):
            for record in batch.to_pylist():
                row += 1
                yield row, record


def _question(record: dict[str, Any], unique_id: str, stem: str, where: str) -> Question:
    question = record["question"] if "question" in record else _search_r1_question(record)
    if not isinstance(question, str) or not question.strip():
        raise ValueError(f"{where}: 'question' is {question!r}; give a text that is not empty or remove the row")
    answers = record.get("golden_answers")
    if answers is None:
        answers = _search_r1_target(record)
    if isinstance(answers, str):
        answers = [answers]
    elif isinstance(answers, (tuple, np.ndarray)):
        answers = list(answers)
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


def _search_r1_question(record: dict[str, Any]) -> str | None:
    """Return what follows the last "Question: " of Search-R1's `prompt`, a list of chat messages; None without it."""
    prompt = record.get("prompt")
    last = prompt[-1] if isinstance(prompt, (list, np.ndarray)) and len(prompt) else None
    content = last.get("content") if isinstance(last, dict) else None
    if not isinstance(content, str) or "Question: " not in content:
        return None
    return content.rpartition("Question: ")[2].strip()


# Prepared files ---------------------------------------------------------------------------------------------------


def load_benchmarks(folder: str | Path, names: Sequence[str]) -> tuple[list[Question], dict[str, str]]:
    """Read `<folder>/<name>.jsonl`, as `prepare` made them; return their questions and the split of each benchmark.

    Ids are the files' own, unique over all of them. Raises ValueError naming what is wrong, with the fix.
    """
    unknown = [name for name in names if name not in BENCHMARKS]
    if unknown or not names:
        named = ", ".join(map(repr, unknown)) or "''"
        raise ValueError(f"unknown benchmark {named}: choose of {', '.join(BENCHMARKS)}")
    if len(set(names)) < len(names):
        raise ValueError(f"benchmarks {', '.join(names)}: one is named twice")
    missing = [str(Path(folder) / f"{name}.jsonl") for name in names if not (Path(folder) / f"{name}.jsonl").is_file()]
    if missing:
        raise ValueError(f"no {', '.join(missing)}: make it with python -m sapo.data prepare --out {folder}")
    questions: list[Question] = []
    splits: dict[str, str] = {}
    seen: dict[str, str] = {}
    for name in names:
        path = Path(folder) / f"{name}.jsonl"
        for row, record in _records(path):
            where = f"{path}, row {row}"
            if record.get("data_source") != name or not record.get("id") or not record.get("split"):
                raise ValueError(
                    f"{where}: a prepared row has id, data_source = {name!r} and split; convert the file with "
                    f"python -m sapo.data prepare --file {name}={path} --out FOLDER"
                )
            question = _question(record, str(record["id"]), name, where)
            _no_double(seen, question.id, where)
            splits[name] = str(record["split"])
            questions.append(question)
        if name not in splits:
            raise ValueError(f"{path}: holds no question")
    return questions, splits


def _no_double(seen: dict[str, str], key: str, where: str) -> None:
    if key in seen:
        raise ValueError(
            f"{where}: id {key!r} is that of {seen[key]} too: give each row its own, or remove one of them"
        )
    seen[key] = where


def questions_hash(questions: Iterable[Question]) -> str:
    """Return a sha256 of the questions in order, whatever their ids, answers and final question marks."""
    texts = "\n".join(question.question.strip().rstrip("?").rstrip() for question in questions)
    return hashlib.sha256(texts.encode()).hexdigest()


@dataclass(frozen=True)
class Source:
    """Where the rows of a benchmark's split come from: files by "name" or "name:split", a folder, else the hub."""

    files: Mapping[str, Path]
    folder: Path | None

    def read(self, name: str, split: str, test: bool) -> tuple[str, Iterator[tuple[int, dict[str, Any]]]] | None:
        """Return (place, rows with their numbers) of one split; None when the folder or the files have none."""
        path = self.files.get(f"{name}:{split}") or (self.files.get(name) if test else None)
        if path is None and self.folder is not None:
            candidates = [self.folder / name / f"{split}{suffix}" for suffix in (".jsonl", ".parquet")]
            mixed = self.folder / ("test.parquet" if test else "train.parquet")  # Search-R1's: all data sets in one
            path = next((candidate for candidate in (*candidates, mixed) if candidate.is_file()), None)
            if path == mixed:
                rows = ((n, row) for n, row in _records(path) if row.get("data_source") == name)
                return str(path), rows
        if path is not None:
            return str(path), _records(path)
        return None if self.files or self.folder is not None else (f"{HUB} {name}/{split}", _hub_rows(name, split))


def _hub_rows(name: str, split: str) -> Iterator[tuple[int, dict[str, Any]]]:
    import datasets

    try:
        rows = datasets.load_dataset(HUB, name, split=split)
    except Exception as error:  # of the network, the hub or the files, each with a class of its own
        raise ValueError(
            f"{HUB}, {name}/{split} cannot be loaded ({type(error).__name__}: {str(error).splitlines()[0]}): without a "
            "network give the files, --source FOLDER or --file NAME=PATH"
        ) from None
    yield from enumerate(rows, start=1)


def prepare(
    out: Path,
    source: Source,
    *,
    test: Sequence[str] = tuple(BENCHMARKS),
    train: Sequence[str] = tuple(TRAIN_ROWS),
    held_out: int = HELD_OUT,
    seed: int = 0,
    partial: bool = False,
) -> dict[str, dict[str, Any]]:
    """Write one file for each test benchmark, `train.jsonl` and `heldout.jsonl`; return what each holds.

    held_out: training questions, drawn by `seed` among those whose text occurs once, that go to `heldout.jsonl`.
    partial: take fewer or more rows than FlashRAG has, and leave out what the source lacks. The same is written to
    `data.json`. Raises ValueError for a wrong count, a bad row, an id that occurs twice, or another file in the place
    of one to write; then nothing has been written.
    """
    seen: dict[str, str] = {}
    report: dict[str, dict[str, Any]] = {}
    texts: dict[str, str] = {}

    def rows_of(name: str, split: str, is_test: bool, known: int) -> list[dict[str, Any]]:
        found = source.read(name, split, is_test)
        if found is None:
            if partial:
                return []
            raise ValueError(
                f"no {name}/{split} in the source: give --file {name}:{split}=PATH, or --partial to go without"
            )
        place, records = found
        rows = []
        for number, record in records:
            question = _question(
                record, f"{name}:{record.get('id') or f'{split}_{number - 1}'}", name, f"{place}, row {number}"
            )
            _no_double(seen, question.id, f"{place}, row {number}")
            row: dict[str, Any] = {
                "id": question.id,
                "question": question.question,
                "golden_answers": list(question.golden_answers),
                "data_source": name,
                "split": split,
            }
            rows.append(row if question.hops is None else row | {"hops": question.hops})
        if len(rows) != known and not partial:
            raise ValueError(
                f"{place} holds {len(rows)} questions of {name}, but {name}/{split} has {known}: give the whole split, "
                "or --partial to take what is there"
            )
        return rows

    def add(file: str, rows: list[dict[str, Any]], split: str, known: int, questions_sha256: str = "") -> None:
        if not rows:
            return
        text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        hashed = questions_hash(Question("", row["question"], ()) for row in rows)
        texts[file] = text
        report[file] = {
            "rows": len(rows),
            "known_rows": known,
            "split": split,
            "sha256": hashlib.sha256(text.encode()).hexdigest(),
            "questions_sha256": hashed,
            "questions_known": hashed.startswith(questions_sha256) if questions_sha256 else None,
        }

    for name in test:
        known = BENCHMARKS[name]
        rows = rows_of(name, known.split, True, known.rows)
        add(f"{name}.jsonl", rows, known.split, known.rows, known.questions_sha256)
    mix = [row for name in train for row in rows_of(name, "train", False, TRAIN_ROWS[name])]
    if mix:
        once = Counter(row["question"] for row in mix)
        order = np.random.default_rng(seed).permutation(len(mix))
        drawn = {int(n) for n in [n for n in order if once[mix[n]["question"]] == 1][:held_out]}
        if len(drawn) < held_out or len(drawn) == len(mix):
            raise ValueError(f"{len(mix)} training questions cannot give {held_out} held-out ones: lower --held-out")
        total = sum(TRAIN_ROWS[name] for name in train)
        add("train.jsonl", [row for n, row in enumerate(mix) if n not in drawn], "train", total - held_out)
        add("heldout.jsonl", [row for n, row in enumerate(mix) if n in drawn], "train", held_out)
    if not texts:
        raise ValueError("the source holds none of the questions asked for: correct --source or --file")
    texts["data.json"] = json.dumps({"seed": seed, "files": report}, indent=1) + "\n"
    for file, text in texts.items():
        path = out / file
        if path.exists() and path.read_bytes() != text.encode():
            raise ValueError(f"{path} is there already with other content: remove it, or choose another --out")
    out.mkdir(parents=True, exist_ok=True)
    for file, text in texts.items():
        temporary = out / f"{file}.tmp"
        temporary.write_bytes(text.encode())
        os.replace(temporary, out / file)
    return report


def _print_report(report: Mapping[str, Mapping[str, Any]]) -> None:
    print(f"{'file':<24}{'split':<7}{'rows':>8}{'known':>9}  {'sha256':<18}questions")
    for file, entry in report.items():
        count = "" if entry["rows"] == entry["known_rows"] else "  PARTIAL"
        known = {None: "", True: "as known", False: "other than known"}[entry["questions_known"]]
        print(
            f"{file:<24}{entry['split']:<7}{entry['rows']:>8,}{entry['known_rows']:>9,}  {entry['sha256'][:16]}  "
            f"{known}{count}"
        )
    for label, part in (("test", set(BENCHMARKS)), ("training", {"train", "heldout"})):
        entries = [entry for file, entry in report.items() if file.removesuffix(".jsonl") in part]
        if entries:
            rows, known = (sum(entry[key] for entry in entries) for key in ("rows", "known_rows"))
            print(f"{label} mix: {rows:,} questions of {known:,}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Parse the command line; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m sapo.data", description="Bring question files into one format.")
    command = parser.add_subparsers(dest="command", required=True).add_parser(
        "prepare",
        help="make one JSONL file a benchmark, the training mix of NQ and HotpotQA, and its held-out questions",
        description=f"Without --source and --file, {HUB} of the Hugging Face hub is read.",
    )
    command.add_argument("--out", type=Path, required=True, help="folder to write to")
    command.add_argument(
        "--source",
        type=Path,
        help="folder of FlashRAG files (<name>/<split>.jsonl) or of Search-R1's train and test.parquet",
    )
    command.add_argument(
        "--file", action="append", default=[], metavar="NAME[:SPLIT]=PATH", help="JSONL or parquet of one benchmark"
    )
    command.add_argument("--test", default=",".join(BENCHMARKS), help="benchmarks, joined by commas; '' is none")
    command.add_argument("--train", default=",".join(TRAIN_ROWS), help="training sets; '' is none")
    command.add_argument("--held-out", type=int, default=HELD_OUT, help="training questions that validate")
    command.add_argument("--seed", type=int, default=0, help="of the draw of held-out questions")
    command.add_argument("--partial", action="store_true", help="take what is there, whatever its number of rows")
    options = parser.parse_args(arguments)
    test, train = ([name for name in text.split(",") if name] for text in (options.test, options.train))
    try:
        for name, known in [(name, BENCHMARKS) for name in test] + [(name, TRAIN_ROWS) for name in train]:
            if name not in known:
                raise ValueError(f"unknown data set {name!r}: choose of {', '.join(known)}")
        files = {}
        for text in options.file:
            key, equals, path = text.partition("=")
            if not equals or key.partition(":")[0] not in BENCHMARKS:
                raise ValueError(f"--file {text}: write NAME=PATH or NAME:SPLIT=PATH, NAME of {', '.join(BENCHMARKS)}")
            files[key] = Path(path)
        report = prepare(
            options.out,
            Source(files, options.source),
            test=test,
            train=train,
            held_out=options.held_out,
            seed=options.seed,
            partial=options.partial,
        )
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    _print_report(report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
