"""FedSAM and FedLESAM: take gradients at a point beside the model, to end in flat minima.

- FedSAM: Qu, Li, Duan, Liu, Tang, Lu, "Generalized Federated Learning via Sharpness Aware Minimization", ICML
  2022, and Caldarola, Caputo, Ciccone, "Improving Generalization in Federated Learning by Seeking Flat Minima",
  ECCV 2022. The point is x + rho g / |g|, with a second gradient in every step.
- FedLESAM: Fan, Hu, Yao, Niu, Zhang, Sugiyama, Wang, "Locally Estimated Global Perturbations are Better than
  Local Perturbations for Federated Sharpness-aware Minimization", ICML 2024. The point is x + p_i, where p_i
  points from x~ back to the model that the client received in its last round. It costs no gradient.

Neither depends on step counts: the distance rho is the same for fast and slow clients.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Stateless, Traits, average
from fedagrac.core.local import Plan, Result
from fedagrac.errors import non_negative

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["FedLESAM", "FedSAM"]


@dataclass(frozen=True)
class FedSAM(Stateless):
    """Gradients at x + rho g / |g|; x = sum_i omega_i x_i.

    Attributes:
        rho: the distance; 0 is FedAvg.

    Examples:
        >>> FedSAM(lr=0.1).rho
        0.05
    """

    rho: float = 0.05

    cites: ClassVar[tuple[str, ...]] = ("fedsam",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedsam"

    def check(self) -> None:
        """Check that rho is not negative."""
        non_negative("rho", self.rho)

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with an ascent of rho."""
        plan = Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)
        return replace(plan, ascent=np.full(len(cohort), self.rho)) if self.rho else plan

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i."""
        return {"x": average(cohort, result)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up, and a second gradient in every step."""
        return Cost.of(cohort, down=1, up=1, extra_steps=cohort.steps if self.rho else 0)


@dataclass(frozen=True)
class FedLESAM(Algorithm):
    """Gradients at x + p_i with p_i = rho (x_i~ - x~) / |x_i~ - x~|; x = sum_i omega_i x_i.

    x_i~ is the model that client i received in its last round; p_i = 0 in its first.

    Attributes:
        rho: the distance; 0 is FedAvg.

    Examples:
        >>> FedLESAM(lr=0.1).rho
        0.05
    """

    rho: float = 0.05

    cites: ClassVar[tuple[str, ...]] = ("fedlesam",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedlesam"

    @property
    def traits(self) -> Traits:
        """The server keeps the model that each client received last."""
        return Traits(rows=("before",))

    def check(self) -> None:
        """Check that rho is not negative."""
        non_negative("rho", self.rho)

    def start(self, x: Tensor, population: Population) -> State:
        """Return the model alone."""
        return {"x": x}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return the present model, from which p_i = 0."""
        return {"before": state["x"].expand(len(cohort), -1)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with gradients at x + p_i."""
        plan = Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)
        if not self.rho:
            return plan
        back = rows["before"] - state["x"]
        norms = back.norm(dim=1, keepdim=True)
        return replace(plan, beside=back * (self.rho / norms.clamp(min=1e-12)) * (norms > 0))

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i, and the model that the members received."""
        return {"x": average(cohort, result)}, {"before": state["x"].expand(len(cohort), -1)}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up. Clients keep the model that they received."""
        return Cost.of(cohort, down=1, up=1)
