"""The objective of `sapo/loss.py` and its gradient, written again as loops over Python floats from Eq. 9 and 11.

Nothing here uses the code under test or tensors; the gradient is derived by hand, token by token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

Matrix = Sequence[Sequence[float]]


def reference_loss(
    logprobs: Matrix,
    old_logprobs: Matrix,
    advantages: Sequence[float],
    mask: Matrix,
    *,
    clip_low: float,
    clip_high: float,
    gamma: float,
    tau: float,
    gate: str,
    reduction: str,
    constant_tokens: int = 1,
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
    loss, gradient = 0.0, [[0.0] * len(row) for row in mask]
    for i, row in enumerate(rows):
        for t in row:
            if reduction == "sequence_mean":
                weight = 1 / len(row) / responses
            elif reduction == "token_mean":
                weight = 1 / tokens
            else:
                weight = 1 / constant_tokens / responses
            penalty_weight = 1 / nonneg_tokens if gate == "listing" and nonneg_tokens else weight
            advantage = advantages[i]
            log_ratio = logprobs[i][t] - old_logprobs[i][t]
            ratio = math.exp(min(log_ratio, 20.0))
            ratio_slope = ratio if log_ratio <= 20.0 else 0.0

            if advantage > 0 and ratio > 1 + clip_high:
                surrogate, surrogate_slope = (1 + clip_high) * advantage, 0.0
            elif advantage < 0 and ratio < 1 - clip_low:
                surrogate, surrogate_slope = (1 - clip_low) * advantage, 0.0
            else:
                surrogate, surrogate_slope = ratio * advantage, ratio_slope * advantage
            loss -= weight * surrogate
            gradient[i][t] -= weight * surrogate_slope

            if gate == "equation":
                drifted = ratio < tau and advantage > 0
            else:
                drifted = ratio <= tau and advantage >= 0
            if drifted:
                loss -= penalty_weight * gamma * log_ratio
                gradient[i][t] -= penalty_weight * gamma

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
