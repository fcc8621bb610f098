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
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.cohort import Cohort, Population
from fedagrac.engines.ranks import ALONE, Ranks
from fedagrac.errors import MOST_CLIENTS, FedagracError, shown
from fedagrac.files import make_folder, sync, whole_or_not_at_all
from fedagrac.parsing import parse_json
from fedagrac.storage.clients import ClientTable

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms import Algorithm

__all__ = ["Checkpoint", "CheckpointError", "check_fits", "read_checkpoint", "read_history", "write_checkpoint"]

log = logging.getLogger("fedagrac")

FORMAT = 2
KEPT = 2

MOST_PARTS = 10_000
"""Processes that may have written a checkpoint together."""

SHAPES = {"clients": 1, "state": 1, "rows": 2}
"""How many dimensions each kind of tensor has."""


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
        "facts": checkpoint.facts,
    }
    metadata = {"fedagrac": json.dumps({**head, "sha256": _hash(head, placed)})}
    path, history = _path(folder, checkpoint.round, ranks.rank), folder.parent / "history.jsonl"
    make_folder(folder)
    if ranks.rank == 0 and history.exists():
        sync(history)  # a checkpoint whose rounds are not on the disk would be worth nothing
    with whole_or_not_at_all(path) as temporary:
        try:
            save_file(placed, temporary, metadata=metadata)
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
                found.append(parse_json(line))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    numbers = [record.get("round") if isinstance(record, dict) else None for record in found]
    if len(found) != rounds or numbers != list(range(1, rounds + 1)):
        raise CheckpointError(f"{path} does not hold the {rounds} rounds of its checkpoint")
    return found


def _found(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first; of several processes the first's part stands for all."""
    return sorted(folder.glob(f"round-{'[0-9]' * 8}.safetensors"))


def _read_all(path: Path, device: torch.device | str) -> Checkpoint:
    """Return a checkpoint with the rows of all processes that wrote it."""
    head, tensors = _read(path)
    kinds: dict[str, Any] | None = None
    parts = []
    for rank in range(head["parts"]):
        other, own = (head, tensors) if rank == 0 else _read(_path(path.parent, head["round"], rank))
        rows = _named(own, "rows.", device)
        found = {name: (values.shape[1], values.dtype) for name, values in rows.items()}
        if len(own["clients"]):
            kinds = found if kinds is None else kinds
            parts.append((own["clients"].numpy(), rows))
        if any(other[key] != head[key] for key in ("parts", "round", "num_clients")) or (kinds or found) != found:
            raise CheckpointError(f"{path} and its part {rank} are of different runs")
    table = ClientTable(head["num_clients"])  # as many as the header says, so after all of it was checked
    for clients, rows in parts:
        table.put(clients, rows)
    return Checkpoint(head["round"], _named(tensors, "state.", device), table, head["facts"])


def _named(tensors: Mapping[str, Tensor], prefix: str, device: torch.device | str) -> dict[str, Tensor]:
    return {
        name.removeprefix(prefix): value.to(device) for name, value in tensors.items() if name.startswith(prefix)
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="pt", device="cpu") as file:
            head = parse_json((file.metadata() or {}).get("fedagrac", "null"))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except (SafetensorError, ValueError, OSError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    if not isinstance(head, dict) or head.get("format") != FORMAT:
        version = head.get("format") if isinstance(head, dict) else None
        raise CheckpointError(
            f"{path} is not a checkpoint of format {FORMAT} but of {version}: go on with the version of fedagrac "
            "that wrote it, or start anew in another folder"
        )
    wrong = next(_complaints(head, tensors), None)
    if wrong is None and _hash(head, tensors) != head.get("sha256"):
        wrong = "its content does not match its hash"
    if wrong is not None:
        raise CheckpointError(f"{path} is damaged: {wrong}")
    return head, tensors


def _complaints(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what is wrong with the parts of a checkpoint; later checks rely on earlier ones."""
    for key, least, most in (("round", 0, 10**8 - 1), ("num_clients", 1, MOST_CLIENTS), ("parts", 1, MOST_PARTS)):
        value = head.get(key)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            yield f"{key} is {shown(value)}"
    if not isinstance(head.get("facts"), dict):
        yield "it has no facts"
    for name, value in tensors.items():
        kind, _, rest = name.partition(".")
        if not (name == "clients" or (kind in SHAPES and rest)):
            yield f"it holds {shown(name)}"
        dtypes = (torch.int64,) if name == "clients" else (torch.float32, torch.float64)
        if value.ndim != SHAPES[kind] or value.dtype not in dtypes:
            yield f"{shown(name)} has {value.ndim} dimensions of {value.dtype}"
    clients = tensors["clients"].numpy() if "clients" in tensors else np.array([-1])
    if len(clients) and not (clients.min() >= 0 and clients.max() < head["num_clients"]):
        yield "its clients are not those of the run"
    rows = [value for name, value in tensors.items() if name.startswith("rows.")]
    if len(np.unique(clients)) != len(clients) or any(len(value) != len(clients) for value in rows):
        yield "it does not hold one row for each of its clients"


def check_fits(checkpoint: Checkpoint, algorithm: Algorithm, x: Tensor) -> None:
    """Check that a checkpoint is one of this algorithm on a model of x's length: names, lengths and types."""
    pair, one = np.full(2, 0.5), np.zeros(1, np.int64)

    def zeros(x: Tensor, clients: npt.NDArray[np.int64], *_: Any, **__: Any) -> Tensor:
        return x.new_zeros((len(clients), len(x)))

    state = algorithm.start(x, Population(pair, zeros))
    clients, rows = checkpoint.table.export()
    cohort = Cohort(0, one, one + 1, [1], pair[:1], one + 1, False, zeros)
    wanted = algorithm.enter(state, cohort) if len(clients) else {}
    for what, needed, there in (("", state, checkpoint.state), ("the clients' ", wanted, rows)):
        if set(needed) != set(there):
            names = ", ".join(sorted(there)) or "nothing"
            raise CheckpointError(
                f"the checkpoint holds {what}{shown(names)}, expected {', '.join(sorted(needed))}"
            )
        for name, value in there.items():
            # sums over many rounds are kept in float64 whatever the model is
            exact = value.ndim == 2 or name in ("x", "x1")
            if value.shape[-1] != len(x) or (exact and value.dtype != needed[name].dtype):
                found = f"{value.shape[-1]} numbers of {value.dtype}"
                raise CheckpointError(f"the checkpoint's {what}{name} has {found}, expected {len(x)} of {x.dtype}")


def _hash(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the header, and of the tensors' names, shapes, types and contents."""
    told = {key: value for key, value in head.items() if key != "sha256"}
    found = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        found.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        found.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return found.hexdigest()
