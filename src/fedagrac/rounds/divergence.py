"""Why a run left the finite numbers: which client was the first, after how many of its steps, and what may help.

It is asked once, when the run has ended, and gives up after some seconds: a diagnosis may not hold up other runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.engines import SerialEngine
from fedagrac.errors import FedagracError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms import Algorithm
    from fedagrac.core.cohort import Cohort
    from fedagrac.core.local import Plan, Result
    from fedagrac.engines import Ranks, Workload

__all__ = ["Divergence", "diagnose"]

SECONDS = 5.0
"""How long the first step that is not finite may be looked for."""

THEORY_SECONDS = 2.0
"""How long theory may look for a stable step size."""

STAYED, CUT_OFF = -1, -2
"""In place of a number of steps: the client stayed finite or was later than another, or nobody knows."""


@dataclass(frozen=True)
class Divergence:
    """Where a run left the finite numbers.

    Attributes:
        round: from 1.
        lr: the eta of the run.
        client: whose model or loss was the first, or else the lowest number among several; None where all clients
            stayed finite and the server's step did not.
        step: after how many of its local steps; None where that was not found.
        steps: how many it was to do.
        clients: how many clients of the round did not stay finite.
        stable_lr: the eta below which theory calls the algorithm stable here; None where it does not say.

    Examples:
        >>> str(Divergence(round=3, lr=2.0, client=4, step=7, steps=20, clients=2))
        'round 3: the model or loss of client 4 is not finite after 7 of its 20 local steps, as the first of 2; \
try a smaller lr than 2'
        >>> str(Divergence(round=3, lr=2.0))
        "round 3: every client's model is finite, but the server's is not; try a smaller lr than 2"
    """

    round: int
    lr: float
    client: int | None = None
    step: int | None = None
    steps: int | None = None
    clients: int = 0
    stable_lr: float | None = None

    def __str__(self) -> str:
        if self.client is None:
            what = "every client's model is finite, but the server's is not"
        else:
            what = f"the model or loss of client {self.client} is not finite"
            if self.step is not None:
                what += f" after {self.step} of its {self.steps} local steps"
                what += f", as the first of {self.clients}" if self.clients > 1 else ""
            elif self.clients > 1:
                what += f", and of {self.clients - 1} other{'s' if self.clients > 2 else ''}"
        advice = f"try a smaller lr than {self.lr:g}"
        if self.stable_lr is not None:
            advice += f" (theory, for exact gradients: stable below about {self.stable_lr:.2g})"
        return f"round {self.round}: {what}; {advice}"


def diagnose(
    workload: Workload,
    ranks: Ranks,
    algorithm: Algorithm,
    cohort: Cohort,
    plan: Plan,
    x: Tensor,
    result: Result,
) -> Divergence:
    """Find out who diverged in a round: the same on all processes, each of which runs its own clients once more.

    Args:
        workload: the problem.
        ranks: the processes that share the simulation.
        algorithm: what ran.
        cohort: all that took part in the round.
        plan: what those that this process runs were asked to do.
        x: where they started.
        result: what they replied.
    """
    own = np.flatnonzero(ranks.own(cohort.clients))
    lost = np.flatnonzero(~result.finite())
    told = torch.zeros(len(cohort), dtype=torch.int64)
    own_steps = _steps_until_lost(workload, plan.part(lost), x, cohort.clients[own[lost]], cohort.round)
    told[torch.from_numpy(own[lost])] = torch.from_numpy(own_steps)
    steps = ranks.total(told).numpy()  # all processes come here, and know the same from here on
    stable = ranks.agree(_stable_lr(workload, algorithm, cohort) if ranks.rank == 0 else None)
    number, lost = cohort.round + 1, np.flatnonzero(steps)
    if not len(lost):
        return Divergence(number, algorithm.lr, stable_lr=stable)
    known = lost[steps[lost] > 0]
    if not len(known) or (steps == CUT_OFF).any():
        client = int(cohort.clients[lost[0]])
        return Divergence(number, algorithm.lr, client, clients=len(lost), stable_lr=stable)
    first = known[np.argmin(steps[known])]
    found = int(cohort.clients[first]), int(steps[first]), int(cohort.steps[first])
    return Divergence(number, algorithm.lr, *found, len(lost), stable)


def _steps_until_lost(
    workload: Workload, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int
) -> npt.NDArray[np.int64]:
    """Return after how many steps each client's model or loss is not finite; only the first need be right."""
    until = time.perf_counter() + SECONDS
    losses: list[Tensor] = []

    def watched(output: Tensor, target: Tensor) -> Tensor:
        losses[:] = [workload.loss(output, target)]
        return losses[0]

    def finite() -> bool:
        return all(bool(torch.isfinite(values).all()) for values in (*losses, *workload.model.parameters))

    engine = SerialEngine(replace(workload, loss=watched))
    found = np.full(len(clients), STAYED)
    for i in range(len(clients)):
        earlier = found[found > 0]
        most = min(int(plan.steps[i]), int(earlier.min()) - 1 if len(earlier) else int(plan.steps[i]))

        def over(k: int, i: int = i, most: int = most) -> bool:
            if not finite():
                found[i] = k
            elif k < most and time.perf_counter() > until:
                found[i] = CUT_OFF
            return found[i] != STAYED or k >= most

        if not most:
            continue
        try:
            engine.run_until(plan.part(np.array([i])), x, clients[i : i + 1], round, over)
        except RuntimeError:  # there may be no memory left
            found[i] = CUT_OFF
    return found


def _stable_lr(workload: Workload, algorithm: Algorithm, cohort: Cohort) -> float | None:
    """Return the largest stable eta of a convex problem, where it can be had and is below the one that ran."""
    if not cohort.everyone:
        return None
    try:
        from fedagrac.theory.stability import stable_lr

        found = stable_lr(workload, algorithm, cohort.steps, cohort.epoch_steps, THEORY_SECONDS)
    except (FedagracError, ImportError, ArithmeticError, np.linalg.LinAlgError, RuntimeError):
        return None  # scipy is not there, or the theory does not speak of this problem
    return found if found is not None and found < algorithm.lr else None
