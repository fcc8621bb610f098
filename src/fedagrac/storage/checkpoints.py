"""Checkpoints: everything a run needs to resume, in safetensors and JSON only.

A checkpoint holds the server's vectors, the rows that it keeps for clients, and facts as JSON. It is written to a
temporary file, which is renamed once it is on the disk. At least the last two are kept, so a crash at any moment
leaves one that can be read. The history is not part of the file; the reader adds it.
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

__all__ = [
    "KEPT",
    "Checkpoint",
    "CheckpointError",
    "Facts",
    "check_fits",
    "read_checkpoint",
    "read_checkpoint_of",
    "remove_checkpoints_after",
    "stored_rounds",
    "write_checkpoint",
]

log = logging.getLogger("fedagrac")

FORMAT = 3

KEPT = 2
"""How many checkpoints are kept, unless a run asks for more."""

MOST_SAMPLES = 2**62
"""The largest number of samples of a client. Sums over clients may be larger and must be exact."""

MOST_PARTS = 10_000
"""The largest number of processes that write a checkpoint together."""

BUFFERS = "buffers"
"""The name of the module's moving buffers among the vectors of the server and the rows of clients."""

SHAPES = {"clients": 1, "state": 1, "rows": 2}
"""The number of dimensions of each kind of tensor."""


class CheckpointError(FedagracError):
    """A checkpoint that cannot be used."""


@dataclass(frozen=True)
class Facts:
    """What a resumed run needs besides vectors and rounds. It is the same for every fleet.

    Attributes:
        sim_time: seconds on the fleet's clock so far.
        bytes_total: bytes moved so far, in both directions.
        engine: the engine that ran the clients; None for a live fleet.
        sizes: the samples of each client, as the clients of a live fleet reported them; empty in a simulation.
        identity: settings that a live run must share with its checkpoint; empty in a simulation.
        buffers: the names of the module's moving buffers, as the clients of a live fleet reported them.
        connected: the clients of a live fleet that were connected; empty if that is not known.
    """

    sim_time: float
    bytes_total: int
    engine: EngineRecord | None = None
    sizes: tuple[int, ...] = ()
    identity: Mapping[str, Any] = field(default_factory=dict)
    buffers: tuple[str, ...] = ()
    connected: tuple[int, ...] = ()

    @classmethod
    def read(cls, table: Any) -> Facts:
        """Read facts from the JSON of a header; raise ValueError if they are invalid.

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
        values = {"sizes": [], "identity": {}, "buffers": [], "connected": [], **table}
        for name, kind, least in (("sim_time", int | float, 0), ("bytes_total", int, 0)):
            value = values.get(name)
            if isinstance(value, bool) or not isinstance(value, kind) or not least <= value < math.inf:
                raise ValueError(f"{name} is {shown(value)}")
        for name, least, most in (("sizes", 1, MOST_SAMPLES), ("connected", 0, MOST_CLIENTS - 1)):
            given = values[name]
            integers = isinstance(given, list) and all(type(n) is int for n in given)
            if not integers or any(not least <= n <= most for n in given):
                raise ValueError(f"{name} is {shown(given)}")
        if not isinstance(values["buffers"], list) or not all(isinstance(n, str) for n in values["buffers"]):
            raise ValueError(f"buffers is {shown(values['buffers'])}")
        if not isinstance(values["identity"], dict):
            raise ValueError(f"identity is {shown(values['identity'])}")
        return cls(
            sim_time=float(values["sim_time"]),
            bytes_total=values["bytes_total"],
            engine=EngineRecord.read(values.get("engine")),
            sizes=tuple(values["sizes"]),
            identity=values["identity"],
            buffers=tuple(values["buffers"]),
            connected=tuple(values["connected"]),
        )


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """The state of a run after a round.

    Attributes:
        round: the number of rounds done.
        state: the server's vectors by name; "x" is the model.
        table: the rows that the server keeps for clients.
        facts: what else a resumed run needs.
        history: the rounds so far, which are not written with a checkpoint.
    """

    round: int
    state: Mapping[str, Tensor]
    table: ClientTable
    facts: Facts
    history: Sequence[Mapping[str, Any]] = ()


def write_checkpoint(folder: Path, checkpoint: Checkpoint, ranks: Ranks = ALONE, keep: int = KEPT) -> Path:
    """Write folder/round-N.safetensors completely or not at all, and remove all but the last few. Return its path.

    If several processes share the run, each one writes the rows of its clients. The first process also writes the
    server's vectors. It writes last, so that its file shows that the checkpoint is complete.
    """
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    clients, rows = checkpoint.table.export()
    tensors = {f"rows.{name}": values for name, values in rows.items()}
    tensors["clients"] = torch.from_numpy(clients)
    if ranks.rank == 0:
        ranks.wait()
        # before round 1 two names may share one vector, which the format does not allow
        tensors |= {f"state.{name}": vector.clone() for name, vector in checkpoint.state.items()}
    stored = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    head = {
        "format": FORMAT,
        "round": checkpoint.round,
        "num_clients": checkpoint.table.num_clients,
        "parts": ranks.size,
        "facts": asdict(checkpoint.facts),
    }
    metadata = {"fedagrac": json.dumps({**head, "sha256": content_hash(head, stored)})}
    path = _path(folder, checkpoint.round, ranks.rank)
    make_folder(folder)
    with whole_or_not_at_all(path) as temporary:
        try:
            save_file(stored, temporary, metadata=metadata)
        except SafetensorError as error:  # for example, the disk is full
            number = re.search(r"os error (\d+)", str(error))
            if number is None:
                raise
            raise OSError(int(number[1]), os.strerror(int(number[1]))) from error
    if ranks.rank:
        ranks.wait()
    else:
        _remove_before(folder, _checkpoints(folder)[-keep:][0])
    return path


def _remove_before(folder: Path, oldest: Path) -> None:
    """Remove the checkpoints before `oldest`, with the parts of all processes."""
    for old in folder.glob(f"round-{'[0-9]' * 8}*.safetensors"):
        if old.name[: len("round-00000000")] < oldest.name[: len("round-00000000")]:
            old.unlink(missing_ok=True)


def _path(folder: Path, round: int, rank: int) -> Path:
    """Return the path of the part that a process writes."""
    return folder / f"round-{round:08d}{f'.rank-{rank}' if rank else ''}.safetensors"


def read_checkpoint(
    folder: Path,
    device: torch.device | str = "cpu",
    complete: Callable[[Checkpoint], Checkpoint] = lambda checkpoint: checkpoint,
) -> Checkpoint | None:
    """Return the newest usable checkpoint of a folder, or None if the folder has none.

    `complete` adds what is stored elsewhere, such as the history. If the newest checkpoint is damaged, or if
    `complete` raises CheckpointError, the error is logged and the previous checkpoint is used.
    """
    paths = _checkpoints(folder)
    for path in reversed(paths):
        try:
            return complete(_read_all(path, device))
        except CheckpointError as error:
            if path == paths[0]:
                raise
            log.warning("%s; using the previous checkpoint", error)
    return None


def read_checkpoint_of(folder: Path, round: int) -> Checkpoint:
    """Return the checkpoint after a round, without its history; raise CheckpointError if it cannot be used."""
    return _read_all(_path(folder, round, 0), "cpu")


def stored_rounds(folder: Path) -> list[int]:
    """Return the rounds after which a folder has a checkpoint, in increasing order.

    Examples:
        >>> stored_rounds(Path("no-such-folder"))
        []
    """
    return [int(path.stem.removeprefix("round-")) for path in _checkpoints(folder)]


def remove_checkpoints_after(folder: Path, round: int) -> None:
    """Remove the checkpoints of later rounds, the newest first, with the parts of all processes."""
    for path in sorted(folder.glob(f"round-{'[0-9]' * 8}*.safetensors"), reverse=True):
        if int(path.name[len("round-") : len("round-00000000")]) > round:
            path.unlink(missing_ok=True)


def _checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder, oldest first, each as the part of the first process."""
    return sorted(folder.glob(f"round-{'[0-9]' * 8}.safetensors"))


def _read_all(path: Path, device: torch.device | str) -> Checkpoint:
    """Return a checkpoint with the rows of all processes that wrote it."""
    head, tensors = _read(path)
    kinds: dict[str, Any] | None = None
    parts = []
    for rank in range(head["parts"]):
        part_head, part = (head, tensors) if rank == 0 else _read(_path(path.parent, head["round"], rank))
        rows = _named(part, "rows.", device)
        part_kinds = {name: (values.shape[1], values.dtype) for name, values in rows.items()}
        if len(part["clients"]):
            kinds = part_kinds if kinds is None else kinds
            parts.append((part["clients"].numpy(), rows))
        same_head = all(part_head[key] == head[key] for key in ("parts", "round", "num_clients"))
        if not same_head or (kinds or part_kinds) != part_kinds:
            raise CheckpointError(f"{path} and its part {rank} belong to different runs")
    table = ClientTable(head["num_clients"])  # allocates what the header says, so only after all checks
    for clients, rows in parts:
        table.put(clients, rows)
    return Checkpoint(head["round"], _named(tensors, "state.", device), table, Facts.read(head["facts"]))


def _named(tensors: Mapping[str, Tensor], prefix: str, device: torch.device | str) -> dict[str, Tensor]:
    """Return the tensors whose names have a prefix, on a device, by the rest of the name."""
    return {
        name.removeprefix(prefix): value.to(device) for name, value in tensors.items() if name.startswith(prefix)
    }


def _read(path: Path) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the checked header and tensors of one file."""
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
            f"{path} has the checkpoint format {version}, expected {FORMAT}: resume with the version of fedagrac "
            "that wrote it, or start again in another folder"
        )
    fault = next(_faults(head, tensors), None)
    if fault is None and content_hash(head, tensors) != head.get("sha256"):
        fault = "its content does not match its hash"
    if fault is not None:
        raise CheckpointError(f"{path} is damaged: {fault}")
    return head, tensors


def _faults(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield what is wrong with a header and its tensors. Later checks rely on earlier ones."""
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
        yield "it holds clients that the run does not have"
    rows = [value for name, value in tensors.items() if name.startswith("rows.")]
    if len(np.unique(clients)) != len(clients) or any(len(value) != len(clients) for value in rows):
        yield "it does not hold one row for each of its clients"


def check_fits(
    checkpoint: Checkpoint,
    traits: Traits,
    x: Tensor,
    buffers: Tensor | None = None,
    own_buffers: bool = False,
) -> None:
    """Check that a checkpoint fits the traits of an algorithm, a model like x, and moving buffers like these."""
    clients, rows = checkpoint.table.export()
    extra = () if buffers is None else (BUFFERS,)
    declared = (*traits.rows, *(extra if own_buffers else ())) if len(clients) else ()
    state = (*traits.state, *extra)
    for what, names, vectors in (("", state, checkpoint.state), ("the clients' ", declared, rows)):
        if set(names) != set(vectors):
            given = ", ".join(sorted(vectors)) or "nothing"
            raise CheckpointError(
                f"the checkpoint holds {what}{shown(given)}, expected {', '.join(sorted(names))}"
            )
        for name, vector in vectors.items():
            any_precision = vectors is checkpoint.state and name in traits.sums
            size = len(buffers) if buffers is not None and name == BUFFERS else len(x)
            dtype = x.dtype
            if vectors is rows and name in traits.counts:
                size, dtype = 1, torch.float64
            if vector.shape[-1] != size or not (any_precision or vector.dtype == dtype):
                given = f"{vector.shape[-1]} numbers of {vector.dtype}"
                raise CheckpointError(f"the checkpoint's {what}{name} has {given}, expected {size} of {dtype}")


def content_hash(head: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> str:
    """Return a hash of the header and of the tensors' names, shapes, types and contents."""
    hashed = {key: value for key, value in head.items() if key != "sha256"}
    digest = hashlib.sha256(json.dumps(hashed, sort_keys=True).encode())
    for name in sorted(tensors):
        value = tensors[name]
        digest.update(f"{name} {tuple(value.shape)} {value.dtype}".encode())
        digest.update(value.contiguous().view(torch.uint8).numpy().data if value.numel() else b"")
    return digest.hexdigest()
