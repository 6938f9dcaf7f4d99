"""The user's own commands, nodes and failures. A node is a launcher of its own on this machine, of one process."""

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from benchmarks.nodes import (
    free_port,
    kill_node,
    launch_node,
    launch_two_nodes,
    same_training,
    train_command,
    wait_for_checkpoint,
)
from sapo.launch import check_agreement, overruled, source_hashes
from sapo.watch import Watch

SETTINGS = {
    "dtype": "bfloat16", "zero_stage": 3, "offload_optimizer": True, "offload_params": False, "max_grad_norm": 1.0,
    "gpus": 8,
}  # fmt: skip


def launched(folder: Path, zero_stage: int, ending: str, **options) -> tuple[list[dict], list[int], list[str]]:
    """Run tests/launched.py on two nodes; return what the ranks held, the exit statuses and the outputs."""
    command = [str(Path(__file__).with_name("launched.py")), str(zero_stage), ending, str(folder)]
    nodes = launch_two_nodes([command, command], folder, **options)
    statuses = [node.wait(timeout=120) for node in nodes]
    outputs = [(folder / f"node_{machine}.log").read_text() for machine in (0, 1)]
    return [json.loads((folder / f"rank_{rank}.json").read_text()) for rank in (0, 1)], statuses, outputs


def test_zero_2_over_two_nodes_of_accelerate_and_an_error_on_one_rank(tmp_path):
    """Each rank holds half of Adam's state; an error of rank 1 ends rank 0, which is not even in a collective call."""
    started = time.monotonic()
    ranks, statuses, outputs = launched(tmp_path, 2, "error")
    assert time.monotonic() - started < 100  # rank 0 would sleep for 120 s
    for rank, held in enumerate(ranks):
        assert (held["rank"], held["local_rank"], held["world_size"]) == (rank, 0, 2)
        assert held["weights"] == held["model"] > 5000
        assert held["exp_avg"] == pytest.approx(held["model"] / 2, abs=64)
    assert all(statuses)
    first, second = outputs
    assert second.count("missing.jsonl") == 1 and "error: " in second
    assert first.count("error: rank 1 (node 1, host ") == 1 and first.count("missing.jsonl") == 1
    assert first.count("--resume") == 1


def test_zero_3_over_two_nodes_of_torchrun_and_a_rank_that_is_killed(tmp_path):
    """Each rank holds half of everything; a rank that falls silent ends the other in a bounded time."""
    started = time.monotonic()
    ranks, statuses, outputs = launched(tmp_path, 3, "kill", torchrun=True)
    assert time.monotonic() - started < 100
    for held in ranks:
        assert held["weights"] == pytest.approx(held["model"] / 2, abs=64) and held["whole"] == 0
        assert held["exp_avg"] == pytest.approx(held["model"] / 2, abs=64)
    assert all(statuses)
    assert outputs[0].count("error: rank 1 (node 1, host ") == 1 and "no sign of life for" in outputs[0]


def test_a_node_is_lost_and_the_resumed_training_equals_an_uninterrupted_one(tmp_path):
    """The uninterrupted one is one node of two processes, started as on a node of several GPUs."""
    stage = "distributed.zero_stage=2"
    log = tmp_path / "whole.log"
    assert launch_node(train_command(tmp_path, stage, "name=whole"), log).wait(timeout=200) == 0, log.read_text()
    command = train_command(tmp_path, stage, "name=lost")
    nodes = launch_two_nodes([command, command], tmp_path)
    wait_for_checkpoint(tmp_path / "lost", 2)
    kill_node(nodes[1])
    killed = time.monotonic()
    assert nodes[0].wait(timeout=90) != 0
    assert time.monotonic() - killed < 60
    said = (tmp_path / "node_0.log").read_text()
    assert said.count("error: rank 1 (node 1, host ") == 1 and "--resume" in said
    record = json.loads((tmp_path / "lost" / "run.json").read_text())
    assert record["status"] == "failed" and record["world_size"] == 2

    resumed = launch_two_nodes([[*command, "--resume"]] * 2, tmp_path)
    assert [node.wait(timeout=200) for node in resumed] == [0, 0], (tmp_path / "node_0.log").read_text()
    assert same_training(tmp_path / "lost", tmp_path / "whole", 4)


def test_nodes_with_other_settings_are_named_once_and_train_nothing(tmp_path):
    commands = [train_command(tmp_path, "name=apart", f"optim.lr={lr}") for lr in ("1e-3", "2e-3")]
    nodes = launch_two_nodes(commands, tmp_path)
    assert all(node.wait(timeout=100) for node in nodes)
    for machine in (0, 1):
        said = (tmp_path / f"node_{machine}.log").read_text()
        assert said.count("do not run the same: setting optim.lr is 0.001 on rank 0") == 1, said
        assert "0.002 on rank 1" in said and 'train.py", line' not in said
    assert not (tmp_path / "apart").exists()


def test_a_port_in_use_is_named_with_the_option_that_cures_it(tmp_path):
    port = free_port()
    with socket.create_server(("127.0.0.1", int(port))):
        node = launch_node([str(Path(__file__))], tmp_path / "log", machines=2, machine=0, port=port)
        assert node.wait(timeout=60) != 0
    assert f"on port `{port}`" in (tmp_path / "log").read_text()
    assert "--main_process_port" in (tmp_path / "log").read_text()


def test_a_launcher_that_says_nothing_or_the_same_is_followed():
    assert overruled({}, **SETTINGS) == []
    plain = {"ACCELERATE_MIXED_PRECISION": "no", "ACCELERATE_DYNAMO_BACKEND": "NO"}  # of `accelerate launch` alone
    assert overruled(plain, **SETTINGS) == []
    same = {
        "ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu", "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "none",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_GRADIENT_CLIPPING": "1.0", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "1",
    }  # fmt: skip
    assert overruled(same, **SETTINGS) == []


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"ACCELERATE_USE_FSDP": "true"}, "asks for FSDP.*distributed.zero_stage = 3.*--multi_gpu"),
        ({"ACCELERATE_USE_MEGATRON_LM": "true"}, "asks for MEGATRON_LM"),
        ({"ACCELERATE_USE_PARALLELISM_CONFIG": "true"}, "asks for PARALLELISM_CONFIG"),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "2"}, "zero_stage = 3 here, 2 there"),
        (
            {"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"},
            "distributed.offload_optimizer = cpu here, none there",
        ),
        ({"ACCELERATE_USE_DEEPSPEED": "true", "ACCELERATE_DEEPSPEED_CONFIG_FILE": "ds.json"}, "ds.json"),
        ({"ACCELERATE_USE_CPU": "True"}, "asks for the CPU.*CUDA_VISIBLE_DEVICES="),
    ],
)
def test_a_launcher_that_asks_for_other_sharding_is_refused(environment, message):
    with pytest.raises(RuntimeError, match=message):
        overruled(environment, **SETTINGS)


def test_what_the_config_overrules_is_said():
    environment = {
        "ACCELERATE_MIXED_PRECISION": "fp16", "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4", "ACCELERATE_GRADIENT_CLIPPING": "0.5",
    }  # fmt: skip
    said = overruled(environment, **SETTINGS)
    assert [sentence.split(" asks for ")[1].split(" (")[0] for sentence in said] == [
        "mixed_precision fp16", "dynamo_backend inductor", "gradient_accumulation_steps 4", "gradient_clipping 0.5",
    ]  # fmt: skip
    assert overruled({"ACCELERATE_MIXED_PRECISION": "bf16"}, **SETTINGS | {"dtype": "float32"}) != []


def test_a_default_config_of_accelerate_reaches_the_check(tmp_path):
    """DEEPSPEED, ZeRO-2 in default_config.yaml against ZeRO-3 here; the same through the launcher and `--multi_gpu`."""
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text(
        "compute_environment: LOCAL_MACHINE\ndistributed_type: DEEPSPEED\nnum_machines: 1\nnum_processes: 1\n"
        "machine_rank: 0\nmixed_precision: fp16\nuse_cpu: false\ndeepspeed_config:\n  zero_stage: 2\n"
    )
    command = [sys.executable, "-m", "accelerate.commands.launch", "--main_process_port", "0"]
    command += train_command(tmp_path, "name=refused", "distributed.zero_stage=3")
    environment = os.environ | {"HF_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert done.stderr.count("distributed.zero_stage = 3 here, 2 there") == 1
    assert not (tmp_path / "refused").exists()


def test_ranks_that_differ_are_named():
    def gather(of_others):
        return lambda mine: [mine, ("b", of_others)]

    mine = {"file sapo/loss.py": "12ab", "setting seed": 0}
    check_agreement(mine, gather(mine), "Fix it")
    other = {"file sapo/loss.py": "99ff", "package torch": "2.13", "setting seed": 0}
    with pytest.raises(RuntimeError) as error:
        check_agreement(mine, gather(other), "Fix it")
    text = str(error.value)
    assert "file sapo/loss.py is 12ab on rank 0 (" in text and "99ff on rank 1 (b)" in text
    assert "package torch is missing on rank 0" in text and "seed" not in text and text.endswith("Fix it")
    with pytest.raises(RuntimeError, match="and 4 more"):
        check_agreement(mine, gather({f"setting {n}": 1 for n in range(10)}), "Fix it")


def test_every_source_file_counts():
    found = source_hashes()
    assert {"train.py", "sapo/loss.py", "sapo/engine/hf.py", "retriever/index.py"} <= found.keys()
    assert all(len(value) == 8 for value in found.values())


def test_a_run_of_one_process_watches_nobody(monkeypatch):
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    with Watch() as watch:
        assert watch.fail(ValueError("mine"))


def test_a_group_that_cannot_meet_says_where_and_what_to_try(monkeypatch):
    from sapo.distributed import setup

    def taken(**_):
        raise torch.distributed.DistNetworkError("The server socket has failed to listen: EADDRINUSE\nmore")

    monkeypatch.setattr("sapo.distributed.Accelerator", taken)
    monkeypatch.setenv("MASTER_ADDR", "node-a")
    monkeypatch.setenv("MASTER_PORT", "29500")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(RuntimeError, match="node-a:29500.*EADDRINUSE.*--main_process_port"):
        setup()
