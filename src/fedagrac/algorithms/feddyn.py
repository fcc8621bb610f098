"""FedDyn: a regularizer that follows each client, so that local and global optima agree.

Acar, Zhao, Matas, Mattina, Whatmough, Saligrama, "Federated Learning Based on Dynamic Regularization", ICLR 2021,
Algorithm 1. Their gradient of client i at its last model is h_i here, and their server state h = sum_i omega_i
h_i.

Under unequal steps: the paper assumes that clients minimise their regularized loss. With K_i steps they come part
of the way, and h_i moves by what they did move, -alpha (x_i - x~). No step count enters a formula, so fast
clients, which come closer to their minimum, move their h_i further. A stationary point is a minimum whatever the
K_i: x_i = x~ for all i means h_i = grad F_i(x~) and h = 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedagrac.algorithms.base import (
    Algorithm,
    Cost,
    Rows,
    State,
    Traits,
    average,
    reference_orientation,
    zero_rows,
)
from fedagrac.core.local import Plan, Result
from fedagrac.errors import positive

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["FedDyn"]


@dataclass(frozen=True)
class FedDyn(Algorithm):
    """c_i = -h_i; mu = alpha; h_i <- h_i - alpha (x_i - x~); x = sum_i omega_i x_i - h / alpha.

    The first sum is over the cohort, h = sum_i omega_i h_i over all clients.

    Attributes:
        alpha: the coefficient of the regularizer.

    Examples:
        >>> FedDyn(lr=0.01).alpha
        0.1
    """

    alpha: float = 0.1

    cites: ClassVar[tuple[str, ...]] = ("feddyn",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "feddyn"

    @property
    def traits(self) -> Traits:
        """The server keeps h and, for every client, h_i."""
        return Traits(sums=("h",), rows=("h",))

    def check(self) -> None:
        """Check that alpha is positive."""
        positive("alpha", self.alpha)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and h = 0."""
        return {"x": x, "h": torch.zeros_like(x)}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return h_i = 0."""
        return {"h": zero_rows(state, cohort)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = -h_i, mu = alpha, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), correction=-rows["h"], mu=self.alpha, local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i - h / alpha with the new h, and the new h_i."""
        h_i = rows["h"] - self.alpha * (result.models - state["x"])
        h = reference_orientation(state["h"], rows["h"], h_i, cohort)
        x = average(cohort, result) - h.to(state["x"].dtype) / self.alpha
        return {"x": x, "h": h}, {"h": h_i}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up. Clients keep h_i themselves."""
        return Cost.of(cohort, down=1, up=1)
