"""Sweeps: every algorithm of an experiment over a grid of its settings and over seeds, and the best of each.

A sweep is a wider experiment: each point of the grid is an algorithm of its own, with its own run folder below
OUT/seed-N. Points of a small model run side by side, as lanes of one batch.
"""

from __future__ import annotations

import copy
import itertools
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.algorithms import options_of
from fedagrac.errors import InputError, nearest, one_of
from fedagrac.experiments.run import check_free, prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.parsing import ParseError, parse_toml
from fedagrac.rounds.record import over_seeds
from fedagrac.storage.claims import claimed

if TYPE_CHECKING:
    from fedagrac.callbacks.progress import Progress
    from fedagrac.models import Imports

__all__ = ["Axis", "By", "Choice", "Point", "Sweep", "best_choices", "choices_of", "read_axes", "run_sweep"]

By = Literal["accuracy", "rounds", "loss"]

FIELDS: dict[str, str] = {"accuracy": "final_accuracy", "rounds": "rounds_to_target", "loss": "final_test_loss"}
"""Which value of a run's summary a sweep is judged by."""


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
        """The setting in a few characters."""
        return " ".join(f"{key}={value}" for key, value in self.setting.items()) or "as given"


def read_axes(table: Mapping[str, Any], grid: Sequence[str]) -> list[Axis]:
    """Read `algorithm.KEY=VALUE,VALUE...`, which varies all algorithms that have it, or `algorithm.NAME.KEY=...`.

    Examples:
        >>> table = {"algorithm": [{"name": "fedavg"}, {"name": "fedprox"}]}
        >>> read_axes(table, ["algorithm.lr=0.1,0.2", "algorithm.mu=1,0.1"])[1]
        Axis(key='mu', values=(1, 0.1), entries=(1,))
    """
    axes: list[Axis] = []
    for text in grid:
        path, equals, values = text.partition("=")
        parts = path.strip().split(".")
        if not equals or not values.strip() or parts[0] != "algorithm" or len(parts) not in (2, 3):
            accepted = (
                "algorithm.KEY=VALUE,VALUE or algorithm.NAME.KEY=VALUE,VALUE, such as algorithm.lr=0.01,0.03"
            )
            raise InputError("grid", text, f"{accepted} (`set` changes what all runs share)")
        entries = list(table.get("algorithm", []))
        names = [str(entry.get("label", entry.get("name"))) for entry in entries]
        chosen = range(len(entries))
        if len(parts) == 3:
            one_of("grid", parts[1], names)
            chosen = range(names.index(parts[1]), names.index(parts[1]) + 1)
        have = tuple(i for i in chosen if parts[-1] in _options(entries[i]))
        if not have:
            known = sorted({option for i in chosen for option in _options(entries[i])})
            raise InputError("grid", text, f"one of {', '.join(known)}{nearest(parts[-1], known)}")
        axis = Axis(parts[-1], tuple(_values(text, values)), have)
        for earlier in axes:
            if earlier.key == axis.key and set(earlier.entries) & set(have):
                raise InputError("grid", text, f"values for {axis.key} once per algorithm")
        axes.append(axis)
    return axes


def _options(entry: Mapping[str, Any]) -> list[str]:
    """Return the settings that an algorithm has."""
    return ["lr", *options_of(str(entry.get("name")))]


def _values(text: str, values: str) -> list[Any]:
    """Return values separated by commas: TOML, or else plain words."""
    try:
        found = list(parse_toml(f"values = [{values}]")["values"])
    except ParseError:
        found = [word.strip() for word in values.split(",")]
    if not found or "" in found or len({repr(value) for value in found}) < len(found):
        raise InputError("grid", text, "different values, separated by commas")
    return found


def points_of(table: Mapping[str, Any], axes: Sequence[Axis]) -> list[Point]:
    """Return every point of the grid, algorithm by algorithm.

    Examples:
        >>> table = {"algorithm": [{"name": "fedavg", "lr": 1}, {"name": "fedprox", "lr": 1}]}
        >>> [p.label for p in points_of(table, read_axes(table, ["algorithm.mu=1,0.1"]))]
        ['fedavg', 'fedprox mu=1', 'fedprox mu=0.1']
    """
    points = []
    for i, entry in enumerate(table["algorithm"]):
        own = [axis for axis in axes if i in axis.entries]
        name = str(entry.get("label", entry.get("name")))
        for values in itertools.product(*[axis.values for axis in own]):
            setting = {axis.key: value for axis, value in zip(own, values, strict=True)}
            words = [name, *[f"{key}={value}" for key, value in setting.items()]]
            label = " ".join(words)
            points.append(Point(name, label, setting, {**entry, **setting, "label": label}))
    return points


@dataclass(frozen=True)
class Sweep:
    """A checked sweep: one experiment per seed, each with every point of the grid."""

    table: Mapping[str, Any]
    points: tuple[Point, ...]
    experiments: tuple[Experiment, ...]

    @classmethod
    def of(cls, table: Mapping[str, Any], grid: Sequence[str], seeds: int) -> Sweep:
        """Check the experiment, the grid, and every point of it."""
        first = Experiment.of(dict(table))
        points = points_of(table, read_axes(table, grid))
        experiments = []
        for seed in range(first.seed, first.seed + seeds):
            wider = {**copy.deepcopy(dict(table)), "seed": seed, "algorithm": [point.entry for point in points]}
            experiments.append(Experiment.of(wider))
        return cls(table, tuple(points), tuple(experiments))


def run_sweep(
    sweep: Sweep,
    out: Path,
    data_dir: Path | None = None,
    progress: Progress | None = None,
    imports: Imports | None = None,
    resume: bool = False,
) -> dict[str, list[Path]]:
    """Run every point with every seed, or go on with what has not ended; return each point's run folders."""
    folders: dict[str, list[Path]] = {point.label: [] for point in sweep.points}
    with claimed(out):
        if not resume:
            check_free(out)
        for experiment in sweep.experiments:
            prepared = prepare(experiment, data_dir, imports)
            place = out / f"seed-{experiment.seed}"
            found = run_experiment(prepared, place, progress, side_by_side=True, resume=resume)
            for point, folder in zip(sweep.points, found, strict=True):
                folders[point.label].append(folder)
    return folders


@dataclass(frozen=True)
class Choice:
    """One point of the grid and what came out of it, a summary row for each seed."""

    point: Point
    rows: tuple[Mapping[str, Any], ...]

    def values(self, by: By) -> list[float]:
        """Return what each seed gave; nothing for a run that diverged or did not reach its target."""
        return [value for value in self._given(by) if value is not None]

    def _given(self, by: By) -> list[float | None]:
        return [None if row["status"] == "diverged" else row[FIELDS[by]] for row in self.rows]

    def mean(self, by: By) -> float | None:
        """Return the mean over the seeds; None where a run gave nothing."""
        return over_seeds(self._given(by))[0]

    def spread(self, by: By) -> float:
        """Return the standard deviation over the seeds; 0 with one."""
        return over_seeds(self._given(by))[1]

    def rank(self, by: By) -> tuple[float, ...]:
        """Return a key by which the better choice is the larger: first by how many seeds gave something."""
        values = self.values(by)
        mean = statistics.fmean(values) if values else 0.0
        tie = self.values("accuracy") if by == "rounds" else []
        return len(values), mean if by == "accuracy" else -mean, statistics.fmean(tie) if tie else 0.0


def choices_of(points: Sequence[Point], rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[Choice]:
    """Return every point with its summary rows, which are given by its label."""
    return [Choice(point, tuple(rows[point.label])) for point in points]


def best_choices(choices: Sequence[Choice], by: By) -> dict[str, Choice]:
    """Return the best point of each algorithm; of equals the first."""
    best: dict[str, Choice] = {}
    for choice in choices:
        name = choice.point.algorithm
        if name not in best or choice.rank(by) > best[name].rank(by):
            best[name] = choice
    return best


def at_the_edge(best: Choice, choices: Sequence[Choice]) -> list[str]:
    """Return the settings whose best value is the smallest or largest that was tried, of three or more numbers.

    Examples:
        >>> grid = [Choice(Point("a", str(v), {"lr": v}, {}), ()) for v in (0.1, 0.2, 0.3)]
        >>> at_the_edge(grid[2], grid), at_the_edge(grid[1], grid)
        (['lr'], [])
    """
    found = []
    for key, value in best.point.setting.items():
        tried = [c.point.setting[key] for c in choices if c.point.algorithm == best.point.algorithm]
        numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in tried)
        if numbers and len(set(tried)) > 2 and value in (min(tried), max(tried)):
            found.append(key)
    return found
