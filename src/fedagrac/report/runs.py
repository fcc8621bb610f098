"""Reading run folders back. What lies in them may come from anywhere: everything is checked before it is used."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, TypeAdapter, ValidationError

from fedagrac.data.describe import Description
from fedagrac.errors import InputError
from fedagrac.parsing import parse_json, parse_toml
from fedagrac.rounds.record import History

__all__ = ["StoredRun", "find_runs", "read_run"]

T = TypeVar("T")
Fraction = Annotated[float, Field(ge=0, le=1)]
Amount = Annotated[FiniteFloat, Field(ge=0)]
Bytes = Annotated[int, Field(ge=0, lt=2**63)]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)


class _Round(_Lenient):
    round: Annotated[int, Field(ge=1, lt=2**63)]
    test_accuracy: Fraction | None
    test_loss: FiniteFloat | None
    train_loss: FiniteFloat | None
    bytes_total: Bytes
    sim_time: Amount
    wall_time: Amount


class _Algorithm(_Lenient):
    name: str
    label: str | None = None
    lr: FiniteFloat | None = None


class _Stop(_Lenient):
    accuracy: Fraction | None = None


class _Data(_Lenient):
    name: str | None = None


class _Experiment(_Lenient):
    name: str
    algorithm: list[_Algorithm] = Field(min_length=1)
    seed: int | None = None
    lr: FiniteFloat | None = None
    target: Fraction | None = None
    stop: _Stop = _Stop()
    data: _Data = _Data()


class _Status(_Lenient):
    status: str
    reason: str


@dataclass(frozen=True, eq=False)
class StoredRun:
    """A run as its folder tells it.

    Attributes:
        experiment: experiment.toml, with this run's algorithm alone.
        environment: environment.json; empty where there is none.
        federation: federation.json of the run folder or of the experiment folder around it, or None.
        status: finished, stopped, diverged, or unfinished.
    """

    folder: Path
    experiment: dict[str, Any]
    history: History
    status: str
    reason: str
    environment: dict[str, Any]
    federation: Description | None

    @property
    def name(self) -> str:
        """What the experiment is called."""
        return str(self.experiment["name"])

    @property
    def algorithm(self) -> str:
        """The algorithm's registered name."""
        return str(self.experiment["algorithm"][0]["name"])

    @property
    def label(self) -> str:
        """What the run is called."""
        return str(self.experiment["algorithm"][0].get("label", self.algorithm))

    @property
    def seed(self) -> int | None:
        """The run's seed."""
        return self.experiment.get("seed")

    @property
    def target(self) -> float | None:
        """The test accuracy that the summary counts rounds and bytes to."""
        wanted = self.experiment.get("target", self.experiment.get("stop", {}).get("accuracy"))
        return None if wanted is None else float(wanted)


def read_run(folder: str | Path) -> StoredRun:
    """Read a run folder; a run without status.json is still running or was cut off."""
    folder = Path(folder)
    experiment = _read(folder / "experiment.toml", parse_toml, _Experiment)
    status, cut_off = {"status": "unfinished", "reason": "no status.json: cut off, or still running"}, True
    if (folder / "status.json").exists():
        status, cut_off = _read(folder / "status.json", parse_json, _Status), False
    environment = {}
    if (folder / "environment.json").exists():
        environment = _read(folder / "environment.json", parse_json, dict[str, Any])
    history = _read(folder / "history.jsonl", lambda text: _rounds(text, cut_off), list[_Round])
    federation = None
    for place in (folder, folder.parent):
        if (place / "federation.json").exists():
            found = _read(place / "federation.json", parse_json, Description)
            federation = Description(**found)
            break
    return StoredRun(
        folder, experiment, History(history), status["status"], status["reason"], environment, federation
    )


def _rounds(text: str, cut_off: bool) -> list[Any]:
    lines = text.splitlines()
    if cut_off and lines and not text.endswith("\n"):
        lines.pop()  # half a line
    return [parse_json(line) for line in lines]


def _read(path: Path, parse: Callable[[str], Any], kind: Any) -> Any:
    """Read and check a file; what is wrong with it is said in one sentence."""
    try:
        values = parse(path.read_text(encoding="utf-8"))
        TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        where = ": ".join([str(path), *([".".join(map(str, first["loc"]))] if first["loc"] else [])])
        if first["type"] == "missing":
            raise InputError(where, None, "a value") from None
        accepted = first["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
        raise InputError(where, first["input"], accepted) from None
    except (OSError, ValueError) as error:
        raise InputError("run folder", str(path.parent), f"a readable {path.name} ({error})") from None
    return values


def find_runs(folders: Sequence[str | Path]) -> list[StoredRun]:
    """Read run folders, and the run folders in experiment folders, each once.

    Runs of an experiment folder come in the order of its experiment file.
    """
    runs: dict[Path, StoredRun] = {}
    for folder in map(Path, folders):
        places = (
            [folder]
            if (folder / "history.jsonl").exists()
            else sorted(place.parent for place in folder.glob("*/history.jsonl"))
        )
        if not places:
            what = "a folder without run folders" if folder.is_dir() else "no folder"
            raise InputError(
                "DIR",
                str(folder),
                "a run folder, which holds experiment.toml, environment.json, history.jsonl and status.json, or "
                f"an experiment folder with run folders in it: this is {what}",
            )
        found = [read_run(place) for place in places]
        if places != [folder]:
            order = _labels_of(folder)
            found.sort(key=lambda run: order.index(run.label) if run.label in order else len(order))
        for run in found:
            runs.setdefault(run.folder.resolve(), run)
    return list(runs.values())


def _labels_of(folder: Path) -> list[str]:
    """Return the labels of an experiment folder, in the order of its experiment file."""
    if not (folder / "experiment.toml").exists():
        return []
    table = _read(folder / "experiment.toml", parse_toml, _Experiment)
    return [str(entry.get("label", entry["name"])) for entry in table["algorithm"]]
