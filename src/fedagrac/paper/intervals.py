"""Means over seeds with 95 % confidence intervals and the paired t-test, computed with numpy alone."""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

__all__ = ["Interval", "p_value", "seeds_to_decide", "student_quantile", "student_tail"]

MOST_SEEDS = 10_000
"""Where more seeds than this would be needed, two settings count as level."""


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
def _gauss_legendre() -> tuple[np.ndarray, np.ndarray]:  # type: ignore[type-arg]
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


def seeds_to_decide(differences: Sequence[float], threshold: float = 0.0) -> int | None:
    """Return how many seeds with this mean and spread would give an interval that excludes the threshold.

    Returns:
        The number of seeds, or None where even 10,000 would not do or fewer than two differences are known.

    Examples:
        >>> seeds_to_decide([1.0, 2.0, 3.0]), seeds_to_decide([-1.0, 1.0])
        (4, None)
    """
    if len(differences) < 2:
        return None
    gap, spread = abs(statistics.fmean(differences) - threshold), statistics.stdev(differences)
    low, high = 1, 2
    while not _excludes(gap, spread, high):
        low, high = high, 2 * high
        if high > 2 * MOST_SEEDS:
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _excludes(gap, spread, middle) else (middle, high)
    return high


def _excludes(gap: float, spread: float, seeds: int) -> bool:
    return student_quantile(seeds - 1) * spread / math.sqrt(seeds) < gap
