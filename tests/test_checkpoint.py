"""Checkpoints: whole or not there, exact, and of use to any number of ranks at any ZeRO stage."""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import sapo.checkpoint
from sapo.checkpoint import (
    CheckpointWriter,
    Score,
    fault,
    list_checkpoints,
    load_checkpoint,
    locked,
    rewind,
)
from sapo.distributed import setup
from tests.checkpoint_worker import make_update, make_updater
from tests.tiny import tiny_tokenizer

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="module")
def dist():
    return setup()


@pytest.fixture
def updater(dist):
    """After two updates."""
    made = make_updater(dist)
    for number in (1, 2):
        make_update(made, number)
    return made


def writer(folder, dist, updater, **options):
    return CheckpointWriter(folder, dist, updater, tiny_tokenizer(), **options)


def tensors(updater):
    return {(piece.name, piece.start): piece.data.clone() for piece in updater.pieces()}


def equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


def worker(folder, *options, ranks=1):
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)] if ranks > 1 else []
    command = [sys.executable, *launcher, "-m", "tests.checkpoint_worker", str(folder), *options]
    subprocess.run(command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=180)


@pytest.mark.parametrize("async_save", [False, True])
def test_what_goes_on_from_a_checkpoint_is_bit_equal(tmp_path, dist, updater, async_save, monkeypatch):
    def slowly(*arguments, **options):
        time.sleep(0.3)
        run(*arguments, **options)

    run = CheckpointWriter._run
    monkeypatch.setattr(CheckpointWriter, "_run", slowly)
    saving = writer(tmp_path, dist, updater, async_save=async_save)
    torch.manual_seed(5), np.random.seed(6), random.seed(7)
    state = {"skipped_updates": 0, "drift": {"rollbacks": [1]}}
    saving.save(2, state, Score(0.25, "those"))
    state["drift"]["rollbacks"].append(2)  # in the step after
    assert bool(list_checkpoints(tmp_path)) != async_save  # training goes on while it is written
    drawn = (torch.rand(1).item(), np.random.random(), random.random())
    make_update(updater, 3)
    saving.finish()
    restored = make_updater(dist)
    (checkpoint,) = list_checkpoints(tmp_path)
    state = load_checkpoint(checkpoint, dist, restored)
    assert (state["step"], state["drift"]) == (2, {"rollbacks": [1]})
    assert state["heldout"] == {"value": 0.25, "conditions": "those", "metric": "eval/heldout/em"}
    assert (torch.rand(1).item(), np.random.random(), random.random()) == drawn
    make_update(restored, 3)
    assert restored.updates == 3 and equal(tensors(restored), tensors(updater))


def test_model_is_an_ordinary_folder_and_its_weights_are_saved_once(tmp_path, dist, updater):
    writer(tmp_path, dist, updater).finish()  # nothing to finish
    saving = writer(tmp_path, dist, updater)
    saving.save(2, {})
    saving.finish()
    folder = tmp_path / "checkpoints" / "step_2"
    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    assert equal(dict(model.named_parameters()), dict(updater.policy.model.named_parameters()))
    assert AutoTokenizer.from_pretrained(folder / "model").decode([2, 3]) == tiny_tokenizer().decode([2, 3])
    assert "lm_head.weight" not in load_file(folder / "model" / "model.safetensors")  # tied: one copy
    saved = load_file(folder / "trainer" / "rank0_0.safetensors")
    kinds = {name.rpartition("@")[0].rpartition("/")[2] for name in saved}
    assert kinds == {"exp_avg", "exp_avg_sq"}
    assert not [path for path in folder.rglob("*") if path.suffix in (".pt", ".bin", ".pkl")]


def test_weights_that_the_model_folder_lacks_are_in_the_trainers(tmp_path, dist, updater, monkeypatch):
    """Played by a folder that has one under another name; adapters are such weights too."""

    def renaming(folder, state_dict, **options):
        state_dict["other"] = state_dict.pop("model.norm.weight")
        save(folder, state_dict=state_dict, **options)

    save = updater.policy.model.save_pretrained
    monkeypatch.setattr(updater.policy.model, "save_pretrained", renaming)
    saving = writer(tmp_path, dist, updater, async_save=False)
    saving.save(2, {})
    restored = make_updater(dist)
    load_checkpoint(tmp_path / "checkpoints" / "step_2", dist, restored)
    assert equal(tensors(restored), tensors(updater))


def test_a_checkpoint_before_any_update_has_no_averages(tmp_path, dist, updater):
    fresh = make_updater(dist)
    writer(tmp_path, dist, fresh, async_save=False).save(0, {})
    load_checkpoint(tmp_path / "checkpoints" / "step_0", dist, updater)
    assert updater.updates == 0
    for each in (fresh, updater):
        make_update(each, 1)
    assert equal(tensors(fresh), tensors(updater))


def test_the_newest_and_the_best_are_kept(tmp_path, dist, updater):
    saving = writer(tmp_path, dist, updater, keep_last=2, async_save=False)
    best = tmp_path / "checkpoints" / "best.json"
    for step, em, kept, best_step in (
        (1, None, [1], None),
        (2, 0.25, [1, 2], 2),
        (3, 0.5, [2, 3], 3),
        (4, 0.5, [3, 4], 3),  # of equals the first
        (5, 0.0, [3, 4, 5], 3),
        (6, None, [3, 5, 6], 3),
    ):
        saving.save(step, {}, None if em is None else Score(em))
        assert [path.name for path in list_checkpoints(tmp_path)] == [f"step_{n}" for n in kept]
        assert (json.loads(best.read_text())["step"] if best.exists() else None) == best_step
    assert json.loads(best.read_text()) == {"checkpoint": "step_3", "step": 3, "eval/heldout/em": 0.5}
    saving.save(7, {}, Score(0.25), keep_all=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_3", "step_5", "step_6", "step_7"]
    writer(tmp_path, dist, updater, keep_last=1, keep_best=False, async_save=False).save(8, {})
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_8"]


def test_scores_of_other_questions_are_not_compared(tmp_path, dist, updater):
    saving = writer(tmp_path, dist, updater, keep_last=1, async_save=False)
    sampled = "eval/heldout/em_sampled"
    for step, score in (
        (1, Score(0.75, "ten")),
        (2, Score(0.5, "ten")),
        (3, Score(0.25, "all", sampled)),
        (4, Score(0.125, "all", sampled)),
    ):
        saving.save(step, {}, score)
    best = json.loads((tmp_path / "checkpoints" / "best.json").read_text())
    assert best == {"checkpoint": "step_3", "step": 3, "eval/heldout/em_sampled": 0.25}
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1", "step_3", "step_4"]


def test_a_failed_write_is_a_warning_and_the_next_checkpoint_is_written(tmp_path, dist, updater, monkeypatch, capsys):
    write = sapo.checkpoint.write_pieces
    saving = writer(tmp_path, dist, updater)

    def full(pieces, folder, *rest):
        if folder.parent.name in failing:
            raise OSError(28, "No space left on device")
        return write(pieces, folder, *rest)

    monkeypatch.setattr(sapo.checkpoint, "write_pieces", full)
    failing = ["tmp_step_2", "tmp_step_4", "tmp_step_5"]
    for step in (1, 2, 3, 4, 5):
        saving.save(step, {})
    warned = capsys.readouterr().err
    assert warned.count("could not be written") == 2 and "step_2 could not be written: OSError: [Errno 28]" in warned
    with pytest.raises(RuntimeError, match="step_5 could not be written: .* from step_3 by --resume"):
        saving.save(6, {})  # the second in a row
    assert sorted(path.name for path in list_checkpoints(tmp_path)) == ["step_1", "step_3"]
    waiting = writer(tmp_path, dist, updater, async_save=False)
    waiting.save(4, {})
    assert "step_4 could not be written" in capsys.readouterr().err
    with pytest.raises(RuntimeError, match="step_4 could not be written"):
        waiting.finish()  # the last


def test_a_folder_that_cannot_be_made_is_a_failed_write_too(tmp_path, dist, updater, capsys):
    (tmp_path / "checkpoints").touch()
    saving = writer(tmp_path, dist, updater, async_save=False)
    saving.save(1, {})
    assert "step_1 could not be written: NotADirectoryError" in capsys.readouterr().err
    (tmp_path / "checkpoints").unlink()
    saving.save(2, {})
    saving.finish()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2"]


def test_trouble_in_tidying_is_a_warning(tmp_path, dist, updater, monkeypatch, capsys):
    saving = writer(tmp_path, dist, updater, keep_last=1, async_save=False)
    saving.save(1, {})
    (tmp_path / "checkpoints" / "tmp_x").write_text("mine")
    (tmp_path / "checkpoints" / "tmp_step_note").write_text("mine")
    remove = shutil.rmtree

    def refuse(folder, **options):
        if folder.name == "tmp_old_step_1":
            raise PermissionError(13, "Permission denied", str(folder))
        remove(folder, **options)

    monkeypatch.setattr(shutil, "rmtree", refuse)
    saving.save(2, {})
    warned = capsys.readouterr().err
    assert f"warning: {tmp_path / 'checkpoints' / 'tmp_old_step_1'} cannot be deleted" in warned
    assert f"warning: {tmp_path / 'checkpoints' / 'tmp_step_note'} cannot be deleted" in warned
    monkeypatch.setattr(shutil, "rmtree", remove)
    (tmp_path / "checkpoints" / "best.json.tmp").mkdir()  # where it is written first
    saving.save(3, {}, Score(0.5))
    saving.finish()
    assert "warning: in tidying" in capsys.readouterr().err
    assert fault(tmp_path / "checkpoints" / "step_3") is None


def test_an_error_waits_for_the_checkpoint_being_written_but_not_for_ever(tmp_path, dist, updater, monkeypatch):
    def slowly(*arguments):
        going_on.wait(20)
        commit(*arguments)

    going_on, commit = threading.Event(), sapo.checkpoint._commit
    monkeypatch.setattr(sapo.checkpoint, "_commit", slowly)
    saving = writer(tmp_path, dist, updater)
    saving.wait()  # for nothing
    saving.save(2, {})
    other = writer(tmp_path, replace(dist, rank=1), updater)  # its part is written, and the first has to complete it
    other._work, other._thread = saving._work, threading.Thread()
    other._thread.start()
    for each in (saving, other):
        started = time.monotonic()
        each.wait(timeout_s=0.2)
        assert time.monotonic() - started < 5 and not list_checkpoints(tmp_path)
    threading.Timer(0.3, going_on.set).start()
    other.wait()
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_2"]
    saving.wait()


def test_a_run_is_one_process_at_a_time(tmp_path):
    run_dir = tmp_path / "runs" / "mine"
    with locked(run_dir):
        with pytest.raises(ValueError, match=f"{run_dir} is in use by another process .*, pid {os.getpid()}, since"):
            with locked(run_dir):
                pass
        with locked(tmp_path / "runs" / "other"):
            pass
    with locked(run_dir):
        assert not run_dir.exists()


def test_a_file_system_without_locks_is_a_warning(tmp_path, monkeypatch, capsys):
    def refuse(*_):
        raise OSError(37, "No locks available")

    monkeypatch.setattr(sapo.checkpoint.fcntl, "flock", refuse)
    with locked(tmp_path / "mine"):
        assert "No locks available" in capsys.readouterr().err


def test_a_full_disk_is_a_clear_error_and_the_checkpoint_before_still_loads(tmp_path, dist, updater):
    """Played by a bound on the size of a file."""
    saving = writer(tmp_path, dist, updater)
    saving.save(2, {})
    saving.finish()
    before = tensors(updater)
    make_update(updater, 3)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        saving.save(3, {})
        with pytest.raises(RuntimeError, match="step_3 could not be written: .*too large.* from step_2 by --resume"):
            saving.finish()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["step_2"]
    restored = make_updater(dist)
    load_checkpoint(tmp_path / "checkpoints" / "step_2", dist, restored)
    assert fault(tmp_path / "checkpoints" / "step_2") is None and equal(tensors(restored), before)
    saving.save(3, {})  # there is room again
    saving.finish()
    assert len(list_checkpoints(tmp_path)) == 2


def test_a_file_that_was_cut_or_altered_is_found_and_named(tmp_path, dist, updater):
    writer(tmp_path, dist, updater, async_save=False).save(2, {})
    checkpoint = tmp_path / "checkpoints" / "step_2"
    assert fault(checkpoint) is None
    names = [str(path.relative_to(checkpoint)) for path in checkpoint.rglob("*") if path.is_file()]
    assert {"model/model.safetensors", "model/config.json", "trainer/rank0_0.safetensors"} < set(names)
    for name in names:
        path = checkpoint / name
        content = path.read_bytes()
        path.write_bytes(content[:-2])
        assert str(path) in fault(checkpoint)
        altered = content.replace(b"4", b"5", 1) if name == "state.json" else content[:-9] + b"9" + content[-8:]
        path.write_bytes(altered)
        assert altered != content and str(path) in fault(checkpoint) and "CRC-32" in fault(checkpoint)
        if name != "state.json":
            assert [fault(checkpoint, rank, 2) is None for rank in (0, 1)].count(False) == 1  # each reads its share
        path.unlink()
        assert str(path) in fault(checkpoint)
        path.write_bytes(content)
    assert fault(checkpoint) is None


def test_going_back_loses_nothing_but_what_it_is_told_to(tmp_path, dist, updater):
    saving = writer(tmp_path, dist, updater, async_save=False)
    for step, em in ((1, 0.25), (2, 0.5), (3, 0.75)):
        saving.save(step, {"drift": {}}, Score(em))
    (tmp_path / "eval").mkdir()
    for step in (1, 2):
        (tmp_path / "eval" / f"step_{step}_greedy.json").touch()
    rewind(tmp_path, 2, tmp_path / "undone", {"drift": {"rollbacks": 1}}, keep_checkpoints=False)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1", "step_2"]
    assert not (tmp_path / "undone").exists()
    rewind(tmp_path, 1, tmp_path / "undone", {"drift": {"rollbacks": 2}}, keep_checkpoints=True)
    assert [path.name for path in list_checkpoints(tmp_path)] == ["step_1"]
    assert [path.name for path in list_checkpoints(tmp_path / "undone")] == ["step_2"]
    assert [path.name for path in (tmp_path / "undone" / "eval").iterdir()] == ["step_2_greedy.json"]
    assert json.loads((tmp_path / "checkpoints" / "best.json").read_text())["step"] == 1
    state = load_checkpoint(tmp_path / "checkpoints" / "step_1", dist, updater)
    assert state["drift"] == {"rollbacks": 2} and fault(tmp_path / "checkpoints" / "step_1") is None


def test_any_number_of_ranks_goes_on_at_any_stage(tmp_path, dist):
    """One process, then two with ZeRO-3, then one with ZeRO-1 and its optimiser on the CPU, against one all along."""
    worker(tmp_path, "--as-step", "2")
    worker(tmp_path, "--from-step", "2", "--as-step", "4", "--zero-stage", "3", ranks=2)
    worker(tmp_path, "--from-step", "4", "--as-step", "6", "--zero-stage", "1", "--offload-optimizer")
    expected, found = make_updater(dist), make_updater(dist)
    for number in range(1, 7):
        make_update(expected, number)
    load_checkpoint(tmp_path / "checkpoints" / "step_6", dist, found)
    assert found.updates == 6
    for (name, _), tensor in tensors(expected).items():
        difference = (tensors(found)[name, 0] - tensor).norm() / tensor.norm()
        assert difference < 1e-5, name
    assert not equal(tensors(found), tensors(make_updater(dist)))


def test_master_weights_are_saved_where_the_model_is_in_bfloat16(tmp_path):
    worker(tmp_path, "--as-step", "2", "--zero-stage", "2", "--dtype", "bfloat16", ranks=2)
    folder = tmp_path / "checkpoints" / "step_2"
    model = load_file(folder / "model" / "model.safetensors")
    parts = [load_file(folder / "trainer" / f"rank{rank}_0.safetensors") for rank in (0, 1)]
    master = {}
    for key, tensor in sorted((item for part in parts for item in part.items()), key=lambda item: item[0].split("@")):
        name, _, start = key.rpartition("@")
        master.setdefault(name, {})[int(start)] = tensor
    for name, weight in model.items():
        pieces = master[f"model.{name}/weight"]
        whole = torch.cat([pieces[start] for start in sorted(pieces)]).reshape(weight.shape)
        assert weight.dtype == torch.bfloat16 and whole.dtype == torch.float32
        assert torch.equal(whole.bfloat16(), weight)
    assert any(not torch.equal(part.float().bfloat16().float(), part) for part in parts[0].values())
