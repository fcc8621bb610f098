"""What a recipe is: a table or figure of the paper, how to run it, and what the paper says of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.paper.records import Trial, TrialRecord

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["Recipe", "Scale", "Table", "TrialRecords", "Verdict"]

Scale = Literal["quick", "medium", "paper"]

TrialRecords = Mapping[str, TrialRecord]
"""The records there are, by the names of their trials."""


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
        trials: the runs at a scale, in the order in which they are run.
        table: ours beside the paper's, from the records there are.
        claims: the paper's claims, judged by those records.
        run: how trials that differ in the algorithm alone are run; None where nothing needs to run.
        picture: ours (and the paper's figures where it gives numbers) as a picture; None for plain tables.
    """

    name: str
    title: str
    assumptions: tuple[str, ...]
    trials: Callable[[Scale], list[Trial]]
    table: Callable[[TrialRecords, Scale], Table]
    claims: Callable[[TrialRecords], list[Verdict]]
    run: Callable[..., list[dict[str, Any]]] | None = None
    picture: Callable[[TrialRecords, Scale], Figure] | None = None
