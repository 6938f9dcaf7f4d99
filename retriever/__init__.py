"""Passage retrieval: corpus on disk, encoder, FAISS index, `search(queries, k)`. Knows nothing of `sapo`."""

from retriever.types import IndexInfo, Passage, Retriever, RetrieverError

__all__ = ["IndexInfo", "Passage", "Retriever", "RetrieverError"]
