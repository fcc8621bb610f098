"""The command `fedagrac bench`."""

from __future__ import annotations

import json
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedagrac.cli import computing
from fedagrac.cli.options import Json, naming_options
from fedagrac.cli.printing import Terminal, one_line, plain_table
from fedagrac.errors import InputError, one_of, positive
from fedagrac.files import make_folder, write_atomically

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.table import Table

    from fedagrac.experiments.bench import Bench

__all__ = ["bench"]

PARTS = ("engines", "clients", "spread", "size")

LARGEST = 12
"""How many operators or kernels a profile prints."""

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
    profile: Annotated[
        bool, typer.Option("--profile", help="Show where the time of a client-step goes, against the floor.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Write bench.json and pictures to DIR.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time every engine and an ordinary PyTorch loop on this machine, in microseconds per client-step.

    A client-step is one local step of one client: gather a batch, forward,
    backward, update. Start-up is listed separately; it includes compiling, which
    takes tens of seconds per row the first time. Large models run short rounds on a CPU.

    [bold]Examples[/]
      fedagrac bench lr-a9a cnn
      fedagrac bench alexnet --engines lanes --profile
      fedagrac bench --parts engines,clients,spread,size --out bench
    """
    chosen = [one_of("--parts", name, PARTS) for name in parts.split(",") if name]
    positive("--budget", budget)
    from fedagrac.engines.choice import CANDIDATES
    from fedagrac.experiments.bench import CASES, Bench, cases_for, engines_for, machine
    from fedagrac.rounds.setup import Setup

    computing.start()
    where = _device(device)
    with naming_options(precision="--precision"):
        Setup.of(1, precision=precision, device=where).torch_device()
    default = ["auto"] if profile else engines_for(where)
    asked = engines.split(",") if engines else default
    names = [one_of("--engines", name, [*CANDIDATES, "auto"]) for name in asked]
    tasks = [one_of("workload", name, CASES) for name in workloads or cases_for(where)]
    bench = Bench(where, precision, budget)
    facts = {"machine": machine(where), "precision": precision}
    if profile:
        _profile(tasks, names, bench, out, facts, as_json)
        return
    rows = _timed(chosen, tasks, names, bench, out, facts)
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
    bench: Bench,
    out: Path | None,
    facts: dict[str, Any],
) -> list[Row]:
    """Return one row for each timing. Write the rows so far after each one, and show how long the rest takes."""
    from fedagrac.experiments.bench import SWEEPS, compare, planned, sweep

    rows: list[Row] = []
    total = len(planned(workloads, engines, bench.device)) if "engines" in parts else 0
    total += sum(len(SWEEPS[part][1]) * (1 + len(engines)) for part in parts if part != "engines")
    begun = perf_counter()
    with Terminal(stderr=True).status(f"row 1 of {total}: timing ...") as status:
        for part in parts:
            timings = compare(workloads, engines, bench) if part == "engines" else sweep(part, engines, bench)
            for row in timings:
                rows.append(row)
                what = row.get("workload") or f"{row['sweep']} {row['point']}"
                minutes = (perf_counter() - begun) / len(rows) * (total - len(rows)) / 60
                status.update(
                    f"row {len(rows)} of {total}, about {minutes:.0f} min left; "
                    f"{what}, {row['engine']}: {_us(row['us'])} us"
                )
                _write(out, "bench.json", {**facts, "rows": rows})
    return rows


def _write(out: Path | None, name: str, content: dict[str, Any]) -> None:
    """Write a file of results, if there is a folder for it."""
    if out is not None:
        make_folder(out)
        write_atomically(out / name, json.dumps(content, indent=1).encode() + b"\n")


def _profile(
    workloads: list[str],
    engines: list[str],
    bench: Bench,
    out: Path | None,
    facts: dict[str, Any],
    as_json: bool,
) -> None:
    """Profile each workload with each engine, and print or write the results."""
    from fedagrac.experiments.bench import CASES, profile_rounds

    profiles: list[Row] = []
    for name in workloads:
        for engine in engines:
            with Terminal(stderr=True).status(f"{name}, {engine}: profiling ..."):
                profiles.append(profile_rounds(name, CASES[name], engine, bench))
            _write(out, "profile.json", {**facts, "profiles": profiles})
            if not as_json:
                _print_profile(profiles[-1], facts)
    if as_json:
        print(json.dumps({**facts, "profiles": profiles}))


def _print_profile(row: Row, facts: dict[str, Any]) -> None:
    """Print a profile: time and floor, kinds of work, and the largest operators or kernels."""
    console, floor = Terminal(), row["floor"]
    _print_machine(facts)
    console.print(
        f"{row['about']}: {_engine_of(row)}\n"
        f"  time {_us(row['us'])} us = {row['ratio']:.1f} x the floor of {_us(row['floor_us'])} us\n"
        f"  arithmetic {_us(floor['arithmetic_us'])} us: {_scaled(floor['flops'])}FLOP at the "
        f"{_scaled(floor['flops_per_s'])}FLOP/s of a square product\n"
        f"  memory     {_us(floor['memory_us'])} us: {_scaled(floor['bytes'])}B at the "
        f"{_scaled(floor['bytes_per_s'])}B/s of a copy",
        highlight=False,
    )
    kinds, largest = plain_table(), plain_table()
    for table, title in ((kinds, "kind of work"), (largest, f"largest {LARGEST}")):
        table.add_column(title, no_wrap=True, max_width=48)
        table.add_column("us", justify="right")
        table.add_column("share", justify="right")
    largest.add_column("calls", justify="right")
    for part in row["kinds"]:
        if part["us"]:
            kinds.add_row(part["kind"], _us(part["us"]), f"{part['share']:.1%}")
    for entry in row["entries"][:LARGEST]:
        share, calls = entry["us"] / row["us"], f"{entry['count']:.3g}" if entry["count"] else "-"
        largest.add_row(one_line(entry["name"]), _us(entry["us"]), f"{share:.1%}", calls)
    console.print(kinds, largest)
    console.print("[dim]per client-step; times under the profiler are scaled to those without it[/]")


def _engine_of(row: Row) -> str:
    """Return the engine of a row with its threads."""
    takes = row["takes"] if row["engine"] in (row["takes"], "auto") else f"{row['engine']} ({row['takes']})"
    return f"{takes}, {_threads(row['threads'])}"


def _print_machine(facts: dict[str, Any]) -> None:
    """Print a line about the machine."""
    machine = facts["machine"]
    gpu = f", {machine['gpu']}" if machine["gpu"] else ""
    Terminal().print(
        f"{machine['processor']}, {_threads(machine['threads'])}{gpu}, torch {machine['torch']}, "
        f"{facts['precision']}; microseconds per client-step",
        highlight=False,
    )


def _print(rows: list[Row], parts: list[str], engines: list[str], facts: dict[str, Any]) -> None:
    """Print the machine and a table for each part."""
    from fedagrac.experiments.bench import SWEEPS

    console = Terminal()
    _print_machine(facts)
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
        timed = list(by_engine.values())
        plain = sum(row["plain_us"] for row in timed) / len(timed)
        cells = [_cell(by_engine[name]) if name in by_engine else "-" for name in engines]
        table.add_row(workload, f"{_us(plain)}\n[dim]{_threads(timed[0]['plain_threads'])}[/]", *cells)
    table.caption = (
        "each cell: the time, how many times faster than the plain loop, start-up, threads; "
        "auto: the engine it takes, and its time against the better of serial and plain"
    )
    return table


def _cell(row: Row) -> str:
    """Return a cell of the table of engines."""
    lines = [_us(row["us"]), f"{row['plain_us'] / row['us']:.1f} x", f"[dim]{row['start_s']:.1f} s[/]"]
    if row["engine"] == "auto":
        lines += [row["takes"], f"{row['behind']:+.0%}"]
    return "\n".join([*lines, f"[dim]{_threads(row['threads'])}[/]"])


def _us(microseconds: float) -> str:
    """Return microseconds with three or more digits.

    Examples:
        >>> _us(2.3456), _us(14276.4)
        ('2.35', '14,276')
    """
    return f"{microseconds:,.0f}" if microseconds >= 1000 else f"{microseconds:.3g}"


def _scaled(number: float) -> str:
    """Return a number with a prefix for its unit.

    Examples:
        >>> _scaled(19680.0) + "FLOP", _scaled(4.3e12) + "B/s"
        ('19.7 kFLOP', '4.3 TB/s')
    """
    power = next((power for power in (12, 9, 6, 3) if number >= 10**power), 0)
    return f"{number / 10**power:.3g} {' kMGT'[power // 3].strip()}"


def _threads(number: int) -> str:
    """Return a number of threads in words."""
    return f"{number} thread{'s' if number > 1 else ''}"


def _sweep_table(rows: list[Row], what: str, engines: list[str]) -> Table:
    """Return a table with a line for each point of a sweep and a column for each engine."""
    table, columns = plain_table(), ["plain loop", *engines]
    table.add_column(what)
    for name in columns:
        table.add_column(name, justify="right")
    for point in dict.fromkeys(row["point"] for row in rows):
        by_engine = {row["engine"]: row for row in rows if row["point"] == point}
        cells = [_us(by_engine[name]["us"]) if name in by_engine else "-" for name in columns]
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
