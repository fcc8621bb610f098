"""Reading of run folders.

A run folder may come from anyone, so every file is checked before its values are used, none is read beyond a size,
and control characters in names and reasons become escapes. This module needs pydantic and is imported only where
runs are read.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError, model_validator

from fedagrac.data.describe import Description
from fedagrac.errors import InputError
from fedagrac.files import read_bounded
from fedagrac.parsing import parse_json, parse_toml, printable
from fedagrac.storage.rounds import StoredRounds
from fedagrac.storage.run_folder import LARGEST

__all__ = ["StoredRun", "find_runs", "read_run"]

Accuracy = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[FiniteFloat, Field(ge=0)]

LONGEST_NAME = 200
"""The longest label or name that is read, in characters. Pictures set every character of a legend."""

LONGEST_REASON = 10_000
"""The longest reason why a run ended that is read, in characters."""

Name = Annotated[str, Field(max_length=LONGEST_NAME)]


class _Schema(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Algorithm(_Schema):
    name: Name
    label: Name | None = None
    lr: FiniteFloat | dict[str, Any] | None = None


class _Stop(_Schema):
    accuracy: Accuracy | None = None


class _Data(_Schema):
    name: Name | None = None


class _Experiment(_Schema):
    name: Name
    algorithm: list[_Algorithm] = Field(min_length=1)
    seed: int | None = None
    lr: FiniteFloat | dict[str, Any] | None = None
    target: Accuracy | None = None
    stop: _Stop = _Stop()
    data: _Data = _Data()


class _PerClient(_Schema):
    client: list[Annotated[int, Field(ge=0, lt=2**63)]]
    name: list[str]
    samples: list[Annotated[int, Field(ge=0, lt=2**63)]]
    steps: list[Seconds | None]
    accuracy: list[Accuracy | None] | None
    loss: list[FiniteFloat | None]
    tuned_accuracy: list[Accuracy | None] | None = None
    tuned_loss: list[FiniteFloat | None] | None = None

    @model_validator(mode="after")
    def _one_value_per_client(self) -> _PerClient:
        columns = [values for _, values in self if isinstance(values, list)]
        if {len(values) for values in columns} != {len(self.client)}:
            raise ValueError("as many values in every column as clients")
        return self


class _Status(_Schema):
    status: Name
    reason: Annotated[str, Field(max_length=LONGEST_REASON)]


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run as its folder describes it.

    Attributes:
        folder: the run folder.
        experiment: the settings in experiment.toml; its only algorithm is this run's.
        history: the rounds in history.jsonl, one record each; the records stay in the file.
        status: "finished", "stopped", "diverged" or "unfinished".
        reason: one sentence that says why the run ended.
        environment: the contents of environment.json; empty if the file is missing.
        federation: the contents of federation.json in the run folder or in its parent; None if both lack it.
        per_client: the columns of per_client.json, the results of each client; None if the file is missing.
    """

    folder: Path
    experiment: dict[str, Any]
    history: StoredRounds
    status: str
    reason: str
    environment: dict[str, Any]
    federation: Description | None
    per_client: dict[str, Any] | None = None

    @property
    def name(self) -> str:
        """The name of the experiment."""
        return printable(self.experiment["name"])

    @property
    def algorithm_settings(self) -> dict[str, Any]:
        """The settings of the run's algorithm."""
        settings: dict[str, Any] = self.experiment["algorithm"][0]
        return settings

    @property
    def algorithm(self) -> str:
        """The registered name of the algorithm."""
        return printable(self.algorithm_settings["name"])

    @property
    def algorithms(self) -> list[str]:
        """The registered names of the algorithm and of those inside it."""
        names: list[str] = []
        settings: Any = self.algorithm_settings
        while isinstance(settings, Mapping) and isinstance(settings.get("name"), str):
            names.append(printable(settings["name"]))
            settings = settings.get("inner")
        return names

    @property
    def label(self) -> str:
        """The name of the run within its experiment."""
        return printable(self.algorithm_settings.get("label", self.algorithm))

    @property
    def seed(self) -> int | None:
        """The seed of the run."""
        return self.experiment.get("seed")

    @property
    def target(self) -> float | None:
        """The test accuracy to which a summary counts rounds and bytes, or None."""
        accuracy = self.experiment.get("target", self.experiment.get("stop", {}).get("accuracy"))
        return None if accuracy is None else float(accuracy)


def read_run(folder: str | Path) -> StoredRun:
    """Read a run folder; a run without status.json counts as unfinished."""
    folder = Path(folder)
    experiment = _read(folder / "experiment.toml", parse_toml, _Experiment)
    finished = (folder / "status.json").exists()
    if finished:
        status = _read(folder / "status.json", parse_json, _Status)
    else:
        reason = "status.json is missing: the run was interrupted or is still running"
        status = {"status": "unfinished", "reason": reason}
    environment = {}
    if (folder / "environment.json").exists():
        environment = _read(folder / "environment.json", parse_json, dict[str, Any])
    per_client = None
    if (folder / "per_client.json").exists():
        per_client = _read(folder / "per_client.json", parse_json, _PerClient)
        per_client["name"] = [printable(name) for name in per_client["name"]]
    return StoredRun(
        folder=folder,
        experiment=experiment,
        history=_read_rounds(folder / "history.jsonl", finished),
        status=printable(status["status"]),
        reason=printable(status["reason"]),
        environment=environment,
        federation=_read_federation(folder),
        per_client=per_client,
    )


def _read_federation(folder: Path) -> Description | None:
    """Read federation.json in a run folder or in its parent, or return None if both lack it."""
    for path in (folder / "federation.json", folder.parent / "federation.json"):
        if path.exists():
            values = _read(path, parse_json, Description)
            names = values.get("names")
            shown = {"name": printable(values["name"]), "names": names and [printable(name) for name in names]}
            return Description(**{**values, **shown})
    return None


def _read_rounds(path: Path, finished: bool) -> StoredRounds:
    """Read history.jsonl; raise InputError if it is invalid."""
    try:
        return StoredRounds.read(path, finished)
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError("run folder", str(path.parent), f"a readable {path.name} ({error})") from None


def _read(path: Path, parse: Callable[[str], Any], schema: Any) -> Any:
    """Parse a file, check it against a schema, and return its values; raise InputError if it is invalid."""
    try:
        values = parse(read_bounded(path, LARGEST[path.name]).decode("utf-8"))
        TypeAdapter(schema).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        field = ": ".join([str(path), *([".".join(map(str, first["loc"]))] if first["loc"] else [])])
        if first["type"] == "missing":
            raise InputError(field, None, "a value") from None
        accepted = re.sub("^(Input should be|String should have|Value error,) ", "", first["msg"])
        raise InputError(field, first["input"], accepted) from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError("run folder", str(path.parent), f"a readable {path.name} ({error})") from None
    return values


def find_runs(folders: Sequence[str | Path]) -> list[StoredRun]:
    """Read run folders and the run folders inside experiment folders, each once.

    Runs of an experiment folder come in the order of its experiment file.
    """
    runs: dict[Path, StoredRun] = {}
    for folder in map(Path, folders):
        for run in _runs_in(folder):
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def _runs_in(folder: Path) -> list[StoredRun]:
    """Read a run folder, or every run folder inside an experiment folder."""
    if (folder / "history.jsonl").exists():
        return [read_run(folder)]
    runs = [read_run(path.parent) for path in sorted(folder.glob("*/history.jsonl"))]
    if not runs:
        problem = "this folder contains no run folders" if folder.is_dir() else "this is not a folder"
        raise InputError(
            "folder",
            str(folder),
            "a run folder, which holds experiment.toml, environment.json, history.jsonl and status.json, or an "
            f"experiment folder, which contains run folders: {problem}",
        )
    order = _labels_in(folder)
    return sorted(runs, key=lambda run: order.index(run.label) if run.label in order else len(order))


def _labels_in(folder: Path) -> list[str]:
    """Return the labels in an experiment folder, in the order of its experiment file."""
    if not (folder / "experiment.toml").exists():
        return []
    experiment = _read(folder / "experiment.toml", parse_toml, _Experiment)
    return [printable(entry.get("label", entry["name"])) for entry in experiment["algorithm"]]
