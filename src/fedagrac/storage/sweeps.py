"""The files of a sweep: sweep.json, every point with its numbers, and best.toml, the best settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedagrac.files import read_bounded, write_atomically
from fedagrac.storage.run_folder import LARGEST

__all__ = ["read_results", "write_best", "write_results"]

RESULTS = "sweep.json"


def write_results(folder: Path, results: Mapping[str, Any]) -> Path:
    """Write sweep.json: what points are compared by, the seeds, and every point with its runs. Return its path."""
    path = folder / RESULTS
    write_atomically(path, (json.dumps(results, indent=1) + "\n").encode())
    return path


def read_results(folder: Path) -> str:
    """Return the JSON text of sweep.json."""
    return read_bounded(folder / RESULTS, LARGEST[RESULTS]).decode()


def write_best(folder: Path, experiment: Mapping[str, Any]) -> Path:
    """Write best.toml: the experiment with every algorithm at its best settings. Return its path."""
    import tomli_w

    path = folder / "best.toml"
    write_atomically(path, tomli_w.dumps(experiment).encode())
    return path
