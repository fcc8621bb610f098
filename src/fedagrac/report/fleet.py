"""The table of the clients of a live run: replies, bytes, when each was last seen and why it was dropped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedagrac.report.charts import names_of
from fedagrac.storage.activity import activities, last_rounds

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedagrac.storage.runs import StoredRun

__all__ = ["COLUMNS", "FleetTable", "fleet_tables"]

MOST_ROWS = 100
"""The most clients in a table."""

COLUMNS = {
    "rounds": "rounds in which its reply counts",
    "mean weight": "mean weight in those rounds",
    "mean steps": "mean number of its local steps",
    "mean s": "mean seconds until its reply",
    "last s": "seconds until its last reply",
    "MB down": "vectors sent to it",
    "MB up": "vectors received from it",
    "last seen (UTC)": "when its last readable message arrived",
    "dropped": "rounds in which it was asked but does not count",
    "last reason": "why it was dropped last",
}
"""The headings of the columns after the client's number, each with an explanation."""


@dataclass(frozen=True)
class FleetTable:
    """The table of one run.

    Attributes:
        run: the name of the run.
        clients: the number of clients.
        rows: for each of the first clients its number and a text for each column.
        last_rounds: how many of the last rounds the table is about, if the history is long; None for all rounds.
    """

    run: str
    clients: int
    rows: list[tuple[int, list[str]]]
    last_rounds: int | None = None


def fleet_tables(runs: Sequence[StoredRun]) -> list[FleetTable]:
    """Return a table for each live run, with those clients first that were dropped most often."""
    tables = []
    for run, name in zip(runs, names_of(runs), strict=True):
        if len(run.history) and "seen" in run.history[0]:
            rounds, complete = last_rounds(run.history.path)
            clients = activities(rounds)
            rows = [(activity.client, _texts(activity.row())) for activity in clients[:MOST_ROWS]]
            tables.append(FleetTable(name, len(clients), rows, None if complete else len(rounds)))
    return tables


def _texts(row: dict[str, Any]) -> list[str]:
    """Return the cells of a row."""
    seen = row["seen"] and row["seen"].replace("T", " ").removesuffix("Z")
    reason = row["reason"] and f"{row['reason']} (round {row['reason_round']})"
    return [
        str(row["rounds"]),
        "-" if row["weight"] is None else f"{row['weight']:.4g}",
        _number(row["steps"], 1),
        *(_number(row["seconds"], 1), _number(row["last_seconds"], 1)),
        *(f"{row[name] / 1e6:.2f}" for name in ("sent", "received")),
        seen or "-",
        str(row["dropped"]),
        reason or "",
    ]


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
