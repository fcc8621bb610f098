"""The command `fedagrac report`."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedagrac.cli.computing import timestamp
from fedagrac.cli.options import Json, out_option
from fedagrac.cli.printing import Terminal, one_line, print_files
from fedagrac.errors import InputError

if TYPE_CHECKING:
    from fedagrac.report import StoredRun

__all__ = ["print_report", "report"]


def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Folders of experiments or of single runs.")
    ],
    out: Annotated[Path | None, out_option("DIR, or reports/TIME for several DIRs")] = None,
    as_json: Json = False,
) -> None:
    """Write an HTML page with the curves and tables of finished runs, and its pictures as PNG and PDF.

    The page is one file and needs no network. An earlier report in the folder
    is replaced.

    [bold]Examples[/]
      fedagrac report runs/mine
      fedagrac report runs/seed-0 runs/seed-1/fedagrac --out reports/seeds
    """
    if out is not None and out.exists() and not out.is_dir():
        raise InputError("--out", str(out), "a folder: this is a file")
    from fedagrac.report import find_runs, write_report
    from fedagrac.storage.claims import new_folder

    runs = find_runs(folders)
    with contextlib.ExitStack() as stack:
        folder = out or folders[0]
        if out is None and len(folders) > 1:
            folder = stack.enter_context(new_folder(Path("reports") / timestamp()))
        print_report(runs, write_report(runs, folder), as_json)


def print_report(
    runs: Sequence[StoredRun], page: Path, as_json: bool, hints: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Print a summary of runs and where their report is. Return the rows of the summary."""
    from fedagrac.report import common_target, summarise, summary_table

    rows, folder = summarise(runs), page.parent
    if as_json:
        names = ", ".join(dict.fromkeys(run.name for run in runs))
        places = {"experiment": names, "folder": str(folder), "report": str(page)}
        print(json.dumps({**places, "target": common_target(rows), "runs": rows}))
        return rows
    console = Terminal()
    console.print(summary_table(rows))
    for hint in hints:
        console.print(f"[dim]{one_line(hint)}[/]", highlight=False)
    for row in rows:
        if row["status"] == "diverged":
            console.print(f"[red]{one_line(row['run'])} diverged[/]: {one_line(row['reason'])}", highlight=False)
    console.print()
    print_files(
        {
            "report": page,
            "curves": folder / "curves.png",
            "costs": folder / "costs.png",
            "figures": folder / "figures",
        }
    )
    return rows
