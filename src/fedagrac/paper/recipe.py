"""What a recipe is: a table or figure of the paper, how to run it, and what the paper says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.paper.records import Cell, Record

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Found", "Recipe", "Scale", "Table", "Verdict", "compare_rounds", "rounds_text"]

Scale = Literal["quick", "medium", "paper"]

Found = Mapping[str, Record]
"""The records there are, by the names of their cells."""


@dataclass(frozen=True)
class Table:
    """Figures of the paper and ours, side by side, as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Verdict:
    """Whether a claim of the paper holds in our runs, with the numbers that say so."""

    claim: str
    verdict: Literal["holds", "does not hold", "not decided"]
    numbers: str


@dataclass(frozen=True)
class Recipe:
    """One table or figure of the paper.

    Attributes:
        name: as on the command line.
        title: what it shows.
        assumptions: what the paper leaves open and how it is read here.
        cells: the runs at a scale, in the order in which they are run.
        table: ours beside the paper's, from the records there are.
        claims: the paper's claims, judged by those records.
        run: how cells that differ in the algorithm alone are run; None where nothing needs to run.
        picture: ours (and the paper's figures where it gives numbers) as a picture; None for plain tables.
    """

    name: str
    title: str
    assumptions: tuple[str, ...]
    cells: Callable[[Scale], list[Cell]]
    table: Callable[[Found, Scale], Table]
    claims: Callable[[Found], list[Verdict]]
    run: Callable[..., list[dict[str, Any]]] | None = None
    picture: Callable[[Found, Scale], Figure] | None = None


def rounds_text(record: Record | None) -> str:
    """Return how many rounds a run took to its target, in a few characters.

    Examples:
        >>> rounds_text(None)
        '-'
        >>> rounds_text(Record("a", {}, {"rounds": 30, "rounds_to_target": 12}, {}))
        '12'
        >>> rounds_text(Record("a", {}, {"rounds": 200, "rounds_to_target": None}, {}))
        '> 200'
        >>> rounds_text(Record("a", {}, {"rounds": 95, "rounds_to_target": None, "finished": False}, {}))
        '> 95 (cut off)'
    """
    if record is None:
        return "-"
    reached = record.outcome["rounds_to_target"]
    if reached is not None:
        return str(reached)
    return f"> {record.outcome['rounds']}" + ("" if record.finished else " (cut off)")


def compare_rounds(claim: str, fewer: Record | None, more: Record | None) -> Verdict:
    """Judge that one run needs fewer rounds to its target than another."""
    numbers = f"{rounds_text(fewer)} against {rounds_text(more)}"
    if fewer is None or more is None:
        return Verdict(claim, "not decided", numbers)
    a, b = fewer.outcome["rounds_to_target"], more.outcome["rounds_to_target"]
    if a is not None and ((b is None and more.outcome["rounds"] >= a) or (b is not None and a < b)):
        return Verdict(claim, "holds", numbers)
    if b is not None and (a is not None or fewer.outcome["rounds"] >= b):
        return Verdict(claim, "does not hold", numbers)
    return Verdict(claim, "not decided", numbers)
