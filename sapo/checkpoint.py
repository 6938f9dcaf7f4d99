"""Checkpoints of a run: a Hugging Face folder beside the trainer's state, complete or not there at all.

runs/<name>/checkpoints/step_<n>/
    model/       weights and tokenizer, an ordinary Hugging Face folder
    trainer/     optimiser (and with ZeRO the master weights), random number generators
    state.json   step and counters
A checkpoint is written under a temporary name and renamed when complete, so a kill leaves the ones before it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase

from sapo.distributed import Distributed, Updater

_NAME = re.compile(r"step_(\d+)")


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


def save_checkpoint(
    run_dir: Path,
    step: int,
    dist: Distributed,
    updater: Updater,
    tokenizer: PreTrainedTokenizerBase,
    state: dict[str, Any],
    keep: int | None = None,
) -> Path:
    """Save the run after `step`, then delete all but the newest `keep` checkpoints. All ranks must call.

    state: JSON values that `load_checkpoint` gives back. A complete checkpoint of the same step is replaced.
    """
    final = run_dir / "checkpoints" / f"step_{step}"
    work = final.with_name(f"tmp_{final.name}")
    if dist.is_main:
        for rest in final.parent.glob("tmp_*"):  # of a save or a deletion that was killed
            shutil.rmtree(rest)
        (work / "trainer").mkdir(parents=True)
    dist.barrier()
    weights = updater.state_dict()
    if dist.is_main:
        updater.policy.model.save_pretrained(work / "model", state_dict=weights)
        tokenizer.save_pretrained(work / "model")
    updater.save(work / "trainer")
    torch.save(_generators(), work / "trainer" / f"rng_rank{dist.rank}.pt")
    dist.barrier()
    if dist.is_main:
        state = {"step": step, "zero_stage": dist.zero_stage, "world_size": dist.world_size, **state}
        (work / "state.json").write_text(json.dumps(state, indent=1) + "\n", encoding="utf-8")
        _delete(final)
        work.rename(final)
        for old in list_checkpoints(run_dir)[: -keep if keep else 0]:
            _delete(old)
    dist.barrier()
    return final


def load_checkpoint(checkpoint: Path, dist: Distributed, updater: Updater) -> dict[str, Any]:
    """Restore the trainer's state and return what `state` was; the weights come from the folder `model/`.

    All ranks must call. Without ZeRO the number of ranks may differ from that of the save; a rank that was not there
    keeps its fresh generators. Raises ValueError for another ZeRO stage, or with ZeRO another number of ranks.
    """
    state = json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))
    if dist.zero_stage != state["zero_stage"] or (dist.zero_stage and dist.world_size != state["world_size"]):
        raise ValueError(
            f"{checkpoint} was saved with ZeRO stage {state['zero_stage']} on {state['world_size']} ranks, this run "
            f"has stage {dist.zero_stage} on {dist.world_size}: resume with the saved ones (without ZeRO any number of "
            "ranks will do), or start a new run with model.path set to its folder model/"
        )
    updater.load(checkpoint / "trainer")
    generators = checkpoint / "trainer" / f"rng_rank{dist.rank}.pt"
    if generators.is_file():
        saved = torch.load(generators, map_location="cpu", weights_only=True)
        torch.set_rng_state(saved["cpu"])
        if torch.cuda.is_available() and saved["cuda"] is not None:
            torch.cuda.set_rng_state(saved["cuda"])
    return state


def rewind(run_dir: Path, step: int, undone: Path, state: dict[str, Any]) -> None:
    """Make the checkpoint of `step` the newest and change `state` in it. One rank calls, while no other reads.

    Later checkpoints are deleted; later evaluations and trajectories are moved to the folder `undone`, none is lost.
    """
    file = run_dir / "checkpoints" / f"step_{step}" / "state.json"
    saved = json.loads(file.read_text(encoding="utf-8"))
    temporary = file.with_name(file.name + ".tmp")
    temporary.write_text(json.dumps(saved | state, indent=1) + "\n", encoding="utf-8")
    os.replace(temporary, file)
    for checkpoint in list_checkpoints(run_dir):
        if checkpoint_step(checkpoint) > step:
            _delete(checkpoint)
    for kind in ("eval", "trajectories"):
        for path in (run_dir / kind).glob("step_*"):
            match = _NAME.match(path.name)
            if match and int(match[1]) > step:
                (undone / kind).mkdir(parents=True, exist_ok=True)
                path.replace(undone / kind / path.name)


def _delete(checkpoint: Path) -> None:
    """Delete a checkpoint; it loses its name first, so that a kill leaves no half of one under it."""
    if checkpoint.exists():
        shutil.rmtree(checkpoint.rename(checkpoint.with_name(f"tmp_old_{checkpoint.name}")))


def _generators() -> dict[str, torch.Tensor | None]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
