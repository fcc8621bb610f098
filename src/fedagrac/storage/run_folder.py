"""A run folder: what a run writes, and what it reads to resume.

It holds TOML, JSON and safetensors only. `storage/runs.py` reads run folders for reports.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from fedagrac.errors import InputError
from fedagrac.files import make_folder, naming, open_bounded, opener, read_bounded, sync, write_atomically
from fedagrac.parsing import ParseError, parse_json
from fedagrac.storage.checkpoints import (
    KEPT,
    Checkpoint,
    CheckpointError,
    read_checkpoint,
    read_checkpoint_of,
    remove_checkpoints_after,
    stored_rounds,
    write_checkpoint,
)

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.engines.ranks import Ranks

__all__ = ["LARGEST", "LONGEST_LINE", "OUTPUT_NAMES", "RunFolder", "read_history", "to_json", "write_description"]

LARGEST = {
    "experiment.toml": 2**24,
    "environment.json": 2**20,
    "federation.json": 2**24,
    "status.json": 2**20,
    "failure.json": 2**20,
    "per_client.json": 2**26,
    "history.jsonl": 2**31,
    "sweep.json": 2**28,
    "exclude.json": 2**24,
}
"""The largest files that are read, in bytes. per_client.json has room for the results of 500,000 clients."""

LONGEST_LINE = 2**24
"""The longest line of a history.jsonl that is read, in bytes."""

LINE_PIECE = 2**16
"""Memory is set aside for a line of so many bytes at first."""

OUTPUT_NAMES = frozenset(
    [
        *LARGEST,
        *(f"{picture}.{kind}" for picture in ("curves", "costs", "sweep") for kind in ("png", "pdf")),
        "best.toml",
        "checkpoint",
        "figures",
        "local_only.json",
        "log.jsonl",
        "model.safetensors",
        "report.html",
        "summary.json",
    ]
)
"""The names of files and folders in the folder of an experiment, a sweep or a run, in small letters."""


def to_json(values: Mapping[str, Any]) -> str:
    """Return strict JSON on one line. A number that is not finite becomes null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, allow_nan=False)


def write_description(
    folder: Path, experiment: Mapping[str, Any], environment: Mapping[str, Any], federation: Any = None
) -> None:
    """Make a folder and write experiment.toml, environment.json and federation.json.

    Args:
        folder: the folder of a run, or of an experiment with several runs.
        experiment: the fully resolved experiment.
        environment: the versions and the machine.
        federation: a dataclass that describes the clients; None to write no federation.json.
    """
    import tomli_w

    make_folder(folder)
    write_atomically(folder / "experiment.toml", tomli_w.dumps(dict(experiment)).encode())
    write_atomically(folder / "environment.json", json.dumps(environment, indent=2).encode() + b"\n")
    if is_dataclass(federation) and not isinstance(federation, type):
        write_atomically(folder / "federation.json", json.dumps(asdict(federation)).encode() + b"\n")


@dataclass(frozen=True)
class RunFolder:
    """The files of one run.

    Attributes:
        path: the folder. It holds experiment.toml, environment.json, history.jsonl and checkpoint/, and after the
            end of the run status.json and model.safetensors.
    """

    path: Path

    @property
    def history(self) -> Path:
        """The path of history.jsonl, which has one line per round."""
        return self.path / "history.jsonl"

    @property
    def checkpoints(self) -> Path:
        """The folder of checkpoints."""
        return self.path / "checkpoint"

    @property
    def ended(self) -> bool:
        """Whether the run has ended."""
        return (self.path / "status.json").exists()

    def write_history(self, history: Sequence[Mapping[str, Any]]) -> None:
        """Replace the history by the rounds so far."""
        lines = "".join(to_json(record) + "\n" for record in history)
        write_atomically(self.history, lines.encode())

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Append one line to the history."""
        with naming(self.history), open(self.history, "a", encoding="utf-8", opener=opener) as history:
            history.write(to_json(record) + "\n")

    def write_checkpoint(self, checkpoint: Checkpoint, ranks: Ranks, keep: int = KEPT) -> Path:
        """Sync the history, without which a checkpoint is useless, and write a checkpoint. Return its path.

        All but the last `keep` checkpoints are removed.
        """
        if ranks.rank == 0 and self.history.exists():
            sync(self.history)
        return write_checkpoint(self.checkpoints, checkpoint, ranks, keep)

    def last_checkpoint(self) -> Checkpoint | None:
        """Return the newest usable checkpoint with its history; None if the run has to start again."""

        def complete(checkpoint: Checkpoint) -> Checkpoint:
            return replace(checkpoint, history=read_history(self.history, checkpoint.round))

        return read_checkpoint(self.checkpoints, complete=complete)

    def reopen(self) -> None:
        """Remove status.json, which says how the run ended, because it goes on."""
        (self.path / "status.json").unlink(missing_ok=True)

    def rollback(self, round: int) -> None:
        """Go back to the state after a round that has a checkpoint. Later rounds are removed.

        The checkpoint and its history are read first, so that nothing is removed if they cannot be used. Whatever
        moment a crash comes at, the run can be resumed from a checkpoint that is left.
        """
        rounds = stored_rounds(self.checkpoints)
        if round not in rounds:
            known = ", ".join(map(str, rounds)) or "none"
            raise InputError("to", round, f"a round with a checkpoint: {known}")
        read_checkpoint_of(self.checkpoints, round)
        history = read_history(self.history, round)
        remove_checkpoints_after(self.checkpoints, round)
        self.write_history(history)
        self.reopen()
        (self.path / "model.safetensors").unlink(missing_ok=True)

    def checkpoint_bytes(self) -> int:
        """Return the size of all checkpoints on the disk."""
        return sum(path.stat().st_size for path in self.checkpoints.glob("*"))

    def write_end(
        self, parameters: Mapping[str, Tensor], status: str, reason: str, rounds: int, divergence: Any = None
    ) -> None:
        """Write the final model to model.safetensors and how the run ended to status.json.

        `divergence` is a dataclass that describes where the run diverged, or None.
        """
        from safetensors.torch import save

        tensors = {name: value.detach().clone().contiguous() for name, value in parameters.items()}
        write_atomically(self.path / "model.safetensors", save(tensors))
        end: dict[str, Any] = {"status": status, "reason": reason, "rounds": rounds}
        if divergence is not None:
            end["divergence"] = asdict(divergence)
        write_atomically(self.path / "status.json", json.dumps(end).encode() + b"\n")

    def write_per_client(self, columns: Mapping[str, Any]) -> None:
        """Write the results of each client to per_client.json, one list per column."""
        write_atomically(
            self.path / "per_client.json", json.dumps(dict(columns), allow_nan=False).encode() + b"\n"
        )

    def add_tuned(self, columns: Mapping[str, Any]) -> None:
        """Add the results of each client after fine-tuning to per_client.json."""
        tuned = {f"tuned_{name}": columns[name] for name in ("accuracy", "loss")}
        self.write_per_client({**self.read_per_client(), **tuned})

    def read_per_client(self) -> dict[str, Any]:
        """Read per_client.json; raise InputError if the folder has none."""
        try:
            columns = parse_json(read_bounded(self.path / "per_client.json", LARGEST["per_client.json"]))
        except (OSError, ValueError) as error:
            accepted = f"the folder of a run whose clients have test sets, with a per_client.json ({error})"
            raise InputError("folder", str(self.path), accepted) from None
        if not isinstance(columns, dict):
            raise InputError("per_client.json", type(columns).__name__, "a table of columns")
        return columns


def read_history(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the first rounds of a history.jsonl. Later lines, which a crash may have left, are not read."""
    records = []
    try:
        with open_bounded(path, LARGEST["history.jsonl"]) as file:
            for line in itertools.islice(lines_of(file), rounds):
                records.append(parse_json(line))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    numbers = [record.get("round") if isinstance(record, dict) else None for record in records]
    if len(records) != rounds or numbers != list(range(1, rounds + 1)):
        raise CheckpointError(f"{path} does not hold the {rounds} rounds of its checkpoint")
    return records


def lines_of(file: BinaryIO) -> Iterator[bytes]:
    """Yield the lines of a file with their ends; a line that is too long raises ParseError."""
    while line := file.readline(LINE_PIECE):
        if len(line) == LINE_PIECE and not line.endswith(b"\n"):
            line += file.readline(LONGEST_LINE)
        if len(line) > LONGEST_LINE:
            raise ParseError(f"it has a line of more than {LONGEST_LINE:,} bytes")
        yield line
