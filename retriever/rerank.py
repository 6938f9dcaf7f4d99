"""A retriever whose best passages a cross-encoder puts in order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from retriever.pretrained import length_batches, quiet_loading
from retriever.types import IndexInfo, Passage, Retriever, RetrieverError

CANDIDATES = 20
_TOKENS_PER_FORWARD = 16_384


class RerankingRetriever:
    """The best passages of a retriever in the order of a cross-encoder, which reads query and passage together.

    name: folder or hub id of a sequence classifier with one output, such as cross-encoder/ms-marco-MiniLM-L12-v2.
    candidates: passages taken from the retriever for each query. max_length: tokens of query and passage.
    Raises RetrieverError when the model cannot be loaded.
    """

    def __init__(
        self,
        retriever: Retriever,
        name: str,
        *,
        candidates: int = CANDIDATES,
        max_length: int = 512,
        device: str | None = None,
    ) -> None:
        try:
            with quiet_loading():
                self._tokenizer: Any = AutoTokenizer.from_pretrained(name)
                model, loading = AutoModelForSequenceClassification.from_pretrained(
                    name, dtype=torch.float32, output_loading_info=True
                )
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise RetrieverError(f"reranker {name!r} cannot be loaded ({reason}); give its folder") from error
        if loading["missing_keys"] or model.config.num_labels != 1:
            raise RetrieverError(
                f"reranker {name!r} is no cross-encoder with one score ({model.config.num_labels} outputs, "
                f"{len(loading['missing_keys'])} weights missing); one is cross-encoder/ms-marco-MiniLM-L12-v2"
            )
        gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
        self._device = torch.device(device or ("cuda" if gpu else "cpu"))
        self._model = model.to(self._device, torch.float16 if gpu else torch.float32).eval()
        self._retriever = retriever
        self._name = name
        self._candidates = candidates
        self._max_length = min(max_length, self._tokenizer.model_max_length)

    def search(self, queries: list[str], k: int) -> list[list[Passage]]:
        """Return for each query at most `k` passages by the score (logit) of the cross-encoder, best first.

        Where query and passage are too long together, the longer of them is cut. Raises ValueError unless k >= 1.
        """
        if k < 1:
            raise ValueError(f"k must be at least 1, got {k}")
        found = self._retriever.search(queries, max(k, self._candidates))
        pairs = [(query, passage) for query, passages in zip(queries, found) for passage in passages]
        scores = iter(self._scores(pairs).tolist())
        scored = [[dataclasses.replace(passage, score=next(scores)) for passage in passages] for passages in found]
        return [sorted(passages, key=lambda passage: -passage.score)[:k] for passages in scored]

    def info(self) -> IndexInfo:
        """Return what is indexed; `encoder` also names the cross-encoder."""
        info = self._retriever.info()
        return dataclasses.replace(info, encoder=f"{info.encoder}, best {self._candidates} reranked by {self._name}")

    @torch.inference_mode()
    def _scores(self, pairs: Sequence[tuple[str, Passage]]) -> np.ndarray:
        """Return [N] float32 logits, pairs of similar length in one forward. The passage is read as "title text"."""
        scores = np.empty(len(pairs), np.float32)
        if not pairs:
            return scores
        texts = [f"{passage.title.strip(chr(34))} {passage.text}".strip() for _, passage in pairs]
        rows = self._tokenizer(
            [query for query, _ in pairs], texts, truncation="longest_first", max_length=self._max_length
        )
        for batch in length_batches([len(ids) for ids in rows["input_ids"]], _TOKENS_PER_FORWARD):
            inputs = self._tokenizer.pad(
                {key: [values[row] for row in batch] for key, values in rows.items()}, return_tensors="pt"
            ).to(self._device)
            scores[batch] = self._model(**inputs).logits[:, 0].float().cpu().numpy()
        return scores
