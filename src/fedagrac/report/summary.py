"""The summary table: one row per run, with accuracy, rounds and bytes to the target, losses and times."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.parsing import printable
from fedagrac.report.charts import names_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    import numpy.typing as npt
    from rich.table import Table

    from fedagrac.storage.rounds import StoredRounds
    from fedagrac.storage.runs import StoredRun

__all__ = ["Column", "TableCell", "common_target", "full_columns", "summarise", "summary_table", "table_cells"]

LAST = 10
"""The number of rounds at the end of a run that a final value is the mean of."""

Row = dict[str, Any]


def summarise(runs: Sequence[StoredRun]) -> list[Row]:
    """Return one row of plain values per run, with None for a value that does not exist.

    "algorithm" is the run's label and "run" a distinct name. A "final_..." value is the mean over the evaluated
    rounds among the last 10.
    """
    return [_row(run, name) for run, name in zip(runs, names_of(runs), strict=True)]


def _row(run: StoredRun, name: str) -> Row:
    history, target = run.history, run.target
    accuracies, test_losses = _values(history, "test_accuracy"), _values(history, "test_loss")
    train_losses = _values(history, "train_loss")
    reached = _first_at(history, target)
    return {
        "algorithm": run.label,
        "run": name,
        "accuracy": _last(accuracies),
        "best_accuracy": float(accuracies.max()) if len(accuracies) else None,
        "final_accuracy": _mean(history, "test_accuracy"),
        "test_loss": _last(test_losses),
        "best_test_loss": _least(test_losses),
        "final_test_loss": _mean(history, "test_loss"),
        "best_train_loss": _least(train_losses),
        "final_train_loss": _mean(history, "train_loss"),
        "target": target,
        "rounds_to_target": _at(history, "round", reached),
        "bytes_to_target": _at(history, "bytes_total", reached),
        "rounds": len(history),
        "bytes": _last(history.column("bytes_total")),
        "sim_time": _last(history.column("sim_time")),
        "wall_time": _last(history.column("wall_time")),
        "lr": run.algorithm_settings.get("lr"),
        "seed": run.seed,
        "status": run.status,
        "reason": run.reason,
        "folder": str(run.folder),
    }


def _first_at(history: StoredRounds, target: float | None) -> int | None:
    """Return the place of the first round whose test accuracy is at or above the target, or None."""
    if target is None:
        return None
    places = np.flatnonzero(history.column("test_accuracy") >= target)
    return int(places[0]) if len(places) else None


def _at(history: StoredRounds, field: str, place: int | None) -> Any:
    """Return a number of the round at a place, or None."""
    return None if place is None else history.column(field)[place].item()


def _values(history: StoredRounds, field: str) -> npt.NDArray[np.float64]:
    """Return the values of a field, without the rounds that have none."""
    values = history.column(field)
    known: npt.NDArray[np.float64] = values[~np.isnan(values)]
    return known


def _last(values: npt.NDArray[Any]) -> Any:
    return values[-1].item() if len(values) else None


def _least(values: npt.NDArray[np.float64]) -> float | None:
    return float(values.min()) if len(values) else None


def _mean(history: StoredRounds, field: str) -> float | None:
    """Return the mean over the evaluated rounds among the last ones."""
    last = history.column(field)[-LAST:]
    values: list[float] = last[~np.isnan(last)].tolist()
    return sum(value / len(values) for value in values) if values else None


def common_target(rows: Sequence[Mapping[str, Any]]) -> float | None:
    """Return the target that all rows share, or None."""
    targets = {row["target"] for row in rows}
    return targets.pop() if len(targets) == 1 else None


@dataclass(frozen=True)
class Column:
    """One column of the summary.

    Attributes:
        heading: the heading of the column.
        key: the key of its values in a row.
        best: which value is the best: "largest", "smallest" or "neither".
        note: an explanation of the heading.
    """

    heading: str
    key: str
    best: str = "smallest"
    note: str = ""


@dataclass(frozen=True)
class TableCell:
    """One value as the table shows it, and whether it is the best of its column."""

    text: str
    best: bool


def _target_name(rows: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the target as headings name it, or None if no run has one."""
    if all(row["target"] is None for row in rows):
        return None
    target = common_target(rows)
    return "target" if target is None else f"{100 * target:g}%"


def full_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns of the page: those with a value in any row, and those of the target."""
    mean = f"mean of the last {LAST} rounds"
    columns = [
        Column("best accuracy (%)", "best_accuracy", "largest", "highest test accuracy of all rounds"),
        Column("final accuracy (%)", "final_accuracy", "largest", f"{mean}, test accuracy"),
    ]
    target = _target_name(rows)
    if target is not None and any(row["accuracy"] is not None for row in rows):
        columns += [
            Column(f"rounds to {target}", "rounds_to_target", note="first round at or above the target accuracy"),
            Column(f"MB to {target}", "bytes_to_target", note="bytes moved up to that round, in both directions"),
        ]
    columns += [
        Column("best test loss", "best_test_loss", note="lowest test loss of all rounds"),
        Column("final test loss", "final_test_loss", note=f"{mean}, test loss"),
        Column("best train loss", "best_train_loss", note="lowest training loss of all rounds"),
        Column("final train loss", "final_train_loss", note=f"{mean}, training loss"),
        Column("MB moved", "bytes", note="in both directions, over the whole run"),
        Column("simulated time (s)", "sim_time", note="simulated time"),
        Column("wall time (s)", "wall_time", note="real time of the run"),
        Column("rounds", "rounds", "neither", "completed rounds"),
    ]
    targets = ("rounds_to_target", "bytes_to_target")
    return [c for c in columns if c.key in targets or any(row[c.key] is not None for row in rows)]


def _short_columns(rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """Return the columns of the table in the terminal, which has room for fewer."""
    columns = []
    if any(row["accuracy"] is not None for row in rows):
        columns += [Column("accuracy", "accuracy", "largest"), Column("best", "best_accuracy", "largest")]
        target = _target_name(rows)
        if target is not None:
            columns.append(Column(f"rounds to {target}", "rounds_to_target"))
    return [
        *columns,
        Column("loss", "test_loss"),
        Column("MB moved", "bytes"),
        Column("sim s", "sim_time"),
        Column("wall s", "wall_time"),
    ]


def table_cells(rows: Sequence[Mapping[str, Any]], columns: Sequence[Column]) -> list[list[TableCell]]:
    """Return the cells of each row; the best value of a column is marked, except those of diverged runs."""
    best = {}
    for column in columns:
        values = [
            _value_text(column.key, row[column.key])
            for row in rows
            if row[column.key] is not None and row["status"] != "diverged"
        ]
        if len(set(values)) > 1 and column.best != "neither":
            best[column.key] = (max if column.best == "largest" else min)(values, key=float)

    def cell(row: Mapping[str, Any], key: str) -> TableCell:
        text = "-" if row[key] is None else _value_text(key, row[key])
        return TableCell(text, text == best.get(key) and row["status"] != "diverged")

    return [[cell(row, column.key) for column in columns] for row in rows]


def summary_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    """Return the rows as a Rich table with the best value of each column in bold."""
    from rich.markup import escape
    from rich.table import Table

    columns = _short_columns(rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("algorithm")
    for column in columns:
        table.add_column(column.heading, justify="right")
    for row, cells in zip(rows, table_cells(rows, columns), strict=True):
        texts = [f"[bold]{cell.text}[/]" if cell.best else cell.text for cell in cells]
        name = escape(printable(row["run"])) + (" [red]diverged[/]" if row["status"] == "diverged" else "")
        table.add_row(name, *texts)
    return table


def _value_text(key: str, value: float) -> str:
    """Return a value as the table shows it."""
    if "accuracy" in key:
        return f"{100 * value:.1f}"
    if key in ("rounds_to_target", "rounds"):
        return str(value)
    if key.startswith("bytes"):
        return f"{value / 1e6:.2f}"
    if key.endswith("loss"):
        return f"{value:.3f}" if abs(value) < 1e4 else f"{value:.1e}"
    return f"{value:.1f}"
