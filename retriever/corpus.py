"""Passages on disk: a JSONL file with random access by row number.

Each line is `{"id": "...", "contents": "\\"Title\\"\\ntext"}`, the corpus format of Search-R1; other keys are ignored.
Rows are separated by "\\n" only: U+2028, U+0085 and "\\r" may occur inside a row. A file whose name ends in .gz is
unpacked once, into the cache folder.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import logging
import mmap
import os
import shutil
import uuid
import zlib
from array import array
from pathlib import Path
from typing import NamedTuple

import numpy as np

from retriever.types import RetrieverError

OFFSETS_FILE = "corpus.offsets.npy"
UNPACKED_FILE = "corpus.jsonl"
_HEADER = 6  # int64 words before the row offsets: file size, modification time, sha256
_log = logging.getLogger(__name__)
_decode_json = json.JSONDecoder(strict=False).decode  # raw control characters in a string are no reason to refuse


class Document(NamedTuple):
    """One row of a corpus. `title` is the first line of the contents, with its quotes if it has any."""

    id: str
    title: str
    text: str

    @property
    def contents(self) -> str:
        """The contents exactly as the corpus file has them."""
        return f"{self.title}\n{self.text}" if self.title else self.text


def split_contents(contents: str) -> tuple[str, str]:
    """Return (title, text): the first line as it stands, and the rest. Contents of one line have no title.

    >>> split_contents('"Paris"\\nCapital of France.')
    ('"Paris"', 'Capital of France.')
    >>> split_contents("Capital of France.")
    ('', 'Capital of France.')
    """
    title, newline, text = contents.partition("\n")
    return (title, text) if title and newline else ("", contents)


class Corpus:
    """Read-only, thread-safe view of a corpus file: `corpus[row]` is a `Document`, rows count from 0.

    The first opening reads the whole file: it checks every row and notes where it starts. With `cache_dir` the row
    offsets and the content hash are kept there and memory-mapped from then on, until the size or the modification
    time of the corpus file changes. A .gz file needs a `cache_dir` with room for what it holds.

    corpus_id: sha256 of the file, 64 hex digits; of a .gz file, of what it holds.
    Raises RetrieverError naming the file and the line for a missing or empty file, a line that is not a JSON object,
    a missing or wrong `id` or `contents`, and an id that occurs twice.
    """

    def __init__(self, path: str | Path, cache_dir: str | Path | None = None) -> None:
        self.path = Path(path)
        try:
            if self.path.suffix == ".gz":
                self.path = _unpacked(self.path, cache_dir)
            with self.path.open("rb") as file:
                stat = os.fstat(file.fileno())
                if stat.st_size == 0:
                    raise RetrieverError(f"{self.path}: the corpus is empty; it needs one JSON object a line")
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise RetrieverError(
                f"{path}: cannot read the corpus ({error.strerror or error}); give the path of a JSONL file"
            ) from error
        cache = None if cache_dir is None else Path(cache_dir) / OFFSETS_FILE
        table = _load_table(cache, stat) if cache else None
        if table is None:
            table = _scan(self.path, stat)
            if cache:
                _save_table(cache, table)
        self.corpus_id: str = table[2:_HEADER].tobytes().hex()
        self._offsets = table[_HEADER:]  # [N] int64, first byte of each row

    def __len__(self) -> int:
        return len(self._offsets)

    def __getitem__(self, row: int) -> Document:
        """Return the document of a row. Raises IndexError outside 0..N-1: the -1 of FAISS is no document."""
        if not 0 <= row < len(self._offsets):
            raise IndexError(f"{self.path}: row {row} of {len(self._offsets)}")
        start = int(self._offsets[row])
        end = self._bytes.find(b"\n", start)
        fields = _decode_json(self._bytes[start : end if end >= 0 else None].decode())
        return Document(fields["id"], *split_contents(fields["contents"]))


def _unpacked(path: Path, cache_dir: str | Path | None) -> Path:
    """Return the file that holds what the .gz file holds, made on first use; it has the .gz file's time.

    Raises RetrieverError for a damaged file and without a cache folder, OSError when the disk is full.
    """
    if cache_dir is None:
        raise RetrieverError(f"{path}: a corpus in .gz has no random access; unpack it with: gunzip --keep {path}")
    time_ns = path.stat().st_mtime_ns
    unpacked = Path(cache_dir) / UNPACKED_FILE
    if unpacked.exists() and unpacked.stat().st_mtime_ns == time_ns:
        return unpacked
    _log.info("unpacking %s to %s, once", path, unpacked)
    temporary = unpacked.with_name(f".{UNPACKED_FILE}.{uuid.uuid4().hex}")
    try:
        with gzip.open(path) as packed, temporary.open("wb") as file:
            shutil.copyfileobj(packed, file, 1 << 22)
        os.utime(temporary, ns=(time_ns, time_ns))
        temporary.replace(unpacked)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RetrieverError(f"{path}: cut or damaged gzip file ({error}); fetch it again") from error
    finally:
        temporary.unlink(missing_ok=True)
    return unpacked


def _scan(path: Path, stat: os.stat_result) -> np.ndarray:
    """Read and check every row; return the table [_HEADER + N] int64 described at `_HEADER`."""
    sha256 = hashlib.sha256()
    starts, lines, id_hashes = array("q"), array("q"), array("q")
    start = 0
    with path.open("rb") as file:
        for line, raw in enumerate(file, 1):
            sha256.update(raw)
            if not raw.isspace():
                starts.append(start)
                lines.append(line)
                id_hashes.append(hash(_checked_id(path, line, raw)))
            start += len(raw)
    if not starts:
        raise RetrieverError(f"{path}: the corpus has no rows; it needs one JSON object a line")
    _refuse_duplicate_ids(path, np.asarray(starts), np.asarray(lines), np.asarray(id_hashes))
    digest = np.frombuffer(sha256.digest(), dtype=np.int64)
    return np.concatenate([np.array([stat.st_size, stat.st_mtime_ns]), digest, np.asarray(starts)])


def _checked_id(path: Path, line: int, raw: bytes) -> str:
    """Return the id of a row, or raise RetrieverError naming file, line and what is wrong."""
    try:
        fields = _decode_json(raw.decode())
    except ValueError as error:  # not UTF-8, or not JSON
        raise RetrieverError(f"{path}, line {line}: not valid JSON ({error}); write one JSON object a line") from error
    if not isinstance(fields, dict):
        raise RetrieverError(f"{path}, line {line}: expected a JSON object, found {type(fields).__name__}")
    for key in ("id", "contents"):
        if not isinstance(fields.get(key), str):
            found = f"its type is {type(fields[key]).__name__}" if key in fields else f"it has {sorted(fields)}"
            raise RetrieverError(
                f'{path}, line {line}: the row needs a string "{key}" but {found}; rows look like '
                '{"id": "0", "contents": "\\"Title\\"\\ntext"}'
            )
    return fields["id"]


def _refuse_duplicate_ids(path: Path, starts: np.ndarray, lines: np.ndarray, hashes: np.ndarray) -> None:
    """Raise RetrieverError when two rows have one id. Hashes keep this small for millions of rows; all arrays [N]."""
    order = np.argsort(hashes, kind="stable")
    first_line: dict[str, int] = {}
    repeated = hashes[order][1:] == hashes[order][:-1]
    suspects = order[np.concatenate([repeated, [False]]) | np.concatenate([[False], repeated])]
    with path.open("rb") as file:
        for row in sorted(suspects):
            file.seek(starts[row])
            row_id = _decode_json(file.readline().decode())["id"]
            if row_id in first_line:
                raise RetrieverError(
                    f'{path}: lines {first_line[row_id]} and {lines[row]} have the same id "{row_id}"; '
                    "ids must be unique"
                )
            first_line[row_id] = int(lines[row])


def _load_table(cache: Path, stat: os.stat_result) -> np.ndarray | None:
    """Return the memory-mapped table if it belongs to the file that `stat` describes, otherwise None."""
    try:
        table = np.load(cache, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # missing, cut or foreign: it is only a cache
        return None
    fits = table.dtype == np.int64 and table.ndim == 1 and len(table) > _HEADER
    return table if fits and table[0] == stat.st_size and table[1] == stat.st_mtime_ns else None


def _save_table(cache: Path, table: np.ndarray) -> None:
    """Write the table atomically, so that processes starting together never see half of it."""
    temporary = cache.with_name(f".{cache.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            np.save(file, table)
        temporary.replace(cache)
    except OSError:  # a read-only folder costs one scan at each start, nothing else
        temporary.unlink(missing_ok=True)
