import itertools
import math
from functools import partial

import pytest
import torch

from benchmarks.scalar_reference import reference_loss
from sapo.loss import Counts, k3, mismatch_weights, off_policy_rows, policy_loss, sapo

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
    parameters = dict(clip_low=0.2, clip_high=0.28, gamma=gamma, tau=tau, gate=gate)
    settings = dict(reduction=reduction, constant_tokens=7, ref_kl_coef=0.01, entropy_coef=0.05)
    value, gradient = reference_loss(
        logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), name="sapo", parameters=parameters,
        ref_logprobs=ref.tolist(), entropy=entropy.tolist(), **settings,
    )
    off = mask == 0  # what stands outside the mask must not matter
    for tensor, garbage in ((logprobs, math.nan), (old, math.inf), (ref, math.nan), (entropy, -math.inf)):
        tensor[off] = garbage
    out, grad = loss_and_gradient(
        logprobs, old, advantages, mask, counts_of(mask, advantages), objective=partial(sapo, **parameters),
        ref_logprobs=ref, entropy=entropy, **settings,
    )
    gradient = torch.tensor(gradient, dtype=torch.float64)
    assert abs(out.loss.item() - value) <= 1e-9 * max(1, abs(value))
    assert ((grad - gradient).abs() <= 1e-9 * gradient.abs().clamp(min=1)).all()
    assert grad[mask == 0].eq(0).all()


def test_one_drifted_token_by_hand():
    # A = 2, ratio 1/2: -(0.5 * 2 + 0.1 * ln 0.5) and slope -(0.5 * 2 + 0.1)
    out, grad = loss_and_gradient(
        torch.tensor([[math.log(0.25)]], dtype=torch.float64), torch.tensor([[math.log(0.5)]], dtype=torch.float64),
        torch.tensor([2.0]), torch.ones(1, 1), Counts(1, 1, 1), objective=partial(sapo, gamma=0.1, tau=1.0),
    )
    assert out.loss.item() == pytest.approx(-0.93068528194400547, abs=1e-15)
    assert out.terms["loss/policy"].item() == pytest.approx(-1.0, abs=1e-15)
    assert out.terms["loss/drift_penalty"].item() == pytest.approx(0.069314718055994529, abs=1e-15)
    assert grad.item() == pytest.approx(-1.1, abs=1e-15)


@pytest.mark.parametrize("log_ratio", [-5.0, -50.0, -500.0])
def test_the_penalty_keeps_its_slope_where_the_surrogate_vanishes(log_ratio):
    def slope(gamma):
        args = torch.zeros(1, 1), torch.tensor([1.0]), torch.ones(1, 1), Counts(1, 1, 1)
        return loss_and_gradient(torch.full((1, 1), log_ratio), *args, objective=partial(sapo, gamma=gamma))[1].item()

    assert slope(0.1) - slope(0.0) == pytest.approx(-0.1, abs=1e-7)
    assert slope(0.0) == pytest.approx(-math.exp(log_ratio), rel=1e-5, abs=1e-40)  # the ratio itself has no floor


@pytest.mark.parametrize("reduction", REDUCTIONS)
def test_at_ratio_one_the_equation_gate_gives_exactly_the_gradient_of_grpo(reduction):
    _, old, advantages, mask, *_ = ragged_minibatch(torch.float32)
    args = old, old, advantages, mask, counts_of(mask, advantages)

    def gradient(**parameters):
        objective = partial(sapo, **parameters)
        return loss_and_gradient(*args, objective=objective, reduction=reduction, constant_tokens=7)[1]

    grpo, listing = gradient(gamma=0.0), gradient(gamma=0.1, gate="listing")
    assert torch.equal(gradient(gamma=0.1), grpo)
    nonneg = (advantages >= 0)[:, None] & mask.bool()
    torch.testing.assert_close(listing - grpo, -0.1 / nonneg.sum() * nonneg, rtol=0, atol=1e-7)


def test_gates_at_their_edges():
    # ratio below, at and above tau, for A > 0, A = 0, A < 0
    log_ratio = torch.tensor([[-0.1, 0.0, 0.1]]).expand(3, 3)
    advantages = torch.tensor([[1.0], [0.0], [-1.0]])
    args = log_ratio, torch.zeros(3, 3), advantages, torch.ones(3, 3)
    gates = {g: sapo(*args, gate=g).gate.tolist() for g in GATES}
    assert gates["equation"] == [[True, False, False], [False] * 3, [False] * 3]
    assert gates["listing"] == [[True, True, False], [True, True, False], [False] * 3]


@pytest.mark.parametrize("gate,reduction", GATES_AND_REDUCTIONS)
def test_shares_of_micro_batches_add_up(gate, reduction):
    logprobs, old, advantages, mask, ref, entropy = ragged_minibatch()
    settings = dict(objective=partial(sapo, gate=gate), reduction=reduction, constant_tokens=7, ref_kl_coef=0.01,
                    entropy_coef=0.05)
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
    settings = dict(objective=partial(sapo, gate=gate), reduction=reduction, constant_tokens=7)
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
        objective=partial(sapo, gate=gate), ref_logprobs=torch.zeros(1, 1), ref_kl_coef=0.001,
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
    ratios = torch.tensor([[0.5, 1.5, 9.0], [0.5, 0.7, 9.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 0]])
    out = policy_loss(
        ratios.log(), torch.zeros(2, 3), torch.tensor([1.0, -1.0]), mask, Counts(2, 4, 2),
        ref_logprobs=ratios.log() + math.log(2), entropy=torch.full((2, 3), 0.25),
    )
    assert {name: value.item() for name, value in out.token_sums.items()} == pytest.approx({
        "policy/ratio_mean": 3.2,
        "policy/clip_frac": 3,  # 1.5 with A = 1, 0.5 and 0.7 with A = -1
        "policy/clip_low_frac": 2,
        "policy/clip_high_frac": 1,
        "policy/gate_frac": 1,  # 0.5 with A = 1
        "policy/approx_kl": 3.2 - 4 - math.log(0.5 * 1.5 * 0.5 * 0.7),
        "policy/ref_kl": 4 * (1 - math.log(2)),
        "policy/entropy_nats": 1.0,
    }, rel=1e-6)
    assert out.log_ratio.exp().tolist() == pytest.approx([0.5, 1.5, 0.5, 0.7])
    assert out.positive.tolist() == [True, True, False, False]


def test_mismatch_weights_at_their_cap():
    # trainer over engine: 1/4, 1, 2, 3, 4 and one that overflows
    rho = torch.tensor([[0.25, 1.0, 2.0, 3.0, 4.0, math.exp(19)]])
    args = rho.log().double() + torch.tensor([[0, 0, 0, 0, 0, 200.0]]), torch.zeros(1, 6)
    assert mismatch_weights(*args, "tis", 2.0).tolist()[0] == pytest.approx([0.25, 1, 2, 2, 2, 2], rel=1e-6)
    assert mismatch_weights(*args, "mis", 3.5).tolist()[0] == pytest.approx([0.25, 1, 2, 3, 0, 0], rel=1e-6)


@pytest.mark.parametrize(
    ("mismatch", "loss", "weights"),
    [
        ("none", -(1 + 0.36787944117144233 - 0.5) / 2, None),
        ("tis", -(0.5 * 1 + 2 * (0.36787944117144233 - 0.5)) / 2, 2.5),
        ("mis", -(0.5 * 1 + 0 * (0.36787944117144233 - 0.5)) / 2, 0.5),
    ],
)
def test_a_mismatch_weighs_surrogate_and_penalty_but_no_count(mismatch, loss, weights):
    # ratios 1 and 1/e, A = 1, gamma = 0.5: objectives 1 and 1/e - 0.5; trainer over engine 1/2 and 3
    out = policy_loss(
        torch.tensor([[0.0, -1.0]], dtype=torch.float64), torch.zeros(1, 2), torch.ones(1), torch.ones(1, 2),
        Counts(1, 2, 2), objective=partial(sapo, gamma=0.5), mismatch=mismatch, mismatch_cap=2.0,
        sampling_logprobs=torch.tensor([[math.log(2.0), -math.log(3.0)]], dtype=torch.float64),
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(loss, abs=1e-12)
    found = out.token_sums.get("policy/mismatch_weight_mean")
    assert (None if found is None else found.item()) == (None if weights is None else pytest.approx(weights, abs=1e-12))


def test_off_policy_rows_are_the_bad_responses_that_drifted_down():
    # mean drifts of 0.5, 0.5, 0.3 and 0 nats down; the second row's third token is not sampled
    log_ratio = torch.tensor([[-1.0, 0.0, -0.5], [-0.5, -0.5, 0.0], [-0.3, -0.3, -0.3], [0.0, 0.0, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 0.0], [1.0, 1.0, 1.0], [0.0, 0.0, 0.0]])
    advantages = torch.tensor([[1.0], [-1.0], [-1.0], [-1.0]])
    assert off_policy_rows(log_ratio, advantages, mask, 0.4).tolist() == [[False], [True], [False], [False]]
    assert off_policy_rows(log_ratio, advantages, mask, 0.2).tolist() == [[False], [True], [True], [False]]
    out = policy_loss(
        log_ratio, torch.zeros(4, 3), advantages[:, 0], mask, Counts(3, 8, 3), off_policy_delta=0.4,
        objective=partial(sapo, clip_low=0.9, gamma=0.0), reduction="token_mean",
    )  # fmt: skip
    assert out.token_sums["policy/off_policy_frac"].item() == 2
    kept = 0.36787944117144233 + 1 + 0.60653065971263342 - 3 * 0.74081822068171786
    assert out.loss.item() == pytest.approx(-kept / 8, abs=1e-6)


def test_wrong_settings_are_refused():
    args = torch.zeros(1, 1), torch.zeros(1, 1), torch.ones(1), torch.ones(1, 1), Counts(1, 1, 1)
    with pytest.raises(ValueError, match="unknown gate 'eq'"):
        policy_loss(*args, objective=partial(sapo, gate="eq"))
    with pytest.raises(ValueError, match="unknown reduction 'mean'"):
        policy_loss(*args, reduction="mean")
    with pytest.raises(ValueError, match="constant_tokens"):
        policy_loss(*args, reduction="constant")
    with pytest.raises(ValueError, match="ref_logprobs"):
        policy_loss(*args, ref_kl_coef=0.1)
    with pytest.raises(ValueError, match="entropy"):
        policy_loss(*args, entropy_coef=0.1)
    with pytest.raises(ValueError, match="mismatch 'tis' needs mismatch_cap, and sampling_logprobs"):
        policy_loss(*args, mismatch="tis", mismatch_cap=2.0)
    with pytest.raises(ValueError, match="unknown mismatch 'TIS'"):
        policy_loss(*args, mismatch="TIS", mismatch_cap=2.0, sampling_logprobs=torch.zeros(1, 1))
