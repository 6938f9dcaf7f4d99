"""The losses to compare SAPO with, each as the objective of a token (`sapo.loss.Objective`), to be maximised.

All have the signature of `sapo.loss.sapo`: (logprobs, old_logprobs, advantages, mask, *, parameters), with logprobs in
nats [B, T], advantages [B, 1], mask [B, T] of 0. and 1., and logprobs 0 where the mask is 0. A row is a whole response.
Below, r = exp(logprobs - old_logprobs), A the advantage, sg = stop-gradient. `sapo.loss.policy_loss` averages and
negates. How advantages are estimated and how tokens are averaged is part of some methods; it is set beside the loss.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sapo.loss import MAX_EXPONENT, TokenObjective, sapo


def grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> TokenObjective:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A): SAPO without its penalty.

    Source: Shao et al., arXiv 2402.03300 (Group Relative Policy Optimization); clip range 0.2.
    """
    return sapo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high, gamma=0.0)


def kl_uncond(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    gamma: float,
) -> TokenObjective:
    """grpo + gamma log r on every token.

    Source: the row "unconditional KL" of the ablation of SAPO, arXiv 2603.10069, Table 2.
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    return tokens._replace(penalty=gamma * tokens.log_ratio, gate=torch.ones_like(tokens.gate))


def kl_ratio(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    gamma: float,
    tau: float,
) -> TokenObjective:
    """grpo + gamma 1[r < tau] log r: SAPO without the condition on the advantage.

    Source: the row "ratio gate only" of the ablation of SAPO, arXiv 2603.10069, Table 2.
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    gate = tokens.ratio < tau
    return tokens._replace(penalty=gamma * torch.where(gate, tokens.log_ratio, 0), gate=gate)


def positive_nll(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    gamma: float,
) -> TokenObjective:
    """grpo + gamma 1[A >= 0] log r, the second term averaged over the tokens of the rows with A >= 0.

    This is SAPO's listing (arXiv 2603.10069, appendix A.6) without its ratio gate. log r is log pi but for a constant,
    so the term is a likelihood (NLL) loss on the responses that are not bad.
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    gate = (advantages >= 0).expand_as(tokens.gate)
    return tokens._replace(penalty=gamma * torch.where(gate, tokens.log_ratio, 0), gate=gate, nonneg_mean=True)


def llds(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    clip_low: float,
    clip_high: float,
    gamma: float,
    gate_level: Literal["response", "action"],
) -> TokenObjective:
    """grpo - gamma 1[A >= 0] 1[sum of log r < 0] max(0, -log r).

    The sum is over the token's response, or over its action: one turn, that is, one run of sampled tokens in the row,
    since an observation stands between two turns. Averaged as the policy term. Source: Deng et al., arXiv 2512.04220
    (likelihood-preserving regularisation); its lambda is our gamma, 0.2.
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    log_ratio = tokens.log_ratio.detach()  # [B, T], 0 where the mask is 0
    if gate_level == "response":
        total = log_ratio.sum(1, keepdim=True)  # [B, 1]
    elif gate_level == "action":
        before = torch.nn.functional.pad(mask[:, :-1], (1, 0))
        turn = (mask > before).cumsum(1)  # [B, T] number of the run that a sampled token is in, from 1
        sums = log_ratio.new_zeros(len(mask), mask.shape[1] + 1).scatter_add(1, turn, log_ratio)
        total = sums.gather(1, turn)  # [B, T]
    else:
        raise ValueError(f"unknown gate_level {gate_level!r}: use 'response' or 'action'")
    gate = (advantages >= 0) & (total < 0) & (log_ratio < 0)
    return tokens._replace(penalty=gamma * torch.where(gate, tokens.log_ratio, 0), gate=gate)


def dapo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> TokenObjective:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with clip_high > clip_low, so that unlikely tokens may rise.

    Source: Yu et al., arXiv 2503.14476; clip range 0.2 and 0.28. To the method belong the mean over all tokens
    (reduction "token_mean") and that groups of equal rewards are replaced.
    """
    return grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def dr_grpo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> TokenObjective:
    """min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with A = R - group mean, not divided by the deviation.

    Source: Liu et al., arXiv 2503.20783; clip range 0.2. To the method belongs the token sum over a
    constant (reduction "constant"): neither short nor easy answers weigh more.
    """
    return grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)


def gspo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, clip_low: float, clip_high: float
) -> TokenObjective:
    """min(s A, clip(s, 1 - clip_low, 1 + clip_high) A) at each token of a response, s = exp(its mean of log r).

    Source: Zheng et al., arXiv 2507.18071; clip range 3e-4 and 4e-4. Every token of a response holds the
    response's term, so the mean of response means (reduction "sequence_mean") is the paper's mean over responses.
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=clip_low, clip_high=clip_high)
    length = mask.sum(1, keepdim=True).clamp(min=1)
    ratio = (tokens.log_ratio.sum(1, keepdim=True) / length).clamp(max=MAX_EXPONENT).exp()  # [B, 1]
    unclipped = ratio * advantages
    surrogate = torch.min(unclipped, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)
    clipped = (surrogate < unclipped).expand_as(tokens.gate)
    return tokens._replace(
        surrogate=surrogate.expand_as(mask),
        clipped_low=clipped & (advantages < 0),
        clipped_high=clipped & (advantages > 0),
    )


def cispo(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, *, ratio_max: float
) -> TokenObjective:
    """sg(min(r, ratio_max)) A log pi: the weight is capped, no token's gradient is clipped away.

    Source: MiniMax-M1, arXiv 2506.13585, without a lower bound as there; ratio_max 5, mean over all tokens
    (reduction "token_mean").
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
    weight = tokens.ratio.detach().clamp(max=ratio_max)
    return tokens._replace(
        surrogate=weight * advantages * logprobs,
        clipped_low=torch.zeros_like(tokens.gate),
        clipped_high=tokens.ratio > ratio_max,
    )


def soft_sapo(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    temperature_pos: float,
    temperature_neg: float,
) -> TokenObjective:
    """(4 / t) sigmoid(t (r - 1)) A, t = temperature_pos where A > 0, else temperature_neg: a soft clip.

    Soft Adaptive Policy Optimization, arXiv 2511.20347; 1.0 and 1.05. What TRL and others call "sapo" is
    this loss; it has nothing but the name in common with Search Agent Policy Optimization, our `sapo`.
    """
    tokens = grpo(logprobs, old_logprobs, advantages, mask, clip_low=0.2, clip_high=0.2)
    temperature = torch.full_like(advantages, temperature_neg).masked_fill(advantages > 0, temperature_pos)  # [B, 1]
    never = torch.zeros_like(tokens.gate)
    return tokens._replace(
        surrogate=4 / temperature * torch.sigmoid(temperature * (tokens.ratio - 1)) * advantages,
        clipped_low=never,
        clipped_high=never,
    )


# By `loss.name`; the defaults of the parameters stand beside the settings, in sapo/config.py.
LOSSES: dict[str, Callable[..., TokenObjective]] = {
    "sapo": sapo,
    "grpo": grpo,
    "kl_uncond": kl_uncond,
    "kl_ratio": kl_ratio,
    "positive_nll": positive_nll,
    "llds": llds,
    "dapo": dapo,
    "dr_grpo": dr_grpo,
    "gspo": gspo,
    "cispo": cispo,
    "soft_sapo": soft_sapo,
}
