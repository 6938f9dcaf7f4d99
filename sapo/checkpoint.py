"""Checkpoints of a run: a Hugging Face folder beside the trainer's state, complete or not there at all.

runs/<name>/checkpoints/best.json   the checkpoint with the best validation EM
runs/<name>/checkpoints/step_<n>/
    model/       weights and tokenizer, an ordinary Hugging Face folder
    adapter/     with LoRA: the adapters alone, as peft reads them; model/ has them added in
    trainer/     of each rank its part of the optimiser (and of the master weights, where model/ does not hold these
                 exactly), safetensors, and rank<r>.json with its random number generators
    state.json   step, counters, and the size and CRC-32 of every file
A checkpoint is written and flushed under a temporary name and renamed when complete, so a kill leaves those before it.
It is taken between steps, where nothing is pending: rollouts are sampled anew from (seed, step, question, sample), and
the data cursor is the step. Any number of ranks and any ZeRO stage can go on from it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import random
import re
import shutil
import socket
import sys
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from sapo.distributed import Distributed, Updater
from sapo.lora import has_adapters, merged_weights, save_adapters
from sapo.shards import Piece, fill_pieces, open_pieces, open_tensors, write_pieces

_NAME = re.compile(r"step_(\d+)")
_POLL_S = 0.05


def list_checkpoints(run_dir: Path) -> list[Path]:
    """Return the complete checkpoints of a run, oldest first."""
    found = [p for p in (run_dir / "checkpoints").glob("step_*") if _NAME.fullmatch(p.name)]
    return sorted((p for p in found if (p / "state.json").is_file()), key=checkpoint_step)


def checkpoint_step(checkpoint: Path) -> int:
    """Return the number of steps a checkpoint has behind it."""
    match = _NAME.fullmatch(checkpoint.name)
    if match is None:
        raise ValueError(f"{checkpoint} is not a checkpoint folder: its name is not step_<number>")
    return int(match[1])


class Score(NamedTuple):
    """What checkpoints are compared by: an EM on held-out questions. metric: its name.

    conditions: what decides it but the weights, in any form; only scores of equal ones are compared.
    """

    value: float
    conditions: str = ""
    metric: str = "eval/heldout/em"


def lock_file(run_dir: Path) -> Path:
    """Return the file that a run is locked by. It stands beside the run's folder, to be held before there is one."""
    return run_dir.with_name(f".{run_dir.name}.lock")


@contextlib.contextmanager
def locked(run_dir: Path) -> Iterator[None]:
    """Keep other processes from this run until the block, or this process, ends. The lock file names its latest holder.

    Raises ValueError when another process has the run. Some network file systems do not lock from machine to machine;
    where there is no locking at all a warning says so.
    """
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with lock_file(run_dir).open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ValueError(
                f"{run_dir} is in use by another process ({file.read().strip()}): wait for its end or stop it, or give "
                "this run another name (name=...)"
            ) from None
        except OSError as error:
            _warn(f"{run_dir} cannot be locked ({error}): start no other process with it meanwhile")
        file.truncate(0)
        file.write(f"host {socket.gethostname()}, pid {os.getpid()}, since {time.strftime('%Y-%m-%d %H:%M:%S')}\n")
        file.flush()
        yield


class CheckpointWriter:
    """Writes the checkpoints of a run, at most one at a time. All ranks must make the same calls.

    Each rank's part is written by a thread. With `async_save` the parts are copied to host memory first and training
    goes on meanwhile; otherwise it waits, and nothing is copied. One that cannot be written is a warning; RuntimeError
    is raised, on all ranks, for the second in a row and for the last.
    """

    def __init__(
        self,
        run_dir: Path,
        dist: Distributed,
        updater: Updater,
        tokenizer: PreTrainedTokenizerBase,
        *,
        keep_last: int | None = None,
        keep_best: bool = True,
        async_save: bool = True,
    ) -> None:
        """keep_last, keep_best: the newest checkpoints, and the one with the best score, that stay; None keeps all."""
        self._folder = run_dir / "checkpoints"
        self._dist, self._updater, self._tokenizer = dist, updater, tokenizer
        self._keep_last, self._keep_best, self._async = keep_last, keep_best, async_save
        self._thread: threading.Thread | None = None
        self._work = Path()  # what the thread writes
        self._error: str | None = None  # of writing it, on this rank
        self._failure: str | None = None  # of the latest, on all ranks
        self._written, self._abandoned = threading.Event(), threading.Event()

    def save(self, step: int, state: Mapping[str, Any], score: Score | None = None, keep_all: bool = False) -> None:
        """Save the run after `step`, replacing a checkpoint of that step; delete what is not to be kept.

        state: JSON values that `load_checkpoint` gives back. keep_all: delete nothing. Raises RuntimeError when the two
        latest checkpoints could not be written; with `async_save` this one is not yet among them.
        """
        self._settle()
        dist, updater = self._dist, self._updater
        facts = {"step": step, "world_size": dist.world_size, "zero_stage": dist.zero_stage}
        facts |= {"heldout": score._asdict() if score else None}
        frozen = json.loads(json.dumps(facts | dict(state)))  # the next steps change the state
        self._work = work = self._folder / f"tmp_step_{step}"
        unmade: OSError | None = None
        if dist.is_main:
            for pattern in ("tmp_step_*", "tmp_old_step_*"):  # of a save or a deletion that was killed
                for rest in self._folder.glob(pattern):
                    _remove(rest)
            try:
                (work / "trainer").mkdir(parents=True)
            except OSError as error:
                unmade = error
        dist.barrier()
        weights, pieces = updater.state_dict(), updater.pieces()
        if not dist.zero_stage:  # every rank has all
            mine = set(sorted({piece.name for piece in pieces})[dist.rank :: dist.world_size])
            pieces = [piece for piece in pieces if piece.name in mine]
        if dist.weights_dtype != torch.bfloat16:  # then model/ has the weights exactly
            pieces = [piece for piece in pieces if not piece.name.endswith("/weight")]
        if self._async:
            weights = _host_copy(weights) if dist.is_main else {}
            pieces = [replace(piece, data=piece.data.to("cpu", copy=True)) for piece in pieces]
        generators = _generators()
        metadata = {"updates": str(updater.updates)}

        def write() -> None:
            if unmade:
                raise unmade
            unheld = self._write_model(work, weights) if dist.is_main else []
            write_pieces(pieces + unheld, work / "trainer", f"rank{dist.rank}", metadata)
            own = list((work / "trainer").glob(f"rank{dist.rank}_*.safetensors"))
            if dist.is_main:
                own += [path for name in ("model", "adapter") for path in (work / name).rglob("*") if path.is_file()]
            record = {"generators": generators, "files": {str(path.relative_to(work)): _seal(path) for path in own}}
            write_synced(work / "trainer" / f"rank{dist.rank}.json", json.dumps(record))

        def commit() -> None:
            _commit(work, dist.world_size, frozen)
            _tidy(self._folder.parent, None if keep_all else self._keep_last, self._keep_best)

        self._error = None
        self._written.clear()
        self._abandoned.clear()
        self._thread = threading.Thread(target=self._run, args=(work, write, commit), daemon=True)
        self._thread.start()
        if not self._async:
            self._settle()

    def finish(self) -> None:
        """Wait until what is being written is a checkpoint. Raises RuntimeError when the latest could not be."""
        self._settle(last=True)

    def wait(self, timeout_s: float = 300.0) -> None:
        """Let what is being written become a checkpoint, on a rank that ends by an error: no other has to call it."""
        if self._thread is None:
            return
        until = time.monotonic() + timeout_s
        self._thread.join(timeout_s)
        while self._work.exists() and not self._error and time.monotonic() < until:  # the first rank completes it
            time.sleep(_POLL_S)

    def _settle(self, last: bool = False) -> None:
        """Wait for what is being written; warn of a failure, or raise it when it is the second in a row or the last."""
        if self._thread is not None:
            self._written.wait()
            error = self._first_error()
            if error:
                self._abandoned.set()
            self._thread.join()
            self._thread = None
            error = error or self._first_error()
            last = last or self._failure is not None
            self._failure = self._clear_away(error) if error else None
            if self._failure and not last and self._dist.is_main:
                _warn(f"{self._failure}. Going on; the run ends if the next one fails too")
        if last and self._failure:
            failure, self._failure = self._failure, None
            raise RuntimeError(failure)

    def _clear_away(self, error: str) -> str:
        """Remove what there is of a checkpoint that cannot be written; return what to say of it."""
        if self._dist.is_main:
            shutil.rmtree(self._work, ignore_errors=True)
        self._dist.barrier()
        whole = list_checkpoints(self._folder.parent)
        free = shutil.disk_usage(self._folder.parent).free / 1e9
        return (
            f"{self._folder / self._work.name.removeprefix('tmp_')} could not be written: {error}. What there was of "
            f"it is removed; {free:.1f} GB are free there now. Make room (checkpoint.keep_last says how many stay); "
            f"the run can go on from {whole[-1].name if whole else 'the beginning'} by --resume"
        )

    def _first_error(self) -> str | None:
        return next(filter(None, self._dist.gather_objects(self._error)), None)

    def _run(self, work: Path, write: Callable[[], None], commit: Callable[[], None]) -> None:
        """Write this rank's part; the first rank makes a checkpoint of them when it sees the parts of all."""
        try:
            write()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"
        self._written.set()
        if not self._dist.is_main or self._error:
            return
        parts = [work / "trainer" / f"rank{rank}.json" for rank in range(self._dist.world_size)]
        while not all(part.exists() for part in parts):
            if self._abandoned.wait(_POLL_S):
                return
        try:
            commit()
        except Exception as error:
            self._error = f"{type(error).__name__}: {error}"

    def _write_model(self, work: Path, weights: dict[str, Tensor]) -> list[Piece]:
        """Write model/ (and adapter/); return the trained weights not in it: adapters, or renamed on saving."""
        policy = self._updater.policy
        plain = dict(weights)
        if has_adapters(policy.model):
            save_adapters(policy.model, weights, work / "adapter")
            plain = merged_weights(policy.model, weights)
        policy.model.save_pretrained(work / "model", state_dict=plain, max_shard_size="5GB")
        self._tokenizer.save_pretrained(work / "model")
        if self._dist.weights_dtype == torch.bfloat16:
            return []
        held = open_tensors((work / "model").glob("*.safetensors"))
        trained = [name for name, parameter in policy.named_parameters() if parameter.requires_grad]
        names = {name: name.removeprefix("model.") for name in trained}
        return [
            Piece(f"{name}/weight", 0, weights[own].flatten()) for name, own in names.items() if own not in held
        ]


def load_checkpoint(checkpoint: Path, dist: Distributed, updater: Updater) -> dict[str, Any]:
    """Restore weights, optimiser and generators; return the checkpoint's `state`, its own entries included.

    All ranks must call, as many as like and at any ZeRO stage. A rank that was not there at the save keeps its fresh
    generators. Raises ValueError when a weight is missing; `fault` finds files that were cut or altered.
    """
    state = read_state(checkpoint)
    sources, metadata = open_pieces(sorted((checkpoint / "trainer").glob("*.safetensors")))
    for name, tensor in open_tensors((checkpoint / "model").glob("*.safetensors")).items():
        sources.setdefault(f"model.{name}/weight", [tensor])
    with updater.restoring(int(metadata["updates"])) as pieces:
        fill_pieces(pieces, sources)
    generators = checkpoint / "trainer" / f"rank{dist.rank}.json"
    if generators.is_file():
        _set_generators(json.loads(generators.read_text(encoding="utf-8"))["generators"])
    return state


def read_state(checkpoint: Path) -> dict[str, Any]:
    """Return what state.json holds. Raises ValueError when that is not what was written."""
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if not isinstance(state, dict) or state.pop("crc32", None) != _state_crc(state):
        raise ValueError(f"the content of {checkpoint / 'state.json'} is not what was saved (CRC-32)")
    return state


def fault(checkpoint: Path, rank: int = 0, world_size: int = 1) -> str | None:
    """Return what is wrong with the files of a checkpoint, naming the file; None when nothing is.

    Every size is compared, and the CRC-32 of this rank's share of the files: all ranks together read each file once.
    """
    try:
        files = read_state(checkpoint)["files"]
    except (OSError, ValueError) as error:
        return f"{checkpoint / 'state.json'} cannot be read ({error})"
    for number, (name, expected) in enumerate(sorted(files.items())):
        path = checkpoint / name
        if not path.is_file():
            return f"{path} is missing"
        if path.stat().st_size != expected["bytes"]:
            return f"{path} has {path.stat().st_size} bytes instead of {expected['bytes']}"
        if number % world_size == rank and _crc(path) != expected["crc32"]:
            return f"the content of {path} is not what was saved (CRC-32)"
    return None


def rewind(run_dir: Path, step: int, undone: Path, state: Mapping[str, Any], keep_checkpoints: bool) -> None:
    """Make the checkpoint of `step` the newest and change `state` in it. One rank calls, while no other reads.

    Later checkpoints, evaluations and trajectories are moved to the folder `undone`, none is lost; the checkpoints are
    deleted when they are not to be kept.
    """
    checkpoint = run_dir / "checkpoints" / f"step_{step}"
    _write_state(checkpoint, read_state(checkpoint) | dict(state))
    if not keep_checkpoints:
        for later in list_checkpoints(run_dir):
            if checkpoint_step(later) > step:
                _delete(later)
    for kind in ("checkpoints", "eval", "trajectories"):
        for path in (run_dir / kind).glob("step_*"):
            match = _NAME.match(path.name)
            if match and int(match[1]) > step:
                (undone / kind).mkdir(parents=True, exist_ok=True)
                path.replace(undone / kind / path.name)
    _tidy(run_dir, None, True)


def write_synced(path: Path, text: str) -> None:
    """Write a file that has its old content or the new after a crash, also one of the machine."""
    temporary = path.with_name(path.name + ".tmp")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    os.replace(temporary, path)
    _sync(path.parent)


def _write_state(checkpoint: Path, state: dict[str, Any]) -> None:
    write_synced(checkpoint / "state.json", json.dumps(state | {"crc32": _state_crc(state)}, indent=1) + "\n")


def _state_crc(state: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())


def _commit(work: Path, world_size: int, state: dict[str, Any]) -> None:
    """Make a checkpoint of a folder that all ranks have written."""
    files: dict[str, Any] = {}
    for rank in range(world_size):
        part = work / "trainer" / f"rank{rank}.json"
        files |= json.loads(part.read_text(encoding="utf-8"))["files"] | {f"trainer/{part.name}": _seal(part)}
    for folder in filter(Path.is_dir, work.rglob("*")):
        _sync(folder)
    _write_state(work, state | {"files": files})
    final = work.with_name(work.name.removeprefix("tmp_"))
    _delete(final)
    work.rename(final)
    _sync(final.parent)


def _tidy(run_dir: Path, keep_last: int | None, keep_best: bool) -> None:
    """`_retain`, where trouble is a warning: the checkpoint that was written is whole."""
    try:
        _retain(run_dir, keep_last, keep_best)
    except OSError as error:
        _warn(f"in tidying {run_dir / 'checkpoints'}: {error}; the next checkpoint tries again")


def _retain(run_dir: Path, keep_last: int | None, keep_best: bool) -> None:
    """Write best.json and delete the checkpoints that are not to be kept. keep_last: None keeps all.

    Of each kind of score the best stays; best.json names that of the kind that was measured last.
    """
    checkpoints = list_checkpoints(run_dir)
    newest = checkpoints[-keep_last if keep_last else 0 :]
    found = {checkpoint: _score(checkpoint) for checkpoint in (checkpoints if keep_best else newest)}
    scores = {checkpoint: score for checkpoint, score in found.items() if score is not None}
    best: dict[str, Path] = {}  # by conditions; of equals the first
    for checkpoint, score in scores.items():
        if score.conditions not in best or score.value > scores[best[score.conditions]].value:
            best[score.conditions] = checkpoint
    if scores:
        chosen = best[list(scores.values())[-1].conditions]
        score = scores[chosen]
        entry = {"checkpoint": chosen.name, "step": checkpoint_step(chosen), score.metric: score.value}
        write_synced(run_dir / "checkpoints" / "best.json", json.dumps(entry) + "\n")
    else:
        (run_dir / "checkpoints" / "best.json").unlink(missing_ok=True)
    for checkpoint in checkpoints:
        if checkpoint not in newest and checkpoint not in best.values():
            _delete(checkpoint)


def _score(checkpoint: Path) -> Score | None:
    try:
        score = read_state(checkpoint).get("heldout")
    except ValueError:  # damaged; whoever resumes from it is told
        return None
    return Score(**score) if score else None


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a kill leaves no half of one under it."""
    if checkpoint.exists():
        _remove(checkpoint.rename(checkpoint.with_name(f"tmp_old_{checkpoint.name}")))


def _remove(folder: Path) -> None:
    """Delete a folder of no use any more, or warn that it stays."""
    try:
        shutil.rmtree(folder)
    except OSError as error:
        _warn(f"{folder} cannot be deleted: {error}")


def _warn(text: str) -> None:
    print(f"warning: {text}", file=sys.stderr, flush=True)


def _seal(path: Path) -> dict[str, int]:
    """Flush a written file to the disk; return its size and CRC-32."""
    _sync(path)
    return {"bytes": path.stat().st_size, "crc32": _crc(path)}


def _crc(path: Path) -> int:
    crc = 0
    with path.open("rb") as file:
        while block := file.read(1 << 22):
            crc = zlib.crc32(block, crc)
    return crc


def _sync(path: Path) -> None:
    """Flush a file, or the names in a folder, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _host_copy(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to host memory; names that shared one (tied weights) share its copy."""
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in tensors.values():
        key = (tensor.data_ptr(), tensor.shape)
        if key not in copies:
            copies[key] = tensor.detach().to("cpu", copy=True)
    return {name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in tensors.items()}


def _generators() -> dict[str, Any]:
    """Return the state of this process's random number generators as JSON values."""
    name, keys, *rest = np.random.get_state()
    return {
        "torch": torch.get_rng_state().numpy().tobytes().hex(),
        "cuda": torch.cuda.get_rng_state().numpy().tobytes().hex() if torch.cuda.is_available() else None,
        "numpy": [name, keys.tolist(), *rest],
        "python": random.getstate(),
    }


def _set_generators(state: Mapping[str, Any]) -> None:
    def unpacked(text: str) -> Tensor:
        return torch.frombuffer(bytearray.fromhex(text), dtype=torch.uint8)

    torch.set_rng_state(unpacked(state["torch"]))
    if torch.cuda.is_available() and state["cuda"] is not None:
        torch.cuda.set_rng_state(unpacked(state["cuda"]))
    np.random.set_state(tuple(state["numpy"]))
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
