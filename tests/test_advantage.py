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


def test_the_other_estimators_by_hand():
    # [1, 0, 0]: mean 1/3, means of the others 0, .5, .5; [.5, 1, 0]: mean .5, means of the others .5, .25, .75
    rewards, ids = [1, 0, 0, 0.5, 1, 0], ["a"] * 3 + ["b"] * 3
    mean = group_advantages(rewards, ids, 3, "mean").tolist()
    assert mean == pytest.approx([2 / 3, -1 / 3, -1 / 3, 0.0, 0.5, -0.5], abs=1e-15)
    leave_one_out = group_advantages(rewards, ids, 3, "leave_one_out").tolist()
    assert leave_one_out == pytest.approx([1.0, -0.5, -0.5, 0.0, 0.75, -0.75], abs=1e-15)


@pytest.mark.parametrize("estimator", ["zscore", "mean", "leave_one_out"])
def test_any_row_order_equals_a_scalar_loop(estimator):
    rng = random.Random(0)
    ids = [f"q{i}" for i in range(7) for _ in range(5)]
    rng.shuffle(ids)
    rewards = [rng.random() for _ in ids]
    expected = []
    for row, group in enumerate(ids):
        others = [rewards[i] for i, name in enumerate(ids) if name == group and i != row]
        everyone = [*others, rewards[row]]
        expected.append({
            "zscore": (rewards[row] - statistics.mean(everyone)) / (statistics.stdev(everyone) + 1e-6),
            "mean": rewards[row] - statistics.mean(everyone),
            "leave_one_out": rewards[row] - statistics.mean(others),
        }[estimator])
    assert group_advantages(rewards, ids, 5, estimator).tolist() == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize("size", [5, 6, 7, 10, 12])
@pytest.mark.parametrize("value", [0.0, 1.0, 2 / 3, 6 / 7, 0.3, 0.1])  # the mean of some is not the value
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_equal_rewards_give_exactly_zero(value, size, dtype):
    rewards = torch.full((size,), value, dtype=dtype)
    for estimator in ("zscore", "mean", "leave_one_out"):
        assert group_advantages(rewards, ["q"] * size, size, estimator).tolist() == [0.0] * size


def test_nearly_equal_rewards_do_not_give_zero():
    advantages = group_advantages([0.5, 0.5 + 1e-3], ["q", "q"], group_size=2)
    assert advantages[1].item() == pytest.approx(5e-4 / (1e-3 / math.sqrt(2) + 1e-6), rel=1e-9)


def test_no_responses():
    assert group_advantages([], [], group_size=4).tolist() == []


def test_bad_groups_and_rewards_are_refused():
    with pytest.raises(ValueError, match="question 'b' has 1 responses, the group size is 2"):
        group_advantages([1, 0, 1], ["a", "a", "b"], group_size=2)
    with pytest.raises(ValueError, match="question 'a' has 4 responses"):
        group_advantages([1, 0, 1, 0], ["a"] * 4, group_size=2)
    with pytest.raises(ValueError, match="response 1, question 'a', is nan"):
        group_advantages([1, math.nan], ["a", "a"], group_size=2)
    with pytest.raises(ValueError, match="group size is 1: an advantage compares at least 2 responses"):
        group_advantages([1, 0], ["a", "b"], group_size=1)
    with pytest.raises(ValueError, match="Unknown estimator 'median'"):
        group_advantages([1, 0], ["a", "a"], 2, "median")
    with pytest.raises(ValueError):
        group_advantages([1, 0], ["a"], group_size=2)
