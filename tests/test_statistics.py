import itertools
import math

import numpy as np
import pytest

from sapo.statistics import compare, coverage, mcnemar_p, mean_interval


def test_intervals_cover_the_truth_as_often_as_they_say():
    assert 0.93 <= coverage(1000, n=125, p=0.2) <= 0.97
    assert 0.935 <= coverage(400, n=125, p=0.03) <= 0.985  # where a percentile interval covers 0.88


def test_the_interval_of_a_symmetric_mean_is_the_normal_one():
    low, high = mean_interval(np.arange(2000) % 2)
    half = 1.96 * math.sqrt(0.25 / 2000)
    assert (low, high) == (pytest.approx(0.5 - half, abs=5e-4), pytest.approx(0.5 + half, abs=5e-4))


def test_the_interval_leans_towards_the_longer_tail():
    values = [0.0] * 95 + [1.0] * 5
    low, high = mean_interval(values)
    mirrored = mean_interval([1 - value for value in values])
    assert (1 - mirrored[1], 1 - mirrored[0]) == (pytest.approx(low, abs=4e-3), pytest.approx(high, abs=4e-3))
    assert high - 0.05 > 1.3 * (0.05 - low) and (low, high) == mean_interval(values[::-1])
    assert mean_interval(values, seed=1) != (low, high)
    assert mean_interval(values, level=0.5)[0] > low


def test_resamples_are_those_of_a_plain_bootstrap():
    values = np.random.default_rng(3).choice([0, 0.25, 0.4, 1.0], size=60, p=[0.4, 0.2, 0.2, 0.2])
    low, high = mean_interval(values, draws=40_000)
    rng = np.random.default_rng(9)
    plain = values[rng.integers(0, 60, (40_000, 60))].mean(1)
    skew = ((values - values.mean()) ** 3).mean() / values.var() ** 1.5
    assert abs(skew / 6 / math.sqrt(60)) < 0.025  # nearly symmetric, so nearly the percentile interval
    assert low == pytest.approx(np.quantile(plain, 0.025), abs=0.012)
    assert high == pytest.approx(np.quantile(plain, 0.975), abs=0.012)


def test_an_average_of_benchmarks_resamples_each_by_itself():
    large, small = np.arange(4000) % 2, np.arange(50) % 2
    low, high = mean_interval(large, small)
    half = 1.96 * math.sqrt((0.25 / 4000 + 0.25 / 50) / 4)
    assert (high - low) / 2 == pytest.approx(half, rel=0.03)


def test_equal_scores_still_have_an_interval():
    assert mean_interval([0] * 125) == (0.0, pytest.approx(0.02982, abs=1e-5))
    assert mean_interval([1] * 10) == (pytest.approx(0.72247, abs=1e-5), 1.0)
    assert mean_interval([0.5] * 4) == (0.5, 0.5)
    assert mean_interval([0] * 125, [0] * 125)[1] == pytest.approx(0.02982, abs=1e-5)
    for strata in ((), ([],), ([1.0], [])):
        with pytest.raises(ValueError, match="at least one score"):
            mean_interval(*strata)


@pytest.mark.parametrize(("gained", "lost"), [(0, 0), (1, 0), (5, 5), (9, 1), (1, 9), (12, 3), (0, 20)])
def test_mcnemar_is_the_exact_binomial_test(gained, lost):
    n = gained + lost
    outcomes = [math.comb(n, k) for k in range(n + 1)]
    expected = sum(count for k, count in enumerate(outcomes) if min(k, n - k) <= min(gained, lost)) / 2**n
    assert mcnemar_p(gained, lost) == pytest.approx(expected, rel=1e-15)


def test_mcnemar_takes_whole_benchmarks():
    assert mcnemar_p(9000, 8000) == pytest.approx(1.7e-14, rel=0.05)
    assert mcnemar_p(30_000, 0) == 0.0


def test_paired_systems():
    a = [1, 1, 0, 0, 1, 0, 0, 0, 0, 0] * 20
    b = [1, 1, 1, 1, 0, 0, 0, 0, 0, 0] * 20
    result = compare(a, b)
    assert (result.n, result.mean_a, result.mean_b) == (200, 0.3, 0.4)
    assert result.difference == pytest.approx(0.1) and (result.gained, result.lost) == (40, 20)
    assert result.p_value == pytest.approx(0.01349, abs=1e-4)
    half = 1.96 * math.sqrt(np.var(np.subtract(b, a)) / 200)
    assert (result.high - result.low) / 2 == pytest.approx(half, rel=0.03)
    back = compare(b, a)
    assert (back.difference, back.gained, back.lost) == (-result.difference, 20, 40)
    same = compare(a, a)
    assert (same.difference, same.low, same.high, same.p_value) == (0.0, 0.0, 0.0, 1.0)
    assert compare([0.5, 1.0], [1.0, 0.5]).p_value is None
    with pytest.raises(ValueError, match="2 and 3"):
        compare([0, 1], [0, 1, 1])


def test_the_order_of_questions_does_not_matter():
    scores = [0, 1, 1, 0.5, 0]
    assert len({mean_interval(order) for order in itertools.permutations(scores)}) == 1
