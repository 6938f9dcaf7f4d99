"""Text to vectors: the encoder interface and the built-in encoder that needs no weights."""

from __future__ import annotations

import hashlib
import inspect
import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache, partial
from typing import Protocol

import numpy as np

from retriever.corpus import split_contents
from retriever.types import RetrieverError

Settings = dict[str, str | int | float | bool]
State = dict[str, np.ndarray]

_WORD = re.compile(r"\w+")
_BLOCKS = 8  # signed entries of a term's vector
_GOLDEN = 0x9E3779B97F4A7C15  # 2^64 / golden ratio, the increment of SplitMix64
_MASK64 = (1 << 64) - 1


class Encoder(Protocol):
    """What builds an index and answers queries. Vectors of passages and queries are compared by inner product."""

    name: str
    dim: int

    def settings(self) -> Settings:
        """Return `name` and all else that changes a vector; kept in the index and compared when it is opened."""
        ...

    def state(self) -> State:
        """Return the arrays `fit` learned, for `make_encoder`; empty for an encoder that learns nothing."""
        ...

    def fit(self, contents: Iterable[str]) -> None:
        """Learn from the whole corpus what `encode_passages` needs. A pretrained encoder does nothing."""
        ...

    def encode_passages(self, contents: list[str]) -> np.ndarray:
        """Return [N, dim] float32 vectors of passages given as in the corpus file, title line first."""
        ...

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        """Return [N, dim] float32 vectors of queries."""
        ...


def make_encoder(settings: Mapping[str, str | int | float | bool], state: State | None = None) -> Encoder:
    """Make an encoder from its `settings()`, with the `state()` of a fitted one.

    The name `hashed` is the built-in encoder, any other a model of `PretrainedEncoder`.
    Raises ValueError for an unknown setting, a missing one or a value out of range; RetrieverError when the model
    cannot be loaded or is another one.
    """
    options = dict(settings)
    name = options.pop("name", None)
    if not isinstance(name, str) or not name:
        raise ValueError(f"the encoder's name must be 'hashed', a model folder or a hub id, got {name!r}")
    make: Callable[..., Encoder]
    if name == HashedEncoder.name:
        make = partial(HashedEncoder, state=state)
    else:
        from retriever.pretrained import PretrainedEncoder  # brings torch and transformers

        make = partial(PretrainedEncoder, name)
    known = set(inspect.signature(make).parameters) - {"state"}
    if unknown := sorted(set(options) - known):
        raise ValueError(f"encoder {name!r} does not take these settings: {unknown}; known: {sorted(known)}")
    return make(**options)


@lru_cache(maxsize=1 << 18)
def word_hash(word: str) -> int:
    """Return 64 bits of the word's BLAKE2b: the same in every process and on every machine."""
    return int.from_bytes(hashlib.blake2b(word.encode(), digest_size=8).digest(), "little")


def words_of(text: str) -> list[str]:
    """Split into lower-case words without accents.

    >>> words_of("Beyoncé's 3rd album")
    ['beyonce', 's', '3rd', 'album']
    """
    text = text.lower()
    if not text.isascii():
        text = "".join(c for c in unicodedata.normalize("NFKD", text) if not unicodedata.combining(c))
    return _WORD.findall(text)


class HashedEncoder:
    """tf-idf vectors of words and adjacent word pairs, randomly projected to `dim`, of length 1.

    The weight of a term is (1 + ln tf) * idf on both sides, with idf = ln(1 + (N - df + 1/2) / (df + 1/2)). A word of
    the title counts `title_weight` times. A pair has `pair_weight` times the smaller idf of its two words. A word that
    no passage of the corpus has gets weight 0: it could match nothing and would only add noise; text without any known
    word has the zero vector. Each term is projected by 8 signed entries, one in each eighth of the vector, chosen by
    hashing: the inner product is that of the tf-idf vectors plus noise of standard deviation about dim**-0.5.
    (Kane and Nelson, "Sparser Johnson-Lindenstrauss Transforms", 2014.)

    dim: multiple of 8. Raises ValueError for settings out of range, RetrieverError when used before `fit`.
    """

    name = "hashed"

    def __init__(
        self,
        dim: int = 1024,
        title_weight: float = 3.0,
        pair_weight: float = 0.5,
        seed: int = 0,
        state: State | None = None,
    ) -> None:
        if dim < _BLOCKS or dim % _BLOCKS:
            raise ValueError(f"encoder dim must be a positive multiple of {_BLOCKS}, got {dim}")
        if title_weight < 1 or pair_weight < 0 or seed < 0:
            raise ValueError(
                "encoder needs title_weight >= 1, pair_weight >= 0 and seed >= 0, got "
                f"title_weight={title_weight}, pair_weight={pair_weight}, seed={seed}"
            )
        self.dim = dim
        self.title_weight = float(title_weight)
        self.pair_weight = float(pair_weight)
        self.seed = seed
        streams = [(seed * _BLOCKS + block + 1) * _GOLDEN & _MASK64 for block in range(_BLOCKS)]
        self._streams = np.array(streams, dtype=np.uint64)  # [8]
        unfitted = {"words": np.empty(0, np.uint64), "df": np.empty(0, np.int64), "passages": np.int64(0)}
        self._set_state(state or unfitted)

    def settings(self) -> Settings:
        return {
            "name": self.name,
            "dim": self.dim,
            "title_weight": self.title_weight,
            "pair_weight": self.pair_weight,
            "seed": self.seed,
        }

    def state(self) -> State:
        """Return `words` [V] uint64 sorted hashes, `df` [V] int64 passages with each, `passages` [] int64 in all."""
        return {"words": self._words, "df": self._df, "passages": self._passages}

    def fit(self, contents: Iterable[str]) -> None:
        """Count in how many passages each word occurs."""
        counts: Counter[str] = Counter()
        passages = 0
        for passage in contents:
            counts.update(set(words_of(passage)))
            passages += 1
        words = np.fromiter(map(word_hash, counts), np.uint64, len(counts))
        order = np.argsort(words)
        df = np.fromiter(counts.values(), np.int64, len(counts))
        self._set_state({"words": words[order], "df": df[order], "passages": np.int64(passages)})

    def encode_passages(self, contents: list[str]) -> np.ndarray:
        split = map(split_contents, contents)
        fields = [words_of(field) for title_and_text in split for field in title_and_text]
        return self._encode(fields, np.tile([self.title_weight, 1.0], len(contents)), fields_per_row=2)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode([words_of(query) for query in queries], np.ones(len(queries)), fields_per_row=1)

    def _set_state(self, state: State) -> None:
        self._words, self._df, self._passages = state["words"], state["df"], state["passages"]
        self._idf = np.log1p((self._passages - self._df + 0.5) / (self._df + 0.5))  # [V] float64

    def _encode(self, fields: list[list[str]], field_weights: np.ndarray, fields_per_row: int) -> np.ndarray:
        """Return [rows, dim] float32; `fields` are the words of each field, `fields_per_row` consecutive ones a row."""
        if not len(self._words):
            raise RetrieverError("the hashed encoder knows no corpus: call fit, or make it with the state of an index")
        rows = len(fields) // fields_per_row
        lengths = np.fromiter(map(len, fields), np.int64, len(fields))
        words = np.fromiter((word_hash(w) for field in fields for w in field), np.uint64, int(lengths.sum()))  # [W]
        field = np.repeat(np.arange(len(fields)), lengths)  # [W]
        idf = self._lookup_idf(words)  # [W]

        adjacent = np.flatnonzero(field[1:] == field[:-1])  # left word of each pair
        pairs = _mix(words[adjacent] * np.uint64(_GOLDEN) + words[adjacent + 1])
        pair_idf = self.pair_weight * np.minimum(idf[adjacent], idf[adjacent + 1])

        terms = np.concatenate([words, pairs])
        weights = np.concatenate([idf, pair_idf])
        term_field = np.concatenate([field, field[adjacent]])
        return self._project(term_field // fields_per_row, terms, field_weights[term_field], weights, rows)

    def _lookup_idf(self, words: np.ndarray) -> np.ndarray:
        """Return the idf of each word hash, 0 for a word the corpus does not have."""
        place = np.minimum(np.searchsorted(self._words, words), len(self._words) - 1)
        return np.where(self._words[place] == words, self._idf[place], 0.0)

    def _project(
        self, row: np.ndarray, terms: np.ndarray, counts: np.ndarray, weights: np.ndarray, rows: int
    ) -> np.ndarray:
        """Sum equal terms of a row to tf, weight them, project, normalise: [rows, dim]. All inputs [E], any order."""
        known = np.flatnonzero(weights)
        order = known[np.lexsort((terms[known], row[known]))]
        row, terms, counts, weights = row[order], terms[order], counts[order], weights[order]
        new = np.ones(len(order), dtype=bool)
        new[1:] = (terms[1:] != terms[:-1]) | (row[1:] != row[:-1])
        first = np.flatnonzero(new)  # [U], one per different term of a row
        tf = np.add.reduceat(counts, first) if len(first) else np.empty(0)
        weights = (1 + np.log(tf)) * weights[first]

        width = self.dim // _BLOCKS
        bits = _mix(terms[first, None] + self._streams)  # [U, 8]
        column = ((bits >> np.uint64(32)) % np.uint64(width)).astype(np.int64) + width * np.arange(_BLOCKS)
        signed = np.where(bits & np.uint64(1), -weights[:, None], weights[:, None])  # [U, 8]
        flat = np.bincount(
            (row[first, None] * self.dim + column).ravel(), weights=signed.ravel(), minlength=rows * self.dim
        )
        vectors = flat.reshape(rows, self.dim).astype(np.float32)
        norms = np.linalg.norm(vectors, axis=1, keepdims=True)
        return np.divide(vectors, norms, out=vectors, where=norms > 0)


def _mix(x: np.ndarray) -> np.ndarray:
    """SplitMix64's finaliser (Steele, Lea and Flood, 2014), uint64 to uint64 with every bit depending on every bit."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
