"""Checkpoints: everything a run needs to go on, in one file. Safetensors and JSON only.

A checkpoint holds the server's vectors, what it remembers of each client, and some facts as JSON. It is written to
a temporary file, which is renamed once it is on the disk, and the last two are kept: a crash at any moment leaves
one that loads. The rounds so far are not in it; whoever resumes adds them.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.engines.choice import EngineRecord
from fedagrac.engines.ranks import ALONE, Ranks
from fedagrac.errors import MOST_CLIENTS, FedagracError, shown
from fedagrac.files import make_folder, whole_or_not_at_all
from fedagrac.parsing import parse_json
from fedagrac.storage.clients import ClientTable

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.algorithms.base import Traits

__all__ = ["Checkpoint", "CheckpointError", "Facts", "check_fits", "read_checkpoint", "write_checkpoint"]

log = logging.getLogger("fedagrac")

FORMAT = 3
KEPT = 2

MOST_PARTS = 10_000
"""Processes that may have written a checkpoint together."""

SHAPES = {"clients": 1, "state": 1, "rows": 2}
"""How many dimensions each kind of tensor has."""


class CheckpointError(FedagracError):
    """A checkpoint that cannot be used, and why."""


@dataclass(frozen=True)
class Facts:
    """What a run that goes on must know besides vectors and rounds; the same for every fleet.

    Attributes:
        sim_time: seconds on the fleet's clock so far.
        bytes_total: bytes moved so far, in both directions.
        engine: what ran the clients on this machine; None where they are elsewhere.
        sizes: samples of each client, as a live fleet's clients reported them; empty in a simulation.
        identity: settings that the run must share with its checkpoint, where no experiment.toml says so.
    """

    sim_time: float
    bytes_total: int
    engine: EngineRecord | None = None
    sizes: tuple[int, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, table: Any) -> Facts:
        """Read facts from the JSON of a header; raise ValueError where they make no sense.

        Examples:
            >>> Facts.read({"sim_time": 1.5, "bytes_total": 64}).sizes
            ()
            >>> Facts.read({"sim_time": 1.5, "bytes_total": -1})
            Traceback (most recent call last):
            ...
            ValueError: bytes_total is -1
        """
        if not isinstance(table, dict):
            raise ValueError("it has no facts")
        values = {"sizes": [], "identity": {}, **table}
        for name, kind, least in (("sim_time", int | float, 0), ("bytes_total", int, 0)):
            value = values.get(name)
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
                raise ValueError(f"{name} is {shown(value)}")
        sizes = values["sizes"]
        whole = isinstance(sizes, list) and all(isinstance(n, int) and not isinstance(n, bool) for n in sizes)
        if not whole or any(not 1 <= n <= 2**62 for n in sizes):
            raise ValueError(f"sizes is {shown(sizes)}")
        if not isinstance(values["identity"], dict):
            raise ValueError(f"identity is {shown(values['identity'])}")
        return cls(
            sim_time=float(values["sim_time"]),
            bytes_total=values["bytes_total"],
            engine=EngineRecord.read(values.get("engine")),
            sizes=tuple(sizes),
            identity=values["identity"],
        )


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """Where a run stands after some round.

    Attributes:
        round: rounds done.
        state: the server's vectors by name; "x" is the model.
        table: what the server keeps of each client.
        facts: everything else that the run must know.
        history: the rounds so far. They are not written with a checkpoint.
    """

    round: int
    state: Mapping[str, Tensor]
    table: ClientTable
    facts: Facts
    history: Sequence[Mapping[str, Any]] = ()


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
        "facts": asdict(checkpoint.facts),
    }
    metadata = {"fedagrac": json.dumps({**head, "sha256": content_hash(head, placed)})}
    path = _path(folder, checkpoint.round, ranks.rank)
    make_folder(folder)
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
        _remove_before(folder, _checkpoints(folder)[-KEPT:][0])
    return path


def _remove_before(folder: Path, oldest: Path) -> None:
    """Remove the checkpoints before one of them, the parts of all processes included."""
    for old in folder.glob(f"round-{'[0-9]' * 8}*.safetensors"):
        if old.name[: len("round-00000000")] < oldest.name[: len("round-00000000")]:
            old.unlink(missing_ok=True)


def _path(folder: Path, round: int, rank: int) -> Path:
    return folder / f"round-{round:08d}{f'.rank-{rank}' if rank else ''}.safetensors"


def read_checkpoint(
    folder: Path,
    device: torch.device | str = "cpu",
    complete: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint,
) -> Checkpoint | None:
    """Return the newest checkpoint of a folder, or None where there is none.

    One that is damaged, or that `complete` refuses with a CheckpointError, is logged, and the one before it is
    used. `complete` adds what is kept elsewhere, such as the history.
    """
    paths = _checkpoints(folder)
    for path in reversed(paths):
        try:
            return complete(_read_all(path, device))
        except CheckpointError as error:
            if path == paths[0]:
                raise
            log.warning("%s; the one before it is used", error)
    return None


def _checkpoints(folder: Path) -> list[Path]:
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
    return Checkpoint(head["round"], _named(tensors, "state.", device), table, Facts.read(head["facts"]))


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
    if wrong is None and content_hash(head, tensors) != head.get("sha256"):
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
    try:
        Facts.read(head.get("facts"))
    except ValueError as error:
        yield str(error)
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


def check_fits(checkpoint: Checkpoint, traits: Traits, x: Tensor) -> None:
    """Check that a checkpoint is one of an algorithm with these traits on a model like x."""
    clients, rows = checkpoint.table.export()
    declared = traits.rows if len(clients) else ()
    for what, names, vectors in (("", traits.state, checkpoint.state), ("the clients' ", declared, rows)):
        if set(names) != set(vectors):
            given = ", ".join(sorted(vectors)) or "nothing"
            raise CheckpointError(
                f"the checkpoint holds {what}{shown(given)}, expected {', '.join(sorted(names))}"
            )
        for name, vector in vectors.items():
            either = vectors is checkpoint.state and name in traits.sums  # float64 or the model's precision
            if vector.shape[-1] != len(x) or not (either or vector.dtype == x.dtype):
                given = f"{vector.shape[-1]} numbers of {vector.dtype}"
                raise CheckpointError(f"the checkpoint's {what}{name} has {given}, expected {len(x)} of {x.dtype}")


def content_hash(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the header, and of the tensors' names, shapes, types and contents."""
    known = {key: value for key, value in head.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(known, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
