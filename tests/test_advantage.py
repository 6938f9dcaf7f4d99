import math
import random
import statistics

import pytest
import torch

from sapo.advantage import group_advantages


def test_two_groups_by_hand():
    # [1, 0, 0]: mean 1/3, unbiased std sqrt(1/3); [.5, 1, 0]: mean .5, std .5
    advantages = group_advantages([1, 0, 0, 0.5, 1, 0], ["a"] * 3 + ["b"] * 3, group_size=3)
    s, t = math.sqrt(1 / 3) + 1e-6, 0.5 + 1e-6
    expected = [2 / 3 / s, -1 / 3 / s, -1 / 3 / s, 0.0, 0.5 / t, -0.5 / t]
    assert advantages.dtype == torch.float64
    assert advantages.tolist() == pytest.approx(expected, abs=1e-12)


def test_any_row_order_equals_a_scalar_loop():
    rng = random.Random(0)
    ids = [f"q{i}" for i in range(7) for _ in range(5)]
    rng.shuffle(ids)
    rewards = [rng.random() for _ in ids]
    expected = []
    for reward, group in zip(rewards, ids):
        mates = [r for r, i in zip(rewards, ids) if i == group]
        expected.append((reward - statistics.mean(mates)) / (statistics.stdev(mates) + 1e-6))
    assert group_advantages(rewards, ids, group_size=5).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [5, 6, 7, 10, 12])
@pytest.mark.parametrize("value", [0.0, 1.0, 2 / 3, 6 / 7, 0.3, 0.1])  # the mean of some is not the value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(value, size, dtype):
    rewards = torch.full((size,), value, dtype=dtype)
    assert group_advantages(rewards, ["q"] * size, group_size=size).tolist() == [0.0] * size


def test_nearly_equal_rewards_do_not_give_zero():
    advantages = group_advantages([0.5, 0.5 + 1e-3], ["q", "q"], group_size=2)
    assert advantages[1].item() == pytest.approx(5e-4 / (1e-3 / math.sqrt(2) + 1e-6), rel=1e-9)


def test_a_group_of_one_keeps_its_reward():
    advantages = group_advantages([0.6, 0.0], ["a", "b"], group_size=1)
    assert advantages.tolist() == pytest.approx([0.6 / (1 + 1e-6), 0.0], abs=1e-15)


def test_no_responses():
    assert group_advantages([], [], group_size=4).tolist() == []


def test_bad_groups_and_rewards_are_refused():
    with pytest.raises(ValueError, match="question 'b' has 1 responses, the group size is 2"):
        group_advantages([1, 0, 1], ["a", "a", "b"], group_size=2)
    with pytest.raises(ValueError, match="question 'a' has 4 responses"):
        group_advantages([1, 0, 1, 0], ["a"] * 4, group_size=2)
    with pytest.raises(ValueError, match="response 1, question 'a', is nan"):
        group_advantages([1, math.nan], ["a", "a"], group_size=2)
    with pytest.raises(ValueError):
        group_advantages([1, 0], ["a"], group_size=2)
