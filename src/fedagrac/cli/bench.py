"""The command: fedagrac bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fedagrac.errors import InputError, one_of
from fedagrac.files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["bench"]

PARTS = ("engines", "clients", "spread", "size")


def bench(
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help="Which workloads; none: all.")
    ] = None,
    parts: Annotated[
        str, typer.Option("--parts", metavar="LIST", help="Any of engines,clients,spread,size.")
    ] = "engines",
    engines: Annotated[
        str | None, typer.Option("--engines", metavar="LIST", help="Engines, separated by commas; none: all.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="auto, cpu or cuda.")] = "auto",
    precision: Annotated[str, typer.Option("--precision", help="float32, or tf32 on a GPU.")] = "float32",
    budget: Annotated[float, typer.Option("--budget", metavar="SECONDS", help="Per row, start-up apart.")] = 5.0,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write bench.json and pictures there.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
) -> None:
    """Time every engine beside an ordinary PyTorch loop on this machine: microseconds per client-step.

    A client-step is one local step of one client: gather a batch, forward, backward, update. Start-up, which
    includes compiling, is stated apart. Compiling takes tens of seconds per row the first time, a few later.

    [bold]Examples[/]

      fedagrac bench lr-a9a cnn

      fedagrac bench --parts engines,clients,spread,size --out bench
    """
    import torch

    from fedagrac.engines.choice import CANDIDATES
    from fedagrac.experiments.bench import CASES, SWEEPS, compare, engines_for, machine, sweep

    chosen = [name for name in parts.split(",") if name]
    for name in chosen:
        one_of("--parts", name, list(PARTS))
    for name in workloads or []:
        one_of("workload", name, list(CASES))
    one_of("--precision", precision, ["float32", "tf32"])
    where = ("cuda" if torch.cuda.is_available() else "cpu") if device == "auto" else device
    names = engines.split(",") if engines else engines_for(where)
    for name in names:
        one_of("--engines", name, list(CANDIDATES))
    if budget <= 0:
        raise InputError("--budget", budget, "seconds, more than 0")
    rows: list[dict[str, Any]] = []
    notes = Console(stderr=True)
    facts = machine(where)
    with notes.status("") as status:
        for part in chosen:
            some = (
                compare(workloads or list(CASES), names, where, precision, budget)  # type: ignore[arg-type]
                if part == "engines"
                else sweep(part, names, where, precision, budget)  # type: ignore[arg-type]
            )
            status.update(f"{part}: timing ...")
            for row in some:
                rows.append(row)
                what = row.get("workload") or f"{row['sweep']} {row['point']}"
                status.update(f"{part}: {what}, {row['engine']}: {row['us']:.4g} us; going on ...")
                if out is not None:
                    make_folder(out)
                    content = {"machine": facts, "precision": precision, "rows": rows}
                    write_atomically(out / "bench.json", json.dumps(content, indent=1).encode() + b"\n")
    if as_json:
        print(json.dumps({"machine": facts, "precision": precision, "rows": rows}))
    else:
        console = Console()
        gpu = f", {facts['gpu']}" if facts["gpu"] else ""
        console.print(
            f"{facts['processor']}, {facts['threads']} threads{gpu}, torch {facts['torch']}, {precision}; "
            "microseconds per client-step",
            highlight=False,
        )
        if "engines" in chosen:
            console.print(_table(rows, names))
        for part in [p for p in chosen if p != "engines"]:
            console.print(_sweep_table([r for r in rows if r.get("sweep") == part], SWEEPS[part][0], names))
    for part in [p for p in chosen if p != "engines"] if out is not None else []:
        assert out is not None
        picture = out / f"{part}.png"
        plot_sweep([r for r in rows if r.get("sweep") == part], SWEEPS[part][0]).savefig(picture, dpi=200)
        notes.print(f"written {picture}", highlight=False, soft_wrap=True)


def _table(rows: list[dict[str, Any]], engines: list[str]) -> Table:
    """One line per workload; in each cell the time, how often faster than the loop, and seconds of start-up."""
    table = Table(box=None, pad_edge=False)
    table.add_column("workload")
    table.add_column("plain loop", justify="right")
    for name in engines:
        table.add_column(name, justify="right")
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        if "workload" in row:
            found.setdefault(row["workload"], {})[row["engine"]] = row
    for workload, by_engine in found.items():
        plain = sum(row["plain_us"] for row in by_engine.values()) / len(by_engine)
        cells = [
            f"{row['us']:.4g}\n{row['plain_us'] / row['us']:.1f} x\n[dim]{row['start_s']:.1f} s[/]" if row else "-"
            for row in (by_engine.get(name) for name in engines)
        ]
        table.add_row(workload, f"{plain:.4g}", *cells)
    table.caption = "each cell: time, how often faster than the plain loop beside it, start-up"
    return table


def _sweep_table(rows: list[dict[str, Any]], what: str, engines: list[str]) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column(what)
    shown = ["plain loop", *engines]
    for name in shown:
        table.add_column(name, justify="right")
    for point in dict.fromkeys(row["point"] for row in rows):
        at = {row["engine"]: row for row in rows if row["point"] == point}
        table.add_row(point, *[f"{at[name]['us']:.4g}" if name in at else "-" for name in shown])
    return table


def plot_sweep(rows: list[dict[str, Any]], what: str) -> Figure:
    """Draw microseconds per client-step against what varies, one line per engine."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.subplots()
    points = list(dict.fromkeys(row["point"] for row in rows))
    numbers = [int(p) if p.isdigit() else None for p in points]
    numeric = all(n is not None for n in numbers)
    for index, engine in enumerate(dict.fromkeys(row["engine"] for row in rows)):
        mine = [row for row in rows if row["engine"] == engine]
        x = [int(row["point"]) if numeric else points.index(row["point"]) for row in mine]
        axes.plot(x, [row["us"] for row in mine], "os^Dv"[index % 5] + "-", ms=5, lw=1.4, label=engine)
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
