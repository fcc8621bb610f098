"""The server: an algorithm, its vectors, the rows that it keeps for clients, and the rounds so far.

Engines, sockets, clocks and files do not belong here. Fleets ask the server for plans and bring it replies.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.errors import FedagracError
from fedagrac.rounds.exchange import Order
from fedagrac.rounds.interrupts import Held
from fedagrac.rounds.record import History
from fedagrac.storage.checkpoints import CheckpointError, check_fits

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms import Algorithm
    from fedagrac.algorithms.base import State
    from fedagrac.core.cohort import Cohort, Population
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
    """

    algorithm: Algorithm
    state: State
    table: ClientTable
    history: History = field(default_factory=History)

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
        check_fits(checkpoint, self.algorithm.traits, self.x)
        try:
            self.history = History(checkpoint.history)
        except (ValueError, TypeError) as error:
            raise CheckpointError(f"the checkpoint's history cannot be used: {error}") from None
        self.state = {name: vector.to(device) for name, vector in checkpoint.state.items()}
        self.table = checkpoint.table.of(local, folder, device)

    def admit(self, cohort: Cohort) -> None:
        """Make rows for members that take part for the first time."""
        new = self.table.unseen(cohort.clients)
        if not len(new) and not self.table.empty:
            return
        newcomers = cohort.part(np.isin(cohort.clients, new), cohort.total)
        rows = self.algorithm.enter(self.state, newcomers)
        self._check_names("enter", rows, self.algorithm.traits.rows)
        with Held():
            self.table.put(newcomers.clients, rows)

    def plan(self, whole: Cohort, cohort: Cohort) -> Order:
        """Return the order for a cohort. `whole` takes part; this process runs its members in `cohort`."""
        self.admit(cohort)
        rows = self.table.rows(cohort.clients)
        return Order(self.x, whole, cohort, rows, self.algorithm.plan(self.state, rows, cohort))

    def take_in(self, replies: Replies) -> float:
        """Aggregate the replies of a cohort. Return the training loss."""
        order, cohort = replies.order, replies.order.cohort
        self.state, rows = self.algorithm.aggregate(self.state, order.rows, cohort, order.plan, replies.result)
        self.table.put(cohort.clients, rows)
        loss = np.dot(cohort.weights, replies.result.loss.cpu().numpy())
        return float(cohort.total(torch.tensor(loss, dtype=torch.float64)))

    def _check_names(self, method: str, given: Iterable[str], declared: Iterable[str]) -> None:
        """Check that a method of the algorithm returned what its traits declare. Checkpoints rely on it."""
        if set(given) != set(declared):
            names = [", ".join(sorted(vectors)) or "nothing" for vectors in (given, declared)]
            raise FedagracError(
                f"{type(self.algorithm).__name__}.{method} returned {names[0]}, but its traits declare {names[1]}"
            )
