"""The command: fedagrac sweep."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedagrac.errors import InputError, count, one_of
from fedagrac.rounds.interrupts import advising, typed

if TYPE_CHECKING:
    from fedagrac.experiments.sweep import By, Choice, Sweep
    from fedagrac.report.heatmaps import HeatMap

__all__ = ["sweep"]

NAMES: dict[By, str] = {"accuracy": "final accuracy", "rounds": "rounds to target", "loss": "final loss"}


def sweep(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file.")],
    grid: Annotated[
        list[str],
        typer.Option("--grid", metavar="KEY=V,V", help="A setting of algorithms and its values; may be repeated."),
    ],
    seeds: Annotated[
        int, typer.Option("--seeds", metavar="N", help="How many seeds, from the experiment's on.")
    ] = 1,
    by: Annotated[
        str | None,
        typer.Option("--by", help="accuracy, rounds (to the target) or loss; default: what the experiment has."),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: runs/NAME-sweep-TIME.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Where to look for data files first.")
    ] = None,
    trust_imports: Annotated[
        bool, typer.Option("--trust-imports", help="Let model.name import any module: this runs its code.")
    ] = False,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the sweep in --out where it was interrupted.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print every point as JSON.")] = False,
) -> None:
    """Run every algorithm over a grid of its settings; print the best of each, as the paper compares.

    algorithm.KEY varies all algorithms that have the setting, algorithm.NAME.KEY one of them. Points of a small
    model run side by side as one wide batch. Written are a run folder per point and seed, a heat map, a report
    of the best settings, and best.toml: the experiment with every algorithm at its best, ready to run.

    [bold]Examples[/]

      fedagrac sweep my.toml --grid algorithm.lr=0.01,0.03,0.1 --seeds 3

      fedagrac sweep my.toml --grid algorithm.lr=0.1,0.3 --grid algorithm.fedprox.mu=1,0.1,0.01 --by rounds

      fedagrac sweep my.toml --grid algorithm.lr=0.01,0.03,0.1 --out runs/sweep --resume
    """
    from fedagrac.callbacks.progress import Progress
    from fedagrac.experiments.overrides import apply_settings
    from fedagrac.experiments.run import check_free
    from fedagrac.experiments.schema import read_toml
    from fedagrac.experiments.sweep import Sweep, best_choices, choices_of, run_sweep
    from fedagrac.models import Imports
    from fedagrac.report import read_run, summarise, write_report
    from fedagrac.report.heatmaps import plot_heat_maps
    from fedagrac.report.pictures import save

    count("--seeds", seeds)
    if by is not None:
        one_of("--by", by, ["accuracy", "rounds", "loss"])
    checked = Sweep.of(apply_settings(read_toml(experiment), settings or []), grid, seeds)
    first = checked.experiments[0]
    judged = _judged(by, checked)
    if resume and out is None:
        raise InputError("--resume", None, "the folder of the sweep that goes on: --out DIR")
    folder = out or Path("runs") / f"{first.name}-sweep-{time.strftime('%Y%m%d-%H%M%S')}"
    if not resume:
        check_free(folder)
    notes = Console(stderr=True)
    total = len(checked.points) * seeds
    if not as_json:
        what = f"{len(checked.points)} settings x {seeds} seed{'s' if seeds > 1 else ''}"
        notes.print(f"[bold]{first.name}: {what}[/], {first.rounds} rounds each", highlight=False)
    given = {
        "--grid": grid,
        "--set": settings or [],
        "--seeds": seeds,
        "--by": by,
        "--data-dir": data_dir,
        "--trust-imports": trust_imports,
        "--out": folder,
    }
    words = ["fedagrac", "sweep", str(experiment), *typed(given), "--resume"]
    with advising(folder, words), Progress(total, first.rounds, notes) as progress:
        imports = Imports(experiment.parent, trust_imports)
        folders = run_sweep(checked, folder, data_dir, progress, imports, resume)
    runs = {label: [read_run(path) for path in paths] for label, paths in folders.items()}
    if judged == "accuracy" and all(row["accuracy"] is None for some in runs.values() for row in summarise(some)):
        judged = "loss"
    choices = choices_of(checked.points, {label: summarise(some) for label, some in runs.items()})
    best = best_choices(choices, judged)
    picture = save(plot_heat_maps(_maps(choices, judged)), folder / "sweep")
    page = write_report([run for choice in best.values() for run in runs[choice.point.label]], folder)
    _write(folder, checked, choices, best, judged)
    if as_json:
        print((folder / "sweep.json").read_text(), end="")
    else:
        places = {"heat map": picture, "report": page, "best": folder / "best.toml"}
        _print(choices, best, judged, places)
    if all(row["status"] == "diverged" for choice in choices for row in choice.rows):
        raise typer.Exit(1)


def _judged(by: str | None, sweep: Sweep) -> By:
    """Return by what points are judged: as asked, or rounds where runs stop at an accuracy, or accuracy."""
    first = sweep.experiments[0]
    target = first.stop.accuracy if first.stop.accuracy is not None else first.target
    if by == "rounds" and target is None:
        raise InputError("--by", by, "accuracy or loss: the experiment has neither target nor stop.accuracy")
    if by is None:
        return "accuracy" if first.stop.accuracy is None else "rounds"
    return by  # type: ignore[return-value]


def _maps(choices: list[Choice], by: By) -> list[HeatMap]:
    """Return a heat map for each algorithm: its first setting down, its second across, the best of any others."""
    from fedagrac.report.heatmaps import HeatMap

    maps = []
    for name in dict.fromkeys(choice.point.algorithm for choice in choices):
        own = [choice for choice in choices if choice.point.algorithm == name]
        down, across = [*own[0].point.setting, "", ""][:2]
        cells: dict[tuple[str, str], Choice] = {}
        for choice in own:
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
    """Return the mean as it is shown; None where not every seed reached its target, NaN where one diverged."""
    mean = choice.mean(by)
    if mean is None:
        return math.nan if any(row["status"] == "diverged" for row in choice.rows) else None
    return 100 * mean if by == "accuracy" else mean


def _write(folder: Path, sweep: Sweep, choices: list[Choice], best: dict[str, Choice], by: By) -> None:
    """Write sweep.json, every point with its numbers, and best.toml, the experiment at its best."""
    import tomli_w

    from fedagrac.files import write_atomically

    points = [
        {
            "algorithm": choice.point.algorithm,
            "setting": choice.point.setting,
            "best": best[choice.point.algorithm] is choice,
            "mean": choice.mean(by),
            "spread": choice.spread(by),
            "runs": [dict(row) for row in choice.rows],
        }
        for choice in choices
    ]
    written = {"by": by, "seeds": [e.seed for e in sweep.experiments], "points": points}
    write_atomically(folder / "sweep.json", (json.dumps(written, indent=1) + "\n").encode())
    entries = []
    for given, choice in zip(sweep.table["algorithm"], best.values(), strict=True):
        entries.append({**given, **choice.point.setting})
    write_atomically(folder / "best.toml", tomli_w.dumps({**sweep.table, "algorithm": entries}).encode())


def _print(choices: list[Choice], best: dict[str, Choice], by: By, places: dict[str, Path]) -> None:
    from fedagrac.experiments.sweep import at_the_edge

    console = Console()
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("algorithm")
    table.add_column("best setting", overflow="fold")
    shown: list[By] = [key for key in dict.fromkeys((by, *NAMES)) if any(c.values(key) for c in choices)]
    for key in shown:
        table.add_column(NAMES[key], justify="right")
    table.add_column("of", justify="right")
    for name, choice in best.items():
        own = sum(c.point.algorithm == name for c in choices)
        table.add_row(escape(name), escape(choice.point.text), *[_shown(choice, key) for key in shown], str(own))
    console.print(table)
    for name, choice in best.items():
        for setting in at_the_edge(choice, choices):
            text = f"{name}: {setting}={choice.point.setting[setting]} is at the edge of the grid: try a wider one"
            console.print(f"[yellow]{escape(text)}[/]", highlight=False)
    for choice in choices:
        lost = sum(row["status"] == "diverged" for row in choice.rows)
        if lost:
            console.print(f"[red]{escape(choice.point.label)} diverged[/] ({lost} of {len(choice.rows)} seeds)")
    console.print()
    for what, path in places.items():
        console.print(f"{what:<9}{escape(str(path))}", highlight=False, soft_wrap=True)


def _shown(choice: Choice, by: By) -> str:
    """Return mean and spread in words."""
    values, mean = choice.values(by), choice.mean(by)
    if mean is None:
        return f"{len(values)} of {len(choice.rows)} seeds" if by == "rounds" else "-"
    scale, digits = {"accuracy": (100, 2), "rounds": (1, 1), "loss": (1, 4)}[by]
    spread = f" ± {scale * choice.spread(by):.{digits}f}" if len(values) > 1 else ""
    return f"{scale * mean:.{digits}f}{spread}"
