"""BM25 over the words of the passages, by bm25s: finds rare names that vectors blur. Lucene's formula, k1 1.5, b 0.75.

    bm25/meta.json       LexicalMeta, written last
    bm25/*.npy, *.json   the matrix of scores, word by passage, as bm25s keeps it
"""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import bm25s
import numpy as np

from retriever.corpus import Corpus, Document, file_fingerprint
from retriever.index import build_lock, refuse_to_overwrite
from retriever.types import IndexInfo, Passage, RetrieverError

FOLDER = "bm25"
META_FILE = "meta.json"
K1, B = 1.5, 0.75
_CACHED_DOCUMENTS = 1 << 16


@dataclass(frozen=True)
class LexicalMeta:
    """What a lexical index was built from, and its other files: `file_fingerprint` by name."""

    corpus_id: str
    passages: int
    words: int
    files: dict[str, str]
    k1: float = K1
    b: float = B
    stopwords: str = "english"


class LexicalRetriever:
    """BM25 search over a corpus; satisfies `Retriever`. Threads may share it.

    corpus: what the index of `folder` was built from. max_query_chars: characters of a query that are read.
    Raises RetrieverError when the index is missing, damaged or of another corpus.
    """

    def __init__(self, corpus: Corpus, folder: str | Path, *, max_query_chars: int = 1000) -> None:
        folder = Path(folder) / FOLDER
        try:
            self._meta = LexicalMeta(**json.loads((folder / META_FILE).read_text()))
            for name, fingerprint in self._meta.files.items():
                if file_fingerprint(folder / name) != fingerprint:
                    raise ValueError(f"{name} is cut, changed or of another build")
            self._bm25 = bm25s.BM25.load(folder, mmap=True, load_corpus=False)
        except FileNotFoundError as error:
            raise RetrieverError(
                f"{folder}: no lexical index here, or not all of it; build it with: python -m retriever.build "
                f"--kind bm25 --corpus {corpus.path} --out {folder.parent}"
            ) from error
        except (ValueError, TypeError, KeyError, AttributeError, EOFError, OSError) as error:
            raise RetrieverError(
                f"{folder}: damaged ({error}); move it away and build the lexical index again"
            ) from error
        if (self._meta.corpus_id, self._meta.passages) != (corpus.corpus_id, len(corpus)):
            raise RetrieverError(
                f"{corpus.path}: the lexical index {folder} was built from another corpus ({self._meta.passages} "
                f"passages, sha256 {self._meta.corpus_id[:12]}; this file has {len(corpus)}, sha256 "
                f"{corpus.corpus_id[:12]}); build it again or give the corpus it was built from"
            )
        self._document: Callable[[int], Document] = lru_cache(maxsize=_CACHED_DOCUMENTS)(corpus.__getitem__)
        self._max_query_chars = max_query_chars

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages that share a word with it, by BM25 score, best first.

        Raises ValueError unless k >= 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        return [self._search(query[: self._max_query_chars], k) for query in queries]

    def info(self) -> IndexInfo:
        """Return what is indexed; the dimension is the number of different words."""
        meta = self._meta
        encoder = f"bm25 k1={meta.k1:g} b={meta.b:g} stopwords={meta.stopwords}"
        return IndexInfo(meta.corpus_id, meta.passages, encoder, meta.words, "bm25")

    def _search(self, query: str, k: int) -> list[Passage]:
        words = self._bm25.get_tokens_ids(tokenize([query])[0])
        if not words:
            return []
        scores = self._bm25.get_scores_from_ids(words)  # [N]
        k = min(k, len(scores))
        rows = np.argpartition(-scores, k - 1)[:k]
        rows = rows[np.lexsort((rows, -scores[rows]))]
        return [Passage(*self._document(row), float(scores[row])) for row in rows.tolist() if scores[row] > 0]


def tokenize(texts: list[str]) -> list[list[str]]:
    """Return the lower-case words of two characters or more that are no English stop words.

    >>> tokenize(["Who wrote the song 'Heroes'?"])
    [['who', 'wrote', 'song', 'heroes']]
    """
    return bm25s.tokenize(texts, stopwords="english", return_ids=False, show_progress=False)


def has_lexical(folder: str | Path) -> bool:
    """Whether the index folder holds a finished lexical index."""
    return (Path(folder) / FOLDER / META_FILE).is_file()


def build_lexical(corpus_path: str | Path, folder: str | Path, *, overwrite: bool = False) -> LexicalMeta:
    """Count the words of every passage and write the lexical index into the index folder; it appears whole or not.

    It is made in memory: bm25s holds all words of the corpus as Python lists of numbers. Other builds of this folder
    wait. Raises FileExistsError when the folder is that of something else, or there is a lexical index without
    `overwrite`; RetrieverError for a bad corpus.
    """
    folder = Path(folder)
    place = folder / FOLDER
    _refuse_to_overwrite_lexical(folder, overwrite)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with build_lock(folder):
        _refuse_to_overwrite_lexical(folder, overwrite)  # another process may have been faster
        folder.mkdir(exist_ok=True)
        for left in folder.glob(f".{FOLDER}.*"):  # by a build that was killed
            shutil.rmtree(left)
        corpus = Corpus(corpus_path, cache_dir=folder)
        contents: Any = (corpus[row].contents for row in range(len(corpus)))
        tokens = bm25s.tokenize(contents, stopwords="english", show_progress=False)
        if not tokens.vocab:
            raise RetrieverError(f"{corpus.path}: no passage has a word that BM25 could count")
        bm25 = bm25s.BM25(k1=K1, b=B)
        bm25.index(tokens, show_progress=False)
        temporary, old = (folder / f".{FOLDER}.{uuid.uuid4().hex}{end}" for end in ("", ".old"))
        try:
            bm25.save(temporary, show_progress=False)
            files = {path.name: file_fingerprint(path) for path in sorted(temporary.iterdir())}
            meta = LexicalMeta(corpus.corpus_id, len(corpus), len(tokens.vocab), files)
            (temporary / META_FILE).write_text(json.dumps(asdict(meta), indent=2) + "\n")
            if place.exists():
                place.rename(old)
            temporary.rename(place)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            shutil.rmtree(old, ignore_errors=True)
    return meta


def _refuse_to_overwrite_lexical(folder: Path, overwrite: bool) -> None:
    """Raise FileExistsError unless a lexical index may be written into the index folder; only files of ours go."""
    refuse_to_overwrite(folder, overwrite, vectors=False)
    place = folder / FOLDER
    if not place.exists():
        return
    try:
        own = {META_FILE, *LexicalMeta(**json.loads((place / META_FILE).read_text())).files}
    except (ValueError, TypeError, OSError):
        own = set()
    names = {path.name for path in place.iterdir()} if place.is_dir() else {place.name}
    if foreign := sorted(names - own):
        raise FileExistsError(
            f"{place} holds files that are no part of a lexical index ({', '.join(foreign[:5])}): give another folder, "
            "or move them away"
        )
    if names and not overwrite:
        raise FileExistsError(f"{place} already holds a lexical index: give another folder, or ask to overwrite it")
