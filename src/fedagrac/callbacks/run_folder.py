"""The run folder: what a run leaves on disk. Text, JSON and safetensors only."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.callbacks.base import Callback
from fedagrac.files import make_folder, naming, opener, write_atomically

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from fedagrac.rounds.api import Run
    from fedagrac.rounds.divergence import Divergence
    from fedagrac.rounds.record import Record, SimulationResult

__all__ = ["RunFolder", "append_round", "environment", "write_description", "write_end", "write_history"]


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions and machine: what a reader needs to repeat a run, and no environment variables."""
    from fedagrac.version import __version__

    gpu = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None
    return {
        "fedagrac": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": None if device is None else str(device),
        "gpu": gpu,
    }


def to_json(value: Any) -> str:
    """Return strict JSON on one line: a number that is not finite becomes null."""
    if isinstance(value, dict):
        value = {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in value.items()}
    return json.dumps(value, allow_nan=False)


def write_description(folder: Path, experiment: dict[str, Any], facts: dict[str, Any]) -> None:
    """Make the folder and write what runs in it (experiment.toml) and where (environment.json)."""
    import tomli_w

    make_folder(folder)
    write_atomically(folder / "experiment.toml", tomli_w.dumps(experiment).encode())
    write_atomically(folder / "environment.json", json.dumps(facts, indent=2).encode() + b"\n")


def write_history(folder: Path, history: Sequence[Record]) -> None:
    """Write the rounds so far, one line each, in place of what is there."""
    lines = "".join(to_json(record) + "\n" for record in history)
    write_atomically(folder / "history.jsonl", lines.encode())


def append_round(folder: Path, record: Record) -> None:
    """Add one line to the history."""
    path = folder / "history.jsonl"
    with naming(path), open(path, "a", encoding="utf-8", opener=opener) as history:
        history.write(to_json(record) + "\n")


def write_end(
    folder: Path,
    parameters: Mapping[str, Tensor],
    status: str,
    reason: str,
    rounds: int,
    divergence: Divergence | None = None,
) -> None:
    """Keep the final model (model.safetensors) and say how the run ended (status.json)."""
    from safetensors.torch import save

    kept = {name: value.detach().clone().contiguous() for name, value in parameters.items()}
    write_atomically(folder / "model.safetensors", save(kept))
    said: dict[str, Any] = {"status": status, "reason": reason, "rounds": rounds}
    if divergence is not None:
        said["divergence"] = asdict(divergence)
    write_atomically(folder / "status.json", json.dumps(said).encode() + b"\n")


class RunFolder(Callback):
    """Writes experiment.toml, environment.json, history.jsonl, status.json and model.safetensors.

    Attributes:
        folder: where; made at the start of the run.
        experiment: the fully resolved experiment, with this run's algorithm alone.
    """

    def __init__(self, folder: str | Path, experiment: dict[str, Any]) -> None:
        self.folder = Path(folder)
        self.experiment = experiment

    def on_start(self, run: Run) -> None:
        """Make the folder and say what runs where."""
        facts = {
            **environment(run.workload.model.device),
            "engine": run.engine.name,
            "engine_compiled": getattr(run.engine, "compiled", False),
            "engine_width": getattr(run.engine, "width", 1),
            "engine_reason": run.engine_reason,
            "processes": run.ranks.size,
            "command": Path(sys.argv[0]).name,
        }
        write_description(self.folder, self.experiment, facts)
        write_history(self.folder, run.history)  # empty, unless the run goes on

    def on_round(self, run: Run, record: Record) -> None:
        """Add one line to the history."""
        append_round(self.folder, record)

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Keep the final model and say how the run ended."""
        told = result.status, result.reason, len(result.history), result.divergence
        write_end(self.folder, result.params, *told)
