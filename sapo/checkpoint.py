"""Checkpoints of a run: a Hugging Face folder beside the trainer's state, complete or not there at all.

runs/<name>/checkpoints/step_<n>/
    model/       weights and tokenizer, an ordinary Hugging Face folder
    trainer/     optimiser (and with ZeRO the master weights), random number generators
    state.json   step and counters
A checkpoint is written under a temporary name and renamed when complete, so a kill leaves the ones before it.
"""

from __future__ import annotations

import json
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
        shutil.rmtree(work, ignore_errors=True)
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
        (work / "state.json").write_text(json.dumps({"step": step, **state}, indent=1) + "\n", encoding="utf-8")
        shutil.rmtree(final, ignore_errors=True)
        work.rename(final)
        for old in list_checkpoints(run_dir)[: -keep if keep else 0]:
            shutil.rmtree(old)
    dist.barrier()
    return final


def load_checkpoint(checkpoint: Path, dist: Distributed, updater: Updater) -> dict[str, Any]:
    """Restore the trainer's state and return what `state` was; the weights come from the folder `model/`.

    All ranks must call. With other numbers of ranks than at the save, the generators are seeded anew.
    """
    updater.load(checkpoint / "trainer")
    generators = checkpoint / "trainer" / f"rng_rank{dist.rank}.pt"
    if generators.is_file():
        state = torch.load(generators, map_location="cpu", weights_only=True)
        torch.set_rng_state(state["cpu"])
        if torch.cuda.is_available() and state["cuda"] is not None:
            torch.cuda.set_rng_state(state["cuda"])
    return json.loads((checkpoint / "state.json").read_text(encoding="utf-8"))


def _generators() -> dict[str, torch.Tensor | None]:
    return {
        "cpu": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }
