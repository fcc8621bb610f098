"""What an operator does to the run folder of a federation: undo rounds, and exclude clients.

Rounds are undone while no server runs. Clients may be excluded at any time: the server reads the file before every
round.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection
from pathlib import Path

from fedagrac.errors import InputError, count
from fedagrac.files import read_bounded, write_atomically
from fedagrac.parsing import parse_json, parse_toml
from fedagrac.storage.checkpoints import read_checkpoint_of, stored_rounds
from fedagrac.storage.claims import claimed
from fedagrac.storage.run_folder import LARGEST, RunFolder

__all__ = ["EXCLUSIONS", "exclude_client", "read_exclusions", "roll_back", "rounds_to_go_back_to"]

EXCLUSIONS = "exclude.json"
"""The file that lists excluded clients."""


def rounds_to_go_back_to(folder: Path) -> list[int]:
    """Return the rounds of a federation that have a checkpoint; raise InputError for another folder."""
    rounds = stored_rounds(RunFolder(folder).checkpoints)
    if not rounds:
        raise InputError("folder", str(folder), "the run folder of a federation: this one has no checkpoint")
    return rounds


def roll_back(folder: Path, to: int) -> None:
    """Bring the run in a folder back to its state after a round.

    The next `flwr run` goes on from there, also if the run had ended. A folder in which a server runs is refused.
    """
    rounds_to_go_back_to(folder)
    run = RunFolder(folder)
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(claimed(folder))
        except InputError:
            accepted = "a folder in which no server runs: end its run with `flwr stop RUN-ID` first"
            raise InputError("folder", str(folder), accepted) from None
        if to in stored_rounds(run.checkpoints):
            checkpoint = read_checkpoint_of(run.checkpoints, to)
            if not checkpoint.facts.identity:
                raise InputError("folder", str(folder), "the run folder of a federation, not of a simulation")
        run.rollback(to)


def exclude_client(folder: Path, client: int, undo: bool = False) -> list[int]:
    """Exclude a client of a run from the next round on, or admit it again. Return the excluded ones."""
    try:
        experiment = parse_toml(read_bounded(folder / "experiment.toml", LARGEST["experiment.toml"]).decode())
        clients = count("clients", experiment.get("clients"))
    except (OSError, ValueError) as error:
        accepted = f"the run folder of a federation that has begun ({error})"
        raise InputError("folder", str(folder), accepted) from None
    if not 0 <= client < clients:
        raise InputError("client", client, f"a partition from 0 to {clients - 1}")
    path = folder / EXCLUSIONS
    excluded = set(read_exclusions(path, clients))
    if undo and client not in excluded:
        known = ", ".join(map(str, sorted(excluded))) or "none"
        accepted = f"a client that was excluded by this command: {known}"
        raise InputError("client", client, accepted)
    changed = sorted(excluded - {client} if undo else excluded | {client})
    if len(changed) == clients:
        raise InputError("client", client, "a client other than the last one that takes part")
    write_atomically(path, json.dumps(changed).encode() + b"\n")
    return changed


def read_exclusions(path: Path, clients: int) -> Collection[int]:
    """Return the excluded clients in a file; none if there is no file. Raise InputError if it cannot be used.

    Examples:
        >>> read_exclusions(Path("no-such-file.json"), clients=3)
        ()
    """
    accepted = f"a JSON list of different partitions from 0 to {clients - 1}, and not of all"
    try:
        listed = parse_json(read_bounded(path, LARGEST[EXCLUSIONS]))
    except FileNotFoundError:
        return ()
    except (OSError, ValueError) as error:
        raise InputError(str(path), str(error), accepted) from None
    if not isinstance(listed, list) or not all(type(i) is int and 0 <= i < clients for i in listed):
        raise InputError(str(path), listed, accepted)
    if len(set(listed)) < len(listed) or len(listed) == clients:
        raise InputError(str(path), listed, accepted)
    return listed
