"""ZeRO against one process: equal updates, memory by stage, speed of two ranks, generation under ZeRO-3.

    make bench-zero          (or: python benchmarks/zero.py [--model FOLDER] [--updates N] [--variants ...])

SmolLM2-135M in float32 on a CPU, one thread a rank, gloo between ranks. All runs get one batch of trajectories with the
recorded turns of rollout_schedule.json (random ids; 1 to 4 turns; two thirds of the responses on rank 0), a frozen
reference and the same AdamW updates with gradient checkpointing. The loss is one without gate and clip (soft_sapo): a
token at one of their edges is inside or outside by rounding, and five updates make much of it. tests/test_zero.py has
SAPO's, on a small model. Each is a launch of its own.

max_rel_err, rel_err
    Of two ranks (DDP, ZeRO-1 to 3, offloaded) against one process, after all updates: the largest relative error of
    the losses, gradient norms, reference logprobs (sums), and norm-wise of the weights' change and Adam's two moments.
    `reordered` is one process with micro-batches of one response: what float32 itself makes of another order of sums.
    The learning rate is large for this model: float32 holds a weight of 0.5 to 6e-8, which at a rate of 1e-5 is 4e-5 of
    the change (norm-wise, measured) while the moments behind it differ by 4e-6.
peak_bytes
    Peak resident memory of each rank during the updates, less what it had before the model was loaded.
    ZeRO's buffers and limits are scaled to the model (LIVE_WEIGHTS): by default it would stay whole in every update.
theory_bytes
    Bytes a parameter of weights, gradients, AdamW and reference, times the parameters, and what one process has above
    its own 20 bytes a parameter: activations and the head's logits.
reference_bytes
    What the frozen reference adds to each rank.
efficiency_2_ranks
    Tokens a second of DDP updates on two ranks over twice those of one, each rank on a core of its own, the same
    trajectories on each: weak scaling.
generation
    Decoding under ZeRO-3 by the engine: weights gathered once a rollout, or by DeepSpeed's hooks in every layer of
    every forward. Time, and peak memory above what stood before.

The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
VARIANTS = ("ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload")
BOUND = 1e-5
LIVE_WEIGHTS = 16_000_000  # of 135 million, as ZeRO-3's default limits of 1e9 are to 8 billion


def launch(ranks: int, *arguments: object) -> list[dict[str, Any]]:
    """Run `zero_worker.py` on so many ranks; return its results. Raises RuntimeError with the output of a failure."""
    command = [sys.executable]
    if ranks > 1:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command += ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", f"--master_port={port}"]
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "results.json"
        measure, *options = map(str, arguments)
        command += [str(ROOT / "benchmarks" / "zero_worker.py"), measure, str(out), *options]
        environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        # what is freed goes back to the system at once, so that the peak is of what was alive
        environment |= {"MALLOC_MMAP_THRESHOLD_": "1000000", "MALLOC_TRIM_THRESHOLD_": "1000000"}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
        if done.returncode:
            raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout}\n{done.stderr}")
        return json.loads(out.read_text())


def errors(result: dict[str, Any]) -> dict[str, float]:
    """Return the errors of a run by what they are of."""
    return {name.removesuffix("_err"): value for name, value in result.items() if name.endswith("_err")}


def theory(variant: str, ranks: int) -> float:
    """Return bytes a parameter on each rank in float32: weights, gradients, AdamW's moments and the reference.

    DeepSpeed keeps a master copy of what the optimiser owns also where the weights are float32 themselves.
    """
    weights, gradients, moments, reference = 4, 4, 8, 4
    stage = 0 if variant == "ddp" else int(variant[4])
    shared = [(weights, 3), (gradients, 2), (moments, 1), (weights if stage else 0, 1), (reference, 3)]
    return sum(size / ranks if stage >= sharded_from else size for size, sharded_from in shared)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default=str(ROOT / "models" / "smollm2-135m-instruct"), help="Hugging Face folder")
    parser.add_argument("--variants", nargs="*", default=VARIANTS, choices=VARIANTS)
    parser.add_argument("--updates", type=int, default=5)
    parser.add_argument("--lr", type=float, default=3e-4, help="learning rate")
    parser.add_argument("--eps", type=float, default=1e-6, help="of AdamW")
    parser.add_argument("--prompt-tokens", type=int, default=16)
    parser.add_argument("--observation-tokens", type=int, default=8, help="between two turns")
    args = parser.parse_args()
    model = ("--model", args.model)
    batch = ("--prompt-tokens", args.prompt_tokens, "--observation-tokens", args.observation_tokens)
    updates = ("updates", *model, *batch, "--updates", args.updates, "--lr", args.lr, "--eps", args.eps)
    updates += ("--gradient-checkpointing", "--no-edges", "--live-weights", LIVE_WEIGHTS)
    runs: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        state = ("--state", Path(folder) / "state.pt")
        (single,) = launch(1, *updates, *state)
        (runs["reordered"],) = launch(1, *updates, *state, "--micro-batch-responses", 1)
        for variant in args.variants:
            (runs[variant],) = launch(2, *updates, *state, "--variants", variant)

    kinds = list(errors(runs["reordered"]))
    print(f"relative errors after {args.updates} updates, two ranks against one process; bound {BOUND:.0e}")
    print(f"{'':<15}" + "".join(f"{kind:>15}" for kind in kinds) + f"{'s an update':>14}")
    for variant, run in runs.items():
        columns = "".join(f"{run[f'{kind}_err']:>15.1e}" for kind in kinds)
        print(f"{variant:<15}{columns}{run['update_s']:>14.1f}")
    print(f"one process: {single['update_s']:.1f} s an update, {single['parameters']:,} parameters")
    parameters = single["parameters"]
    working = max(0, single["peak_bytes"][0] - theory("ddp", 1) * parameters)
    expected = {variant: round(theory(variant, 2) * parameters + working) for variant in args.variants}
    base = args.variants[0]
    print(f"\npeak memory of a rank, MB   both ranks             theory   over {base}: measured, theory   reference")
    for variant in args.variants:
        run = runs[variant]
        measured = " ".join(f"{peak / 1e6:>9.0f}" for peak in run["peak_bytes"])
        ratio = max(run["peak_bytes"]) / max(runs[base]["peak_bytes"])
        print(f"{variant:<27}{measured:<20}{expected[variant] / 1e6:>9.0f}{ratio:>19.2f}"
              f"{expected[variant] / expected[base]:>9.2f}{max(run['reference_bytes']) / 1e6:>12.0f}")  # fmt: skip

    speeds = [launch(ranks, "rate", *model, *batch, "--updates", 3)[0]["tokens_per_s"] for ranks in (1, 2)]
    efficiency = speeds[1] / (2 * speeds[0])
    print(f"\nDDP, each rank on one core, the same trajectories on each (weak scaling): {speeds[0]:.1f} tokens/s on "
          f"one rank, {speeds[1]:.1f} on two, efficiency {efficiency:.3f}")  # fmt: skip
    (generation,) = launch(2, "generate", *model, "--variants", "zero3")
    for name in ("gathered", "hooks"):
        found = generation[name]
        print(f"ZeRO-3 generation, {name:<9}{found['s']:>8.1f} s {found['bytes'] / 1e6:>8.0f} MB above")
    stages = {variant: max(errors(runs[variant]).values()) for variant in args.variants}
    print(
        json.dumps(
            {
                "max_rel_err": max(stages.values()),
                "rel_err": stages | {"reordered": max(errors(runs["reordered"]).values())},
                "peak_bytes": {variant: runs[variant]["peak_bytes"] for variant in args.variants},
                "theory_bytes": expected,
                "reference_bytes": {variant: runs[variant]["reference_bytes"] for variant in args.variants},
                "efficiency_2_ranks": efficiency,
                "generation": generation,
            }
        )
    )


if __name__ == "__main__":
    main()
