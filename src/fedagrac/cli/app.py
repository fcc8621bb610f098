"""The Typer app of the command `fedagrac`, and its entry point.

Exit codes: 0 success, 1 failure, 2 wrong usage or input, 130 interrupted by Ctrl-C, 143 by SIGTERM.
"""

from __future__ import annotations

import os
import re
from typing import Annotated

import typer

from fedagrac.cli.bench import bench
from fedagrac.cli.data import data_app
from fedagrac.cli.doctor import doctor
from fedagrac.cli.flower import flower_app
from fedagrac.cli.printing import fail
from fedagrac.cli.report import report
from fedagrac.cli.reproduce import reproduce
from fedagrac.cli.run import run
from fedagrac.cli.sweep import sweep
from fedagrac.cli.theory import theory
from fedagrac.errors import FedagracError, InputError
from fedagrac.rounds.interrupts import Interruption, listening
from fedagrac.version import __version__

__all__ = ["app", "main"]

app = typer.Typer(
    help="Federated optimization when clients do different amounts of work.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)
for command in (run, report, sweep, theory, reproduce, bench, doctor):
    app.command()(command)
app.add_typer(data_app, name="data")
app.add_typer(flower_app, name="flower")


def print_version(show: bool) -> None:
    """Print the version and exit, if `--version` was given."""
    if show:
        typer.echo(f"fedagrac {__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def main(arguments: list[str] | None = None) -> None:
    """Run the command line and exit. Print every expected error as one line on stderr."""
    os.umask(os.umask(0o022) | 0o002)  # no file that the command or a library writes may be world-writable
    try:
        with listening():
            app(arguments)
    except InputError as error:
        fail(error, str(error), 2)
    except FedagracError as error:
        fail(error, str(error), 1)
    except OSError as error:
        fail(error, f"{error.filename or 'input or output'}: {error.strerror or error}", 1)
    except (MemoryError, RuntimeError) as error:
        # torch has no error class of its own for memory that the system refuses
        if not isinstance(error, MemoryError) and not re.search("allocate memory|out of memory", str(error)):
            raise
        reason = (str(error).strip().splitlines() or ["try a smaller experiment"])[0]
        fail(error, f"not enough memory: {reason}", 1)
    except Interruption as stop:
        fail(stop, f"by {stop.signal.name}", stop.code, "[bold yellow]interrupted[/]")
