"""Rates of convergence: the slope of measured errors, and the step size that Theorem 3 prescribes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.theory.measure import Constants

__all__ = ["Slope", "prescribed_lr", "slope"]


@dataclass(frozen=True)
class Slope:
    """The slope of log y over log x, with its 95 % confidence interval."""

    value: float
    low: float
    high: float
    points: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def slope(x: npt.ArrayLike, y: npt.ArrayLike) -> Slope:
    """Fit the slope of log y over log x by least squares; return it with a 95 % interval by Student's t.

    Examples:
        >>> str(slope([1, 2, 4, 8], [8.0, 4.0, 2.0, 1.0]))
        '-1.00 [-1.00, -1.00]'
    """
    from scipy.stats import linregress, t

    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    usable = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
    a, b = np.log(a[usable]), np.log(b[usable])
    if len(a) < 3 or len(np.unique(a)) < 2:
        raise InputError("x", len(a), "at least three positive points with two different x")
    fit = linregress(a, b)
    reach = float(t.ppf(0.975, len(a) - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach, len(a))


def prescribed_lr(constants: Constants, weights: npt.ArrayLike, steps: npt.ArrayLike, rounds: int) -> float:
    """Return the step size that Theorem 3 prescribes for a number of rounds.

    eta Kbar = log(max(2, mu^2 |x_1 - x*|^2 T / H)) / (mu T) makes the exponential term equal to the noise term.
    The result is at most the largest eta that the proof allows. The statement's O(1 / (mu L T Kbar)) has the wrong
    unit.
    """
    bound = constants.theorem3(weights, steps, rounds)
    mu, distance2 = constants.mu, constants.distance2
    assert mu is not None
    assert distance2 is not None
    H, Kbar = bound.constants["H"], bound.constants["Kbar"]
    balance = mu**2 * distance2 * rounds / H if H else math.inf
    if math.isinf(balance):
        return bound.step_limit
    return min(bound.step_limit, math.log(max(2.0, balance)) / (mu * rounds * Kbar))
