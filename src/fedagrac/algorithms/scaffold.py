"""SCAFFOLD: correct every step by the difference between the global and the client's control variate.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh, "SCAFFOLD: Stochastic Controlled Averaging for Federated
Learning", ICML 2020, Algorithm 1. Their c_i and c are nu_i and nu here; their c - c_i is this package's
correction c_i.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
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
from fedagrac.errors import InputError, flag, one_of, positive

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["Scaffold"]


@dataclass(frozen=True)
class Scaffold(Algorithm):
    """c_i = nu - nu_i; x = x~ + server_lr (sum_i omega_i x_i - x~); nu_i by option; nu = sum_i omega_i nu_i.

    Attributes:
        init: nu_i starts from "zeros" (the usual start) or from the "full" local gradient at x_1.
        economical: the server reconstructs nu_i from the model instead of receiving it, so clients send one vector
            instead of two. It is off by default: SCAFFOLD as published sends both.
        option: nu_i is the mean gradient of the round ("II", the usual one, without further computation) or the
            client's gradient at x~ over all its data ("I", which costs one more local epoch a round).
        server_lr: the server's step size; 1 for x = sum_i omega_i x_i.

    Examples:
        >>> Scaffold(lr=0.01).init
        'zeros'
    """

    init: Literal["zeros", "full"] = "zeros"
    economical: bool = False
    option: Literal["I", "II"] = "II"
    server_lr: float = 1.0

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
        """Check every setting."""
        one_of("init", self.init, ["zeros", "full"])
        one_of("option", self.option, ["I", "II"])
        positive("server_lr", self.server_lr)
        if flag("economical", self.economical) and self.option == "I":
            accepted = 'false, or option="II": a gradient at x~ cannot be reconstructed from the model'
            raise InputError("economical", self.economical, accepted)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and nu = sum_i omega_i nu_i at x_1."""
        return start_orientation(x, population, self.init)

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return nu_i: the local gradient at x_1, or zeros."""
        return {"nu": starting_rows(state, cohort)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = nu - nu_i, mu = 0, eta_i = eta. With option I clients send gradients at x~."""
        c = state["nu"].to(rows["nu"].dtype) - rows["nu"]
        mean = self.option == "II"
        plan = Plan.of(cohort.steps, self.lr_in(cohort), correction=c, mean=mean, local=self.local)
        return replace(plan, gradient=not mean)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ + server_lr (sum_i omega_i x_i - x~), nu = sum_i omega_i nu_i, and the new nu_i."""
        nu_i = mean_gradient(plan, state["x"], result) if plan.at_start is None else plan.at_start
        nu = reference_orientation(state["nu"], rows["nu"], nu_i, cohort)
        x = average(cohort, result)
        if self.server_lr != 1:
            x = state["x"] + self.server_lr * (x - state["x"])
        return {**state, "x": x, "nu": nu}, {"nu": nu_i}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and nu down; the model and, unless economical, the control variate up.

        Option I computes a gradient over all local data, too. If the local steps are not plain, the control
        variate does not follow from the model.
        """
        extra = cohort.epoch_steps if self.option == "I" else 0
        follows = self.economical and self.local.plain
        return Cost.of(cohort, down=2, up=1 if follows else 2, extra_steps=extra)
