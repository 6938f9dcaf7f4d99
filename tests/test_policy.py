import json

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from sapo.policy import Policy, TokenLogprobs, load_policy


def qwen(tied=True, vocabulary=50, **settings):
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=vocabulary, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, max_position_embeddings=64, tie_word_embeddings=tied, initializer_range=0.3,
            **settings,
        )
    )


def gpt2():
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=50, n_positions=64, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
    )
    return GPT2LMHeadModel(config).double()


def ragged(vocabulary=50):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (4, 12), generator=generator)
    lengths = torch.tensor([12, 7, 9, 2])
    mask = (torch.rand(4, 12, generator=generator) < 0.6).float()
    mask[:, 0] = 0
    mask[3] = 0
    return ids, lengths, mask * (torch.arange(12) < lengths[:, None])


def naive(model, ids, mask, temperature):
    """All logits, one softmax, in the dtype of the model."""
    logprobs = (model(ids).logits / temperature).log_softmax(-1)[:, :-1]
    chosen = logprobs.gather(-1, ids[:, 1:, None])[..., 0]
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return [torch.cat([torch.zeros(len(ids), 1), x * mask[:, 1:]], 1) for x in (chosen, entropy)]


@pytest.mark.parametrize("make,tolerance", [(gpt2, 1e-12), (qwen, 2e-6), (lambda: qwen(tied=False), 2e-6)])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("with_entropy", [False, True])
def test_values_and_gradients_equal_the_full_logits(make, tolerance, chunk, with_entropy):
    model, (ids, _, mask) = make(), ragged()
    weights = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(2))
    if not with_entropy:
        weights[1] = 0

    def gradients(logprobs, entropy):
        model.zero_grad()
        ((logprobs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
        return {name: p.grad.clone() for name, p in model.named_parameters()}

    expected = naive(model, ids, mask, 0.7)
    expected_gradients = gradients(*expected)
    found = Policy(model, head_chunk_logits=50 * chunk)(ids, mask, 0.7, with_entropy)
    torch.testing.assert_close(found[0].double(), expected[0].double(), rtol=0, atol=tolerance * 5)
    torch.testing.assert_close(
        found[1].double(), expected[1].double() if with_entropy else torch.zeros(4, 12, dtype=torch.float64),
        rtol=0, atol=tolerance * 5,
    )
    scale = max(g.abs().max() for g in expected_gradients.values()).item()
    for name, gradient in gradients(*found).items():
        torch.testing.assert_close(
            gradient, expected_gradients[name], rtol=0, atol=tolerance * scale, msg=lambda text: f"{name}: {text}"
        )


def test_the_head_gradient_with_a_bias():
    model, (ids, _, mask) = gpt2(), ragged()
    model.lm_head = torch.nn.Linear(16, 50).double()

    def gradients(logprobs):
        model.zero_grad()
        logprobs.sum().backward()
        return model.lm_head.weight.grad.clone(), model.lm_head.bias.grad.clone()

    expected = gradients(naive(model, ids, mask, 1.0)[0])
    found = gradients(Policy(model, head_chunk_logits=100)(ids, mask)[0])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_old_logprobs_are_bit_equal_to_those_of_the_update(checkpointing):
    model, (ids, _, mask) = qwen(attention_dropout=0.0), ragged()
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    policy = Policy(model, head_chunk_logits=99).train()
    with torch.no_grad():
        old, _ = policy(ids, mask, with_entropy=True)
    new, _ = policy(ids, mask)
    assert new.requires_grad and torch.equal(old, new)


def test_padding_ids_and_masked_places_do_not_matter():
    policy, (ids, lengths, mask) = Policy(gpt2()), ragged()
    other = torch.where(torch.arange(12) < lengths[:, None], ids, 49)
    for found, expected in zip(policy(other, mask, 1.0, True), policy(ids, mask, 1.0, True)):
        assert torch.equal(found, expected) and found[mask == 0].eq(0).all() and found[mask == 1].ne(0).all()
    for row in range(3):  # a row alone, without padding
        alone, _ = policy(ids[row : row + 1, : lengths[row]], mask[row : row + 1, : lengths[row]])
        torch.testing.assert_close(alone[0], policy(ids, mask)[0][row, : lengths[row]], rtol=0, atol=1e-12)


def test_an_empty_mask_gives_zero_gradients_to_every_parameter():
    policy, (ids, _, mask) = Policy(qwen(tied=False)), ragged()
    logprobs, _ = policy(ids, mask * 0)
    logprobs.sum().backward()
    assert logprobs.eq(0).all()
    assert all(p.grad is not None and p.grad.eq(0).all() for p in policy.parameters())


@pytest.mark.parametrize("frozen", ["weight", "hidden"])
def test_what_is_frozen_gets_no_gradient(frozen):
    hidden, weight = torch.randn(5, 8).requires_grad_(), torch.randn(30, 8).requires_grad_()
    targets = torch.arange(5) * 7
    logprobs = (hidden @ weight.T).log_softmax(-1).gather(1, targets[:, None])
    expected = torch.autograd.grad(logprobs.sum(), (hidden, weight))
    parts = {"hidden": hidden, "weight": weight}
    parts[frozen].requires_grad_(False)
    TokenLogprobs.apply(hidden, weight, None, targets, 1.0, torch.float32, 40, False)[0].sum().backward()
    for (name, part), gradient in zip(parts.items(), expected):
        if name == frozen:
            assert part.grad is None
        else:
            torch.testing.assert_close(part.grad, gradient)


def test_autocast_multiplies_in_bfloat16_and_keeps_float32_weights_and_gradients():
    torch.manual_seed(0)
    hidden, weight = torch.randn(6, 8).requires_grad_(), torch.randn(30, 8).requires_grad_()
    targets = torch.arange(6)
    logprobs, _ = TokenLogprobs.apply(hidden, weight, None, targets, 1.0, torch.bfloat16, 60, False)
    expected = (hidden.bfloat16() @ weight.bfloat16().T).float().log_softmax(-1).gather(1, targets[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected, rtol=0, atol=1e-5)
    logprobs.sum().backward()
    assert hidden.grad.dtype == weight.grad.dtype == torch.float32


class LargestTensor(TorchDispatchMode):
    size = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, (tuple, list)) else (out,):
            self.size = max(self.size, x.numel() if isinstance(x, torch.Tensor) else 0)
        return out


def test_no_more_logits_exist_than_a_chunk():
    vocabulary, (ids, _, _) = 5000, ragged()
    mask = torch.ones(4, 12)
    mask[:, 0] = 0  # 44 tokens, 125 chunks of 40 words
    policy = Policy(qwen(vocabulary=vocabulary), head_chunk_logits=40 * 44)
    with LargestTensor() as largest:
        policy(ids, mask, 1.0, True)[0].sum().backward()
    assert largest.size == policy.model.lm_head.weight.numel() == 16 * vocabulary


def save_folder(path, tokens=50, pad="<pad>", eos="<eos>", **config):
    words = {"<pad>": 0, "<eos>": 1} | {f"w{i}": i for i in range(2, tokens)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w2"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=pad, eos_token=eos).save_pretrained(path)
    qwen(**config).save_pretrained(path)


def test_load_policy_switches_dropout_off_and_keeps_the_weights(tmp_path):
    save_folder(tmp_path, attention_dropout=0.3)
    model, tokenizer = load_policy(tmp_path, dtype=torch.float64, gradient_checkpointing=True)
    assert model.config.attention_dropout == 0 and model.dtype == torch.float64 and model.is_gradient_checkpointing
    assert tokenizer.pad_token == "<pad>"
    expected = qwen().double()
    assert torch.equal(model.lm_head.weight, expected.lm_head.weight)


def test_the_tokenizer_is_the_one_saved_whatever_the_model_type(tmp_path):
    save_folder(tmp_path)
    tokenizer = load_policy(tmp_path)[1]
    assert len(tokenizer) == 50
    assert tokenizer.encode("w3 w44<eos>") == [3, 44, 1]


def test_a_tokenizer_without_pad_pads_with_eos(tmp_path):
    save_folder(tmp_path, pad=None)
    assert load_policy(tmp_path)[1].pad_token == "<eos>"


def test_models_that_cannot_be_used_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=f"no model at {tmp_path}/none: config.json is missing"):
        load_policy(tmp_path / "none")
    (tmp_path / "weights").mkdir()
    qwen().save_pretrained(tmp_path / "weights")
    with pytest.raises(ValueError, match="no tokenizer at .*weights: tokenizer_config.json is missing"):
        load_policy(tmp_path / "weights")
    with pytest.raises(ValueError, match="cannot load a model and its tokenizer from 'nobody/no-such-model'"):
        load_policy("nobody/no-such-model")
    save_folder(tmp_path / "no_pad", pad=None, eos=None)
    with pytest.raises(ValueError, match="neither a pad nor an eos token"):
        load_policy(tmp_path / "no_pad")
    save_folder(tmp_path / "large", tokens=60)
    with pytest.raises(ValueError, match="has 60 tokens, the model embeds 50"):
        load_policy(tmp_path / "large")
    save_folder(tmp_path / "capped")
    config = tmp_path / "capped" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"final_logit_softcapping": 30.0}))
    with pytest.raises(ValueError, match="final_logit_softcapping"):
        load_policy(tmp_path / "capped")
