"""The clients of a round, and the services that algorithms may ask for: sums, gradients and random numbers.

A `Cohort` is all that an algorithm sees of the clients: how many steps each one runs, its weight, and whether it
is fast. Every sum over clients goes through `Cohort.sum`, so the same algorithm runs on one device or on many, and
under a robust rule instead of the plain sum.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch

from fedagrac.core.layout import Layout
from fedagrac.core.robust import Aggregation, robust_sum
from fedagrac.core.streams import Purpose, stream
from fedagrac.errors import count

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Cohort", "GradientService", "LabelService", "Population", "fast_clients", "weighted_sum"]


def weighted_sum(coefficients: npt.NDArray[np.float64], rows: Tensor) -> Tensor:
    """Return sum_i coefficients_i * rows_i, a vector [d]."""
    # mv rather than matmul, which may use tensor cores of reduced precision
    return rows.T.mv(torch.as_tensor(coefficients, dtype=rows.dtype, device=rows.device))


class GradientService(Protocol):
    """The engine's service of local gradients: those of some clients at one point, as rows [m, d]."""

    def __call__(
        self, x: Tensor, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"] = "full"
    ) -> Tensor:
        """Return the gradients at x: over all of a client's data, or over its first batch of the round."""


class LabelService(Protocol):
    """The fleet's service of labels: which classes some clients hold, [m, classes]."""

    def __call__(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return which classes clients hold; None if targets are not labels."""


def fast_clients(
    steps: Sequence[int] | npt.NDArray[np.int64], masses: Sequence[int | Fraction]
) -> npt.NDArray[np.bool_]:
    """Return which clients are fast, K_i > Kbar, in exact arithmetic, [m].

    Kbar = sum_j n_j K_j / sum_j n_j, so the test is K_i * sum_j n_j > sum_j n_j K_j with integer n_j (or exact
    fractions). In floating point, equal K can give a Kbar slightly below K, and then *every* client is "fast".

    Examples:
        >>> fast_clients([3, 3, 3], [1, 1, 1]).tolist()
        [False, False, False]
        >>> fast_clients([1, 2, 9], [1, 1, 1]).tolist()
        [False, False, True]
    """
    K = [int(k) for k in steps]
    total = sum(masses)
    weighted = sum(n * k for n, k in zip(masses, K, strict=True))
    return np.array([k * total > weighted for k in K], dtype=np.bool_)


@dataclass(frozen=True, eq=False)
class Cohort:
    """The m clients of one round.

    Attributes:
        round: the number of rounds done before this one (0 in the first).
        clients: client numbers, [m].
        steps: K_i, [m].
        masses: exact weights that are not normalised: sample counts, user weights as fractions, or how often
            each client was drawn.
        weights: omega_i, the masses normalised over the cohort, [m].
        population_weights: omega_i among all M clients, [m].
        epoch_steps: steps in one local epoch, ceil(n_i / batch size), 1 with full batches, [m].
        pass_steps: steps that end the pass over its data in which a client is, [m]; an epoch's unless batches
            continue where the last round ended, then 0 where that round ended with a pass.
        everyone: whether all M clients take part.
        service: the local gradients of clients.
        total: adds up a sum over all processes that share the simulation.
        aggregate: the robust rule that replaces sums over the members' vectors; None for the sums themselves.
        layout: how the module's parameters lie in x.
        labels: the classes that clients hold; None if they are not known.
        seed: the key of every random draw of the run.
        number_bytes: the bytes of each number of a vector, 4 in float32.
        fast: whether K_i > Kbar, [m].
        mean_steps: Kbar.
        places: where the members are in the whole cohort, of which this may be a part, [m].
        whole: the number of members of the whole cohort.
    """

    round: int
    clients: npt.NDArray[np.int64]
    steps: npt.NDArray[np.int64]
    masses: Sequence[int | Fraction]
    population_weights: npt.NDArray[np.float64]
    epoch_steps: npt.NDArray[np.int64]
    everyone: bool
    service: GradientService
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor
    pass_steps: npt.NDArray[np.int64] = None  # type: ignore[assignment]  # an array after __post_init__
    aggregate: Aggregation | None = None
    layout: Layout | None = None
    labels: LabelService | None = None
    seed: int = 0
    number_bytes: int = 4
    weights: npt.NDArray[np.float64] = field(init=False)
    fast: npt.NDArray[np.bool_] = field(init=False)
    mean_steps: float = field(init=False)
    places: npt.NDArray[np.int64] = field(init=False)
    whole: int = field(init=False)

    def __post_init__(self) -> None:
        if self.pass_steps is None:
            object.__setattr__(self, "pass_steps", self.epoch_steps)
        total = sum(self.masses)
        weighted = sum(n * int(k) for n, k in zip(self.masses, self.steps, strict=True))
        weights = np.array([float(Fraction(n) / total) for n in self.masses])
        object.__setattr__(self, "weights", weights)
        object.__setattr__(self, "fast", fast_clients(self.steps, self.masses))
        object.__setattr__(self, "mean_steps", float(Fraction(weighted) / total))
        object.__setattr__(self, "places", np.arange(len(self)))
        object.__setattr__(self, "whole", len(self))

    def __len__(self) -> int:
        return len(self.clients)

    def part(self, keep: npt.NDArray[np.bool_], total: Callable[[Tensor], Tensor]) -> Cohort:
        """Return the members that one of several processes runs.

        Weights, Kbar and the fast clients stay those of the whole cohort, and sums go over the whole cohort.

        Examples:
            >>> whole = Cohort(0, np.arange(3), np.array([1, 2, 9]), [1, 1, 2], np.ones(3) / 3, np.ones(3, int),
            ...                everyone=True, service=lambda *_: torch.zeros(3, 1))
            >>> part = whole.part(np.array([True, False, True]), lambda tensor: tensor + 100)
            >>> part.clients.tolist(), part.weights.tolist(), part.fast.tolist(), part.mean_steps
            ([0, 2], [0.25, 0.5], [False, True], 5.25)
            >>> part.sum(part.weights, torch.tensor([[4.0], [2.0]])).tolist()
            [102.0]
        """
        part = copy.copy(self)
        of_each = "clients steps population_weights epoch_steps pass_steps weights fast places"
        for name in of_each.split():
            object.__setattr__(part, name, getattr(self, name)[keep])
        object.__setattr__(part, "masses", [mass for mass, kept in zip(self.masses, keep, strict=True) if kept])
        object.__setattr__(part, "total", total)
        return part

    def alone(self, members: npt.NDArray[np.int64]) -> Cohort:
        """Return a cohort of some members, with weights, Kbar and fast clients computed over these alone.

        The other members count as absent. In a `part`, they still count.

        Examples:
            >>> whole = Cohort(0, np.arange(3), np.array([1, 2, 9]), [1, 1, 2], np.ones(3) / 3, np.ones(3, int),
            ...                everyone=True, service=lambda *_: torch.zeros(3, 1))
            >>> two = whole.alone(np.array([0, 1]))
            >>> two.weights.tolist(), two.fast.tolist(), two.mean_steps, two.everyone
            ([0.5, 0.5], [False, True], 1.5, False)
        """
        return dataclasses.replace(
            self,
            clients=self.clients[members],
            steps=self.steps[members],
            masses=[self.masses[int(i)] for i in members],
            population_weights=self.population_weights[members],
            epoch_steps=self.epoch_steps[members],
            pass_steps=self.pass_steps[members],
            everyone=self.everyone and len(members) == len(self),
        )

    def sum(
        self,
        coefficients: npt.NDArray[np.float64],
        rows: Tensor,
        scale: npt.NDArray[np.int64] | npt.NDArray[np.float64] | None = None,
    ) -> Tensor:
        """Return sum_i coefficients_i * rows_i over the cohort, a vector [d], or what the robust rule puts for it.

        A robust rule compares the rows of different members. If they are comparable only after division, such as
        by K_i for sums of K_i steps, `scale` is the divisor, [m]. It does not change the plain sum.
        """
        if self.aggregate is None:
            return self.total(weighted_sum(coefficients, rows))
        return robust_sum(self.aggregate, coefficients, rows, scale, self.places, self.whole, self.total)

    def update(
        self, running: Tensor, coefficients: npt.NDArray[np.float64], before: Tensor, after: Tensor
    ) -> Tensor:
        """Return a running sum over all M clients after the members' rows have changed, in float64, [d].

        It is in float64, because a running sum in float32 would keep the rounding error of every large row. Under
        a robust rule, locations before and after would not cancel, and their errors would add up over the rounds.
        There the members' part of the coefficients (which must sum to 1 over all clients) moves to the location of
        the new rows, and the rest stays at the running sum, so the result is a mean of the two.
        """
        if self.aggregate is None:
            change = self.sum(coefficients, after.double()) - self.sum(coefficients, before.double())
            return running.double() + change
        part = self.total(torch.tensor(coefficients.sum(), dtype=torch.float64, device=running.device))
        return (1 - part) * running.double() + self.sum(coefficients, after.double())

    def gradients(self, x: Tensor, batch: Literal["full", "first"] = "full") -> Tensor:
        """Return every member's local gradient at x, [m, d]."""
        return self.service(x, self.clients, self.round, batch)

    def starting_gradients(self, x: Tensor) -> Tensor:
        """Return the gradients at x that `Population.gradient` summed before round 1, with the same dropout."""
        return self.service(x, self.clients, 0)

    def generator(self, client: int | None = None, number: int = 0) -> np.random.Generator:
        """Return the random generator of a client in this round, or that of the whole round if there is no client.

        It is keyed by the seed, the round and the client alone, so its numbers are the same on every engine, in
        every process, after a resume and on a live fleet. Two calls with the same keys return generators with the
        same numbers, also if one is in `plan` and the other in `aggregate`. `number` tells independent ones apart.

        Examples:
            >>> cohort = Cohort(3, np.arange(2), np.ones(2, int), [1, 1], np.ones(2) / 2, np.ones(2, int),
            ...                 everyone=True, service=lambda *_: torch.zeros(2, 1), seed=7)
            >>> first, again, other = (cohort.generator(client).random() for client in (0, 0, 1))
            >>> first == again, first == other, first == cohort.generator().random()
            (True, False, False)
        """
        count("number", number, least=0, most=2**32)
        if client is None:
            return stream(self.seed, Purpose.ROUND, self.round, number=number)
        return stream(self.seed, Purpose.MEMBER, self.round, int(client), number)


@dataclass(frozen=True, eq=False)
class Population:
    """All M clients, for computing the global gradient at a point.

    Attributes:
        weights: omega_i, [M].
        service: the local gradients of clients.
        clients: the clients that this process runs; None for all.
        total: adds up a sum over all processes.
        chunk: how many rows are computed at a time.
        aggregate: the robust rule that replaces the sum; None for the sum. A rule needs all rows in memory.
        layout: how the module's parameters lie in x.
        mean_steps: computes Kbar over all clients and the first rounds; None if steps are not known in advance.
    """

    weights: npt.NDArray[np.float64]
    service: GradientService
    clients: npt.NDArray[np.int64] | None = None
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor
    chunk: int = 64
    aggregate: Aggregation | None = None
    layout: Layout | None = None
    mean_steps: Callable[[], float] | None = None

    def gradient(self, x: Tensor) -> Tensor:
        """Return sum_i omega_i grad F_i(x) over all clients, or what the robust rule puts for it.

        The sum has at most `chunk` rows in memory at a time.
        """
        local_clients = np.arange(len(self.weights)) if self.clients is None else self.clients
        starts = range(0, len(local_clients), self.chunk)
        chunks = (local_clients[start : start + self.chunk] for start in starts)
        if self.aggregate is not None:
            gradients = [self.service(x, clients, 0) for clients in chunks]
            rows = torch.cat(gradients) if gradients else x.new_empty((0, len(x)))
            omega, members = self.weights[local_clients], len(self.weights)
            return robust_sum(self.aggregate, omega, rows, None, local_clients, members, self.total)
        total = torch.zeros_like(x)
        for clients in chunks:
            total += weighted_sum(self.weights[clients], self.service(x, clients, 0))
        return self.total(total)
