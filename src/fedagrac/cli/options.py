"""Options that several commands share, and how errors and advice mention options."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.models import OptionInfo

from fedagrac.errors import InputError

__all__ = [
    "DataDir",
    "ExperimentFile",
    "Json",
    "Resume",
    "Settings",
    "TrustImports",
    "as_words",
    "naming_options",
    "out_option",
]

ExperimentFile = Annotated[
    Path, typer.Argument(metavar="EXPERIMENT.toml", help="An experiment file.", show_default=False)
]
Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting; may be repeated.")
]
DataDir = Annotated[
    Path | None, typer.Option("--data-dir", metavar="DIR", help="Look for data files in DIR first.")
]
TrustImports = Annotated[
    bool, typer.Option("--trust-imports", help="Let names import any module, which runs its code.")
]
Resume = Annotated[bool, typer.Option("--resume", help="Resume what was interrupted in the folder --out.")]
Json = Annotated[bool, typer.Option("--json", help="Print the results as JSON.")]


def out_option(default: str) -> OptionInfo:
    """Return the option `--out` whose help names the default folder."""
    info: OptionInfo = typer.Option("--out", metavar="DIR", help=f"The folder to write to; default: {default}.")
    return info


@contextlib.contextmanager
def naming_options(**options: str) -> Iterator[None]:
    """Let errors raised inside name the options of the command line instead of the library's arguments.

    Library errors name an argument as their field or, in what they accept, between backticks.

    Examples:
        >>> with naming_options(out="--out", resume="--resume"):
        ...     raise InputError("out", "mine", "a new folder, or `resume`")
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: --out = 'mine': expected a new folder, or --resume
    """
    try:
        yield
    except InputError as error:
        field = options.get(error.field, error.field)
        accepted = re.sub(r"`(\w+)`", lambda match: options.get(match[1], match[0]), error.accepted)
        if (field, accepted) == (error.field, error.accepted):
            raise
        raise InputError(field, error.value, accepted) from None


def as_words(options: Mapping[str, Any]) -> list[str]:
    """Return options as the words of a command, without those that were not given.

    An option whose value is a list is repeated for each item.

    Examples:
        >>> as_words({"--grid": ["a=1,2"], "--seeds": 2, "--by": None, "--trust-imports": True})
        ['--grid', 'a=1,2', '--seeds', '2', '--trust-imports']
    """
    words = []
    for name, given in options.items():
        for value in given if isinstance(given, list) else [given]:
            if value is True:
                words.append(name)
            elif value is not None and value is not False:
                words += [name, str(value)]
    return words
