"""Records: the outcome of one run of a recipe, as a small JSON file named after its settings.

A run that is recorded is not run again, so recipes can be stopped, continued, and filled in over days and
machines.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedagrac.files import make_folder, write_atomically
from fedagrac.parsing import parse_json

__all__ = ["Records", "Trial", "TrialRecord"]


@dataclass(frozen=True)
class Trial:
    """One run of a recipe.

    Attributes:
        name: where it belongs, such as "alexnet-dp1-v10000-fixed/fedagrac".
        settings: everything that decides the outcome.
        recipe: whose folder holds the record, where the run of another recipe is shown.
    """

    name: str
    settings: dict[str, Any]
    recipe: str | None = None

    @property
    def key(self) -> str:
        """A short hash of the settings.

        Examples:
            >>> Trial("a", {"lr": 0.1}).key == Trial("b", {"lr": 0.1}).key
            True
        """
        return hashlib.sha256(json.dumps(self.settings, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class TrialRecord:
    """What came out: the settings, the outcome, and where it was run."""

    trial: str
    settings: dict[str, Any]
    outcome: dict[str, Any]
    environment: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run went on to its end; one that ran out of time did not."""
        return bool(self.outcome.get("finished", True))


class Records:
    """The records of a folder, one file each."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)

    def path(self, recipe: str, trial: Trial) -> Path:
        """Return where the record of a trial is."""
        safe = "".join(c if c.isalnum() or c in "-." else "_" for c in trial.name)
        return self.folder / (trial.recipe or recipe) / f"{safe}-{trial.key}.json"

    def get(self, recipe: str, trial: Trial) -> TrialRecord | None:
        """Return the record of a trial, or None where there is none or the file is damaged."""
        try:
            table = parse_json(self.path(recipe, trial).read_bytes())
            parts = [table["settings"], table["outcome"], table["environment"]]
            return (
                TrialRecord(str(table["trial"]), *parts) if all(isinstance(part, dict) for part in parts) else None
            )
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def put(self, recipe: str, trial: Trial, outcome: dict[str, Any], environment: dict[str, Any]) -> TrialRecord:
        """Write the record of a trial."""
        path = self.path(recipe, trial)
        make_folder(path.parent)
        table = {"trial": trial.name, "settings": trial.settings, "environment": environment, "outcome": outcome}
        write_atomically(path, _lines(table).encode())
        return TrialRecord(trial.name, trial.settings, outcome, environment)


def _lines(table: Mapping[str, object]) -> str:
    """Return JSON with a line for each key of the two outer levels, so that a curve is one line.

    Examples:
        >>> print(_lines({"trial": "a", "outcome": {"rounds": 2, "accuracy": [0.1, 0.2]}}), end="")
        {
        "trial": "a",
        "outcome": {
         "rounds": 2,
         "accuracy": [0.1, 0.2]
        }
        }
    """
    parts = []
    for key, value in table.items():
        text = json.dumps(value)
        if isinstance(value, dict) and value:
            inner = ",\n".join(f" {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items())
            text = f"{{\n{inner}\n}}"
        parts.append(f"{json.dumps(key)}: {text}")
    return "{\n" + ",\n".join(parts) + "\n}\n"
