"""Intervals, p-values and numbers of seeds against scipy.stats."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from fedagrac.paper.intervals import (
    Interval,
    holm,
    p_value,
    power,
    seeds_to_decide,
    sign_test,
    signs_to_decide,
    student_quantile,
    student_tail,
)

values = st.lists(st.floats(-100, 100).map(lambda v: round(v, 3)), min_size=2, max_size=30)


@pytest.mark.parametrize("freedom", [1, 2, 3, 7, 30, 200])
@pytest.mark.parametrize("t", [0.0, 0.3, 1.0, 2.5, 12.0])
def test_tails_are_those_of_scipy(t, freedom):
    assert student_tail(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), rel=1e-8, abs=1e-14)
    assert student_tail(-t, freedom) == student_tail(t, freedom)


@pytest.mark.parametrize("freedom", [*range(1, 31), 99, 1000])
def test_quantiles_are_those_of_scipy(freedom):
    for confidence in (0.9, 0.95, 0.99):
        assert student_quantile(freedom, confidence) == pytest.approx(
            stats.t.ppf((1 + confidence) / 2, freedom), rel=1e-9
        )


@given(values)
def test_intervals_and_p_values_are_those_of_scipy(sample):
    interval = Interval.of(sample)
    if np.std(sample) < 1e-9:  # scipy divides by zero
        assert interval.half == pytest.approx(0, abs=1e-6)
        return
    low, high = stats.t.interval(0.95, len(sample) - 1, np.mean(sample), stats.sem(sample))
    assert (interval.low, interval.high) == pytest.approx((low, high), rel=1e-8, abs=1e-8)
    assert p_value(sample) == pytest.approx(stats.ttest_1samp(sample, 0).pvalue, rel=1e-6, abs=1e-14)


@given(values)
def test_the_interval_excludes_zero_where_the_test_rejects(sample):
    interval, p = Interval.of(sample), p_value(sample)
    if abs(p - 0.05) > 1e-9:
        assert (interval.low > 0 or interval.high < 0) == (p < 0.05)


def test_one_value_decides_nothing():
    assert Interval.of([3.0]) == Interval(3.0, math.inf)
    assert seeds_to_decide([3.0]) is None


def test_equal_differences_are_certain():
    assert Interval.of([0.5, 0.5]) == Interval(0.5, 0.0)
    assert (p_value([0.5, 0.5]), p_value([0.0, 0.0])) == (0.0, 1.0)


@pytest.mark.parametrize(("effect", "seeds"), [(1.0, 3), (1.0, 10), (0.3, 50), (0.1, 785), (12.0, 2)])
def test_the_power_is_that_of_scipy(effect, seeds):
    critical = stats.t.ppf(0.975, seeds - 1)
    expected = stats.nct.sf(critical, seeds - 1, effect * math.sqrt(seeds))
    assert power(effect, seeds) == pytest.approx(expected, rel=1e-8)


@pytest.mark.parametrize(("mean", "spread"), [(1.0, 1.0), (0.5, 2.0), (0.1, 1.0), (3.0, 0.1)])
def test_the_number_of_seeds_that_would_decide_is_the_least_with_a_power_of_80_percent(mean, spread):
    sample = [mean - spread / math.sqrt(2), mean + spread / math.sqrt(2)]  # standard deviation: spread
    seeds = seeds_to_decide(sample)

    def chance(n):
        return stats.nct.sf(stats.t.ppf(0.975, n - 1), n - 1, mean / spread * math.sqrt(n))

    assert chance(seeds) >= 0.8
    assert seeds == 2 or chance(seeds - 1) < 0.8
    assert seeds_to_decide([v + 7 for v in sample], threshold=7.0) == seeds
    assert seeds_to_decide([1.0, -1.0]) is None


@pytest.mark.parametrize(("wins", "losses"), [(10, 0), (5, 0), (7, 2), (3, 3), (0, 6)])
def test_the_sign_test_is_the_exact_binomial_test(wins, losses):
    assert sign_test(wins, losses) == pytest.approx(stats.binomtest(wins, wins + losses).pvalue, rel=1e-12)


def test_the_sign_test_needs_six_pairs():
    assert signs_to_decide(2, 0) == 6
    assert signs_to_decide(0, 2) == 6
    assert signs_to_decide(2, 2) is None
    pairs = signs_to_decide(3, 1)
    least = next(k for k in range(pairs // 2, pairs) if stats.binomtest(k, pairs).pvalue < 0.05)
    assert stats.binom.sf(least - 1, pairs, 0.75) >= 0.8


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holms_correction(sample):
    """By its definition: the hypotheses are rejected in order until one has p (m - rank) above the level."""
    adjusted = holm(sample)
    for level in (0.01, 0.05, 0.3):
        rejected = set()
        for rank, i in enumerate(sorted(range(len(sample)), key=lambda i: sample[i])):
            if min(1.0, (len(sample) - rank) * sample[i]) > level:
                break
            rejected.add(i)
        assert {i for i, p in enumerate(adjusted) if p <= level} == rejected
