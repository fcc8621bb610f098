"""How commands print: tables without borders, lists of files, log messages, and errors on one line."""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console
from rich.markup import escape
from rich.table import Table

__all__ = ["fail", "plain_table", "print_error", "print_files", "showing_log"]


def plain_table(**options: Any) -> Table:
    """Return an empty table without borders."""
    return Table(box=None, pad_edge=False, **options)


def print_files(files: Mapping[str, Path]) -> None:
    """Print the files that exist, one per line, each after a word that says what it is."""
    console, width = Console(), max(map(len, files))
    for name, path in files.items():
        if path.exists():
            console.print(f"{name:<{width}} {escape(str(path))}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def showing_log(console: Console, quiet: bool) -> Iterator[None]:
    """Show the messages that the package logs, such as the engine it chose; none if `quiet`."""

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


def print_error(message: str, heading: str = "[bold red]error[/]") -> None:
    """Print an error on stderr."""
    Console(stderr=True).print(f"{heading} {escape(message)}", highlight=False, soft_wrap=True)


def fail(error: BaseException, message: str, code: int, heading: str = "[bold red]error[/]") -> NoReturn:
    """Print an error with its notes on stderr, and exit with a code."""
    print_error(message, heading)
    for note in getattr(error, "__notes__", []):
        Console(stderr=True).print(escape(note), highlight=False, soft_wrap=True)
    sys.exit(code)
