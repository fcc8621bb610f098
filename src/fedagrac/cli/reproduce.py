"""The command `fedagrac reproduce`."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer
from rich.console import Console

from fedagrac.cli import computing
from fedagrac.cli.options import DataDir, Json
from fedagrac.cli.printing import Terminal, one_line, plain_table
from fedagrac.errors import one_of, positive
from fedagrac.files import make_folder

if TYPE_CHECKING:
    from fedagrac.paper import Recipe, Records, Scale, Table, Trial, TrialRecord, Verdict

__all__ = ["reproduce"]

COLOURS = {"holds": "green", "does not hold": "red", "not decided": "yellow"}


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="NAME", help="A table or figure of the paper, or all.", show_default=False)
    ],
    scale: Annotated[str, typer.Option("--scale", metavar="SCALE", help="quick, medium or paper.")] = "quick",
    only: Annotated[
        str, typer.Option("--only", metavar="TEXT", help="Do only the runs whose name contains TEXT.")
    ] = "",
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="The folder of the records.")] = Path(
        "runs/reproduction"
    ),
    data_dir: DataDir = None,
    time_budget: Annotated[
        float | None, typer.Option("--time-budget", metavar="SECONDS", help="Stop after this time.")
    ] = None,
    checkpoints: Annotated[
        Path | None,
        typer.Option(
            "--checkpoints",
            metavar="DIR",
            help="Keep a run that is cut off in this folder; the same command resumes it.",
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Reproduce a table or figure of the paper: our figures beside the paper's, and which claims hold.

    Every run is recorded in RECIPE.jsonl. Recorded runs are not repeated, so a
    long recipe can be stopped and started again. With --checkpoints, a run that
    the time budget or a signal cuts off is resumed from its last round.

    [bold]Examples[/]
      fedagrac reproduce table-models
      fedagrac reproduce table1 --only lr/
      fedagrac reproduce table1 --scale paper --out reproduction
      fedagrac reproduce table2 --time-budget 900 --checkpoints runs/cut-off
    """
    one_of("--scale", scale, ["quick", "medium", "paper"])
    if time_budget is not None:
        positive("--time-budget", time_budget)
    end = None if time_budget is None else time.monotonic() + time_budget
    from fedagrac.paper import RECIPES

    one_of("NAME", name, [*RECIPES, "all"])
    computing.start()
    outcomes = []
    for recipe in RECIPES.values() if name == "all" else [RECIPES[name]]:
        outcomes.append(_reproduce(recipe, cast("Scale", scale), only, out, data_dir, end, checkpoints, as_json))
    if as_json:
        print(json.dumps(outcomes))


def _reproduce(
    recipe: Recipe,
    scale: Scale,
    only: str,
    out: Path,
    data_dir: Path | None,
    end: float | None,
    checkpoints: Path | None,
    as_json: bool,
) -> dict[str, Any]:
    """Do the runs that are not recorded until `end`, draw and print the outcome, and return it."""
    from fedagrac.paper import Records, records_of, trials_of

    notes, records = Terminal(stderr=True), Records(out)
    for _ in range(1 if recipe.following is None else 2):  # then those that follow from the first
        trials = [trial for trial in trials_of(recipe, scale, records) if only in trial.name]
        left = None if end is None else end - time.monotonic()
        if recipe.run is not None and not _run(recipe, trials, records, data_dir, left, checkpoints, notes):
            notes.print("the time budget is spent: run the same command again to continue", highlight=False)
            break
    recorded = records_of(recipe, scale, records)
    table, verdicts = recipe.table(recorded, scale), recipe.claims(recorded)
    if recipe.picture is not None and recorded:
        from fedagrac.report.pictures import save

        make_folder(out)
        picture = save(recipe.picture(recorded, scale), out / f"{recipe.name}-{scale}")
        notes.print(f"picture: {picture}", highlight=False, soft_wrap=True)
    if not as_json:
        _print(recipe, table, verdicts)
    rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
    claims = [{"claim": v.claim, "verdict": v.verdict, "numbers": v.numbers} for v in verdicts]
    return {"recipe": recipe.name, "scale": scale, "table": rows, "claims": claims}


def _run(
    recipe: Recipe,
    trials: list[Trial],
    records: Records,
    data_dir: Path | None,
    time_budget: float | None,
    checkpoints: Path | None,
    notes: Console,
) -> bool:
    """Do the runs that are not recorded behind a progress bar. Return whether all runs are recorded now."""
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
            notes.print(f"[dim]{one_line(line)}[/]", highlight=False, soft_wrap=True)

        def show(some: list[Trial], recorded: list[TrialRecord]) -> None:
            nonlocal done, begun
            if not recorded:
                begun = begun or bool(some)
                return
            done += rounds(some)
            bar.update(task, completed=done)
            seconds = recorded[0].outcome["seconds"]
            if not begun:
                say(f"{recipe.name}: {len(some)} of {len(trials)} runs are already recorded")
            elif seconds >= 1:
                others = f" and {len(some) - 1} others" if len(some) > 1 else ""
                say(f"{some[0].name}{others}: recorded, {seconds} s")

        run = functools.partial(recipe.run, data_dir=data_dir)
        return run_trials(
            recipe.name, trials, records, run, time_budget, show, lambda: bar.advance(task), checkpoints
        )


def _print(recipe: Recipe, table: Table, verdicts: list[Verdict]) -> None:
    """Print the table, the verdicts on the paper's claims, and what the recipe assumes."""
    console = Terminal()
    shown = plain_table(title=f"{recipe.name}: {recipe.title}", title_justify="left")
    for column in table.columns:
        shown.add_column(column, overflow="fold")
    for row in table.rows:
        shown.add_row(*[one_line(cell) for cell in row])
    console.print(shown)
    for v in verdicts:
        console.print(f"[{COLOURS[v.verdict]}]{v.verdict:13s}[/] {one_line(v.claim)} ({one_line(v.numbers)})")
    for assumption in recipe.assumptions:
        console.print(f"[dim]assumed: {one_line(assumption)}[/]", highlight=False)
