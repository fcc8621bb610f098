"""DiLoCo: an inner AdamW whose state each client keeps, and Nesterov's momentum on the server.

Douillard, Feng, Rusu, Chhaparia, Donchev, Kuncoro, Ranzato, Szlam, Shen, "DiLoCo: Distributed Low-Communication
Training of Language Models", 2023, Algorithm 1 with H inner steps (theta is x, and theta_i is x_i):

    lines 3 to 9   theta_i <- theta~;  H times theta_i <- InnerOpt(theta_i, grad)      InnerOpt: AdamW
    line 12        Delta = (1/k) sum_i (theta~ - theta_i)
    line 14        theta = OuterOpt(theta~, Delta)                                     OuterOpt: SGD, Nesterov

Every worker has an AdamW state of its own, which is never averaged and goes on in the next round (Section 6.1). In
a federation of unequal data, Delta weighs workers by their number of examples (Section 6.1). OuterOpt is
`torch.optim.SGD(lr=0.7, momentum=0.9, nesterov=True)`:

    m <- momentum m + Delta;   x = x~ - server_lr (Delta + momentum m)

The paper has one H. Under unequal K_i a client that makes ten times the steps moves up to ten times as far: a step
of AdamW has about the length eta in every coordinate, however small the gradient is. `merge` says what becomes of
that; D_i = x~ - x_i:

- "weight": Delta = sum_i omega_i D_i, line 12 as it stands. Fast clients pull x towards their own minima.
- "work": Delta = Kbar sum_i omega_i D_i / K_i, the mean direction of a step, times Kbar. Clients weigh omega_i,
  whatever their K_i. K_i stands for the work of a client, because AdamW has no coefficients a_i as FedNova's.
- "calibrated": as "weight", and lambda (nu - nu_i) is added to every gradient before AdamW sees it, as FedaGrac
  does: nu_i is the client's mean gradient of its last round, summed step by step, and nu = sum_i omega_i nu_i.

A client's count of steps goes on, too: AdamW divides its means by 1 - beta^t, where t counts all K_i of the rounds
in which the client took part. An absent client keeps its state.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np
import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits, zero_rows
from fedagrac.algorithms.fedagrac import FedaGrac
from fedagrac.algorithms.fedavg import FedAvg
from fedagrac.algorithms.fednova import normalised_update
from fedagrac.algorithms.fedopt import FedAvgM
from fedagrac.core.optimizers import AdamW, LocalOptimizer
from fedagrac.core.schedule import check_rounds
from fedagrac.errors import flag, one_of

if TYPE_CHECKING:
    from fedagrac.core.cohort import Cohort, Population
    from fedagrac.core.local import Plan, Result

__all__ = ["DiLoCo"]

MADE = "made"
"""The name of the row that holds how many steps a client has made."""


@dataclass(frozen=True)
class DiLoCo(Algorithm):
    """U = AdamW with a state that goes on; m <- beta m + Delta; x = x~ - eta_g (Delta + beta m).

    Attributes:
        local: the inner optimizer. The paper's is AdamW with a weight decay of 0.1.
        server_lr: eta_g, the step size of the outer optimizer.
        momentum: beta, Nesterov's momentum of the outer optimizer.
        merge: how clients with unequal K_i make Delta. "weight": sum_i omega_i D_i (the paper). "work":
            Kbar sum_i omega_i D_i / K_i. "calibrated": as "weight"; lambda (nu - nu_i) is added to every gradient.
        keep: whether the state of a client's inner optimizer goes on in the next round in which it takes part (the
            paper), instead of beginning anew.
        calibration: lambda of merge="calibrated", a number or a schedule over rounds.
        init: with merge="calibrated", nu_i starts from the "full" local gradient at x_1 or from "zeros".

    Examples:
        >>> DiLoCo(lr=0.001).local
        AdamW(weight_decay=0.1)
    """

    server_lr: float = 0.7
    momentum: float = 0.9
    merge: Literal["weight", "work", "calibrated"] = "weight"
    keep: bool = True
    calibration: float | Callable[[int], float] = 1.0
    init: Literal["full", "zeros"] = "full"
    local: LocalOptimizer = field(default=AdamW(weight_decay=0.1), kw_only=True)

    cites: ClassVar[tuple[str, ...]] = ("diloco",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "diloco"

    def check(self) -> None:
        """Check every setting."""
        one_of("merge", self.merge, ["weight", "work", "calibrated"])
        flag("keep", self.keep)
        self.calibrated.check()
        self.outer.check()

    def check_rounds(self, rounds: int) -> None:
        """Refuse schedules of lr and lambda without a usable value in one of a run's rounds."""
        super().check_rounds(rounds)
        check_rounds(f"calibration of {self.name}", self.calibration, rounds, zero=True)

    @property
    def calibrated(self) -> FedaGrac:
        """The algorithm that calibrates gradients. Sums of gradients are uploaded unless the model gives them."""
        return FedaGrac(
            lr=self.lr,
            calibration=self.calibration,
            transmit="average",
            init=self.init,
            economical=self.local.plain,
            local=self.local,
        )

    @property
    def outer(self) -> FedAvgM:
        """The outer optimizer, around the algorithm whose next model is x~ - Delta."""
        inner: Algorithm = FedAvg(lr=self.lr)
        if self.merge == "work":
            inner = PerStep(lr=self.lr)
        elif self.merge == "calibrated":
            inner = self.calibrated
        return FedAvgM(
            lr=self.lr,
            server_lr=self.server_lr,
            inner=inner,
            momentum=self.momentum,
            nesterov=True,
            local=self.local,
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the rows that hold the state of a client's inner optimizer."""
        return tuple(f"slot{i}" for i in range(self.local.slots)) if self.keep else ()

    @property
    def traits(self) -> Traits:
        """The server keeps m and, for every client, the state of its inner optimizer and its count of steps."""
        traits = self.outer.traits
        return replace(traits, rows=(*traits.rows, *self.slots, MADE), counts=(MADE,)) if self.keep else traits

    def start(self, x: torch.Tensor, population: Population) -> State:
        """Return x, m = 0 and, with merge="calibrated", nu."""
        return self.outer.start(x, population)

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return a state of zeros after no step and, with merge="calibrated", nu_i."""
        rows = self.outer.enter(state, cohort)
        if not self.keep:
            return rows
        made = torch.zeros((len(cohort), 1), dtype=torch.float64, device=state["x"].device)
        return {**rows, **{name: zero_rows(state, cohort) for name in self.slots}, MADE: made}

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return a plan with eta_i = eta, the kept states and, with merge="calibrated", lambda (nu - nu_i)."""
        plan = self.outer.plan(state, rows, cohort)
        if not self.keep:
            return plan
        made = rows[MADE][:, 0].cpu().numpy().astype(np.int64)
        return replace(plan, slots=tuple(rows[name] for name in self.slots), before=made)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ - eta_g (Delta + beta m), and what clients go on with."""
        state, after = self.outer.aggregate(state, rows, cohort, plan, result)
        if not self.keep:
            return state, after
        slots = dict(zip(self.slots, result.slots or (), strict=True))
        made = rows[MADE] + torch.as_tensor(plan.steps[:, None], dtype=torch.float64).to(rows[MADE].device)
        return state, {**after, **slots, MADE: made}

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost: the model down and up and, with merge="calibrated", nu down and a sum of gradients up.

        The state of the inner optimizer stays with the client and does not count.
        """
        return self.outer.cost(cohort)


class PerStep(FedAvg):
    """x = x~ - Kbar sum_i omega_i D_i / K_i, whatever the local optimizer."""

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return the next model."""
        return {"x": state["x"] - normalised_update(state, cohort, plan, result)}, {}
