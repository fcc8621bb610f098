"""Step schedules: the number of local steps of each client in each round, K_i(t).

A step is one SGD step on one batch, never an epoch and never a sample. A schedule returns the K of all M clients
in a round; what it draws comes from the keyed streams.
"""

from __future__ import annotations

import inspect
import numbers
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.errors import InputError, count, fraction, non_negative, one_of, positive
from fedagrac.heterogeneity.traces import frame_rows, is_frame, read_trace

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    Counts = Sequence[int] | npt.NDArray[np.integer[Any]]

__all__ = [
    "Computed",
    "Constant",
    "Epochs",
    "Explicit",
    "Extreme",
    "Gaussian",
    "Geometric",
    "Linear",
    "StepSchedule",
    "Uniform",
    "checked_counts",
    "step_schedule",
]

Mode = Literal["fixed", "random"]

MOST_STEPS = 10_000_000
"""The most steps of a client in a round; the limit exists because a round's batches are drawn at once."""


@dataclass(frozen=True)
class StepSchedule(ABC):
    """The base of all schedules."""

    @abstractmethod
    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K of all clients, [clients], each at least 1, in the round after `round` rounds."""

    def check(self, clients: int, rounds: int) -> None:  # noqa: B027  # most schedules fit any federation
        """Check that the schedule fits the number of clients and rounds."""

    @property
    def source(self) -> str:
        """What returns the counts, as messages name it."""
        return f"{type(self).__name__}.counts"


def checked_counts(schedule: StepSchedule, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
    """Return K of all clients, [clients]; refuse counts of a schedule of the user's own that cannot be used.

    Examples:
        >>> checked_counts(Constant(5), round=0, clients=2, seed=0).tolist()
        [5, 5]
    """
    counts = np.asarray(schedule.counts(round, clients, seed))
    source = f"{schedule.source} of round {round + 1}"
    if counts.shape != (clients,):
        raise InputError(source, f"shape {counts.shape}", f"one number for each of {clients} clients")
    if counts.dtype.kind not in "iu":
        raise InputError(source, f"numbers of type {counts.dtype}", "integers")
    if len(counts) and not (counts.min() >= 1 and counts.max() <= MOST_STEPS):
        client = int(np.argmax((counts < 1) | (counts > MOST_STEPS)))
        accepted = f"from 1 to {MOST_STEPS} steps for every client"
        raise InputError(source, f"{counts[client]} steps for client {client}", accepted)
    return counts.astype(np.int64, copy=False)


def whole_steps(field: str, value: object, draws: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """Return drawn step counts as integers of at least 1; refuse the setting `field` if any is too large."""
    if not (draws <= MOST_STEPS).all():
        raise InputError(field, value, f"a value that gives no client more than {MOST_STEPS} steps in a round")
    return np.maximum(draws, 1).astype(np.int64)


def _generator(mode: Mode, round: int, seed: int) -> np.random.Generator:
    """Return the stream of a round; in mode "fixed" every round has the stream of round 0."""
    return stream(seed, Purpose.STEPS, round=round if mode == "random" else 0)


@dataclass(frozen=True)
class Constant(StepSchedule):
    """Every client runs `steps` steps in every round: no step asynchronism.

    Examples:
        >>> Constant(5).counts(round=0, clients=3, seed=0).tolist()
        [5, 5, 5]
    """

    steps: int

    def __post_init__(self) -> None:
        count("steps", self.steps, most=MOST_STEPS)

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = steps."""
        return np.full(clients, self.steps, np.int64)


@dataclass(frozen=True)
class Gaussian(StepSchedule):
    """K_i ~ Normal(mean, variance), rounded to the nearest integer, at least 1 (the paper's setting).

    Attributes:
        mode: "fixed" draws once per client, "random" draws in every round.

    Examples:
        >>> K = Gaussian(mean=500, variance=10_000).counts(round=0, clients=1000, seed=0)
        >>> bool(abs(K.mean() - 500) < 10), bool(abs(K.std() - 100) < 10)
        (True, True)
    """

    mean: float
    variance: float
    mode: Mode = "fixed"

    def __post_init__(self) -> None:
        positive("mean", self.mean)
        non_negative("variance", self.variance)
        one_of("mode", self.mode, ["fixed", "random"])

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = max(1, nearest integer to a normal draw)."""
        draws = _generator(self.mode, round, seed).normal(self.mean, np.sqrt(self.variance), clients)
        return whole_steps("variance", self.variance, np.rint(draws))


@dataclass(frozen=True)
class Uniform(StepSchedule):
    """K_i is uniform over the integers lo..hi, both included.

    Examples:
        >>> sorted(set(Uniform(2, 4).counts(round=0, clients=100, seed=0).tolist()))
        [2, 3, 4]
    """

    lo: int
    hi: int
    mode: Mode = "fixed"

    def __post_init__(self) -> None:
        count("lo", self.lo)
        count("hi", self.hi, most=MOST_STEPS)
        if self.hi < self.lo:
            raise InputError("hi", self.hi, f"an integer of at least lo = {self.lo}")
        one_of("mode", self.mode, ["fixed", "random"])

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i, uniform over lo..hi."""
        return _generator(self.mode, round, seed).integers(self.lo, self.hi, clients, endpoint=True)


@dataclass(frozen=True)
class Geometric(StepSchedule):
    """One K for all clients, K ~ Geometric(p): after each step the round ends with probability p (`Scaffnew`).

    Attributes:
        p: the probability; 1 / p is the mean of K.
        mode: "random" draws in every round, "fixed" once.

    Examples:
        >>> K = [Geometric(0.25).counts(round, clients=3, seed=0) for round in range(2000)]
        >>> all(len(set(row.tolist())) == 1 for row in K), bool(abs(np.mean(K) - 4) < 0.2)
        (True, True)
    """

    p: float
    mode: Mode = "random"

    def __post_init__(self) -> None:
        fraction("p", self.p)
        one_of("mode", self.mode, ["fixed", "random"])

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K = 1 + floor(log(u) / log(1 - p)) for all, where u is uniform."""
        if self.p == 1:
            return np.ones(clients, np.int64)
        u = 1 - _generator(self.mode, round, seed).random(1)  # above 0
        K = whole_steps("p", self.p, 1 + np.floor(np.log(u) / np.log1p(-self.p)))
        return np.repeat(K, clients)


@dataclass(frozen=True)
class Epochs(StepSchedule):
    """K_i = the steps of `epochs` passes over the client's own data.

    A pass has ceil(n_i / batch size) steps. With sampling="shuffle", which drops the short batch at the end of a
    pass, it has floor(n_i / batch size), and 1 if the client has fewer samples than a batch.

    Attributes:
        epochs: the number of passes.
        epoch_steps: the steps of one pass of each client. A simulation and the server of a live federation fill
            it in from the clients' samples and the batch size.

    Examples:
        >>> Epochs(2).with_samples(np.array([10, 20, 21]), batch_size=10).counts(0, clients=3, seed=0).tolist()
        [2, 4, 6]
        >>> Epochs(2).with_samples(np.array([5, 20, 21]), 10, "shuffle").counts(0, clients=3, seed=0).tolist()
        [2, 4, 4]
    """

    epochs: int
    epoch_steps: Sequence[int] | None = None

    def __post_init__(self) -> None:
        count("epochs", self.epochs, most=MOST_STEPS)
        if self.epoch_steps is not None:
            given: Any = self.epoch_steps
            if not isinstance(given, Sequence) or isinstance(given, str):
                raise InputError("epoch_steps", given, "a list with the steps of one pass of each client")
            steps = tuple(count(f"epoch_steps[{i}]", k, most=MOST_STEPS) for i, k in enumerate(given))
            object.__setattr__(self, "epoch_steps", steps)

    def with_samples(
        self,
        sizes: npt.NDArray[np.int64],
        batch_size: int | None,
        sampling: Literal["replacement", "shuffle", "cyclic"] = "replacement",
    ) -> Epochs:
        """Return the schedule for clients with these numbers of samples; all in one batch if there is no size."""
        if self.epoch_steps is not None:
            return self
        if batch_size is None:
            one = np.ones_like(sizes)
        elif sampling == "shuffle":
            one = np.maximum(sizes // batch_size, 1)
        else:
            one = -(-sizes // batch_size)
        return replace(self, epoch_steps=tuple(one.tolist()))

    def check(self, clients: int, rounds: int) -> None:
        """Refuse steps of passes that are not one number per client."""
        if self.epoch_steps is not None and len(self.epoch_steps) != clients:
            given = f"{len(self.epoch_steps)} numbers"
            raise InputError("epoch_steps", given, f"one for each of {clients} clients")

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = epochs * the steps of one pass."""
        if self.epoch_steps is None:
            accepted = "Epochs(...).with_samples(sizes, batch_size): K_i follows from the clients' samples"
            raise InputError("epoch_steps", None, accepted)
        return whole_steps("epochs", self.epochs, float(self.epochs) * np.array(self.epoch_steps))


@dataclass(frozen=True)
class Linear(StepSchedule):
    """K_i = first + increment * i for i = 0..M-1.

    Examples:
        >>> Linear(first=100, increment=150).counts(round=0, clients=4, seed=0).tolist()
        [100, 250, 400, 550]
    """

    first: int
    increment: int

    def __post_init__(self) -> None:
        count("first", self.first, most=MOST_STEPS)
        count("increment", self.increment, least=0, most=MOST_STEPS)

    def check(self, clients: int, rounds: int) -> None:
        """Refuse an increment that gives the last client too many steps."""
        last = self.first + self.increment * (clients - 1)
        if last > MOST_STEPS:
            accepted = f"an increment with which the last of {clients} clients has at most {MOST_STEPS} steps"
            raise InputError("increment", self.increment, accepted)

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = first + increment * i."""
        return self.first + self.increment * np.arange(clients, dtype=np.int64)


@dataclass(frozen=True)
class Extreme(StepSchedule):
    """K_i = slow for all clients but the last (the paper's extreme case).

    Attributes:
        slow: the steps of every client but the last.
        fast: the steps of the last client.

    Examples:
        >>> Extreme(slow=1, fast=1000).counts(round=0, clients=4, seed=0).tolist()
        [1, 1, 1, 1000]
    """

    slow: int
    fast: int

    def __post_init__(self) -> None:
        for field, steps in (("slow", self.slow), ("fast", self.fast)):
            count(field, steps, most=MOST_STEPS)

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return slow, ..., slow, fast."""
        K = np.full(clients, self.slow, np.int64)
        K[-1] = self.fast
        return K


@dataclass(frozen=True)
class Explicit(StepSchedule):
    """K_i(t) from a table: one row that repeats, or one row per round. A table may go on after the last round.

    Examples:
        >>> Explicit([[2, 3, 5]]).counts(round=7, clients=3, seed=0).tolist()
        [2, 3, 5]
    """

    table: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        rows: Any = self.table
        if isinstance(rows, np.ndarray):
            rows = rows.tolist()
        if not isinstance(rows, Sequence) or isinstance(rows, str) or not len(rows):
            raise InputError("Explicit", rows, "rows of step counts, K[t][i]")
        if not isinstance(rows[0], Sequence | np.ndarray):
            rows = [rows]
        for t, row in enumerate(rows):
            if not isinstance(row, Sequence | np.ndarray):
                raise InputError(f"Explicit[{t}]", row, "a row of step counts, one for each client")
        table = tuple(
            tuple(count(f"Explicit[{t}][{i}]", k, most=MOST_STEPS) for i, k in enumerate(row))
            for t, row in enumerate(rows)
        )
        object.__setattr__(self, "table", table)

    def check(self, clients: int, rounds: int) -> None:
        """Refuse a table without one entry per client, or without one row or enough for all rounds."""
        for t, row in enumerate(self.table):
            if len(row) != clients:
                raise InputError(f"Explicit[{t}]", f"{len(row)} step counts", f"one for each of {clients} clients")
        if 1 < len(self.table) < rounds:
            raise InputError("Explicit", f"{len(self.table)} rows", f"one row, or one for each of {rounds} rounds")

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = table[round][i]."""
        return np.array(self.table[0 if len(self.table) == 1 else round], np.int64)


@dataclass(frozen=True)
class Computed(StepSchedule):
    """K_i(t) from a function.

    Attributes:
        function: (round, num_clients) -> the steps of each client; `round` counts the rounds already done. It is
            called several times for a round, also after a resume and in every process, and must return the same
            counts each time.

    Examples:
        >>> Computed(lambda round, num_clients: [10 + round] * num_clients).counts(round=2, clients=3, seed=0)
        array([12, 12, 12])
    """

    function: Callable[[int, int], Counts]

    def __post_init__(self) -> None:
        try:
            inspect.signature(self.function).bind(0, 1)
        except (TypeError, ValueError):  # it cannot be called with two numbers, or is written in C
            raise InputError("steps", self.function, "a function (round, num_clients) -> counts") from None

    @property
    def source(self) -> str:
        """The name of the function."""
        return f"steps function {getattr(self.function, '__name__', type(self.function).__name__)}"

    def check(self, clients: int, rounds: int) -> None:
        """Refuse a function with bad counts in round 1, and one that returns others when it is called again."""
        first, again = (checked_counts(self, 0, clients, 0) for _ in range(2))
        if not np.array_equal(first, again):
            accepted = "the same counts whenever it is called: derive random numbers from the round, not from a "
            raise InputError(f"{self.source} of round 1", "other counts each time", accepted + "generator outside")

    def counts(self, round: int, clients: int, seed: int) -> npt.NDArray[np.int64]:
        """Return K_i = function(round, num_clients)[i]."""
        return np.asarray(self.function(round, clients))


if TYPE_CHECKING:
    Steps = (
        StepSchedule | int | Counts | Sequence[Counts] | Callable[[int, int], Counts] | pd.DataFrame | str | Path
    )

ACCEPTED = (
    "a StepSchedule such as Gaussian(500, 10000), an integer, a list with the steps of each client or one such "
    "list per round, a function (round, num_clients) -> counts, a pandas DataFrame, or the path of a CSV file"
)


def step_schedule(given: Steps) -> StepSchedule:
    """Return the schedule that a value stands for.

    An integer holds for all clients. A list holds the steps of each client, a list of lists those of each round. A
    function is called with the rounds done and the number of clients. A pandas DataFrame or a CSV file has a
    column for each client and a row for each round, or the columns round, client and steps.

    Examples:
        >>> step_schedule(100), step_schedule([2, 5, 40])
        (Constant(steps=100), Explicit(table=((2, 5, 40),)))
        >>> step_schedule(0)
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: steps = 0: expected an integer of at least 1
    """
    value: Any = given
    if isinstance(value, StepSchedule):
        return value
    if isinstance(value, numbers.Integral) and not isinstance(value, bool):
        return Constant(int(value))
    if isinstance(value, str | Path):
        value = read_trace(value)
    elif is_frame(value):
        value = frame_rows(value)
    if isinstance(value, Sequence | np.ndarray) and not isinstance(value, bytes):
        try:
            return Explicit(cast("Sequence[Sequence[int]]", value))
        except InputError as error:
            raise InputError(error.field.replace("Explicit", "steps"), error.value, error.accepted) from None
    if callable(value) and not isinstance(value, type):
        return Computed(value)
    raise InputError("steps", value, ACCEPTED)
