"""The command `fedagrac sweep`."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer

from fedagrac.cli import computing
from fedagrac.cli.options import (
    DataDir,
    ExperimentFile,
    Json,
    Resume,
    Settings,
    TrustImports,
    as_words,
    naming_options,
    out_option,
)
from fedagrac.cli.printing import Terminal, one_line, plain_table, print_files
from fedagrac.errors import InputError, count, one_of

if TYPE_CHECKING:
    from fedagrac.experiments.sweep import By, Choice, Sweep
    from fedagrac.imports import Imports
    from fedagrac.report import StoredRun
    from fedagrac.report.heatmaps import HeatMap

__all__ = ["sweep"]

NAMES: dict[By, str] = {"accuracy": "final accuracy", "rounds": "rounds to target", "loss": "final loss"}


def sweep(
    experiment: ExperimentFile,
    grid: Annotated[
        list[str],
        typer.Option("--grid", metavar="KEY=V,V", help="A setting of algorithms and its values; may be repeated."),
    ],
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="The number of seeds; the first is the experiment's.")
    ] = 1,
    by: Annotated[
        str | None,
        typer.Option(
            "--by",
            metavar="NAME",
            help="Compare by accuracy, rounds or loss; default: what runs stop at, or accuracy.",
        ),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, out_option("runs/NAME-sweep-TIME")] = None,
    data_dir: DataDir = None,
    trust_imports: TrustImports = False,
    resume: Resume = False,
    as_json: Json = False,
) -> None:
    """Run every algorithm over a grid of its settings, and print the best settings of each.

    --grid algorithm.KEY varies all algorithms that have the setting,
    algorithm.NAME.KEY varies one of them. A sweep writes a folder for each run,
    a heat map, a report on the best settings, and best.toml: the experiment
    with the best settings.

    [bold]Examples[/]
      fedagrac sweep my.toml --grid algorithm.lr=0.01,0.03,0.1 --seeds 3
      fedagrac sweep my.toml --grid algorithm.fedprox.mu=1,0.1 --by rounds
      fedagrac sweep my.toml --grid algorithm.lr=0.1,1 --out runs/lr --resume
    """
    count("--seeds", seeds)
    if by is not None:
        one_of("--by", by, NAMES)
    computing.check_resumable(resume, out)
    computing.check_exists(experiment)
    from fedagrac.imports import Imports

    computing.start()
    imports = Imports(experiment.parent, trust_imports)
    checked = _checked(experiment, settings, grid, seeds, imports)
    judged = _judged(by, checked)
    if out is not None and not resume:
        computing.check_out(out)
    with computing.output_folder(out, f"{checked.experiments[0].name}-sweep") as folder:
        options = {
            "--grid": grid, "--set": settings, "--seeds": seeds, "--by": by, "--data-dir": data_dir,
            "--trust-imports": trust_imports, "--out": folder, "--resume": True,
        }  # fmt: skip
        with computing.advising(folder, ["fedagrac", "sweep", str(experiment), *as_words(options)]):
            folders = _run(checked, folder, data_dir, imports, resume, as_json)
        _finish(_outcome(checked, folders, judged), checked, folder, as_json)


def _checked(experiment: Path, settings: list[str] | None, grid: list[str], seeds: int, imports: Imports) -> Sweep:
    """Read an experiment file and check it, the grid, and every point of the grid."""
    from fedagrac.experiments.schema import Experiment
    from fedagrac.experiments.sweep import Sweep

    table = computing.experiment_table(experiment, settings)
    Experiment.of(table)  # an error in the file names its own key, even if that is called like an option
    with naming_options(grid="--grid", set="--set", trusted="--trust-imports"):
        return Sweep.of(table, grid, seeds, imports)


def _run(
    sweep: Sweep,
    folder: Path,
    data_dir: Path | None,
    imports: Imports,
    resume: bool,
    as_json: bool,
) -> dict[str, list[Path]]:
    """Run every point with every seed behind a progress bar. Return the folders of the runs by point."""
    from fedagrac.callbacks.progress import Progress
    from fedagrac.experiments.sweep import run_sweep

    console, first, seeds = Terminal(stderr=True), sweep.experiments[0], len(sweep.experiments)
    if not as_json:
        what = f"{len(sweep.points)} settings x {seeds} seed{'s' if seeds > 1 else ''}"
        console.print(f"[bold]{first.name}: {what}[/], {first.rounds} rounds each", highlight=False)
    with (
        Progress(len(sweep.points) * seeds, first.rounds, console) as progress,
        naming_options(trusted="--trust-imports"),
    ):
        return run_sweep(sweep, folder, data_dir, progress, imports, resume)


@dataclass(frozen=True)
class Outcome:
    """What came out of a sweep.

    Attributes:
        by: what points are compared by.
        choices: every point with its numbers.
        best: the best point of each algorithm.
        runs: the runs of each point, by its label.
    """

    by: By
    choices: list[Choice]
    best: dict[str, Choice]
    runs: dict[str, list[StoredRun]]


def _outcome(sweep: Sweep, folders: dict[str, list[Path]], by: By) -> Outcome:
    """Read the runs and find the best points: by loss if no run has an accuracy."""
    from fedagrac.experiments.sweep import best_choices, choices_of
    from fedagrac.report import read_run, summarise

    runs = {label: [read_run(path) for path in paths] for label, paths in folders.items()}
    rows = {label: summarise(runs_of_point) for label, runs_of_point in runs.items()}
    if by == "accuracy" and all(row["accuracy"] is None for row in itertools.chain(*rows.values())):
        by = "loss"
    choices = choices_of(sweep.points, rows)
    return Outcome(by, choices, best_choices(choices, by), runs)


def _finish(outcome: Outcome, sweep: Sweep, folder: Path, as_json: bool) -> None:
    """Write and print what came out. Exit with code 1 if all runs diverged."""
    from fedagrac.report import write_report
    from fedagrac.report.heatmaps import plot_heat_maps
    from fedagrac.report.pictures import save
    from fedagrac.storage.sweeps import read_results

    picture = save(plot_heat_maps(_maps(outcome.choices, outcome.by)), folder / "sweep")
    best_runs = [run for choice in outcome.best.values() for run in outcome.runs[choice.point.label]]
    page = write_report(best_runs, folder)
    best = _write(folder, sweep, outcome)
    if as_json:
        print(read_results(folder), end="")
    else:
        _print(outcome)
        print_files({"heat map": picture, "report": page, "best": best})
    if all(row["status"] == "diverged" for choice in outcome.choices for row in choice.rows):
        raise typer.Exit(1)


def _judged(by: str | None, sweep: Sweep) -> By:
    """Return what points are compared by: as asked, or by rounds if runs stop at an accuracy, else by accuracy."""
    first = sweep.experiments[0]
    target = first.stop.accuracy if first.stop.accuracy is not None else first.target
    if by == "rounds" and target is None:
        raise InputError("--by", by, "accuracy or loss: the experiment has neither target nor stop.accuracy")
    if by is None:
        return "accuracy" if first.stop.accuracy is None else "rounds"
    return cast("By", by)


def _maps(choices: list[Choice], by: By) -> list[HeatMap]:
    """Return a heat map for each algorithm: its first setting down, its second across, the best of the others."""
    from fedagrac.report.heatmaps import HeatMap

    maps = []
    for name in dict.fromkeys(choice.point.algorithm for choice in choices):
        of_algorithm = [choice for choice in choices if choice.point.algorithm == name]
        down, across = [*of_algorithm[0].point.setting, "", ""][:2]
        cells: dict[tuple[str, str], Choice] = {}
        for choice in of_algorithm:
            setting = choice.point.setting
            at = str(setting.get(down, "")), str(setting.get(across, ""))
            if at not in cells or choice.rank(by) > cells[at].rank(by):
                cells[at] = choice
        rows, columns = tuple(dict.fromkeys(y for y, _ in cells)), tuple(dict.fromkeys(x for _, x in cells))
        maps.append(
            HeatMap(
                title=name,
                down=down,
                rows=rows,
                across=across,
                columns=columns,
                values=tuple(tuple(_number(cells[y, x], by) for x in columns) for y in rows),
                what=NAMES[by] + (" (%)" if by == "accuracy" else ""),
                larger_is_better=by == "accuracy",
            )
        )
    return maps


def _number(choice: Choice, by: By) -> float | None:
    """Return the mean as a heat map shows it; None if a seed missed its target, NaN if one diverged."""
    mean = choice.mean(by)
    if mean is None:
        return math.nan if any(row["status"] == "diverged" for row in choice.rows) else None
    return 100 * mean if by == "accuracy" else mean


def _write(folder: Path, sweep: Sweep, outcome: Outcome) -> Path:
    """Write every point with its numbers, and the experiment with the best settings. Return the latter's path."""
    from fedagrac.experiments.sweep import with_setting
    from fedagrac.storage.sweeps import write_best, write_results

    points = [
        {
            "algorithm": choice.point.algorithm,
            "setting": choice.point.setting,
            "best": outcome.best[choice.point.algorithm] is choice,
            "mean": choice.mean(outcome.by),
            "spread": choice.spread(outcome.by),
            "runs": [dict(row) for row in choice.rows],
        }
        for choice in outcome.choices
    ]
    seeds = [experiment.seed for experiment in sweep.experiments]
    write_results(folder, {"by": outcome.by, "seeds": seeds, "points": points})
    entries = [
        with_setting(entry, choice.point.setting, sweep.table.get("lr"))
        for entry, choice in zip(sweep.table["algorithm"], outcome.best.values(), strict=True)
    ]
    return write_best(folder, {**sweep.table, "algorithm": entries})


def _print(outcome: Outcome) -> None:
    """Print the best point of each algorithm, and what is at the edge of the grid or diverged."""
    from fedagrac.experiments.sweep import at_the_edge

    console, choices, best = Terminal(), outcome.choices, outcome.best
    table = plain_table(header_style="bold")
    table.add_column("algorithm")
    table.add_column("best setting", overflow="fold")
    shown: list[By] = [key for key in dict.fromkeys((outcome.by, *NAMES)) if any(c.values(key) for c in choices)]
    for key in shown:
        table.add_column(NAMES[key], justify="right")
    table.add_column("of", justify="right")
    for name, choice in best.items():
        tried = sum(c.point.algorithm == name for c in choices)
        table.add_row(
            one_line(name), one_line(choice.point.text), *[_shown(choice, key) for key in shown], str(tried)
        )
    console.print(table)
    for name, choice in best.items():
        for setting in at_the_edge(choice, choices):
            text = f"{name}: {setting}={choice.point.setting[setting]} is at the edge of the grid: try a wider one"
            console.print(f"[yellow]{one_line(text)}[/]", highlight=False)
    for choice in choices:
        lost = sum(row["status"] == "diverged" for row in choice.rows)
        if lost:
            console.print(f"[red]{one_line(choice.point.label)} diverged[/] ({lost} of {len(choice.rows)} seeds)")
    console.print()


def _shown(choice: Choice, by: By) -> str:
    """Return the mean and the spread over the seeds as text."""
    values, mean = choice.values(by), choice.mean(by)
    if mean is None:
        return f"{len(values)} of {len(choice.rows)} seeds" if by == "rounds" else "-"
    scale, digits = {"accuracy": (100, 2), "rounds": (1, 1), "loss": (1, 4)}[by]
    spread = f" ± {scale * choice.spread(by):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean:.{digits}f}{spread}"
