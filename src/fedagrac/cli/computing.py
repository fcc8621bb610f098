"""What commands that compute share: the experiment they read, the folder they write, and how they are resumed."""

from __future__ import annotations

import contextlib
import shlex
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagrac.cli.options import naming_options
from fedagrac.errors import InputError
from fedagrac.rounds.interrupts import Interruption

if TYPE_CHECKING:
    from fedagrac.experiments.run import Prepared
    from fedagrac.experiments.schema import Experiment

__all__ = [
    "advising",
    "check_exists",
    "check_out",
    "check_resumable",
    "experiment_table",
    "output_folder",
    "prepare_experiment",
    "start",
    "timestamp",
]


def check_exists(file: Path) -> None:
    """Check that an experiment file exists, before anything large is imported."""
    if not file.exists():
        raise InputError("experiment file", str(file), "a file that exists")


def check_resumable(resume: bool, out: Path | None) -> None:
    """Check that the folder to resume is given."""
    if resume and out is None:
        raise InputError("--resume", "without --out", "the folder to resume as well: --out DIR")


def start() -> None:
    """Set this process up for many steps: the C library keeps freed memory for the next step."""
    from fedagrac.engines import keep_freed_memory

    keep_freed_memory()


def experiment_table(
    file: Path | None, settings: Sequence[str] | None, engine: str | None = None
) -> dict[str, Any]:
    """Return the table in a file, or the built-in experiment, with the engine and the settings applied.

    A trace of step counts beside the file is read.
    """
    from fedagrac.experiments.build import steps_table
    from fedagrac.experiments.overrides import apply_settings
    from fedagrac.experiments.schema import default_table, read_toml

    table = default_table() if file is None else read_toml(file)
    if engine is not None:
        table["engine"] = engine
    with naming_options(set="--set"):
        table = apply_settings(table, list(settings or []))
    if file is not None and "steps" in table:
        table["steps"] = steps_table(table["steps"], file.parent)
    return table


def prepare_experiment(
    experiment: Experiment,
    file: Path | None,
    data_dir: Path | None,
    trust_imports: bool,
    state_dir: Path | None = None,
    local: bool = True,
) -> Prepared:
    """Load the data and build the model and the algorithms.

    Own code may lie beside the experiment file, unless `local` is false.
    """
    from fedagrac.experiments.run import prepare
    from fedagrac.imports import Imports

    with naming_options(trusted="--trust-imports"):
        imports = Imports(None if file is None else file.parent, trust_imports, local)
        return prepare(experiment, data_dir, imports, state_dir)


def check_out(out: Path) -> None:
    """Check that nothing in the folder `--out` would be overwritten."""
    from fedagrac.experiments.run import check_free

    with naming_options(out="--out"):
        check_free(out)


def timestamp() -> str:
    """Return the time to the second, as it stands in names of folders."""
    return time.strftime("%Y%m%d-%H%M%S")


@contextlib.contextmanager
def output_folder(out: Path | None, name: str) -> Iterator[Path]:
    """Yield `out`, or a new folder runs/NAME-TIME that no other command has, the same for all processes of a run.

    A new folder is removed again if nothing was written to it.
    """
    from fedagrac.engines.ranks import current_ranks
    from fedagrac.storage.claims import new_folder

    ranks, stem = current_ranks(), Path("runs") / f"{name}-{timestamp()}"
    with naming_options(out="--out", resume="--resume"):
        if out is not None:
            yield out
        elif ranks.rank > 0:
            yield Path(ranks.agree(""))
        else:
            with new_folder(stem) as folder:
                yield Path(ranks.agree(str(folder)))


@contextlib.contextmanager
def advising(folder: Path, command: Sequence[str]) -> Iterator[None]:
    """Add the command that resumes to whatever interrupts experiments in a folder: a signal, a full disk."""
    from fedagrac.engines.ranks import LostRankError

    try:
        yield
    except (Interruption, OSError, MemoryError, RuntimeError, LostRankError) as stop:
        if any(folder.glob("experiment.toml")) or any(folder.glob("*/experiment.toml")):
            stop.add_note(f"resume with: {shlex.join(command)}")
        raise
