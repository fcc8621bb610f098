"""A run folder: what a run writes while it goes on, and what it needs back to resume.

Text, JSON and safetensors only. `storage/runs.py` reads finished folders for reports.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagrac.files import make_folder, naming, opener, sync, write_atomically
from fedagrac.parsing import parse_json
from fedagrac.storage.checkpoints import Checkpoint, CheckpointError, read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.engines.ranks import Ranks

__all__ = ["RunFolder", "read_history", "to_json", "write_description"]


def to_json(values: Mapping[str, Any]) -> str:
    """Return strict JSON on one line: a number that is not finite becomes null."""
    finite = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in values.items()}
    return json.dumps(finite, allow_nan=False)


def write_description(
    folder: Path, experiment: Mapping[str, Any], environment: Mapping[str, Any], federation: Any = None
) -> None:
    """Make a folder and write what runs in it.

    Args:
        folder: of a run, or of an experiment with several.
        experiment: the fully resolved experiment, for experiment.toml.
        environment: versions and machine, for environment.json.
        federation: a description of the clients, a dataclass, for federation.json; None for no such file.
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
        path: the folder: experiment.toml, environment.json, history.jsonl, checkpoint/, and once the run has
            ended status.json and model.safetensors.
    """

    path: Path

    @property
    def history(self) -> Path:
        """The file of rounds, one line each."""
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
        """Write the rounds so far in place of what is there."""
        lines = "".join(to_json(record) + "\n" for record in history)
        write_atomically(self.history, lines.encode())

    def append_round(self, record: Mapping[str, Any]) -> None:
        """Add one line to the history."""
        with naming(self.history), open(self.history, "a", encoding="utf-8", opener=opener) as history:
            history.write(to_json(record) + "\n")

    def write_checkpoint(self, checkpoint: Checkpoint, ranks: Ranks) -> Path:
        """Write a checkpoint once its rounds are on the disk: without them it would be worth nothing."""
        if ranks.rank == 0 and self.history.exists():
            sync(self.history)
        return write_checkpoint(self.checkpoints, checkpoint, ranks)

    def last_checkpoint(self) -> Checkpoint | None:
        """Return where an interrupted run stands, with its history; None where it has to start anew."""

        def complete(checkpoint: Checkpoint) -> Checkpoint:
            return replace(checkpoint, history=read_history(self.history, checkpoint.round))

        return read_checkpoint(self.checkpoints, complete=complete)

    def checkpoint_bytes(self) -> int:
        """Return how much of the disk the checkpoints take."""
        return sum(path.stat().st_size for path in self.checkpoints.glob("*"))

    def write_end(
        self, parameters: Mapping[str, Tensor], status: str, reason: str, rounds: int, divergence: Any = None
    ) -> None:
        """Keep the final model (model.safetensors) and say how the run ended (status.json).

        `divergence` is a dataclass that describes where the run left the finite numbers, or None.
        """
        from safetensors.torch import save

        kept = {name: value.detach().clone().contiguous() for name, value in parameters.items()}
        write_atomically(self.path / "model.safetensors", save(kept))
        end: dict[str, Any] = {"status": status, "reason": reason, "rounds": rounds}
        if divergence is not None:
            end["divergence"] = asdict(divergence)
        write_atomically(self.path / "status.json", json.dumps(end).encode() + b"\n")


def read_history(path: Path, rounds: int) -> list[dict[str, Any]]:
    """Return the first rounds of a history.jsonl; what a crash left after them is not looked at."""
    records = []
    try:
        with path.open(encoding="utf-8") as lines:
            for line in itertools.islice(lines, rounds):
                records.append(parse_json(line))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error
    numbers = [record.get("round") if isinstance(record, dict) else None for record in records]
    if len(records) != rounds or numbers != list(range(1, rounds + 1)):
        raise CheckpointError(f"{path} does not hold the {rounds} rounds of its checkpoint")
    return records
