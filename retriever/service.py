"""Answers `search(queries, k)` in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path

import faiss

from retriever.corpus import Corpus
from retriever.encoder import Encoder, make_encoder
from retriever.index import PassageIndex, build_command, build_index, check_match, has_index, load_index
from retriever.types import IndexInfo, Passage, RetrieverError

MAX_QUERY_CHARS = 1000
BUILD_AT_OPEN_BYTES = 100_000_000  # a larger corpus is indexed by the build command, not by whoever opens it first
_CACHED_DOCUMENTS = 1 << 16

_log = logging.getLogger(__name__)


class RetrieverService:
    """Search over one corpus, index and encoder; satisfies `Retriever`. Threads may share it.

    threads: CPU threads of one search. max_query_chars: characters of a query that are read; the rest is dropped.
    Raises RetrieverError when corpus, index and encoder do not belong together.
    """

    def __init__(
        self,
        corpus: Corpus,
        index: PassageIndex,
        encoder: Encoder,
        *,
        threads: int = 1,
        max_query_chars: int = MAX_QUERY_CHARS,
    ) -> None:
        if threads < 1 or max_query_chars < 1:
            raise ValueError(f"threads and max_query_chars must be at least 1, got {threads} and {max_query_chars}")
        check_match(index.meta, corpus, encoder.settings())
        self._document = lru_cache(maxsize=_CACHED_DOCUMENTS)(corpus.__getitem__)
        self._index = index
        self._encoder = encoder
        self._threads = threads
        self._max_query_chars = max_query_chars

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages, best first, all queries encoded and compared as one batch.

        A query whose vector is zero finds nothing: with the hashed encoder, one without any word of the corpus.
        Raises ValueError unless k >= 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        if not queries:
            return []
        vectors = self._encoder.encode_queries([query[: self._max_query_chars] for query in queries])
        with _omp_threads(self._threads):
            scores, rows = self._index.vectors.search(vectors, min(k, self._index.meta.passages))
        found = vectors.any(axis=1)
        return [
            self._passages(row_list, score_list) if nonzero else []
            for row_list, score_list, nonzero in zip(rows.tolist(), scores.tolist(), found.tolist())
        ]

    def info(self) -> IndexInfo:
        """Return what is indexed."""
        return self._index.meta.info()

    def _passages(self, rows: list[int], scores: list[float]) -> list[Passage]:
        # FAISS fills up with row -1 where it has fewer than k
        return [Passage(*self._document(row), score) for row, score in zip(rows, scores) if row >= 0]


class NullRetriever:
    """Finds nothing, whatever is asked: shows how much of a score comes from searching."""

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        return [[] for _ in queries]

    def info(self) -> IndexInfo:
        return IndexInfo(corpus_id="", passages=0, encoder="none", dim=0, index_type="none")


def open_retriever(
    corpus_path: str | Path,
    index_dir: str | Path,
    *,
    encoder: str | Mapping[str, str | int | float | bool] = "hashed",
    threads: int = 1,
    max_query_chars: int = MAX_QUERY_CHARS,
) -> RetrieverService:
    """Open an index with its corpus. Where there is none yet, build it first if the corpus is at most 100 MB.

    encoder: name, or settings with `name`; settings left out are those of the index, or the defaults when it is built.
    Raises RetrieverError when the index is missing and the corpus large, or when index, corpus and encoder do not
    match; ValueError for encoder settings that do not exist.
    """
    asked = {"name": encoder} if isinstance(encoder, str) else dict(encoder)
    if not has_index(index_dir):
        _build_small(Path(corpus_path), Path(index_dir), make_encoder(asked))
    index, own_encoder = load_index(index_dir)
    corpus = Corpus(corpus_path, cache_dir=index_dir)
    check_match(index.meta, corpus, asked)
    return RetrieverService(corpus, index, own_encoder, threads=threads, max_query_chars=max_query_chars)


def _build_small(corpus_path: Path, index_dir: Path, encoder: Encoder) -> None:
    if corpus_path.is_file() and corpus_path.stat().st_size > BUILD_AT_OPEN_BYTES:
        raise RetrieverError(f"{index_dir}: no index here; {build_command(corpus_path, index_dir)}")
    _log.info("building the index %s over %s", index_dir, corpus_path)
    try:
        build_index(corpus_path, index_dir, encoder)
    except FileExistsError as error:
        if not has_index(index_dir):  # otherwise another process of this run was first
            raise RetrieverError(str(error)) from error


@contextmanager
def _omp_threads(threads: int) -> Iterator[None]:
    """Set the OpenMP threads of the calling thread for a while: torch reads the same setting and must get it back."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
