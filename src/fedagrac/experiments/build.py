"""From settings to objects: every part of a run is built here from a table of plain values.

Experiment files, the recipes of the paper and Flower's run config are all built here. The settings of a kind are
the fields of its class, so they are declared once. This module imports torch and numpy only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from fedagrac import models
from fedagrac.algorithms import Algorithm, algorithm
from fedagrac.core.schedule import Piecewise
from fedagrac.core.streams import first_weights
from fedagrac.data import DATASETS, IID, Dirichlet, Federation, Partition, Resample, Shards
from fedagrac.errors import InputError, one_of, positive, unknown
from fedagrac.heterogeneity import STEP_SCHEDULES as STEPS
from fedagrac.heterogeneity import Clock, DeviceProfile, Participation, StepSchedule
from fedagrac.rounds.guard import Guard
from fedagrac.rounds.stop import Stop

if TYPE_CHECKING:
    from torch import nn

__all__ = [
    "PARTITIONS",
    "STEPS",
    "build_algorithm",
    "build_clock",
    "build_federation",
    "build_guard",
    "build_kind",
    "build_model",
    "build_participation",
    "build_partition",
    "build_steps",
    "build_stop",
    "section",
    "with_defaults",
]

T = TypeVar("T")
Settings = Mapping[str, Any]

PARTITIONS: dict[str, type[Partition]] = {
    "dirichlet": Dirichlet,
    "shards": Shards,
    "iid": IID,
    "resample": Resample,
}


@contextlib.contextmanager
def section(name: str) -> Iterator[None]:
    """Prefix the field of an InputError raised inside the block with the name of the section."""
    try:
        yield
    except InputError as error:
        field = error.field.removeprefix(f"{name}.")
        raise InputError(f"{name}.{field}" if field else name, error.value, error.accepted) from None


def build_kind(settings: Settings, kinds: Mapping[str, type[T]]) -> T:
    """Make an object from a table. Its `kind` names the class, and the other keys are the settings.

    Examples:
        >>> build_kind({"kind": "constant", "steps": 3}, STEPS)
        Constant(steps=3)
    """
    if "kind" not in settings:
        raise InputError("kind", None, f"one of {', '.join(kinds)}")
    kind = kinds[one_of("kind", settings["kind"], kinds)]
    return _construct(kind, {key: value for key, value in settings.items() if key != "kind"})


def _construct(kind: type[T], settings: Settings) -> T:
    """Make an object of a dataclass from its settings; raise InputError for an unknown or missing one."""
    fields = {field.name: field for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
    for key, value in settings.items():
        if key not in fields:
            raise unknown(key, value, fields)
    for name, field in fields.items():
        if field.default is dataclasses.MISSING and name not in settings:
            raise InputError(name, None, "a value: this setting is required")
    return kind(**settings)


def with_defaults(settings: Settings, kinds: Mapping[str, type[Any]]) -> dict[str, Any]:
    """Return a table with the defaults of its kind, except None, which TOML cannot express."""
    fields = dataclasses.fields(kinds[settings["kind"]])
    defaults = {f.name: f.default for f in fields if f.default not in (dataclasses.MISSING, None)}
    return {"kind": settings["kind"], **defaults, **settings}


def build_partition(settings: Settings | None) -> Partition | None:
    """Make the partition. Return None for the partition of the data set."""
    if settings is None:
        return None
    with section("data"), section("partition"):
        return build_kind(settings, PARTITIONS)


def build_federation(settings: Settings, seed: int, data_dir: str | Path | None = None) -> Federation:
    """Load a data set and split it among clients.

    Args:
        settings: name, clients, partition, and the options of the data set.
        seed: the seed of the partition.
        data_dir: the folder to search first for data files.
    """
    options = {key: value for key, value in settings.items() if key not in ("name", "clients", "partition")}
    partition = build_partition(settings.get("partition"))
    with section("data"):
        one_of("name", settings["name"], DATASETS)
        return Federation.load(settings["name"], settings["clients"], partition, seed, data_dir, **options)


def build_steps(settings: Settings) -> StepSchedule:
    """Make the step schedule."""
    with section("steps"):
        return build_kind(settings, STEPS)


def build_algorithm(settings: Settings) -> Algorithm:
    """Make the algorithm from a table with its name, its lr and its settings."""
    options = dict(settings)
    if isinstance(options.get("calibration"), dict):
        options["calibration"] = _piecewise(options["calibration"])
    if "lr" in options:
        options["lr"] = positive("lr", options["lr"])
    return algorithm(options.pop("name"), **options)


def _piecewise(settings: Settings) -> Piecewise:
    """Make a schedule from a table whose keys are texts."""
    try:
        return Piecewise({int(key): value for key, value in settings.items()})
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError("calibration", settings, "a table whose keys are rounds already done") from None


def build_stop(settings: Settings) -> Stop:
    """Make the stopping rule."""
    with section("stop"):
        return _construct(Stop, settings)


def build_clock(settings: Settings | None) -> Clock | None:
    """Make a clock with one device for all clients. Return None for the clock that follows from the steps."""
    if settings is None:
        return None
    options = {key: value for key, value in settings.items() if value is not None}
    jitter = float(options.pop("jitter", 0.0))
    with section("clock"):
        return Clock(DeviceProfile("clock", **options), jitter=jitter)


def build_participation(settings: int | float | Settings | None) -> Participation | None:
    """Make the participation rule from a number, a fraction or a table. Return None if all clients take part."""
    if settings is None:
        return None
    if not isinstance(settings, Mapping):
        return Participation(settings)
    with section("participation"):
        return _construct(Participation, settings)


def build_guard(settings: Settings | None) -> Guard | None:
    """Make the guard. Return None if there is no table."""
    if settings is None:
        return None
    with section("guard"):
        return _construct(Guard, settings)


def build_model(
    settings: Settings, seed: int, federation: Federation | None = None, imports: models.Imports | None = None
) -> nn.Module:
    """Build a module with random weights.

    Args:
        settings: the name and sizes of a built-in model, or an import path.
        seed: the seed of the weights.
        federation: clients whose data determine missing sizes, or None.
        imports: the import paths that are allowed; by default those of files in the current folder.
    """
    sizes = {key: value for key, value in settings.items() if key != "name"}
    name = settings["name"]
    with section("model"):
        if federation is not None and name == "logistic":
            features = federation.inputs[0].numel()
            if sizes.setdefault("features", features) != features:  # checked before a layer of any size is made
                raise InputError("features", sizes["features"], f"{features}, the numbers of a sample of the data")
        if federation is not None and name in models.REGISTRY:
            sizes.setdefault("classes", max(2, federation.num_classes or 2))
        with first_weights(seed):
            if ":" in name:
                return (imports or models.Imports()).build(name, sizes)
            return models.build(name, **sizes)
