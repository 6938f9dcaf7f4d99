"""Passages on disk: a JSONL file with random access by row number.

Each line is `{"id": "...", "contents": "\\"Title\\"\\ntext"}`, the corpus format of Search-R1; other keys are ignored.
Rows are separated by "\\n" only: U+2028, U+0085 and "\\r" may occur inside a row. A file whose name ends in .gz is
unpacked once, into the cache folder. Half of a surrogate pair, which JSON can escape and UTF-8 cannot hold, is read as
U+FFFD in contents and refused in an id.
"""

from __future__ import annotations

import fcntl
import gzip
import hashlib
import json
import logging
import mmap
import os
import re
import shutil
import uuid
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from retriever.types import RetrieverError

OFFSETS_FILE = "corpus.offsets.npy"
# All that a Corpus writes into its cache folder: offsets, what a .gz file holds (by its fingerprint), halves of both.
CACHE_FILES = re.compile(
    r"corpus\.offsets\.npy|corpus\.[0-9a-f]{16}\.jsonl|\.corpus\.offsets\.npy\.[0-9a-f]{32}|\.corpus\.jsonl\.part"
)
_HEADER = 7  # int64 words before the row offsets: file size, modification time, fingerprint, sha256
_NO_UTF8 = {
    b"\xef\xbb\xbf": "it begins with a byte order mark; take it away with: tail -c +4 {path} > FILE",
    b"\xff\xfe": "it is UTF-16; make it UTF-8 with: iconv -f UTF-16 -t UTF-8 {path} > FILE",
    b"\xfe\xff": "it is UTF-16; make it UTF-8 with: iconv -f UTF-16 -t UTF-8 {path} > FILE",
    b"\x1f\x8b": "it is packed by gzip; give it a name that ends in .gz",
}
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
    offsets and the content hash are kept there and memory-mapped from then on, until size, modification time or
    `file_fingerprint` of the corpus file change. A .gz file needs a `cache_dir` with room for what it holds.

    corpus_id: sha256 of the file, 64 hex digits; of a .gz file, of what it holds.
    Raises RetrieverError naming the file and the line for a missing or empty file, a line that is not a JSON object,
    a missing or wrong `id` or `contents`, and an id that occurs twice.
    """

    def __init__(self, path: str | Path, cache_dir: str | Path | None = None) -> None:
        self.path = Path(path)
        try:
            if self.path.suffix.lower() == ".gz":
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
        stamp = _stamp(self.path, stat)
        table = _load_table(cache, stamp) if cache else None
        if table is None:
            table = np.concatenate([stamp, _scan(self.path)])
            if cache:
                _save_table(cache, table)
        self.corpus_id: str = table[3:_HEADER].tobytes().hex()
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
        return Document(fields["id"], *split_contents(_encodable(fields["contents"])))


def file_fingerprint(path: Path, blocks: int = 64, block_bytes: int = 4096) -> str:
    """Return 16 hex digits of a file's size and of evenly spread parts, first and last bytes included.

    It takes milliseconds for files of any size, finds one that is cut, replaced or of another build, but not every
    single changed byte.
    """
    digest = hashlib.sha256()
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        digest.update(str(size).encode())
        for start in np.linspace(0, max(0, size - block_bytes), blocks).astype(np.int64).tolist():
            file.seek(start)
            digest.update(file.read(block_bytes))
    return digest.hexdigest()[:16]


def _unpacked(path: Path, cache_dir: str | Path | None) -> Path:
    """Return the file that holds what the .gz file holds, made on first use; its name has the .gz file's fingerprint.

    The fingerprint has the last bytes of the .gz file, the checksum of what it holds. Processes that start together
    wait for the first.
    Raises RetrieverError for a damaged file, and without a cache folder that can be written.
    """
    by_hand = f"unpack it with: gunzip --stdout {path} > FILE, and give FILE"
    if cache_dir is None:
        raise RetrieverError(f"{path}: a corpus in .gz has no random access; {by_hand}")
    unpacked = Path(cache_dir) / f"corpus.{file_fingerprint(path)}.jsonl"
    if unpacked.exists():
        return unpacked
    try:
        with _locked_part(unpacked.with_name(".corpus.jsonl.part")) as part:
            if not unpacked.exists():
                _log.info("unpacking %s to %s, once", path, unpacked)
                with gzip.open(path) as packed, part.open("wb") as file:
                    shutil.copyfileobj(packed, file, 1 << 22)
                part.replace(unpacked)
                for old in unpacked.parent.glob("corpus.*.jsonl"):
                    if CACHE_FILES.fullmatch(old.name) and old != unpacked:
                        old.unlink(missing_ok=True)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise RetrieverError(f"{path}: cut or damaged gzip file ({error}); fetch it again") from error
    except OSError as error:
        raise RetrieverError(f"{path}: cannot be unpacked into {cache_dir} ({error.strerror}); {by_hand}") from error
    return unpacked


@contextmanager
def _locked_part(part: Path) -> Iterator[Path]:
    """Keep other processes from writing the file, and remove it in the end; one that was killed leaves no lock."""
    while True:
        with part.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            if not _is_at(file, part):  # the process that was waited for has given it its name, or removed it
                continue
            try:
                yield part
            finally:
                if _is_at(file, part):
                    part.unlink()
            return


def _is_at(file: BinaryIO, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    except FileNotFoundError:
        return False


def _encodable(text: str) -> str:
    """Return the text with U+FFFD for each half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _stamp(path: Path, stat: os.stat_result) -> np.ndarray:
    """Return [3] int64 by which a file is known again: size, modification time, fingerprint."""
    fingerprint = np.frombuffer(bytes.fromhex(file_fingerprint(path)), dtype=np.int64)
    return np.concatenate([np.array([stat.st_size, stat.st_mtime_ns]), fingerprint])


def _scan(path: Path) -> np.ndarray:
    """Read and check every row; return [4 + N] int64, sha256 and row offsets."""
    sha256 = hashlib.sha256()
    starts, lines, id_hashes = array("q"), array("q"), array("q")
    start = 0
    with path.open("rb") as file:
        head = file.read(4)
        for mark, what in _NO_UTF8.items():
            if head.startswith(mark):
                raise RetrieverError(f"{path}: a corpus is JSON lines in UTF-8, but {what.format(path=path)}")
        file.seek(0)
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
    return np.concatenate([np.frombuffer(sha256.digest(), dtype=np.int64), np.asarray(starts)])


def _checked_id(path: Path, line: int, raw: bytes) -> str:
    """Return the id of a row, or raise RetrieverError naming file, line and what is wrong."""
    try:
        fields = _decode_json(raw.decode())
    except (ValueError, RecursionError) as error:  # not UTF-8, not JSON, or nested too deep
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
    if _encodable(fields["id"]) != fields["id"]:
        raise RetrieverError(f"{path}, line {line}: the id {fields['id']!a} is no text, it has half a surrogate pair")
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


def _load_table(cache: Path, stamp: np.ndarray) -> np.ndarray | None:
    """Return the memory-mapped table [_HEADER + N] if it belongs to the file with this stamp, otherwise None."""
    try:
        table = np.load(cache, mmap_mode="r")
    except (OSError, ValueError, EOFError):  # missing, cut or foreign: it is only a cache
        return None
    fits = table.dtype == np.int64 and table.ndim == 1 and len(table) > _HEADER
    return table if fits and np.array_equal(table[: len(stamp)], stamp) else None


def _save_table(cache: Path, table: np.ndarray) -> None:
    """Write the table atomically, so that processes starting together never see half of it."""
    temporary = cache.with_name(f".{cache.name}.{uuid.uuid4().hex}")
    try:
        with temporary.open("wb") as file:
            np.save(file, table)
        temporary.replace(cache)
    except OSError:  # a read-only folder costs one scan at each start, nothing else
        temporary.unlink(missing_ok=True)
