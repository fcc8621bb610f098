"""FedaGrac: calibrate every local step towards a predicted global direction.

Wu, Guo, Wang, Zhang, Qu, Zhang, Liu, "From Deterioration to Acceleration: A Calibration Approach to
Rehabilitating Step Asynchronism in Federated Optimization", Algorithm 1. Line numbers below are that
algorithm's; nu is the reference orientation, lambda the calibration rate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch

from fedagrac.algorithms.base import (
    Algorithm,
    Cost,
    Rows,
    State,
    Traits,
    average,
    orientation_traits,
    reference_orientation,
    start_orientation,
    starting_rows,
)
from fedagrac.core.local import Plan, Result, mean_gradient
from fedagrac.core.schedule import check_rounds
from fedagrac.errors import InputError, count, flag, non_negative, one_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["NAMES", "FedaGrac"]

NAMES = {
    "hybrid": "fedagrac",
    "average": "fedagrac-avg",
    "first": "fedagrac-first",
    "reverse": "fedagrac-reverse",
}
"""The registered name for each value of `transmit`; in the paper FedaGrac, _avg, _first and _reverse."""


@dataclass(frozen=True)
class FedaGrac(Algorithm):
    """c_i = lambda (nu - nu_i); x = sum_i omega_i x_i; nu_i = mean gradient; nu = sum_i omega_i v_i.

    v_i is what client i transmits: its first gradient if it is fast (K_i > Kbar), else its mean gradient.

    Attributes:
        calibration: lambda, a number or a schedule over rounds such as `fedagrac.core.schedule.Piecewise`.
        transmit: which clients transmit their first gradient: "hybrid" the fast ones, "average" none, "first" all,
            "reverse" the slow ones.
        first_steps: how many of the first steps the "first gradient" averages: "epoch" for one local epoch, capped
            at K_i; a number; or "pass", the authors' code: up to the end of the pass over the local data that is
            under way, and one step if that pass does not end within the round or has just ended. The paper's text
            has 1.
        local_reference: nu_i is the "mean" gradient of the round (Algorithm 1, the proofs, the authors' code) or
            what the client "transmitted" (Section V.A).
        init: nu_i starts from the "full" local gradient at x_1 (the paper) or from "zeros".
        orientation: under partial participation, nu sums what every client sent last ("cached") or only what this
            round's cohort sent ("cohort", the authors' code).
        economical: only clients that transmit a first gradient upload a second vector, and the server reconstructs
            every mean gradient from the model (Section IV.B). Otherwise all clients upload two vectors.

    Examples:
        >>> FedaGrac(lr=0.01, transmit="reverse").name
        'fedagrac-reverse'
    """

    calibration: float | Callable[[int], float] = 1.0
    transmit: Literal["hybrid", "average", "first", "reverse"] = "hybrid"
    first_steps: int | Literal["epoch", "pass"] = "epoch"
    local_reference: Literal["mean", "transmitted"] = "mean"
    init: Literal["full", "zeros"] = "full"
    orientation: Literal["cached", "cohort"] = "cached"
    economical: bool = True

    cites: ClassVar[tuple[str, ...]] = ("fedagrac",)

    @property
    def name(self) -> str:
        """The registered name for this value of `transmit`."""
        return NAMES[self.transmit]

    @property
    def traits(self) -> Traits:
        """The server keeps nu and, for every client, nu_i and the v_i that it sent last."""
        first_steps = None if self.transmit == "average" else self.first_steps
        return replace(orientation_traits(self.init, rows=("nu", "v")), first_steps=first_steps)

    def check(self) -> None:
        """Check every setting."""
        if not callable(self.calibration):
            if isinstance(self.calibration, str):
                raise InputError("calibration", self.calibration, "a number of at least 0, or a schedule")
            non_negative("calibration", self.calibration)
        one_of("transmit", self.transmit, NAMES)
        if self.first_steps not in ("epoch", "pass"):
            if isinstance(self.first_steps, str):
                raise InputError("first_steps", self.first_steps, '"epoch", "pass" or an integer of at least 1')
            count("first_steps", self.first_steps)
        one_of("local_reference", self.local_reference, ["mean", "transmitted"])
        one_of("init", self.init, ["full", "zeros"])
        one_of("orientation", self.orientation, ["cached", "cohort"])
        flag("economical", self.economical)

    def check_rounds(self, rounds: int) -> None:
        """Refuse schedules of lr and lambda without a usable value in one of a run's rounds."""
        super().check_rounds(rounds)
        check_rounds(f"calibration of {self.name}", self.calibration, rounds, zero=True)

    def transmits_first(self, cohort: Cohort) -> npt.NDArray[np.bool_]:
        """Return which members transmit their first gradient instead of their mean gradient (line 14), [m]."""
        everyone = np.ones(len(cohort), np.bool_)
        return {"hybrid": cohort.fast, "average": ~everyone, "first": everyone, "reverse": ~cohort.fast}[
            self.transmit
        ]

    def averaged(self, cohort: Cohort) -> npt.NDArray[np.int64]:
        """Return how many steps a first gradient averages, [m]; a plan caps them at K_i."""
        if self.first_steps == "epoch":
            return cohort.epoch_steps
        if self.first_steps == "pass":
            ends = (cohort.pass_steps > 0) & (cohort.pass_steps < cohort.steps)
            return np.where(ends, cohort.pass_steps, 1)
        return np.full(len(cohort), self.first_steps)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and nu = sum_i omega_i nu_i at x_1."""
        return start_orientation(x, population, self.init)

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return nu_i = v_i = the local gradient at x_1, or zeros."""
        nu_i = starting_rows(state, cohort)
        return {"nu": nu_i, "v": nu_i}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = lambda (nu - nu_i) (lines 5 and 9), mu = 0, eta_i = eta."""
        lam = self.calibration(cohort.round) if callable(self.calibration) else self.calibration
        c = state["nu"].to(rows["nu"].dtype) - rows["nu"]
        if lam != 1:  # a product with 1 would read and write all rows for nothing
            c *= lam
        first_steps = np.where(self.transmits_first(cohort), self.averaged(cohort), 0)
        return Plan.of(
            cohort.steps, self.lr_in(cohort), correction=c, first_steps=first_steps, mean=True, local=self.local
        )

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i, nu = sum_i omega_i v_i (line 14), and nu_i = mean gradient (line 11)."""
        mean = mean_gradient(plan, state["x"], result)
        v = mean
        if result.first is not None:
            sends_first = torch.as_tensor(plan.first_steps > 0, device=mean.device)
            v = torch.where(sends_first[:, None], result.first, mean)
        if self.orientation == "cached":
            nu = reference_orientation(state["nu"], rows["v"], v, cohort)
        else:
            nu = cohort.sum(cohort.weights, v)
        nu_i = mean if self.local_reference == "mean" else v
        return {**state, "x": average(cohort, result), "nu": nu}, {"nu": nu_i, "v": v}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and nu down; the model and, where needed, other vectors up.

        If the local steps are not plain, the mean gradient does not follow from the model and is sent, too.
        """
        if not self.economical:
            return Cost.of(cohort, down=2, up=2)
        first = self.transmits_first(cohort).astype(np.int64)
        return Cost.of(cohort, down=2, up=(1 if self.local.plain else 2) + first)
