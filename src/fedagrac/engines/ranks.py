"""Many processes, one simulation: every process runs a fixed share of the clients.

Each process, a rank, holds the state of its own clients and runs them with its own engine; all draw the same
cohorts and the same step counts, and the sums over clients that algorithms ask for are added up over all ranks. So
algorithms know nothing of processes, and the numbers are those of one process, apart from rounding.

Start with `torchrun --nproc-per-node N -m fedagrac run ...` or `mpirun -n N ...`.
"""

from __future__ import annotations

import heapq
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import distributed

from fedagrac.errors import FedagracError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["ALONE", "LostRankError", "Ranks", "balanced_shares", "current_ranks", "leave_ranks", "start_ranks"]

T = TypeVar("T")

LAUNCHERS = (  # how many processes, which one, which one on its host: torchrun, Open MPI, MPICH, Slurm
    ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


class LostRankError(FedagracError):
    """Another process of the run is gone."""


def balanced_shares(steps: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """Return which rank runs each client, [M]: the longest first, each to the rank with the least work so far.

    Examples:
        >>> balanced_shares(np.array([9, 1, 1, 1, 5, 1]), 2).tolist()
        [0, 1, 1, 1, 1, 1]
    """
    owner = np.zeros(len(steps), np.int64)
    loads = [(0, rank) for rank in range(ranks)]
    for client in np.lexsort((np.arange(len(steps)), -steps)):
        load, rank = heapq.heappop(loads)
        owner[client] = rank
        heapq.heappush(loads, (load + int(steps[client]), rank))
    return owner


@dataclass(frozen=True, eq=False)
class Ranks:
    """The processes of a simulation, seen from one of them.

    Attributes:
        rank: which one this is; rank 0 evaluates, writes and shows progress.
        size: how many there are.
        owner: which rank runs each client, [M]; None while it is alone.
    """

    rank: int = 0
    size: int = 1
    owner: npt.NDArray[np.int64] | None = field(default=None)

    def share(self, steps: npt.NDArray[np.int64]) -> Ranks:
        """Return the same ranks with the clients shared out by how many steps they are expected to run."""
        return self if self.size == 1 else replace(self, owner=balanced_shares(steps, self.size))

    def own(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Say which of some clients this rank runs, [m]."""
        return np.ones(len(clients), np.bool_) if self.owner is None else self.owner[clients] == self.rank

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of what all ranks give."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        try:
            distributed.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lost(error) from error
        return tensor

    def agree(self, value: T) -> T:
        """Return what rank 0 gives, on all ranks; anything that JSON can hold."""
        if self.size == 1:
            return value
        text = json.dumps(value).encode() if self.rank == 0 else b""
        length = torch.tensor([len(text)])
        try:
            distributed.broadcast(length, src=0)
            content = torch.frombuffer(bytearray(text or bytes(int(length))), dtype=torch.uint8)
            distributed.broadcast(content, src=0)
        except RuntimeError as error:
            raise self._lost(error) from error
        agreed: T = json.loads(bytes(content.tolist()))
        return agreed

    def first_given(self, number: int | None) -> int | None:
        """Return a number above 0 that any rank gives, on all ranks: that of the lowest such rank, or None."""
        if self.size == 1:
            return number
        given = torch.zeros(self.size, dtype=torch.int64)
        given[self.rank] = number or 0
        return next((n for n in self.total(given).tolist() if n), None)

    def wait(self) -> None:
        """Wait until all ranks are here."""
        self.total(torch.zeros(1))

    def _lost(self, error: RuntimeError) -> LostRankError:
        reason = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).split(". ")[0]
        return LostRankError(
            f"another process of this run is gone, so process {self.rank} of {self.size} stops too ({reason}); "
            "start the run again to resume from its last checkpoint"
        )


ALONE = Ranks()
"""One process."""


def current_ranks() -> Ranks:
    """Return the ranks of this process: alone, unless torch.distributed was started."""
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return ALONE


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """Return how many processes a launcher started, which one this is, and which one on its host; None for one.

    Examples:
        >>> launched({"WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"})
        (4, 3, 1)
        >>> launched({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"})
        (2, 0, 0)
        >>> launched({"WORLD_SIZE": "1", "RANK": "0"}) is None
        True
    """
    for size, rank, local in LAUNCHERS:
        if size in environment and rank in environment:
            found = int(environment[size]), int(environment[rank]), int(environment.get(local, 0))
            return found if found[0] > 1 else None
    return None


def start_ranks() -> Ranks:
    """Join the processes that torchrun or mpirun started with this one; alone where there are none.

    On a GPU machine every process takes the GPU of its number on the host.
    """
    found = launched()
    if found is None or not distributed.is_available():
        return ALONE
    if not distributed.is_initialized():
        size, rank, local = found
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(local % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, rank=rank, world_size=size)
    return current_ranks()


def leave_ranks() -> None:
    """Take leave of the others, at the end of the program."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
