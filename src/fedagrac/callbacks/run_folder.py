"""The run folder: what a run leaves on disk. Text, JSON and safetensors only."""

from __future__ import annotations

import json
import math
import os
import platform
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.callbacks.base import Callback
from fedagrac.folders import naming, write_atomically

if TYPE_CHECKING:
    from fedagrac.results import Record, SimulationResult
    from fedagrac.simulation import Run

__all__ = ["RunFolder", "environment", "write_description"]


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return versions and machine: what a reader needs to repeat a run, and no environment variables."""
    from fedagrac import __version__

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

    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / "experiment.toml", tomli_w.dumps(experiment).encode())
    write_atomically(folder / "environment.json", json.dumps(facts, indent=2).encode() + b"\n")


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
        earlier = "".join(to_json(record) + "\n" for record in run.history)  # of a run that goes on
        write_atomically(self.folder / "history.jsonl", earlier.encode())

    def on_round(self, run: Run, record: Record) -> None:
        """Add one line to the history."""
        path = self.folder / "history.jsonl"
        with naming(path), path.open("a", encoding="utf-8") as history:
            history.write(to_json(record) + "\n")

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Keep the final model and say how the run ended."""
        from safetensors.torch import save

        parameters = {name: value.detach().clone().contiguous() for name, value in result.params.items()}
        write_atomically(self.folder / "model.safetensors", save(parameters))
        status = {"status": result.status, "reason": result.reason, "rounds": len(result.history)}
        write_atomically(self.folder / "status.json", json.dumps(status).encode() + b"\n")
