"""The command: fedagrac run, report, doctor; the others come from `cli_data`, `cli_bench` and so on.

Exit codes: 0 done, 1 failed, 2 bad usage or input, 130 and 143 interrupted by Ctrl-C and by SIGTERM.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from fedagrac.cli.bench import bench
from fedagrac.cli.data import data_app
from fedagrac.cli.flower import flower_app
from fedagrac.cli.reproduce import reproduce
from fedagrac.cli.sweep import sweep
from fedagrac.cli.theory import theory
from fedagrac.errors import FedagracError, InputError
from fedagrac.files import first_missing, make_folder
from fedagrac.rounds.interrupts import Interruption, advising, listening, typed

if TYPE_CHECKING:
    from fedagrac.engines import Ranks
    from fedagrac.report import StoredRun

__all__ = ["app", "main"]

app = typer.Typer(
    help="Federated optimization when clients do different amounts of work.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")
app.command()(sweep)
app.command()(theory)
app.command()(reproduce)
app.command()(bench)


def _version(show: bool) -> None:
    if show:
        from fedagrac import __version__

        typer.echo(f"fedagrac {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


@app.command()
def run(
    experiment: Annotated[
        Path | None, typer.Argument(metavar="[EXPERIMENT.toml]", help="An experiment file; none: the default.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", metavar="DIR", help="Where to write; default: runs/NAME-TIME.")
    ] = None,
    data_dir: Annotated[
        Path | None, typer.Option("--data-dir", metavar="DIR", help="Where to look for data files first.")
    ] = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="How steps are executed: auto, serial or lanes.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on with the experiment in --out where it was interrupted.")
    ] = False,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="Keep the clients' state in files there.")
    ] = None,
    trust_imports: Annotated[
        bool, typer.Option("--trust-imports", help="Let model.name import any module: this runs its code.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result table as JSON.")] = False,
) -> None:
    """Run an experiment: every algorithm on the same clients, then a table and a report.

    Without a file: real handwritten digits, 20 clients with unequal labels and unequal step counts, all nine
    algorithms (well under a minute on two cores).

    [bold]Examples[/]

      fedagrac run

      fedagrac run --set rounds=50 --set data.clients=40 --set algorithm.lr=0.05

      fedagrac run my.toml --out runs/mine --json

      fedagrac run --resume --out runs/mine

      fedagrac run my.toml --resume --out runs/mine    (begins, or goes on)

      torchrun --nproc-per-node 2 -m fedagrac run my.toml --out runs/mine
    """
    from fedagrac.callbacks.progress import Progress
    from fedagrac.engines.ranks import leave_ranks, start_ranks
    from fedagrac.experiments.run import check_free, prepare, run_experiment
    from fedagrac.experiments.schema import Experiment, apply_settings, default_table, read_toml
    from fedagrac.models import Imports
    from fedagrac.report import read_run, write_report

    ranks = start_ranks()
    notes = Console(stderr=True, quiet=ranks.rank > 0)
    if resume and out is None:
        raise InputError("--resume", None, "the folder of the experiment that goes on: --out DIR")
    given = out / "experiment.toml" if resume and out is not None and experiment is None else experiment
    if resume and given is not None and experiment is None and not given.exists():
        accepted = "the folder of the experiment that goes on: there is no experiment.toml in it"
        raise InputError("--out", str(out), accepted)
    table = default_table() if given is None else read_toml(given)
    if engine is not None:
        table["engine"] = engine
    checked = Experiment.of(apply_settings(table, settings or []))
    if out is not None and not resume and ranks.rank == 0:
        check_free(out)
    prepared = prepare(checked, data_dir, Imports(given and given.parent, trust_imports))
    folder, made = (out, None) if out is not None else _new_folder(checked.name, ranks)
    K = prepared.steps.counts(0, prepared.federation.num_clients, checked.seed)
    what = f"{checked.name}: {len(prepared.federation.sizes)} clients, {K.min()} to {K.max()} local steps"
    if not as_json:
        notes.print(
            f"[bold]{what}[/], {checked.rounds} rounds, {len(prepared.entries)} algorithms", highlight=False
        )
    flags = {"--data-dir": data_dir, "--state-dir": state_dir, "--trust-imports": trust_imports}
    bar = Progress(len(prepared.entries), checked.rounds, notes)
    with advising(folder, _command(folder, ranks, flags)), bar as progress, _notices(notes, quiet=as_json):
        folders = run_experiment(prepared, folder, progress, resume=resume, state_dir=state_dir, made=made)
    leave_ranks()
    if ranks.rank:
        return
    runs = [read_run(f) for f in folders]
    try:
        page = write_report(runs, folder)
    except (Interruption, OSError) as stop:
        stop.add_note(f"the runs are done; for the report: {shlex.join(['fedagrac', 'report', str(folder)])}")
        raise
    hints = [f"{entry.label}: {entry.note}" for entry in prepared.entries if entry.note]
    rows = _print_report(runs, page, as_json, hints)
    if all(row["status"] == "diverged" for row in rows):
        raise typer.Exit(1)


def _new_folder(name: str, ranks: Ranks) -> tuple[Path, Path]:
    """Make a folder for an experiment, the same for all processes; return it and the outermost that was made."""
    stem = Path("runs") / f"{name}-{_now()}"
    around = first_missing(stem.parent)
    folder = Path(ranks.agree(str(_unused(stem) if ranks.rank == 0 else stem)))
    return folder, around or folder


def _command(folder: Path, ranks: Ranks, flags: Mapping[str, Path | bool | None]) -> list[str]:
    """Return the command that goes on with an experiment."""
    words = ["fedagrac", "run", "--resume", "--out", str(folder), *typed(flags)]
    return words if ranks.size == 1 else ["torchrun", "--nproc-per-node", str(ranks.size), "-m", *words]


@contextlib.contextmanager
def _notices(console: Console, quiet: bool) -> Iterator[None]:
    """Show what the package reports on the way: the engine that was chosen, compile times."""

    class Show(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(f"[dim]{escape(record.getMessage())}[/]", highlight=False)

    log, handler = logging.getLogger("fedagrac"), Show(logging.INFO)
    level = log.level
    if not quiet:
        log.addHandler(handler)
        log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(level)


def _print_report(
    runs: list[StoredRun], page: Path, as_json: bool, hints: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Print the summary and say where the report is; return the rows."""
    from fedagrac.report import common_target, summarise, summary_table

    rows, folder = summarise(runs), page.parent
    names = ", ".join(dict.fromkeys(run.name for run in runs))
    if as_json:
        where = {"experiment": names, "folder": str(folder), "report": str(page)}
        print(json.dumps({**where, "target": common_target(rows), "runs": rows}))
        return rows
    console = Console()
    console.print(summary_table(rows))
    for hint in hints:
        console.print(f"[dim]{escape(hint)}[/]", highlight=False)
    for row in rows:
        if row["status"] == "diverged":
            console.print(f"[red]{escape(row['run'])} diverged[/]: {escape(row['reason'])}", highlight=False)
    places = {
        "report": page,
        "curves": folder / "curves.png",
        "costs": folder / "costs.png",
        "figures": folder / "figures",
    }
    console.print()
    for name, path in places.items():
        if path.exists():
            console.print(f"{name:<8}{escape(str(path))}", highlight=False, soft_wrap=True)
    return rows


@app.command()
def report(
    folders: Annotated[
        list[Path], typer.Argument(metavar="DIR...", help="Experiment folders or run folders to compare.")
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Where to write; default: the DIR, or for several reports/TIME."
        ),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary table as JSON.")] = False,
) -> None:
    """Make one HTML page with curves and tables out of finished runs, and its pictures as PNG and PDF.

    The page is one file that needs no network. It is made from the run folders' files alone; an earlier report in
    the folder is replaced.

    [bold]Examples[/]

      fedagrac report runs/mine

      fedagrac report runs/seed-0 runs/seed-1 runs/seed-2/fedagrac --out reports/seeds
    """
    from fedagrac.report import find_runs, write_report

    runs = find_runs(folders)
    folder = out or (folders[0] if len(folders) == 1 else _unused(Path("reports") / _now()))
    if folder.exists() and not folder.is_dir():
        raise InputError("--out", str(folder), "a folder: this is a file")
    _print_report(runs, write_report(runs, folder), as_json)


def _now() -> str:
    return time.strftime("%Y%m%d-%H%M%S")


def _unused(stem: Path) -> Path:
    """Make the folder, or with a number the first after it that does not exist; no other process gets the same."""
    make_folder(stem.parent)
    for number in itertools.count(1):
        folder = stem if number == 1 else stem.with_name(f"{stem.name}-{number}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir()
            break
    return folder


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print the findings as JSON.")] = False,
) -> None:
    """Say what is installed, which devices and engines are usable, and where data and runs live.

    [bold]Example[/]

      fedagrac doctor --json
    """
    findings = _findings()
    if as_json:
        print(json.dumps(findings))
        return
    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section, facts in findings.items():
        table.add_row(f"[underline]{section}[/]", "")
        for name, value in facts.items():
            table.add_row(f"  {escape(name)}", escape(str(value)))
    Console().print(table, highlight=False)


def _findings() -> dict[str, dict[str, Any]]:
    import platform
    from importlib import metadata

    import torch

    from fedagrac import __version__
    from fedagrac.data import DATASETS
    from fedagrac.data.locating import data_roots

    def installed(name: str, extra: str | None = None) -> str:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            return "not installed" + (f" (pip install 'fedagrac[{extra}]')" if extra else "")

    required = "torch numpy pandas scikit-learn safetensors typer rich pydantic pooch matplotlib plotly jinja2"
    devices = {"cpu": f"usable, {os.cpu_count()} cores, torch uses {torch.get_num_threads()} threads"}
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(i)
            devices[f"cuda:{i}"] = f"usable, {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    else:
        devices["cuda"] = "not usable: torch finds no GPU"
    return {
        "versions": {
            "fedagrac": __version__,
            "python": platform.python_version(),
            **{name: installed(name) for name in required.split()},
            "flwr": installed("flwr", "flower"),
            "tensorboard": installed("tensorboard", "tensorboard"),
            "mlflow": installed("mlflow", "mlflow"),
        },
        "devices": devices,
        "engines": _engines(),
        "data": {name: _whereabouts(name) for name in DATASETS},
        "folders": {
            "data": str(data_roots()[0]),
            "runs": str(Path("runs").absolute()),
            "package": str(Path(__file__).parent),
        },
    }


def _engines() -> dict[str, str]:
    """Say how engines are chosen: the rule for short runs, and what was measured here for longer ones."""
    import shutil

    from fedagrac.engines import measured_choices
    from fedagrac.engines.choice import COMPILE_FROM, MEASURE_FROM

    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    said = {
        "serial": "usable",
        "lanes": "usable",
        "compiled steps": f"usable with {compiler}" if compiler else "not usable: no C++ compiler found (g++)",
        "auto": (
            f"below {MEASURE_FROM:,} client-steps in all: lanes on a GPU and for small models, else serial; from "
            f"there on the fastest by measurement; compiled steps where a run would take over {COMPILE_FROM:.0f} s"
        ),
    }
    for one in measured_choices():
        rows = sorted(one["candidates"].items(), key=lambda row: float(row[1]["us"]))
        name = f"{one.get('model')}, {one.get('parameters')} parameters, {one.get('lanes')} lanes"
        times = ", ".join(f"{name} {row['us']:.3g}" for name, row in rows)
        said[name] = f"us per client-step on {one.get('device')}: {times}"
    return said


def _whereabouts(name: str) -> str:
    from fedagrac.data.catalogue import DATA_FILES
    from fedagrac.data.locating import locate

    if name not in DATA_FILES:
        return "built in: nothing to download"
    folder = locate(name)
    return f"in {folder}" if folder else f"not here (fedagrac data fetch {name})"


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; every expected error is one line on stderr."""
    os.umask(os.umask(0o022) | 0o002)  # nothing that it writes, or a library for it, may everybody write to
    try:
        with listening():
            app(arguments)
    except InputError as error:
        _fail(str(error), 2)
    except FedagracError as error:
        _fail(str(error), 1)
    except OSError as error:
        _fail(f"{error.filename or 'input or output'}: {error.strerror or error}", 1, error)
    except (MemoryError, RuntimeError) as error:
        # torch has no error of its own for memory that the system refuses
        if not isinstance(error, MemoryError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        said = (str(error).strip().splitlines() or ["a smaller experiment may fit"])[0]
        _fail(f"not enough memory: {said}", 1, error)
    except Interruption as stop:
        _fail(f"by {stop.signal.name}", stop.code, stop, "[bold yellow]interrupted[/]")


def _fail(message: str, code: int, error: BaseException | None = None, what: str = "[bold red]error[/]") -> None:
    console = Console(stderr=True)
    console.print(f"{what} {escape(message)}", highlight=False, soft_wrap=True)
    for note in getattr(error, "__notes__", []):
        console.print(escape(note), highlight=False, soft_wrap=True)
    sys.exit(code)
