"""Advantages: how much better a response is than the others to the same question."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

Estimator = Literal["zscore", "mean", "leave_one_out"]

EPSILON = 1e-6  # added to the standard deviation


def group_advantages(
    rewards: Sequence[float] | Tensor, group_ids: Sequence[str], group_size: int, estimator: Estimator = "zscore"
) -> Tensor:
    """Return the advantages of N responses as float64 [N], in the order of `rewards`.

    rewards: N finite numbers. group_ids: N question ids, unique over the concatenated data set; rows of a group may
    stand anywhere. With R a reward and G the group size, estimator is

    - "zscore": (R - group mean) / (group std + 1e-6), the standard deviation the unbiased one (GRPO, arXiv 2402.03300);
    - "mean": R - group mean (Dr. GRPO, arXiv 2503.20783);
    - "leave_one_out": R - mean of the others = G / (G - 1) * (R - group mean) (RLOO, arXiv 2402.14740).

    Equal rewards give exactly 0: rounding of the mean would otherwise give them a sign. Everything is computed in
    float64. Raises ValueError for a reward that is not finite, for a group whose size is not `group_size`, and for a
    group size below 2, at which nothing is left to compare with.

    >>> group_advantages([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"], group_size=2).round(decimals=4).tolist()
    [0.7071, -0.7071, 0.0, 0.0]
    """
    if group_size < 2:
        raise ValueError(f"the group size is {group_size}: an advantage compares at least 2 responses to a question")
    rewards = torch.as_tensor(rewards, dtype=torch.float64)  # [N]
    groups: dict[str, list[int]] = {}
    for row, (reward, group_id) in enumerate(zip(rewards.tolist(), group_ids, strict=True)):
        if not math.isfinite(reward):
            raise ValueError(f"the reward of response {row}, question {group_id!r}, is {reward}: it must be finite")
        groups.setdefault(group_id, []).append(row)
    for group_id, rows in groups.items():
        if len(rows) != group_size:
            raise ValueError(
                f"question {group_id!r} has {len(rows)} responses, the group size is {group_size}: question ids must "
                "be unique in the data set and every sample of a question must be on the same rank"
            )
    if not groups:
        return rewards
    rows = torch.tensor(list(groups.values()))  # [groups, G]
    grouped = rewards[rows]  # [groups, G]
    centred = grouped - grouped.mean(1, keepdim=True)  # [groups, G]
    if estimator == "zscore":
        centred /= grouped.std(1, keepdim=True) + EPSILON
    elif estimator == "leave_one_out":
        centred *= group_size / (group_size - 1)
    elif estimator != "mean":
        raise ValueError(f"Unknown estimator {estimator!r}: use zscore, mean or leave_one_out.")
    equal = grouped.amax(1, keepdim=True) == grouped.amin(1, keepdim=True)  # [groups, 1]
    advantages = torch.empty_like(rewards)
    advantages[rows] = torch.where(equal, 0.0, centred)
    return advantages
