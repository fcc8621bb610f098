"""The rows that the server keeps for each client.

Rows are made when a client first takes part, so only clients that have taken part need memory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.engines.base import place_of
from fedagrac.files import make_folder, naming

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["ClientTable"]


class ClientTable:
    """Named rows per client, stored in the order in which clients first took part.

    Attributes:
        folder: where to keep the rows in memory-mapped files; None to keep them in memory. The files are unlinked
            at once, so they disappear with the process.

    Examples:
        >>> table = ClientTable(clients=1000)
        >>> table.put(np.array([7, 3]), {"nu": torch.tensor([[7.0], [3.0]])})
        >>> table.rows(np.array([3]))["nu"]
        tensor([[3.]])
        >>> table.unseen(np.array([3, 4])).tolist()
        [4]
    """

    def __init__(self, clients: int, folder: Path | None = None) -> None:
        self.folder = folder
        self._slot = np.full(clients, -1, np.int64)
        self._seen = 0
        self._columns: dict[str, Tensor] = {}
        self._devices: dict[str, torch.device] = {}

    @property
    def num_clients(self) -> int:
        """The number of all clients."""
        return len(self._slot)

    def export(self) -> tuple[npt.NDArray[np.int64], dict[str, Tensor]]:
        """Return the clients that have taken part, in the order in which they first did, and their rows.

        Examples:
            >>> table = ClientTable(clients=10)
            >>> table.put(np.array([7, 3]), {"nu": torch.tensor([[7.0], [3.0]])})
            >>> clients, rows = table.export()
            >>> clients.tolist(), rows["nu"].tolist()
            ([7, 3], [[7.0], [3.0]])
        """
        seen = np.flatnonzero(self._slot >= 0)
        clients = seen[np.argsort(self._slot[seen])]
        return clients, {name: column[: self._seen] for name, column in self._columns.items()}

    @property
    def empty(self) -> bool:
        """Whether no client has taken part yet."""
        return self._seen == 0

    def of(self, keep: npt.NDArray[np.bool_], folder: Path | None, device: torch.device) -> ClientTable:
        """Return a table of the clients to keep, such as those that one process runs, for use on a device.

        Args:
            keep: which of all clients to keep, [M].
            folder: where to keep the rows in files; None to keep them in memory.
            device: the device of the rows.
        """
        clients, rows = self.export()
        kept = keep[clients]
        table = ClientTable(self.num_clients, folder)
        chosen = torch.from_numpy(np.flatnonzero(kept))
        table.put(
            clients[kept], {name: values[chosen.to(values.device)].to(device) for name, values in rows.items()}
        )
        return table

    def unseen(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the clients that have no rows yet."""
        return clients[self._slot[clients] < 0]

    def rows(self, clients: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return copies of the clients' rows by name, each [m, d]."""
        slots, rows = self._slot[clients], {}
        for name, column in self._columns.items():
            place = place_of(slots, column.device)
            chosen = column[place]
            rows[name] = (chosen.clone() if isinstance(place, slice) else chosen).to(self._devices[name])
        return rows

    def put(self, clients: npt.NDArray[np.int64], rows: Mapping[str, Tensor]) -> None:
        """Store the clients' rows, and make room for new clients."""
        new = self.unseen(clients)
        self._slot[new] = np.arange(self._seen, self._seen + len(new))
        self._seen += len(new)
        slots = self._slot[clients]
        for name, values in rows.items():
            column = self._columns.get(name)
            self._devices[name] = values.device
            if column is None and self.folder is not None:
                self._columns[name] = column = self._in_file(name, values)
            elif column is None or len(column) < self._seen:
                capacity = min(len(self._slot), max(self._seen, 2 * (0 if column is None else len(column))))
                grown = torch.zeros((capacity, values.shape[1]), dtype=values.dtype, device=values.device)
                if column is not None:
                    grown[: len(column)] = column
                self._columns[name] = column = grown
            column[place_of(slots, column.device)] = values.to(column.device)

    def _in_file(self, name: str, like: Tensor) -> Tensor:
        """Return a tensor in a file with room for the rows of all clients. Only written rows take disk space."""
        assert self.folder is not None
        make_folder(self.folder)
        path = self.folder / f"{name}-{os.getpid()}-{id(self)}"
        shape = len(self._slot), like.shape[1]
        with naming(path):
            path.touch(0o600)
            rows = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=like.dtype)
            path.unlink()
        return rows.reshape(shape)
