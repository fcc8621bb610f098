"""Recipes: a table or figure of the paper, how to run it, and what the paper claims about it."""

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
"""Records by the names of their trials; trials that have not been run are missing."""


@dataclass(frozen=True)
class Table:
    """The paper's figures and ours side by side, as text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Verdict:
    """A claim of the paper, whether it holds in our runs, and the numbers behind that.

    `brief` has the numbers in one line where `numbers` is longer.
    """

    claim: str
    verdict: Literal["holds", "does not hold", "not decided"]
    numbers: str
    brief: str = ""


@dataclass(frozen=True)
class Recipe:
    """One table or figure of the paper.

    Attributes:
        name: its name on the command line.
        title: what it shows.
        assumptions: how it reads what the paper leaves open.
        trials: returns the runs at a scale, in the order in which they are run.
        table: returns ours beside the paper's.
        claims: returns the verdicts on the paper's claims.
        run: runs trials that differ in the algorithm alone; None where nothing needs to run.
        picture: draws ours, and the paper's where it gives numbers; None for plain tables.
        following: returns further runs that depend on the outcomes of the first ones, such as more seeds at the
            best of several settings; None where there are none.
    """

    name: str
    title: str
    assumptions: tuple[str, ...]
    trials: Callable[[Scale], list[Trial]]
    table: Callable[[TrialRecords, Scale], Table]
    claims: Callable[[TrialRecords], list[Verdict]]
    run: Callable[..., list[dict[str, Any]]] | None = None
    picture: Callable[[TrialRecords, Scale], Figure] | None = None
    following: Callable[[Scale, TrialRecords], list[Trial]] | None = None
