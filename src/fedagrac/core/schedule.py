"""Values that change over the rounds, such as the calibration rate lambda."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from fedagrac.errors import InputError, count, non_negative

__all__ = ["Piecewise"]


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
