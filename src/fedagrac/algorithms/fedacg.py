"""FedACG: clients start from a point ahead of the model, and are kept near it.

Kim, Kim, Han, "Communication-Efficient Federated Learning with Accelerated Client Gradient", CVPR 2024, Algorithm
1.

Under unequal steps the momentum is the mean displacement, in which fast clients weigh more, as in FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, average
from fedagrac.core.local import Plan, Result
from fedagrac.errors import non_negative, share

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["FedACG"]


@dataclass(frozen=True)
class FedACG(Algorithm):
    """Start from z = x + lambda m, held near z by mu; m <- lambda m + sum_i omega_i (x_i - z); x <- x + m.

    Attributes:
        momentum: lambda, the share of m that is kept; 0 with mu = 0 is FedAvg.
        mu: the coefficient of the proximal term.

    Examples:
        >>> FedACG(lr=0.1).momentum
        0.85
    """

    momentum: float = 0.85
    mu: float = 0.01

    cites: ClassVar[tuple[str, ...]] = ("fedacg",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedacg"

    @property
    def traits(self) -> Traits:
        """The server keeps m."""
        return Traits(vectors=("x", "m"))

    def check(self) -> None:
        """Check every setting."""
        share("momentum", self.momentum)
        non_negative("mu", self.mu)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and m = 0."""
        return {"x": x, "m": torch.zeros_like(x)}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return no rows."""
        return {}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan that starts from z, with the proximal term around z."""
        plan = Plan.of(cohort.steps, self.lr_in(cohort), mu=self.mu, local=self.local)
        return replace(plan, broadcast=state["x"] + self.momentum * state["m"])

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return m <- lambda m + sum_i omega_i (x_i - z) and x <- x + m."""
        if not self.momentum:
            return {"x": average(cohort, result), "m": state["m"]}, {}
        z = plan.origin(state["x"])
        m = self.momentum * state["m"] + average(cohort, result) - z
        return {"x": state["x"] + m, "m": m}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: z down, the model up."""
        return Cost.of(cohort, down=1, up=1)
