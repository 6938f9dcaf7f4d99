import itertools
import math

import pytest
import torch

from benchmarks.scalar_reference import reference_loss
from sapo.loss import Counts, k3, policy_loss, token_objective

REDUCTIONS = ("sequence_mean", "token_mean", "constant")
GATES = ("equation", "listing")
GATES_AND_REDUCTIONS = list(itertools.product(GATES, REDUCTIONS))


def counts_of(mask, advantages):
    rows = mask.sum(1)
    return Counts(int((rows > 0).sum()), int(rows.sum()), int(rows[advantages >= 0].sum()))


def ragged_minibatch(dtype=torch.float64):
    """Six rows of 9 tokens: holes, an empty row, A > 0, A < 0 and A = 0, log-ratios of 0, +-100 and near the edges."""
    generator = torch.Generator().manual_seed(3)
    log_ratio = torch.randn(6, 9, generator=generator, dtype=torch.float64) * 0.4
    log_ratio[0, 2:6] = torch.tensor([0.0, -100.0, 100.0, 20.0])
    log_ratio[2, 1:5] = torch.tensor([0.0, -100.0, 100.0, 19.9])
    log_ratio[3, 0:3] = torch.tensor([0.0, -100.0, 30.0])
    old = -torch.rand(6, 9, generator=generator, dtype=torch.float64) * 3
    mask = (torch.rand(6, 9, generator=generator) < 0.7).double()
    mask[0, 2:6] = mask[2, 1:5] = mask[3, 0:3] = 1
    mask[:, 7:] = torch.tensor([[1, 1], [0, 0], [1, 0], [0, 0], [1, 1], [0, 0]])
    mask[5] = 0
    advantages = torch.tensor([1.3, 0.7, -0.9, 0.0, -1.1, 0.5], dtype=torch.float64)
    ref = old + torch.randn(6, 9, generator=generator, dtype=torch.float64) * 0.3
    ref[1, :3] = old[1, :3] + torch.tensor([90.0, -90.0, 0.0])
    mask[1, :3] = 1
    entropy = torch.rand(6, 9, generator=generator, dtype=torch.float64)
    return [x.to(dtype) for x in (old + log_ratio, old, advantages, mask, ref, entropy)]


def loss_and_gradient(logprobs, *args, **kwargs):
    logprobs = logprobs.clone().requires_grad_()
    out = policy_loss(logprobs, *args, **kwargs)
    out.loss.backward()
    return out, logprobs.grad


@pytest.mark.parametrize("gate,reduction", GATES_AND_REDUCTIONS)
@pytest.mark.parametrize("gamma,tau", [(0.1, 1.0), (0.3, 1.2), (0.0, 0.8)])
def test_value_and_gradient_equal_a_scalar_loop(gate, reduction, gamma, tau):
    logprobs, old, advantages, mask, ref, entropy = ragged_minibatch()
    settings = dict(clip_low=0.2, clip_high=0.28, gamma=gamma, tau=tau, gate=gate, reduction=reduction,
                    constant_tokens=7, ref_kl_coef=0.01, entropy_coef=0.05)
    value, gradient = reference_loss(
        logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(),
        ref_logprobs=ref.tolist(), entropy=entropy.tolist(), **settings,
    )
    off = mask == 0  # what stands outside the mask must not matter
    for tensor, garbage in ((logprobs, math.nan), (old, math.inf), (ref, math.nan), (entropy, -math.inf)):
        tensor[off] = garbage
    out, grad = loss_and_gradient(
        logprobs, old, advantages, mask, counts_of(mask, advantages), ref_logprobs=ref, entropy=entropy, **settings
    )
    gradient = torch.tensor(gradient, dtype=torch.float64)
    assert abs(out.loss.item() - value) <= 1e-9 * max(1, abs(value))
    assert ((grad - gradient).abs() <= 1e-9 * gradient.abs().clamp(min=1)).all()
    assert grad[mask == 0].eq(0).all()


def test_the_reference_gradient_is_the_slope_of_the_reference_value():
    logprobs, old, advantages, mask, *_ = [x.tolist() for x in ragged_minibatch()]
    settings = dict(clip_low=0.2, clip_high=0.2, gamma=0.1, tau=0.9, gate="equation", reduction="sequence_mean")
    _, gradient = reference_loss(logprobs, old, advantages, mask, **settings)
    for i, t in ((1, 1), (4, 8), (0, 8)):
        values = []
        for step in (1e-6, -1e-6):
            moved = [list(row) for row in logprobs]
            moved[i][t] += step
            small = [[0.0 if abs(a - b) > 5 else on for a, b, on in zip(*rows)] for rows in zip(logprobs, old, mask)]
            values.append(reference_loss(moved, old, advantages, small, **settings)[0])
        _, gradient = reference_loss(logprobs, old, advantages, small, **settings)
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(gradient[i][t], abs=1e-8)


def test_one_drifted_token_by_hand():
    # A = 2, ratio 1/2: -(0.5 * 2 + 0.1 * ln 0.5) and slope -(0.5 * 2 + 0.1)
    out, grad = loss_and_gradient(
        torch.tensor([[math.log(0.25)]], dtype=torch.float64), torch.tensor([[math.log(0.5)]], dtype=torch.float64),
        torch.tensor([2.0]), torch.ones(1, 1), Counts(1, 1, 1), gamma=0.1, tau=1.0,
    )
    assert out.loss.item() == pytest.approx(-0.93068528194400547, abs=1e-15)
    assert out.terms["loss/policy"].item() == pytest.approx(-1.0, abs=1e-15)
    assert out.terms["loss/drift_penalty"].item() == pytest.approx(0.069314718055994529, abs=1e-15)
    assert grad.item() == pytest.approx(-1.1, abs=1e-15)


@pytest.mark.parametrize("log_ratio", [-5.0, -50.0, -500.0])
def test_the_penalty_keeps_its_slope_where_the_surrogate_vanishes(log_ratio):
    def slope(gamma):
        args = torch.zeros(1, 1), torch.tensor([1.0]), torch.ones(1, 1), Counts(1, 1, 1)
        return loss_and_gradient(torch.full((1, 1), log_ratio), *args, gamma=gamma)[1].item()

    assert slope(0.1) - slope(0.0) == pytest.approx(-0.1, abs=1e-7)
    assert slope(0.0) == pytest.approx(-math.exp(log_ratio), rel=1e-5, abs=1e-40)  # the ratio itself has no floor


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_at_ratio_one_the_equation_gate_gives_exactly_the_gradient_of_grpo(reduction):
    _, old, advantages, mask, *_ = ragged_minibatch(torch.float32)
    args = old, old, advantages, mask, counts_of(mask, advantages)
    grpo = loss_and_gradient(*args, gamma=0.0, reduction=reduction, constant_tokens=7)[1]
    sapo = loss_and_gradient(*args, gamma=0.1, reduction=reduction, constant_tokens=7)[1]
    listing = loss_and_gradient(*args, gamma=0.1, gate="listing", reduction=reduction, constant_tokens=7)[1]
    assert torch.equal(sapo, grpo)
    nonneg = (advantages >= 0)[:, None] & mask.bool()
    torch.testing.assert_close(listing - grpo, -0.1 / nonneg.sum() * nonneg, rtol=0, atol=1e-7)


def test_gates_at_their_edges():
    # ratio below, at and above tau, for A > 0, A = 0, A < 0
    log_ratio = torch.tensor([[-0.1, 0.0, 0.1]]).expand(3, 3)
    advantages = torch.tensor([[1.0], [0.0], [-1.0]])
    gates = {g: token_objective(log_ratio, torch.zeros(3, 3), advantages, gate=g).gate.tolist() for g in GATES}
    assert gates["equation"] == [[True, False, False], [False] * 3, [False] * 3]
    assert gates["listing"] == [[True, True, False], [True, True, False], [False] * 3]


@pytest.mark.parametrize("gate,reduction", GATES_AND_REDUCTIONS)
def test_shares_of_micro_batches_add_up(gate, reduction):
    logprobs, old, advantages, mask, ref, entropy = ragged_minibatch()
    settings = dict(gate=gate, reduction=reduction, constant_tokens=7, ref_kl_coef=0.01, entropy_coef=0.05)
    counts = counts_of(mask, advantages)
    whole, gradient = loss_and_gradient(
        logprobs, old, advantages, mask, counts, ref_logprobs=ref, entropy=entropy, **settings
    )
    parts = [
        loss_and_gradient(
            logprobs[rows], old[rows], advantages[rows], mask[rows], counts,
            ref_logprobs=ref[rows], entropy=entropy[rows], **settings,
        )
        for rows in (slice(0, 1), slice(1, 4), slice(4, 6))
    ]
    assert sum(out.loss.item() for out, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient, rtol=0, atol=0)
    for name, value in {**whole.terms, **whole.token_sums}.items():
        summed = sum({**out.terms, **out.token_sums}[name].item() for out, _ in parts)
        assert summed == pytest.approx(value.item(), rel=1e-12), name


@pytest.mark.parametrize("gate,reduction", GATES_AND_REDUCTIONS)
def test_empty_and_all_negative_micro_batches_are_finite(gate, reduction):
    logprobs, old, advantages, mask, *_ = ragged_minibatch(torch.float32)
    settings = dict(gate=gate, reduction=reduction, constant_tokens=7)
    out, grad = loss_and_gradient(logprobs, old, advantages, mask * 0, Counts(0, 0, 0), **settings)
    assert out.loss.item() == 0 and grad.eq(0).all() and out.log_ratio.shape == (0,)
    negative = -advantages.abs() - 0.1
    counts = counts_of(mask, negative)
    assert counts.nonneg_tokens == 0
    out, grad = loss_and_gradient(logprobs, old, negative, mask, counts, **settings)
    assert out.loss.isfinite() and grad.isfinite().all()
    assert out.terms["loss/drift_penalty"].item() == 0


@pytest.mark.parametrize("log_ratio", [-100.0, 100.0])
@pytest.mark.parametrize("advantage", [-1.0, 0.0, 1.0])
@pytest.mark.parametrize("gate", GATES)
def test_float32_survives_extreme_log_ratios(log_ratio, advantage, gate):
    out, grad = loss_and_gradient(
        torch.full((1, 1), log_ratio), torch.zeros(1, 1), torch.tensor([advantage]), torch.ones(1, 1), Counts(1, 1, 1),
        gate=gate, ref_logprobs=torch.zeros(1, 1), ref_kl_coef=0.001,
    )
    assert out.loss.isfinite() and grad.isfinite().all()
    assert all(value.isfinite() for value in out.token_sums.values())


def test_k3_is_zero_at_equality_and_never_nan():
    log_ratio = torch.tensor([0.0, math.log(2), -100.0, 100.0, math.inf], requires_grad=True)
    value = k3(log_ratio)
    value.sum().backward()
    assert value.tolist() == pytest.approx([0.0, 1 - math.log(2), 99.0, math.exp(20) - 21, math.exp(20) - 21], rel=1e-6)
    assert log_ratio.grad.tolist() == pytest.approx([0.0, 1.0, -1.0, 0.0, 0.0], abs=1e-6)


def test_token_sums_by_hand():
    ratios = torch.tensor([[0.5, 1.5, 9.0], [0.5, 1.0, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    out = policy_loss(
        ratios.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, Counts(2, 4, 2),
        ref_logprobs=ratios.log() + math.log(2), entropy=torch.full((2, 3), 0.25),
    )
    assert {name: value.item() for name, value in out.token_sums.items()} == pytest.approx({
        "policy/ratio_mean": 3.5,
        "policy/clip_frac": 2,  # 1.5 with A = 1 and 0.5 with A = -1
        "policy/gate_frac": 1,  # 0.5 with A = 1
        "policy/approx_kl": 3.5 - 4 - math.log(0.5 * 1.5 * 0.5),
        "policy/ref_kl": 4 * (1 - math.log(2)),
        "policy/entropy_nats": 1.0,
    }, rel=1e-6)
    assert out.log_ratio.exp().tolist() == pytest.approx([0.5, 1.5, 0.5, 1.0])
    assert out.positive.tolist() == [True, True, False, False]


def test_wrong_settings_are_refused():
    args = torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), Counts(1, 1, 1)
    with pytest.raises(ValueError, match="unknown gate 'eq'"):
        policy_loss(*args, gate="eq")
    with pytest.raises(ValueError, match="unknown reduction 'mean'"):
        policy_loss(*args, reduction="mean")
    with pytest.raises(ValueError, match="constant_tokens"):
        policy_loss(*args, reduction="constant")
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(*args, ref_kl_coef=0.1)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(*args, entropy_coef=0.1)
