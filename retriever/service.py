"""Answers `search(queries, k)` in this process."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

import faiss

from retriever.corpus import Corpus
from retriever.encoder import Encoder, Settings, make_encoder
from retriever.index import (
    PassageIndex,
    adopt_vectors,
    build_command,
    build_index,
    check_match,
    has_index,
    load_index,
    search_label,
    set_effort,
    shard_vectors,
)
from retriever.types import IndexInfo, Passage, Retriever, RetrieverError

MAX_QUERY_CHARS = 1000
BUILD_AT_OPEN_BYTES = 100_000_000  # a larger corpus is indexed by the build command, not by whoever opens it first
MATRIX_FROM_QUERIES = 3  # a flat index answers so many by a matrix product in less time than one by one
_CACHED_DOCUMENTS = 1 << 16

_log = logging.getLogger(__name__)


class RetrieverService:
    """Search over one corpus, index and encoder; satisfies `Retriever`. Threads may share it.

    threads: CPU threads that FAISS takes for one search; the encoder has those of torch. max_query_chars: characters of
    a query that are read; the rest is dropped.
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
        # in numbers (queries * dim); FAISS's own 128,000 leaves batches of under a hundred queries six times slower
        faiss.cvar.distance_compute_blas_threshold = MATRIX_FROM_QUERIES * index.meta.dim
        self._document = lru_cache(maxsize=_CACHED_DOCUMENTS)(corpus.__getitem__)
        self._index = index
        self._encoder = encoder
        self._threads = threads
        self._max_query_chars = max_query_chars

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages, best first, all queries encoded and compared as one batch.

        A blank query finds nothing, nor does one whose vector is zero: with the hashed encoder, one without any word of
        the corpus. Where more passages than `k` have the same score, as those with the same contents, which of them are
        found may depend on the batch.
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
            self._passages(row_list, score_list) if nonzero and query.strip() else []
            for query, row_list, score_list, nonzero in zip(queries, rows.tolist(), scores.tolist(), found.tolist())
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
    encoder: str | Mapping[str, str | int | float | bool] | None = None,
    kind: str = "dense",
    reranker: str = "",
    effort: int | None = None,
    gpu: bool = False,
    threads: int = 1,
    max_query_chars: int = MAX_QUERY_CHARS,
) -> Retriever:
    """Open an index with its corpus. Where there is none yet, build it first if the corpus is at most 100 MB.

    index_dir: the folder of the index, or a bare FAISS file such as Search-R1's e5_Flat.index, whose encoder must then
    be told. encoder: name, or settings with `name`; settings left out are those of the index, or the defaults when it
    is built; None is the index's own, or `hashed` when it is built. kind: `dense` compares vectors, `bm25` counts
    words, `hybrid` fuses the ranks of both. reranker: name of a cross-encoder that puts the best passages in order; ""
    is none. effort: lists that a search of an IVF index looks into, candidates of an HNSW search; None is as the index
    was built. gpu: hold the vectors in float16 on all GPUs, where every search is exact. `info` tells all of these but
    the number of GPUs. threads: see `RetrieverService`; BM25 takes one, a reranker those of torch.
    Raises RetrieverError when the index is missing and the corpus large, or when index, corpus and encoder do not
    match; ValueError for settings that do not exist.
    """
    if kind not in ("dense", "bm25", "hybrid"):
        raise ValueError(f"the kind of a retriever is dense, bm25 or hybrid, got {kind!r}")
    if effort is not None and effort < 1:
        raise ValueError(f"the effort of a search must be at least 1, got {effort}")
    retriever: Retriever
    path, asked = Path(index_dir), {"name": encoder} if isinstance(encoder, str) else dict(encoder or {})
    if kind == "bm25":
        retriever = _open_lexical(Path(corpus_path), path, max_query_chars)
    else:
        index, corpus, own_encoder = _open_vectors(Path(corpus_path), path, asked)
        label = index.meta.index_type
        if effort is not None:
            set_effort(index.vectors, effort)
            label = search_label(label.split()[0], index.vectors)
        if gpu:
            index = replace(index, vectors=shard_vectors(index.vectors, _gpus()))
            label = f"{label.split()[0]} in float16"
        index = replace(index, meta=replace(index.meta, index_type=label))
        retriever = RetrieverService(corpus, index, own_encoder, threads=threads, max_query_chars=max_query_chars)
    if kind == "hybrid":
        from retriever.fusion import HybridRetriever

        retriever = HybridRetriever(retriever, _open_lexical(Path(corpus_path), path, max_query_chars))
    if reranker:
        from retriever.rerank import RerankingRetriever

        retriever = RerankingRetriever(retriever, reranker)
    return retriever


def _open_vectors(corpus_path: Path, path: Path, asked: Settings) -> tuple[PassageIndex, Corpus, Encoder]:
    """Open corpus, vectors and encoder that belong together; a small index that is missing is built."""
    if path.is_file():
        if asked.get("name", "hashed") == "hashed":
            raise RetrieverError(
                f"{path}: a bare FAISS file does not say what it was built with: set retriever.encoder to its encoder, "
                "for Search-R1's e5_Flat.index intfloat/e5-base-v2"
            )
        cache: Path | None = path.with_name(f"{path.name}.cache")
        try:
            cache.mkdir(exist_ok=True)
        except OSError:  # nothing can be kept: the corpus is read at each start
            cache = None
        corpus, encoder = Corpus(corpus_path, cache_dir=cache), make_encoder(asked)
        return adopt_vectors(path, corpus, encoder), corpus, encoder
    if not has_index(path):
        _build_small(corpus_path, path, make_encoder({"name": "hashed"} | asked))
    index, encoder = load_index(path, asked)
    return index, Corpus(corpus_path, cache_dir=path), encoder


def _open_lexical(corpus_path: Path, folder: Path, max_query_chars: int) -> Retriever:
    from retriever.lexical import LexicalRetriever, build_lexical, has_lexical

    if folder.is_file():
        raise RetrieverError(
            f"{folder} is a file of vectors, but words are counted in an index folder; "
            f"{build_command(corpus_path, 'FOLDER')} --kind bm25"
        )
    if not has_lexical(folder):
        _refuse_to_build_large(corpus_path, folder)
        _log.info("building the lexical index %s over %s", folder, corpus_path)
        try:
            build_lexical(corpus_path, folder)
        except OSError as error:
            if not has_lexical(folder):  # otherwise another process of this run was first
                raise RetrieverError(_not_built(folder, error)) from error
    return LexicalRetriever(Corpus(corpus_path, cache_dir=folder), folder, max_query_chars=max_query_chars)


def _gpus() -> range:
    """Return the numbers of the GPUs that FAISS sees. Raises RetrieverError when there are none."""
    count = getattr(faiss, "get_num_gpus", lambda: 0)()
    if not count:
        raise RetrieverError(
            "FAISS sees no GPU: install faiss-gpu in place of faiss-cpu, or set retriever.gpu to false"
        )
    return range(count)


def _build_small(corpus_path: Path, index_dir: Path, encoder: Encoder) -> None:
    _refuse_to_build_large(corpus_path, index_dir)
    _log.info("building the index %s over %s", index_dir, corpus_path)
    try:
        build_index(corpus_path, index_dir, encoder)
    except OSError as error:
        if not has_index(index_dir):  # otherwise another process of this run was first
            raise RetrieverError(_not_built(index_dir, error)) from error


def _not_built(folder: Path, error: OSError) -> str:
    if error.errno is None:  # ours, which says what to do
        return str(error)
    return f"{folder}: no index can be built here ({error.strerror or error}); name a folder that can be written"


def _refuse_to_build_large(corpus_path: Path, index_dir: Path) -> None:
    if corpus_path.is_file() and corpus_path.stat().st_size > BUILD_AT_OPEN_BYTES:
        raise RetrieverError(f"{index_dir}: no index here; {build_command(corpus_path, index_dir)}")


@contextmanager
def _omp_threads(threads: int) -> Iterator[None]:
    """Set the OpenMP threads of the calling thread for a while: torch reads the same setting and must get it back."""
    before = faiss.omp_get_max_threads()
    faiss.omp_set_num_threads(threads)
    try:
        yield
    finally:
        faiss.omp_set_num_threads(before)
