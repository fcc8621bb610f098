"""What a part of the soak gives back: figures, and promises with what was measured."""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["TESTS", "Part", "Promise"]

TESTS = Path(__file__).resolve().parents[2] / "tests"
"""Where the programs lie that the normal checks run shorter."""

KEPT = {"<=": operator.le, "==": operator.eq, ">=": operator.ge}


@dataclass(frozen=True)
class Promise:
    """Something that must hold: measured, how it is compared (<=, == or >=), and with what."""

    text: str
    measured: float
    relation: str
    limit: float

    @property
    def kept(self) -> bool:
        """Whether it holds; a measurement that is not a number keeps nothing."""
        return bool(KEPT[self.relation](self.measured, self.limit))


@dataclass
class Part:
    """What was found, by name, and what was promised."""

    figures: dict[str, Any] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)
