"""What a retriever is to the rest of the project: two records and one protocol."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol


class RetrieverError(RuntimeError):
    """A retriever could not be opened or did not answer; the message names the file or URL and the fix."""


@dataclass(frozen=True)
class Passage:
    """One retrieved passage. `title` keeps the quotes of the corpus file; `score` is the inner product."""

    id: str
    title: str
    text: str
    score: float


@dataclass(frozen=True)
class IndexInfo:
    """What an index holds, recorded with every result so that scores are comparable.

    `corpus_id` is a content hash of the corpus file; `encoder` names the encoder and its settings, which
    `encoder_settings` holds one by one where vectors are compared.
    """

    corpus_id: str
    passages: int
    encoder: str
    dim: int
    index_type: str
    encoder_settings: Mapping[str, str | int | float | bool] | None = field(default=None, hash=False)


class Retriever(Protocol):
    """Satisfied by the in-process service and by the HTTP client."""

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages, best first. Raises RetrieverError when it cannot answer."""
        ...

    def info(self) -> IndexInfo:
        """Return what is indexed."""
        ...
