"""The result of a part of the soak: figures and promises."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["TESTS", "Part", "Promise"]

TESTS = Path(__file__).resolve().parents[2] / "tests"
"""The folder of the programs that `make test` runs in a shorter form."""

KEPT = {"<=": operator.le, "==": operator.eq, ">=": operator.ge}


@dataclass(frozen=True)
class Promise:
    """A measurement that must be <=, == or >= a limit."""

    text: str
    measured: float
    relation: str
    limit: float

    @property
    def kept(self) -> bool:
        """Whether the promise holds; it does not if the measurement is NaN."""
        return bool(KEPT[self.relation](self.measured, self.limit))


@dataclass
class Part:
    """The figures of a part by name, and its promises."""

    figures: dict[str, Any] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
