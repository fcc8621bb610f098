"""Checkpoints: everything a run needs to go on, in one file. Safetensors and JSON only.

A checkpoint holds the server's vectors, what it remembers of each client, and some facts as JSON. It is written to
a temporary file, which is renamed once it is on the disk, and the last two are kept: a crash at any moment leaves
one that loads. The rounds so far are not in it: they are in history.jsonl beside its folder.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.clients import ClientTable
from fedagrac.engines.sharded import ALONE, Ranks
from fedagrac.errors import FedagracError
from fedagrac.folders import make_folder, sync, whole_or_not_at_all

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "CheckpointError", "read_checkpoint", "read_history", "write_checkpoint"]

log = logging.getLogger("fedagrac")

FORMAT = 1
KEPT = 2


class CheckpointError(FedagracError):
    """A checkpoint that cannot be used, and why."""


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a run stands after some round.

    Attributes:
        round: rounds done.
        state: the server's vectors by name; "x" is the model.
        table: what the server remembers of each client.
        facts: anything else, as JSON.
        history: the rounds so far; not written, see `read_history`.
    """

    round: int
    state: Mapping[str, Tensor]
    table: ClientTable
    facts: dict[str, Any] = field(default_factory=dict)
    history: Sequence[dict[str, Any]] = ()


def write_checkpoint(folder: Path, checkpoint: Checkpoint, ranks: Ranks = ALONE) -> Path:
    """Write folder/round-N.safetensors, whole or not at all; remove all but the last two.

    Of several processes each writes its own clients' rows; the first, which writes the server's vectors, comes
    last, so that its file stands for all of them.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    clients, rows = checkpoint.table.export()
    tensors = {f"rows.{name}": values for name, values in rows.items()}
    tensors["clients"] = torch.from_numpy(clients)
    if ranks.rank == 0:
        ranks.wait()
        # before the first round two names may stand for one vector, and the format has no such thing
        tensors |= {f"state.{name}": vector.clone() for name, vector in checkpoint.state.items()}
    placed = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    head = {
        "format": FORMAT,
        "round": checkpoint.round,
        "num_clients": checkpoint.table.num_clients,
        "parts": ranks.size,
        "sha256": _hash(placed),
        "facts": checkpoint.facts,
    }
    path, history = _path(folder, checkpoint.round, ranks.rank), folder.parent / "history.jsonl"
    make_folder(folder)
    if ranks.rank == 0 and history.exists():
        sync(history)  # a checkpoint whose rounds are not on the disk would be worth nothing
    with whole_or_not_at_all(path) as temporary:
        try:
            save_file(placed, temporary, metadata={"fedagrac": json.dumps(head)})
        except SafetensorError as error:  # such as a full disk
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    if ranks.rank:
        ranks.wait()
    else:
        _remove_before(folder, _found(folder)[-KEPT:][0])
    return path


def _remove_before(folder: Path, oldest: Path) -> None:
    """Remove the checkpoints before one of them, the parts of all processes included."""
    for old in folder.glob(f"round-{'[0-9]' * 8}*.safetensors"):
        if old.name[: len("round-00000000")] < oldest.name[: len("round-00000000")]:
            old.unlink(missing_ok=True)


def _path(folder: Path, round: int, rank: int) -> Path:
    return folder / f"round-{round:08d}{f'.rank-{rank}' if rank else ''}.safetensors"


def read_checkpoint(
    folder: Path, device: torch.device | str = "cpu", history: Path | None = None
) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, with its rounds if a history.jsonl is named; None without any.

    A damaged one, or one whose rounds are not there, is said and passed over for the one before it.
    """
    found = _found(folder)
    for path in reversed(found):
        try:
            stored = _read_all(path, device)
            return stored if history is None else replace(stored, history=read_history(history, stored.round))
        except CheckpointError as error:
            if path == found[0]:
                raise
            log.warning("%s; the one before it is used", error)
    return None


def read_history(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the first rounds of a history.jsonl; what a crash left after them is not looked at."""
    found = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, rounds):
                found.append(json.loads(line))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if [record.get("round") for record in found] != list(range(1, rounds + 1)):
        raise CheckpointError(f"{path} does not hold the {rounds} rounds of its checkpoint")
    return found


def _found(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first; of several processes the first's part stands for all."""
    return sorted(folder.glob(f"round-{'[0-9]' * 8}.safetensors"))


def _read_all(path: Path, device: torch.device | str) -> Checkpoint:
    """Return a checkpoint with the rows of all processes that wrote it."""
    head, tensors = _read(path)
    table = ClientTable(int(head["num_clients"]))
    for rank in range(int(head["parts"])):
        if rank:
            other, tensors_of = _read(_path(path.parent, int(head["round"]), rank))
            if other["parts"] != head["parts"]:
                raise CheckpointError(f"{path} and its part {rank} are of different runs")
        else:
            tensors_of = tensors
        clients = tensors_of["clients"].numpy().astype(np.int64)
        if len(clients):
            table.put(clients, _named(tensors_of, "rows.", device))
    return Checkpoint(int(head["round"]), _named(tensors, "state.", device), table, dict(head["facts"]))


def _named(tensors: Mapping[str, Tensor], prefix: str, device: torch.device | str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value.to(device) for name, value in tensors.items() if name.startswith(prefix)
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            head = json.loads((file.metadata() or {}).get("fedagrac", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        version = head.get("format") if isinstance(head, dict) else None
        raise CheckpointError(f"{path} is not a checkpoint of format {FORMAT} but of {version}")
    if _hash(tensors) != head.get("sha256"):
        raise CheckpointError(f"{path} is damaged: its content does not match its hash")
    return head, tensors


def _hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes, types and contents."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()
