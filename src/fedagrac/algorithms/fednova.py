"""FedNova: average the clients' updates per step, then move Kbar steps along the mean.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020. With plain local SGD their a_i = (1, ..., 1), |a_i|_1 = K_i and tau_eff = Kbar. With
momentum |a_i|_1 is the sum of the coefficients with which the gradients enter the displacement (Section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedagrac.algorithms.base import Cost, Rows, State, Stateless
from fedagrac.core.local import Plan, Result

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort

__all__ = ["FedNova", "mean_direction", "normalised_update"]


@dataclass(frozen=True)
class FedNova(Stateless):
    """x = x~ - Kbar sum_i omega_i D_i / K_i with D_i = x~ - x_i and Kbar = sum_i omega_i K_i.

    With local momentum, |a_i|_1 takes the place of K_i, and sum_i omega_i |a_i|_1 that of Kbar. With Adam there is
    no a_i, which is an error.

    The coefficients Kbar omega_i / K_i do not sum to 1 and must not be normalised: with K = 1 and 9 and equal
    weights the step is 5 times the mean normalised update.

    Examples:
        >>> FedNova(lr=0.01).name
        'fednova'
    """

    cites: ClassVar[tuple[str, ...]] = ("fednova",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fednova"

    def check(self) -> None:
        """Check that the local optimizer has coefficients a_i."""
        self.local.work(np.ones(1, np.int64))

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = 0, mu = 0, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ - tau sum_i omega_i D_i / |a_i|_1, where tau = sum_i omega_i |a_i|_1."""
        tau, direction = mean_direction(state, cohort, plan, result)
        return {"x": state["x"] - tau * direction}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up. K_i is a single number and does not count."""
        return Cost.of(cohort, down=1, up=1)


def mean_direction(state: State, cohort: Cohort, plan: Plan, result: Result) -> tuple[float, Tensor]:
    """Return tau = sum_i omega_i |a_i|_1, and sum_i omega_i D_i / |a_i|_1, a vector [d].

    |a_i|_1 = K_i and tau = Kbar if the local steps are plain.
    """
    D, tau = state["x"] - result.models, cohort.mean_steps
    if plan.local.plain:
        return tau, cohort.sum(cohort.weights / plan.steps, D, scale=plan.steps)
    work = plan.local.work(plan.steps)
    tau = float(cohort.total(torch.tensor(float(cohort.weights @ work), dtype=torch.float64)))
    return tau, cohort.sum(cohort.weights / work, D, scale=work)


def normalised_update(state: State, cohort: Cohort, plan: Plan, result: Result) -> Tensor:
    """Return Kbar sum_i omega_i D_i / K_i, a vector [d]."""
    D = state["x"] - result.models
    return cohort.mean_steps * cohort.sum(cohort.weights / plan.steps, D, scale=plan.steps)
