"""The data behind the charts: which curves to draw, and their points.

The page and the PNG and PDF pictures share this module.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.algorithms import REGISTRY, algorithm
from fedagrac.report.style import LOOKS, Look, look_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt

    from fedagrac.storage.runs import StoredRun

__all__ = [
    "MOST_POINTS",
    "Chart",
    "ChartAxis",
    "Curve",
    "Series",
    "accuracy_range",
    "charts_of",
    "curve",
    "headline",
    "measures_own_models",
    "names_of",
    "scales_shared_lr",
    "series_of",
    "target_of",
]

MOST_POINTS = 2000
"""Pictures thin curves of more points than this."""


@dataclass(frozen=True)
class ChartAxis:
    """One field of the history as a chart shows it: the label of the axis, and the factor on the values."""

    field: str
    label: str
    scale: float = 1.0


ROUNDS = ChartAxis("round", "round")
TIME = ChartAxis("sim_time", "simulated time (s)")
ACCURACY = ChartAxis("test_accuracy", "test accuracy (%)", 100.0)
TEST_LOSS = ChartAxis("test_loss", "test loss")
TRAIN_LOSS = ChartAxis("train_loss", "training loss")


@dataclass(frozen=True)
class Chart:
    """One field of the history against another.

    Attributes:
        key: the name of the chart in file names.
        x, y: the two axes.
        log: whether the y axis is logarithmic at first, because the values span a wide range.
    """

    key: str
    x: ChartAxis
    y: ChartAxis
    log: bool

    @property
    def title(self) -> str:
        """The heading of the chart on the page."""
        against = {"round": "rounds", "sim_time": "simulated time", "bytes_total": "bytes moved"}[self.x.field]
        name = self.y.label.removesuffix(" (%)")
        return f"{name[0].upper()}{name[1:]} against {against}"


@dataclass(frozen=True, eq=False)
class Series:
    """One line in every chart: a run, or several runs that differ only in their seed."""

    label: str
    runs: tuple[StoredRun, ...]
    look: Look

    @property
    def note(self) -> str:
        """The label, with the number of seeds and of diverged runs where these matter."""
        diverged = sum(run.status == "diverged" for run in self.runs)
        remarks = [f"{len(self.runs)} seeds"] if len(self.runs) > 1 else []
        if diverged:
            remarks.append("diverged" if len(self.runs) == 1 else f"{diverged} diverged")
        return self.label + (f" ({', '.join(remarks)})" if remarks else "")


@dataclass(frozen=True, eq=False)
class Curve:
    """The points of a series in a chart; over several seeds the mean, the lowest and the highest value."""

    rounds: list[int]
    x: list[float]
    y: list[float]
    low: list[float]
    high: list[float]

    def thinned(self) -> Curve:
        """Return at most about `MOST_POINTS` evenly spaced points of the curve, with the first and the last."""
        number = len(self.rounds)
        if number <= MOST_POINTS:
            return self
        kept = sorted({*range(0, number, -(-number // MOST_POINTS)), number - 1})
        x, y, low, high = ([values[i] for i in kept] for values in (self.x, self.y, self.low, self.high))
        return Curve([self.rounds[i] for i in kept], x, y, low, high)


def series_of(runs: Sequence[StoredRun]) -> list[Series]:
    """Group runs that differ only in their seed; return a series with a distinct label and look for each group."""
    groups: dict[str, list[StoredRun]] = {}
    for run in runs:
        key = _settings_without_seed(run)
        if any(other.seed == run.seed for other in groups.get(key, [])):
            key = str(run.folder)  # the same settings and seed again: a line of its own
        groups.setdefault(key, []).append(run)
    result: list[Series] = []
    used: Counter[str] = Counter()
    for label, group in zip(_labels([g[0] for g in groups.values()]), groups.values(), strict=True):
        name = group[0].algorithm if group[0].algorithm in LOOKS else "other"  # others share one colour
        result.append(Series(label, tuple(group), look_of(name, used[name])))
        used[name] += 1
    return result


def names_of(runs: Sequence[StoredRun]) -> list[str]:
    """Return a distinct name for each run."""
    names = {
        run.folder: line.label + (f", seed {run.seed}" if len(line.runs) > 1 else "")
        for line in series_of(runs)
        for run in line.runs
    }
    return [names[run.folder] for run in runs]


def scales_shared_lr(run: StoredRun) -> bool:
    """Return whether the run's lr is the shared lr times Kbar, because the algorithm divides it by K_i."""
    inner = run.algorithm_settings.get("inner")
    name = str(inner.get("name")) if isinstance(inner, dict) else run.algorithm
    registered = name in REGISTRY and "lr" in run.experiment
    return registered and algorithm(name, lr=1.0).traits.lr == "round"


def measures_own_models(run: StoredRun) -> bool:
    """Return whether the run's results are those of the clients' own models."""
    return any(name in REGISTRY and algorithm(name, lr=1.0).traits.personal for name in run.algorithms)


def _settings_without_seed(run: StoredRun) -> str:
    settings = {key: value for key, value in run.experiment.items() if key != "seed"}
    if scales_shared_lr(run):  # Kbar, and so the run's lr, depends on the seed
        settings["algorithm"] = {k: v for k, v in run.algorithm_settings.items() if k != "lr"}
    return json.dumps(settings, sort_keys=True, default=str)


def _labels(runs: Sequence[StoredRun]) -> list[str]:
    """Return a distinct name for each run: its label, with its folder where labels are equal."""
    for candidates in (
        [run.label for run in runs],
        [f"{run.label}, {run.folder.resolve().parent.name}" for run in runs],
    ):
        if len(set(candidates)) == len(runs):
            return candidates
    return [f"{run.label}, {run.folder}" for run in runs]


def curve(series: Series, chart: Chart) -> Curve:
    """Return the points of a series in a chart; over several seeds, only rounds that all of them evaluated."""
    tables = []
    for run in series.runs:
        values = run.history.column(chart.y.field)
        known = ~np.isnan(values)
        columns = [run.history.column(field)[known] for field in ("round", chart.x.field)]
        tables.append((columns[0], chart.x.scale * columns[1], chart.y.scale * values[known]))
    rounds = tables[0][0]
    for others, _, _ in tables[1:]:
        rounds = np.intersect1d(rounds, others)
    places = [np.searchsorted(own, rounds) for own, _, _ in tables]
    x, y = ([table[k][place] for table, place in zip(tables, places, strict=True)] for k in (1, 2))
    mean_x, mean_y = (np.sum([values / len(tables) for values in columns], axis=0) for columns in (x, y))
    low, high = np.min(y, axis=0), np.max(y, axis=0)
    return Curve(rounds.tolist(), mean_x.tolist(), mean_y.tolist(), low.tolist(), high.tolist())


def charts_of(runs: Sequence[StoredRun]) -> list[Chart]:
    """Return the charts that have anything to show.

    The first of accuracy, test loss and training loss that was measured is drawn against rounds, simulated time
    and bytes; the others are drawn against rounds.
    """
    measured = [axis for axis in (ACCURACY, TEST_LOSS, TRAIN_LOSS) if len(_values(runs, axis))]
    if not measured:
        return []
    main, rest = measured[0], measured[1:]
    name = main.field.removeprefix("test_").replace("_", "-")
    return [
        _chart(f"{name}-rounds", ROUNDS, main, runs),
        _chart(f"{name}-time", TIME, main, runs),
        _chart(f"{name}-bytes", _bytes_axis(runs), main, runs),
        *(_chart(axis.field.replace("_", "-"), ROUNDS, axis, runs) for axis in rest),
    ]


def accuracy_range(curves: Sequence[Curve]) -> tuple[float, float]:
    """Return the range of an accuracy axis in percent, without the lowest 5 % of the values.

    These are the steep start of a run, which would flatten the rest of the chart.
    """
    values = sorted(y for points in curves for y in points.y)
    if not values:  # the seeds have no evaluated round in common
        return 0.0, 100.0
    return max(0.0, values[len(values) // 20] - 2), min(100.5, values[-1] + 1.5)


def target_of(runs: Sequence[StoredRun]) -> float | None:
    """Return the target that all runs share, or None."""
    targets = {run.target for run in runs}
    return targets.pop() if len(targets) == 1 else None


def headline(runs: Sequence[StoredRun]) -> str:
    """Return one line that says what was run."""
    names = ", ".join(dict.fromkeys(run.name for run in runs))
    facts = {(run.federation.clients, *run.federation.steps_range) for run in runs if run.federation is not None}
    if len(facts) != 1:
        return names
    clients, fewest, most = facts.pop()
    return f"{names}: {clients} clients, {fewest} to {most} local steps"


def _chart(key: str, x: ChartAxis, y: ChartAxis, runs: Sequence[StoredRun]) -> Chart:
    values = _values(runs, y)
    # on a narrow range a logarithmic axis would be crowded with tick labels
    return Chart(key, x, y, y is not ACCURACY and bool(values.min() > 0 and values.max() > 3 * values.min()))


def _values(runs: Sequence[StoredRun], axis: ChartAxis) -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.concatenate([run.history.column(axis.field) for run in runs])
    known: npt.NDArray[np.float64] = values[~np.isnan(values)]
    return known


def _bytes_axis(runs: Sequence[StoredRun]) -> ChartAxis:
    most = max(run.history.column("bytes_total")[-1] for run in runs if len(run.history))
    if most >= 1e10:
        return ChartAxis("bytes_total", "GB moved", 1e-9)
    return ChartAxis("bytes_total", "MB moved", 1e-6)
