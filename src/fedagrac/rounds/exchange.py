"""What a server and its fleet exchange: the server sends an order, the fleet returns replies.

There may be fewer replies than clients that were asked. Replies may arrive at different times and hold fewer steps
than were planned. The fleet and the guard decide which replies count.
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
    """The cost of an exchange: seconds on the fleet's clock, bytes to the clients, and bytes from them."""

    seconds: float = 0.0
    down: int = 0
    up: int = 0


@dataclass(frozen=True, eq=False)
class Order:
    """What a server asks of a cohort in one round.

    Attributes:
        x: the model that clients start from.
        whole: all members of the cohort.
        cohort: the members that this process runs; all of them unless several processes share the fleet.
        rows: the vectors that the server keeps for the members in `cohort`.
        plan: what the members in `cohort` are asked to do. In replies, its steps are those that were done.
    """

    x: Tensor
    whole: Cohort
    cohort: Cohort
    rows: Rows
    plan: Plan

    @property
    def local(self) -> npt.NDArray[np.bool_]:
        """Which members of the whole cohort this process runs, [m]."""
        return np.isin(self.whole.clients, self.cohort.clients)

    def alone(self, members: npt.NDArray[np.int64]) -> Order:
        """Return the order for some members of the whole cohort, with weights normalised over these members."""
        local = self.local
        kept = np.isin(np.arange(len(self.whole)), members)
        rows = np.flatnonzero(kept[local])
        remaining = self.whole.alone(members)
        return Order(
            x=self.x,
            whole=remaining,
            cohort=remaining if local.all() else remaining.part(local[members], self.cohort.total),
            rows={name: values[torch.from_numpy(rows)] for name, values in self.rows.items()},
            plan=self.plan.part(rows),
        )


@dataclass(frozen=True)
class ClientReply:
    """The numbers of one client's reply.

    Attributes:
        client: the number of the client.
        steps: the number of its local steps.
        loss: its mean training loss over those steps.
        length: |x_i - x~| / (eta_i K_i), the length of its mean step per unit of step size.
    """

    client: int
    steps: int
    loss: float
    length: float


@dataclass(frozen=True, eq=False)
class Replies:
    """The replies to an order.

    Iterating yields a `ClientReply` for each member that this process runs.

    Attributes:
        order: the part of the order that was answered.
        result: the replies of its members, in the order of `order.cohort`.
        spent: the cost of the round, including clients that do not count.
        arrived: after how many seconds of the round each reply arrived, in the order of `order.whole`.
        asked: how many clients were asked; None if every client that is asked replies.
        dropped: why each client that was asked but does not count was dropped, by its number.
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
        """Return the replies without those of dropped clients; all of them if none would be left."""
        all_dropped = {**self.dropped, **dropped}
        whole, local = self.order.whole, self.order.local
        kept = ~np.isin(whole.clients, list(dropped))
        if kept.all() or not kept.any():
            return Replies(self.order, self.result, self.spent, self.arrived, self.asked, all_dropped)
        result = self.result.part(np.flatnonzero(kept[local]))
        order = self.order.alone(np.flatnonzero(kept))
        return Replies(order, result, self.spent, self.arrived[kept], self.asked, all_dropped)


def step_lengths(plan: Plan, x: Tensor, result: Result) -> npt.NDArray[np.float64]:
    """Return every member's |x_i - x~| / (eta_i K_i), NaN if its reply is not finite, [m].

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
