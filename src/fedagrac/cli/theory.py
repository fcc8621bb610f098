"""The command: fedagrac theory."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedagrac.errors import InputError, count

if TYPE_CHECKING:
    from fedagrac.experiments.study import Study
    from fedagrac.theory.bounds import Bound

__all__ = ["theory"]


def theory(
    experiment: Annotated[Path, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file.")],
    rates: Annotated[
        bool, typer.Option("--rates", help="Measure how the error depends on T, M and Kbar: 12 more settings.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Seeds per setting of --rates.")] = 3,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: runs/NAME-theory-TIME.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Where to look for data files first.")
    ] = None,
    trust_imports: Annotated[
        bool, typer.Option("--trust-imports", help="Let model.name import any module: this runs its code.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Set an experiment beside the paper's theory: constants, bounds, step sizes, and what really happens.

    Measures L, mu, sigma^2, B, x* and F_i(x*), evaluates the theorems term by term, finds the largest stable step
    size of every algorithm and a recommended one for FedaGrac on the quadratic model at x*, runs the algorithms
    and draws their error beside the bounds. Models that are not linear in their weights have no x*: for them it is
    Theorem 2 and the norm of the gradient. Bounds hold up to the constant inside O(.).

    [bold]Examples[/]

      fedagrac theory examples/theory.toml --rates

      fedagrac theory my.toml --set weight_decay=0.01 --set rounds=50
    """
    from rich.progress import Progress as Bar

    from fedagrac.callbacks.progress import Progress
    from fedagrac.experiments.overrides import apply_settings
    from fedagrac.experiments.run import check_free, prepare
    from fedagrac.experiments.schema import Experiment, read_toml
    from fedagrac.experiments.study import FACTORS, measure_rates, problem_of, study
    from fedagrac.files import make_folder, write_atomically
    from fedagrac.models import Imports
    from fedagrac.report.pictures import save
    from fedagrac.report.study import plot_study

    count("--seeds", seeds)
    checked = Experiment.of(apply_settings(read_toml(experiment), settings or []))
    folder = out or Path("runs") / f"{checked.name}-theory-{time.strftime('%Y%m%d-%H%M%S')}"
    check_free(folder)
    prepared = prepare(checked, data_dir, Imports(experiment.parent, trust_imports))
    if rates and not problem_of(prepared).is_convex():
        raise InputError("--rates", checked.model.name, "a model linear in its weights: the rates are Theorem 3's")
    notes = Console(stderr=True)
    if not as_json:
        notes.print(f"[bold]{checked.name}[/]: {prepared.federation.num_clients} clients, {checked.rounds} rounds")
    with Progress(len(prepared.entries), checked.rounds, notes) as progress:
        found = study(prepared, [progress], progress.stage)
    if rates:
        with Bar(console=notes, transient=True) as bar:
            task = bar.add_task("rates", total=3 * len(FACTORS) * seeds)

            def say(stage: str) -> None:
                bar.update(task, description=stage, advance=1)

            found = dataclasses.replace(
                found, rates=measure_rates(prepared, found.constants, seeds, data_dir, say)
            )
    make_folder(folder)
    picture = save(plot_study(found), folder / "theory")
    numbers = json.dumps(found.described(), indent=1)
    write_atomically(folder / "theory.json", numbers.encode() + b"\n")
    if as_json:
        print(numbers)
    else:
        _print(found, {"picture": picture, "numbers": folder / "theory.json"})


def _print(study: Study, places: dict[str, Path]) -> None:
    """Print what was found: constants, bounds, algorithms, rates."""
    console = Console()
    c = study.constants
    constants = _table(
        ("L", _number(c.L), f"largest curvature of a client at {c.points} points from x_1 to x*"),
        ("mu", _number(c.mu), "smallest" if c.mu is not None else "not known to be convex"),
        ("sigma^2", _number(c.sigma2), "variance of a stochastic gradient"),
        ("B", _number(c.B), "largest ratio of a client's gradient to the global one"),
        ("F(x_1) - F(x*)", _number(c.gap), "" if c.value is not None else "F(x*) taken as 0"),
        ("|x_1 - x*|^2", _number(c.distance2), ""),
        ("F(x*)", _number(c.value), _spread(study)),
        title="Constants",
    )
    bounds = Table("bound", "term", "value", title="Bounds, up to the constant inside O(.)", title_justify="left")
    for bound in study.bounds:
        for term, value in bound.terms.items():
            bounds.add_row(bound.name, term, _number(float(value)))
        bounds.add_row(bound.name, "[dim]eta of the statement, limit of the proof[/]", _etas(bound))
    curves = Table("algorithm", "eta", "largest stable", "error at the end", "limit", title_justify="left")
    curves.title = "F(x) - F(x*)" if c.value is not None else "|gradient of F|^2"
    for curve in study.curves:
        last = _number(curve.errors[-1]) if curve.status != "diverged" else "[red]diverged[/]"
        curves.add_row(curve.label, _number(curve.lr), _number(curve.stable_lr), last, _number(curve.limit))
    for table in (constants, bounds, curves):
        console.print(table)
    if c.value is not None:
        console.print("[dim]largest stable, limit: of the quadratic model at x* with exact gradients[/]")
    best = study.recommendation
    if best is not None:
        console.print(
            f"recommended for FedaGrac: eta = {best.lr:.4g}, lambda = {best.calibration:g} "
            f"(an error shrinks by {best.spectral_radius:.4f} a round; unstable from eta = "
            f"{best.largest_stable_lr:.4g} on)",
            highlight=False,
        )
    if study.rates:
        rates = Table("over", "slope, 95 % interval", "Theorem 3's corollary", title_justify="left")
        rates.title = "FedaGrac's error at the eta that Theorem 3 prescribes"
        for rate in study.rates:
            rates.add_row(rate.name, str(rate.slope), "-1")
        console.print(rates)
    for name, path in places.items():
        console.print(f"{name:<8}{path}", highlight=False, soft_wrap=True)


def _table(*rows: tuple[str, str, str], title: str) -> Table:
    table = Table("", "value", "", title=title, title_justify="left")
    for row in rows:
        table.add_row(*row)
    return table


def _spread(study: Study) -> str:
    local = study.constants.local_values
    return "" if local is None else f"F_i(x*) from {local.min():.4g} to {local.max():.4g}"


def _etas(bound: Bound) -> str:
    return f"{_number(float(bound.step_size))}, {_number(bound.step_limit)}"


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"
