"""Updates over processes. Each launch serves several checks; its results come from `benchmarks/rank_worker.py`."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import DistributedType

from benchmarks.loss import ACCELERATE, TORCHRUN, launch, relative_error, update_error
from sapo.distributed import setup, total_norm, warmup_lr, zero_config

ROWS = ("--rows", "1", "8")


@pytest.fixture(scope="module")
def single():
    """One process, float32: micro-batches of 1 and of 8."""
    return launch((sys.executable,), *ROWS)


@pytest.fixture(scope="module")
def ddp():
    return launch(TORCHRUN, *ROWS)


@pytest.fixture(scope="module")
def zero2():
    return launch(ACCELERATE, "--zero-stage", "2", *ROWS)


def test_micro_batches_do_not_change_the_update(single):
    one, eight = single
    assert (one["sizes"], eight["sizes"]) == ([10, 5, 5], [2, 1, 1])
    assert update_error(one, eight) <= 1e-6
    assert relative_error(one["weights"], eight["weights"]) <= 1e-6


@pytest.mark.parametrize("backend", ["ddp", "zero2"])
def test_two_ranks_make_the_update_of_one(single, backend, request):
    found = request.getfixturevalue(backend)
    for expected in single:
        for result in found:
            assert update_error(result, expected) <= 1e-6
            assert relative_error(result["weights"], expected["weights"]) <= 1e-6
            assert result["counts"] == expected["counts"]
            norms = [(a, b) for a, b in zip(result["norms"], expected["norms"]) if math.isfinite(b)]
            assert len(norms) == 3 and all(a == pytest.approx(b, rel=1e-5) for a, b in norms)
    assert [result["sizes"] for result in found] == [[6, 3, 3], [1, 1, 1]]  # rank 0 holds six responses, rank 1 four


@pytest.mark.parametrize("backend", ["single", "ddp", "zero2"])
def test_an_infinite_loss_on_one_rank_skips_the_update_on_all(backend, request):
    for result in request.getfixturevalue(backend):
        assert [math.isfinite(norm) for norm in result["norms"]] == [True, True, False, True]
        assert {skipped for _, skipped in result["ranks"]} == {1}
        assert all(weight.isfinite().all() for weight in result["weights"].values())


@pytest.mark.parametrize("backend", ["single", "ddp", "zero2"])
def test_a_restored_updater_goes_on_bit_equal(backend, request):
    for result in request.getfixturevalue(backend):
        assert relative_error(result["after"], result["weights"]) > 1e-6
        assert all(torch.equal(result["resumed"][name], weight) for name, weight in result["after"].items())


def test_one_process_can_run_zero_in_bfloat16_with_an_offloaded_optimiser(single):
    (result,) = launch(
        (sys.executable,), "--zero-stage", "2", "--dtype", "bfloat16", "--offload-optimizer", "--rows", "4"
    )
    assert update_error(result, single[0]) <= 0.02  # bfloat16 has 8 bits
    assert [math.isfinite(norm) for norm in result["norms"]] == [True, True, False, True]
    assert relative_error(result["after"], result["weights"]) > 1e-6
    assert all(torch.equal(result["resumed"][name], weight) for name, weight in result["after"].items())


def test_float64_is_exact_over_ranks_and_micro_batches():
    one, eight = launch((sys.executable,), "--dtype", "float64", *ROWS)
    (ranks,) = launch(TORCHRUN, "--dtype", "float64", "--rows", "1")
    assert update_error(one, eight) <= 1e-12
    assert update_error(ranks, one) <= 1e-12
    assert relative_error(ranks["weights"], one["weights"]) <= 1e-12


def test_reductions_over_two_ranks(ddp):
    assert ddp[0]["ranks"] == [(0, 1), (1, 1)]
    assert ddp[0]["reduced"] == {"sum": 3.0, "max": 1.0, "min": 0.0}


def test_clipping_scales_the_gradient_to_the_bound(single):
    """AdamW hides the scale of a gradient, so it is read where the optimiser sees it."""
    result = single[0]
    assert result["norms"][0] > 0.3
    assert torch.cat([g.flatten() for g in result["clipped"].values()]).norm().item() == pytest.approx(0.3, rel=1e-4)
    scaled = {name: g * 0.3 / result["norms"][0] for name, g in result["gradient"].items()}
    assert relative_error(result["clipped"], scaled) <= 1e-5


def test_the_norm_of_a_large_gradient_is_exact():
    assert total_norm([torch.tensor([3.0]), torch.tensor([[4.0]], dtype=torch.bfloat16)]).item() == 5.0
    large = torch.full((20_000_000,), 0.1)  # summed in float32 it is off by several parts in a thousand
    assert total_norm([large]).item() == pytest.approx(0.1 * 20_000_000**0.5, rel=1e-7)


def test_warm_up_starts_above_zero_and_stays_at_the_peak():
    rates = [warmup_lr(update, peak=2e-4, warmup_updates=4) for update in (1, 2, 3, 4, 5, 100)]
    assert rates == pytest.approx([5e-5, 1e-4, 1.5e-4, 2e-4, 2e-4, 2e-4])
    assert warmup_lr(1, peak=2e-4, warmup_updates=0) == 2e-4


def test_a_launch_that_silently_runs_one_process_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with pytest.raises(RuntimeError, match="is alone .*torchrun --nproc_per_node 2"):
        setup()


def test_accelerate_launch_on_cpu_is_refused():
    command = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2", "--no_python"]
    command += [sys.executable, "-c", "from sapo.distributed import setup; setup()"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": "."}, timeout=120)
    assert done.returncode != 0
    assert "starts a single process" in done.stderr


@pytest.mark.parametrize("kind", ["DEEPSPEED", "FSDP"])
def test_a_launcher_that_shards_by_itself_is_refused(kind, monkeypatch):
    """Played by a stand-in: on a CPU accelerate ignores such a launcher."""
    found = SimpleNamespace(num_processes=1, distributed_type=DistributedType(kind))
    monkeypatch.setattr("sapo.distributed.Accelerator", lambda **_: found)
    with pytest.raises(RuntimeError, match=f"set up {kind}.*distributed.zero_stage to 1, 2 or 3"):
        setup()


def test_settings_that_cannot_be_combined():
    with pytest.raises(ValueError, match="float64"):
        setup(zero_stage=2, dtype="float64")


def test_a_missing_deepspeed_is_named_with_the_fix(monkeypatch):
    monkeypatch.setitem(sys.modules, "deepspeed", None)
    with pytest.raises(RuntimeError, match="zero_stage = 2 shards by DeepSpeed.*pip install.*or set .*zero_stage to 0"):
        setup(zero_stage=2)


def test_a_gpu_without_bfloat16_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")
    with pytest.raises(ValueError, match="Tesla T4 does not compute in it .*: set model.dtype to float32"):
        setup(dtype="bfloat16")


def test_zero_config_keeps_float32_gradients_and_offloads_on_request():
    config = zero_config(3, "bfloat16", 1.0, offload_optimizer=True)
    assert config["bf16"] == {"enabled": True} and config["data_types"] == {"grad_accum_dtype": "fp32"}
    assert config["zero_optimization"]["offload_optimizer"]["device"] == "cpu"
    assert "offload_optimizer" not in zero_config(2, "float32", 1.0)["zero_optimization"]
