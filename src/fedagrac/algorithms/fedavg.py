"""FedAvg: average the clients' models.

McMahan, Moore, Ramage, Hampson, Agüera y Arcas, "Communication-Efficient Learning of Deep Networks from
Decentralized Data", AISTATS 2017. With unequal K_i it is the "FedAvg with step asynchronism" of Wu et al. (Section
III), whose limit is not the minimiser of F (Theorem 1).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedagrac.algorithms.base import Cost, Rows, State, Stateless, average
from fedagrac.core.local import Plan, Result

if TYPE_CHECKING:
    from fedagrac.core.cohort import Cohort

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(Stateless):
    """x = sum_i omega_i x_i, each x_i after K_i plain SGD steps.

    Examples:
        >>> FedAvg(lr=0.01).name
        'fedavg'
    """

    cites: ClassVar[tuple[str, ...]] = ("fedavg",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedavg"

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = 0, mu = 0, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i."""
        return {"x": average(cohort, result)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up."""
        return Cost.of(cohort, down=1, up=1)
