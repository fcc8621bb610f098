"""Values that change over the rounds, such as the step size eta and the calibration rate lambda."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from fedagrac.errors import InputError, count, non_negative, positive

__all__ = ["Cosine", "Exponential", "Piecewise", "Scaled", "Warmup", "check_rounds", "check_value", "value_at"]

MOST_CHECKED = 100_000
"""The most rounds whose values are checked before a run starts."""


@dataclass(frozen=True)
class Piecewise:
    """A value that is constant between breakpoints.

    Attributes:
        values: the value from each breakpoint on; a breakpoint is a number of rounds already done.

    Examples:
        The paper's "Increase" schedule: 0.1 in rounds 1 to 50, 0.5 in rounds 51 to 150, then 1.

        >>> increase = Piecewise({0: 0.1, 50: 0.5, 150: 1.0})
        >>> [increase(done) for done in (0, 49, 50, 149, 150, 1000)]
        [0.1, 0.1, 0.5, 0.5, 1.0, 1.0]
    """

    values: Mapping[int, float]

    def __post_init__(self) -> None:
        if not isinstance(self.values, Mapping) or 0 not in self.values:
            raise InputError("Piecewise", self.values, "a mapping {rounds done: value} with an entry for 0")
        cleaned = {
            count("Piecewise key", key, least=0): non_negative(f"Piecewise[{key}]", value)
            for key, value in self.values.items()
        }
        object.__setattr__(self, "values", dict(sorted(cleaned.items())))

    def __hash__(self) -> int:
        return hash(tuple(self.values.items()))

    def __call__(self, rounds_done: int) -> float:
        """Return the value after `rounds_done` rounds."""
        return self.values[max(key for key in self.values if key <= rounds_done)]


@dataclass(frozen=True)
class Exponential:
    """A value that is multiplied by the same factor after every round.

    Attributes:
        first: the value in round 1.
        factor: what it is multiplied by after each round.

    Examples:
        >>> decay = Exponential(0.1, 0.5)
        >>> [decay(done) for done in range(3)]
        [0.1, 0.05, 0.025]
    """

    first: float
    factor: float

    def __post_init__(self) -> None:
        positive("Exponential.first", self.first)
        positive("Exponential.factor", self.factor)

    def __call__(self, rounds_done: int) -> float:
        """Return the value after `rounds_done` rounds."""
        return self.first * self.factor**rounds_done


@dataclass(frozen=True)
class Cosine:
    """A value that falls along half a cosine wave, and then stays.

    Attributes:
        first: the value in round 1.
        rounds: after how many rounds it has its last value.
        last: the last value. A step size must stay above 0: if the run has more than `rounds` rounds, give one.

    Examples:
        >>> fall = Cosine(1.0, rounds=4, last=0.5)
        >>> [round(fall(done), 3) for done in (0, 2, 4, 9)]
        [1.0, 0.75, 0.5, 0.5]
    """

    first: float
    rounds: int
    last: float = 0.0

    def __post_init__(self) -> None:
        positive("Cosine.first", self.first)
        count("Cosine.rounds", self.rounds)
        non_negative("Cosine.last", self.last)

    def __call__(self, rounds_done: int) -> float:
        """Return the value after `rounds_done` rounds."""
        share = min(rounds_done, self.rounds) / self.rounds
        return self.last + (self.first - self.last) * (1 + math.cos(math.pi * share)) / 2


@dataclass(frozen=True)
class Warmup:
    """A value that grows in equal steps over the first rounds up to that of another schedule, and then is that.

    Attributes:
        rounds: the number of these rounds; in round r of them the value is r / (rounds + 1) of the other's.
        then: the other schedule, or a number. It counts all rounds, those of the warm-up too.

    Examples:
        >>> warm = Warmup(3, then=0.8)
        >>> [round(warm(done), 3) for done in range(5)]
        [0.2, 0.4, 0.6, 0.8, 0.8]
    """

    rounds: int
    then: float | Callable[[int], float]

    def __post_init__(self) -> None:
        count("Warmup.rounds", self.rounds)
        check_value("Warmup.then", self.then)

    def __call__(self, rounds_done: int) -> float:
        """Return the value after `rounds_done` rounds."""
        return min(1.0, (rounds_done + 1) / (self.rounds + 1)) * value_at("Warmup.then", self.then, rounds_done)


@dataclass(frozen=True)
class Scaled:
    """Another schedule, multiplied by a number.

    Attributes:
        factor: the number.
        schedule: the other schedule.

    Examples:
        >>> Scaled(10.0, Exponential(0.1, 0.5))(1)
        0.5
    """

    factor: float
    schedule: Callable[[int], float]

    def __post_init__(self) -> None:
        positive("Scaled.factor", self.factor)
        if not callable(self.schedule):
            raise InputError("Scaled.schedule", self.schedule, "a schedule over rounds")

    def __call__(self, rounds_done: int) -> float:
        """Return the value after `rounds_done` rounds."""
        return self.factor * self.schedule(rounds_done)


def check_value(field: str, value: Any, least: float = 0.0) -> None:
    """Check a number above `least`, or a schedule whose first value is one.

    Examples:
        >>> check_value("lr", Exponential(0.1, 0.99))
    """
    if callable(value):
        value_at(field, value, 0)
    elif isinstance(value, str):
        raise InputError(field, value, f"a number above {least:g}, or a schedule over rounds")
    else:
        positive(field, value, above=least)


def check_rounds(field: str, value: float | Callable[[int], float], rounds: int, zero: bool = False) -> None:
    """Refuse a schedule whose value in one of a run's rounds is not above 0 and finite; `zero` allows 0, too.

    Examples:
        >>> check_rounds("lr", Cosine(0.1, rounds=3), rounds=3)
        >>> check_rounds("lr", Cosine(0.1, rounds=3), rounds=6)
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: lr in round 4 = 0.0: expected a number above 0 in each of the 6 rounds: \
let the schedule end above 0 (Cosine has last=), make it longer, or do fewer rounds
    """
    if not callable(value):
        return
    accepted = f"a number {'of at least' if zero else 'above'} 0 in each of the {rounds} rounds"
    for done in range(min(rounds, MOST_CHECKED)):
        where = f"{field} in round {done + 1}"
        try:
            given: Any = value(done)
        except InputError as error:  # from a schedule inside this one
            given = error.value
        except Exception as error:  # from a function of the user's own
            raise InputError(where, f"{type(error).__name__}: {error}", accepted) from error
        try:
            number = non_negative(where, given)
        except InputError:
            raise InputError(where, given, accepted) from None
        if number == 0 and not zero:
            remedy = "let the schedule end above 0 (Cosine has last=), make it longer, or do fewer rounds"
            raise InputError(where, given, f"{accepted}: {remedy}")


def value_at(field: str, value: float | Callable[[int], float], rounds_done: int) -> float:
    """Return the value of a schedule after so many rounds, or the number itself; it must be positive.

    Examples:
        >>> value_at("lr", Exponential(0.1, 0.5), 1)
        0.05
    """
    if not callable(value):
        return value
    given = value(rounds_done)
    return positive(f"{field} in round {rounds_done + 1}", given)
