"""What really happens: the error of runs, and how fast it falls, to be set beside the theorems."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.errors import InputError
from fedagrac.rounds.callback import Callback

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.rounds.loop import Run
    from fedagrac.theory.measure import Constants
    from fedagrac.theory.problem import Problem

__all__ = ["Errors", "Slope", "prescribed_lr", "slope"]


class Errors(Callback):
    """Notes, before the first round and after every so many, how far the model is from the best.

    Attributes:
        rounds: when it was measured; 0 for before the first round.
        values: F(x_t) - F(x*); |gradient of F|^2 where x* is not known.
    """

    def __init__(self, problem: Problem, best: float | None, every: int = 1) -> None:
        self.problem = problem
        self.best = best
        self.every = every
        self.rounds: list[int] = []
        self.values: list[float] = []

    def on_start(self, run: Run) -> None:
        """Measure the start."""
        self._note(0, run)

    def on_round(self, run: Run, record: dict[str, Any]) -> None:
        """Measure the model, every so many rounds and in the last."""
        if record["round"] % self.every == 0 or record["round"] == run.rounds:
            self._note(record["round"], run)

    def _note(self, t: int, run: Run) -> None:
        x = run.state["x"].detach().to("cpu", torch.float64)
        self.rounds.append(t)
        if self.best is not None:
            self.values.append(self.problem.total(x) - self.best)
        else:
            g = self.problem.total_gradient(x)
            self.values.append(float(g @ g))


@dataclass(frozen=True)
class Slope:
    """The slope of log y over log x, and the interval that holds it with 95 % confidence."""

    value: float
    low: float
    high: float
    points: int

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def slope(x: npt.ArrayLike, y: npt.ArrayLike) -> Slope:
    """Return the slope of log y over log x by least squares, with a 95 % interval by Student's t.

    Examples:
        >>> str(slope([1, 2, 4, 8], [8.0, 4.0, 2.0, 1.0]))
        '-1.00 [-1.00, -1.00]'
    """
    from scipy.stats import linregress, t

    a, b = np.asarray(x, np.float64), np.asarray(y, np.float64)
    usable = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b > 0)
    a, b = np.log(a[usable]), np.log(b[usable])
    if len(a) < 3 or len(np.unique(a)) < 2:
        raise InputError("x", len(a), "at least three positive points, at two different places")
    fit = linregress(a, b)
    reach = float(t.ppf(0.975, len(a) - 2)) * float(fit.stderr)
    return Slope(float(fit.slope), float(fit.slope) - reach, float(fit.slope) + reach, len(a))


def prescribed_lr(constants: Constants, weights: npt.ArrayLike, steps: npt.ArrayLike, rounds: int) -> float:
    """Return the eta with which Theorem 3 is to be read, for so many rounds.

    eta Kbar = log(max(2, mu^2 |x_1 - x*|^2 T / H)) / (mu T) makes the exponential and the noise term equal; above
    the largest eta that the proof allows, that one. The statement's O(1 / (mu L T Kbar)) has the wrong unit.
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
