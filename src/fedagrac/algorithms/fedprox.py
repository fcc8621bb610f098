"""FedProx: add a proximal term that keeps every local model near the server's.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith, "Federated Optimization in Heterogeneous Networks", MLSys 2020.
The client's objective is F_i(x) + mu/2 |x - x~|^2 (the norm is squared), so its step gains mu (x - x~).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedagrac.algorithms.base import Cost, Rows, State, Stateless, average
from fedagrac.core.local import Plan, Result
from fedagrac.errors import non_negative

if TYPE_CHECKING:
    from fedagrac.core.cohort import Cohort

__all__ = ["FedProx"]


@dataclass(frozen=True)
class FedProx(Stateless):
    """x = sum_i omega_i x_i, each x_i after K_i steps of SGD on F_i + mu/2 |x - x~|^2.

    Attributes:
        mu: the proximal coefficient; 0 is FedAvg.

    Examples:
        >>> FedProx(lr=0.01, mu=0.1)
        FedProx(lr=0.01, local=SGD(), mu=0.1)
    """

    mu: float = 0.1

    cites: ClassVar[tuple[str, ...]] = ("fedprox",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedprox"

    def check(self) -> None:
        """Check that mu is not negative."""
        non_negative("mu", self.mu)

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = 0, the given mu, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), mu=self.mu, local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i."""
        return {"x": average(cohort, result)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up."""
        return Cost.of(cohort, down=1, up=1)
