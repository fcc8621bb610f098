"""One row per run: accuracy, rounds to the target, bytes, time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from rich.table import Table

    from fedagrac.report.runs import StoredRun

__all__ = ["summarise", "summary_table"]


def summarise(runs: Sequence[StoredRun], target: float | None) -> list[dict[str, Any]]:
    """Return one row of plain values per run; None where a value does not exist."""
    rows = []
    for run in runs:
        h = run.history
        last: Mapping[str, Any] = h[-1] if h else {}
        rows.append(
            {
                "algorithm": run.label,
                "accuracy": h.last("test_accuracy"),
                "best_accuracy": h.best("test_accuracy"),
                "test_loss": h.last("test_loss"),
                "rounds_to_target": None if target is None else h.rounds_to(target),
                "rounds": len(h),
                "bytes": last.get("bytes_total"),
                "sim_time": last.get("sim_time"),
                "wall_time": last.get("wall_time"),
                "lr": run.experiment["algorithm"][0].get("lr"),
                "status": run.status,
                "reason": run.reason,
                "folder": str(run.folder),
            }
        )
    return rows


def summary_table(rows: Sequence[Mapping[str, Any]], target: float | None) -> Table:
    """Return the rows as a Rich table, the best of each column in bold."""
    from rich.markup import escape
    from rich.table import Table

    classifies = any(row["accuracy"] is not None for row in rows)
    columns: list[tuple[str, str, bool]] = []  # heading, key, larger is better
    if classifies:
        columns += [("accuracy", "accuracy", True), ("best", "best_accuracy", True)]
        if target is not None:
            columns.append((f"rounds to {target:.0%}", "rounds_to_target", False))
    columns += [
        ("loss", "test_loss", False),
        ("MB moved", "bytes", False),
        ("sim s", "sim_time", False),
        ("wall s", "wall_time", False),
    ]
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("algorithm")
    for heading, _, _ in columns:
        table.add_column(heading, justify="right")
    best = {}
    for _, key, larger in columns:
        values = [_shown(key, row[key]) for row in rows if row[key] is not None and row["status"] != "diverged"]
        if values:
            best[key] = (max if larger else min)(values, key=float)
    for row in rows:
        cells = []
        for _, key, _ in columns:
            text = "-" if row[key] is None else _shown(key, row[key])
            cells.append(f"[bold]{text}[/]" if text == best.get(key) and row["status"] != "diverged" else text)
        name = escape(row["algorithm"]) + (" [red]diverged[/]" if row["status"] == "diverged" else "")
        table.add_row(name, *cells)
    return table


def _shown(key: str, value: float) -> str:
    if "accuracy" in key:
        return f"{100 * value:.1f}"
    if key == "rounds_to_target":
        return str(value)
    if key == "bytes":
        return f"{value / 1e6:.2f}"
    if key == "test_loss":
        return f"{value:.3f}" if value < 1e4 else f"{value:.1e}"
    return f"{value:.1f}"
