"""The server: an algorithm, its vectors, the rows that it keeps for clients, and the rounds so far.

Engines, sockets, clocks and files do not belong here. Fleets ask the server for plans and bring it replies.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.core.local import check_plan
from fedagrac.errors import FedagracError, InputError
from fedagrac.rounds.exchange import Order
from fedagrac.rounds.interrupts import Held
from fedagrac.rounds.own_models import OwnModels
from fedagrac.rounds.record import History
from fedagrac.storage.checkpoints import BUFFERS, CheckpointError, check_fits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms import Algorithm
    from fedagrac.algorithms.base import Rows, State
    from fedagrac.core.cohort import Cohort, Population
    from fedagrac.core.layout import Layout
    from fedagrac.engines import Ranks
    from fedagrac.rounds.exchange import Replies
    from fedagrac.storage.checkpoints import Checkpoint
    from fedagrac.storage.clients import ClientTable

__all__ = ["Server"]


@dataclass(eq=False)
class Server:
    """The server of one run.

    Attributes:
        algorithm: plans rounds and aggregates replies.
        state: the server's vectors; `state["x"]` is the global model.
        table: the rows that it keeps for each client, or for those that this process runs.
        history: the rounds so far.
        first_buffers: the moving buffers of the user's module, [q]; None if it has none, or if they stay frozen.
        own_buffers: whether each client goes on with the buffers that it ended with ("local"), instead of with the
            mean over the cohort ("average").
        buffers: the weighted mean of the buffers with which the last cohort ended, [q]. The model is evaluated
            with it.
    """

    algorithm: Algorithm
    state: State
    table: ClientTable
    history: History = field(default_factory=History)
    first_buffers: Tensor | None = None
    own_buffers: bool = False
    buffers: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.begin_buffers(self.first_buffers)
        if BUFFERS in self.algorithm.traits.state or BUFFERS in self.algorithm.traits.rows:
            accepted = f"other names than {BUFFERS!r}, under which the buffers of the module are kept"
            raise InputError(f"{type(self.algorithm).__name__}.traits", BUFFERS, accepted)

    def begin_buffers(self, buffers: Tensor | None) -> None:
        """Set the moving buffers with which the run begins."""
        self.first_buffers = self.buffers = buffers

    @property
    def rounds_done(self) -> int:
        """The number of rounds taken in so far."""
        return len(self.history)

    @property
    def x(self) -> Tensor:
        """The global model."""
        return self.state["x"]

    def start(self, population: Population) -> None:
        """Make the state before round 1."""
        self.state = self.algorithm.start(self.x, population)
        self._check_names("start", self.state, self.algorithm.traits.state)

    def restore(
        self, checkpoint: Checkpoint, local: npt.NDArray[np.bool_], folder: Path | None, device: torch.device
    ) -> None:
        """Resume from a checkpoint.

        Args:
            checkpoint: the checkpoint, with its history.
            local: which of all clients this process runs, [M].
            folder: where to keep the clients' rows in files; None to keep them in memory.
            device: the device of the vectors.
        """
        if checkpoint.table.num_clients != len(local) or len(checkpoint.history) != checkpoint.round:
            raise CheckpointError("the checkpoint belongs to another experiment, or its history is missing")
        check_fits(checkpoint, self.algorithm.traits, self.x, self.first_buffers, self.own_buffers)
        try:
            self.history = History(checkpoint.history)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's history cannot be used: {error}") from None
        state = {name: vector.to(device) for name, vector in checkpoint.state.items()}
        self.buffers = state.pop(BUFFERS, None)
        self.state = state
        self.table = checkpoint.table.of(local, folder, device)

    def admit(self, cohort: Cohort) -> None:
        """Make rows for members that take part for the first time."""
        new = self.table.unseen(cohort.clients)
        if not len(new) and not self.table.empty:
            return
        newcomers = cohort.part(np.isin(cohort.clients, new), cohort.total)
        rows = self.algorithm.enter(self.state, newcomers)
        self._check_names("enter", rows, self.algorithm.traits.rows)
        if self.first_buffers is not None and self.own_buffers:
            rows = {**rows, BUFFERS: self.first_buffers.expand(len(newcomers), -1)}
        with Held():
            self.table.put(newcomers.clients, rows)

    def plan(self, whole: Cohort, cohort: Cohort) -> Order:
        """Return the order for a cohort. `whole` takes part; this process runs its members in `cohort`."""
        self.admit(cohort)
        rows = self.table.rows(cohort.clients)
        own = rows.pop(BUFFERS, None)
        plan = self.algorithm.plan(self.state, rows, cohort)
        check_plan(f"{type(self.algorithm).__name__}.plan", plan, cohort, len(self.x))
        if self.buffers is not None:
            plan = replace(plan, buffers=self.buffers.expand(len(cohort), -1) if own is None else own)
        return Order(plan.origin(self.x), whole, cohort, rows, plan)

    def buffers_of(self, clients: npt.NDArray[np.int64], round: int) -> Tensor | None:
        """Return the moving buffers with which clients begin a round, [m, q]; None if there are none."""
        if self.first_buffers is None or self.buffers is None:
            return None
        if round == 0:
            return self.first_buffers.expand(len(clients), -1)
        if not self.own_buffers:
            return self.buffers.expand(len(clients), -1)
        return self.table.rows(clients)[BUFFERS]

    def own_models(self, weights: npt.NDArray[np.float64], ranks: Ranks, layout: Layout) -> OwnModels | None:
        """Return the models that clients use; None if all use the server's model with its moving buffers.

        A client that has not taken part yet uses the server's model, with the buffers of the user's module.
        """
        personal = self.algorithm.traits.personal
        first = self.first_buffers if self.own_buffers else None
        if first is None and not personal:
            return None

        def of(client: int) -> tuple[Tensor, Tensor | None]:
            here = np.array([client])
            seen, local = len(self.table.unseen(here)) == 0, bool(ranks.own(here)[0])
            x, buffers = self.x, first
            if seen:
                rows = self.table.rows(here)
                own = rows.pop(BUFFERS, None)
                buffers = None if own is None else own[0]
                x = self.algorithm.own_models(self.state, rows, layout)[0] if personal else x
            if ranks.size > 1 and personal:
                x = ranks.total(x if local else torch.zeros_like(x))
            if ranks.size > 1 and buffers is not None:
                buffers = ranks.total(buffers if local else torch.zeros_like(buffers))
            return x, self.buffers if buffers is None else buffers

        return OwnModels(weights, of, personal)

    @property
    def saved_state(self) -> State:
        """The vectors that a checkpoint stores: those of the algorithm, and the moving buffers."""
        return self.state if self.buffers is None else {**self.state, BUFFERS: self.buffers}

    def take_in(self, replies: Replies) -> float:
        """Aggregate the replies of a cohort. Return the training loss."""
        order, cohort = replies.order, replies.order.cohort
        state, rows = self.algorithm.aggregate(self.state, order.rows, cohort, order.plan, replies.result)
        self._check_names("aggregate", state, self.algorithm.traits.state)
        self._check_names("aggregate", rows, self.algorithm.traits.rows)
        self._check_shapes(state, rows, len(cohort))
        self.state = state
        if replies.result.buffers is not None:
            self.buffers = cohort.sum(cohort.weights, replies.result.buffers)
            if self.own_buffers:
                rows = {**rows, BUFFERS: replies.result.buffers}
        self.table.put(cohort.clients, rows)
        loss = np.dot(cohort.weights, replies.result.loss.cpu().numpy())
        second = replies.result.second
        if second is not None and not bool(torch.isfinite(second).all()):
            loss = np.nan  # the clients' own models diverged
        return float(cohort.total(torch.tensor(loss, dtype=torch.float64)))

    def _check_names(self, method: str, given: Iterable[str], declared: Iterable[str]) -> None:
        """Check that a method of the algorithm returned what its traits declare. Checkpoints rely on it."""
        if set(given) != set(declared):
            names = [", ".join(sorted(vectors)) or "nothing" for vectors in (given, declared)]
            raise FedagracError(
                f"{type(self.algorithm).__name__}.{method} returned {names[0]}, but its traits declare {names[1]}"
            )

    def _check_shapes(self, state: State, rows: Rows, members: int) -> None:
        """Refuse a next model that is not like x, and rows of which there is not one for each member."""
        source = f"{type(self.algorithm).__name__}.aggregate"
        x = state["x"]
        if x.shape != self.x.shape or x.dtype != self.x.dtype:
            accepted = f"a vector of {len(self.x)} numbers of {self.x.dtype}"
            raise InputError(f"{source} x", f"shape {list(x.shape)} of {x.dtype}", accepted)
        for name, values in rows.items():
            if values.ndim != 2 or len(values) != members:
                accepted = f"one row for each of {members} clients"
                raise InputError(f"{source} rows {name}", f"shape {list(values.shape)}", accepted)
