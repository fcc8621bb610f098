"""Experiment files: TOML in, typed values out.

An `Experiment` is checked as a whole before any work starts; every message names the key, the value and what would
be accepted. The settings of partitions, step schedules and algorithms are those of their classes: nothing is
declared twice.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import re
import tomllib
from collections.abc import Iterator
from importlib import resources
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, StrictFloat, StrictInt, StrictStr, ValidationError
from pydantic_core import ErrorDetails

from fedagrac.algorithms import Algorithm, algorithm, options_of
from fedagrac.core.schedule import Piecewise
from fedagrac.data import DATASETS, IID, Dirichlet, Federation, Partition, Resample, Shards
from fedagrac.errors import InputError, fraction, nearest, one_of, positive, unknown
from fedagrac.heterogeneity import (
    Clock,
    Constant,
    DeviceProfile,
    Devices,
    Explicit,
    Extreme,
    Gaussian,
    Linear,
    Participation,
    StepSchedule,
    Uniform,
)
from fedagrac.parsing import DEEPEST, ParseError, parse_toml
from fedagrac.rounds.api import Stop
from fedagrac.rounds.guard import Guard

__all__ = [
    "AlgorithmSettings",
    "DataSettings",
    "Experiment",
    "apply_settings",
    "build_guard",
    "build_kind",
    "read_toml",
    "section",
]

PARTITIONS: dict[str, type[Partition]] = {
    "dirichlet": Dirichlet,
    "shards": Shards,
    "iid": IID,
    "resample": Resample,
}
STEPS: dict[str, type[StepSchedule]] = {
    "constant": Constant,
    "gaussian": Gaussian,
    "uniform": Uniform,
    "linear": Linear,
    "extreme": Extreme,
    "explicit": Explicit,
    "devices": Devices,
}

LARGEST_FILE = 2**22
"""Bytes of an experiment file: room for the step counts of a million client-rounds written out."""

Number = StrictInt | StrictFloat
T = TypeVar("T")


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(_Table):
    """[data]: which samples, and who holds them."""

    name: StrictStr = "digits"
    clients: StrictInt = 20
    partition: dict[str, Any] | None = None
    batch_size: StrictInt | Literal["full"] = 20
    sampling: Literal["replacement", "shuffle"] = "replacement"
    alpha: Number | None = None
    beta: Number | None = None

    def build(self, seed: int, data_dir: str | Path | None = None) -> Federation:
        """Load the data and split them."""
        partition = self.build_partition()
        with section("data"):
            one_of("name", self.name, DATASETS)
            options = {k: v for k, v in (("alpha", self.alpha), ("beta", self.beta)) if v is not None}
            return Federation.load(self.name, self.clients, partition, seed, data_dir, **options)

    def build_partition(self) -> Partition | None:
        """Make the partition, or None for the data set's own."""
        if self.partition is None:
            return None
        with section("data"), section("partition"):
            return _from_table("", self.partition, PARTITIONS)


class ModelSettings(_Table):
    """[model]: a built-in model by name; other keys are its sizes, which default to the data's."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: StrictStr = "logistic"

    @property
    def sizes(self) -> dict[str, Any]:
        """The sizes given."""
        return dict(self.__pydantic_extra__ or {})


class AlgorithmSettings(_Table):
    """One [[algorithm]]: its name, its lr (or the experiment's), and its own settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: StrictStr
    lr: Number | None = None
    label: StrictStr | None = Field(None, min_length=1, max_length=100)

    @property
    def options(self) -> dict[str, Any]:
        """The algorithm's own settings."""
        return dict(self.__pydantic_extra__ or {})

    @property
    def folder(self) -> str:
        """The name of its run folder."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.label or self.name).strip("-.") or "run"

    def build(self, lr: float) -> Algorithm:
        """Make the algorithm with this step size."""
        options = self.options
        if isinstance(options.get("calibration"), dict):
            options["calibration"] = _piecewise(options["calibration"])
        return algorithm(self.name, lr=lr, **options)


class ClockSettings(_Table):
    """[clock]: one device for all clients; without it, the devices that decide the steps, or 1 ms per step."""

    step_time: Number = 0.001
    bandwidth_up: Number | None = None
    bandwidth_down: Number | None = None
    latency: Number = 0.0
    jitter: Number = 0.0


class StopSettings(_Table):
    """[stop]: end a run early."""

    accuracy: Number | None = None
    sim_time: Number | None = None
    bytes: StrictInt | None = None


class Experiment(_Table):
    """A whole experiment file.

    Examples:
        >>> Experiment.default().name
        'digits'
    """

    name: StrictStr = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    rounds: StrictInt = 100
    seed: StrictInt = 0
    lr: Number | None = None
    target: Number | None = None
    eval_every: StrictInt = 1
    checkpoint_every: StrictInt = Field(10, ge=0)
    participation: StrictInt | StrictFloat | dict[str, Any] | None = None
    weight_decay: Number = 0.0
    engine: StrictStr = "auto"
    compile: bool | Literal["auto"] = "auto"
    device: StrictStr = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Literal["float32", "tf32"] = "float32"
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    steps: dict[str, Any]
    algorithm: tuple[AlgorithmSettings, ...] = Field(min_length=1)
    stop: StopSettings = StopSettings()
    clock: ClockSettings | None = None
    guard: dict[str, Any] | None = None

    @classmethod
    def of(cls, table: dict[str, Any]) -> Experiment:
        """Check a table and return the experiment it describes."""
        try:
            experiment = cls.model_validate(table)
        except ValidationError as error:
            raise _readable(error.errors()[0]) from None
        experiment.check()
        return experiment

    @classmethod
    def load(cls, path: str | Path) -> Experiment:
        """Read an experiment file."""
        return cls.of(read_toml(path))

    @classmethod
    def default(cls) -> Experiment:
        """Return the embedded default: digits, every algorithm."""
        return cls.of(default_table())

    def check(self) -> None:
        """Build everything that can be built without data, so that what is wrong is said now."""
        self.data.build_partition()
        self.build_steps()
        self.build_stop()
        self.build_clock()
        self.build_participation()
        build_guard(self.guard)
        if self.target is not None:
            fraction("target", self.target)
        seen: set[str] = set()
        for i, entry in enumerate(self.algorithm):
            with section(f"algorithm[{i}]"):
                lr = entry.lr if entry.lr is not None else self.lr
                if lr is None:
                    raise InputError("lr", None, "a number above 0, here or for all algorithms at the top level")
                entry.build(positive("lr", lr))
                if entry.folder in seen:
                    accepted = 'another label: an earlier algorithm has this folder (set label = "...")'
                    raise InputError("label", entry.label or entry.name, accepted)
                seen.add(entry.folder)

    def build_steps(self) -> StepSchedule:
        """Make the step schedule."""
        with section("steps"):
            return _from_table("", self.steps, STEPS)

    def build_stop(self) -> Stop:
        """Make the stop rule."""
        return Stop(**self.stop.model_dump())

    def build_clock(self) -> Clock | None:
        """Make the clock, or None for the one that follows from the steps."""
        if self.clock is None:
            return None
        given = {k: v for k, v in self.clock.model_dump().items() if v is not None and k != "jitter"}
        with section("clock"):
            return Clock(DeviceProfile("clock", **given), jitter=float(self.clock.jitter))

    def build_participation(self) -> Participation | None:
        """Make the participation rule."""
        if self.participation is None:
            return None
        if not isinstance(self.participation, dict):
            return Participation(self.participation)
        with section("participation"):
            return _construct("", Participation, self.participation)

    def resolved(self) -> dict[str, Any]:
        """Return the experiment with every default written out, as it is saved in the run folder."""
        table = self.model_dump(exclude_none=True)
        table["steps"] = _with_defaults(self.steps, STEPS)
        if self.data.partition is not None:
            table["data"]["partition"] = _with_defaults(self.data.partition, PARTITIONS)
        guard = build_guard(self.guard)
        if guard is not None:
            table["guard"] = dataclasses.asdict(guard)
        table["algorithm"] = [
            {**options_of(entry.name), **entry.model_dump(exclude_none=True)} for entry in self.algorithm
        ]
        return table


def default_table() -> dict[str, Any]:
    """Return the embedded default experiment as a table."""
    return tomllib.loads(resources.files("fedagrac.experiments").joinpath("digits.toml").read_text())


def read_toml(path: str | Path) -> dict[str, Any]:
    """Read a TOML file; what is wrong with it is said in one sentence."""
    try:
        with Path(path).open("rb") as file:
            content = file.read(LARGEST_FILE + 1)
        if len(content) > LARGEST_FILE:
            raise InputError("experiment file", str(path), f"a file of at most {LARGEST_FILE} bytes")
        return parse_toml(content.decode("utf-8"))
    except FileNotFoundError:
        raise InputError("experiment file", str(path), "a file that exists") from None
    except IsADirectoryError:
        raise InputError("experiment file", str(path), "a TOML file, not a folder") from None
    except (ParseError, UnicodeDecodeError) as error:
        raise InputError("experiment file", str(path), f"valid TOML: {error}") from None


def apply_settings(table: dict[str, Any], settings: list[str]) -> dict[str, Any]:
    """Return the table with `key=value` settings applied.

    Keys are dotted (`data.clients=10`). Under `algorithm` a number picks one entry (`algorithm.0.lr=0.1`), a name
    those with that name (`algorithm.fedavg.lr=0.1`), and neither sets all (`algorithm.lr=0.1`). Values are TOML; a
    value that is not is taken as a string.

    Examples:
        >>> apply_settings({"rounds": 5, "data": {"clients": 2}}, ["rounds=7", "data.name=digits"])
        {'rounds': 7, 'data': {'clients': 2, 'name': 'digits'}}
    """
    result: dict[str, Any] = copy.deepcopy(table)
    for setting in settings:
        key, equals, text = setting.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts):
            raise InputError("set", setting, "key=value, such as rounds=50 or data.clients=10")
        if len(parts) > DEEPEST or not _is_text(setting):
            raise InputError("set", setting, f"text, with at most {DEEPEST} parts in its key")
        for target in _targets(result, parts, setting):
            target[parts[-1]] = _value(text.strip())
    return result


def _targets(table: dict[str, Any], parts: list[str], setting: str) -> list[dict[str, Any]]:
    """Return the tables in which the last of the parts is set."""
    if parts[0] == "algorithm" and len(parts) > 1:
        entries: list[dict[str, Any]] = table.get("algorithm", [])
        if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
            raise InputError("set", setting, "an experiment with algorithms: its algorithm is not [[algorithm]]")
        if len(parts) == 2:
            return entries
        if parts[1].isdecimal():
            chosen = [entry for i, entry in enumerate(entries) if str(i) == parts[1]]
        else:
            chosen = [entry for entry in entries if parts[1] in (entry.get("name"), entry.get("label"))]
        names = [str(entry.get("label", entry.get("name"))) for entry in entries]
        if not chosen:
            accepted = f"algorithm.NAME.key with one of {', '.join(names)}{nearest(parts[1], names)}"
            raise InputError("set", setting, accepted)
        return [_descend(entry, parts[2:-1], setting) for entry in chosen]
    return [_descend(table, parts[:-1], setting)]


def _descend(table: dict[str, Any], parts: list[str], setting: str) -> dict[str, Any]:
    for part in parts:
        inner = table.setdefault(part, {})
        if not isinstance(inner, dict):
            raise InputError("set", setting, f"a key inside a table: {part} is a value")
        table = inner
    return table


def _value(text: str) -> Any:
    try:
        return parse_toml(f"value = {text}")["value"]
    except ParseError:
        return text


def _is_text(argument: str) -> bool:
    """Say whether an argument can be written down: bytes that are not UTF-8 arrive as halves of characters."""
    try:
        argument.encode()
    except UnicodeEncodeError:
        return False
    return True


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Put the section's name before the field of any InputError raised inside."""
    try:
        yield
    except InputError as error:
        field = error.field.removeprefix(f"{name}.")
        raise InputError(f"{name}.{field}" if field else name, error.value, error.accepted) from None


def build_kind(table: dict[str, Any], kinds: dict[str, type[T]]) -> T:
    """Make an object from a table whose `kind` names its class and whose other keys are its settings."""
    return _from_table("", table, kinds)


def build_guard(table: dict[str, Any] | None) -> Guard | None:
    """Make the guard; None where there is no table."""
    if table is None:
        return None
    with section("guard"):
        return _construct("", Guard, table)


def _from_table(field: str, table: dict[str, Any], kinds: dict[str, type[T]]) -> T:
    """Make an object from a table whose `kind` names its class and whose other keys are its settings."""
    prefix = f"{field}." if field else ""
    if "kind" not in table:
        raise InputError(f"{prefix}kind", None, f"one of {', '.join(kinds)}")
    kind = kinds[one_of(f"{prefix}kind", table["kind"], kinds)]
    return _construct(prefix, kind, {k: v for k, v in table.items() if k != "kind"})


def _construct(prefix: str, kind: type[T], settings: dict[str, Any]) -> T:
    fields = {f.name: f for f in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in settings.items():
        if key not in fields:
            raise unknown(f"{prefix}{key}", value, fields)
    for name, f in fields.items():
        if f.default is dataclasses.MISSING and name not in settings:
            raise InputError(f"{prefix}{name}", None, "a value: this setting is required")
    return kind(**settings)


def _with_defaults(table: dict[str, Any], kinds: dict[str, type[Any]]) -> dict[str, Any]:
    fields = dataclasses.fields(kinds[table["kind"]])
    defaults = {
        f.name: f.default for f in fields if f.default not in (dataclasses.MISSING, None)
    }  # TOML has no null
    return {"kind": table["kind"], **defaults, **table}


def _piecewise(table: dict[str, Any]) -> Piecewise:
    try:
        return Piecewise({int(key): value for key, value in table.items()})
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("calibration", table, "a table whose keys are rounds already done") from None


def _readable(error: ErrorDetails) -> InputError:
    """Turn pydantic's first complaint into one that names the key, the value and what would be accepted."""
    kinds = {"int", "float", "constrained-str", "str"}
    path = ".".join(str(part) for part in error["loc"] if part not in kinds and "[" not in str(part))
    value: Any = error["input"]
    if error["type"] == "extra_forbidden":
        known = list(Experiment.model_fields)
        if len(error["loc"]) > 1:
            tables: dict[str, type[_Table]] = {"data": DataSettings, "clock": ClockSettings}
            known = list(tables.get(str(error["loc"][0]), StopSettings).model_fields)
        return unknown(path, value, known)
    if error["type"] == "missing":
        return InputError(path, None, "a value: this key is required")
    if error["type"] == "string_pattern_mismatch":
        return InputError(path, value, "letters, digits, '.', '_' and '-', beginning with a letter or digit")
    message = error["msg"].removeprefix("Input should be ").removeprefix("Value error, ")
    return InputError(path, value, message)
