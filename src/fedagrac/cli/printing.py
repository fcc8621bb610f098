"""How commands print: tables without borders, lists of files, log messages, and errors on one line.

Everything that a command prints for people goes through `Terminal`, which shows control characters as escapes.
Labels, reasons and messages may come from received files and from clients.
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.markup import escape
from rich.segment import Segment
from rich.table import Table

from fedagrac.errors import FedagracError, InputError
from fedagrac.parsing import printable

__all__ = ["Terminal", "fail", "one_line", "plain_table", "print_error", "print_files", "showing_log"]


class Terminal(Console):
    r"""A console that obeys no control characters in what it prints, and turns no `:name:` into a picture.

    Rich strips a few control characters, but not ESC. Its own styles and the moves of progress bars pass.

    Examples:
        >>> Terminal(width=60).print("fedavg\x1b]0;mine\x07")
        fedavg\x1b]0;mine
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(**{"emoji": False, **options})

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Render an object; yield pieces of text without control characters."""
        for text, style, control in super().render(renderable, options):
            yield Segment(text if control else printable(text, lines=True), style, control)


def one_line(text: str) -> str:
    r"""Return a text for a line of its own: without control characters, and without markup that Rich would obey.

    Examples:
        >>> one_line("[red]two\nlines[/]")
        '\\[red]two\\nlines\\[/]'
    """
    return escape(printable(text))


def plain_table(**options: Any) -> Table:
    """Return an empty table without borders."""
    return Table(box=None, pad_edge=False, **options)


def print_files(files: Mapping[str, Path]) -> None:
    """Print the files that exist, one per line, each after a word that says what it is."""
    console, width = Terminal(), max(map(len, files))
    for name, path in files.items():
        if path.exists():
            console.print(f"{name:<{width}} {one_line(str(path))}", highlight=False, soft_wrap=True)


@contextlib.contextmanager
def showing_log(console: Console, quiet: bool) -> Iterator[None]:
    """Show the messages that the package logs, such as the engine it chose; none if `quiet`."""

    class Show(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            console.print(f"[dim]{escape(_message(record))}[/]", highlight=False)

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


def _message(record: logging.LogRecord) -> str:
    """Return the message of a record. Text that is put into it has no lines of its own."""
    if not isinstance(record.args, tuple) or not record.args:
        return record.getMessage()
    return str(record.msg) % tuple(printable(arg) if isinstance(arg, str) else arg for arg in record.args)


def print_error(message: str, heading: str = "[bold red]error[/]", lines: bool = False) -> None:
    """Print an error on stderr; on one line unless `lines` is true."""
    text = escape(message) if lines else one_line(message)
    Terminal(stderr=True).print(f"{heading} {text}", highlight=False, soft_wrap=True)


def fail(error: BaseException, message: str, code: int, heading: str = "[bold red]error[/]") -> NoReturn:
    """Print an error with its notes on stderr, and exit with a code."""
    lines = isinstance(error, FedagracError) and not isinstance(error, InputError)
    print_error(message, heading, lines)
    for note in getattr(error, "__notes__", []):
        Terminal(stderr=True).print(one_line(note), highlight=False, soft_wrap=True)
    sys.exit(code)
