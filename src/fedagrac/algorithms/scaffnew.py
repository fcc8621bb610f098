"""Scaffnew: local steps with control variates, between communications at random times.

Mishchenko, Malinovsky, Stich, Richtarik, "ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
Acceleration! Finally!", ICML 2022, Algorithm 2. Clients communicate after a step with probability p, so a round
has a common number of steps K ~ Geometric(p): use it with `steps=Geometric(p)`.

Under unequal steps: one p holds for all clients, so that sum_i omega_i h_i stays zero. Then a stationary point,
x_i = x~ for all i, has h_i = grad F_i(x~) and is a minimum, whatever the K_i. Dividing by each client's own K_i
instead would lose the sum, and with it the minimum. The theory of acceleration covers a common K alone.

h_i <- h_i + (p / eta) (x - x_i) takes x~ - x_i for a sum of 1 / p steps of one gradient each. A local optimizer
with memory makes longer steps, and a schedule with more steps makes longer displacements; then h_i moves too far
and grows from round to round. So momentum and Adam are refused: their coefficients depend on K_i, so that dividing
by them would lose the sum, too. If p Kbar is below 1/2 or above 2, a simulation logs a warning.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, average, zero_rows
from fedagrac.core.local import Plan, Result
from fedagrac.core.optimizers import SGD
from fedagrac.errors import InputError, fraction

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["Scaffnew"]

log = logging.getLogger("fedagrac")


@dataclass(frozen=True)
class Scaffnew(Algorithm):
    """c_i = -h_i; x = sum_i omega_i x_i; h_i <- h_i + p / eta (x - x_i).

    Attributes:
        p: the probability of communicating after a step; 1 / E[K], and with unequal steps about 1 / Kbar.

    Examples:
        >>> Scaffnew(lr=0.1).p
        0.1
    """

    p: float = 0.1

    cites: ClassVar[tuple[str, ...]] = ("proxskip",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "scaffnew"

    @property
    def traits(self) -> Traits:
        """The server keeps h_i for every client."""
        return Traits(rows=("h",))

    def check(self) -> None:
        """Check that p is a probability, and that steps are of one gradient."""
        fraction("p", self.p)
        if not isinstance(self.local, SGD) or self.local.momentum:
            accepted = "SGD without momentum: h_i follows from steps of one gradient each"
            raise InputError("local", self.local, accepted)

    def start(self, x: Tensor, population: Population) -> State:
        """Return the model alone. Warn if the steps of a round are far from 1 / p."""
        Kbar = None if population.mean_steps is None else population.mean_steps()
        if Kbar is not None and not 0.5 <= self.p * Kbar <= 2:
            text = "scaffnew: p = %g is meant for %.4g steps a round, but the schedule has %.4g on average. "
            text += "Take p = %.2g, or steps=Geometric(p): the control variates move %s"
            moved = "too far and may diverge" if self.p * Kbar > 1 else "slowly"
            log.warning(text, self.p, 1 / self.p, Kbar, 1 / Kbar, moved)
        return {"x": x}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return h_i = 0."""
        return {"h": zero_rows(state, cohort)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with c_i = -h_i, mu = 0, eta_i = eta."""
        return Plan.of(cohort.steps, self.lr_in(cohort), correction=-rows["h"], local=self.local)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i and h_i <- h_i + p / eta (x - x_i)."""
        x = average(cohort, result)
        return {"x": x}, {"h": rows["h"] + self.p / self.lr_in(cohort) * (x - result.models)}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down, the model up. Clients keep h_i themselves."""
        return Cost.of(cohort, down=1, up=1)
