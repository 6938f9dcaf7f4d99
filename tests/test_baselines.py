import inspect
import itertools
import math
from functools import partial

import pytest
import torch

from benchmarks.scalar_reference import reference_loss
from sapo.baselines import LOSSES, llds, soft_sapo
from sapo.config import LOSS_PARAMETERS, LossSettings
from sapo.loss import Counts, policy_loss, sapo

VARIANTS = {
    **{name: (name, parameters) for name, parameters in LOSS_PARAMETERS.items()},
    "sapo, listing": ("sapo", LOSS_PARAMETERS["sapo"] | {"gate": "listing"}),
    "kl_ratio, tau 1.2": ("kl_ratio", LOSS_PARAMETERS["kl_ratio"] | {"tau": 1.2}),
    "llds, action": ("llds", LOSS_PARAMETERS["llds"] | {"gate_level": "action"}),
    "gspo, wide": ("gspo", {"clip_low": 0.2, "clip_high": 0.3}),
    "cispo, low cap": ("cispo", {"ratio_max": 1.1}),
}
OPTIONS = {
    "plain": {},
    "dual_clip": {"dual_clip_bound": 3.0},
    "off_policy": {"off_policy_delta": 0.1},
    "tis": {"mismatch": "tis", "mismatch_cap": 1.2},
    "mis, all": {"mismatch": "mis", "mismatch_cap": 1.2, "dual_clip_bound": 1.5, "off_policy_delta": 0.05},
}


def reductions_of(name):
    return {"gspo": ["sequence_mean"], "dr_grpo": ["constant"]}.get(name, ["sequence_mean", "token_mean", "constant"])


CASES = [
    (variant, reduction, option)
    for variant, option in itertools.product(VARIANTS, OPTIONS)
    for reduction in reductions_of(VARIANTS[variant][0])
    if "dual_clip_bound" not in OPTIONS[option] or "clip_low" in VARIANTS[variant][1]  # as the settings allow
]


def minibatch(extreme=True):
    """Eight rows of 10 tokens, ragged, with holes, the last one empty; A of each sign, small and large drifts."""
    generator = torch.Generator().manual_seed(5)
    log_ratio = torch.randn(8, 10, generator=generator, dtype=torch.float64) * 0.4
    log_ratio[4] = 0.0  # exactly on policy
    log_ratio[5] *= 1e-3
    if extreme:
        log_ratio[0, 1:4] = torch.tensor([0.0, -100.0, 100.0])
        log_ratio[1, 1:4] = torch.tensor([-100.0, 100.0, 100.0])
        log_ratio[2, 1:4] = torch.tensor([0.0, -100.0, 19.9])
        log_ratio[6, 1:3] = torch.tensor([-100.0, 100.0])
    old = -torch.rand(8, 10, generator=generator, dtype=torch.float64) * 3
    mask = (torch.rand(8, 10, generator=generator) < 0.6).double()
    mask[:, 0] = 0
    mask[:, 1:4] = 1
    mask[7] = 0
    advantages = torch.tensor([1.3, 0.7, -0.9, 0.0, -1.1, 0.5, -0.4, 1.0], dtype=torch.float64)
    sampling = old + torch.randn(8, 10, generator=generator, dtype=torch.float64) * 0.3
    return old + log_ratio, old, advantages, mask, sampling


def counts_of(mask, advantages):
    rows = mask.sum(1)
    return Counts(int((rows > 0).sum()), int(rows.sum()), int(rows[advantages >= 0].sum()))


def loss_and_gradient(logprobs, *args, **kwargs):
    logprobs = logprobs.clone().requires_grad_()
    out = policy_loss(logprobs, *args, **kwargs)
    out.loss.backward()
    return out, logprobs.grad


def reference_of(variant, reduction, option, logprobs, old, advantages, mask, sampling):
    name, parameters = VARIANTS[variant]
    options = {key.removesuffix("_bound"): value for key, value in OPTIONS[option].items()}
    return reference_loss(
        logprobs.tolist(), old.tolist(), advantages.tolist(), mask.tolist(), name=name, parameters=parameters,
        reduction=reduction, constant_tokens=7, sampling_logprobs=sampling.tolist(), **options,
    )  # fmt: skip


def ours(variant, reduction, option, logprobs, old, advantages, mask, sampling, counts=None):
    name, parameters = VARIANTS[variant]
    return loss_and_gradient(
        logprobs, old, advantages, mask, counts or counts_of(mask, advantages),
        objective=partial(LOSSES[name], **parameters), reduction=reduction, constant_tokens=7,
        sampling_logprobs=sampling, **OPTIONS[option],
    )  # fmt: skip


@pytest.mark.parametrize("variant,reduction,option", CASES)
def test_value_and_gradient_equal_a_scalar_loop(variant, reduction, option):
    logprobs, old, advantages, mask, sampling = minibatch()
    value, gradient = reference_of(variant, reduction, option, logprobs, old, advantages, mask, sampling)
    off = mask == 0  # what stands outside the mask must not matter
    for tensor, garbage in ((logprobs, math.nan), (old, math.inf), (sampling, math.nan)):
        tensor[off] = garbage
    out, grad = ours(variant, reduction, option, logprobs, old, advantages, mask, sampling)
    gradient = torch.tensor(gradient, dtype=torch.float64)
    assert abs(out.loss.item() - value) <= 1e-12 * max(1, abs(value))
    assert ((grad - gradient).abs() <= 1e-12 * gradient.abs().clamp(min=1)).all()
    assert grad[off].eq(0).all() and gradient.abs().max() > 1e-4


@pytest.mark.parametrize("variant", [name for name in VARIANTS if not name.startswith("cispo")])
@pytest.mark.parametrize("option", ["plain", "tis"])
def test_the_reference_gradient_is_the_slope_of_the_reference_value(variant, option):
    """Away from kinks; cispo's stopped gradient is no slope (its limits are below)."""
    data = minibatch(extreme=False)
    data[0][4] = data[1][4] - 0.01  # no row on the edge of a gate
    reduction = reductions_of(VARIANTS[variant][0])[0]
    _, gradient = reference_of(variant, reduction, option, *data)
    for i, t in itertools.product(range(8), range(1, 4)):
        values = []
        for step in (1e-6, -1e-6):
            moved = data[0].clone()
            moved[i, t] += step
            values.append(reference_of(variant, reduction, option, moved, *data[1:])[0])
        assert (values[0] - values[1]) / 2e-6 == pytest.approx(gradient[i][t], abs=1e-8), (i, t)


@pytest.mark.parametrize("variant,reduction,option", CASES)
def test_shares_of_micro_batches_add_up(variant, reduction, option):
    data = minibatch()
    counts = counts_of(data[3], data[2])
    whole, gradient = ours(variant, reduction, option, *data, counts)
    parts = [ours(variant, reduction, option, *(x[rows] for x in data), counts)
             for rows in (slice(0, 1), slice(1, 4), slice(4, 7), slice(7, 8))]  # fmt: skip
    assert sum(out.loss.item() for out, _ in parts) == pytest.approx(whole.loss.item(), rel=1e-12)
    torch.testing.assert_close(torch.cat([grad for _, grad in parts]), gradient, rtol=0, atol=0)
    for name, value in {**whole.terms, **whole.token_sums}.items():
        summed = sum({**out.terms, **out.token_sums}[name].item() for out, _ in parts)
        assert summed == pytest.approx(value.item(), rel=1e-12), name


E20 = 485165195.4097903
SIGMOID = 0.2689414213699951, 0.2592251008178459  # of -1 and of -1.05
GRPO = {1: [(1, 1), (0, 0), (1.2, 0)], 0: [(0, 0)] * 3, -1: [(-1, -1), (-0.8, 0), (-E20, 0)]}
# objective and slope of a token at log-ratios 0, -100 and 100, for A = 1, 0 and -1
LIMITS = {
    "sapo": {**GRPO, 1: [(1, 1), (-10, 0.1), (1.2, 0)]},
    "sapo, listing": {1: [(1, 1.1), (-10, 0.1), (1.2, 0)], 0: [(0, 0.1), (-10, 0.1), (0, 0)], -1: GRPO[-1]},
    "grpo": GRPO,
    "kl_uncond": {
        1: [(1, 1.1), (-10, 0.1), (11.2, 0.1)],
        0: [(0, 0.1), (-10, 0.1), (10, 0.1)],
        -1: [(-1, -0.9), (-10.8, 0.1), (10 - E20, 0.1)],
    },
    "kl_ratio": {
        1: [(1, 1), (-10, 0.1), (1.2, 0)],
        0: [(0, 0), (-10, 0.1), (0, 0)],
        -1: [(-1, -1), (-10.8, 0.1), (-E20, 0)],
    },
    "positive_nll": {
        1: [(1, 1.1), (-10, 0.1), (11.2, 0.1)],
        0: [(0, 0.1), (-10, 0.1), (10, 0.1)],
        -1: GRPO[-1],
    },
    "llds": {1: [(1, 1), (-20, 0.2), (1.2, 0)], 0: [(0, 0), (-20, 0.2), (0, 0)], -1: GRPO[-1]},
    "llds, action": {1: [(1, 1), (-20, 0.2), (1.2, 0)], 0: [(0, 0), (-20, 0.2), (0, 0)], -1: GRPO[-1]},
    "dapo": {**GRPO, 1: [(1, 1), (0, 0), (1.28, 0)]},
    "dr_grpo": GRPO,
    "gspo": {1: [(1, 1), (0, 0), (1.0004, 0)], 0: GRPO[0], -1: [(-1, -1), (-0.9997, 0), (-E20, 0)]},
    "cispo": {1: [(-1, 1), (0, 0), (495, 5)], 0: GRPO[0], -1: [(1, -1), (0, 0), (-495, -5)]},  # logprobs are ours - 1
    "soft_sapo": {
        1: [(2, 1), (4 * SIGMOID[0], 0), (4, 0)],
        0: GRPO[0],
        -1: [(-2 / 1.05, -1), (-4 / 1.05 * SIGMOID[1], 0), (-4 / 1.05, 0)],
    },
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("variant", LIMITS)
def test_limits(variant, dtype):
    name, parameters = VARIANTS[variant]
    tolerance = dict(rel=2e-6, abs=1e-6) if dtype == torch.float32 else dict(rel=1e-12, abs=1e-12)
    for advantage, limits in LIMITS[variant].items():
        for log_ratio, (objective, slope) in zip((0.0, -100.0, 100.0), limits, strict=True):
            out, grad = loss_and_gradient(
                torch.full((1, 1), log_ratio - 1, dtype=dtype), torch.full((1, 1), -1.0, dtype=dtype),
                torch.tensor([float(advantage)]), torch.ones(1, 1), Counts(1, 1, int(advantage >= 0)),
                objective=partial(LOSSES[name], **parameters),
            )  # fmt: skip
            found = -out.loss.item(), -grad.item()
            assert found == (pytest.approx(objective, **tolerance), pytest.approx(slope, **tolerance)), (
                advantage, log_ratio,
            )  # fmt: skip
            assert all(value.isfinite() for value in out.token_sums.values())


def test_every_loss_has_limits():
    assert {VARIANTS[variant][0] for variant in LIMITS} == set(LOSSES)


def test_dual_clip_bounds_what_an_unlikely_bad_token_weighs():
    args = torch.full((1, 1), 100.0), torch.zeros(1, 1), -torch.ones(1), torch.ones(1, 1), Counts(1, 1, 0)
    out, grad = loss_and_gradient(*args, dual_clip_bound=3.0)
    assert (out.loss.item(), grad.item(), out.token_sums["policy/clip_high_frac"].item()) == (3.0, 0.0, 1.0)
    out, grad = loss_and_gradient(torch.full((1, 1), math.log(2.5)), *args[1:], dual_clip_bound=3.0)
    assert (out.loss.item(), grad.item()) == (pytest.approx(2.5), pytest.approx(2.5))


@pytest.mark.parametrize("variant,reduction,option", CASES)
def test_empty_and_all_negative_micro_batches_are_finite(variant, reduction, option):
    logprobs, old, advantages, mask, sampling = (x.float() for x in minibatch())
    out, grad = ours(variant, reduction, option, logprobs, old, advantages, mask * 0, sampling)
    assert out.loss.item() == 0 and grad.eq(0).all() and out.log_ratio.shape == (0,)
    out, grad = ours(variant, reduction, option, logprobs, old, -advantages.abs() - 0.1, mask, sampling)
    assert out.loss.isfinite() and grad.isfinite().all()


def test_llds_gates_by_response_or_by_turn():
    # a response of two turns: the first fell by 0.2 in all, the second rose by 0.5; places 2 and 5 are observations
    log_ratio = torch.tensor([[-0.3, 0.1, 0.0, 0.6, -0.1, 0.0]])
    mask = torch.tensor([[1.0, 1.0, 0.0, 1.0, 1.0, 0.0]])
    gates = [
        llds(log_ratio * sign, torch.zeros(1, 6), torch.ones(1, 1), mask, clip_low=0.2, clip_high=0.2, gamma=1.0,
             gate_level=level).gate.int().tolist()[0]
        for level in ("response", "action") for sign in (1, -1)
    ]  # fmt: skip
    assert gates == [[0] * 6, [0, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0], [0, 0, 0, 1, 0, 0]]
    with pytest.raises(ValueError, match="unknown gate_level 'turn'"):
        llds(log_ratio, log_ratio, torch.ones(1, 1), mask, clip_low=0.2, clip_high=0.2, gamma=1.0, gate_level="turn")


def test_gspo_clips_whole_responses_by_their_mean():
    # ratios 2 and 1/2 (mean log-ratio 0: unclipped, slope A / 2 each), then 2 and 1 with a place outside the mask
    log_ratio = torch.tensor([[math.log(2), -math.log(2), 9.0], [math.log(2), 0.0, 0.0]], dtype=torch.float64)
    mask = torch.tensor([[1.0, 1.0, 0.0], [1.0, 1.0, 0.0]])
    objective = partial(LOSSES["gspo"], **LOSS_PARAMETERS["gspo"])
    out, grad = loss_and_gradient(
        log_ratio, torch.zeros(2, 3), torch.ones(2), mask, Counts(2, 4, 4), objective=objective
    )
    assert out.loss.item() == pytest.approx(-(1 + 1.0004) / 2, abs=1e-12)
    assert grad.tolist() == [[pytest.approx(-0.25), pytest.approx(-0.25), 0], [0, 0, 0]]
    assert out.token_sums["policy/clip_high_frac"].item() == 2 and out.token_sums["policy/clip_low_frac"].item() == 0


def test_soft_sapo_is_the_formula_that_trl_calls_sapo():
    """TRL 1.16, GRPOTrainer, loss_type "sapo": -sigmoid(t * (r - 1)) * 4 / t * A, mean over tokens, then rows."""
    logprobs, old, advantages, mask, _ = minibatch(extreme=False)
    ratio, total = (logprobs - old).exp(), 0.0
    for row, advantage in enumerate(advantages.tolist()):
        t = 1.0 if advantage > 0 else 1.05
        sigmoids = [1 / (1 + math.exp(-t * (ratio[row, k].item() - 1))) for k in range(10) if mask[row, k]]
        terms = [-sigmoid * 4 / t * advantage for sigmoid in sigmoids]
        total += sum(terms) / max(len(terms), 1) / 7
    out = policy_loss(
        logprobs, old, advantages, mask, counts_of(mask, advantages),
        objective=partial(soft_sapo, temperature_pos=1.0, temperature_neg=1.05),
    )  # fmt: skip
    assert out.loss.item() == pytest.approx(total, abs=1e-12)


def test_names_parameters_and_settings_agree():
    assert LOSSES["sapo"] is sapo and LOSSES["soft_sapo"] is soft_sapo and list(LOSSES) == list(LOSS_PARAMETERS)
    first = list(inspect.signature(sapo).parameters)[:4]
    for name, function in LOSSES.items():
        signature = inspect.signature(function).parameters
        assert list(signature)[:4] == first, name
        assert set(list(signature)[4:]) == set(LOSS_PARAMETERS[name]) == set(LossSettings(name=name).parameters), name
