"""Grids: every algorithm at its best setting, over several seeds, as the paper compares.

Two settings are compared by the differences between their runs with the same seed. A claim is decided only where
the 95 % interval of the mean difference excludes zero, so one seed never decides it.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedagrac.paper.intervals import Interval, p_value, seeds_to_decide
from fedagrac.paper.recipe import TrialRecords, Verdict
from fedagrac.paper.records import Trial, TrialRecord

__all__ = [
    "GridPoint",
    "best",
    "compare_means",
    "compare_rounds",
    "fewest_rounds",
    "final_accuracy",
    "grid_points",
    "grid_trials",
    "judge",
    "paired_means",
    "seeded",
    "setting_text",
    "within",
]


def setting_text(setting: Mapping[str, Any]) -> str:
    """Return a setting in a few characters.

    Examples:
        >>> setting_text({"lr": 0.005, "mu": 0.1})
        'lr=0.005 mu=0.1'
        >>> setting_text({})
        'only'
    """
    return " ".join(f"{key}={value}" for key, value in setting.items()) or "only"


def grid_trials(
    name: str, settings: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[Trial]:
    """Return the runs of one algorithm over a grid of its options and over seeds.

    Examples:
        >>> plain = {"data": {"name": "a9a"}, "algorithm": {"name": "fedprox"}}
        >>> trials = grid_trials("lr/fedprox", plain, {"lr": [0.1, 0.2], "mu": [1]}, [0, 1])
        >>> trials[0].name
        'lr/fedprox/lr=0.1 mu=1/seed0'
        >>> trials[3].settings["algorithm"], trials[3].settings["data"]
        ({'name': 'fedprox', 'lr': 0.2, 'mu': 1}, {'name': 'a9a', 'seed': 1})
    """
    trials = []
    for values in itertools.product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        chosen = {**settings, "algorithm": {**settings["algorithm"], **setting}}
        trials += seeded(f"{name}/{setting_text(setting)}", chosen, seeds)
    return trials


def seeded(name: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Trial]:
    """Return one run per seed, which decides the first model, every draw and, unless the data name one, the split.

    Examples:
        >>> [trial.name for trial in seeded("lr/fedavg/lr=0.1", {"data": {}}, [0, 1])]
        ['lr/fedavg/lr=0.1/seed0', 'lr/fedavg/lr=0.1/seed1']
        >>> seeded("cnn", {"data": {"seed": 1234}}, [7])[0].settings
        {'data': {'seed': 1234}, 'seed': 7}
    """
    return [
        Trial(f"{name}/seed{seed}", {**settings, "data": {"seed": seed, **settings["data"]}, "seed": seed})
        for seed in seeds
    ]


@dataclass(frozen=True)
class GridPoint:
    """One setting of an algorithm with its runs, one per seed.

    Attributes:
        setting: the setting in a few characters.
        records: its runs.
        rivals: how many settings it was chosen from. Claims about the best of several settings are judged without
            the first seed, which chose it.
    """

    setting: str
    records: tuple[TrialRecord, ...]
    rivals: int = 1

    def by_seed(self) -> dict[int, TrialRecord]:
        """Return the runs by their seeds."""
        return {record.settings.get("seed", i): record for i, record in enumerate(self.records)}

    def values(self, field: str) -> list[float | None]:
        """Return what each seed gave; a run that diverged gave None."""
        return [_value(record, field) for record in self.records]

    @property
    def finished(self) -> bool:
        """Whether no run was cut off."""
        return all(record.finished for record in self.records)

    def mean(self, field: str = "final") -> float | None:
        """Return the mean over the seeds; None where a run gave nothing."""
        known = [value for value in self.values(field) if value is not None]
        return statistics.fmean(known) if known and len(known) == len(self.records) else None

    def half_width(self, field: str = "final") -> float:
        """Return half the width of the 95 % interval of the mean; 0 where it has none (one seed, or diverged)."""
        known = [value for value in self.values(field) if value is not None]
        return Interval.of(known).half if len(known) > 1 and len(known) == len(self.records) else 0.0

    def percent(self, field: str = "final") -> str:
        """Return the mean of an accuracy and half the width of its 95 % interval as text.

        Examples:
            >>> runs = tuple(TrialRecord("a", {}, {"final": f}, {}) for f in (0.84, 0.85, 0.86))
            >>> GridPoint("lr=0.1", runs).percent()
            '85.00 +- 2.48'
            >>> GridPoint("lr=0.1", runs[:1]).percent()
            '84.00'
            >>> GridPoint("lr=0.1", (TrialRecord("a", {}, {"final": None}, {}),)).percent()
            'diverged'
        """
        mean = self.mean(field)
        if mean is None:
            return "diverged"
        return f"{100 * mean:.2f}" + (f" +- {100 * self.half_width(field):.2f}" if len(self.records) > 1 else "")

    def rounds(self) -> str:
        """Return how many rounds the runs took to their target as text.

        Examples:
            >>> def runs(*reached):
            ...     outcomes = [{"rounds": 200, "rounds_to_target": rounds} for rounds in reached]
            ...     return GridPoint("only", tuple(TrialRecord("a", {}, outcome, {}) for outcome in outcomes))
            >>> runs(12).rounds(), runs(None).rounds(), runs(10, 11, 12).rounds()
            ('12', '> 200', '11.0 +- 2.5 (3 seeds)')
            >>> runs(10, None, 12).rounds(), runs(None, None).rounds()
            ('11.0 by 2 of 3 seeds, the others > 200', '> 200 (2 seeds)')
        """
        reached = [r for record in self.records if (r := record.outcome["rounds_to_target"]) is not None]
        most = min((r.outcome["rounds"] for r in self.records if r.outcome["rounds_to_target"] is None), default=0)
        note = "" if self.finished else " (cut off)"
        if len(self.records) == 1:
            return str(reached[0]) if reached else f"> {most}{note}"
        if not reached:
            return f"> {most} ({len(self.records)} seeds){note}"
        if len(reached) < len(self.records):
            mean = statistics.fmean(reached)
            return f"{mean:.1f} by {len(reached)} of {len(self.records)} seeds, the others > {most}{note}"
        interval = Interval.of(reached)
        return f"{interval.mean:.1f} +- {interval.half:.1f} ({len(reached)} seeds)"


def _value(record: TrialRecord, field: str) -> float | None:
    return None if record.outcome.get("status") == "diverged" else record.outcome.get(field)


def grid_points(records: TrialRecords, name: str) -> list[GridPoint]:
    """Return every setting of the algorithm whose trials are called name/SETTING/seedN, in the order of the grid.

    Examples:
        >>> run = TrialRecord("a", {}, {"final": 0.5}, {})
        >>> runs = {"x/lr=1/seed0": run, "x/lr=1/seed1": run, "y/lr=1/seed0": run}
        >>> [point.setting for point in grid_points(runs, "x")]
        ['lr=1']
    """
    groups: dict[str, list[TrialRecord]] = {}
    for trial, record in records.items():
        if trial.startswith(name + "/"):
            groups.setdefault(trial[len(name) + 1 :].rpartition("/")[0], []).append(record)
    return [GridPoint(setting, tuple(runs)) for setting, runs in groups.items()]


def final_accuracy(record: TrialRecord) -> float | None:
    """Return the accuracy over the last rounds; None for a run that diverged."""
    return _value(record, "final")


def fewest_rounds(record: TrialRecord) -> float | None:
    """Return a score that is higher the sooner the target was reached, then the higher the final accuracy is."""
    reached = record.outcome["rounds_to_target"]
    return final_accuracy(record) if reached is None else 2 - reached / 1e6


def best(
    records: TrialRecords, name: str, score: Callable[[TrialRecord], float | None] = final_accuracy
) -> GridPoint | None:
    """Return the setting whose first seed scores highest, or None where none has a score.

    Examples:
        >>> runs = {f"x/lr={lr}/seed0": TrialRecord("a", {}, {"final": lr}, {}) for lr in (0.1, 0.3, 0.2)}
        >>> best(runs, "x").setting, best(runs, "x").rivals
        ('lr=0.3', 3)
    """
    points = [point for point in grid_points(records, name) if score(point.records[0]) is not None]
    chosen = max(points, key=lambda point: score(point.records[0]) or 0.0, default=None)
    return None if chosen is None else replace(chosen, rivals=len(points))


def _pairs(a: GridPoint, b: GridPoint) -> list[tuple[TrialRecord, TrialRecord]]:
    """Return the runs with the same seeds, without the seed that chose the settings if another one is there."""
    first, second = a.by_seed(), b.by_seed()
    seeds = sorted(first.keys() & second.keys())
    if max(a.rivals, b.rivals) > 1 and len(seeds) > 1:
        seeds = seeds[1:]
    return [(first[seed], second[seed]) for seed in seeds]


def judge(
    claim: str, differences: Sequence[float], numbers: str, threshold: float = 0.0, unit: float = 1.0
) -> Verdict:
    """Judge that the mean of paired differences is above a threshold.

    Args:
        claim: what is claimed.
        differences: one per seed.
        numbers: what was compared, as text.
        threshold: what the mean is claimed to exceed.
        unit: differences are shown multiplied by this.

    Examples:
        >>> judge("a is above b", [1.0, 1.1, 1.2], "a against b")  # doctest: +NORMALIZE_WHITESPACE
        Verdict(claim='a is above b', verdict='holds',
                numbers='a against b: difference 1.1 [0.852, 1.35], p = 0.0027, 3 seeds')
        >>> judge("a is above b", [1.0, -0.5], "a against b").numbers
        'a against b: difference 0.25 [-9.28, 9.78], p = 0.8, 2 seeds; about 72 seeds would decide'
        >>> judge("a is above b", [1.0], "a against b")
        Verdict(claim='a is above b', verdict='not decided', numbers='a against b: one seed')
    """
    if len(differences) < 2:
        return Verdict(claim, "not decided", f"{numbers}: {'one seed' if differences else 'no seed in common'}")
    interval = Interval.of([unit * difference for difference in differences])
    p = p_value([difference - threshold for difference in differences])
    numbers = f"{numbers}: difference {interval}, p = {p:.2g}, {len(differences)} seeds"
    if interval.low > unit * threshold:
        return Verdict(claim, "holds", numbers)
    if interval.high < unit * threshold:
        return Verdict(claim, "does not hold", numbers)
    needed = seeds_to_decide(differences, threshold)
    note = "level" if needed is None else f"about {needed} seeds would decide"
    return Verdict(claim, "not decided", f"{numbers}; {note}")


def paired_means(higher: GridPoint, lower: GridPoint) -> list[float]:
    """Return the differences of final accuracy, seed by seed; diverging counts as an accuracy of zero."""
    return [(final_accuracy(a) or 0.0) - (final_accuracy(b) or 0.0) for a, b in _pairs(higher, lower)]


def compare_means(claim: str, higher: GridPoint | None, lower: GridPoint | None) -> Verdict:
    """Judge that one setting ends at a higher accuracy than another.

    Examples:
        >>> runs = [TrialRecord("", {}, {"final": f}, {}) for f in (0.8, 0.82, 0.7, 0.71)]
        >>> a, b = GridPoint("", tuple(runs[:2])), GridPoint("", tuple(runs[2:]))
        >>> compare_means("a is above b", a, b).verdict, compare_means("b is above a", b, a).verdict
        ('holds', 'does not hold')
        >>> compare_means("a is above c", a, None).verdict
        'not decided'
    """
    numbers = " against ".join("-" if point is None else point.percent() for point in (higher, lower))
    if higher is None or lower is None:
        return Verdict(claim, "not decided", numbers)
    if not (higher.finished and lower.finished):
        return Verdict(claim, "not decided", f"{numbers} (cut off)")
    if higher.mean() is None and lower.mean() is None:
        return Verdict(claim, "not decided", numbers)
    return judge(claim, paired_means(higher, lower), numbers, unit=100)


def within(claim: str, a: GridPoint | None, b: GridPoint | None, limit: float) -> Verdict:
    """Judge that two settings end within so many points of each other (a limit of 0.01 is one point)."""
    numbers = " against ".join("-" if point is None else point.percent() for point in (a, b))
    if a is None or b is None or not (a.finished and b.finished):
        return Verdict(claim, "not decided", numbers)
    if a.mean() is None and b.mean() is None:
        return Verdict(claim, "not decided", numbers)
    differences = paired_means(a, b)
    if len(differences) < 2:
        return judge(claim, differences, numbers)
    interval = Interval.of(differences)
    numbers = (
        f"{numbers}: difference {Interval(100 * interval.mean, 100 * interval.half)}, {len(differences)} seeds"
    )
    if max(abs(interval.low), abs(interval.high)) < limit:
        return Verdict(claim, "holds", numbers)
    if interval.low > limit or interval.high < -limit:
        return Verdict(claim, "does not hold", numbers)
    return Verdict(claim, "not decided", numbers)


def compare_rounds(claim: str, fewer: GridPoint | None, more: GridPoint | None) -> Verdict:
    """Judge that one setting needs fewer rounds to the target than another.

    A run that did not reach the target counts with the rounds it was given, which is a lower bound. Where that
    bound is below what the other run needed, nothing is decided.
    """
    numbers = " against ".join("-" if point is None else point.rounds() for point in (fewer, more))
    if fewer is None or more is None:
        return Verdict(claim, "not decided", numbers)
    differences = []
    for a, b in _pairs(fewer, more):
        needed = [record.outcome["rounds_to_target"] for record in (a, b)]
        given = [n or record.outcome["rounds"] for n, record in zip(needed, (a, b), strict=True)]
        known = [n for n in needed if n is not None]
        if known and min(given) < min(known):
            return Verdict(claim, "not decided", f"{numbers}: cut off before the other reached the target")
        differences.append(float(given[1] - given[0]) if known else 0.0)
    return judge(claim, differences, numbers)
