"""FedLin: correct every step by the gradients that all clients report at x~, and shorten fast clients' steps.

Mitra, Jaafar, Pappas, Hassani, "Linear Convergence in Federated Learning: Tackling Client Heterogeneity and
Sparse Gradients", NeurIPS 2021, without gradient sparsification. Their step sizes are eta_i = eta / K_i, so at
a shared eta FedLin moves Kbar times less than the others: scale its eta by Kbar to compare.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from fedagrac.algorithms.base import Cost, Rows, State, Stateless, Traits, average
from fedagrac.core.local import Plan, Result
from fedagrac.errors import one_of

if TYPE_CHECKING:
    from fedagrac.core.cohort import Cohort

__all__ = ["FedLin"]


@dataclass(frozen=True)
class FedLin(Stateless):
    """c_i = gbar - g_i(x~) with gbar = sum_i omega_i g_i(x~), eta_i = eta / K_i; x = sum_i omega_i x_i.

    Attributes:
        gradient: g_i over the client's whole data ("full", the paper's) or over the round's first batch
            ("first": no extra epoch, but noisy).

    Examples:
        >>> FedLin(lr=0.1).gradient
        'full'
    """

    gradient: Literal["full", "first"] = "full"

    cites: ClassVar[tuple[str, ...]] = ("fedlin",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedlin"

    @property
    def traits(self) -> Traits:
        """Clients send their gradients at x~ before they begin, and divide their steps by K_i."""
        return Traits(exchanges=2, needs_steps=True, lr="round")

    def check(self) -> None:
        """The gradient must be one of the two kinds."""
        one_of("gradient", self.gradient, ["full", "first"])

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """c_i = gbar - g_i(x~), mu = 0, eta_i = eta / K_i."""
        g = cohort.gradients(state["x"], self.gradient)
        gbar = cohort.sum(cohort.weights, g)
        return Plan.of(cohort.steps, self.lr / cohort.steps, correction=gbar - g)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """x = sum_i omega_i x_i."""
        return {"x": average(cohort, result)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Model and gbar down, g_i and model up, and one local epoch (or one batch) for g_i."""
        return Cost.of(cohort, down=2, up=2, extra_steps=cohort.epoch_steps if self.gradient == "full" else 1)
