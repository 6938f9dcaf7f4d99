"""Kill training with SIGKILL at random moments of every phase, resume it, and compare with a run left alone.

The moments: sampling, the backward pass, the optimiser step, writing model/ and trainer/ of a checkpoint, completing
it. The run left alone and the killed one must agree bit for bit: weights, optimiser and state of every checkpoint,
metrics of every step and update but for times and memory. Once with one process, once with two ranks and ZeRO-3, of
which one is killed, or both at once.

    python benchmarks/kill.py [--kills 14 6] [--zero-stage 3]

A killed process runs `train.py` through this file (--worker), which kills it from a thread at a random moment of a
phase; how long that phase takes is known from the one before.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PHASES = ("rollout", "backward", "optimizer", "write_model", "write_trainer", "commit")
RUN = [
    "--config", str(ROOT / "configs" / "quickstart.yaml"),
    "world.entities=60", "world.distractors=12", "world.pool_words=12", "world.train_questions=60",
    "world.heldout_questions=20", "world.hop_shares=[1.0]", "warm_start.vocab_size=420", "warm_start.hidden_size=64",
    "warm_start.intermediate_size=128", "warm_start.heads=2", "warm_start.demonstrations=2400",
    "rollout.questions_per_step=4", "rollout.group_size=4", "rollout.max_turn_tokens=30", "optim.minibatch_responses=8",
    "eval.questions=4", "eval.every_steps=4", "eval.at_start=false", "eval.sampled=false", "eval.fault_free=false",
    "checkpoint.every_steps=1", "checkpoint.keep_last=null", "model.threads=1",
    "logging.trajectories_every_steps=null",
]  # fmt: skip


class Killer:
    """Ends this process at a random moment of the `occurrence`-th time of a phase, or soon after. Times all phases."""

    def __init__(self, phase: str, occurrence: int, seed: int, log: Path) -> None:
        self._phase, self._occurrence, self._random = phase, occurrence, random.Random(seed)
        self._log = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._took_s = 0.0
        self._inside = threading.Lock()  # taken while the phase goes on, so that no kill comes after it

    def record(self, **event: Any) -> None:
        os.write(self._log, json.dumps(event).encode() + b"\n")

    def phase(self, name: str, body: Callable[..., Any]) -> Callable[..., Any]:
        """Return a function that is a phase."""

        def run(*arguments: Any, **options: Any) -> Any:
            over = threading.Event()
            if name == self._phase:
                self._occurrence -= 1
                if self._occurrence <= 0:
                    delay = self._random.uniform(0, self._took_s)
                    threading.Thread(target=self._kill, args=(over, delay), daemon=True).start()
            began = time.perf_counter()
            try:
                return body(*arguments, **options)
            finally:
                took = time.perf_counter() - began
                with self._inside:
                    over.set()
                if name == self._phase:
                    self._took_s = took
                self.record(phase=name, s=took)

        return run

    def _kill(self, over: threading.Event, delay: float) -> None:
        time.sleep(delay)
        with self._inside:
            if not over.is_set():
                self.record(killed=self._phase, after_s=delay)
                os.kill(os.getpid(), signal.SIGKILL)


def worker(phase: str, occurrence: int, seed: int, rank: int, log: Path, arguments: Sequence[str]) -> int:
    """Train, but die in a phase on one rank; with occurrence 0 never."""
    began = time.perf_counter()
    import torch

    import sapo.checkpoint
    import train

    dies = occurrence and int(os.environ.get("RANK", 0)) == rank
    killer = Killer(phase if dies else "", occurrence, seed, log)
    sys.setswitchinterval(1e-4)  # a short phase must not be over before the thread gets its turn
    writer = sapo.checkpoint.CheckpointWriter
    for owner, name, of_phase in (
        (train, "roll_out", "rollout"),
        (torch.Tensor, "backward", "backward"),
        (torch.optim.AdamW, "step", "optimizer"),
        (writer, "_write_model", "write_model"),
        (sapo.checkpoint, "write_pieces", "write_trainer"),
        (sapo.checkpoint, "_commit", "commit"),
        (train, "load_checkpoint", "load"),
        (writer, "save", "save"),
        (train, "assemble", "assemble"),
    ):
        setattr(owner, name, killer.phase(of_phase, getattr(owner, name)))
    killer.record(phase="import", s=time.perf_counter() - began)
    return train.main(arguments)


def start(
    log: Path, arguments: Sequence[str], *, ranks: int = 1, kill: Sequence[Any] = ("", 0, 0, 0)
) -> subprocess.Popen:
    """Start a worker, or several under torchrun, in a session of its own. kill: phase, occurrence, seed, rank."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, __file__, "--worker", *map(str, kill), str(log), *RUN, *arguments]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    with open(log.with_suffix(".out"), "ab") as out:
        return subprocess.Popen(command, cwd=ROOT, env=env, stdout=out, stderr=out, start_new_session=True)


def events(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def finish(log: Path, arguments: Sequence[str], ranks: int = 1) -> None:
    """Train to the end. Raises RuntimeError with the last of its output when it fails."""
    if start(log, arguments, ranks=ranks).wait():
        raise RuntimeError(f"training failed: {log.with_suffix('.out').read_text()[-2000:]}")


def train_and_kill(
    log: Path,
    arguments: Sequence[str],
    *,
    phase: str,
    occurrence: int,
    seed: int,
    ranks: int = 1,
    all_ranks: bool = True,
) -> str | None:
    """Resume a run and kill a rank in a phase, and with it all others or, after the launcher had 3 s, those left.

    Returns the phase in which it was killed, None when the run ended before.
    """
    before = sum("killed" in event for event in events(log))
    rank = 0 if phase in ("write_model", "commit") else seed % ranks  # the others do not
    process = start(log, [*arguments, "--resume"], ranks=ranks, kill=(phase, occurrence, seed, rank))
    while process.poll() is None and sum("killed" in event for event in events(log)) == before:
        time.sleep(0.02)
    if not all_ranks:
        try:
            process.wait(3)
        except subprocess.TimeoutExpired:
            pass
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.wait()
    kills = [event["killed"] for event in events(log) if "killed" in event]
    return kills[-1] if len(kills) > before else None


def differences(run: Path, other: Path) -> list[str]:
    """Return what two runs differ in: tensors and state of every checkpoint, metrics of every step and update."""
    import torch
    from safetensors.torch import load_file

    from sapo.checkpoint import fault, list_checkpoints, read_state

    found = []
    names = [checkpoint.name for checkpoint in list_checkpoints(other)]
    if names != [checkpoint.name for checkpoint in list_checkpoints(run)]:
        found.append("checkpoints")
    for one, two in zip(list_checkpoints(run), list_checkpoints(other)):
        found += filter(None, [fault(one), fault(two)])
        if read_state(one) | {"files": None} != read_state(two) | {"files": None}:
            found.append(f"{one.name}/state.json")
        for file in sorted(path.relative_to(two) for path in two.rglob("*.safetensors")):
            tensors, expected = load_file(one / file), load_file(two / file)
            found += [
                f"{one.name}/{file}: {name}"
                for name in tensors.keys() | expected.keys()
                if name not in tensors or name not in expected or not torch.equal(tensors[name], expected[name])
            ]
        for file in sorted(two.glob("trainer/rank*.json")):
            generators = [json.loads(path.read_text())["generators"] for path in (file, one / "trainer" / file.name)]
            if generators[0] != generators[1]:
                found.append(f"{one.name}/{file.name}")
    for file in ("metrics.jsonl", "updates.jsonl"):
        rows, expected_rows = ([timeless(line) for line in (r / file).read_text().splitlines()] for r in (run, other))
        found += [f"{file}: {len(rows)} rows"] if len(rows) != len(expected_rows) else []
        found += [f"{file}: row {n}" for n, pair in enumerate(zip(rows, expected_rows)) if pair[0] != pair[1]]
    return found


def weight_change(run: Path) -> float:
    """Return ||w - w'|| / ||w|| of the last and the first checkpoint: a run that learns nothing shows nothing."""
    from safetensors.torch import load_file

    from sapo.checkpoint import list_checkpoints

    checkpoints = list_checkpoints(run)
    last, first = (load_file(checkpoints[n] / "model" / "model.safetensors") for n in (-1, 0))
    moved = sum((last[name] - first[name]).double().square().sum() for name in last)
    return float((moved / sum(tensor.double().square().sum() for tensor in last.values())).sqrt())


def timeless(line: str) -> dict[str, Any]:
    row = json.loads(line)
    return {k: v for k, v in row.items() if not k.startswith(("time/", "memory/")) and not k.endswith("tokens_per_s")}


def race(
    folder: Path, kills: int, ranks: int, zero_stage: int, phases: Sequence[str] = PHASES
) -> dict[str, Any]:
    """Compare a run that is killed so many times, in all phases in turn, with one that is not."""
    chance = random.Random(ranks)
    name = f"ranks{ranks}"
    options = [f"output_dir={folder}", f"distributed.zero_stage={zero_stage}"]
    killed: list[str] = []
    log = folder / f"{name}_killed.jsonl"
    # Each life of the run gets at least one step further; a kill comes in its second or third.
    options.append(f"optim.steps={3 * kills}")
    while len(killed) < kills:
        phase = phases[len(killed) % len(phases)]
        # of these there are several in a step
        occurrence = chance.randint(2, 3) * {"backward": 2, "optimizer": 2}.get(phase, 1)
        all_ranks = len(killed) % 2 == 0
        hit = train_and_kill(
            log, [*options, f"name={name}_killed"], phase=phase, occurrence=occurrence, seed=chance.randrange(1 << 30),
            ranks=ranks, all_ranks=all_ranks,
        )  # fmt: skip
        if hit is None:
            raise RuntimeError(f"it ended before its kill in {phase}: {log.with_suffix('.out').read_text()[-8000:]}")
        killed.append(hit)
        print(f"{name}: kill {len(killed)} of {kills}, in {hit}{' of one rank' if not all_ranks and ranks > 1 else ''}",
              flush=True)  # fmt: skip
    finish(log, [*options, f"name={name}_killed", "--resume"], ranks)
    alone = folder / f"{name}_alone.jsonl"
    finish(alone, [*options, f"name={name}_alone"], ranks)
    different = differences(folder / f"{name}_killed", folder / f"{name}_alone")
    print(f"{name}: {len(different)} differences after {kills} kills", flush=True)
    for line in different[:10]:
        print(f"  differs: {line}")

    def median_s(phase: str) -> float:
        times = [event["s"] for event in events(log) + events(alone) if event.get("phase") == phase]
        return round(statistics.median(times), 4)

    return {
        "kills": len(killed),
        "mismatches": len(different),
        "phases": {phase: killed.count(phase) for phase in phases},
        "weight_change": weight_change(folder / f"{name}_alone"),
        "training_waits_s": median_s("save"),
        "write_s": median_s("write_model") + median_s("write_trainer"),
        "commit_s": median_s("commit"),
        "resume_s": {"import": median_s("import"), "assemble": median_s("assemble"), "of it load": median_s("load")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, nargs=2, default=[14, 6], help="with one process, and with two ranks")
    parser.add_argument("--zero-stage", type=int, default=3, help="of the two ranks")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        one = race(Path(folder), options.kills[0], 1, 0) if options.kills[0] else None
        two = race(Path(folder), options.kills[1], 2, options.zero_stage) if options.kills[1] else None
    races = {"1 process": one, f"2 ranks, ZeRO-{options.zero_stage}": two}
    races = {name: result for name, result in races.items() if result is not None}
    for name, result in races.items():
        print(f"{name}: {result['kills']} kills ({result['phases']}), {result['mismatches']} differences; training "
              f"waits {result['training_waits_s']:.3f} s for a save; resume {result['resume_s']}")  # fmt: skip
    total = {key: sum(result[key] for result in races.values()) for key in ("kills", "mismatches")}
    print(json.dumps(total | {"runs": races}))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        phase_name, times, seed_text, rank_text, log_path, *rest = sys.argv[2:]
        sys.exit(worker(phase_name, int(times), int(seed_text), int(rank_text), Path(log_path), rest))
    main()
