"""The index folder: FAISS vectors of a corpus, with what they were made from and by.

    meta.json            IndexMeta
    index.faiss          vectors, row n = corpus row n
    encoder.npz          what the encoder learned from the corpus; no arrays when it learns nothing
    corpus.offsets.npy   row offsets of the corpus, a cache
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from zipfile import BadZipFile

import faiss
import numpy as np

from retriever.corpus import Corpus
from retriever.encoder import Encoder, Settings, make_encoder
from retriever.types import IndexInfo, RetrieverError

META_FILE = "meta.json"
VECTORS_FILE = "index.faiss"
ENCODER_FILE = "encoder.npz"
FLAT = "flat_ip"  # exact inner product

Progress = Callable[[int, int], None]  # passages encoded, passages in all


@dataclass(frozen=True)
class IndexMeta:
    """What an index was built from: `corpus_id` of the corpus, `settings()` of the encoder."""

    corpus_id: str
    passages: int
    dim: int
    index_type: str
    encoder: Settings

    def info(self) -> IndexInfo:
        options = [f"{key}={value}" for key, value in self.encoder.items() if key != "name"]
        encoder = " ".join([str(self.encoder["name"]), *options])
        return IndexInfo(self.corpus_id, self.passages, encoder, self.dim, self.index_type)


@dataclass(frozen=True)
class PassageIndex:
    """An index in memory: `vectors` answers inner-product searches with corpus rows."""

    vectors: faiss.Index
    meta: IndexMeta


def has_index(folder: str | Path) -> bool:
    """Whether the folder holds a finished index."""
    return (Path(folder) / META_FILE).is_file()


def build_index(
    corpus_path: str | Path,
    folder: str | Path,
    encoder: Encoder,
    *,
    overwrite: bool = False,
    batch_size: int = 1024,
    progress: Progress | None = None,
) -> IndexMeta:
    """Fit the encoder, encode every passage and write the index folder.

    The folder appears complete or not at all: everything is written beside it and renamed at the end.

    overwrite: replace an index that is there. batch_size: passages encoded at a time.
    Raises FileExistsError when the folder holds anything else, or an index without `overwrite`; RetrieverError for a
    bad corpus.
    """
    folder = Path(folder)
    _refuse_to_overwrite(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{uuid.uuid4().hex}")
    temporary.mkdir()
    try:
        corpus = Corpus(corpus_path, cache_dir=temporary)
        encoder.fit(corpus[row].contents for row in range(len(corpus)))
        vectors = faiss.IndexFlatIP(encoder.dim)
        for start in range(0, len(corpus), batch_size):
            end = min(start + batch_size, len(corpus))
            vectors.add(encoder.encode_passages([corpus[row].contents for row in range(start, end)]))
            if progress:
                progress(end, len(corpus))
        faiss.write_index(vectors, str(temporary / VECTORS_FILE))
        np.savez(temporary / ENCODER_FILE, **encoder.state())
        meta = IndexMeta(corpus.corpus_id, len(corpus), encoder.dim, FLAT, encoder.settings())
        (temporary / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n")
        _publish(temporary, folder, overwrite)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return meta


def load_index(folder: str | Path) -> tuple[PassageIndex, Encoder]:
    """Open an index folder, vectors memory-mapped, with the encoder it was built with.

    Raises RetrieverError naming the file when it is missing, damaged or does not fit the others.
    """
    folder = Path(folder)
    meta = _read_meta(folder)
    vectors = _read_vectors(folder / VECTORS_FILE)
    if (vectors.ntotal, vectors.d) != (meta.passages, meta.dim):
        raise RetrieverError(
            f"{folder / VECTORS_FILE}: holds {vectors.ntotal} vectors of dim {vectors.d}, but {META_FILE} says "
            f"{meta.passages} of dim {meta.dim}; build the index again"
        )
    return PassageIndex(vectors, meta), _read_encoder(folder, meta)


def check_match(meta: IndexMeta, corpus: Corpus, encoder: Mapping[str, str | int | float | bool]) -> None:
    """Raise RetrieverError unless the index was built from this corpus with this encoder.

    encoder: the settings to compare; those left out may have any value.
    """
    if meta.corpus_id != corpus.corpus_id:
        raise RetrieverError(
            f"{corpus.path}: the index was built from another corpus or another version of it "
            f"({meta.passages} passages, sha256 {meta.corpus_id[:12]}; this file has {len(corpus)}, sha256 "
            f"{corpus.corpus_id[:12]}); build the index again or give the corpus it was built from"
        )
    different = [
        f"{key} is {meta.encoder.get(key)!r} in the index, {value!r} asked for"
        for key, value in encoder.items()
        if meta.encoder.get(key) != value
    ]
    if different:
        raise RetrieverError(
            f"the index was built with another encoder ({'; '.join(different)}); build the index again or ask for its "
            "own encoder"
        )


def build_command(corpus_path: str | Path, folder: str | Path) -> str:
    """Return the sentence that tells how to build an index."""
    return f"build it with: python -m retriever.build --corpus {corpus_path} --out {folder}"


def _refuse_to_overwrite(folder: Path, overwrite: bool) -> None:
    if has_index(folder):
        if not overwrite:
            raise FileExistsError(f"{folder} already holds an index: give another folder, or ask to overwrite it")
    elif folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise FileExistsError(f"{folder} exists and is not an index: give another folder or remove it")


def _publish(temporary: Path, folder: Path, overwrite: bool) -> None:
    """Rename the finished folder to its name; two processes may have built it at the same time."""
    _refuse_to_overwrite(folder, overwrite)
    if has_index(folder):
        old = temporary.with_name(f"{temporary.name}.old")
        folder.rename(old)
        temporary.rename(folder)
        shutil.rmtree(old)
        return
    try:
        temporary.rename(folder)
    except OSError as error:
        if has_index(folder):
            raise FileExistsError(f"{folder}: another process has just built this index") from error
        raise


def _read_meta(folder: Path) -> IndexMeta:
    path = folder / META_FILE
    try:
        return IndexMeta(**json.loads(path.read_text()))
    except FileNotFoundError as error:
        raise RetrieverError(
            f"{folder}: no index here ({META_FILE} is missing); {build_command('CORPUS', folder)}"
        ) from error
    except (ValueError, TypeError) as error:
        raise RetrieverError(f"{path}: not the description of an index ({error}); build the index again") from error


def _read_vectors(path: Path) -> faiss.Index:
    try:
        vectors = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC)
    except RuntimeError as error:
        reason = "missing" if not path.exists() else "damaged or not a FAISS index"
        raise RetrieverError(f"{path}: {reason}; build the index again") from error
    if vectors.metric_type != faiss.METRIC_INNER_PRODUCT:
        raise RetrieverError(f"{path}: scores must be inner products, this index has another metric; build it again")
    return vectors


def _read_encoder(folder: Path, meta: IndexMeta) -> Encoder:
    path = folder / ENCODER_FILE
    try:
        with np.load(path) as arrays:
            state = dict(arrays)
        return make_encoder(meta.encoder, state)
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        raise RetrieverError(
            f"{path}: cannot restore the encoder of the index ({error}); build the index again"
        ) from error
