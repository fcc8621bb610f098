"""FedLin: correct every step by the gradients that all clients report at x~, and shorten fast clients' steps.

Mitra, Jaafar, Pappas, Hassani, "Linear Convergence in Federated Learning: Tackling Client Heterogeneity and
Sparse Gradients", NeurIPS 2021, without gradient sparsification. The step sizes are eta_i = eta / K_i, so at a
shared eta FedLin moves Kbar times less than other algorithms. To compare them, scale its eta by Kbar.
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
        gradient: g_i over the client's whole data ("full", as in the paper) or over the first batch of the round
            ("first": noisy, but without an extra epoch).

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
        """Clients send their gradients at x~ before they begin, and their step size is eta / K_i."""
        return Traits(exchanges=2, needs_steps=True, lr="round")

    def check(self) -> None:
        """Check the setting `gradient`."""
        one_of("gradient", self.gradient, ["full", "first"])

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = gbar - g_i(x~), mu = 0, eta_i = eta / K_i."""
        g = cohort.gradients(state["x"], self.gradient)
        gbar = cohort.sum(cohort.weights, g)
        return Plan.of(cohort.steps, self.lr_in(cohort) / cohort.steps, correction=gbar - g, local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i."""
        return {"x": average(cohort, result)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and gbar down, g_i and the model up, and an epoch (or a batch) for g_i."""
        return Cost.of(cohort, down=2, up=2, extra_steps=cohort.epoch_steps if self.gradient == "full" else 1)
