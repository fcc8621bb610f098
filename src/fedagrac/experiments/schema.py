"""The schema of experiment files in TOML.

An `Experiment` is checked as a whole before any work starts. Every error names the key, the value and what would
be accepted. The settings of partitions, step schedules and algorithms are the fields of their classes, so they are
declared once.
"""

from __future__ import annotations

import dataclasses
import re
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictFloat, StrictInt, StrictStr, ValidationError
from pydantic_core import ErrorDetails

from fedagrac.algorithms import Algorithm, options_of
from fedagrac.engines.precision import Precision
from fedagrac.errors import InputError, fraction, unknown
from fedagrac.experiments.build import (
    AGGREGATIONS,
    OPTIMIZERS,
    PARTITIONS,
    STEPS,
    build_aggregate,
    build_algorithm,
    build_clock,
    build_guard,
    build_loss,
    build_metrics,
    build_participation,
    build_partition,
    build_steps,
    build_stop,
    local_table,
    section,
    steps_table,
    with_defaults,
)
from fedagrac.imports import Imports, is_import_path, last_name
from fedagrac.parsing import ParseError, parse_toml, printable
from fedagrac.storage.run_folder import OUTPUT_NAMES

__all__ = ["AlgorithmSettings", "DataSettings", "Experiment", "default_table", "read_toml"]

LARGEST_FILE = 2**22
"""The largest experiment file in bytes. It has room for the explicit step counts of a million client-rounds."""

LONGEST_NAME = 200
"""The longest name of an algorithm, in characters. Its label is a folder and a line of every legend."""

Number = StrictInt | StrictFloat


class StrictTable(BaseModel):
    """A table that accepts only declared keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DataSettings(StrictTable):
    """[data]: the data set or the user's own function, and how it is split. The other keys are its options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: StrictStr = "digits"
    clients: StrictInt | None = None
    partition: dict[str, Any] | None = None
    batch_size: StrictInt | Literal["full"] = 20
    sampling: Literal["replacement", "shuffle", "cyclic"] = "replacement"
    validation: Number | None = None

    @property
    def table(self) -> dict[str, Any]:
        """The settings of the federation: the name, the clients, the partition and the options of the data set."""
        return self.model_dump(exclude_none=True, exclude={"batch_size", "sampling"})

    @property
    def samples(self) -> int | None:
        """The samples per step; None for all samples of a client."""
        return None if self.batch_size == "full" else self.batch_size


class ModelSettings(StrictTable):
    """[model]: the name of a model. The other keys are its sizes, which by default follow from the data."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: StrictStr = "logistic"


class AlgorithmSettings(StrictTable):
    """[[algorithm]]: the name of an algorithm, its lr (by default the experiment's), a label and its settings."""

    model_config = ConfigDict(extra="allow", frozen=True)
    name: StrictStr = Field(max_length=LONGEST_NAME)
    lr: Number | dict[str, Any] | None = None
    label: StrictStr | None = Field(None, min_length=1, max_length=100)

    @property
    def folder(self) -> str:
        """The name of the run folder."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.label or last_name(self.name)).strip("-.") or "run"

    @property
    def names(self) -> list[str]:
        """Its name, and that of the algorithm inside it."""
        inner = (self.model_extra or {}).get("inner")
        return [self.name, str(inner.get("name"))] if isinstance(inner, dict) else [self.name]

    def build(self, shared_lr: float | dict[str, Any] | None = None, imports: Imports | None = None) -> Algorithm:
        """Make the algorithm, with the shared lr if the table has none."""
        table = self.model_dump(exclude_none=True, exclude={"label"})
        if "lr" not in table and shared_lr is not None:
            table["lr"] = shared_lr
        return build_algorithm(table, imports)


class ClockSettings(StrictTable):
    """[clock]: one device for all clients. By default, the devices in [steps] decide, or a step takes 1 ms."""

    step_time: Number = 0.001
    bandwidth_up: Number | None = None
    bandwidth_down: Number | None = None
    latency: Number = 0.0
    jitter: Number = 0.0


class StopSettings(StrictTable):
    """[stop]: when to end a run early."""

    accuracy: Number | None = None
    sim_time: Number | None = None
    bytes: StrictInt | None = None


class PerClientSettings(StrictTable):
    """[per_client]: what is measured for each client after the runs."""

    fine_tune_steps: StrictInt | None = Field(None, ge=1)
    fine_tune_lr: Number | None = Field(None, gt=0)
    local_only: StrictBool = False


class Experiment(StrictTable):
    """The settings of an experiment file.

    Examples:
        >>> Experiment.default().name
        'digits'
    """

    name: StrictStr = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=100)
    rounds: StrictInt = 100
    seed: StrictInt = 0
    lr: Number | dict[str, Any] | None = None
    target: Number | None = None
    eval_every: StrictInt = 1
    checkpoint_every: StrictInt = Field(10, ge=0)
    participation: StrictInt | StrictFloat | dict[str, Any] | None = None
    weight_decay: Number = 0.0
    engine: StrictStr = "auto"
    compile: bool | Literal["auto"] = "auto"
    device: StrictStr = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    precision: Precision = "float32"
    loss: StrictStr = "cross-entropy"
    buffers: Literal["average", "local", "frozen"] = "average"
    metrics: tuple[StrictStr, ...] = ()
    data: DataSettings = DataSettings()
    model: ModelSettings = ModelSettings()
    steps: dict[str, Any]
    algorithm: tuple[AlgorithmSettings, ...] = Field(min_length=1)
    stop: StopSettings = StopSettings()
    clock: ClockSettings | None = None
    guard: dict[str, Any] | None = None
    aggregate: dict[str, Any] | None = None
    per_client: PerClientSettings | None = None

    @classmethod
    def of(cls, table: dict[str, Any], imports: Imports | None = None, folder: Path | None = None) -> Experiment:
        """Check a table. Return the experiment.

        With `imports`, the algorithms and steps that are import paths are imported and checked, too. A trace of
        step counts is read; its path is relative to `folder`, or else to the current folder.
        """
        if "steps" in table:
            table = {**table, "steps": steps_table(table["steps"], folder)}
        try:
            experiment = cls.model_validate(table)
        except ValidationError as error:
            raise _readable(error.errors()[0]) from None
        experiment.check(imports)
        return experiment

    @classmethod
    def load(cls, path: str | Path) -> Experiment:
        """Read an experiment file. Return the experiment."""
        return cls.of(read_toml(path), folder=Path(path).parent)

    @property
    def has_own_code(self) -> bool:
        """Whether a name in it is an import path."""
        names = [self.model.name, self.data.name, *(name for entry in self.algorithm for name in entry.names)]
        return any(map(is_import_path, [*names, self.steps.get("kind")]))

    @classmethod
    def default(cls) -> Experiment:
        """Return the default experiment: the algorithms of the paper on digits."""
        return cls.of(default_table())

    def check(self, imports: Imports | None = None) -> None:
        """Check the settings by building everything that can be built without data."""
        build_partition(self.data.partition)
        if imports is not None or not is_import_path(self.steps.get("kind")):
            build_steps(self.steps, imports)
        build_stop(self.stop.model_dump())
        build_clock(None if self.clock is None else self.clock.model_dump())
        build_participation(self.participation)
        build_guard(self.guard)
        build_aggregate(self.aggregate)
        build_loss(self.loss)
        build_metrics(self.metrics)
        if self.target is not None:
            fraction("target", self.target)
        if self.data.validation is not None:
            fraction("data.validation", self.data.validation)
        self._check_per_client()
        self.check_algorithms(imports)

    def check_algorithms(self, imports: Imports | None = None) -> None:
        """Check the algorithms by building them; those that are import paths only with `imports`."""
        folders: set[str] = set()
        for i, entry in enumerate(self.algorithm):
            with section(f"algorithm[{i}]"):
                if entry.lr is None and self.lr is None:
                    raise InputError("lr", None, "a number above 0, here or for all algorithms at the top level")
                if imports is not None or not any(map(is_import_path, entry.names)):
                    entry.build(self.lr, imports)
                _check_label(entry)
                if entry.folder in folders:
                    accepted = 'another label: an earlier algorithm has this folder (set label = "...")'
                    raise InputError("label", entry.label or entry.name, accepted)
                folders.add(entry.folder)

    def _check_per_client(self) -> None:
        """Check that the step size of what is measured for each client is known."""
        chosen = self.per_client
        if chosen is None:
            return
        if chosen.fine_tune_steps is None and not chosen.local_only:
            accepted = "fine_tune_steps, the steps that each client trains the final model, or local_only = true"
            raise InputError("per_client", chosen.model_dump(exclude_none=True), accepted)
        constant = isinstance(self.lr, int | float)
        if chosen.fine_tune_steps is not None and chosen.fine_tune_lr is None and not constant:
            raise InputError(
                "per_client.fine_tune_lr", None, "a number above 0, or a number as lr at the top level"
            )
        if chosen.local_only and not constant:
            raise InputError("lr", self.lr, "a number above 0 at the top level, for per_client.local_only")

    def resolved(self) -> dict[str, Any]:
        """Return the table of the experiment with all defaults that are known without data and imports."""
        table = self.model_dump(exclude_none=True)
        table["metrics"] = list(self.metrics)
        if not is_import_path(self.steps["kind"]):
            table["steps"] = with_defaults(self.steps, STEPS)
        if self.data.partition is not None:
            table["data"]["partition"] = with_defaults(self.data.partition, PARTITIONS)
        guard = build_guard(self.guard)
        if guard is not None:
            table["guard"] = dataclasses.asdict(guard)
        if self.aggregate is not None:
            table["aggregate"] = with_defaults(self.aggregate, AGGREGATIONS)
        table["algorithm"] = []
        for entry in self.algorithm:
            table["algorithm"].append(_with_options(entry.model_dump(exclude_none=True)))
        return table


def _with_options(table: dict[str, Any]) -> dict[str, Any]:
    """Return the table of an algorithm with the defaults of its settings, except None."""
    defaults = {} if is_import_path(table["name"]) else options_of(table["name"])
    whole = {**{key: value for key, value in defaults.items() if value is not None}, **table}
    if isinstance(whole.get("local"), dict):
        whole["local"] = with_defaults(local_table(whole["local"]), OPTIMIZERS)
    if isinstance(whole.get("inner"), dict):
        whole["inner"] = _with_options(whole["inner"])
    return whole


def _check_label(entry: AlgorithmSettings) -> None:
    """Refuse a label that cannot be shown, and one whose folder would be a file that the command writes."""
    label = entry.label or last_name(entry.name)
    if printable(label) != label:
        raise InputError("label", label, "text without control characters")
    if entry.folder.lower() in OUTPUT_NAMES:
        accepted = f'another label: the command itself writes {entry.folder.lower()} (set label = "...")'
        raise InputError("label", label, accepted)


def default_table() -> dict[str, Any]:
    """Return the table of the default experiment."""
    return tomllib.loads(resources.files("fedagrac.experiments").joinpath("digits.toml").read_text())


def read_toml(path: str | Path) -> dict[str, Any]:
    """Return the table of a TOML file; raise InputError if it cannot be read."""
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


def _readable(error: ErrorDetails) -> InputError:
    """Return an InputError that names the key, the value and what would be accepted, for an error of pydantic."""
    kinds = {"int", "float", "constrained-str", "str"}
    path = ".".join(str(part) for part in error["loc"] if part not in kinds and "[" not in str(part))
    value: Any = error["input"]
    if error["type"] == "extra_forbidden":
        known = list(Experiment.model_fields)
        if len(error["loc"]) > 1:
            tables: dict[str, type[StrictTable]] = {"clock": ClockSettings, "per_client": PerClientSettings}
            known = list(tables.get(str(error["loc"][0]), StopSettings).model_fields)
        return unknown(path, value, known)
    if error["type"] == "missing":
        return InputError(path, None, "a value: this key is required")
    if error["type"] == "string_pattern_mismatch":
        return InputError(path, value, "letters, digits, '.', '_' and '-', beginning with a letter or digit")
    message = re.sub("^(Input should be|String should have|Value error,) ", "", error["msg"])
    return InputError(path, value, message)
