"""FedCM: mix the last global direction into every local step.

Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, Algorithm 2: clients step along
alpha g + (1 - alpha) Delta, where Delta is the mean direction of the last round.

Under unequal steps: the paper divides displacements by eta K with one K. Here each client's is divided by its own
eta K_i, so Delta is a mean of directions, in which fast clients do not weigh more. The server moves
eta_g = server_lr eta Kbar along it; with equal K and server_lr = 1 that is the mean of the models.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits
from fedagrac.core.local import Plan, Result
from fedagrac.errors import fraction, positive

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["FedCM"]


@dataclass(frozen=True)
class FedCM(Algorithm):
    """eta_i = alpha eta; c_i = (1 - alpha) / alpha Delta; x = x~ - eta_g Delta.

    Delta = sum_i omega_i D_i / (eta K_i), D_i = x~ - x_i and eta_g = server_lr eta Kbar.

    Attributes:
        alpha: the share of the client's own gradient; 1 is FedNova.
        server_lr: the server's step size in multiples of eta Kbar.

    Examples:
        >>> FedCM(lr=0.1).alpha
        0.1
    """

    alpha: float = 0.1
    server_lr: float = 1.0

    cites: ClassVar[tuple[str, ...]] = ("fedcm",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedcm"

    @property
    def traits(self) -> Traits:
        """The server keeps Delta."""
        return Traits(vectors=("x", "delta"))

    def check(self) -> None:
        """Check every setting."""
        fraction("alpha", self.alpha)
        positive("server_lr", self.server_lr)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and Delta = 0."""
        return {"x": x, "delta": torch.zeros_like(x)}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return no rows."""
        return {}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with eta_i = alpha eta and c_i = (1 - alpha) / alpha Delta."""
        correction = None
        if self.alpha < 1:
            correction = ((1 - self.alpha) / self.alpha * state["delta"]).expand(len(cohort), -1)
        return Plan.of(cohort.steps, self.alpha * self.lr_in(cohort), correction=correction, local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ - eta_g Delta, and Delta."""
        D = state["x"] - result.models
        per_step = cohort.sum(cohort.weights / plan.steps, D, scale=plan.steps)
        x = state["x"] - self.server_lr * cohort.mean_steps * per_step
        return {"x": x, "delta": per_step / self.lr_in(cohort)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and Delta down, the model up."""
        return Cost.of(cohort, down=2, up=1)
