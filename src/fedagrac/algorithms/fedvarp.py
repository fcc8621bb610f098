"""FedVARP and MIFA: the server remembers the last update of every client, to make up for those that are absent.

- FedVARP: Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the Variance Due to Partial Client
  Participation in Federated Learning", UAI 2022.
- MIFA: Gu, Huang, Zhang, Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
  NeurIPS 2021.

Under unequal steps y_i is the displacement D_i = x~ - x_i of the client's last round, whatever its K_i was; with
all clients present both are FedAvg with the server's step size.
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

__all__ = ["MIFA", "FedVARP"]


@dataclass(frozen=True)
class FedVARP(Algorithm):
    """x = x~ - server_lr (Dbar - ybar + y); y_i <- D_i. Dbar and ybar are means over the cohort, y over all.

    Attributes:
        server_lr: the server's step size.

    Examples:
        >>> FedVARP(lr=0.1).server_lr
        1.0
    """

    server_lr: float = 1.0

    cites: ClassVar[tuple[str, ...]] = ("fedvarp",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedvarp"

    @property
    def traits(self) -> Traits:
        """The server keeps y and, for every client, y_i."""
        return Traits(sums=("y",), rows=("y",))

    def check(self) -> None:
        """Check the server's step size."""
        positive("server_lr", self.server_lr)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and y = 0."""
        return {"x": x, "y": torch.zeros_like(x)}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return y_i = 0."""
        return {"y": zero_rows(state, cohort)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = 0, mu = 0, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)

    def move(self, state: State, rows: Rows, cohort: Cohort, D: Tensor, y: Tensor) -> Tensor:
        """Return Dbar - ybar + y, with y as before the round."""
        before = state["y"].to(D.dtype)
        return cohort.sum(cohort.weights, D - rows["y"]) + before

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return the next model, y and y_i."""
        D = state["x"] - result.models
        y = reference_orientation(state["y"], rows["y"], D, cohort)
        if cohort.everyone and self.server_lr == 1:
            return {"x": average(cohort, result), "y": y}, {"y": D}
        return {"x": state["x"] - self.server_lr * self.move(state, rows, cohort, D, y), "y": y}, {"y": D}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up."""
        return Cost.of(cohort, down=1, up=1)


@dataclass(frozen=True)
class MIFA(FedVARP):
    """x = x~ - server_lr y, with y after the round; y_i <- D_i.

    Examples:
        >>> MIFA(lr=0.1).name
        'mifa'
    """

    cites: ClassVar[tuple[str, ...]] = ("mifa",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "mifa"

    def move(self, state: State, rows: Rows, cohort: Cohort, D: Tensor, y: Tensor) -> Tensor:
        """Return y, in which absent clients count with their last update."""
        return y.to(D.dtype)
