"""Participation: the cohort of each round, drawn from the keyed streams."""

from __future__ import annotations

import numbers
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.errors import MOST_CLIENTS, InputError, count, one_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Participation"]


@dataclass(frozen=True)
class Participation:
    """A cohort of `size` clients each round.

    Attributes:
        size: the number of clients (an integer), or the fraction of all clients (a float in (0, 1]).
        by: "uniform" draws without replacement. "weight" draws with replacement with probability omega_i; a client
            that is drawn twice runs once and counts twice.

    Examples:
        >>> Participation(2).draw(round=0, weights=np.full(5, 0.2), seed=0)[1].tolist()
        [1, 1]
    """

    size: int | float
    by: Literal["uniform", "weight"] = "uniform"

    def __post_init__(self) -> None:
        if isinstance(self.size, numbers.Integral):
            count("participation", self.size, most=MOST_CLIENTS)
        elif not isinstance(self.size, float) or not 0 < self.size <= 1:
            raise InputError(
                "participation", self.size, "a number of clients (an integer) or a fraction in (0, 1]"
            )
        one_of("participation.by", self.by, ["uniform", "weight"])

    def number(self, clients: int) -> int:
        """Return the size of a cohort drawn from `clients` clients."""
        if isinstance(self.size, numbers.Integral):
            if self.by == "uniform" and self.size > clients:
                raise InputError("participation", self.size, f"at most the number of clients, {clients}")
            return int(self.size)
        return max(1, round(self.size * clients))

    def draw(
        self, round: int, weights: npt.NDArray[np.float64], seed: int
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the clients of the round in increasing order and how often each was drawn."""
        generator = stream(seed, Purpose.COHORT, round=round)
        number = self.number(len(weights))
        if self.by == "uniform":
            clients = np.sort(generator.choice(len(weights), number, replace=False, shuffle=False))
            return clients.astype(np.int64), np.ones(number, np.int64)
        drawn = generator.choice(len(weights), number, replace=True, p=weights)
        clients, times = np.unique(drawn, return_counts=True)
        return clients.astype(np.int64), times.astype(np.int64)
