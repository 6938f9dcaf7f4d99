"""Two ranks make the updates of one, whatever holds the weights. Two launches serve all tests."""

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.zero import errors, launch, theory
from tests.tiny import tiny_tokenizer

VARIANTS = (
    "ddp", "zero1", "zero2", "zero3", "zero2-offload", "zero3-offload", "ddp-lora", "zero2-lora", "zero3-lora",
)  # fmt: skip
IN_BFLOAT16 = ("ddp-bf16", "zero1-bf16", "zero2-bf16", "zero2-bf16-lora", "zero3-bf16", "zero3-bf16-lora")
ERRORS = ("exp_avg", "exp_avg_sq", "losses", "norms", "ref_logprobs", "weight_change")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model without biases: the gradient of those of Qwen2's keys is nothing but rounding noise."""
    folder = tmp_path_factory.mktemp("zero")
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tokenizer), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=2048, tie_word_embeddings=True,
        )
    )  # fmt: skip
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    return folder


@pytest.fixture(scope="module")
def updates(folder):
    """Results by variant of five updates on one process ("single", "single-lora") and on two ranks."""
    # A large learning rate, so that ratios move away from 1, where rounding opens the gate. A large eps: with a small
    # one, the gradients of a few weights that are nothing but rounding noise would move them by the learning rate.
    options = ("updates", "--model", folder / "model", "--state", folder / "state.pt", "--lr", "1e-3", "--eps", "1e-6")
    options += ("--gradient-checkpointing", "--live-weights", "2000", "--turns", "--variants")
    single = {run["variant"].replace("ddp", "single"): run for run in launch(1, *options, "ddp", "ddp-lora")}
    return single | {run["variant"]: run for run in launch(2, *options, *VARIANTS, *IN_BFLOAT16)}


@pytest.mark.parametrize("variant", VARIANTS)
def test_updates_equal_those_of_one_process(updates, variant):
    """Losses, gradient norms, weights, Adam's moments, reference; four responses on one rank, two on the other."""
    found = updates[variant]
    assert sorted(errors(found)) == list(ERRORS)
    assert max(errors(found).values()) <= 1e-5
    assert found["responses"] == [4, 2] and found["ranks"] == 2 and len(found["losses"]) == 5


@pytest.mark.parametrize("variant", IN_BFLOAT16)
def test_updates_in_bfloat16_are_those_of_float32_but_for_its_rounding(updates, variant):
    """8 bits: errors of losses, norms, a moment and the reference, whose type is the policy's."""
    found = errors(updates[variant])
    assert max(found["losses"], found["norms"]) <= 0.02 and found["exp_avg"] <= 0.1
    assert found["ref_logprobs"] <= 1e-3
    assert updates[variant]["turns"] == [[1, 1], [5, 5]]


def test_in_bfloat16_too_stages_sum_gradients_in_float32(updates):
    """Stages 1 (another optimiser class) and 2 agree; sums in bfloat16 over ranks would differ by 3e-5 and more."""
    first, second = updates["zero1-bf16"], updates["zero2-bf16"]
    assert first["norms"] == pytest.approx(second["norms"], rel=1e-5)
    assert first["losses"] == pytest.approx(second["losses"], rel=1e-5)


def test_the_reference_is_the_starting_model_also_without_its_adapters(updates):
    assert updates["single-lora"]["ref_logprobs"] == pytest.approx(updates["single"]["ref_logprobs"], rel=1e-7)
    assert updates["single-lora"]["losses"][0] == pytest.approx(updates["single"]["losses"][0], rel=1e-6)
    assert updates["single-lora"]["losses"][4] != updates["single"]["losses"][4]
    for variant in (*VARIANTS, *IN_BFLOAT16):
        assert updates[variant]["ref_logprobs_again"] == updates[variant]["ref_logprobs"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_ranks_with_one_and_with_five_turns_finish_and_train_on(updates, variant):
    assert updates[variant]["turns"] == [[1, 1], [5, 5]]
    expected = updates["single-lora" if "lora" in variant else "single"]["norm_after_rollout"]
    assert updates[variant]["norm_after_rollout"] == pytest.approx(expected, rel=1e-5)


def test_bytes_a_parameter_by_stage():
    """Weights 4, gradients 4, moments 8, reference 4; from ZeRO-1 on a master copy of 4, over two ranks."""
    assert [theory(variant, 2) for variant in ("ddp", "zero1", "zero2", "zero3")] == [20, 18, 16, 12]
