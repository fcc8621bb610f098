"""Scaffnew: local steps with control variates, between communications at random times.

Mishchenko, Malinovsky, Stich, Richtarik, "ProxSkip: Yes! Local Gradient Steps Provably Lead to Communication
Acceleration! Finally!", ICML 2022, Algorithm 2. Clients communicate after a step with probability p, so a round
has a common number of steps K ~ Geometric(p): use it with `steps=Geometric(p)`.

Under unequal steps: one p holds for all clients, so that sum_i omega_i h_i stays zero. Then a stationary point,
x_i = x~ for all i, has h_i = grad F_i(x~) and is a minimum, whatever the K_i. Dividing by each client's own K_i
instead would lose the sum, and with it the minimum. The theory of acceleration covers a common K alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, average, zero_rows
from fedagrac.core.local import Plan, Result
from fedagrac.errors import fraction

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population

__all__ = ["Scaffnew"]


@dataclass(frozen=True)
class Scaffnew(Algorithm):
    """c_i = -h_i; x = sum_i omega_i x_i; h_i <- h_i + p / eta (x - x_i).

    Attributes:
        p: the probability of communicating after a step; 1 / E[K].

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
        """Check that p is a probability."""
        fraction("p", self.p)

    def start(self, x: Tensor, population: Population) -> State:
        """Return the model alone."""
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
