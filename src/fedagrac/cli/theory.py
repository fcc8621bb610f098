"""The command `fedagrac theory`."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.table import Table

from fedagrac.cli import computing
from fedagrac.cli.options import DataDir, ExperimentFile, Json, Settings, TrustImports, out_option
from fedagrac.cli.printing import Terminal, one_line, print_files
from fedagrac.errors import InputError, count

if TYPE_CHECKING:
    from fedagrac.experiments.run import Prepared
    from fedagrac.experiments.study import Rate, Study

__all__ = ["theory"]


def theory(
    experiment: ExperimentFile,
    rates: Annotated[
        bool, typer.Option("--rates", help="Measure how the error depends on T, M and Kbar: 12 more settings.")
    ] = False,
    seeds: Annotated[int, typer.Option("--seeds", metavar="N", help="Seeds for each setting of --rates.")] = 3,
    settings: Settings = None,
    out: Annotated[Path | None, out_option("runs/NAME-theory-TIME")] = None,
    data_dir: DataDir = None,
    trust_imports: TrustImports = False,
    as_json: Json = False,
) -> None:
    """Compare an experiment with the paper's theory: constants, bounds, step sizes, and measured errors.

    It measures L, mu, sigma^2, B, x* and F_i(x*), evaluates the theorems term by
    term, finds the largest stable step size of every algorithm, and recommends
    one for FedaGrac. Step sizes come from the quadratic model at x*. Then it
    runs the algorithms and draws their errors beside the bounds, which hold up
    to the constant inside O(.). A model that is not linear in its weights has no
    x*; it gets Theorem 2 and the norm of the gradient.

    [bold]Examples[/]
      fedagrac theory examples/theory.toml --rates
      fedagrac theory my.toml --set weight_decay=0.01 --set rounds=50
    """
    count("--seeds", seeds)
    computing.check_exists(experiment)
    from fedagrac.experiments.schema import Experiment
    from fedagrac.experiments.study import problem_of
    from fedagrac.storage.claims import claimed

    computing.start()
    checked = Experiment.of(computing.experiment_table(experiment, settings))
    if out is not None:
        computing.check_out(out)
    prepared = computing.prepare_experiment(checked, experiment, data_dir, trust_imports)
    if rates and not problem_of(prepared).is_convex():
        raise InputError("--rates", checked.model.name, "a model linear in its weights: the rates are Theorem 3's")
    with computing.output_folder(out, f"{checked.name}-theory") as folder, claimed(folder):
        computing.check_out(folder)
        outcome = _study(prepared, seeds if rates else 0, data_dir, quiet=as_json)
        files = _write(outcome, folder)
        if as_json:
            print(json.dumps(outcome.described(), indent=1))
        else:
            _print(outcome)
            print_files(files)


def _study(prepared: Prepared, seeds: int, data_dir: Path | None, quiet: bool) -> Study:
    """Study an experiment behind a progress bar, and its rates with so many seeds; 0 for no rates."""
    from fedagrac.callbacks.progress import Progress
    from fedagrac.experiments.study import study

    console, experiment = Terminal(stderr=True), prepared.experiment
    if not quiet:
        clients = prepared.federation.num_clients
        console.print(f"[bold]{experiment.name}[/]: {clients} clients, {experiment.rounds} rounds")
    with Progress(len(prepared.entries), experiment.rounds, console) as progress:
        outcome = study(prepared, [progress], progress.stage)
    if seeds == 0:
        return outcome
    return dataclasses.replace(outcome, rates=_rates(prepared, outcome, seeds, data_dir, console))


def _rates(
    prepared: Prepared, study: Study, seeds: int, data_dir: Path | None, console: Console
) -> tuple[Rate, ...]:
    """Measure the rates behind a progress bar."""
    from rich.progress import Progress

    from fedagrac.experiments.study import FACTORS, measure_rates

    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("rates", total=3 * len(FACTORS) * seeds)

        def show(stage: str) -> None:
            bar.update(task, description=stage, advance=1)

        return measure_rates(prepared, study.constants, seeds, data_dir, show)


def _write(study: Study, folder: Path) -> Mapping[str, Path]:
    """Write the picture and the numbers of a study, and return their paths."""
    from fedagrac.files import write_atomically
    from fedagrac.report.pictures import save
    from fedagrac.report.study import plot_study

    numbers = folder / "theory.json"
    picture = save(plot_study(study), folder / "theory")
    write_atomically(numbers, json.dumps(study.described(), indent=1).encode() + b"\n")
    return {"picture": picture, "numbers": numbers}


def _print(study: Study) -> None:
    """Print the constants, the bounds, the algorithms, the recommended step size and the rates."""
    console = Terminal()
    for table in (_constants(study), _bounds(study), _algorithms(study)):
        console.print(table)
    if study.constants.value is not None:
        console.print("[dim]largest stable, limit: of the quadratic model at x* with exact gradients[/]")
    best = study.recommendation
    if best is not None:
        console.print(
            f"recommended for FedaGrac: eta = {best.lr:.4g}, lambda = {best.calibration:g} "
            f"(the error shrinks by {best.spectral_radius:.4f} in each round; unstable from eta = "
            f"{best.largest_stable_lr:.4g})",
            highlight=False,
        )
    if study.rates:
        rates = _table("over", "slope, 95 % interval", "Theorem 3's corollary")
        rates.title = "FedaGrac's error at the eta that Theorem 3 prescribes"
        for rate in study.rates:
            rates.add_row(rate.name, str(rate.slope), "-1")
        console.print(rates)


def _constants(study: Study) -> Table:
    """Return the table of measured constants."""
    c, spread = study.constants, ""
    if c.local_values is not None:
        spread = f"F_i(x*) from {c.local_values.min():.4g} to {c.local_values.max():.4g}"
    table = _table("", "value", "")
    table.title = "Constants"
    table.add_row("L", _number(c.L), f"largest curvature of a client at {c.points} points from x_1 to x*")
    table.add_row("mu", _number(c.mu), "smallest" if c.mu is not None else "not known to be convex")
    table.add_row("sigma^2", _number(c.sigma2), "variance of a stochastic gradient")
    table.add_row("B", _number(c.B), "largest ratio of a client's gradient to the global one")
    table.add_row("F(x_1) - F(x*)", _number(c.gap), "" if c.value is not None else "F(x*) taken as 0")
    table.add_row("|x_1 - x*|^2", _number(c.distance2), "")
    table.add_row("F(x*)", _number(c.value), spread)
    return table


def _bounds(study: Study) -> Table:
    """Return the table of the theorems, term by term."""
    table = _table("bound", "term", "value")
    table.title = "Bounds, up to the constant inside O(.)"
    for bound in study.bounds:
        for term, value in bound.terms.items():
            table.add_row(bound.name, term, _number(float(value)))
        etas = f"{_number(float(bound.step_size))}, {_number(bound.step_limit)}"
        table.add_row(bound.name, "[dim]eta of the statement, limit of the proof[/]", etas)
    return table


def _algorithms(study: Study) -> Table:
    """Return the table of the algorithms: step sizes and errors."""
    table = _table("algorithm", "eta", "largest stable", "error at the end", "limit")
    table.title = "F(x) - F(x*)" if study.constants.value is not None else "|gradient of F|^2"
    for curve in study.curves:
        last = _number(curve.errors[-1]) if curve.status != "diverged" else "[red]diverged[/]"
        numbers = _number(curve.lr), _number(curve.stable_lr), last, _number(curve.limit)
        table.add_row(one_line(curve.label), *numbers)
    return table


def _table(*columns: str) -> Table:
    """Return an empty table whose title stands on the left."""
    return Table(*columns, title_justify="left")


def _number(value: float | None) -> str:
    """Return a number to four digits, or a dash."""
    return "-" if value is None else f"{value:.4g}"
