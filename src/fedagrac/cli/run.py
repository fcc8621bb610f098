"""The command `fedagrac run`."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from fedagrac.cli import computing
from fedagrac.cli.options import DataDir, Json, Resume, Settings, TrustImports, as_words, out_option
from fedagrac.cli.printing import Terminal, showing_log
from fedagrac.cli.report import print_report
from fedagrac.errors import InputError
from fedagrac.rounds.interrupts import Interruption

if TYPE_CHECKING:
    from fedagrac.experiments.run import Prepared

__all__ = ["run"]


def run(
    experiment: Annotated[
        Path | None,
        typer.Argument(metavar="[EXPERIMENT.toml]", help="An experiment file; default: a built-in experiment."),
    ] = None,
    settings: Settings = None,
    out: Annotated[Path | None, out_option("runs/NAME-TIME")] = None,
    data_dir: DataDir = None,
    engine: Annotated[
        str | None, typer.Option("--engine", metavar="NAME", help="How to run local steps: auto, serial or lanes.")
    ] = None,
    resume: Resume = False,
    state_dir: Annotated[
        Path | None, typer.Option("--state-dir", metavar="DIR", help="Keep the state of the clients in DIR.")
    ] = None,
    trust_imports: TrustImports = False,
    as_json: Json = False,
) -> None:
    """Run an experiment: all its algorithms on the same clients, then a table and a report.

    Without a file it runs the nine algorithms of the paper on handwritten digits,
    with 20 clients whose labels and step counts differ. This takes well under a minute
    on two cores.

    [bold]Examples[/]
      fedagrac run
      fedagrac run --set rounds=50 --set data.clients=40 --set algorithm.lr=0.05
      fedagrac run my.toml --out runs/mine --json
      fedagrac run --resume --out runs/mine
      fedagrac run my.toml --resume --out runs/mine    (starts or resumes)
      torchrun --nproc-per-node 2 -m fedagrac run my.toml --out runs/mine
    """
    file = _file_to_run(experiment, out, resume)
    from fedagrac.engines.ranks import leave_ranks, start_ranks
    from fedagrac.experiments.schema import Experiment

    computing.start()
    with showing_log(Terminal(stderr=True), quiet=as_json):
        ranks = start_ranks()
    checked = Experiment.of(computing.experiment_table(file, settings, engine))
    if out is not None and not resume and ranks.rank == 0:
        computing.check_out(out)
    prepared = computing.prepare_experiment(
        checked, file, data_dir, trust_imports, state_dir, local=experiment is not None or not resume
    )
    with computing.output_folder(out, checked.name) as folder:
        words = as_words({"--data-dir": data_dir, "--state-dir": state_dir, "--trust-imports": trust_imports})
        if experiment is not None and checked.has_own_code and not trust_imports:
            words = [str(experiment), *words, *as_words({"--set": settings, "--engine": engine})]
        with computing.advising(folder, _resume_command(folder, ranks.size, words)):
            console = Terminal(stderr=True, quiet=ranks.rank > 0)
            folders = _run(prepared, folder, resume, console, as_json)
        leave_ranks()
        if ranks.rank == 0:
            _report(prepared, folders, folder, as_json)


def _file_to_run(experiment: Path | None, out: Path | None, resume: bool) -> Path | None:
    """Return the experiment file: the one given, the one in the folder to resume, or None for the built-in one."""
    computing.check_resumable(resume, out)
    if experiment is None and resume and out is not None:
        file = out / "experiment.toml"
        if not file.exists():
            raise InputError("--out", str(out), "the folder of an experiment: there is no experiment.toml in it")
        return file
    if experiment is not None:
        computing.check_exists(experiment)
    return experiment


def _resume_command(folder: Path, processes: int, more: list[str]) -> list[str]:
    """Return the command that resumes an experiment."""
    words = ["fedagrac", "run", "--resume", "--out", str(folder), *more]
    return words if processes == 1 else ["torchrun", "--nproc-per-node", str(processes), "-m", *words]


def _run(prepared: Prepared, folder: Path, resume: bool, console: Console, as_json: bool) -> list[Path]:
    """Run all algorithms behind a progress bar, and return their folders."""
    from fedagrac.callbacks.progress import Progress
    from fedagrac.experiments.run import run_experiment

    experiment, clients = prepared.experiment, prepared.federation.num_clients
    if not as_json:
        K = prepared.steps.counts(0, clients, experiment.seed)
        console.print(
            f"[bold]{experiment.name}: {clients} clients, {K.min()} to {K.max()} local steps[/], "
            f"{experiment.rounds} rounds, {len(prepared.entries)} algorithms",
            highlight=False,
        )
    with (
        Progress(len(prepared.entries), experiment.rounds, console) as progress,
        showing_log(console, quiet=as_json),
    ):
        return run_experiment(prepared, folder, progress, resume=resume)


def _report(prepared: Prepared, folders: list[Path], folder: Path, as_json: bool) -> None:
    """Write and print the report. Exit with code 1 if all runs diverged."""
    from fedagrac.report import read_run, write_report

    runs = [read_run(path) for path in folders]
    try:
        page = write_report(runs, folder)
    except (Interruption, OSError) as stop:
        words = ["fedagrac", "report", str(folder)]
        stop.add_note(f"the runs are finished; write the report with: {shlex.join(words)}")
        raise
    hints = [f"{entry.label}: {entry.note}" for entry in prepared.entries if entry.note]
    rows = print_report(runs, page, as_json, hints)
    if all(row["status"] == "diverged" for row in rows):
        raise typer.Exit(1)
