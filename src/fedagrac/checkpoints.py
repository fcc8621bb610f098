"""Checkpoints: everything a run needs to go on, in one file. Safetensors and JSON only.

A checkpoint holds the server's vectors, what it remembers of each client, and a few facts as JSON. It is written
to a temporary file and renamed, and the last two are kept, so a crash at any moment leaves one that loads. The
rounds so far are not in it: they are in history.jsonl beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.clients import ClientTable
from fedagrac.errors import FedagracError
from fedagrac.folders import write_atomically

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Checkpoint", "CheckpointError", "read_checkpoint", "write_checkpoint"]

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
    """

    round: int
    state: Mapping[str, Tensor]
    table: ClientTable
    facts: dict[str, Any] = field(default_factory=dict)


def write_checkpoint(folder: Path, checkpoint: Checkpoint) -> Path:
    """Write folder/round-N.safetensors, whole or not at all; remove all but the last two."""
    from safetensors.torch import save

    clients, rows = checkpoint.table.export()
    tensors = {
        **{f"state.{name}": vector for name, vector in checkpoint.state.items()},
        **{f"rows.{name}": values for name, values in rows.items()},
        "clients": torch.from_numpy(clients),
    }
    placed = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    head = {
        "format": FORMAT,
        "round": checkpoint.round,
        "num_clients": checkpoint.table.num_clients,
        "sha256": _hash(placed),
        "facts": checkpoint.facts,
    }
    path = folder / f"round-{checkpoint.round:08d}.safetensors"
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(path, save(placed, metadata={"fedagrac": json.dumps(head)}))
    for old in _found(folder)[:-KEPT]:
        old.unlink(missing_ok=True)
    return path


def read_checkpoint(folder: Path, device: torch.device | str = "cpu") -> Checkpoint | None:
    """Return the newest checkpoint of a folder, or None where there is none.

    A damaged one is said and passed over for the one before it.
    """
    found = _found(folder)
    for path in reversed(found):
        try:
            return _read(path, device)
        except CheckpointError as error:
            if path == found[0]:
                raise
            log.warning("%s; the one before it is used", error)
    return None


def _found(folder: Path) -> list[Path]:
    return sorted(folder.glob("round-*.safetensors"))


def _read(path: Path, device: torch.device | str) -> Checkpoint:
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

    def named(prefix: str) -> dict[str, Tensor]:
        return {
            name.removeprefix(prefix): value.to(device)
            for name, value in tensors.items()
            if name.startswith(prefix)
        }

    table = ClientTable(int(head["num_clients"]))
    clients = tensors["clients"].numpy().astype(np.int64)
    if len(clients):
        table.put(clients, named("rows."))
    return Checkpoint(int(head["round"]), named("state."), table, dict(head["facts"]))


def _hash(tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of names, shapes, types and contents."""
    found = hashlib.sha256()
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()
