"""Means over seeds with 95 % intervals, paired t-tests, sign tests and Holm's correction, with numpy alone."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = [
    "Interval",
    "holm",
    "p_value",
    "power",
    "seeds_to_decide",
    "sign_test",
    "signs_to_decide",
    "student_quantile",
    "student_tail",
]

MOST_SEEDS = 10_000
"""Where more seeds than this would be needed, no number is given."""

POWER = 0.8
"""The chance to decide that a recommended number of seeds gives, if mean and spread are as measured."""


def student_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t with so many degrees of freedom is farther from zero than `t`.

    With t = sqrt(freedom) tan(angle) the density becomes cos(angle)^(freedom - 1), whose integral is numerical.

    Examples:
        >>> round(student_tail(1.0, 1), 12)  # the Cauchy distribution
        0.5
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    nodes, weights = _gauss_legendre()
    middle, half = (angle + math.pi / 2) / 2, (math.pi / 2 - angle) / 2
    integral = half * float(weights @ np.cos(middle + half * nodes) ** (freedom - 1))
    whole = math.sqrt(math.pi) / 2 * math.exp(math.lgamma(freedom / 2) - math.lgamma((freedom + 1) / 2))
    return min(1.0, integral / whole)


@functools.cache
def _gauss_legendre() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    return np.polynomial.legendre.leggauss(256)


@functools.cache
def student_quantile(freedom: int, confidence: float = 0.95) -> float:
    """Return the t that Student's t stays within, in absolute value, with this probability.

    Examples:
        >>> round(student_quantile(2), 4)
        4.3027
    """
    low, high = 0.0, math.pi / 2
    for _ in range(60):
        angle = (low + high) / 2
        outside = student_tail(math.sqrt(freedom) * math.tan(angle), freedom) > 1 - confidence
        low, high = (angle, high) if outside else (low, angle)
    return math.sqrt(freedom) * math.tan(low)


@dataclass(frozen=True)
class Interval:
    """The mean of a sample and half the width of its 95 % confidence interval (infinite for one value).

    Examples:
        >>> print(Interval.of([1.0, 2.0, 3.0]))
        2 [-0.484, 4.48]
    """

    mean: float
    half: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Interval:
        """Return the interval of the mean of these values."""
        mean = statistics.fmean(values)
        if len(values) < 2:
            return cls(mean, math.inf)
        error = statistics.stdev(values) / math.sqrt(len(values))
        return cls(mean, student_quantile(len(values) - 1) * error)

    @property
    def low(self) -> float:
        """The lower end."""
        return self.mean - self.half

    @property
    def high(self) -> float:
        """The upper end."""
        return self.mean + self.half

    def __str__(self) -> str:
        return f"{self.mean:.3g} [{self.low:.3g}, {self.high:.3g}]"


def p_value(differences: Sequence[float]) -> float:
    """Return the two-sided p-value of the paired t-test that the mean difference is zero.

    Examples:
        >>> round(p_value([1.0, 2.0, 3.0]), 4)
        0.0742
    """
    error = statistics.stdev(differences) / math.sqrt(len(differences))
    mean = statistics.fmean(differences)
    if error == 0:
        return 1.0 if mean == 0 else 0.0
    return student_tail(mean / error, len(differences) - 1)


def power(effect: float, seeds: int) -> float:
    """Return the chance that a paired t-test finds a difference of `effect` standard deviations in its direction.

    The statistic follows the noncentral t distribution: a normal variable around effect * sqrt(seeds), divided by
    sqrt(chi^2 / freedom), over which the integral is numerical.

    Examples:
        >>> round(power(1.0, 10), 3), round(power(0.0, 10), 3)
        (0.803, 0.025)
    """
    freedom, nodes_weights = seeds - 1, _gauss_legendre()
    width = 10 / math.sqrt(2 * freedom)
    low, high = max(0.0, 1 - width), 1 + width
    s = (low + high) / 2 + (high - low) / 2 * nodes_weights[0]
    half = freedom / 2
    log_density = math.log(2) + half * math.log(half) - math.lgamma(half) + (freedom - 1) * np.log(s) - half * s**2
    beyond = (effect * math.sqrt(seeds) - student_quantile(freedom) * s) / math.sqrt(2)
    normal = np.array([0.5 * math.erfc(-value) for value in beyond])
    return float((high - low) / 2 * (nodes_weights[1] @ (np.exp(log_density) * normal)))


def seeds_to_decide(differences: Sequence[float], threshold: float = 0.0) -> int | None:
    """Return how many seeds with this mean and spread exclude the threshold with a chance of 80 %.

    Returns:
        The number of seeds, or None where even 10,000 would not do or fewer than two differences are known.

    Examples:
        >>> seeds_to_decide([1.0, 2.0, 3.0]), seeds_to_decide([-1.0, 1.0])
        (5, None)
    """
    if len(differences) < 2:
        return None
    gap, spread = abs(statistics.fmean(differences) - threshold), statistics.stdev(differences)
    if gap == 0:
        return None
    effect = gap / spread if spread > 0 else math.inf
    return _least(lambda seeds: effect == math.inf or power(effect, seeds) >= POWER)


def sign_test(wins: int, losses: int) -> float:
    """Return the exact two-sided p-value of the sign test: how likely a fair coin is so one-sided, or more.

    Examples:
        >>> sign_test(10, 0), sign_test(5, 0), sign_test(0, 0)
        (0.001953125, 0.0625, 1.0)
    """
    pairs = wins + losses
    tail = sum(math.comb(pairs, k) for k in range(max(wins, losses), pairs + 1))
    return float(min(1.0, 2 * tail / 2**pairs))


def signs_to_decide(wins: int, losses: int) -> int | None:
    """Return how many pairs won this often decide the sign test with a chance of 80 %; None for more than 1000.

    Examples:
        >>> signs_to_decide(3, 0), signs_to_decide(4, 1), signs_to_decide(1, 1)
        (6, 20, None)
    """
    share = max(wins, losses) / (wins + losses) if wins != losses else 0.5
    if share == 0.5:
        return None
    for pairs in range(6, 1001):
        least = next(k for k in range(pairs // 2, pairs + 2) if sign_test(k, pairs - k) < 0.05 or k > pairs)
        chance = sum(math.comb(pairs, k) * share**k * (1 - share) ** (pairs - k) for k in range(least, pairs + 1))
        if chance >= POWER:
            return pairs
    return None


def holm(p_values: Sequence[float]) -> list[float]:
    """Return Holm's adjusted p-values: those below 0.05 are wrong together with a probability below 5 %.

    Examples:
        >>> holm([0.01, 0.04, 0.03])
        [0.03, 0.06, 0.06]
    """
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, i in enumerate(sorted(range(len(p_values)), key=lambda i: p_values[i])):
        largest = max(largest, min(1.0, (len(p_values) - rank) * p_values[i]))
        adjusted[i] = largest
    return adjusted


def _least(enough: Callable[[int], bool]) -> int | None:
    """Return the least number of seeds from 2 that is enough, or None; more seeds than enough are enough."""
    low, high = 1, 2
    while not enough(high):
        if high == MOST_SEEDS:
            return None
        low, high = high, min(2 * high, MOST_SEEDS)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if enough(middle) else (middle, high)
    return high
