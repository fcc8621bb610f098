"""FedCM: mix the last global direction into every local step.

Xu, Wang, Wang, Yao, "FedCM: Federated Learning with Client-level Momentum", 2021, Algorithm 2: clients step along
alpha g + (1 - alpha) Delta, where Delta is the mean direction of the last round.

Under unequal steps: the paper divides displacements by eta K with one K. Here each client's is divided by its own
eta K_i, so Delta is a mean of directions, in which fast clients do not weigh more. The server moves
eta_g = server_lr eta Kbar along it; with equal K and server_lr = 1 that is the mean of the models. With local
momentum, |a_i|_1 takes the place of K_i, as in FedNova: a displacement is then longer than eta K_i, and divided by
it Delta would grow from round to round.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits
from fedagrac.algorithms.fednova import mean_direction
from fedagrac.core.local import Plan, Result
from fedagrac.errors import fraction, positive

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["FedCM"]


@dataclass(frozen=True)
class FedCM(Algorithm):
    """eta_i = alpha eta; c_i = (1 - alpha) / alpha Delta; x = x~ - eta_g Delta.

    Delta = sum_i omega_i D_i / (eta K_i), D_i = x~ - x_i and eta_g = server_lr eta Kbar. With local momentum,
    |a_i|_1 takes the place of K_i, and sum_i omega_i |a_i|_1 that of Kbar. With Adam there is no a_i, which is an
    error.

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
        self.local.work(np.ones(1, np.int64))  # refuses optimizers without coefficients a_i

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
        tau, per_step = mean_direction(state, cohort, plan, result)
        x = state["x"] - self.server_lr * tau * per_step
        return {"x": x, "delta": per_step / self.lr_in(cohort)}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and Delta down, the model up."""
        return Cost.of(cohort, down=2, up=1)
