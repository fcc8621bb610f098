"""The commands `fedagrac flower`: new, keys, gate, status, rollback and exclude."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedagrac.cli.options import Json, naming_options
from fedagrac.cli.printing import Terminal, one_line

__all__ = ["flower_app"]

flower_app = typer.Typer(
    help="Set up real federations with Flower.",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
)

NewFolder = Annotated[Path, typer.Argument(metavar="DIR", help="A new or empty folder.", show_default=False)]


@flower_app.command()
def new(folder: NewFolder) -> None:
    """Write a Flower app: settings, a model and data to fill in, and a README with all commands.

    The app is named after the folder.

    [bold]Example[/]
      fedagrac flower new my-app
    """
    from fedagrac.flower.app import write_app

    with naming_options(folder="DIR"):
        made = write_app(folder)
    Terminal().print(f"{one_line(str(made))}: see README.md there", highlight=False, soft_wrap=True)


@flower_app.command()
def keys(
    folder: NewFolder,
    nodes: Annotated[int, typer.Option("--nodes", metavar="N", help="The number of nodes.")] = 3,
    hosts: Annotated[
        list[str] | None,
        typer.Option("--host", metavar="NAME", help="A name or address of the server; may be repeated."),
    ] = None,
) -> None:
    """Make a test certificate authority, a certificate for the server and a key pair for each node.

    keys.toml holds the setting that binds each partition to the key of its node.

    These are for trials and private networks: anyone who has the folder can sign
    certificates.

    [bold]Example[/]
      fedagrac flower keys keys --nodes 3 --host 127.0.0.1 --host localhost
    """
    from fedagrac.flower.keys import write_keys

    with naming_options(folder="DIR", nodes="--nodes", hosts="--host"):
        made = write_keys(folder, nodes, hosts or ("127.0.0.1", "localhost"))
    for path in sorted(made.iterdir()):
        Terminal().print(one_line(str(path)), highlight=False, soft_wrap=True)


@flower_app.command()
def gate(
    keys: Annotated[
        Path,
        typer.Argument(metavar="KEYS", help="The folder with ca.crt, server.crt, server.key.", show_default=False),
    ],
    host: Annotated[str, typer.Option("--host", metavar="ADDRESS", help="The address to listen on.")] = "0.0.0.0",
    port: Annotated[int, typer.Option("--port", metavar="PORT", help="The port to listen on.")] = 8443,
    superlink: Annotated[
        str, typer.Option("--superlink", metavar="ADDRESS:PORT", help="The SuperLink, on this machine.")
    ] = "127.0.0.1:8000",
) -> None:
    """Let nodes, and nobody else, through to a SuperLink that listens on the loopback interface.

    Requests of SuperNodes are passed on to the SuperLink, which checks their keys.
    Requests that start or stop runs, register keys or fetch tasks get the status 403.

    [bold]Example[/]
      fedagrac flower gate keys --port 8443
    """
    from fedagrac.flower.gate import run_gate

    with naming_options(keys="KEYS", host="--host", port="--port", superlink="--superlink"):
        run_gate(host, port, superlink, keys)


@flower_app.command()
def status(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="The run folder of a federation.")],
    as_json: Json = False,
) -> None:
    """Show how a federation is doing: its state, its last round, its clients and its last events.

    It reads the run folder alone, also while the server runs. The exit code is 1
    if the run failed, diverged or was interrupted.

    [bold]Example[/]
      fedagrac flower status runs/flower
    """
    from fedagrac.cli.status import print_status
    from fedagrac.storage.status import BAD_STATES, read_status

    with naming_options(folder="DIR"):
        run = read_status(folder)
    if as_json:
        print(run.to_json())
    else:
        print_status(run)
    if run.state in BAD_STATES:
        raise typer.Exit(1)


RunDir = Annotated[Path, typer.Argument(metavar="DIR", help="The run folder on the server.", show_default=False)]


@flower_app.command()
def rollback(
    folder: RunDir,
    to: Annotated[
        int | None,
        typer.Option("--to", metavar="ROUND", help="The round to go back to; without it, list those that can be."),
    ] = None,
) -> None:
    """Undo rounds: bring a run back to its state after ROUND.

    Only rounds with a checkpoint can be reached; the setting [bold]keep_checkpoints[/]
    says how many there are. The next [bold]flwr run[/] goes on from there, also if the
    run had ended.

    [bold]Example[/]
      fedagrac flower rollback runs/flower --to 12
    """
    from fedagrac.flower.operating import roll_back, rounds_to_go_back_to

    with naming_options(folder="DIR", to="--to"):
        if to is None:
            rounds = ", ".join(map(str, rounds_to_go_back_to(folder)))
            text = f"rounds with a checkpoint: {rounds}"
        else:
            roll_back(folder, to)
            text = f"as after round {to}; the next `flwr run` goes on with round {to + 1}"
    Terminal().print(one_line(f"{folder}: {text}"), highlight=False, soft_wrap=True)


@flower_app.command()
def exclude(
    folder: RunDir,
    client: Annotated[int, typer.Argument(metavar="CLIENT", help="The partition id.", show_default=False)],
    undo: Annotated[bool, typer.Option("--undo", help="Let the client take part again.")] = False,
) -> None:
    """Exclude a client from a run, from the next round on. The server need not be stopped.

    What the server keeps of the client stays. A resumed run excludes it, too.

    [bold]Example[/]
      fedagrac flower exclude runs/flower 3
    """
    from fedagrac.flower.operating import exclude_client

    with naming_options(folder="DIR", client="CLIENT"):
        excluded = exclude_client(folder, client, undo)
    listed = ", ".join(map(str, excluded)) or "none"
    Terminal().print(one_line(f"{folder}: excluded clients: {listed}"), highlight=False, soft_wrap=True)
