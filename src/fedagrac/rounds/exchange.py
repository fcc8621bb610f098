"""What passes between a server and its fleet: an order goes out, replies come back.

Replies may be fewer than were asked for, arrive at different times and hold fewer steps than were planned. The
server takes in what it is given; which replies count is decided by the fleet and by the guard.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms.base import Rows
    from fedagrac.core.cohort import Cohort
    from fedagrac.core.local import Plan, Result

__all__ = ["ClientReply", "Order", "Replies", "Spent", "step_lengths"]


@dataclass(frozen=True)
class Spent:
    """What an exchange cost: seconds on the fleet's clock, bytes to the clients and bytes from them."""

    seconds: float = 0.0
    down: int = 0
    up: int = 0


@dataclass(frozen=True, eq=False)
class Order:
    """What a server asks of a cohort in one round.

    Attributes:
        x: the model that clients start from.
        whole: all members of the cohort.
        cohort: the members that this process answers for; all of them unless several processes share the fleet.
        rows: what the server keeps of those members.
        plan: what they are to do. In replies, its steps are those that were really done.
    """

    x: Tensor
    whole: Cohort
    cohort: Cohort
    rows: Rows
    plan: Plan

    @property
    def local(self) -> npt.NDArray[np.bool_]:
        """Which members of the whole cohort this process answers for."""
        return np.isin(self.whole.clients, self.cohort.clients)

    def alone(self, members: npt.NDArray[np.int64]) -> Order:
        """Return the order of some members of the whole cohort, their weights normalised over them."""
        local = self.local
        kept = np.isin(np.arange(len(self.whole)), members)
        rows = np.flatnonzero(kept[local])
        rest = self.whole.alone(members)
        return Order(
            x=self.x,
            whole=rest,
            cohort=rest if local.all() else rest.part(local[members], self.cohort.total),
            rows={name: values[torch.from_numpy(rows)] for name, values in self.rows.items()},
            plan=self.plan.part(rows),
        )


@dataclass(frozen=True)
class ClientReply:
    """What one client replied, in numbers.

    Attributes:
        client: its number.
        steps: how many local steps it did.
        loss: its mean training loss over those steps.
        length: |x_i - x~| / (eta_i K_i), the length of its mean step per unit of step size.
    """

    client: int
    steps: int
    loss: float
    length: float


@dataclass(frozen=True, eq=False)
class Replies:
    """What came back of an order.

    Iterating gives a `ClientReply` for each member that this process answers for.

    Attributes:
        order: the part of the order that was answered.
        result: what its members replied, in the order of `order.cohort`.
        spent: what the round cost, including clients that do not count.
        arrived: after how many seconds of the round each reply came, in the order of `order.whole`.
        asked: how many clients were asked; None where whoever is asked answers.
        dropped: why each client that was asked does not count, by its number.
    """

    order: Order
    result: Result
    spent: Spent
    arrived: npt.NDArray[np.float64]
    asked: int | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.order.cohort)

    def __iter__(self) -> Iterator[ClientReply]:
        lengths = step_lengths(self.order.plan, self.order.x, self.result)
        steps, loss = self.order.plan.steps, self.result.loss.tolist()
        for row, client in enumerate(self.order.cohort.clients):
            yield ClientReply(int(client), int(steps[row]), loss[row], float(lengths[row]))

    def without(self, dropped: Mapping[int, str]) -> Replies:
        """Return the replies of the other clients; all of them where none would be left."""
        known = {**self.dropped, **dropped}
        whole, local = self.order.whole, self.order.local
        kept = ~np.isin(whole.clients, list(dropped))
        if kept.all() or not kept.any():
            return Replies(self.order, self.result, self.spent, self.arrived, self.asked, known)
        result = self.result.part(np.flatnonzero(kept[local]))
        order = self.order.alone(np.flatnonzero(kept))
        return Replies(order, result, self.spent, self.arrived[kept], self.asked, known)


def step_lengths(plan: Plan, x: Tensor, result: Result) -> npt.NDArray[np.float64]:
    """Return every member's |x_i - x~| / (eta_i K_i), NaN where its reply is not finite, [m].

    Examples:
        >>> import torch
        >>> from fedagrac.core.local import Plan, Result
        >>> plan = Plan.of(steps=[1, 4], lr=0.5)
        >>> step_lengths(plan, torch.zeros(2), Result(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.zeros(2)))
        array([10. ,  2.5])
    """
    start = x.double()
    norms = np.array([float((row.double() - start).norm()) for row in result.models], np.float64)
    with np.errstate(over="ignore"):
        return np.where(result.finite(), norms / (plan.lr * plan.steps), np.nan)
