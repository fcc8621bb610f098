"""The command: fedagrac reproduce."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from fedagrac.errors import one_of, positive
from fedagrac.files import make_folder

if TYPE_CHECKING:
    from fedagrac.paper import Recipe, Records, Table, Trial, TrialRecord, Verdict

__all__ = ["reproduce"]


def reproduce(
    name: Annotated[str, typer.Argument(metavar="NAME", help="A table or figure of the paper, or all.")],
    scale: Annotated[str, typer.Option("--scale", help="quick, medium or paper.")] = "quick",
    only: Annotated[str, typer.Option("--only", metavar="TEXT", help="Only runs whose name contains this.")] = "",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="Where the records are kept.")] = Path(
        "runs/reproduction"
    ),
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Where to look for data files first.")
    ] = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", metavar="SECONDS", help="Stop cleanly after so long.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print tables and verdicts as JSON.")] = False,
) -> None:
    """Regenerate a table or figure of the paper: ours beside the paper's, and which claims hold.

    Every run is recorded in RECIPE.jsonl. Recorded runs are not run again, so a long recipe can be stopped and
    continued.

    [bold]Examples[/]

      fedagrac reproduce table-models

      fedagrac reproduce table1 --only lr/

      fedagrac reproduce table-variance --scale paper --out reproduction --time-budget 3000
    """
    from fedagrac.paper import RECIPES, Records, records_of

    one_of("NAME", name, [*RECIPES, "all"])
    one_of("--scale", scale, ["quick", "medium", "paper"])
    if time_budget is not None:
        positive("--time-budget", time_budget)
    end = None if time_budget is None else time.monotonic() + time_budget
    notes, console = Console(stderr=True), Console()
    store, printed = Records(out), []
    for recipe in RECIPES.values() if name == "all" else [RECIPES[name]]:
        trials = [trial for trial in recipe.trials(scale) if only in trial.name]  # type: ignore[arg-type]
        left = None if end is None else end - time.monotonic()
        if recipe.run is not None and not _run(recipe, trials, store, data_dir, left, notes):
            notes.print("the time budget is spent: run the same command again to go on", highlight=False)
        records = records_of(recipe, scale, store)  # type: ignore[arg-type]
        table, verdicts = recipe.table(records, scale), recipe.claims(records)  # type: ignore[arg-type]
        if recipe.picture is not None and records:
            from fedagrac.report.pictures import save

            make_folder(out)
            picture = save(recipe.picture(records, scale), out / f"{recipe.name}-{scale}")  # type: ignore[arg-type]
            notes.print(f"picture: {picture}", highlight=False, soft_wrap=True)
        if as_json:
            rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
            claims = [{"claim": v.claim, "verdict": v.verdict, "numbers": v.numbers} for v in verdicts]
            printed.append({"recipe": recipe.name, "scale": scale, "table": rows, "claims": claims})
        else:
            _print(recipe, table, verdicts, console)
    if as_json:
        print(json.dumps(printed))


def _run(
    recipe: Recipe,
    trials: list[Trial],
    store: Records,
    data_dir: Path | None,
    time_budget: float | None,
    notes: Console,
) -> bool:
    """Run what is not recorded yet behind a progress bar; return whether everything is recorded now."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    from fedagrac.paper import run_trials

    def rounds(some: Iterable[Trial]) -> int:
        return sum(trial.settings.get("rounds", 1) for trial in some)

    columns = (
        TextColumn("{task.description}", style="bold"), BarColumn(bar_width=None), MofNCompleteColumn(),
        TextColumn("rounds"), TimeRemainingColumn(compact=True), TextColumn("left"),
    )  # fmt: skip
    assert recipe.run is not None
    done, begun = 0, False
    with Progress(*columns, console=notes, transient=True) as bar:
        task = bar.add_task(recipe.name, total=rounds(trials))

        def say(line: str) -> None:
            notes.print(f"[dim]{escape(line)}[/]", highlight=False, soft_wrap=True)

        def show(some: list[Trial], records: list[TrialRecord]) -> None:
            nonlocal done, begun
            if not records:
                begun = begun or bool(some)
                return
            done += rounds(some)
            bar.update(task, completed=done)
            seconds = records[0].outcome["seconds"]
            if not begun:
                say(f"{recipe.name}: {len(some)} of {len(trials)} runs were recorded before")
            elif seconds >= 1:
                others = f" and {len(some) - 1} others" if len(some) > 1 else ""
                say(f"{some[0].name}{others}: recorded, {seconds} s")

        run = functools.partial(recipe.run, data_dir=data_dir)
        return run_trials(recipe.name, trials, store, run, time_budget, show, lambda: bar.advance(task))


def _print(recipe: Recipe, table: Table, verdicts: list[Verdict], console: Console) -> None:
    """Print ours beside the paper's, the verdicts and what was assumed."""
    from rich.table import Table as Shown

    shown = Shown(box=None, pad_edge=False, title=f"{recipe.name}: {recipe.title}", title_justify="left")
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*[escape(trial) for trial in row])
    console.print(shown)
    colours = {"holds": "green", "does not hold": "red", "not decided": "yellow"}
    for v in verdicts:
        console.print(f"[{colours[v.verdict]}]{v.verdict:13s}[/] {escape(v.claim)} ({escape(v.numbers)})")
    for assumption in recipe.assumptions:
        console.print(f"[dim]assumed: {escape(assumption)}[/]", highlight=False)
