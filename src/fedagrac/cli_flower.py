"""The commands: fedagrac flower new, fedagrac flower keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

__all__ = ["flower_app"]

flower_app = typer.Typer(help="Real federations, carried by Flower.", no_args_is_help=True)


@flower_app.command()
def new(folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")]) -> None:
    """Write a ready Flower app: settings, model and data hooks to fill in, and a README with every command.

    [bold]Example[/]

      fedagrac flower new my-app
    """
    from fedagrac.flower.app import write_app

    made = write_app(folder)
    Console().print(f"{escape(str(made))}: see README.md there", highlight=False, soft_wrap=True)
