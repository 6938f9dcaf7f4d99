"""Low-rank adapters (LoRA, arXiv 2106.09685) by peft: a layer W becomes W + alpha / rank * B A, of which A, B learn.

The layers of the Hugging Face model are wrapped in place, so that whatever runs the model runs it with its adapters:
the engine samples from the very products that the trainer scores. There is no dropout: a token must have the same
log-probability in every pass.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

ADAPTER = "default"  # peft's own name for an only adapter, which its files leave out


def require_peft() -> None:
    """Raise ValueError where peft cannot be imported."""
    try:
        importlib.import_module("peft")
    except ImportError as error:
        raise ValueError(
            "model.lora needs the package peft, which cannot be imported here: run `pip install -r requirements.txt`, "
            f"or remove model.lora ({error})"
        ) from error


def add_adapters(
    model: PreTrainedModel, *, rank: int, alpha: float, target_modules: Sequence[str], seed: int, base: str
) -> None:
    """Wrap the linear layers of these names in adapters, whose B starts at 0, and freeze all other weights.

    seed: of A, the same on every rank. base: path or hub name of the model, which the files of the adapters name.
    Raises ValueError for a name that no linear layer below the output head has, and without peft.
    """
    require_peft()
    from peft import LoraConfig, inject_adapter_in_model

    linear = {name.rpartition(".")[2] for name, part in model.base_model.named_modules() if isinstance(part, nn.Linear)}
    unknown = sorted(set(target_modules) - linear)
    if unknown:
        raise ValueError(
            f"model.lora.target_modules: {base} has no linear layer {', '.join(unknown)} below its output head, which "
            f"takes no adapter; it has {', '.join(sorted(linear))}"
        )
    config = LoraConfig(
        r=rank,
        lora_alpha=alpha,
        target_modules=list(target_modules),
        lora_dropout=0.0,
        task_type="CAUSAL_LM",
        base_model_name_or_path=base,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        inject_adapter_in_model(config, model, ADAPTER)


def has_adapters(model: PreTrainedModel) -> bool:
    return ADAPTER in getattr(model, "peft_config", {})


@contextlib.contextmanager
def adapters_off(model: PreTrainedModel) -> Iterator[None]:
    """Make the model what it was before `add_adapters`, for forwards without gradient in the block."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    layers = [part for part in model.modules() if isinstance(part, BaseTunerLayer)]
    for layer in layers:
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in layers:
            layer.enable_adapters(True)


def merged_weights(model: PreTrainedModel, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of the plain model with the adapters added in, W + alpha / rank * B A in the type of W.

    weights: of the whole model with its adapters.
    """
    config = model.peft_config[ADAPTER]
    plain = {}
    for name, weight in weights.items():
        layer, inside, kind = name.partition(".base_layer.")
        if inside and kind == "weight":
            a, b = (weights[f"{layer}.lora_{part}.{ADAPTER}.weight"] for part in "AB")
            wide = torch.promote_types(weight.dtype, torch.float32)
            change = b.to(wide) @ a.to(wide) * (config.lora_alpha / config.r)
            weight = (weight.to(wide) + change).to(weight.dtype)
        if ".lora_" not in name:
            plain[f"{layer}.{kind}" if inside else name] = weight
    return plain


def save_adapters(model: PreTrainedModel, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write the adapters into a new folder, as `peft.PeftModel.from_pretrained` reads them.

    weights: of the whole model with its adapters, or of the adapters.
    """
    names = {name: f"base_model.model.{name.replace(f'.{ADAPTER}.', '.')}" for name in weights if ".lora_" in name}
    folder.mkdir()
    save_file(
        {saved: weights[name].contiguous() for name, saved in names.items()},
        folder / "adapter_model.safetensors",
        metadata={"format": "pt"},
    )
    model.peft_config[ADAPTER].save_pretrained(folder)
