"""SCAFFOLD: correct every step by the difference between the global and the client's control variate.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, their option II (the control variate is the mean gradient of the round) and a server step
of 1. Their c_i and c are nu_i and nu here; their c - c_i is this package's correction c_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

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
from fedagrac.errors import flag, one_of

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["Scaffold"]


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """c_i = nu - nu_i; x = sum_i omega_i x_i; nu_i = mean gradient of the round; nu = sum_i omega_i nu_i.

    Attributes:
        init: nu_i starts from "zeros" (the usual start) or from the "full" local gradient at x_1.
        economical: the server reconstructs nu_i from the model instead of receiving it, so clients send one vector
            instead of two. It is off by default: SCAFFOLD as published sends both.

    Examples:
        >>> Scaffold(lr=0.01).init
        'zeros'
    """

    init: Literal["zeros", "full"] = "zeros"
    economical: bool = False

    cites: ClassVar[tuple[str, ...]] = ("scaffold",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "scaffold"

    @property
    def traits(self) -> Traits:
        """The server keeps nu and, for every client, nu_i."""
        return orientation_traits(self.init, rows=("nu",))

    def check(self) -> None:
        """Check the settings `init` and `economical`."""
        one_of("init", self.init, ["zeros", "full"])
        flag("economical", self.economical)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and nu = sum_i omega_i nu_i at x_1."""
        return start_orientation(x, population, self.init)

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return nu_i: the local gradient at x_1, or zeros."""
        return {"nu": starting_rows(state, cohort)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = nu - nu_i, mu = 0, eta_i = eta."""
        c = state["nu"].to(rows["nu"].dtype) - rows["nu"]
        return Plan.of(cohort.steps, self.lr, correction=c, mean=True)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i, nu = sum_i omega_i nu_i, and nu_i = mean gradient."""
        mean = mean_gradient(plan, state["x"], result)
        nu = reference_orientation(state["nu"], rows["nu"], mean, cohort)
        return {**state, "x": average(cohort, result), "nu": nu}, {"nu": mean}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and nu down; the model and, unless economical, the control variate up."""
        return Cost.of(cohort, down=2, up=1 if self.economical else 2)
