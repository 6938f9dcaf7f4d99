"""What is checked when the processes of a run have met: that they do what was meant, and all the same."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

SHOWN = 8  # differences that a message lists


def overruled(
    environment: Mapping[str, str],
    *,
    dtype: str,
    zero_stage: int,
    offload_optimizer: bool,
    offload_params: bool,
    max_grad_norm: float,
    gpus: int,
) -> list[str]:
    """Return one sentence for each setting of `accelerate launch` or its config file that the run's own one overrules.

    environment: of the process; accelerate's launcher puts its settings there. gpus: how many this process sees.
    Raises RuntimeError where the launcher asks for other sharding than the config, or for the CPU beside a GPU.
    """

    def asked(name: str, default: str = "") -> str:
        return environment.get(f"ACCELERATE_{name}", default).lower()

    source = "accelerate's launcher (its options or its config file)"
    for name in ("FSDP", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if asked(f"USE_{name}") == "true":
            raise RuntimeError(
                f"{source} asks for {name}, but a run is sharded by DeepSpeed as distributed.zero_stage = {zero_stage} "
                "says: start with `accelerate launch --multi_gpu ...`, which takes precedence"
            )
    if asked("USE_DEEPSPEED") == "true":
        if asked("DEEPSPEED_CONFIG_FILE"):
            raise RuntimeError(
                f"{source} names the DeepSpeed configuration {environment['ACCELERATE_DEEPSPEED_CONFIG_FILE']}, but "
                "that of a run is made from its own settings under distributed and optim: start with `accelerate "
                "launch --multi_gpu ...`, which takes precedence"
            )
        pairs = (
            ("zero_stage", asked("DEEPSPEED_ZERO_STAGE"), str(zero_stage)),
            ("offload_optimizer", asked("DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "none"), _device(offload_optimizer)),
            ("offload_params", asked("DEEPSPEED_OFFLOAD_PARAM_DEVICE", "none"), _device(offload_params)),
        )
        differing = [f"distributed.{key} = {ours} here, {there} there" for key, there, ours in pairs if there != ours]
        if differing:
            raise RuntimeError(
                f"{source} asks for other sharding than the config: {'; '.join(differing)}. Make them equal, or start "
                "with `accelerate launch --multi_gpu ...`, which takes precedence"
            )
    if gpus and asked("USE_CPU") == "true":
        raise RuntimeError(
            f"{source} asks for the CPU, but this machine has GPUs, which would be used: hide them with "
            "CUDA_VISIBLE_DEVICES= in front of the command, or leave the CPU out of it"
        )
    found = []
    precision = asked("MIXED_PRECISION", "no")
    if precision != "no" and (precision, dtype) != ("bf16", "bfloat16"):
        found.append(f"mixed_precision {precision} (model.dtype = {dtype} counts)")
    if asked("DYNAMO_BACKEND", "no") != "no":
        found.append(f"dynamo_backend {asked('DYNAMO_BACKEND')} (nothing is compiled)")
    if asked("GRADIENT_ACCUMULATION_STEPS", "1") not in ("1", "auto"):
        steps = asked("GRADIENT_ACCUMULATION_STEPS")
        found.append(f"gradient_accumulation_steps {steps} (optim.micro_batch_tokens and _responses count)")
    clipping = asked("GRADIENT_CLIPPING", "none")
    if clipping not in ("none", "auto") and float(clipping) != max_grad_norm:
        found.append(f"gradient_clipping {clipping} (optim.max_grad_norm = {max_grad_norm} counts)")
    return [f"{source} asks for {setting}" for setting in found]


def _device(offloaded: bool) -> str:
    return "cpu" if offloaded else "none"


def source_hashes() -> dict[str, str]:
    """Return the content hash of every source file of the project, by its path."""
    root = Path(__file__).resolve().parent.parent
    files = [root / "train.py", *(root / "sapo").rglob("*.py"), *(root / "retriever").rglob("*.py")]
    present = [path for path in files if path.is_file()]
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest()[:8] for path in present}


def check_agreement(facts: Mapping[str, Any], gather_objects: Callable[[Any], list[Any]], fix: str) -> None:
    """Raise RuntimeError, on every rank, when ranks differ in a fact; name the facts, their values and the hosts.

    facts: of this rank, by name. gather_objects: of `Distributed`. fix: the sentence that ends the message.
    """
    hosts, facts_of_ranks = zip(*gather_objects((socket.gethostname(), dict(facts))))
    differing = []
    for name in dict.fromkeys(name for of_rank in facts_of_ranks for name in of_rank):
        values = [of_rank.get(name, "missing") for of_rank in facts_of_ranks]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            there = f"{values[other]} on rank {other} ({hosts[other]})"
            differing.append(f"{name} is {values[0]} on rank 0 ({hosts[0]}) and {there}")
    if differing:
        more = f"; and {len(differing) - SHOWN} more" if len(differing) > SHOWN else ""
        raise RuntimeError(f"the processes do not run the same: {'; '.join(differing[:SHOWN])}{more}. {fix}")
