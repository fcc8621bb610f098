"""Ditto: beside the global model, every client trains a model of its own that stays near it.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021,
Algorithm 1.

The own model is trained in the rounds in which its client takes part, with as many steps as the global one and the
same batches. Under unequal steps, fast clients go further from the global model towards their own optimum, and the
global model is that of FedAvg.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, average
from fedagrac.core.local import Plan, Result, Second
from fedagrac.errors import non_negative

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population
    from fedagrac.core.layout import Layout

__all__ = ["Ditto"]


@dataclass(frozen=True)
class Ditto(Algorithm):
    """x = sum_i omega_i x_i as in FedAvg; beside it v_i <- v_i - eta (g_i(v_i) + mu (v_i - x~)), K_i times.

    Attributes:
        mu: how strongly a client's own model is held near the global one; with 0, clients train alone.

    Examples:
        >>> Ditto(lr=0.1, mu=0.5).mu
        0.5
    """

    mu: float = 1.0

    cites: ClassVar[tuple[str, ...]] = ("ditto",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "ditto"

    @property
    def traits(self) -> Traits:
        """The server keeps x_1, where own models start, and every client's own model."""
        return Traits(vectors=("x", "x1"), rows=("v",), personal=True)

    def check(self) -> None:
        """Check mu."""
        non_negative("mu", self.mu)

    def start(self, x: Tensor, population: Population) -> State:
        """Return the model, and x_1."""
        return {"x": x, "x1": x}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return v_i = x_1."""
        return {"v": state["x1"].repeat(len(cohort), 1)}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return FedAvg's plan, with v_i as second models."""
        plan = Plan.of(cohort.steps, self.lr_in(cohort), local=self.local)
        return replace(plan, second=Second(rows["v"], plan.lr, np.full(len(plan), float(self.mu))))

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = sum_i omega_i x_i, and the next v_i."""
        assert result.second is not None
        return {**state, "x": average(cohort, result)}, {"v": result.second}

    def own_models(self, state: State, rows: Rows, layout: Layout) -> Tensor:
        """Return v_i, [m, d]."""
        return rows["v"]

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down and up, and K_i steps of the own model, which stays at the client."""
        return Cost.of(cohort, down=1, up=1, extra_steps=cohort.steps)
