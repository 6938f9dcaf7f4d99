"""Sentence encoders with weights: E5, BGE, GTE, Contriever, and others whose pooling and prefixes are told."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer
from transformers.utils import logging

from retriever.encoder import Settings, State
from retriever.types import RetrieverError

POOLINGS = ("mean", "cls", "last")
# What the authors of each family trained with, by the name of the model.
FAMILIES: dict[str, Settings] = {
    r"(multilingual-)?e5-(small|base|large)(-v2)?": {
        "pooling": "mean",
        "query_prefix": "query: ",
        "passage_prefix": "passage: ",
        "normalize": True,
    },
    r"bge-(small|base|large)-en(-v1\.5)?": {
        "pooling": "cls",
        "query_prefix": "Represent this sentence for searching relevant passages: ",
        "passage_prefix": "",
        "normalize": True,
    },
    r"gte-(small|base|large)": {"pooling": "mean", "query_prefix": "", "passage_prefix": "", "normalize": True},
    r"contriever(-msmarco)?": {"pooling": "mean", "query_prefix": "", "passage_prefix": "", "normalize": False},
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
MAX_LENGTH = 512

_PROBE = "Who wrote “Hamlet” in 1600?"
_CPU_TOKENS, _GPU_TOKENS = 4096, 131_072  # in one forward, padding included


class PretrainedEncoder:
    """Vectors of a transformer: prefix + text -> last hidden states [T, dim] -> one vector by `pooling`.

    name: model folder or hub id. pooling: `mean` over the tokens, `cls` (the first token) or `last`. query_prefix,
    passage_prefix: put before every text. normalize: to length 1. All four are known for the names of `FAMILIES`,
    otherwise they must be given. max_length: tokens of a text with its prefix, the rest is cut.
    weights: fingerprint that the model must have, as `settings` returns it; "" takes any.
    device: of torch; None is the current GPU, or the CPU without one. dtype: of the forward pass; None is float16 on a
    GPU and float32 on a CPU. bfloat16 on a CPU is for the matrix products of passages: with AVX512-BF16 an index over
    E5-small vectors is built 2.4 times as fast, and on HotpotQA loses .001 of its recall at 5 to float32, none at 1, 3
    and 10; without such instructions it is slower. Both may differ between the index and its queries, so they are not among
    the `settings`.

    Raises ValueError for settings that are missing or out of range, RetrieverError when the model cannot be loaded or
    is not the one with these weights.
    """

    def __init__(
        self,
        name: str,
        pooling: str | None = None,
        query_prefix: str | None = None,
        passage_prefix: str | None = None,
        normalize: bool | None = None,
        max_length: int | None = None,
        dim: int | None = None,
        weights: str = "",
        device: str | None = None,
        dtype: str | None = None,
    ) -> None:
        given = {
            "pooling": pooling,
            "query_prefix": query_prefix,
            "passage_prefix": passage_prefix,
            "normalize": normalize,
        }
        settings = family_settings(name) | {key: value for key, value in given.items() if value is not None}
        if missing := sorted(set(given) - set(settings)):
            raise ValueError(
                f"encoder {name!r}: its name tells nothing about how it was trained, so {', '.join(missing)} must be "
                "given, as its model card has them (known without: 'hashed' and the names of E5, BGE, GTE and "
                "Contriever, such as intfloat/e5-base-v2)"
            )
        if settings["pooling"] not in POOLINGS:
            raise ValueError(f"encoder {name!r}: pooling is one of {', '.join(POOLINGS)}, got {pooling!r}")
        if dtype is not None and dtype not in DTYPES:
            raise ValueError(f"encoder {name!r}: dtype is one of {', '.join(DTYPES)}, got {dtype!r}")
        if max_length is not None and max_length < 8:
            raise ValueError(f"encoder {name!r}: max_length must be at least 8 tokens, got {max_length}")
        self.name = name
        self.pooling = str(settings["pooling"])
        self.query_prefix, self.passage_prefix = str(settings["query_prefix"]), str(settings["passage_prefix"])
        self.normalize = bool(settings["normalize"])

        gpu = torch.cuda.is_available() if device is None else device.startswith("cuda")
        self.device = torch.device(device or (f"cuda:{torch.cuda.current_device()}" if gpu else "cpu"))
        self._tokenizer, model, random_weights = _load(name)
        self._tokens_per_forward = _GPU_TOKENS if gpu else _CPU_TOKENS
        self._pad_id = self._tokenizer.pad_token_id or 0
        self.max_length = max_length or min(MAX_LENGTH, self._tokenizer.model_max_length)
        positions = getattr(model.config, "max_position_embeddings", None)
        if positions is not None and self.max_length > positions:
            raise ValueError(f"encoder {name!r}: max_length is {self.max_length}, the model has {positions} positions")
        self.dim: int = model.config.hidden_size
        self.weights = _fingerprint(model, self._tokenizer, random_weights)
        for key, wanted in {"weights": weights or self.weights, "dim": dim or self.dim}.items():
            if getattr(self, key) != wanted:
                raise RetrieverError(
                    f"encoder {name!r}: its {key} is {getattr(self, key)}, not {wanted}: this is another model or "
                    "another version of it; give the folder of the model that the index was built with, or build the "
                    "index again"
                )
        self._mixed_passages = dtype == "bfloat16" and not gpu
        dtype = "float32" if self._mixed_passages else dtype or ("float16" if gpu else "float32")
        self._model = model.to(self.device, DTYPES[dtype]).eval()

    def settings(self) -> Settings:
        """Return all that decides a vector. `weights` is a fingerprint of the weights and of the tokenizer."""
        return {
            "name": self.name,
            "pooling": self.pooling,
            "query_prefix": self.query_prefix,
            "passage_prefix": self.passage_prefix,
            "normalize": self.normalize,
            "max_length": self.max_length,
            "dim": self.dim,
            "weights": self.weights,
        }

    def state(self) -> State:
        return {}

    def fit(self, contents: Iterable[str]) -> None:
        pass

    def encode_passages(self, contents: list[str]) -> np.ndarray:
        # Queries stay in float32: they are few, and in bfloat16 what is found would depend on their batch.
        with torch.autocast("cpu", torch.bfloat16, enabled=self._mixed_passages):
            return self._encode(self.passage_prefix, contents)

    def encode_queries(self, queries: list[str]) -> np.ndarray:
        return self._encode(self.query_prefix, queries)

    @torch.inference_mode()
    def _encode(self, prefix: str, texts: Sequence[str]) -> np.ndarray:
        """Return [N, dim] float32, texts of similar length in one forward. Raises RetrieverError for NaN or inf."""
        vectors = np.empty((len(texts), self.dim), np.float32)
        if not texts:
            return vectors
        # a lone surrogate, which JSON can carry, is no text to a tokenizer
        clean = [(prefix + text).encode(errors="replace").decode() for text in texts]
        ids = self._tokenizer(clean, truncation=True, max_length=self.max_length)["input_ids"]
        for rows in length_batches([len(row) for row in ids], self._tokens_per_forward):
            lengths = torch.tensor([len(ids[row]) for row in rows])
            mask = torch.arange(int(lengths.max())) < lengths[:, None]  # [n, T], padding on the right
            tokens = torch.full(mask.shape, self._pad_id)
            tokens[mask] = torch.tensor([token for row in rows for token in ids[row]])
            mask = mask.to(self.device)
            hidden = self._model(input_ids=tokens.to(self.device), attention_mask=mask.long()).last_hidden_state
            vectors[rows] = self._pool(hidden.float(), mask).cpu().numpy()
        if not np.isfinite(vectors).all():
            raise RetrieverError(
                f"encoder {self.name!r} gave NaN or infinity in {self._model.dtype}: set its dtype to float32"
            )
        return vectors

    def _pool(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Return [n, dim] from hidden [n, T, dim] float32 and mask [n, T] bool, padding on the right."""
        if self.pooling == "mean":
            pooled = (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        else:
            place = torch.zeros(len(mask), dtype=torch.long) if self.pooling == "cls" else mask.sum(1).cpu() - 1
            pooled = hidden[torch.arange(len(mask)), place]
        return normalize(pooled, dim=-1) if self.normalize else pooled


def family_settings(name: str) -> Settings:
    """Return pooling, prefixes and normalisation of a model by the last part of its name; {} when it is not known.

    >>> family_settings("intfloat/e5-base-v2")["query_prefix"]
    'query: '
    >>> family_settings("intfloat/multilingual-e5-large-instruct")
    {}
    """
    for pattern, settings in FAMILIES.items():
        if re.fullmatch(pattern, Path(name).name, re.IGNORECASE):
            return dict(settings)
    return {}


def length_batches(lengths: Sequence[int], max_tokens: int) -> Iterator[list[int]]:
    """Yield the rows of each forward: longest first, rows times longest at most `max_tokens`, or one row.

    >>> list(length_batches([3, 9, 4, 2], max_tokens=8))
    [[1], [2, 0], [3]]
    """
    order = sorted(range(len(lengths)), key=lambda row: -lengths[row])
    while order:
        n = max(1, max_tokens // max(1, lengths[order[0]]))
        yield order[:n]
        del order[:n]


@contextmanager
def quiet_loading() -> Iterator[None]:
    """Keep transformers from drawing bars and from reporting weights that are checked here."""
    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def _load(name: str) -> tuple[Any, Any, set[str]]:
    """Return tokenizer, model (float32, on the CPU) and the names of weights that the folder does not hold."""
    try:
        with quiet_loading():
            tokenizer = AutoTokenizer.from_pretrained(name)
            model, loading = AutoModel.from_pretrained(name, dtype=torch.float32, output_loading_info=True)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise RetrieverError(
            f"encoder {name!r} cannot be loaded ({reason}); give the folder of a Hugging Face model, or a hub id where "
            "the hub can be reached"
        ) from error
    missing = set(loading["missing_keys"])
    if lost := sorted(key for key in missing if "pooler" not in key):
        raise RetrieverError(
            f"encoder {name!r}: {len(lost)} weights are not in its files ({', '.join(lost[:3])}) and would be random; "
            "give a complete model"
        )
    return tokenizer, model, missing


def _fingerprint(model: torch.nn.Module, tokenizer: Any, random_weights: set[str]) -> str:
    """Return 16 hex digits of some 1,024 numbers of each weight and of the tokens of a sentence: milliseconds, not
    the seconds of a whole hash; another model, fine-tuning or tokenizer changes it."""
    digest = hashlib.sha256(str(tokenizer(_PROBE)["input_ids"]).encode())
    for name, weight in sorted(model.state_dict().items()):
        if name not in random_weights:
            flat = weight.reshape(-1)
            sample = flat[:: max(1, flat.numel() // 1024)].float()
            digest.update(f"{name} {tuple(weight.shape)}".encode() + sample.numpy().tobytes())
    return digest.hexdigest()[:16]
