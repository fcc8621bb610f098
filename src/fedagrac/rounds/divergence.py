"""The diagnosis of a diverged run: which client was the first, after how many steps, and what may help.

A run is diagnosed once, when it has ended. The search stops after a few seconds, so that it does not delay other
runs.
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
"""How long to search for the first step that is not finite."""

THEORY_SECONDS = 2.0
"""How long to search for a stable step size."""

STAYED, CUT_OFF = -1, -2
"""Used in place of a number of steps: the client stayed finite as far as it ran, or time or memory ran out."""


@dataclass(frozen=True)
class Divergence:
    """Where a run diverged.

    Attributes:
        round: the round, counted from 1.
        lr: the eta of the run.
        client: the first client whose model or loss was not finite, or the one with the lowest number if the first
            is not known; None if all clients stayed finite and the server's model did not.
        step: after how many of its local steps; None if that is not known.
        steps: how many steps the client was asked to do.
        clients: how many clients of the round did not stay finite.
        stable_lr: the eta below which the algorithm is stable in theory; None if theory gives none.
        name: the name of the client; None if clients have no names of their own.

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
    name: str | None = None

    def __str__(self) -> str:
        if self.client is None:
            what = "every client's model is finite, but the server's is not"
        else:
            known = "" if self.name is None else f" ({self.name})"
            what = f"the model or loss of client {self.client}{known} is not finite"
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
    """Find the client that diverged first in a round. Return the same diagnosis on all processes.

    Each process runs its diverged clients once more.

    Args:
        workload: the problem.
        ranks: the processes that share the simulation.
        algorithm: the algorithm that ran.
        cohort: all clients of the round.
        plan: what the clients of this process were asked to do.
        x: the model that they started from.
        result: what they replied.
    """
    local = np.flatnonzero(ranks.own(cohort.clients))
    lost = np.flatnonzero(~result.finite())
    known_here = torch.zeros(len(cohort), dtype=torch.int64)
    local_steps = _steps_until_lost(workload, plan.part(lost), x, cohort.clients[local[lost]], cohort.round)
    known_here[torch.from_numpy(local[lost])] = torch.from_numpy(local_steps)
    steps = ranks.total(known_here).numpy()  # from here on, all processes know the same
    stable = ranks.agree(_stable_lr(workload, algorithm, cohort) if ranks.rank == 0 else None)
    number, lost, federation = cohort.round + 1, np.flatnonzero(steps), workload.federation
    lr = algorithm.lr_in(cohort)
    if not len(lost):
        return Divergence(number, lr, stable_lr=stable)
    known = lost[steps[lost] > 0]
    if not len(known) or (steps == CUT_OFF).any():
        client = int(cohort.clients[lost[0]])
        name = federation.known_name(client)
        return Divergence(number, lr, client, clients=len(lost), stable_lr=stable, name=name)
    first = known[np.argmin(steps[known])]
    client = int(cohort.clients[first])
    return Divergence(
        round=number,
        lr=lr,
        client=client,
        step=int(steps[first]),
        steps=int(cohort.steps[first]),
        clients=len(lost),
        stable_lr=stable,
        name=federation.known_name(client),
    )


def _steps_until_lost(
    workload: Workload, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int
) -> npt.NDArray[np.int64]:
    """Return after how many steps each client's model or loss is not finite.

    Only the smallest number is exact, because each client runs no further than the smallest number so far.
    """
    deadline = time.perf_counter() + SECONDS
    losses: list[Tensor] = []

    def watched(output: Tensor, target: Tensor) -> Tensor:
        losses[:] = [workload.loss(output, target)]
        return losses[0]

    def finite() -> bool:
        return all(bool(torch.isfinite(values).all()) for values in (*losses, *workload.model.parameters))

    engine = SerialEngine(replace(workload, loss=watched))
    lost_after = np.full(len(clients), STAYED)
    for i in range(len(clients)):
        earlier = lost_after[lost_after > 0]
        most = min(int(plan.steps[i]), int(earlier.min()) - 1 if len(earlier) else int(plan.steps[i]))

        def over(k: int, i: int = i, most: int = most) -> bool:
            """Return whether client i ends after k steps, and store why."""
            if not finite():
                lost_after[i] = k
            elif k < most and time.perf_counter() > deadline:
                lost_after[i] = CUT_OFF
            return lost_after[i] != STAYED or k >= most

        if not most:
            continue
        try:
            engine.run_until(plan.part(np.array([i])), x, clients[i : i + 1], round, over)
        except RuntimeError:  # for example, no memory is left
            lost_after[i] = CUT_OFF
    return lost_after


def _stable_lr(workload: Workload, algorithm: Algorithm, cohort: Cohort) -> float | None:
    """Return the largest stable eta of a convex problem; None if it is unknown or above the eta of the run."""
    if not cohort.everyone:
        return None
    try:
        from fedagrac.theory.stability import stable_lr

        stable = stable_lr(workload, algorithm, cohort.steps, cohort.epoch_steps, THEORY_SECONDS)
    except (FedagracError, ImportError, ArithmeticError, np.linalg.LinAlgError, RuntimeError):
        return None  # scipy is not installed, or the theory does not cover this problem
    return stable if stable is not None and stable < algorithm.lr_in(cohort) else None
