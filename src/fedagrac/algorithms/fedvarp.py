"""FedVARP and MIFA: the server remembers the last update of every client, to make up for those that are absent.

- FedVARP: Jhunjhunwala, Sharma, Nagarkatti, Joshi, "FedVARP: Tackling the Variance Due to Partial Client
  Participation in Federated Learning", UAI 2022.
- MIFA: Gu, Huang, Zhang, Huang, "Fast Federated Learning in the Presence of Arbitrary Device Unavailability",
  NeurIPS 2021.

Both keep updates in the unit of gradients and step along them with the present eta: MIFA's G_i is D_i / eta_t with
D_i = x~ - x_i. Here y_i = D_i / (eta_t / eta_1), where eta_t is the step size of the round in which the client
last took part and eta_1 that of round 1. So y_i is D_i itself with a constant lr, and under a schedule an old
update counts with the step size of the present round.

Under unequal steps y_i is the displacement of the client's last round, whatever its K_i was; with all clients
present both are FedAvg with the server's step size.
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
from fedagrac.core.schedule import value_at
from fedagrac.errors import positive

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["MIFA", "FedVARP"]


@dataclass(frozen=True)
class FedVARP(Algorithm):
    """x = x~ - server_lr s (Dbar / s - ybar + y); y_i <- D_i / s; s = eta_t / eta_1, 1 with a constant lr.

    Dbar and ybar are means over the cohort, y over all clients.

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

    def relative_lr(self, cohort: Cohort) -> float:
        """Return s = eta_t / eta_1 in the round of a cohort."""
        return self.lr_in(cohort) / value_at("lr", self.lr, 0)

    def move(self, state: State, rows: Rows, cohort: Cohort, y_i: Tensor, y: Tensor) -> Tensor:
        """Return Dbar / s - ybar + y, with y as before the round."""
        before = state["y"].to(y_i.dtype)
        return cohort.sum(cohort.weights, y_i - rows["y"]) + before

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return the next model, y and y_i."""
        s = self.relative_lr(cohort)
        y_i = (state["x"] - result.models) / s
        y = reference_orientation(state["y"], rows["y"], y_i, cohort)
        if cohort.everyone and self.server_lr == 1:
            return {"x": average(cohort, result), "y": y}, {"y": y_i}
        move = self.move(state, rows, cohort, y_i, y)
        return {"x": state["x"] - self.server_lr * s * move, "y": y}, {"y": y_i}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up."""
        return Cost.of(cohort, down=1, up=1)


@dataclass(frozen=True)
class MIFA(FedVARP):
    """x = x~ - server_lr s y, with y after the round; y_i <- D_i / s; s = eta_t / eta_1, 1 with a constant lr.

    Examples:
        >>> MIFA(lr=0.1).name
        'mifa'
    """

    cites: ClassVar[tuple[str, ...]] = ("mifa",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "mifa"

    def move(self, state: State, rows: Rows, cohort: Cohort, y_i: Tensor, y: Tensor) -> Tensor:
        """Return y, in which absent clients count with their last update."""
        return y.to(y_i.dtype)
