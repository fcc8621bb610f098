"""From settings to objects: every part of a run is built here from a table of plain values.

Experiment files, the recipes of the paper and Flower's run config are all built here. The settings of a kind are
the fields of its class, so they are declared once. This module imports torch and numpy only.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from torch.nn import functional

from fedagrac import models
from fedagrac.algorithms import Algorithm, algorithm, build_imported
from fedagrac.core.optimizers import SGD, Adam, AdamW, LocalOptimizer
from fedagrac.core.robust import AGGREGATIONS, Aggregation
from fedagrac.core.schedule import Cosine, Exponential, Piecewise, Scaled, Warmup
from fedagrac.core.streams import first_weights
from fedagrac.data import DATASETS, IID, Dirichlet, Federation, Partition, Resample, Shards
from fedagrac.errors import InputError, fraction, nearest, one_of, positive, unknown
from fedagrac.heterogeneity import STEP_SCHEDULES as STEPS
from fedagrac.heterogeneity import Clock, Constant, DeviceProfile, Explicit, Participation, StepSchedule
from fedagrac.heterogeneity.steps import Computed, step_schedule
from fedagrac.imports import Imports, is_import_path
from fedagrac.rounds import metrics
from fedagrac.rounds.guard import Guard
from fedagrac.rounds.stop import Stop

if TYPE_CHECKING:
    from torch import nn

    from fedagrac.engines import Loss
    from fedagrac.rounds.metrics import Metric

__all__ = [
    "AGGREGATIONS",
    "LOSSES",
    "METRICS",
    "OPTIMIZERS",
    "PARTITIONS",
    "SCHEDULES",
    "STEPS",
    "build_aggregate",
    "build_algorithm",
    "build_clock",
    "build_federation",
    "build_guard",
    "build_kind",
    "build_loss",
    "build_metrics",
    "build_model",
    "build_participation",
    "build_partition",
    "build_schedule",
    "build_steps",
    "build_stop",
    "local_table",
    "schedule_table",
    "section",
    "steps_table",
    "with_defaults",
]

T = TypeVar("T")
Settings = Mapping[str, Any]

KEYS = ("name", "clients", "partition", "batch_size", "sampling", "validation")
"""The keys of [data] that every data set has."""

MOST_EXPLICIT = 1_000_000
"""The most step counts of a trace in an experiment, for which its file has room."""

LOSSES: dict[str, Loss | None] = {
    "cross-entropy": None,
    "mse": functional.mse_loss,
    "mae": functional.l1_loss,
    "huber": functional.huber_loss,
}
"""The losses that an experiment file can name; None is what runs take by default."""

METRICS: dict[str, Metric] = {
    "top3": metrics.top_k(3),
    "top5": metrics.top_k(5),
    "top10": metrics.top_k(10),
    "perplexity": metrics.perplexity(),
    "mse": metrics.mse,
    "mae": metrics.mae,
    "rmse": metrics.rmse,
    "r2": metrics.r2,
}
"""The metrics that an experiment file can name."""

PARTITIONS: dict[str, type[Partition]] = {
    "dirichlet": Dirichlet,
    "shards": Shards,
    "iid": IID,
    "resample": Resample,
}

OPTIMIZERS: dict[str, type[LocalOptimizer]] = {"sgd": SGD, "adam": Adam, "adamw": AdamW}
"""The local optimizers that an experiment file can name."""

SCHEDULES: dict[str, type[Any]] = {
    "exponential": Exponential,
    "cosine": Cosine,
    "warmup": Warmup,
    "scaled": Scaled,
}
"""The schedules over rounds that an experiment file can name; one without a name is piecewise."""


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


def build_federation(
    settings: Settings, seed: int, data_dir: str | Path | None = None, imports: Imports | None = None
) -> Federation:
    """Load a data set and split it among clients.

    Args:
        settings: the name of a data set or an import path, clients, partition, the share held out for validation,
            and the options of the data set or the arguments of the user's function.
        seed: the seed of the partition.
        data_dir: the folder to search first for data files.
        imports: the import paths that are allowed; by default those of files in the current folder.
    """
    options = dict(settings)
    name, share = options.pop("name"), options.pop("validation", None)
    if "partition" in options:
        options["partition"] = build_partition(options["partition"])
    with section("data"):
        if is_import_path(name):
            offered = {"seed": seed, "data_dir": data_dir}
            federation: Federation = (imports or Imports()).build(name, options, Federation, offered)
        else:
            federation = _load(name, {**options, "seed": seed, "data_dir": data_dir})
        if share is None:
            return federation
        held_out = fraction("validation", share)
        return federation.split_validation(held_out, seed=seed)


def _load(name: str, options: Settings) -> Federation:
    """Load a built-in data set. The error for an unknown option suggests a key of [data], too."""
    one_of("name", name, DATASETS)
    try:
        return Federation.load(name, **options)
    except InputError as error:
        option = error.field.removeprefix(f"{name}.")
        if option == error.field:
            raise
        accepted = error.accepted if "did you mean" in error.accepted else error.accepted + nearest(option, KEYS)
        raise InputError(error.field, error.value, accepted) from None


@dataclasses.dataclass(frozen=True)
class Trace:
    """[steps] with kind = "trace": the path of a CSV file with step counts."""

    path: str

    def __post_init__(self) -> None:
        if not isinstance(self.path, str) or not self.path:
            raise InputError("path", self.path, "the path of a CSV file")


def steps_table(given: Any, folder: Path | None = None) -> dict[str, Any]:
    """Return the table of step counts that a file gives as a table, a number, a list, a path or an import path.

    A trace is read, and becomes an explicit table: what is stored of a run does not depend on another file. Its
    path is relative to `folder`, that of the experiment file, or else to the current folder.

    Examples:
        >>> steps_table(100), steps_table([2, 5, 40])
        ({'kind': 'constant', 'steps': 100}, {'kind': 'explicit', 'table': [[2, 5, 40]]})
        >>> steps_table("my_steps:counts")
        {'kind': 'my_steps:counts'}
    """
    if isinstance(given, Mapping):
        if given.get("kind") != "trace":
            return dict(given)
        with section("steps"):
            given = _construct(Trace, {key: value for key, value in given.items() if key != "kind"}).path
    elif is_import_path(given):
        return {"kind": given}
    if isinstance(given, str) and folder is not None and (folder / given).exists():
        given = folder / given
    schedule = step_schedule(given)
    if isinstance(schedule, Constant):
        return {"kind": "constant", "steps": schedule.steps}
    assert isinstance(schedule, Explicit)
    if sum(map(len, schedule.table)) > MOST_EXPLICIT:
        raise InputError("steps", str(given), f"at most {MOST_EXPLICIT} step counts in an experiment")
    return {"kind": "explicit", "table": [list(row) for row in schedule.table]}


def build_steps(settings: Settings, imports: Imports | None = None) -> StepSchedule:
    """Make the step schedule.

    Its `kind` may be an import path of the user's own: of a subclass of StepSchedule, whose settings are the other
    keys, or of a function (round, num_clients) -> counts. `imports` says which are allowed; by default those of
    files in the current folder.
    """
    table = steps_table(settings)
    with section("steps"):
        if not is_import_path(table.get("kind")):
            return build_kind(table, STEPS)
        options = {key: value for key, value in table.items() if key != "kind"}
        return _own_steps(table["kind"], options, imports or Imports())


def _own_steps(path: str, options: Settings, imports: Imports) -> StepSchedule:
    """Make the schedule of an import path."""
    try:
        found = imports.named(path)
        if not isinstance(found, type):
            for key, value in options.items():
                raise unknown(key, value, [])
            return Computed(found)
        made: StepSchedule = imports.build(path, options, StepSchedule)
    except InputError as error:  # the paths of models, data and algorithms are their names
        field = "kind" if error.field in ("name", "steps") else error.field
        raise InputError(field, error.value, error.accepted) from None
    return made


def build_algorithm(settings: Settings, imports: Imports | None = None) -> Algorithm:
    """Make the algorithm from a table with its name or import path, its lr and its settings.

    `imports` says which import paths are allowed; by default those of files in the current folder.
    """
    options = dict(settings)
    for key in ("calibration", "lr"):
        if isinstance(options.get(key), dict):
            options[key] = build_schedule(key, options[key])
    if "lr" in options and not callable(options["lr"]):
        options["lr"] = positive("lr", options["lr"])
    if isinstance(options.get("local"), dict):
        with section("local"):
            options["local"] = build_kind(local_table(options["local"]), OPTIMIZERS)
    if "inner" in options:
        with section("inner"):
            options["inner"] = _build_inner(options["inner"], options.get("lr"), imports)
    name = options.pop("name")
    if is_import_path(name):
        return build_imported(name, options, imports or Imports())
    return algorithm(name, **options)


def local_table(settings: Settings) -> dict[str, Any]:
    """Return the table of a local optimizer; one without a kind is SGD, as is an algorithm without a table.

    Examples:
        >>> local_table({"momentum": 0.9})
        {'kind': 'sgd', 'momentum': 0.9}
    """
    return {"kind": "sgd", **settings}


def _build_inner(settings: Any, lr: Any, imports: Imports | None) -> Algorithm:
    """Make the algorithm inside another one, with the step size of the whole."""
    if not isinstance(settings, Mapping) or not isinstance(settings.get("name"), str):
        raise InputError("", settings, 'a table with the name of an algorithm, such as { name = "fedagrac" }')
    for key in ("lr", "local"):
        if key in settings:
            raise InputError(key, settings[key], f"no {key} here: the {key} of the whole holds inside, too")
    return build_algorithm({**settings, "lr": 1.0 if lr is None else lr}, imports)


def build_schedule(field: str, settings: Settings) -> Callable[[int], float]:
    """Make a value that changes over the rounds from a table.

    Its `kind` names the schedule. Without one, the keys are rounds already done, and the schedule is piecewise.

    Examples:
        >>> build_schedule("lr", {"kind": "exponential", "first": 0.1, "factor": 0.5})(1)
        0.05
        >>> build_schedule("lr", {"0": 0.1, "50": 0.01})(50)
        0.01
    """
    if "kind" in settings:
        inner = {
            key: build_schedule(f"{field}.{key}", value) if isinstance(value, dict) else value
            for key, value in settings.items()
        }
        with section(field):
            schedule: Callable[[int], float] = build_kind(inner, SCHEDULES)
        return schedule
    try:
        return Piecewise({int(key): value for key, value in settings.items()})
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        raise InputError(field, settings, "a table with a kind, or with rounds already done as keys") from None


def schedule_table(schedule: object) -> dict[str, Any]:
    """Return the table from which a schedule can be built again.

    Examples:
        >>> schedule_table(Scaled(2.0, Exponential(0.1, 0.5)))
        {'kind': 'scaled', 'factor': 2.0, 'schedule': {'kind': 'exponential', 'first': 0.1, 'factor': 0.5}}
    """
    if isinstance(schedule, Piecewise):
        return {str(key): value for key, value in schedule.values.items()}
    kind = next(name for name, kind in SCHEDULES.items() if type(schedule) is kind)
    values = {field.name: getattr(schedule, field.name) for field in dataclasses.fields(SCHEDULES[kind])}
    return {"kind": kind, **{k: schedule_table(v) if callable(v) else v for k, v in values.items()}}


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


def build_aggregate(settings: Settings | None) -> Aggregation | None:
    """Make the robust rule in place of sums over clients. Return None if there is no table.

    Examples:
        >>> build_aggregate({"kind": "trimmed-mean", "share": 0.3})
        TrimmedMean(share=0.3)
    """
    if settings is None:
        return None
    with section("aggregate"):
        return build_kind(settings, AGGREGATIONS)


def build_loss(name: str) -> Loss | None:
    """Return the loss by name; None for cross-entropy, the default of a run.

    Examples:
        >>> build_loss("cross-entropy")
    """
    return LOSSES[one_of("loss", name, LOSSES)]


def build_metrics(names: Sequence[str]) -> dict[str, Metric]:
    """Return the metrics by name.

    Examples:
        >>> build_metrics([])
        {}
    """
    for name in names:
        one_of("metrics", name, METRICS)
    if len(set(names)) < len(names):
        raise InputError("metrics", list(names), "each metric once")
    return {name: METRICS[name] for name in names}


def build_model(
    settings: Settings, seed: int, federation: Federation | None = None, imports: Imports | None = None
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
        if federation is not None and name in models.REGISTRY:
            _complete(sizes, name, federation)
        with first_weights(seed):
            if is_import_path(name):
                return (imports or Imports()).build(name, sizes)
            return models.build(name, **sizes)


def _complete(sizes: dict[str, Any], name: str, federation: Federation) -> None:
    """Add the sizes of a built-in model that follow from the data: features and classes."""
    accepted = inspect.signature(models.REGISTRY[name]).parameters
    inputs = federation.inputs
    if "features" in accepted and not isinstance(inputs, dict | tuple | list):
        features = math.prod(inputs.shape[1:])
        if sizes.setdefault("features", features) != features:  # checked before a layer of any size is made
            raise InputError("features", sizes["features"], f"{features}, the numbers of a sample of the data")
    if "classes" in accepted:
        sizes.setdefault("classes", max(2, federation.num_classes or 2))
