import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import GPT2Config, GPT2LMHeadModel, MistralConfig, MistralForCausalLM, Qwen2Config, Qwen2ForCausalLM

import sapo.packing as packing
from benchmarks.loss import TORCHRUN, launch, relative_error, update_error
from sapo.batch import dummy_batch
from sapo.packing import pack_rows, shared_prefix
from sapo.policy import Policy

SIZES = dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=128)


@pytest.fixture
def share_from_two(monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SHARED", 2)


def gpt2():
    """float64 throughout; Qwen2 and Llama compute their norms in float32."""
    torch.manual_seed(0)
    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=50, n_positions=128, n_embd=16, n_layer=2, n_head=2, initializer_range=0.3, attn_pdrop=0.0,
            embd_pdrop=0.0, resid_pdrop=0.0, bos_token_id=0, eos_token_id=0,
        )
    ).double()


def qwen():
    torch.manual_seed(0)
    return Qwen2ForCausalLM(
        Qwen2Config(vocab_size=50, hidden_size=32, intermediate_size=48, initializer_range=0.1, **SIZES)
    )


def ragged():
    """Rows that begin alike: by 40, 40 and 60 tokens, wholly, not at all; one without sampled tokens; long tails."""
    generator = torch.Generator().manual_seed(1)
    lengths = (48, 90, 75, 75, 70, 30, 9, 64)
    ids = torch.randint(0, 50, (len(lengths), 96), generator=generator)
    ids[1:4, :40] = ids[0, :40]
    ids[2, :60] = ids[1, :60]
    ids[3, :75] = ids[2, :75]  # all its tokens lie in another row
    ids[7, :30] = ids[5, :30]
    mask = (torch.rand(ids.shape, generator=generator) < 0.4).float()
    mask[:, 0] = 0
    for row, length in enumerate(lengths):
        mask[row, length:] = 0
    mask[3, :] = 0
    mask[3, [45, 74]] = 1
    mask[6] = 0
    mask[7, :33] = 0
    return ids, mask


def scored(policy, ids, mask):
    """logprobs, entropy and the gradients of a weighted sum of both."""
    policy.zero_grad()
    weights = torch.randn(2, *ids.shape, generator=torch.Generator().manual_seed(2))
    logprobs, entropy = policy(ids, mask, 0.7, True)
    ((logprobs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    return logprobs.detach(), entropy.detach(), {n: p.grad.clone() for n, p in policy.named_parameters()}


@pytest.mark.parametrize("least", [2, 16, 1000])  # 1000: nothing is shared
@pytest.mark.parametrize("make,tolerance", [(gpt2, 1e-12), (qwen, 1e-6)])
def test_packed_rows_have_the_values_and_gradients_of_padded_ones(make, tolerance, least, monkeypatch):
    monkeypatch.setattr(packing, "LEAST_SHARED", least)
    ids, mask = ragged()
    expected = scored(Policy(make()), ids, mask)
    found = scored(Policy(make(), packed=True), ids, mask)
    for a, b in zip(found[:2], expected[:2]):
        torch.testing.assert_close(a, b, rtol=0, atol=20 * tolerance)
    assert relative_error(found[2], expected[2]) <= tolerance


def test_gradient_checkpointing_runs_the_same_attention_again(share_from_two):
    ids, mask = ragged()
    expected = scored(Policy(qwen(), packed=True), ids, mask)
    model = qwen()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    found = scored(Policy(model, packed=True).train(), ids, mask)
    assert torch.equal(found[0], expected[0])
    assert all(torch.equal(found[2][name], gradient) for name, gradient in expected[2].items())


def test_old_logprobs_are_bit_equal_to_those_of_the_update(share_from_two):
    policy, (ids, mask) = Policy(qwen(), packed=True), ragged()
    with torch.no_grad():
        old, _ = policy(ids, mask)
    new, _ = policy(ids, mask, 1.0, True)
    assert new.requires_grad and torch.equal(old, new)


def test_a_dummy_gives_zero_gradients_to_every_parameter():
    policy, dummy = Policy(qwen(), packed=True), dummy_batch()
    logprobs, _ = policy(dummy.input_ids, dummy.loss_mask)
    logprobs.sum().backward()
    assert logprobs.tolist() == [[0.0, 0.0]]
    assert all(p.grad is not None and p.grad.eq(0).all() for p in policy.parameters())


def test_layout_by_hand(share_from_two):
    ids = torch.tensor([[5, 6, 7, 8, 9, 0], [5, 6, 7, 1, 0, 0], [5, 6, 7, 1, 2, 3], [4, 6, 7, 1, 0, 0]])
    mask = torch.tensor([[0, 0, 0, 1, 1, 0], [0, 0, 0, 1, 1, 0], [0, 1, 0, 0, 0, 1], [0, 1, 0, 0, 0, 0]])
    layout = pack_rows(ids, mask)
    # row 0 brings 5 6 7 8, row 1 reads 5 6 7 and brings 1, row 2 reads 5 6 7 1 and brings 2, row 3 brings 4
    assert ids.flatten()[layout.tokens].tolist() == [5, 6, 7, 8, 1, 2, 4]
    assert layout.positions.tolist() == [0, 1, 2, 3, 3, 4, 0]
    assert layout.before.tolist() == [2, 3, 2, 4, 0, 5, 6]
    assert layout.rows.sizes == [3, 1, 1, 1, 1]
    assert [(row.pieces, row.own, row.shared, row.length) for row in layout.rows.rows] == [
        ([0, 1], 1 + 1, 0, 4), ([0, 2], 1, 3, 4), ([0, 2, 3], 1, 4, 5), ([4], 1, 0, 1),
    ]  # fmt: skip
    assert layout.rows.rows[1].mask.tolist() == [[0, 0, 0, 0]]
    assert layout.rows.keys.tolist() == [0, 1, 2, 3, 0, 1, 2, 4, 0, 1, 2, 4, 5, 6]


def test_few_equal_tokens_are_not_shared():
    assert shared_prefix(np.arange(40), np.r_[:16, 99]) == 16
    assert shared_prefix(np.arange(40), np.r_[:15, 99]) == 0
    assert shared_prefix(np.arange(33), np.arange(35)) == 33


@given(st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=7), min_size=1, max_size=6), st.data())
def test_every_distinct_beginning_is_forwarded_once(rows, data):
    """Rows in sorted order, all needed, sharing from one token on: the stream holds each distinct prefix once."""
    rows = sorted(rows)
    ids, mask = torch.zeros(len(rows), 9, dtype=torch.int64), torch.zeros(len(rows), 9)
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)] = torch.tensor(tokens)
        mask[row, len(tokens)] = 1
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packing, "LEAST_SHARED", 1)
        layout = pack_rows(ids, mask)
    prefixes = {tuple(tokens[: end + 1]) for tokens in rows for end in range(len(tokens))}
    assert len(layout.tokens) == sum(layout.rows.sizes) == len(prefixes)
    assert layout.positions[layout.before].tolist() == [len(tokens) - 1 for tokens in rows]


def test_varlen_kernel_gets_the_rows(share_from_two, monkeypatch):
    """flash-attention played by a loop: same values as the reference."""
    ids, mask = ragged()
    expected = scored(Policy(gpt2(), packed=True), ids, mask)

    def kernel(query, key, value, attention_mask, query_length, is_causal, softmax_scale, cu_seq_lens_q, cu_seq_lens_k,
               max_length_q, max_length_k, attn_implementation):  # fmt: skip
        assert is_causal and attention_mask is None and attn_implementation == "flash_attention_2"
        widths = [[b - a for a, b in zip(ends, ends[1:])] for ends in (cu_seq_lens_q.tolist(), cu_seq_lens_k.tolist())]
        assert (max(widths[0]), max(widths[1])) == (max_length_q, max_length_k)
        out = []
        for q, k, v in zip(query[0].split(widths[0]), key[0].split(widths[1]), value[0].split(widths[1])):
            scores = torch.einsum("qhd,khd->hqk", q, k) * softmax_scale
            later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(len(k) - len(q) + 1)
            out.append(torch.einsum("hqk,khd->qhd", scores.masked_fill(later, -math.inf).softmax(-1), v))
        return torch.cat(out)[None]

    monkeypatch.setattr("transformers.modeling_flash_attention_utils._flash_attention_forward", kernel)
    monkeypatch.setattr(packing, "_has_varlen_kernel", lambda query: True)
    found = scored(Policy(gpt2(), packed=True), ids, mask)
    torch.testing.assert_close(found[0], expected[0], rtol=0, atol=1e-12)
    assert relative_error(found[2], expected[2]) <= 1e-12


def test_the_kernel_is_never_looked_for_on_a_cpu():
    code = "import sys, sapo.policy; sys.exit('flash_attn' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
    assert not packing._has_varlen_kernel(torch.zeros(1, dtype=torch.bfloat16))


def test_models_whose_attention_it_does_not_compute_are_refused():
    ids, mask = ragged()
    config = MistralConfig(vocab_size=50, hidden_size=32, intermediate_size=48, sliding_window=16, **SIZES)
    with pytest.raises(ValueError, match="sliding_window.*set optim.packing: padded"):
        Policy(MistralForCausalLM(config), packed=True)(ids, mask)
    policy = Policy(qwen(), packed=True)
    with pytest.raises(ValueError, match="without packed_rows"):
        policy.model(ids)
    model = qwen()
    model._supports_attention_backend = False
    with pytest.raises(ValueError, match="model type 'qwen2'.*optim.packing: padded"):
        Policy(model, packed=True)


def test_updates_over_ranks_and_backends_equal_those_of_padded_rows():
    (padded,) = launch((sys.executable,), "--rows", "4")
    packed, single = launch((sys.executable,), "--packed", "--rows", "8", "1")
    (ddp,) = launch(TORCHRUN, "--packed", "--rows", "4")
    (zero3,) = launch(TORCHRUN, "--packed", "--zero-stage", "3", "--rows", "4")
    for found in (packed, single, ddp, zero3):
        assert update_error(found, padded) <= 1e-6
    (padded,) = launch((sys.executable,), "--dtype", "float64", "--rows", "1")
    (packed,) = launch((sys.executable,), "--packed", "--dtype", "float64", "--rows", "4")
    assert update_error(packed, padded) <= 1e-12
