"""Low-rank adapters: what they change, what they leave, and what others can read of them."""

import sys

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from sapo.engine.hf import HFEngine
from sapo.engine.sampling import Sampling
from sapo.lora import adapters_off, add_adapters, has_adapters, merged_weights, save_adapters
from sapo.policy import Policy
from tests.tiny import tiny_tokenizer

IDS = torch.tensor([[5, 40, 41, 7, 99, 12, 13, 120]])
MASK = torch.tensor([[0, 0, 0, 1, 1, 1, 1, 1]])
TARGETS = ["q_proj", "down_proj"]


@pytest.fixture
def plain():
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(tiny_tokenizer()), hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, tie_word_embeddings=True,
        )
    )  # fmt: skip


@pytest.fixture
def folder(plain, tmp_path):
    plain.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def adapted(folder, *, fresh=False):
    """The saved model with adapters, which are not at their start unless `fresh`."""
    model = AutoModelForCausalLM.from_pretrained(folder)
    add_adapters(model, rank=3, alpha=6.0, target_modules=TARGETS, seed=1, base=str(folder))
    if not fresh:
        torch.manual_seed(2)
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.5)
    return model


def logprobs(model, packed=False):
    with torch.no_grad():
        return Policy(model, packed=packed)(IDS, MASK)[0]


def test_fresh_adapters_change_nothing_and_are_all_that_learns(plain, folder):
    model = adapted(folder, fresh=True)
    assert has_adapters(model) and not has_adapters(plain)
    assert torch.equal(logprobs(model), logprobs(plain))
    Policy(model)(IDS, MASK)[0].sum().backward()
    learning = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert len(learning) == 2 * 2 * len(TARGETS) and all(".lora_" in name for name in learning)
    again = adapted(folder, fresh=True)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


def test_without_adapters_it_is_the_starting_model_and_afterwards_itself_again(plain, folder):
    model = adapted(folder)
    before = logprobs(model)
    learning = [parameter.requires_grad for parameter in model.parameters()]
    with adapters_off(model):
        assert torch.equal(logprobs(model), logprobs(plain))
    assert torch.equal(logprobs(model), before)
    assert (before - logprobs(plain)).abs().max() > 0.01
    assert [parameter.requires_grad for parameter in model.parameters()] == learning


def test_the_merged_model_loads_without_peft_and_computes_the_same(folder, tmp_path):
    model = adapted(folder)
    model.save_pretrained(tmp_path / "merged", state_dict=merged_weights(model, model.state_dict()))
    assert {path.name for path in (tmp_path / "merged").iterdir()} == {path.name for path in folder.iterdir()}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert not any("lora" in name for name, _ in loaded.named_parameters())
    torch.testing.assert_close(logprobs(loaded), logprobs(model), atol=2e-6, rtol=0)


def test_peft_reads_the_saved_adapters(folder, tmp_path):
    model = adapted(folder)
    save_adapters(model, model.state_dict(), tmp_path / "adapter")
    loaded = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    assert torch.equal(logprobs(loaded.get_base_model()), logprobs(model))
    assert loaded.peft_config["default"].base_model_name_or_path == str(folder)


@pytest.mark.parametrize("packed", [False, True])
def test_the_engine_samples_with_the_adapters(folder, packed):
    model = adapted(folder)
    engine = HFEngine(model, tiny_tokenizer())
    (turn,) = engine.session([7], Sampling(), ()).generate([0], [IDS[0].tolist()], [6])
    ids = torch.tensor([IDS[0].tolist() + turn.ids])
    mask = torch.tensor([[0] * IDS.shape[1] + [1] * len(turn.ids)])
    with torch.no_grad():
        scored = Policy(model, packed=packed)(ids, mask)[0][0, IDS.shape[1] :]
    torch.testing.assert_close(torch.tensor(turn.logprobs, dtype=scored.dtype), scored, atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", ["c_attn", "lm_head"])
def test_a_layer_that_is_not_there_is_named_with_those_that_are(plain, name):
    with pytest.raises(ValueError, match=rf"no linear layer {name} .* it has down_proj, gate_proj, k_proj"):
        add_adapters(plain, rank=2, alpha=2.0, target_modules=["q_proj", name], seed=0, base="tiny")


def test_a_missing_peft_is_named_with_the_fix(plain, monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ValueError, match="model.lora needs the package peft.*pip install -r requirements.txt"):
        add_adapters(plain, rank=2, alpha=2.0, target_modules=["q_proj"], seed=0, base="tiny")
