"""Stopping rules."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedagrac.errors import InputError, count, fraction, positive

__all__ = ["Stop", "target_accuracy"]


def target_accuracy(field: str, value: float) -> float:
    """Check for an accuracy in (0, 1]. Return it.

    Examples:
        >>> target_accuracy("accuracy", 90)
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: accuracy = 90: expected a fraction in (0, 1]: 0.9, not 90
    """
    if isinstance(value, int | float) and 1 < value <= 100:
        raise InputError(field, value, f"a fraction in (0, 1]: {value / 100:g}, not {value:g}")
    return fraction(field, value)


@dataclass(frozen=True)
class Stop:
    """End a run after the first round that reaches any of these values.

    Attributes:
        accuracy: test accuracy, in (0, 1].
        sim_time: simulated seconds, or real seconds on a live fleet.
        bytes: bytes moved in both directions since the start.

    Examples:
        >>> Stop(accuracy=0.8).reached({"test_accuracy": 0.81, "sim_time": 1.0, "bytes_total": 10})
        'test accuracy 0.8100 reached the target 0.8'
    """

    accuracy: float | None = None
    sim_time: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.accuracy is not None:
            target_accuracy("stop.accuracy", self.accuracy)
        if self.sim_time is not None:
            positive("stop.sim_time", self.sim_time)
        if self.bytes is not None:
            count("stop.bytes", self.bytes)

    def reached(self, record: Mapping[str, Any]) -> str | None:
        """Return why the run stops after this round, or None if it does not."""
        accuracy = record["test_accuracy"]
        if self.accuracy is not None and accuracy is not None and accuracy >= self.accuracy:
            return f"test accuracy {accuracy:.4f} reached the target {self.accuracy}"
        if self.sim_time is not None and record["sim_time"] >= self.sim_time:
            return f"simulated time {record['sim_time']:.6g} s reached {self.sim_time} s"
        if self.bytes is not None and record["bytes_total"] >= self.bytes:
            return f"{record['bytes_total']} bytes moved reached {self.bytes}"
        return None
