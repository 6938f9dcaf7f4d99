"""The objectives of `sapo/loss.py` and `sapo/baselines.py` and their gradients, written again as loops over floats.

From the equations of the papers, with nothing of the code under test and no tensors; gradients are derived by hand.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

Matrix = Sequence[Sequence[float]]


def capped_exp(log_ratio: float) -> tuple[float, float]:
    """Return exp(min(log_ratio, 20)) and its derivative."""
    return (math.exp(log_ratio), math.exp(log_ratio)) if log_ratio <= 20 else (math.exp(20.0), 0.0)


def clipped(
    ratio: float, slope: float, advantage: float, clip_low: float, clip_high: float, dual_clip: float | None
) -> tuple[float, float]:
    """Return min(ratio A, clip(ratio) A), dual-clipped, and its derivative; slope is that of the ratio."""
    if advantage > 0 and ratio > 1 + clip_high:
        return (1 + clip_high) * advantage, 0.0
    if advantage < 0 and ratio < 1 - clip_low:
        return (1 - clip_low) * advantage, 0.0
    if advantage < 0 and dual_clip is not None and ratio > dual_clip:
        return dual_clip * advantage, 0.0
    return ratio * advantage, slope * advantage


def token_surrogate(
    name: str, logprob: float, log_ratio: float, advantage: float, values: Mapping[str, Any], dual_clip: float | None
) -> tuple[float, float]:
    """Return the policy term of a token and its derivative by the token's own logprob; not for gspo."""
    ratio, slope = capped_exp(log_ratio)
    if name == "cispo":
        weight = min(ratio, values["ratio_max"])
        return weight * advantage * logprob, weight * advantage
    if name == "soft_sapo":
        t = values["temperature_pos"] if advantage > 0 else values["temperature_neg"]
        gate = 1 / (1 + math.exp(-t * (ratio - 1)))
        return 4 / t * gate * advantage, 4 * gate * (1 - gate) * slope * advantage
    return clipped(ratio, slope, advantage, values["clip_low"], values["clip_high"], dual_clip)


def token_gate(name: str, log_ratio: float, advantage: float, summed: float, values: Mapping[str, Any]) -> bool:
    """Say whether gamma * log_ratio is added; summed: the log-ratio of the whole response or turn (llds)."""
    ratio, _ = capped_exp(log_ratio)
    if name == "sapo":
        if values["gate"] == "listing":
            return ratio <= values["tau"] and advantage >= 0
        return ratio < values["tau"] and advantage > 0
    if name == "kl_ratio":
        return ratio < values["tau"]
    if name == "llds":
        return advantage >= 0 and summed < 0 and log_ratio < 0
    return name == "kl_uncond" or (name == "positive_nll" and advantage >= 0)


def turns_of(places: Sequence[int]) -> dict[int, list[int]]:
    """Return for each sampled place the places of its run of neighbours."""
    runs: list[list[int]] = []
    for t in places:
        if runs and runs[-1][-1] == t - 1:
            runs[-1].append(t)
        else:
            runs.append([t])
    return {t: run for run in runs for t in run}


def reference_loss(
    logprobs: Matrix,
    old_logprobs: Matrix,
    advantages: Sequence[float],
    mask: Matrix,
    *,
    name: str,
    parameters: Mapping[str, Any],
    reduction: str,
    constant_tokens: int = 1,
    dual_clip: float | None = None,
    off_policy_delta: float | None = None,
    mismatch: str = "none",
    mismatch_cap: float = math.inf,
    sampling_logprobs: Matrix | None = None,
    ref_logprobs: Matrix | None = None,
    ref_kl_coef: float = 0.0,
    entropy: Matrix | None = None,
    entropy_coef: float = 0.0,
) -> tuple[float, list[list[float]]]:
    """Return the loss of a whole minibatch, rows x tokens, and its derivative by each entry of `logprobs`.

    `entropy` is taken as a constant of `logprobs`.
    """
    rows = [[t for t, on in enumerate(row) if on] for row in mask]
    responses = sum(1 for row in rows if row)
    tokens = sum(len(row) for row in rows)
    nonneg_tokens = sum(len(row) for row, advantage in zip(rows, advantages) if advantage >= 0)
    over_nonneg = name == "positive_nll" or (name == "sapo" and parameters["gate"] == "listing")
    loss, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for i, row in enumerate(rows):
        if not row:
            continue
        advantage = advantages[i]
        log_ratios = {t: logprobs[i][t] - old_logprobs[i][t] for t in row}
        mean_log_ratio = sum(log_ratios.values()) / len(row)
        dropped = off_policy_delta is not None and advantage < 0 and -mean_log_ratio > off_policy_delta
        turns = turns_of(row) if parameters.get("gate_level") == "action" else {t: row for t in row}
        for t in row:
            if reduction == "sequence_mean":
                weight = 1 / len(row) / responses
            elif reduction == "token_mean":
                weight = 1 / tokens
            else:
                weight = 1 / constant_tokens / responses
            correction = 1.0
            if mismatch != "none":
                correction, _ = capped_exp(old_logprobs[i][t] - sampling_logprobs[i][t])
                if correction > mismatch_cap:
                    correction = mismatch_cap if mismatch == "tis" else 0.0
            if dropped:
                correction = 0.0

            if name == "gspo":
                ratio, slope = capped_exp(mean_log_ratio)
                surrogate, slope = clipped(
                    ratio, slope, advantage, parameters["clip_low"], parameters["clip_high"], dual_clip
                )
                for u in row:
                    gradient[i][u] -= weight * correction * slope / len(row)
            else:
                surrogate, slope = token_surrogate(
                    name, logprobs[i][t], log_ratios[t], advantage, parameters, dual_clip
                )
                gradient[i][t] -= weight * correction * slope
            loss -= weight * correction * surrogate

            if token_gate(name, log_ratios[t], advantage, sum(log_ratios[u] for u in turns[t]), parameters):
                penalty_weight = 1 / nonneg_tokens if over_nonneg else weight
                loss -= penalty_weight * correction * parameters["gamma"] * log_ratios[t]
                gradient[i][t] -= penalty_weight * correction * parameters["gamma"]

            if ref_logprobs is not None:
                difference = ref_logprobs[i][t] - logprobs[i][t]
                if difference <= 20.0:
                    loss += weight * ref_kl_coef * (math.exp(difference) - 1 - difference)
                    gradient[i][t] += weight * ref_kl_coef * (1 - math.exp(difference))
                else:
                    loss += weight * ref_kl_coef * (math.exp(20.0) - 1 - 20.0)
            if entropy is not None:
                loss -= weight * entropy_coef * entropy[i][t]
    return loss, gradient
