"""The command `fedagrac bench`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from fedagrac.cli import computing
from fedagrac.cli.options import Json
from fedagrac.cli.printing import Terminal, plain_table
from fedagrac.errors import InputError, one_of, positive
from fedagrac.files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from fedagrac.engines.precision import Precision

__all__ = ["bench"]

PARTS = ("engines", "clients", "spread", "size")

Row = dict[str, Any]


def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="Workloads; default: all.")
    ] = None,
    parts: Annotated[
        str, typer.Option("--parts", metavar="LIST", help="Any of engines,clients,spread,size.")
    ] = "engines",
    engines: Annotated[
        str | None, typer.Option("--engines", metavar="LIST", help="Engines, separated by commas; default: all.")
    ] = None,
    device: Annotated[str, typer.Option("--device", metavar="NAME", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[
        str, typer.Option("--precision", metavar="NAME", help="float32, bf16, or tf32 on a GPU.")
    ] = "float32",
    budget: Annotated[
        float, typer.Option("--budget", metavar="SECONDS", help="Time for each row, without start-up.")
    ] = 5.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write bench.json and pictures to DIR.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time every engine and an ordinary PyTorch loop on this machine, in microseconds per client-step.

    A client-step is one local step of one client: gather a batch, forward,
    backward, update. Start-up is listed separately; it includes compiling, which
    takes tens of seconds per row the first time.

    [bold]Examples[/]
      fedagrac bench lr-a9a cnn
      fedagrac bench --parts engines,clients,spread,size --out bench
    """
    chosen = [one_of("--parts", name, PARTS) for name in parts.split(",") if name]
    positive("--budget", budget)
    from fedagrac.engines.choice import CANDIDATES
    from fedagrac.engines.precision import PRECISIONS
    from fedagrac.experiments.bench import CASES, engines_for, machine

    checked = cast("Precision", one_of("--precision", precision, PRECISIONS))
    computing.start()
    where = _device(device)
    names = [
        one_of("--engines", name, CANDIDATES) for name in (engines.split(",") if engines else engines_for(where))
    ]
    tasks = [one_of("workload", name, CASES) for name in workloads or CASES]
    facts = {"machine": machine(where), "precision": precision}
    rows = _timed(chosen, tasks, names, where, checked, budget, out, facts)
    if as_json:
        print(json.dumps({**facts, "rows": rows}))
    else:
        _print(rows, chosen, names, facts)
    if out is not None:
        _draw(rows, chosen, out)


def _device(name: str) -> str:
    """Return the device to time on."""
    import torch

    usable = torch.cuda.is_available()
    if name == "auto":
        return "cuda" if usable else "cpu"
    if name != "cpu" and not name.startswith("cuda"):
        raise InputError("--device", name, "auto, cpu or cuda")
    if name != "cpu" and not usable:
        raise InputError("--device", name, "auto or cpu: torch finds no GPU here")
    return name


def _timed(
    parts: list[str],
    workloads: list[str],
    engines: list[str],
    device: str,
    precision: Precision,
    budget: float,
    out: Path | None,
    facts: dict[str, Any],
) -> list[Row]:
    """Return one row for each timing. Write the rows so far after each one."""
    from fedagrac.experiments.bench import compare, sweep

    rows: list[Row] = []
    with Terminal(stderr=True).status("") as status:
        for part in parts:
            status.update(f"{part}: timing ...")
            if part == "engines":
                timings = compare(workloads, engines, device, precision, budget)
            else:
                timings = sweep(part, engines, device, precision, budget)
            for row in timings:
                rows.append(row)
                what = row.get("workload") or f"{row['sweep']} {row['point']}"
                status.update(f"{part}: {what}, {row['engine']}: {row['us']:.4g} us; timing the next ...")
                if out is not None:
                    make_folder(out)
                    content = json.dumps({**facts, "rows": rows}, indent=1)
                    write_atomically(out / "bench.json", content.encode() + b"\n")
    return rows


def _print(rows: list[Row], parts: list[str], engines: list[str], facts: dict[str, Any]) -> None:
    """Print the machine and a table for each part."""
    from fedagrac.experiments.bench import SWEEPS

    console, machine = Terminal(), facts["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    console.print(
        f"{machine['processor']}, {machine['threads']} threads{gpu}, torch {machine['torch']}, "
        f"{facts['precision']}; microseconds per client-step",
        highlight=False,
    )
    for part in parts:
        if part == "engines":
            console.print(_engine_table(rows, engines))
        else:
            console.print(_sweep_table(_rows_of(part, rows), SWEEPS[part][0], engines))


def _rows_of(sweep: str, rows: list[Row]) -> list[Row]:
    """Return the rows of one sweep."""
    return [row for row in rows if row.get("sweep") == sweep]


def _engine_table(rows: list[Row], engines: list[str]) -> Table:
    """Return a table with a line for each workload and a column for each engine."""
    table = plain_table()
    table.add_column("workload")
    for name in ("plain loop", *engines):
        table.add_column(name, justify="right")
    by_workload: dict[str, dict[str, Row]] = {}
    for row in rows:
        if "workload" in row:
            by_workload.setdefault(row["workload"], {})[row["engine"]] = row
    for workload, by_engine in by_workload.items():
        plain = sum(row["plain_us"] for row in by_engine.values()) / len(by_engine)
        cells = [
            f"{row['us']:.4g}\n{row['plain_us'] / row['us']:.1f} x\n[dim]{row['start_s']:.1f} s[/]" if row else "-"
            for row in (by_engine.get(name) for name in engines)
        ]
        table.add_row(workload, f"{plain:.4g}", *cells)
    table.caption = "each cell: the time, how many times faster than the plain loop, start-up"
    return table


def _sweep_table(rows: list[Row], what: str, engines: list[str]) -> Table:
    """Return a table with a line for each point of a sweep and a column for each engine."""
    table, columns = plain_table(), ["plain loop", *engines]
    table.add_column(what)
    for name in columns:
        table.add_column(name, justify="right")
    for point in dict.fromkeys(row["point"] for row in rows):
        by_engine = {row["engine"]: row for row in rows if row["point"] == point}
        cells = [f"{by_engine[name]['us']:.4g}" if name in by_engine else "-" for name in columns]
        table.add_row(point, *cells)
    return table


def _draw(rows: list[Row], parts: list[str], out: Path) -> None:
    """Draw a picture for each sweep."""
    from fedagrac.experiments.bench import SWEEPS

    for part in parts:
        if part != "engines":
            picture = out / f"{part}.png"
            _plot(_rows_of(part, rows), SWEEPS[part][0]).savefig(picture, dpi=200)
            Terminal(stderr=True).print(f"picture: {picture}", highlight=False, soft_wrap=True)


def _plot(rows: list[Row], what: str) -> Figure:
    """Draw microseconds per client-step over what varies, with a line for each engine. Return the figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    points = list(dict.fromkeys(row["point"] for row in rows))
    numeric = all(point.isdigit() for point in points)
    for index, engine in enumerate(dict.fromkeys(row["engine"] for row in rows)):
        timed = [row for row in rows if row["engine"] == engine]
        x = [int(row["point"]) if numeric else points.index(row["point"]) for row in timed]
        axes.plot(x, [row["us"] for row in timed], "os^Dv"[index % 5] + "-", ms=5, lw=1.4, label=engine)
    axes.set_yscale("log")
    if numeric:
        axes.set_xscale("log")
    else:
        axes.set_xticks(range(len(points)), points)
    axes.set_xlabel(what)
    axes.set_ylabel("microseconds per client-step")
    axes.grid(alpha=0.3, which="both")
    figure.legend(*axes.get_legend_handles_labels(), loc="outside upper center", ncols=3, frameon=False)
    return figure
