"""How `fedagrac flower status` prints the status of a run, on 80 columns."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from rich.table import Table

from fedagrac.cli.printing import Terminal, one_line, plain_table

if TYPE_CHECKING:
    from fedagrac.storage.activity import Activity
    from fedagrac.storage.status import RunStatus

__all__ = ["print_status"]

MOST_ROWS = 20
"""The most clients in the table. The JSON output has all."""

MOST_REASONS = 5
"""The most clients whose last reason is printed."""

COLOURS = {"running": "green", "finished": "green", "failed": "red", "diverged": "red", "interrupted": "yellow"}


def print_status(run: RunStatus, now: float | None = None) -> None:
    """Print the state, the last round, the clients and the last events of a run."""
    now = time.time() if now is None else now
    console = Terminal()

    def say(text: str) -> None:
        console.print(text, highlight=False)

    colour = COLOURS.get(run.state, "bold")
    reason = f": {one_line(run.reason)}" if run.reason else ""
    say(f"{one_line(run.folder)}: [{colour}]{run.state}[/]{reason}")
    for line in progress(run, now):
        say(line)
    if run.activities:
        console.print()
        console.print(client_table(run.activities[:MOST_ROWS], now))
        for line in client_notes(run):
            say(line)
    if run.events:
        say("\nlast events")
        for number, event in run.events:
            say(f"  round {number}: {one_line(event)}")


def progress(run: RunStatus, now: float) -> list[str]:
    """Return sentences about the last round and the one in progress."""
    lines, last, of = [], run.last, "" if run.rounds is None else f" of {run.rounds}"
    if last is not None:
        measures = {
            "test accuracy": last.test_accuracy,
            "test loss": last.test_loss,
            "train loss": last.train_loss,
        }
        values = [f"{name} {value:.4f}" for name, value in measures.items() if value is not None]
        asked = "" if last.asked is None else f" of {last.asked}"
        lines.append(", ".join([f"round {last.round}{of} done with {last.clients}{asked} clients", *values]))
    if run.since is not None:
        elapsed = duration(now - run.since)
        number = 1 if last is None else last.round + 1
        what = "waiting for clients" if run.state == "starting" else f"round {number}{of} in progress"
        end = "" if run.end is None else f", estimated end in {duration(run.end - now)}"
        lines.append(f"{what} for {elapsed}{end}")
    if run.stalled:
        lines.append("[red]stalled[/]: this is longer than round_seconds x attempts + wait_seconds")
    return lines


def client_table(activities: list[Activity], now: float) -> Table:
    """Return the table of clients, which has room on 80 columns."""
    table = plain_table(header_style="bold", collapse_padding=True)
    for heading in ("client", "rounds", "weight", "steps", "mean s", "last s", "down", "up", "dropped", "seen"):
        table.add_column(heading, justify="right", no_wrap=True)
    for row in (activity.row() for activity in activities):
        table.add_row(
            str(row["client"]),
            str(row["rounds"]),
            *(short(row[name]) for name in ("weight", "steps", "seconds", "last_seconds")),
            size(row["sent"]),
            size(row["received"]),
            f"[red]{row['dropped']}[/]" if row["dropped"] else "0",
            "-" if row["seen"] is None else f"{duration(now - _seconds(row['seen']))} ago",
        )
    return table


def client_notes(run: RunStatus) -> list[str]:
    """Return sentences about the clients that the table does not hold, and why clients were dropped."""
    lines = []
    hidden = len(run.activities) - MOST_ROWS
    if hidden > 0:
        lines.append(f"and {hidden:,} more clients, which were dropped less often; --json lists all")
    unseen = 0 if run.clients is None else run.clients - len(run.activities)
    if unseen > 0:
        lines.append(f"{unseen:,} of {run.clients:,} clients took no part in these rounds")
    if not run.complete:
        lines.append(f"means and sums over the last {run.read_rounds:,} rounds")
    for activity in run.activities[:MOST_REASONS]:
        if activity.reason is not None:
            text = one_line(activity.reason)
            lines.append(f"client {activity.client} was last dropped in round {activity.reason_round}: {text}")
    return lines


def short(value: float | None) -> str:
    """Return a number in about four digits; a dash for none.

    Examples:
        >>> [short(v) for v in (0.25, 1 / 3, 12.0, 1234.56, 123456.7, None)]
        ['0.25', '0.3333', '12', '1235', '123457', '-']
    """
    if value is None:
        return "-"
    return f"{value:.4g}" if value < 1000 else f"{value:.0f}"


def duration(seconds: float) -> str:
    """Return a time span in its largest unit.

    Examples:
        >>> [duration(s) for s in (-1, 59, 90, 7200, 200_000)]
        ['0 s', '59 s', '2 min', '2 h', '2 d']
    """
    for unit, length, most in (("s", 1, 60), ("min", 60, 3600), ("h", 3600, 86400)):
        if seconds < most:
            return f"{max(0.0, seconds) / length:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"


def size(nbytes: int) -> str:
    """Return a number of bytes in its largest unit.

    Examples:
        >>> [size(n) for n in (0, 999, 2600, 12_345_678, 5 * 10**9)]
        ['0 B', '999 B', '2.6 kB', '12.3 MB', '5 GB']
    """
    if nbytes < 1000:
        return f"{nbytes} B"
    value, units = nbytes / 1000, iter(("kB", "MB", "GB", "TB"))
    unit = next(units)
    while value >= 999.5 and unit != "TB":
        value, unit = value / 1000, next(units)
    return f"{value:.3g} {unit}"


def _seconds(seen: str) -> float:
    """Return a time in ISO 8601 as seconds since 1970; 0 for one that does not exist."""
    try:
        return datetime.strptime(seen, "%Y-%m-%dT%H:%M:%SZ").replace(tzinfo=UTC).timestamp()
    except ValueError:
        return 0.0
