"""What the server remembers of each client: rows that appear when a client first takes part.

With 100,000 registered clients and a cohort of 100, only clients that have been seen cost memory.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import numpy as np
import torch

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
        folder: keep the rows in files there, which the system reads and writes as memory allows, instead of in
            memory. The files have no name: they vanish with the process.

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
        """How many clients there are in all."""
        return len(self._slot)

    def export(self) -> tuple[npt.NDArray[np.int64], dict[str, Tensor]]:
        """Return the clients seen so far, in the order in which they first took part, and their rows.

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
        """Whether nobody was seen yet."""
        return self._seen == 0

    def of(self, keep: npt.NDArray[np.bool_], folder: Path | None, device: torch.device) -> ClientTable:
        """Return a table of some of the clients, [M], such as those that one process runs, for use on a device."""
        clients, rows = self.export()
        own = keep[clients]
        table = ClientTable(self.num_clients, folder)
        chosen = torch.from_numpy(np.flatnonzero(own))
        table.put(
            clients[own], {name: values[chosen.to(values.device)].to(device) for name, values in rows.items()}
        )
        return table

    def unseen(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return those of the clients that have no rows yet."""
        return clients[self._slot[clients] < 0]

    def rows(self, clients: npt.NDArray[np.int64]) -> dict[str, Tensor]:
        """Return the clients' rows by name, each [m, d]."""
        slots = torch.from_numpy(self._slot[clients])
        return {
            name: column[slots.to(column.device)].to(self._devices[name]) for name, column in self._columns.items()
        }

    def put(self, clients: npt.NDArray[np.int64], rows: Mapping[str, Tensor]) -> None:
        """Store the clients' rows, making room for those not seen before."""
        new = self.unseen(clients)
        self._slot[new] = np.arange(self._seen, self._seen + len(new))
        self._seen += len(new)
        slots = torch.from_numpy(self._slot[clients])
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
            column[slots.to(column.device)] = values.to(column.device)

    def _in_file(self, name: str, like: Tensor) -> Tensor:
        """Return room for the rows of all clients in a file, which takes space only for what is written."""
        assert self.folder is not None
        make_folder(self.folder)
        path = self.folder / f"{name}-{os.getpid()}-{id(self)}"
        shape = len(self._slot), like.shape[1]
        with naming(path):
            path.touch(0o600)
            rows = torch.from_file(str(path), shared=True, size=shape[0] * shape[1], dtype=like.dtype)
            path.unlink()
        return rows.reshape(shape)
