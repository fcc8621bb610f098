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


@flower_app.command()
def keys(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.")],
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="For how many nodes.")] = 3,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A name or address of the SuperLink; may be repeated."),
    ] = None,
) -> None:
    """Make a test certificate authority, the SuperLink's certificate and a key pair for every node.

    For trials and private networks: whoever has the folder can sign certificates.

    [bold]Example[/]

      fedagrac flower keys keys --nodes 3 --host 127.0.0.1 --host localhost
    """
    from fedagrac.flower.keys import write_keys

    made = write_keys(folder, nodes, hosts or ("127.0.0.1", "localhost"))
    for path in sorted(made.iterdir()):
        Console().print(escape(str(path)), highlight=False, soft_wrap=True)
