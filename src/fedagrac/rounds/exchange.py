"""What a server and its fleet exchange: the server sends an order, the fleet returns replies.

There may be fewer replies than clients that were asked. Replies may arrive at different times and hold fewer steps
than were planned. The fleet and the guard decide which replies count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.core.local import mean_gradient

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms.base import Rows
    from fedagrac.core.cohort import Cohort
    from fedagrac.core.local import Plan, Result

__all__ = ["ClientReply", "Contact", "Lengths", "Order", "Replies", "Spent", "step_lengths"]

NOT_SENT = -1.0
"""The length of a vector that a client did not send."""

STILL = 1e-9
"""Buffers that move less than this in a step count as moving this far."""


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

    def with_gradients(self, rows: Tensor) -> Order:
        """Return the order with the gradients at x~ that its members sent, as the plan asked (`Plan.gradient`)."""
        return replace(self, plan=replace(self.plan, at_start=rows))

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


@dataclass
class Contact:
    """The messages between the server and one client of a live fleet in a round.

    Attributes:
        sent: the bytes of the vectors sent to the client.
        received: the bytes of the vectors received from it.
        seconds: after how many seconds its reply arrived; None if none did.
        seen: when its last readable message arrived, in seconds since 1970; None if none did.
        fault: what went wrong last, in words; None if nothing did.
    """

    sent: int = 0
    received: int = 0
    seconds: float | None = None
    seen: float | None = None
    fault: str | None = None


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
        contacts: the messages of each client of a live fleet, by its number; empty in a simulation.
    """

    order: Order
    result: Result
    spent: Spent
    arrived: npt.NDArray[np.float64]
    asked: int | None = None
    dropped: Mapping[int, str] = field(default_factory=dict)
    contacts: Mapping[int, Contact] = field(default_factory=dict)

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
            return replace(self, dropped=all_dropped)
        result = self.result.part(np.flatnonzero(kept[local]))
        order = self.order.alone(np.flatnonzero(kept))
        return replace(self, order=order, result=result, arrived=self.arrived[kept], dropped=all_dropped)


def step_lengths(plan: Plan, x: Tensor, result: Result) -> npt.NDArray[np.float64]:
    """Return every member's |x_i - x~| / (eta_i K_i), NaN if its reply is not finite, [m].

    Examples:
        >>> import torch
        >>> from fedagrac.core.local import Plan, Result
        >>> plan = Plan.of(steps=[1, 4], lr=0.5)
        >>> step_lengths(plan, torch.zeros(2), Result(torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.zeros(2)))
        array([10. ,  2.5])
    """
    starts = [x] * len(plan) if plan.start is None else plan.start
    moved = zip(result.models, starts, strict=True)
    norms = np.array([float((row.double() - start.double()).norm()) for row, start in moved], np.float64)
    with np.errstate(over="ignore"):
        return np.where(result.finite(), norms / (plan.lr * plan.steps), np.nan)


@dataclass(frozen=True, eq=False)
class Lengths:
    """How long the vectors of each reply are, [m] each; NOT_SENT where there is none.

    Attributes:
        update: |x_i - x~| / (eta_i K_i), NaN if any vector of the reply is not finite.
        first: the norm of the first gradient.
        mean: the norm of the mean gradient, which was sent as a sum or is reconstructed from the model.
        total: the norm of the mean gradient if sums were sent.
        buffers: the norm of the moving buffers, at least 1 and at least what it was before the round.
        moved: how far the moving buffers went in each step, at least STILL.
        gradient: the norm of the gradient at x~ if it was sent with the model.

    Examples:
        >>> import torch
        >>> from fedagrac.core.local import Plan, Result
        >>> plan = Plan.of(steps=[1, 4], lr=0.5, first_steps=[0, 1], mean=True)
        >>> models, first = torch.tensor([[3.0, 4.0], [3.0, 4.0]]), torch.tensor([[0.0, 0.0], [6.0, 8.0]])
        >>> lengths = Lengths.of(plan, torch.zeros(2), Result(models, torch.zeros(2), first))
        >>> lengths.update, lengths.first, lengths.total
        (array([10. ,  2.5]), array([-1., 10.]), array([-1., -1.]))
    """

    update: npt.NDArray[np.float64]
    first: npt.NDArray[np.float64]
    mean: npt.NDArray[np.float64]
    total: npt.NDArray[np.float64]
    buffers: npt.NDArray[np.float64]
    moved: npt.NDArray[np.float64]
    gradient: npt.NDArray[np.float64]

    @classmethod
    def of(cls, plan: Plan, x: Tensor, result: Result) -> Lengths:
        """Return the lengths of the replies to a plan."""
        none = np.full(len(plan), NOT_SENT)
        first, mean, total, buffers, moved = none, none, none, none, none
        if result.first is not None:
            first = np.where(plan.first_steps > 0, _norms(result.first), NOT_SENT)
        if len(plan) and (plan.mean or result.total is not None):
            mean = _norms(mean_gradient(plan, x, result))
        if result.total is not None:
            total = mean
        if result.buffers is not None and plan.buffers is not None:
            buffers = np.maximum(1.0, np.maximum(_norms(result.buffers), _norms(plan.buffers)))
            moved = np.maximum(STILL, _norms(result.buffers - plan.buffers) / plan.steps)
        gradient = none if not plan.gradient or plan.at_start is None else _norms(plan.at_start)
        return cls(step_lengths(plan, x, result), first, mean, total, buffers, moved, gradient)

    def rows(self) -> npt.NDArray[np.float64]:
        """Return all lengths as one matrix, one row for each attribute."""
        return np.stack(astuple(self))


def _norms(rows: Tensor) -> npt.NDArray[np.float64]:
    """Return the norm of each row, computed in float64, [m]."""
    return np.array([float(row.double().norm()) for row in rows], np.float64)
