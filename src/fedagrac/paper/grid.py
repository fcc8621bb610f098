"""Grids: every algorithm at its best setting, over several seeds, as the paper compares."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedagrac.paper.intervals import Interval
from fedagrac.paper.recipe import TrialRecords
from fedagrac.paper.records import Trial, TrialRecord
from fedagrac.paper.runner import SMOOTH, first_round

__all__ = [
    "GridPoint",
    "Reading",
    "at_target",
    "best",
    "choice",
    "fewest_rounds",
    "final_accuracy",
    "grid_points",
    "grid_trials",
    "reading",
    "seeded",
    "setting_text",
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
    trials = []
    for seed in seeds:
        data = {**settings["data"], "seed": settings["data"].get("seed", seed)}
        trials.append(Trial(f"{name}/seed{seed}", {**settings, "data": data, "seed": seed}))
    return trials


@dataclass(frozen=True)
class Reading:
    """When a run reached its target.

    Attributes:
        reached: the round, or None.
        until: the last round up to which it is known not to have reached it; infinite for a run that diverged.
        raw: the round in which the run ended because its last evaluation was at the target, or None.
    """

    reached: int | None
    until: float
    raw: int | None = None


def reading(record: TrialRecord) -> Reading:
    """Read from a record's curve when the mean accuracy over 5 rounds reached the run's target.

    Examples:
        >>> settings = {"target": 0.7, "rounds": 200}
        >>> def read(*accuracy, **more):
        ...     outcome = {"accuracy": accuracy, "rounds": len(accuracy), "rounds_to_target": None, **more}
        ...     return reading(TrialRecord("a", settings, outcome, {}))
        >>> read(0.6, 0.68, 0.69, 0.71, 0.72, 0.73, 0.74)
        Reading(reached=4, until=4, raw=None)
        >>> read(0.6, 0.65, 0.68, 0.68, 0.71)  # ended at its first round at the target
        Reading(reached=None, until=3, raw=5)
        >>> read(0.1, 0.1, status="diverged")
        Reading(reached=None, until=inf, raw=None)
    """
    outcome, target = record.outcome, record.settings.get("target")
    curve = outcome.get("accuracy")
    if curve is None or target is None:  # made without a curve
        reached, until, raw = outcome.get("rounds_to_target"), outcome["rounds"], None
    else:
        reached, raw = first_round(curve, target, SMOOTH), first_round(curve, target)
        whole = outcome["rounds"] >= record.settings.get("rounds", math.inf)
        until = outcome["rounds"] if whole else max(0, len(curve) - SMOOTH // 2)
        raw = raw if reached is None and raw == len(curve) else None
    if reached is not None:
        return Reading(reached, reached)
    return Reading(None, math.inf if outcome.get("status") == "diverged" else until, raw)


@dataclass(frozen=True)
class GridPoint:
    """One setting of an algorithm with its runs, one per seed.

    Attributes:
        setting: the setting in a few characters.
        records: its runs.
        chosen_by: the seed that chose it from several settings, which does not judge claims about it.
        rivals: how many settings it was chosen from.
    """

    setting: str
    records: tuple[TrialRecord, ...]
    chosen_by: int | None = None
    rivals: int = 1

    def by_seed(self) -> dict[int, TrialRecord]:
        """Return the runs by their seeds."""
        return {record.settings.get("seed", i): record for i, record in enumerate(self.records)}

    def with_seeds(self, seeds: Sequence[int]) -> GridPoint:
        """Return the runs with these seeds alone."""
        by_seed = self.by_seed()
        return replace(self, records=tuple(by_seed[seed] for seed in seeds))

    def judging(self) -> GridPoint:
        """Return the runs without that of the seed which chose the setting, unless it is the only one."""
        seeds = [seed for seed in self.by_seed() if seed != self.chosen_by]
        return self.with_seeds(seeds) if seeds else self

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
        """Return the mean of an accuracy, half the width of its 95 % interval and the number of seeds as text.

        Examples:
            >>> runs = tuple(TrialRecord("a", {}, {"final": f}, {}) for f in (0.84, 0.85, 0.86))
            >>> GridPoint("lr=0.1", runs).percent()
            '85.00 +- 2.48 (3 seeds)'
            >>> GridPoint("lr=0.1", runs[:1]).percent()
            '84.00'
            >>> gone = TrialRecord("a", {}, {"final": None}, {})
            >>> GridPoint("lr=0.1", (gone,)).percent(), GridPoint("lr=0.1", (gone, gone, runs[0])).percent()
            ('diverged', 'diverged with 2 of 3 seeds')
        """
        values = self.values(field)
        if None in values:
            return "diverged" + (f" with {values.count(None)} of {len(values)} seeds" if len(values) > 1 else "")
        mean = f"{100 * (self.mean(field) or 0.0):.2f}"
        return mean + (f" +- {100 * self.half_width(field):.2f} ({len(values)} seeds)" if len(values) > 1 else "")

    def rounds(self) -> str:
        """Return how many rounds the runs took to their target as text.

        Examples:
            >>> def runs(*reached):
            ...     outcomes = [{"rounds": 200, "rounds_to_target": rounds} for rounds in reached]
            ...     return GridPoint("only", tuple(TrialRecord("a", {}, outcome, {}) for outcome in outcomes))
            >>> runs(12).rounds(), runs(None).rounds(), runs(10, 11, 12).rounds()
            ('12', '> 200', '11.0 +- 2.5 (3 seeds)')
            >>> runs(10, None, 12).rounds(), runs(None, None).rounds()
            ('10 to 12 by 2 of 3 seeds, the others > 200', '> 200 (2 seeds)')
        """
        read = [reading(record) for record in self.records]
        reached = [one.reached for one in read if one.reached is not None]
        missed = [one for one in read if one.reached is None]
        if not missed:
            if len(reached) == 1:
                return str(reached[0])
            interval = Interval.of(reached)
            return f"{interval.mean:.1f} +- {interval.half:.1f} ({len(reached)} seeds)"
        least = min(one.until for one in missed)
        bound = "diverged" if least == math.inf else f"> {least:g}"
        gone = sum(one.until == math.inf for one in missed)
        notes = [] if self.finished else ["cut off"]
        notes += [f"ended at {one.raw}, its first round at the target" for one in missed if one.raw is not None]
        notes += [f"diverged with {gone}"] if gone and bound != "diverged" else []
        note = f" ({'; '.join(notes)})" if notes else ""
        if reached:
            span = str(reached[0]) if len(reached) == 1 else f"{min(reached)} to {max(reached)}"
            return f"{span} by {len(reached)} of {len(read)} seeds, the others {bound}{note}"
        return bound + (f" ({len(read)} seeds)" if len(read) > 1 else "") + note


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


def at_target(point: GridPoint | None, target: float) -> GridPoint | None:
    """Return the runs with another target, whose round is read from their curves.

    Examples:
        >>> run = TrialRecord("a", {}, {"accuracy": [0.1, 0.5, 0.6, 0.6], "rounds": 4}, {})
        >>> at_target(GridPoint("only", (run,)), 0.44).rounds()
        '2'
    """
    if point is None:
        return None
    records = [replace(record, settings={**record.settings, "target": target}) for record in point.records]
    return replace(point, records=tuple(records))


def final_accuracy(record: TrialRecord) -> float | None:
    """Return the accuracy over the last rounds; None for a run that diverged."""
    return _value(record, "final")


def fewest_rounds(record: TrialRecord) -> float | None:
    """Return a score that is higher the sooner the target was reached, then the higher the final accuracy is.

    The seed that chooses settings is read without averaging, because some of its runs ended at the target.
    """
    curve, target = record.outcome.get("accuracy"), record.settings.get("target")
    reached = record.outcome.get("rounds_to_target")
    if curve is not None and target is not None:
        reached = first_round(curve, target)
    return final_accuracy(record) if reached is None else 2 - reached / 1e6


def best(
    records: TrialRecords, name: str, score: Callable[[TrialRecord], float | None] = final_accuracy
) -> GridPoint | None:
    """Return the setting whose first seed scores highest, or None where none has a score.

    Examples:
        >>> runs = {f"x/lr={lr}/seed0": TrialRecord("a", {"seed": 0}, {"final": lr}, {}) for lr in (0.1, 0.3, 0.2)}
        >>> best(runs, "x").setting, best(runs, "x").rivals, best(runs, "x").chosen_by
        ('lr=0.3', 3, 0)
    """
    points = [point for point in grid_points(records, name) if score(point.records[0]) is not None]
    chosen = max(points, key=lambda point: score(point.records[0]) or 0.0, default=None)
    return None if chosen is None else choice(chosen, len(points))


def choice(point: GridPoint, rivals: int) -> GridPoint:
    """Return a setting as one that its first seed has chosen from so many."""
    return replace(point, rivals=rivals, chosen_by=next(iter(point.by_seed())) if rivals > 1 else None)
