"""Group-normalised advantages (GRPO): how much better a response is than the others to the same question."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

EPSILON = 1e-6  # added to the standard deviation


def group_advantages(rewards: Sequence[float] | Tensor, group_ids: Sequence[str], group_size: int) -> Tensor:
    """Return (R - group mean) / (group std + 1e-6) as float64 [N], in the order of `rewards`.

    rewards: N finite numbers. group_ids: N question ids, unique over the concatenated data set; rows of a group may
    stand anywhere. The standard deviation is the unbiased one. Equal rewards give exactly 0: rounding of the mean
    would otherwise give them a sign. A group of one has mean 0 and std 1. Everything is computed in float64.
    Raises ValueError for a reward that is not finite and for a group whose size is not `group_size`.

    >>> group_advantages([1.0, 0.0, 1.0, 1.0], ["a", "a", "b", "b"], group_size=2).round(decimals=4).tolist()
    [0.7071, -0.7071, 0.0, 0.0]
    """
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
    if group_size == 1:
        normalised = grouped / (1 + EPSILON)
    else:
        mean, std = grouped.mean(1, keepdim=True), grouped.std(1, keepdim=True)  # [groups, 1]
        equal = grouped.amax(1, keepdim=True) == grouped.amin(1, keepdim=True)  # [groups, 1]
        normalised = torch.where(equal, 0.0, (grouped - mean) / (std + EPSILON))
    advantages = torch.empty_like(rewards)
    advantages[rows] = normalised
    return advantages
