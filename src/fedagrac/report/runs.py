"""Reading run folders back."""

from __future__ import annotations

import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedagrac.errors import InputError
from fedagrac.results import History

__all__ = ["StoredRun", "read_run"]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run as its folder tells it."""

    folder: Path
    experiment: dict[str, Any]
    history: History
    status: str
    reason: str

    @property
    def label(self) -> str:
        """What the run is called."""
        entry = self.experiment["algorithm"][0]
        return str(entry.get("label", entry["name"]))


def read_run(folder: str | Path) -> StoredRun:
    """Read a run folder; a run without status.json is still running or was cut off."""
    folder = Path(folder)
    try:
        experiment = tomllib.loads((folder / "experiment.toml").read_text(encoding="utf-8"))
        lines = (folder / "history.jsonl").read_text(encoding="utf-8").splitlines()
        history = History(json.loads(line) for line in lines)
        end = folder / "status.json"
        status = (
            json.loads(end.read_text()) if end.exists() else {"status": "unfinished", "reason": "no status.json"}
        )
    except (OSError, ValueError) as error:
        raise InputError("run folder", str(folder), f"experiment.toml and history.jsonl ({error})") from None
    return StoredRun(folder, experiment, history, status["status"], status["reason"])
