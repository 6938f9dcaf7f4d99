"""What our own attention functions ask of a model before they take the place of its attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from transformers import PreTrainedModel


def refuse_more_than_causal(module: nn.Module, arguments: Mapping[str, Any], why: str) -> None:
    """Raise ValueError where the arguments of a layer ask for more than causal attention. why: ends the message."""
    for name in ("softcap", "s_aux", "position_bias", "sliding_window"):
        if arguments.get(name) is not None:
            raise ValueError(f"{type(module).__name__} has attention with {name}, which {why}")


def require_interface(model: PreTrainedModel, why: str) -> None:
    """Raise ValueError for a model that does not take its attention from outside. why: ends the message."""
    if not model._supports_attention_backend:
        raise ValueError(
            f"model type {model.config.get_text_config().model_type!r} does not take its attention from transformers' "
            f"AttentionInterface, {why}"
        )
