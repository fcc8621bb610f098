"""Sweeps: run every algorithm of an experiment over a grid of its settings and over seeds, and find the best.

A sweep runs one experiment per seed. Each point of the grid is one algorithm of that experiment and has its own
run folder below OUT/seed-N. The points of a small model run side by side as lanes of one batch.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.algorithms import options_of
from fedagrac.errors import InputError, nearest, one_of
from fedagrac.experiments.build import OPTIMIZERS, SCHEDULES, local_table
from fedagrac.experiments.overrides import TABLES
from fedagrac.experiments.run import check_free, prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.imports import Imports, last_name
from fedagrac.parsing import ParseError, parse_toml
from fedagrac.rounds.record import over_seeds
from fedagrac.storage.claims import claimed

if TYPE_CHECKING:
    from fedagrac.callbacks.progress import Progress

__all__ = [
    "Axis",
    "By",
    "Choice",
    "Point",
    "Sweep",
    "best_choices",
    "choices_of",
    "read_axes",
    "run_sweep",
    "with_setting",
]

By = Literal["accuracy", "rounds", "loss"]

FIELDS: dict[str, str] = {"accuracy": "final_accuracy", "rounds": "rounds_to_target", "loss": "final_test_loss"}
"""The field of a run's summary that points are compared by."""


@dataclass(frozen=True)
class Axis:
    """One setting that varies: its name, its values, and which of the experiment's algorithms have it."""

    key: str
    values: tuple[Any, ...]
    entries: tuple[int, ...]


@dataclass(frozen=True)
class Point:
    """One point of the grid: an algorithm with one value of each of its settings that vary."""

    algorithm: str
    label: str
    setting: dict[str, Any]
    entry: dict[str, Any]

    @property
    def text(self) -> str:
        """The setting as short text, such as "lr=0.1 mu=1"."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items()) or "as given"


def read_axes(table: Mapping[str, Any], grid: Sequence[str], imports: Imports | None = None) -> list[Axis]:
    """Return the axes of a grid, one for each text.

    `algorithm.KEY=VALUE,VALUE` varies every algorithm that has the setting, `algorithm.NAME.KEY=VALUE,VALUE` one.
    A key may reach into a table, such as `local.momentum`, or `lr.factor` if lr is a schedule. `imports` says
    which import paths are allowed; by default those of files in the current folder.

    Examples:
        >>> table = {"algorithm": [{"name": "fedavg"}, {"name": "fedprox"}]}
        >>> read_axes(table, ["algorithm.lr=0.1,0.2", "algorithm.mu=1,0.1"])[1]
        Axis(key='mu', values=(1, 0.1), entries=(1,))
    """
    axes: list[Axis] = []
    entries = list(table.get("algorithm", []))
    names = [_name(entry) for entry in entries]
    for text in grid:
        path, equals, values = text.partition("=")
        first, *parts = path.strip().split(".")
        if not equals or not values.strip() or first != "algorithm" or not all(parts) or not parts:
            accepted = (
                "algorithm.KEY=VALUE,VALUE or algorithm.NAME.KEY=VALUE,VALUE, such as algorithm.lr=0.01,0.03"
            )
            raise InputError("grid", text, f"{accepted} (`set` changes what all runs share)")
        candidates = range(len(entries))
        if len(parts) > 1 and (parts[0] in names or parts[0] not in TABLES):
            one_of("grid", parts[0], names)
            candidates = range(names.index(parts[0]), names.index(parts[0]) + 1)
            parts = parts[1:]
        known = {i: _settings(entries[i], table.get("lr"), parts, imports) for i in candidates}
        varied = tuple(i for i in candidates if parts[-1] in known[i])
        if not varied:
            all_known = sorted({key for keys in known.values() for key in keys})
            shown = ", ".join(all_known) or f"settings of a table: {'.'.join(parts[:-1])} is none"
            raise InputError("grid", text, f"one of {shown}{nearest(parts[-1], all_known)}")
        axis = Axis(".".join(parts), tuple(_values(text, values)), varied)
        for earlier in axes:
            if earlier.key == axis.key and set(earlier.entries) & set(varied):
                raise InputError("grid", text, f"values for {axis.key} once per algorithm")
        axes.append(axis)
    return axes


def _settings(entry: Mapping[str, Any], lr: Any, parts: Sequence[str], imports: Imports | None) -> list[str]:
    """Return the settings beside the last of a path of keys: those of the algorithm, or of a table inside it.

    A step size that the algorithm does not give is `lr`, and a local optimizer SGD.
    """
    if len(parts) == 1:
        return ["lr", "local", *options_of(str(entry.get("name")), imports)]
    inside: Any = {"lr": lr, "local": {}, **entry}
    for key in parts[:-1]:
        inside = inside.get(key)
        if not isinstance(inside, Mapping):
            return []
    if parts[-2] == "inner":
        return ["name", *options_of(str(inside.get("name")), imports)]
    kinds = OPTIMIZERS if parts[-2] == "local" else SCHEDULES
    kind = kinds.get(str((local_table(inside) if parts[-2] == "local" else inside).get("kind")))
    return [*inside, "kind"] if kind is None else ["kind", *(field.name for field in dataclasses.fields(kind))]


def with_setting(entry: Mapping[str, Any], setting: Mapping[str, Any], lr: Any = None) -> dict[str, Any]:
    """Return the table of an algorithm with settings whose keys may be dotted; `lr` is the step size of all.

    Examples:
        >>> with_setting({"name": "fedavg"}, {"mu": 1, "local.momentum": 0.9})
        {'name': 'fedavg', 'mu': 1, 'local': {'momentum': 0.9}}
        >>> with_setting({"name": "fedavg"}, {"lr.factor": 0.5}, lr={"kind": "exponential", "first": 0.1})
        {'name': 'fedavg', 'lr': {'kind': 'exponential', 'first': 0.1, 'factor': 0.5}}
    """
    changed = copy.deepcopy(dict(entry))
    for dotted, value in setting.items():
        *tables, key = dotted.split(".")
        if tables and tables[0] == "lr":
            changed.setdefault("lr", copy.deepcopy(lr))
        table = changed
        for name in tables:
            table = table.setdefault(name, {})
        table[key] = value
    return changed


def _name(entry: Mapping[str, Any]) -> str:
    """Return the label of an algorithm, or else its name without the module of an import path."""
    return str(entry.get("label", last_name(str(entry.get("name")))))


def _values(text: str, values: str) -> list[Any]:
    """Return the values in a text with commas: TOML values, or plain words if the text is not TOML."""
    try:
        parsed = list(parse_toml(f"values = [{values}]")["values"])
    except ParseError:
        parsed = [word.strip() for word in values.split(",")]
    if not parsed or "" in parsed or len({repr(value) for value in parsed}) < len(parsed):
        raise InputError("grid", text, "different values, separated by commas")
    return parsed


def points_of(table: Mapping[str, Any], axes: Sequence[Axis]) -> list[Point]:
    """Return every point of the grid, algorithm by algorithm.

    Examples:
        >>> table = {"algorithm": [{"name": "fedavg", "lr": 1}, {"name": "fedprox", "lr": 1}]}
        >>> [p.label for p in points_of(table, read_axes(table, ["algorithm.mu=1,0.1"]))]
        ['fedavg', 'fedprox mu=1', 'fedprox mu=0.1']
    """
    points = []
    for i, entry in enumerate(table["algorithm"]):
        varied = [axis for axis in axes if i in axis.entries]
        name = _name(entry)
        for values in itertools.product(*[axis.values for axis in varied]):
            setting = {axis.key: value for axis, value in zip(varied, values, strict=True)}
            words = [name, *[f"{key}={value}" for key, value in setting.items()]]
            label = " ".join(words)
            changed = with_setting(entry, setting, table.get("lr"))
            points.append(Point(name, label, setting, {**changed, "label": label}))
    return points


@dataclass(frozen=True)
class Sweep:
    """A checked sweep: one experiment per seed, each with every point of the grid."""

    table: Mapping[str, Any]
    points: tuple[Point, ...]
    experiments: tuple[Experiment, ...]

    @classmethod
    def of(
        cls, table: Mapping[str, Any], grid: Sequence[str], seeds: int, imports: Imports | None = None
    ) -> Sweep:
        """Check the experiment, the grid, and every point of the grid. Return the sweep.

        `imports` says which import paths are allowed; by default those of files in the current folder.
        """
        imports = imports or Imports()
        first = Experiment.of(dict(table), imports)
        points = points_of(table, read_axes(table, grid, imports))
        experiments = []
        for seed in range(first.seed, first.seed + seeds):
            with_points = {**copy.deepcopy(dict(table)), "seed": seed, "algorithm": [p.entry for p in points]}
            experiments.append(Experiment.of(with_points, imports))
        return cls(table, tuple(points), tuple(experiments))


def run_sweep(
    sweep: Sweep,
    out: Path,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    imports: Imports | None = None,
    resume: bool = False,
) -> dict[str, list[Path]]:
    """Run every point with every seed. Return the run folders by the point's label.

    With `resume`, runs that have ended are not run again, and the others resume.
    """
    folders: dict[str, list[Path]] = {point.label: [] for point in sweep.points}
    with claimed(out):
        if not resume:
            check_free(out)
        for experiment in sweep.experiments:
            prepared = prepare(experiment, data_dir, imports)
            seed_folder = out / f"seed-{experiment.seed}"
            run_folders = run_experiment(prepared, seed_folder, progress, side_by_side=True, resume=resume)
            for point, folder in zip(sweep.points, run_folders, strict=True):
                folders[point.label].append(folder)
    return folders


@dataclass(frozen=True)
class Choice:
    """A point of the grid with its results: one summary row for each seed."""

    point: Point
    rows: tuple[Mapping[str, Any], ...]

    def values(self, by: By) -> list[float]:
        """Return the value of each seed, without runs that diverged or missed their target."""
        return [value for value in self._by_seed(by) if value is not None]

    def _by_seed(self, by: By) -> list[float | None]:
        """Return the value of each seed; None for a run that diverged or missed its target."""
        return [None if row["status"] == "diverged" else row[FIELDS[by]] for row in self.rows]

    def mean(self, by: By) -> float | None:
        """Return the mean over the seeds; None if a seed has no value."""
        return over_seeds(self._by_seed(by))[0]

    def spread(self, by: By) -> float:
        """Return the standard deviation over the seeds; 0 for a single seed."""
        return over_seeds(self._by_seed(by))[1]

    def rank(self, by: By) -> tuple[float, ...]:
        """Return a sort key that is larger for a better choice. The number of seeds with a value comes first."""
        values = self.values(by)
        mean = statistics.fmean(values) if values else 0.0
        tie = self.values("accuracy") if by == "rounds" else []
        return len(values), mean if by == "accuracy" else -mean, statistics.fmean(tie) if tie else 0.0


def choices_of(points: Sequence[Point], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Choice]:
    """Return every point with its summary rows, which `rows` holds by the point's label."""
    return [Choice(point, tuple(rows[point.label])) for point in points]


def best_choices(choices: Sequence[Choice], by: By) -> dict[str, Choice]:
    """Return the best point of each algorithm; the first one if several are equally good."""
    best: dict[str, Choice] = {}
    for choice in choices:
        name = choice.point.algorithm
        if name not in best or choice.rank(by) > best[name].rank(by):
            best[name] = choice
    return best


def at_the_edge(best: Choice, choices: Sequence[Choice]) -> list[str]:
    """Return the settings whose best value is the smallest or the largest of the values tried.

    A setting counts only if its values are numbers and at least three were tried.

    Examples:
        >>> grid = [Choice(Point("a", str(v), {"lr": v}, {}), ()) for v in (0.1, 0.2, 0.3)]
        >>> at_the_edge(grid[2], grid), at_the_edge(grid[1], grid)
        (['lr'], [])
    """
    at_edge = []
    for key, value in best.point.setting.items():
        tried = [c.point.setting[key] for c in choices if c.point.algorithm == best.point.algorithm]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in tried)
        if numbers and len(set(tried)) > 2 and value in (min(tried), max(tried)):
            at_edge.append(key)
    return at_edge
