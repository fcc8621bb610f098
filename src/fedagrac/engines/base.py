"""The contract of an engine: what it offers to a round, and where its lanes start.

Algorithm names may not enter here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.local import Plan, Result

__all__ = ["Engine", "place_of", "starts_of"]


class Engine(Protocol):
    """Executes the local rules of a cohort.

    Attributes:
        name: the name in `fedagrac.engines.ENGINES`.
        width: the most clients that run together; None as long as there is no limit.
        compiled: whether steps are compiled.
    """

    name: str
    width: int | None
    compiled: bool

    def run(self, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int) -> Result:
        """Run the local rule of every client and return what they reply.

        Args:
            plan: step counts, step sizes, corrections and what to collect, one row per client.
            x: one start for all clients, [d], or one for each, [m, d]; rows may belong to several runs.
            clients: the clients, [m].
            round: rounds already done.
        """

    def gradients(
        self,
        x: Tensor,
        clients: npt.NDArray[np.int64],
        round: int,
        batch: Literal["full", "first"] = "full",
        buffers: Tensor | None = None,
    ) -> Tensor:
        """Return every client's gradient at x, [m, d], over all its data or over its first batch of the round.

        `buffers` are the clients' moving buffers, [m, q]; None for those of the user's module.
        """


def place_of(rows: npt.NDArray[np.int64], device: torch.device) -> slice | Tensor:
    """Return an index of rows: a slice if they are neighbours, which reads and writes them faster.

    Examples:
        >>> place_of(np.array([3, 4, 5]), torch.device("cpu"))
        slice(3, 6, None)
        >>> place_of(np.array([3, 5]), torch.device("cpu"))
        tensor([3, 5])
    """
    if len(rows) and (np.diff(rows) == 1).all():
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return torch.from_numpy(rows).to(device)


def starts_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return the starts of some rows, [m, d], given one start for all, [d], or one for each row.

    Examples:
        >>> starts_of(torch.tensor([1.0, 2.0]), torch.tensor([0, 3])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
        >>> starts_of(torch.eye(2), torch.tensor([1])).tolist()
        [[0.0, 1.0]]
    """
    return x.expand(len(rows), -1) if x.ndim == 1 else x[rows]
