import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config

from sapo.config import ConfigError, LoraSettings, load_config
from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.plan import (
    GB,
    HARDWARE,
    KNOWN_MODELS,
    Assumptions,
    ModelShape,
    Setup,
    cache_bytes,
    forward_bytes,
    layer_bytes,
    main,
    make_plan,
    memory,
    model_config,
    plan_here,
    reduction_bytes,
    shape_of,
    state_bytes,
    step_seconds,
    suggest,
)
from sapo.policy import Policy
from tests.tiny import tiny_tokenizer
from tests.zero_bytes import MODEL

ROOT = Path(__file__).resolve().parent.parent
SHAPE = ModelShape(
    parameters=1000, trained=1000, layers=2, hidden=8, heads=4, kv_heads=2, head_dim=2, intermediate=16, vocabulary=32,
    tied=True,
)  # fmt: skip
SETUP = Setup(
    shape=SHAPE, zero_stage=0, ranks=4, ranks_per_node=4, on_gpu=False, dtype_bytes=2, offload_optimizer=False,
    offload_params=False, reference="copy", offload_reference=False, checkpointing=True, micro_batch_tokens=64,
    micro_batch_responses=4, max_rows=6, group_size=2, prefill_tokens=40, max_prompt_tokens=8,
    max_observation_tokens=7, max_trajectory_tokens=32, schedule="lockstep", engine_share=0.0,
    engine_sleeps=True, engine_update_bytes=0, async_save=True, index_bytes=0,
)  # fmt: skip
CONFIG = str(ROOT / "configs" / "qwen7b.yaml")
TINY = dict(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, intermediate_size=128,
            vocab_size=500, tie_word_embeddings=True)  # fmt: skip


def plan_7b(*overrides, gpus=8, gb=80.0, **options):
    return make_plan(load_config(CONFIG, overrides), gpus=gpus, device_bytes=int(gb * GB), **options)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("Qwen/Qwen2.5-1.5B-Instruct", 1_543_714_304),
        ("Qwen/Qwen2.5-3B", 3_085_938_688),
        ("Qwen/Qwen2.5-3B-Instruct", 3_085_938_688),
        ("Qwen/Qwen2.5-7B-Instruct", 7_615_616_512),
        ("Qwen/Qwen2.5-14B-Instruct", 14_770_033_664),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
        ("meta-llama/Llama-3.2-3B-Instruct", 3_212_749_824),
    ],
)
def test_the_known_models_have_the_published_number_of_parameters(name, parameters):
    assert shape_of(KNOWN_MODELS[name]()).parameters == parameters


def test_a_shape_is_read_from_the_config():
    assert dataclasses.astuple(shape_of(Qwen2Config(**TINY))) == (
        # embedding; q, k, v with biases; o; MLP; three norms
        500 * 64 + 64 * (64 + 32 + 32) + 128 + 64 * 64 + 3 * 64 * 128 + 3 * 64, 69184, 1, 64, 4, 2, 16, 128, 500, True,
    )  # fmt: skip
    untied = shape_of(LlamaConfig(**TINY | {"tie_word_embeddings": False, "head_dim": 32}))
    assert (untied.head_dim, untied.tied, untied.matrix_parameters) == (32, False, untied.parameters - 500 * 64)


def test_adapters_are_counted_and_only_they_are_trained():
    lora = LoraSettings(rank=2, target_modules=["q_proj", "down_proj"])
    shape = shape_of(Qwen2Config(**TINY), lora)
    assert (shape.trained, shape.parameters) == (2 * (64 + 64) + 2 * (128 + 64), 69184 + 640)
    states = state_bytes(dataclasses.replace(SETUP, shape=shape, zero_stage=1, reference="adapters off"))
    assert states == {
        "parameters": 2 * 69824, "autocast copies": 0, "gradients": 6 * 640, "optimizer state": 12 * 160,
        "reference": 0,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"dtype_bytes": 4, "ranks": 1}, (4000, 0, 4000, 8000, 4000)),
        ({}, (4000, 2000, 4000, 8000, 4000)),
        ({"zero_stage": 1}, (2000, 0, 6000, 3000, 2000)),
        ({"zero_stage": 1, "dtype_bytes": 4}, (4000, 0, 4000, 3000, 4000)),
        ({"zero_stage": 2}, (2000, 0, 1000, 3000, 2000)),
        ({"zero_stage": 3}, (500, 0, 1000, 3000, 500)),
        ({"zero_stage": 2, "dtype_bytes": 4}, (4000, 0, 1000, 3000, 4000)),
        ({"zero_stage": 2, "offload_optimizer": True, "offload_reference": True}, (2000, 0, 0, 0, 0)),
        ({"zero_stage": 1, "offload_optimizer": True}, (2000, 0, 4000, 0, 2000)),
        ({"zero_stage": 3, "offload_optimizer": True, "offload_params": True}, (0, 0, 0, 0, 0)),
        ({"zero_stage": 1, "ranks": 3, "reference": "none"}, (2000, 0, 6000, 12 * 334, 0)),
    ],
)
def test_states_of_each_stage(changes, expected):
    assert tuple(state_bytes(dataclasses.replace(SETUP, **changes)).values()) == expected


@pytest.mark.parametrize("gpus", [2, 8])
def test_states_agree_with_the_estimators_of_deepspeed(gpus):
    shape = shape_of(KNOWN_MODELS["Qwen/Qwen2.5-7B-Instruct"]())
    count = shape.parameters
    setup = dataclasses.replace(SETUP, shape=shape, ranks=gpus, zero_stage=2, reference="none")
    theirs = estimate_zero2_model_states_mem_needs(count, gpus, cpu_offload=False)[1]
    # It counts the gradients twice, in bfloat16 beside float32; DeepSpeed 0.19 frees the former as it reduces them.
    assert sum(state_bytes(setup).values()) == pytest.approx(theirs - 2 * count / gpus, rel=1e-8)
    # It adds its largest layer, gathered; the plan counts gathered weights apart.
    theirs = estimate_zero3_model_states_mem_needs(count, shape.head_parameters, gpus, cpu_offload=False)[1]
    sharded = dataclasses.replace(setup, zero_stage=3)
    assert sum(state_bytes(sharded).values()) == pytest.approx(theirs - 4 * shape.head_parameters, rel=1e-8)


def saved_bytes(layers: int, tokens: int) -> int:
    """Return the bytes that autograd keeps for a forward of a Llama without checkpointing, weights left out."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(LlamaConfig(**TINY | {"num_hidden_layers": layers}))
    weights = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = (storage.nbytes(), storage)  # held, so that no address comes twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        mask = torch.ones(1, tokens)
        mask[0, 0] = 0
        Policy(model, packed=True)(torch.randint(500, (1, tokens)), mask)
    return sum(size for size, _ in kept.values())


def test_a_layer_keeps_what_autograd_saves():
    tokens = 257  # the last one is not forwarded
    measured = (saved_bytes(3, tokens) - saved_bytes(1, tokens)) / 2 / (tokens - 1)
    assert layer_bytes(shape_of(LlamaConfig(**TINY)), 4, 4) == pytest.approx(measured, rel=0.03)


def test_bytes_of_a_token():
    # two norms of 8 * (4 + 2 + 2); queries of 8 three times, keys and values of 4, four vectors of 16, 2 bytes each
    assert layer_bytes(SHAPE, 2, 2) == 2 * 64 + 2 * (24 + 8 + 64)
    assert layer_bytes(SHAPE, 2, 4) == layer_bytes(SHAPE, 2, 2) + 2 * 8 * 2
    assert forward_bytes(SHAPE, 2) == 2 * 3 * 24 + 32


@pytest.mark.parametrize("rows", [4, 12])
def test_the_cache_is_never_larger_than_planned(rows):
    torch.manual_seed(0)
    config = Qwen2Config(**TINY | {"num_hidden_layers": 2})
    engine = HFEngine(AutoModelForCausalLM.from_config(config), tiny_tokenizer())
    session = engine.session(range(rows), Sampling(), ["</answer>"])
    session.generate(range(rows), [[5] * 40] * rows, [20] * rows)
    session.generate(range(rows), [[6] * 30] * rows, [10] * rows)
    planned = cache_bytes(
        dataclasses.replace(SETUP, shape=shape_of(config), dtype_bytes=4, max_rows=rows, max_trajectory_tokens=100)
    )
    assert 0.5 * planned < session.cache.peak_bytes <= planned


def test_phases_hold_what_lives_in_them():
    setup = dataclasses.replace(SETUP, zero_stage=2)
    planned = memory(setup, 0)
    assert "gradients" not in planned.rollout and planned.update["gradients"] == 1000
    stage1 = memory(dataclasses.replace(SETUP, zero_stage=1), 0)
    assert stage1.rollout["gradients"] == 4000 and stage1.update["gradients"] == 6000
    assert "KV cache" in planned.rollout and "KV cache" not in planned.update
    assert planned.rollout["reference"] == planned.update["reference"] == 2000
    offloaded = memory(dataclasses.replace(setup, offload_reference=True), 0)
    assert "reference" not in offloaded.update and offloaded.scoring["reference"] == 2000
    assert offloaded.host["reference"] == 4 * 2000
    stage3 = memory(dataclasses.replace(SETUP, zero_stage=3), 0)
    assert stage3.rollout["gathered weights"] == 2000 and stage3.rollout["gradients"] == 1000
    assert "gradients" in memory(SETUP, 0).rollout and "gradients" not in memory(
        dataclasses.replace(SETUP, ranks=1), 0
    ).rollout
    # rows of 32 tokens at most, 6 of them: 36 + 16 slots, 2 * 2 * 2 numbers of 2 bytes in each layer, one twice
    assert stage3.rollout["KV cache"] == 6 * (36 + 16) * 16 * 3
    # 6 observations of 8 tokens cut at 40 tokens a forward; their masks see 32 slots by two groups
    assert stage3.rollout["prefill"] == 40 * (2 * 3 * 24 + 32) + 40 * 32 * 2 * 2


def test_reductions_hold_buckets_of_gradients():
    setup = dataclasses.replace(SETUP, zero_stage=2)
    assert (reduction_bytes(SETUP), reduction_bytes(dataclasses.replace(SETUP, zero_stage=1))) == (0, 0)
    # in bfloat16 a bucket, its flat and its float32 copy; the gradient of the head when that is larger
    assert reduction_bytes(setup) == 2 * 50_000_000 + (2 + 4) * 50_000_000
    large = dataclasses.replace(SHAPE, vocabulary=152_064, hidden=3584)
    assert reduction_bytes(dataclasses.replace(setup, shape=large)) == 2 * 50_000_000 + 4 * 152_064 * 3584
    assert reduction_bytes(dataclasses.replace(setup, shape=dataclasses.replace(large, trained=10))) == 400_000_000
    stage3 = dataclasses.replace(setup, zero_stage=3, shape=large)
    assert reduction_bytes(stage3) == 4 * 50_000_000 + 4 * 152_064 * 3584
    float32 = {"dtype_bytes": 4}
    for changes in ({"zero_stage": 1, "offload_optimizer": True}, {"zero_stage": 3}, float32):
        assert reduction_bytes(dataclasses.replace(setup, **changes)) == 400_000_000


def test_a_node_holds_a_copy_of_what_is_written():
    setup = dataclasses.replace(SETUP, zero_stage=2, on_gpu=True, reference="none", ranks=8)
    # of half the ranks, 125 parameters each: moments and float32 weights; the first also the weights in bfloat16
    assert memory(setup, 0).host == {"checkpoint": 12 * 500 + 2000, "processes": 12 * GB}
    assert memory(dataclasses.replace(setup, zero_stage=3), 0).host["checkpoint"] == 12 * 500 + 2 * 2000
    assert memory(dataclasses.replace(setup, dtype_bytes=4), 0).host["checkpoint"] == 8 * 500 + 4000
    waits = dataclasses.replace(setup, async_save=False)
    assert memory(waits, 0).host == {"loading": 8000, "processes": 12 * GB}


def test_vllm_takes_its_share_and_no_cache_of_ours():
    settings = ("rollout.engine=vllm", "rollout.vllm.memory_fraction=0.25")
    plan = plan_7b(*settings)
    rollout = plan.memory.rollout
    assert rollout["vLLM"] == 20 * GB and rollout["gathered weights"] == 1 << 30
    assert not {"KV cache", "prefill", "sampling"} & set(rollout)
    assert "vLLM" not in plan.memory.update and plan.suggestion.max_rows == 320
    assert "vLLM takes" in plan.assumptions[1]
    awake = plan_7b(*settings, "rollout.vllm.sleep=false").memory
    assert awake.update["vLLM"] == awake.scoring["vLLM"] == 20 * GB
    on_cpu = plan_7b(*settings, on_gpu=False)
    assert "KV cache" in on_cpu.memory.rollout and "not modelled" in on_cpu.assumptions[1]


@pytest.fixture(scope="module")
def live_bytes():
    """Bytes of live tensors by "stage dtype"."""
    command = [sys.executable, "-m", "tests.zero_bytes"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stderr
    return json.loads(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize(
    ("stage", "dtype", "a_parameter"),
    [
        (1, "bfloat16", 18), (1, "float32", 16), (2, "bfloat16", 14), (2, "float32", 16),
        # weights, gradients, float32 weights and moments; the bucket apart
        (3, "bfloat16", 18), (3, "float32", 20),
    ],
)  # fmt: skip
def test_the_bytes_between_updates_are_those_of_live_tensors(live_bytes, stage, dtype, a_parameter):
    shape, size = shape_of(MODEL), 2 if dtype == "bfloat16" else 4
    setup = dataclasses.replace(SETUP, shape=shape, zero_stage=stage, ranks=1, dtype_bytes=size, reference="none")
    parts = memory(setup, 0).rollout
    held = ("parameters", "gradients", "optimizer state")
    assert sum(parts.get(name, 0) for name in held) == a_parameter * shape.parameters
    bucket = parts.get("communication", 0)
    assert live_bytes[f"{stage} {dtype}"] - bucket == pytest.approx(a_parameter * shape.parameters, rel=0.01)


def test_checkpointing_keeps_the_input_of_each_layer():
    setup = dataclasses.replace(SETUP, zero_stage=2)
    small = memory(setup, 0).update["activations"]
    large = memory(dataclasses.replace(setup, checkpointing=False), 0).update["activations"]
    layer, gradients = layer_bytes(SHAPE, 2, 2), 2 * (48 + 16)
    assert small == 64 * (2 * 2 * 8 + layer + gradients) and large == 64 * (2 * layer + gradients)


def test_what_is_suggested_fits_and_more_does_not():
    plan = plan_7b()
    best = plan.suggestion
    assert plan.fits and best.zero_stage == 3
    setup = dataclasses.replace(plan.setup, zero_stage=best.zero_stage)
    for key, more in (("max_rows", 10), ("micro_batch_tokens", 1024)):
        value = getattr(best, key)
        inside = dataclasses.replace(setup, **{key: value})
        assert memory(inside, plan.device_bytes).peak <= plan.device_bytes
        if key == "max_rows" or value < 8 * 7680:
            outside = dataclasses.replace(setup, **{key: value + more})
            assert memory(outside, plan.device_bytes).peak > plan.device_bytes
    assert suggest(plan.setup, 30 * GB, 320) is None
    assert suggest(plan.setup, 60 * GB, 320).max_rows < plan.setup.max_rows  # the settings do not fit, less does


def test_fits_depends_on_the_hardware_and_the_settings():
    assert plan_7b().fits and not plan_7b(gb=40).fits and not plan_7b(gpus=2).fits
    assert not plan_7b("rollout.max_rows=320").fits
    assert not plan_7b("distributed.zero_stage=1").fits
    assert plan_7b("distributed.zero_stage=1", gb=141).fits


def test_seconds_of_a_step():
    hardware = dataclasses.replace(HARDWARE["h100"], flops=1e6, memory=1e6, node_link=1e3)
    assumed = Assumptions(
        turns=2, turn_tokens=10, prompt_tokens=4, longest_turn=1, flops_share=0.5, bandwidth_share=0.5,
        layer_latency_s=1e-9,
    )  # fmt: skip
    setup = dataclasses.replace(SETUP, zero_stage=2, ranks=1, ranks_per_node=1)
    seconds = step_seconds(setup, hardware, assumed, responses_per_rank=6, minibatches=3, epochs=1)
    # a response: 4 / 2 of the shared prompt, 20 sampled, 7 retrieved, 31 tokens long; a token: 2,000 FLOPs for weights
    # and 2 * 2 layers * 8 * 31 for attention
    forward = (2000 + 992) / 5e5
    assert seconds["prefill"] == pytest.approx(6 * 9 * forward)
    assert seconds["scoring"] == pytest.approx(6 * 29 * (2 / 3 + 1) * forward)
    assert seconds["update"] == pytest.approx(6 * 29 * 4 * forward)
    # 20 steps read 1,000 weights; 120 tokens read half of 31 times 2 * 2 * 2 * 2 numbers, 2 bytes each
    assert seconds["decoding"] == pytest.approx((20 * 2000 + 120 * 15.5 * 32) / 5e5)
    assert seconds["communication"] == 0
    shared = dataclasses.replace(setup, ranks=2, ranks_per_node=2)
    seconds = step_seconds(shared, hardware, assumed, responses_per_rank=6, minibatches=3, epochs=1)
    # three updates of one micro-batch: twice half of 4,000 bytes of gradients, and half of 2,000 of weights
    assert seconds["communication"] == pytest.approx(3 * (4000 + 1000) / 500)
    seconds = step_seconds(
        dataclasses.replace(shared, zero_stage=3), hardware, assumed, responses_per_rank=6, minibatches=3, epochs=1
    )
    # half of 2,000 bytes of weights once to sample, in each update twice and for two scorings; half of the gradients
    assert seconds["communication"] == pytest.approx((1000 * (1 + 3 * (2 + 2)) + 3 * 2000) / 500)


def test_the_command_prints_a_table_or_json(capsys):
    assert main(["--config", CONFIG, "--gpus", "8", "--gpu-memory-gb", "80"]) == 0
    text = capsys.readouterr().out
    assert "7,615,616,512 parameters" in text and "fits: yes" in text and "compared with a GPU" in text
    assert main(["--config", CONFIG, "--gpus", "8", "--gpu-memory-gb", "40", "--json"]) == 0
    record = json.loads(capsys.readouterr().out)
    assert record["fits"] is False and record["parameters"] == 7_615_616_512
    assert record["peak_bytes"] == max(sum(record[f"{phase}_bytes"].values()) for phase in ("rollout", "update"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--gpus", "0"], "1 nodes with 0 GPUs each: both must be at least 1"),
        (["--gpus", "3"], "rollout.questions_per_step = 256 is not a multiple of the number of processes = 3"),
        (["--gpu-memory-gb", "-1"], "a GPU with -1 GB of memory: it must be more than 0"),
        (["--gpu-memory-gb", "nan"], "a GPU with nan GB of memory: it must be more than 0"),
        (["--turns", "0.5"], "turns = 0.5: it must be at least 1"),
        (["--flops-share", "0"], "flops_share = 0: it must be more than 0"),
        (["model.path=/no/such/folder"], "model.path = '/no/such/folder': its config.json cannot be read"),
    ],
)
def test_bad_input_is_one_paragraph(capsys, arguments, message):
    assert main(["--config", CONFIG, *arguments]) == 1
    captured = capsys.readouterr()
    assert captured.err.startswith(f"error: {message}") and captured.out == ""


def test_a_folder_is_read_before_what_is_known(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Qwen2Config(**TINY).save_pretrained("Qwen/Qwen2.5-7B-Instruct")
    assert model_config(load_config(CONFIG)).hidden_size == 64
    with pytest.raises(ConfigError, match="one of Qwen/Qwen2.5-1.5B"):
        model_config(load_config(CONFIG, ["model.path=Qwen/Qwen2.5-7B-instruct"]))


def test_the_index_is_measured_or_assumed(tmp_path):
    (tmp_path / "index.faiss").write_bytes(b"x" * 1000)
    assert plan_7b(f"retriever.index={tmp_path}").memory.host["index"] == 1000
    assert plan_7b().memory.host["index"] == 4 * 21_015_324 * 768
    assert "index" not in plan_7b("retriever.url=http://127.0.0.1:8000").memory.host


def test_the_plan_of_this_machine_says_what_it_assumes():
    plan = plan_here(load_config(ROOT / "configs" / "quickstart.yaml"), world_size=1)
    assert plan.fits == (plan.memory.peak <= plan.device_bytes)
    if not torch.cuda.is_available():
        assert plan.assumptions[0].startswith("no GPU here") and plan.seconds is None
        assert plan.memory.host == {}
