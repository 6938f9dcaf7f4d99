"""SAPO here is Search Agent Policy Optimization (arXiv 2603.10069), not Soft Adaptive Policy Optimization (2511.20347).

Pure functions of tensors. Dims: `B` responses, `T` tokens. Log-probabilities are in nats, one per token, and belong
to the token at the same place. Each micro-batch gives its exact share of the loss of its minibatch: all denominators
are global counts, so shares and gradients add up over micro-batches and ranks whatever the packing.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Gate = Literal["equation", "listing"]
Reduction = Literal["sequence_mean", "token_mean", "constant"]
Mismatch = Literal["none", "tis", "mis"]

MAX_EXPONENT = 20.0  # nats; e^20 = 4.9e8 keeps every product finite in float32


@dataclass(frozen=True)
class Counts:
    """Denominators of one minibatch, summed over all its micro-batches and ranks.

    responses: rows with at least one sampled token. tokens: sampled tokens. nonneg_tokens: sampled tokens of the rows
    with advantage >= 0, the denominator of the listing's penalty.
    """

    responses: int
    tokens: int
    nonneg_tokens: int


class TokenObjective(NamedTuple):
    """Per-token terms, each [B, T]; the objective to maximise is `surrogate + penalty`."""

    surrogate: Tensor
    penalty: Tensor  # <= 0 for sapo with tau <= 1
    gate: Tensor  # bool, where the penalty acts; in a loss without one, where SAPO's would at tau = 1
    clipped_low: Tensor  # bool, where a lower clip holds the surrogate constant
    clipped_high: Tensor  # bool, where an upper one does, or caps the token's weight
    ratio: Tensor
    log_ratio: Tensor
    nonneg_mean: bool = False  # the penalty is averaged over the tokens of the rows with A >= 0, whatever the reduction


# (logprobs [B, T], old_logprobs [B, T], advantages [B, 1], mask [B, T] of 0. and 1.) -> TokenObjective. Logprobs are 0
# where the mask is 0. Those beside `sapo` are in sapo/baselines.py.
Objective = Callable[[Tensor, Tensor, Tensor, Tensor], TokenObjective]


class PolicyLoss(NamedTuple):
    """The loss of one micro-batch, and what is needed to report it. All but `loss` is detached.

    loss: scalar to minimise, this micro-batch's share of the minibatch's loss.
    terms: shares of two parts of the loss ("loss/policy", "loss/drift_penalty"); they add up to the minibatch's.
    token_sums: sums over sampled tokens; a metric is its global sum over the global token count.
    log_ratio: [N] of the N sampled tokens. positive: [N] bool, advantage > 0.
    """

    loss: Tensor
    terms: dict[str, Tensor]
    token_sums: dict[str, Tensor]
    log_ratio: Tensor
    positive: Tensor


def sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 0.1,
    tau: float = 1.0,
    gate: Gate = "equation",
) -> TokenObjective:
    """Compute the Search Agent Policy Optimization objective of each token (Eq. 9 and 11); `gamma = 0` is GRPO.

    logprobs, old_logprobs: [B, T] nats. advantages: [B, 1]. mask: [B, T], not needed here: every token is on its own.
    Gradients flow through `logprobs` only.
    gate: "equation" opens where ratio < tau and A > 0; "listing" (appendix A.6) where ratio <= tau and A >= 0.
    The penalty uses the raw log-ratio: its gradient stays gamma however small the ratio is.
    """
    log_ratio = logprobs - old_logprobs  # [B, T] nats
    ratio = log_ratio.clamp(max=MAX_EXPONENT).exp()  # [B, T] only exp's argument, only from above
    unclipped = ratio * advantages  # [B, T]
    surrogate = torch.min(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)  # [B, T]
    if gate == "equation":
        drifted = (ratio < tau) & (advantages > 0)  # [B, T] Eq. 11
    elif gate == "listing":
        drifted = (ratio <= tau) & (advantages >= 0)  # [B, T] appendix A.6
    else:
        raise ValueError(f"unknown gate {gate!r}: use 'equation' or 'listing'")
    penalty = gamma * torch.where(drifted, log_ratio, 0)  # <- SAPO: the one line; surrogate + penalty is Eq. 9
    clipped = surrogate < unclipped
    low, high = clipped & (advantages < 0), clipped & (advantages > 0)
    return TokenObjective(surrogate, penalty, drifted, low, high, ratio, log_ratio, nonneg_mean=gate == "listing")


def dual_clip(tokens: TokenObjective, advantages: Tensor, bound: float) -> TokenObjective:
    """Keep the surrogate of tokens with A < 0 from falling below bound * A: loss = min(loss, -bound * A).

    advantages: [B, 1]. bound > 1. Without it a token of a bad response that has become far likelier weighs its whole
    ratio. Source: Ye et al., arXiv 1912.09729 (dual-clip PPO), bound 3.
    """
    held = (advantages < 0) & (tokens.surrogate < bound * advantages)  # [B, T]
    surrogate = torch.where(held, bound * advantages, tokens.surrogate)
    return tokens._replace(surrogate=surrogate, clipped_high=tokens.clipped_high | held)


def off_policy_rows(log_ratio: Tensor, advantages: Tensor, mask: Tensor, delta: float) -> Tensor:
    """Return [B, 1] bool: responses with A < 0 whose mean of old_logprobs - logprobs is above delta nats.

    log_ratio: [B, T] nats, 0 where the mask is 0. advantages: [B, 1]. Such a response has become so unlikely that
    pushing it further down teaches little and disturbs much. Source: DeepSeek-V3.2, arXiv 2512.02556.
    """
    drift = -log_ratio.detach().sum(1, keepdim=True) / mask.sum(1, keepdim=True).clamp(min=1)  # [B, 1]
    return (advantages < 0) & (drift > delta)


def mismatch_weights(old_logprobs: Tensor, sampling_logprobs: Tensor, mismatch: Mismatch, cap: float) -> Tensor:
    """Return [B, T] weights that correct for an engine whose probabilities differ from the trainer's.

    With rho = exp(old_logprobs - sampling_logprobs), trainer over engine: "tis" min(rho, cap), truncated importance
    sampling (Yao et al., 2025, "Your efficient RL framework secretly brings you off-policy RL training"); "mis" rho
    where rho <= cap and 0 elsewhere, masked importance sampling (Liu et al., 2025, "When speed kills stability"). Both
    are per token. sampling_logprobs: nats of the distribution that was sampled from.
    """
    rho = (old_logprobs - sampling_logprobs).detach().clamp(max=MAX_EXPONENT).exp()
    if mismatch == "tis":
        return rho.clamp(max=cap)
    if mismatch == "mis":
        return torch.where(rho <= cap, rho, 0)
    raise ValueError(f"unknown mismatch {mismatch!r}: use 'none', 'tis' or 'mis'")


def token_weights(mask: Tensor, counts: Counts, reduction: Reduction, constant_tokens: int | None = None) -> Tensor:
    """Return w [B, T] such that `(w * x).sum()` is the micro-batch's share of the minibatch's mean of x.

    mask: [B, T] in the dtype wanted, 1 = sampled by the policy. sequence_mean: mean over the tokens of a response, then
    over responses (Eq. 9). token_mean: mean over all tokens. constant: token sum over `constant_tokens` x responses
    (Dr. GRPO). What is empty weighs 0.
    """
    if reduction == "sequence_mean":
        return mask / (mask.sum(1, keepdim=True).clamp(min=1) * max(counts.responses, 1))
    if reduction == "token_mean":
        return mask / max(counts.tokens, 1)
    if reduction == "constant":
        if not constant_tokens:
            raise ValueError("reduction 'constant' needs constant_tokens, the tokens a response is divided by")
        return mask / (constant_tokens * max(counts.responses, 1))
    raise ValueError(f"unknown reduction {reduction!r}: use 'sequence_mean', 'token_mean' or 'constant'")


def k3(log_ratio: Tensor) -> Tensor:
    """Estimate KL(p || q) at samples of p from log_ratio = log q - log p: r - 1 - log r >= 0.

    The log-ratio is clamped from above before exp: beyond the clamp the gradient is 0, never NaN.
    """
    log_ratio = log_ratio.clamp(max=MAX_EXPONENT)
    return torch.expm1(log_ratio) - log_ratio


def policy_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    counts: Counts,
    *,
    objective: Objective = sapo,
    reduction: Reduction = "sequence_mean",
    constant_tokens: int | None = None,
    dual_clip_bound: float | None = None,
    off_policy_delta: float | None = None,
    mismatch: Mismatch = "none",
    mismatch_cap: float | None = None,
    sampling_logprobs: Tensor | None = None,
    ref_logprobs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Return a micro-batch's share of: -surrogate - penalty + ref_kl_coef * ref_kl - entropy_coef * entropy.

    logprobs, old_logprobs, sampling_logprobs, ref_logprobs, entropy: [B, T] nats; whatever stands where the mask is 0
    is ignored, NaN included. advantages: [B]. mask: [B, T], 1 = sampled by the policy; a row is a whole response.
    counts: global, of the whole minibatch.
    objective: surrogate and penalty of each token: `sapo` or one of `sapo.baselines`, its parameters bound by
    `functools.partial`. dual_clip_bound, off_policy_delta, mismatch: see `dual_clip`, `off_policy_rows` and
    `mismatch_weights`; None or "none" is off. The last two weigh surrogate and penalty, and leave the counts alone.
    A coefficient other than 0 without its tensor, or a mismatch without tensor and cap, raises ValueError.
    """
    if (ref_kl_coef and ref_logprobs is None) or (entropy_coef and entropy is None):
        raise ValueError("a non-zero ref_kl_coef needs ref_logprobs, a non-zero entropy_coef needs entropy")
    if mismatch != "none" and (sampling_logprobs is None or mismatch_cap is None):
        raise ValueError(f"mismatch {mismatch!r} needs mismatch_cap, and sampling_logprobs of what was sampled from")
    sampled = mask.bool()  # [B, T]
    # where, not a product: 0 * NaN is NaN, in the value and in the gradient
    logprobs = torch.where(sampled, logprobs, 0)
    old_logprobs = torch.where(sampled, old_logprobs, 0)
    advantages = advantages.to(logprobs.dtype)[:, None]  # [B, 1]
    ones = sampled.to(logprobs.dtype)  # [B, T]

    tokens = objective(logprobs, old_logprobs, advantages, ones)
    if dual_clip_bound is not None:
        tokens = dual_clip(tokens, advantages, dual_clip_bound)
    weights = token_weights(ones, counts, reduction, constant_tokens)  # [B, T]
    corrections, token_sums = ones, {}  # [B, T]
    if mismatch != "none":
        corrections = mismatch_weights(old_logprobs, torch.where(sampled, sampling_logprobs, 0), mismatch, mismatch_cap)
        token_sums["policy/mismatch_weight_mean"] = (ones * corrections).sum()
    if off_policy_delta is not None:
        dropped = off_policy_rows(tokens.log_ratio, advantages, ones, off_policy_delta)  # [B, 1]
        corrections = torch.where(dropped, 0, corrections)
        token_sums["policy/off_policy_frac"] = (ones * dropped).sum()
    penalty_weights = ones / max(counts.nonneg_tokens, 1) if tokens.nonneg_mean else weights  # [B, T]

    policy = -(weights * corrections * tokens.surrogate).sum()
    drift_penalty = -(penalty_weights * corrections * tokens.penalty).sum()
    loss = policy + drift_penalty
    ratio, log_ratio = tokens.ratio.detach(), tokens.log_ratio.detach()
    token_sums |= {
        "policy/ratio_mean": (ones * ratio).sum(),
        "policy/clip_frac": (ones * (tokens.clipped_low | tokens.clipped_high)).sum(),
        "policy/clip_low_frac": (ones * tokens.clipped_low).sum(),
        "policy/clip_high_frac": (ones * tokens.clipped_high).sum(),
        "policy/gate_frac": (ones * tokens.gate).sum(),
        "policy/approx_kl": k3(log_ratio).sum(),  # 0 where the mask is 0
    }
    if ref_logprobs is not None:
        ref_kl = k3(torch.where(sampled, ref_logprobs, 0) - logprobs)  # [B, T]
        token_sums["policy/ref_kl"] = ref_kl.detach().sum()
        if ref_kl_coef:
            loss = loss + ref_kl_coef * (weights * ref_kl).sum()
    if entropy is not None:
        entropy = torch.where(sampled, entropy, 0)
        token_sums["policy/entropy_nats"] = entropy.detach().sum()
        if entropy_coef:
            loss = loss - entropy_coef * (weights * entropy).sum()
    terms = {"loss/policy": policy.detach(), "loss/drift_penalty": drift_penalty.detach()}
    positive = (advantages > 0).expand_as(sampled)[sampled]
    return PolicyLoss(loss, terms, token_sums, log_ratio[sampled], positive)
