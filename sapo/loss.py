"""SAPO here is Search Agent Policy Optimization (arXiv 2603.10069), not Soft Adaptive Policy Optimization (2511.20347).

Pure functions of tensors. Dims: `B` responses, `T` tokens. Log-probabilities are in nats, one per token, and belong
to the token at the same place. Each micro-batch gives its exact share of the loss of its minibatch: all denominators
are global counts, so shares and gradients add up over micro-batches and ranks whatever the packing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

Gate = Literal["equation", "listing"]
Reduction = Literal["sequence_mean", "token_mean", "constant"]

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
    penalty: Tensor  # <= 0 for tau <= 1
    gate: Tensor  # bool, where the penalty acts
    clipped: Tensor  # bool, where clipping holds the surrogate constant
    ratio: Tensor
    log_ratio: Tensor


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


def token_objective(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 0.1,
    tau: float = 1.0,
    gate: Gate = "equation",
) -> TokenObjective:
    """Compute the SAPO objective of each token (Eq. 9 and 11); `gamma = 0` is GRPO.

    logprobs, old_logprobs: [B, T] nats. advantages: [B, 1]. Gradients flow through `logprobs` only.
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
    return TokenObjective(surrogate, penalty, drifted, surrogate < unclipped, ratio, log_ratio)


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
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    gamma: float = 0.1,
    tau: float = 1.0,
    gate: Gate = "equation",
    reduction: Reduction = "sequence_mean",
    constant_tokens: int | None = None,
    ref_logprobs: Tensor | None = None,
    ref_kl_coef: float = 0.0,
    entropy: Tensor | None = None,
    entropy_coef: float = 0.0,
) -> PolicyLoss:
    """Return a micro-batch's share of: -surrogate - penalty + ref_kl_coef * ref_kl - entropy_coef * entropy.

    logprobs, old_logprobs, ref_logprobs, entropy: [B, T] nats; whatever stands where the mask is 0 is ignored, NaN
    included. advantages: [B]. mask: [B, T], 1 = sampled by the policy. counts: global, of the whole minibatch.
    With the listing gate the penalty is averaged over the tokens of the rows with A >= 0, whatever the reduction.
    A coefficient other than 0 without its tensor raises ValueError.
    """
    if (ref_kl_coef and ref_logprobs is None) or (entropy_coef and entropy is None):
        raise ValueError("a non-zero ref_kl_coef needs ref_logprobs, a non-zero entropy_coef needs entropy")
    sampled = mask.bool()  # [B, T]
    # where, not a product: 0 * NaN is NaN, in the value and in the gradient
    logprobs = torch.where(sampled, logprobs, 0)
    old_logprobs = torch.where(sampled, old_logprobs, 0)
    advantages = advantages.to(logprobs.dtype)[:, None]  # [B, 1]

    tokens = token_objective(
        logprobs, old_logprobs, advantages, clip_low=clip_low, clip_high=clip_high, gamma=gamma, tau=tau, gate=gate
    )
    ones = sampled.to(logprobs.dtype)  # [B, T]
    weights = token_weights(ones, counts, reduction, constant_tokens)  # [B, T]
    penalty_weights = ones / max(counts.nonneg_tokens, 1) if gate == "listing" else weights  # [B, T]

    policy = -(weights * tokens.surrogate).sum()
    drift_penalty = -(penalty_weights * tokens.penalty).sum()
    loss = policy + drift_penalty
    ratio, log_ratio = tokens.ratio.detach(), tokens.log_ratio.detach()
    token_sums = {
        "policy/ratio_mean": (ones * ratio).sum(),
        "policy/clip_frac": (ones * tokens.clipped).sum(),
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
