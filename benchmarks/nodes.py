"""Two nodes, simulated by two launchers on this machine: one is lost in the middle of a training, then both go on.

Prints how long the other node took to stop and what it said, and at last one JSON object:
    stop_s            seconds from kill -9 of everything on node 1 to the end of node 0's launcher
    status            exit status of node 0's launcher
    resume_identical  are weights and metrics, after --resume on both nodes, bit-equal to those of a run that was never
                      interrupted, made by one node of two processes?
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import torch
from safetensors.torch import load_file

ROOT = Path(__file__).resolve().parent.parent
# The quick start made small: a run takes seconds.
SETTINGS = (
    "world.entities=60", "world.distractors=12", "world.pool_words=12", "world.train_questions=60",
    "world.heldout_questions=20", "world.hop_shares=[1.0]", "warm_start.vocab_size=420", "warm_start.hidden_size=64",
    "warm_start.intermediate_size=128", "warm_start.heads=2", "warm_start.demonstrations=2400",
    "rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_turn_tokens=30",
    "optim.minibatch_responses=8", "optim.steps=4", "eval.questions=4", "eval.every_steps=null", "eval.at_start=false",
    "eval.sampled=false", "eval.fault_free=false", "checkpoint.every_steps=1", "checkpoint.keep_last=null",
    "model.threads=1", "distributed.silence_s=10",
)  # fmt: skip


def free_port() -> str:
    """Return a port that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return str(free.getsockname()[1])


def train_command(output_dir: Path, *more: str) -> list[str]:
    """Return train.py with the small settings."""
    config = str(ROOT / "configs" / "quickstart.yaml")
    return [str(ROOT / "train.py"), "--config", config, f"output_dir={output_dir}", *SETTINGS, *more]


def launch_node(
    command: Sequence[str], log: Path, *, machines: int = 1, machine: int = 0, port: str = "0", torchrun: bool = False
) -> subprocess.Popen[bytes]:
    """Start the launcher of one node, of two processes in a run of one node, else of one; its output goes to `log`."""
    accelerate = [
        "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2", "--num_machines", str(machines),
        "--machine_rank", str(machine), "--main_process_ip", "127.0.0.1", "--main_process_port", port,
    ]  # fmt: skip
    elastic = [
        "torch.distributed.run", "--nproc_per_node", str(2 // machines), "--nnodes", str(machines),
        "--node_rank", str(machine), "--master_addr", "127.0.0.1", "--master_port", port,
    ]  # fmt: skip
    environment = os.environ | {"ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", *(elastic if torchrun else accelerate), *command],
            cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT,
        )  # fmt: skip


def launch_two_nodes(commands: Sequence[Sequence[str]], folder: Path, **options: Any) -> list[subprocess.Popen[bytes]]:
    """Start a command on each of two nodes; node R writes to `folder`/node_R.log."""
    port = free_port()
    return [
        launch_node(command, folder / f"node_{machine}.log", machines=2, machine=machine, port=port, **options)
        for machine, command in enumerate(commands)
    ]


def kill_node(launcher: subprocess.Popen[bytes]) -> None:
    """Kill a launcher and all that it started, as when its machine is lost."""
    node = psutil.Process(launcher.pid)
    for process in (node, *node.children(recursive=True)):
        process.send_signal(signal.SIGKILL)
    launcher.wait()


def wait_for_checkpoint(run: Path, step: int, timeout_s: float = 200.0) -> None:
    """Wait until a run has saved a step. Raises TimeoutError."""
    end = time.monotonic() + timeout_s
    while not (run / "checkpoints" / f"step_{step}" / "state.json").is_file():
        if time.monotonic() > end:
            raise TimeoutError(f"{run} has not saved step {step} within {timeout_s:.0f} s")
        time.sleep(0.05)


def same_training(run: Path, other: Path, step: int) -> bool:
    """Return whether two runs have bit-equal weights after a step and the same metrics, but for times and memory."""

    def rows(folder: Path) -> list[dict[str, float]]:
        found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        timeless = ("time/", "memory/", "rollout/tokens_per_s")
        return [{name: value for name, value in row.items() if not name.startswith(timeless)} for row in found]

    model = Path("checkpoints", f"step_{step}", "model", "model.safetensors")
    one, two = load_file(run / model), load_file(other / model)
    weights = one.keys() == two.keys() and all(torch.equal(weight, two[name]) for name, weight in one.items())
    return weights and rows(run) == rows(other)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--zero-stage", type=int, default=2, choices=range(4))
    stage = f"distributed.zero_stage={parser.parse_args().zero_stage}"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole, lost = train_command(folder, stage, "name=whole"), train_command(folder, stage, "name=lost")
        log = folder / "whole.log"
        if launch_node(whole, log).wait():
            raise RuntimeError(log.read_text())

        nodes = launch_two_nodes([lost, lost], folder)
        wait_for_checkpoint(folder / "lost", 2)
        killed = time.monotonic()
        kill_node(nodes[1])
        status = nodes[0].wait(timeout=300)
        stop_s = time.monotonic() - killed
        said = [line for line in (folder / "node_0.log").read_text().splitlines() if line.startswith("error: ")]
        print(f"node 0 stopped {stop_s:.1f} s after node 1 was killed, exit status {status}; it said:", *said, sep="\n")

        resumed = launch_two_nodes([[*lost, "--resume"]] * 2, folder)
        statuses = [node.wait(timeout=300) for node in resumed]
        if any(statuses):
            raise RuntimeError("\n".join((folder / f"node_{machine}.log").read_text() for machine in (0, 1)))
        identical = same_training(folder / "lost", folder / "whole", 4)
        print(f"resumed on both nodes; bit-equal to one node of two processes, never interrupted: {identical}")
        print(json.dumps({"stop_s": round(stop_s, 2), "status": status, "resume_identical": identical}))


if __name__ == "__main__":
    main()
