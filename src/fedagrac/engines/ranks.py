"""Ranks: several processes that run one simulation together.

Each rank holds the state of a fixed share of the clients and runs them with its own engine. All ranks draw the
same cohorts and step counts, and sums over clients are added up over all ranks. Algorithms know nothing of
processes, and results equal those of one process, apart from rounding. A launcher such as torchrun or mpirun
starts the processes.
"""

from __future__ import annotations

import heapq
import json
import logging
import re
import socket
import threading
import time
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import torch
from torch import distributed

from fedagrac.engines.launchers import Launch, find_launch, rank_seconds, why_alone
from fedagrac.errors import FedagracError, InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = [
    "ALONE",
    "LostRankError",
    "MissingRankError",
    "Ranks",
    "balanced_shares",
    "current_ranks",
    "leave_ranks",
    "start_ranks",
]

T = TypeVar("T")

log = logging.getLogger("fedagrac")

MEETING = "fedagrac"
"""The prefix of what processes write down where they meet."""

POLL_SECONDS = 0.1
"""How often a process looks whether the others have come. Signals are handled between two looks."""

CONNECT_SECONDS = 2.0
"""How long one attempt to connect takes at most."""

STORE_TIMEOUT = timedelta(minutes=30)
"""How long a process waits for what another writes down after they have met; the default of torch."""

SLOW_SECONDS = 5.0
"""After this time rank 0 says whom it waits for."""


class LostRankError(FedagracError):
    """Another process of the run has ended unexpectedly."""


class MissingRankError(FedagracError):
    """Other processes of the run did not come."""


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
        return LostRankError(
            f"another process of this run is gone, so process {self.rank} of {self.size} stops too "
            f"({first_line(error)}); start the run again to resume from its last checkpoint"
        )


ALONE = Ranks()
"""The ranks of a single process."""


def current_ranks() -> Ranks:
    """Return the ranks of this process; `ALONE` unless torch.distributed was started."""
    if distributed.is_available() and distributed.is_initialized():
        return Ranks(distributed.get_rank(), distributed.get_world_size())
    return ALONE


def start_ranks() -> Ranks:
    """Join the processes that a launcher started with this one and return the ranks; `ALONE` without a launcher.

    `fedagrac.engines.launchers` says what counts as a launcher. Processes wait for one another for
    FEDAGRAC_RANK_SECONDS, 60 by default. With GPUs, every process takes the one with its number on the host.
    """
    launch, seconds = find_launch(), rank_seconds()
    if launch is None or not distributed.is_available():
        reason = why_alone()
        if reason is not None:
            log.info(reason)
        return ALONE
    if not distributed.is_initialized():
        if torch.cuda.is_available():
            torch.cuda.set_device(launch.local % torch.cuda.device_count())
        _join(launch, seconds)
    return current_ranks()


class _Meeting(threading.Thread):
    """Meets the other processes in a thread, because torch handles no signals while it waits.

    Attributes:
        arrived: how many processes are known to have come; 0 before this process has reached the meeting place.
        missing: the ranks that had not come in time.
        error: what ended the meeting, or None.
        is_called_off: whether the main thread no longer waits.
        over: set when the thread has left torch. A `Thread.join` that a signal interrupts takes the thread for
            ended (CPython 3.11), so the main thread waits for this instead.
    """

    def __init__(self, launch: Launch, deadline: float) -> None:
        super().__init__(name="fedagrac-ranks", daemon=True)
        self.launch, self.deadline = launch, deadline
        self.arrived = 0
        self.missing: list[int] = []
        self.error: Exception | None = None
        self.is_called_off = False
        self.over = threading.Event()

    def run(self) -> None:
        """Meet the others, and keep the error if that fails."""
        try:
            self._meet()
        except Exception as error:  # the main thread reports it
            self.error = error
        finally:
            self.over.set()

    @property
    def late(self) -> bool:
        """Whether there is no time left."""
        return self.is_called_off or time.monotonic() > self.deadline

    def _meet(self) -> None:
        """Wait until all have come, then form the group with them."""
        launch, place = self.launch, self._place()
        place.set_timeout(STORE_TIMEOUT)
        store = distributed.PrefixStore(f"{MEETING}/{launch.job}", place)  # type: ignore[attr-defined]
        is_new = store.add(str(launch.rank), 1) == 1
        self.arrived = store.add("arrived", int(is_new))
        while self.arrived < launch.size:
            if self.late:
                self.missing = [rank for rank in range(launch.size) if not store.check([str(rank)])]
                return
            time.sleep(POLL_SECONDS)
            self.arrived = store.add("arrived", 0)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=store, rank=launch.rank, world_size=launch.size)

    def _place(self) -> Any:
        """Open the meeting place on rank 0, or wait until it answers."""
        launch = self.launch
        is_host = launch.rank == 0 and not launch.hosted
        while True:
            try:
                if not is_host:  # torch prints every refused connection, and cannot be interrupted meanwhile
                    socket.create_connection((launch.address, launch.port), CONNECT_SECONDS).close()
                return distributed.TCPStore(  # type: ignore[attr-defined]
                    launch.address,
                    launch.port,
                    launch.size,
                    is_master=is_host,
                    timeout=timedelta(seconds=CONNECT_SECONDS),
                    wait_for_workers=False,
                )
            except (OSError, RuntimeError) as error:
                if self.late or "EADDRINUSE" in str(error):
                    raise
                time.sleep(POLL_SECONDS)


def _join(launch: Launch, seconds: float) -> None:
    """Wait until all processes have come and the group is made. Signals are handled meanwhile."""
    start = time.monotonic()
    meeting = _Meeting(launch, start + seconds)
    meeting.start()
    said = launch.rank > 0
    try:
        while not meeting.over.is_set() and time.monotonic() < meeting.deadline + CONNECT_SECONDS + 1:
            meeting.over.wait(POLL_SECONDS)
            if not said and time.monotonic() > start + SLOW_SECONDS:
                missing, said = launch.size - max(meeting.arrived, 1), True
                log.info(
                    "waiting for %d of %d processes at %s:%d", missing, launch.size, launch.address, launch.port
                )
    finally:
        meeting.is_called_off = True
        meeting.over.wait(CONNECT_SECONDS + 1)  # a thread inside torch must not outlive the interpreter
    if "EADDRINUSE" in str(meeting.error):
        accepted = "a free port: another program uses this one; set MASTER_PORT to another for all processes"
        raise InputError("MASTER_PORT", launch.port, accepted)
    if not meeting.over.is_set() or not distributed.is_initialized():
        raise MissingRankError(_missing(launch, meeting, seconds))


def _missing(launch: Launch, meeting: _Meeting, seconds: float) -> str:
    """Return which processes are missing and what to do."""
    place = f"{launch.address}:{launch.port}"
    number = launch.size - meeting.arrived
    if not meeting.arrived:
        who = f"nobody answers at {place}, where {launch.size} processes should meet,"
    elif number:
        ranks = ", ".join(map(str, meeting.missing[:8])) + (", ..." if number > 8 else "")
        who = f"{number} of {launch.size} processes are missing at {place} (rank {ranks})"
    else:
        who = f"all {launch.size} processes came to {place}, but did not connect to one another"
    reason = "" if meeting.error is None else f" ({first_line(meeting.error)})"
    return (
        f"{who} after {seconds:g} s{reason}; this process is rank {launch.rank} by {launch.launcher}. "
        "Check that the others run and reach this host, give them more time with FEDAGRAC_RANK_SECONDS, "
        f"or unset {launch.variables} to run as a single process"
    )


def first_line(error: Exception) -> str:
    """Return the first sentence of an error of torch, without the place in its source.

    Examples:
        >>> first_line(RuntimeError("[pair.cc:534] Connection closed by peer. This is bad"))
        'Connection closed by peer'
    """
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return re.sub(r"^\[[^\]]*\] *", "", lines[0]).split(". ")[0]


def leave_ranks() -> None:
    """Leave the other processes at the end of the program."""
    if distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()
