"""Mime and MimeLite: the momentum of a centralized optimizer in every local step.

Karimireddy, Jaggi, Kale, Mohri, Reddi, Stich, Suresh, "Breaking the Centralized Barrier for Cross-Device Federated
Learning", NeurIPS 2021, Algorithm 1 with SGD and momentum. The momentum is fixed while clients step, and follows
the mean of their full gradients at x~ between rounds. Mime also replaces the client's gradient by g_i(x) - g_i(x~)
over the same batch plus the mean full gradient.

Under unequal steps: the momentum does not depend on steps, since it is made of gradients at x~. x is the mean of
the models, in which fast clients weigh more.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, average
from fedagrac.core.local import Plan, Result
from fedagrac.errors import InputError, share

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["Mime", "MimeLite"]


@dataclass(frozen=True)
class MimeLite(Algorithm):
    """eta_i = (1 - beta) eta; c_i = beta / (1 - beta) m; m <- (1 - beta) gbar + beta m; x = sum_i omega_i x_i.

    gbar = sum_i omega_i grad F_i(x~) over the cohort.

    Attributes:
        momentum: beta, the share of m that is kept; 0 is FedAvg.

    Examples:
        >>> MimeLite(lr=0.1).momentum
        0.9
    """

    momentum: float = 0.9

    cites: ClassVar[tuple[str, ...]] = ("mime",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "mimelite"

    @property
    def traits(self) -> Traits:
        """The server keeps m. Clients send their gradients at x~ with their models."""
        return Traits(vectors=("x", "m"))

    def check(self) -> None:
        """Check that the momentum is a share."""
        share("momentum", self.momentum)

    def start(self, x: Tensor, population: Population) -> State:
        """Return x and m = 0."""
        return {"x": x, "m": torch.zeros_like(x)}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return no rows."""
        return {}

    def correction(self, m: Tensor) -> Tensor:
        """Return c = beta / (1 - beta) m, the same for all clients."""
        return self.momentum / (1 - self.momentum) * m

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with eta_i = (1 - beta) eta and the correction. Clients send gradients at x~ for m."""
        return replace(self.with_correction(self.correction(state["m"]), cohort), gradient=True)

    def with_correction(self, c: Tensor, cohort: Cohort) -> Plan:
        """Return a plan with eta_i = (1 - beta) eta and the same correction c for all clients."""
        eta = (1 - self.momentum) * self.lr_in(cohort)
        return Plan.of(cohort.steps, eta, correction=c.expand(len(cohort), -1), local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i and m <- (1 - beta) gbar + beta m."""
        if plan.at_start is None:
            raise InputError("plan.at_start", None, "the gradients at x~ that the plan asked for")
        gbar = cohort.sum(cohort.weights, plan.at_start)
        m = (1 - self.momentum) * gbar + self.momentum * state["m"]
        return {"x": average(cohort, result), "m": m}, {}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model and m down, the model and a gradient up, and an epoch for the gradient."""
        return Cost.of(cohort, down=2, up=2, extra_steps=cohort.epoch_steps)


@dataclass(frozen=True)
class Mime(MimeLite):
    """MimeLite with g_i(x) - g_i(x~) + gbar in place of g_i(x), the first two over the same batch.

    Examples:
        >>> Mime(lr=0.1).name
        'mime'
    """

    @property
    def name(self) -> str:
        """The registered name."""
        return "mime"

    @property
    def traits(self) -> Traits:
        """The server keeps m. Clients send gradients at x~ before they begin, because gbar is in their steps."""
        return replace(super().traits, exchanges=2)

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c = beta / (1 - beta) m + gbar, whose gradients have those at x~ subtracted."""
        g = cohort.gradients(state["x"])
        c = self.correction(state["m"]) + cohort.sum(cohort.weights, g)
        return replace(self.with_correction(c, cohort), at_start=g, anchored=True)

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost of MimeLite with gbar down as well, and a second gradient in every step."""
        return Cost.of(cohort, down=3, up=2, extra_steps=cohort.epoch_steps + cohort.steps)
