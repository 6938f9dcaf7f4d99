"""Measure how exact the objective is: against scalar loops, and over micro-batches, ranks and backends.

    make bench-loss

Value and gradient of `sapo.loss.policy_loss` in float64 against `scalar_reference.py`, for every loss; then one update
of a tiny model on 1 and 2 processes, with micro-batches of 1 and 8 responses. Errors of gradients are relative and
norm-wise. The last line is one JSON object; rank_err and microbatch_err are those of float32.
"""

from __future__ import annotations

import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.scalar_reference import reference_loss
from sapo.baselines import LOSSES
from sapo.config import LOSS_PARAMETERS, LOSS_REDUCTIONS
from sapo.loss import Counts, policy_loss

ROOT = Path(__file__).resolve().parent.parent
TORCHRUN = (sys.executable, "-m", "torch.distributed.run", "--nproc_per_node", "2", "--master_port")
ACCELERATE = (
    sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", "1",
    "--mixed_precision", "no", "--dynamo_backend", "no", "--main_process_port",
)  # fmt: skip


def variants() -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield name, parameters and reduction: sapo over gates, reductions, gamma and tau, the others as they are used."""
    reductions = ("sequence_mean", "token_mean", "constant")
    gates = ("equation", "listing")
    for gate, reduction, gamma, tau in itertools.product(gates, reductions, (0.0, 0.1), (0.8, 1.0, 1.2)):
        parameters = {"clip_low": 0.2, "clip_high": 0.28, "gamma": gamma, "tau": tau, "gate": gate}
        yield "sapo", parameters, reduction
    for name, parameters in LOSS_PARAMETERS.items():
        yield name, parameters, LOSS_REDUCTIONS.get(name, "sequence_mean")
    yield "llds", LOSS_PARAMETERS["llds"] | {"gate_level": "action"}, "sequence_mean"


def scalar_errors() -> dict[str, tuple[float, float]]:
    """Return each loss's largest value and gradient error over its variants, corrections and ragged random minibatches.

    An error is |difference| / max(1, |reference|). Corrections: none, then dual clip (where there is a clip), off-policy
    rows and engine mismatch together.
    """
    generator = torch.Generator().manual_seed(0)
    errors: dict[str, tuple[float, float]] = {}
    for (name, parameters, reduction), mismatch, _ in itertools.product(variants(), ("none", "tis", "mis"), range(4)):
        B, T = 5, 12
        old, ref_difference, log_ratio, engine = torch.randn(4, B, T, generator=generator, dtype=torch.float64)
        log_ratio = log_ratio * 0.4
        extreme = torch.randint(0, 8, (B, T), generator=generator)
        for code, value in ((0, 100.0), (1, -100.0), (2, 0.0)):
            log_ratio[extreme == code] = value
        mask = (torch.rand(B, T, generator=generator) < 0.6).double()
        mask[-1] = 0
        advantages = torch.randn(B, generator=generator, dtype=torch.float64)
        advantages[1] = 0
        logprobs, ref, sampling = old + log_ratio, old + log_ratio + 0.3 * ref_difference, old + 0.3 * engine
        corrections: dict[str, Any] = {}
        bound = 3.0 if mismatch != "none" and "clip_low" in parameters else None
        if mismatch != "none":
            corrections = {"mismatch": mismatch, "mismatch_cap": 1.2, "off_policy_delta": 0.1}
        shared = {"reduction": reduction, "constant_tokens": 9, "ref_kl_coef": 0.01, **corrections}
        value, gradient = reference_loss(
            logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), name=name, parameters=parameters,
            dual_clip=bound, ref_logprobs=ref.tolist(), sampling_logprobs=sampling.tolist(), **shared,
        )  # fmt: skip
        nonneg = mask[advantages >= 0].sum()
        counts = Counts(int((mask.sum(1) > 0).sum()), int(mask.sum()), int(nonneg))
        logprobs.requires_grad_()
        loss = policy_loss(
            logprobs, old, advantages, mask, counts, objective=partial(LOSSES[name], **parameters),
            dual_clip_bound=bound, ref_logprobs=ref, sampling_logprobs=sampling, **shared,
        ).loss  # fmt: skip
        loss.backward()
        expected = torch.tensor(gradient, dtype=torch.float64)
        scaled = (logprobs.grad - expected).abs() / expected.abs().clamp(min=1)
        value_error, gradient_error = errors.get(name, (0.0, 0.0))
        value_error = max(value_error, abs(loss.item() - value) / max(1, abs(value)))
        errors[name] = value_error, max(gradient_error, scaled.max().item())
    return errors


def relative_error(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    """Return |found - expected| / |expected| of all tensors taken as one vector."""
    difference = sum((found[name].double() - tensor.double()).square().sum() for name, tensor in expected.items())
    return (difference / sum(tensor.double().square().sum() for tensor in expected.values())).sqrt().item()


def update_error(found: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Return the larger of the relative errors of loss and gradient of two results of `rank_worker.run`."""
    loss_error = abs(found["loss"] - expected["loss"]) / abs(expected["loss"])
    return max(loss_error, relative_error(found["gradient"], expected["gradient"]))


def launch(launcher: Sequence[str], *arguments: str) -> list[dict[str, Any]]:
    """Run `rank_worker.py` under a launcher, or in one process for (sys.executable,); return the results of rank 0.

    Raises RuntimeError with the output of a run that failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.pt"
        command = [*launcher]
        if command[-1].startswith("--"):
            with socket.socket() as free:
                free.bind(("127.0.0.1", 0))
                command.append(str(free.getsockname()[1]))
        command += [str(ROOT / "benchmarks" / "rank_worker.py"), str(out), *arguments]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return torch.load(out, weights_only=False)


def main() -> None:
    errors = scalar_errors()
    rows = ("--rows", "1", "8")
    result = {"max_value_err": max(e for e, _ in errors.values()), "max_grad_err": max(e for _, e in errors.values())}
    table = []
    for name, (value_error, gradient_error) in errors.items():
        table.append((f"{name}, float64, against scalar loops: value", value_error, 1e-9))
        table.append((f"{name}, float64, against scalar loops: gradient", gradient_error, 1e-9))
    for dtype, bound, suffix in (("float32", 1e-6, ""), ("float64", 1e-12, "_float64")):
        single = launch((sys.executable,), "--dtype", dtype, *rows)
        both = launch(TORCHRUN, "--dtype", dtype, *rows)
        result["rank_err" + suffix] = max(update_error(b, a) for a in single for b in both)
        result["microbatch_err" + suffix] = update_error(single[0], single[1])
        table.append((f"update, {dtype}: 1 and 2 ranks (DDP)", result["rank_err" + suffix], bound))
        table.append((f"update, {dtype}: micro-batches of 1 and 8", result["microbatch_err" + suffix], bound))
        if dtype == "float32":
            for stage in (1, 2, 3):
                sharded = launch(TORCHRUN, "--zero-stage", str(stage), *rows)
                result[f"zero{stage}_err"] = max(update_error(b, a) for a in single for b in sharded)
                table.append((f"update, float32: 1 rank and 2 (ZeRO-{stage})", result[f"zero{stage}_err"], bound))
    print(f"{'relative error of loss and gradient':<56}{'measured':>10}{'bound':>10}")
    for name, measured, bound in table:
        print(f"{name:<56}{measured:>10.1e}{bound:>10.0e}{'' if measured <= bound else '  ABOVE THE BOUND'}")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
