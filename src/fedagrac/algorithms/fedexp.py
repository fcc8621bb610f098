"""FedExP: a server step size that follows from how far the clients' updates are apart.

Jhunjhunwala, Wang, Joshi, "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023.

Under unequal steps D_i are the displacements as they are, so fast clients weigh more in both norms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedagrac.algorithms.base import Cost, Rows, State, Stateless, average
from fedagrac.core.local import Plan, Result
from fedagrac.errors import non_negative

if TYPE_CHECKING:
    from fedagrac.core.cohort import Cohort

__all__ = ["FedExP"]


@dataclass(frozen=True)
class FedExP(Stateless):
    """x = x~ - eta_g Dbar with eta_g = max(1, sum_i omega_i |D_i|^2 / (2 (|Dbar|^2 + eps))) and D_i = x~ - x_i.

    Attributes:
        eps: keeps eta_g bounded when the updates cancel.

    Examples:
        >>> FedExP(lr=0.1).eps
        0.001
    """

    eps: float = 1e-3

    cites: ClassVar[tuple[str, ...]] = ("fedexp",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedexp"

    def check(self) -> None:
        """Check that eps is not negative."""
        non_negative("eps", self.eps)

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = 0, mu = 0, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ - eta_g Dbar."""
        D = state["x"] - result.models
        spread = cohort.sum(cohort.weights, D.double().square().sum(1, keepdim=True))
        mean = cohort.sum(cohort.weights, D)
        eta_g = float(spread / (2 * (mean.double().square().sum() + self.eps)))
        if not eta_g > 1:
            return {"x": average(cohort, result)}, {}
        return {"x": state["x"] - eta_g * mean}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up."""
        return Cost.of(cohort, down=1, up=1)
