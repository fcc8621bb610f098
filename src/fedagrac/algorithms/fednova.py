"""FedNova: average the clients' updates per step, then move Kbar steps along the mean.

Wang, Liu, Liang, Joshi, Poor, "Tackling the Objective Inconsistency Problem in Heterogeneous Federated
Optimization", NeurIPS 2020, with plain local SGD (their a_i = (1, ..., 1), tau_eff = Kbar).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedagrac.algorithms.base import Cost, Rows, State, Stateless
from fedagrac.core.local import Plan, Result

if TYPE_CHECKING:
    from fedagrac.core.cohort import Cohort

__all__ = ["FedNova"]


@dataclass(frozen=True)
class FedNova(Stateless):
    """x = x~ - Kbar sum_i omega_i D_i / K_i with D_i = x~ - x_i and Kbar = sum_i omega_i K_i.

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

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = 0, mu = 0, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ - Kbar sum_i omega_i D_i / K_i."""
        D = state["x"] - result.models
        step = cohort.sum(cohort.weights / plan.steps, D, scale=plan.steps)
        return {"x": state["x"] - cohort.mean_steps * step}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up. K_i is a single number and does not count."""
        return Cost.of(cohort, down=1, up=1)
