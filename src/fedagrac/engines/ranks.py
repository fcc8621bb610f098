"""Ranks: several processes that run one simulation together.

Each rank holds the state of a fixed share of the clients and runs them with its own engine. All ranks draw the
same cohorts and step counts, and sums over clients are added up over all ranks. Algorithms know nothing of
processes, and results equal those of one process, apart from rounding. A launcher such as torchrun or mpirun
starts the processes.
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

LAUNCHERS = (  # size, rank and rank on the host, as torchrun, Open MPI, MPICH and Slurm name them
    ("WORLD_SIZE", "RANK", "LOCAL_RANK"),
    ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"),
    ("PMI_SIZE", "PMI_RANK", "MPI_LOCALRANKID"),
    ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID"),
)


class LostRankError(FedagracError):
    """Another process of the run has ended unexpectedly."""


def balanced_shares(steps: npt.NDArray[np.int64], ranks: int) -> npt.NDArray[np.int64]:
    """Return the rank of each client, [M]: longest first, each client goes to the rank with the least work so far.

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
    """The processes of a simulation, as one of them sees them.

    Attributes:
        rank: the number of this process; rank 0 evaluates, writes and shows progress.
        size: the number of processes.
        owner: the rank that runs each client, [M]; None if one process runs all.
    """

    rank: int = 0
    size: int = 1
    owner: npt.NDArray[np.int64] | None = field(default=None)

    def share(self, steps: npt.NDArray[np.int64]) -> Ranks:
        """Return these ranks with the clients shared out by their expected steps."""
        return self if self.size == 1 else replace(self, owner=balanced_shares(steps, self.size))

    def own(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Return which of some clients this rank runs, [m]."""
        return np.ones(len(clients), np.bool_) if self.owner is None else self.owner[clients] == self.rank

    def total(self, tensor: Tensor) -> Tensor:
        """Return the sum of the ranks' tensors, on all ranks."""
        if self.size == 1:
            return tensor
        tensor = tensor.contiguous()
        try:
            distributed.all_reduce(tensor)
        except RuntimeError as error:
            raise self._lost(error) from error
        return tensor

    def agree(self, value: T) -> T:
        """Return rank 0's value on all ranks; JSON must be able to hold it."""
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
        """Return, on all ranks, the positive number of the lowest rank that gives one, or None."""
        if self.size == 1:
            return number
        given = torch.zeros(self.size, dtype=torch.int64)
        given[self.rank] = number or 0
        return next((n for n in self.total(given).tolist() if n), None)

    def wait(self) -> None:
        """Wait until all ranks have reached this point."""
        self.total(torch.zeros(1))

    def _lost(self, error: RuntimeError) -> LostRankError:
        reason = re.sub(r"^\[[^\]]*\] *", "", str(error).strip().splitlines()[0]).split(". ")[0]
        return LostRankError(
            f"another process of this run is gone, so process {self.rank} of {self.size} stops too ({reason}); "
            "start the run again to resume from its last checkpoint"
        )


ALONE = Ranks()
"""The ranks of a single process."""


def current_ranks() -> Ranks:
    """Return the ranks of this process; `ALONE` unless torch.distributed was started."""
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return ALONE


def launched(environment: Mapping[str, str] = os.environ) -> tuple[int, int, int] | None:
    """Return (size, rank, rank on the host) as a launcher set them, or None for a single process.

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
            numbers = int(environment[size]), int(environment[rank]), int(environment.get(local, 0))
            return numbers if numbers[0] > 1 else None
    return None


def start_ranks() -> Ranks:
    """Join the processes that a launcher started with this one and return the ranks; `ALONE` without a launcher.

    With GPUs, every process takes the one with its number on the host.
    """
    numbers = launched()
    if numbers is None or not distributed.is_available():
        return ALONE
    if not distributed.is_initialized():
        size, rank, local = numbers
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "29500")
        backend = "gloo"
        if torch.cuda.is_available():
            torch.cuda.set_device(local % torch.cuda.device_count())
            backend = "cpu:gloo,cuda:nccl"
        distributed.init_process_group(backend, rank=rank, world_size=size)
    return current_ranks()


def leave_ranks() -> None:
    """Leave the other processes at the end of the program."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
