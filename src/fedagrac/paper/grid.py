"""Grids: every algorithm at its best setting, over a few seeds, as the paper compares."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedagrac.paper.recipe import Found, Verdict
from fedagrac.paper.records import Cell, Record
from fedagrac.rounds.record import over_seeds

__all__ = ["Choice", "best", "choices", "compare_means", "grid_cells", "seeded", "setting_text"]


def setting_text(setting: Mapping[str, Any]) -> str:
    """Return a setting in a few characters.

    Examples:
        >>> setting_text({"lr": 0.005, "mu": 0.1})
        'lr=0.005 mu=0.1'
        >>> setting_text({})
        'only'
    """
    return " ".join(f"{key}={value}" for key, value in setting.items()) or "only"


def grid_cells(
    name: str, settings: Mapping[str, Any], grid: Mapping[str, Sequence[Any]], seeds: Sequence[int]
) -> list[Cell]:
    """Return the runs of one algorithm over a grid of its options and over seeds.

    Examples:
        >>> plain = {"data": {"name": "a9a"}, "algorithm": {"name": "fedprox"}}
        >>> cells = grid_cells("lr/fedprox", plain, {"lr": [0.1, 0.2], "mu": [1]}, [0, 1])
        >>> cells[0].name
        'lr/fedprox/lr=0.1 mu=1/seed0'
        >>> cells[3].settings["algorithm"], cells[3].settings["data"]
        ({'name': 'fedprox', 'lr': 0.2, 'mu': 1}, {'name': 'a9a', 'seed': 1})
    """
    found = []
    for values in itertools.product(*grid.values()):
        setting = dict(zip(grid, values, strict=True))
        chosen = {**settings, "algorithm": {**settings["algorithm"], **setting}}
        found += seeded(f"{name}/{setting_text(setting)}", chosen, seeds)
    return found


def seeded(name: str, settings: Mapping[str, Any], seeds: Sequence[int]) -> list[Cell]:
    """Return one run per seed, which names the partition, the first model and every draw of a run.

    Examples:
        >>> [cell.name for cell in seeded("lr/fedavg/lr=0.1", {"data": {}}, [0, 1])]
        ['lr/fedavg/lr=0.1/seed0', 'lr/fedavg/lr=0.1/seed1']
    """
    return [
        Cell(f"{name}/seed{seed}", {**settings, "data": {**settings["data"], "seed": seed}, "seed": seed})
        for seed in seeds
    ]


@dataclass(frozen=True)
class Choice:
    """One setting of an algorithm, with its runs, one per seed."""

    setting: str
    records: tuple[Record, ...]

    def values(self, field: str) -> list[float | None]:
        """Return what each seed gave; a run that diverged gave None."""
        outcomes = [record.outcome for record in self.records]
        return [None if outcome.get("status") == "diverged" else outcome.get(field) for outcome in outcomes]

    @property
    def finished(self) -> bool:
        """Whether no run was cut off."""
        return all(record.finished for record in self.records)

    def mean(self, field: str = "final") -> float | None:
        """Return the mean over the seeds; None where a run gave nothing."""
        return over_seeds(self.values(field))[0]

    def spread(self, field: str = "final") -> float:
        """Return the standard deviation over the seeds; 0 with one."""
        return over_seeds(self.values(field))[1]

    def percent(self, field: str = "final") -> str:
        """Return mean and spread of an accuracy as text.

        Examples:
            >>> runs = tuple(Record("a", {}, {"final": f}, {}) for f in (0.84, 0.86))
            >>> Choice("lr=0.1", runs).percent()
            '85.00 +- 1.41'
            >>> Choice("lr=0.1", runs[:1]).percent()
            '84.00'
            >>> Choice("lr=0.1", (Record("a", {}, {"final": None}, {}),)).percent()
            'diverged'
        """
        mean = self.mean(field)
        if mean is None:
            return "diverged"
        return f"{100 * mean:.2f}" + (f" +- {100 * self.spread(field):.2f}" if len(self.records) > 1 else "")


def choices(found: Found, name: str) -> list[Choice]:
    """Return every setting of the algorithm whose cells are called name/SETTING/seedN, in the order of the grid.

    Examples:
        >>> run = Record("a", {}, {"final": 0.5}, {})
        >>> [c.setting for c in choices({"x/lr=1/seed0": run, "x/lr=1/seed1": run, "y/lr=1/seed0": run}, "x")]
        ['lr=1']
    """
    groups: dict[str, list[Record]] = {}
    for cell, record in found.items():
        if cell.startswith(name + "/"):
            groups.setdefault(cell[len(name) + 1 :].rpartition("/")[0], []).append(record)
    return [Choice(setting, tuple(records)) for setting, records in groups.items()]


def best(found: Found, name: str, field: str = "final") -> Choice | None:
    """Return the setting with the highest mean over the seeds, or None where nothing ran to an end."""
    there = [choice for choice in choices(found, name) if choice.mean(field) is not None]
    return max(there, key=lambda choice: choice.mean(field) or 0.0, default=None)


def compare_means(claim: str, higher: Choice | None, lower: Choice | None) -> Verdict:
    """Judge that one setting ends at a higher accuracy than another; diverging is below any accuracy.

    With several seeds a difference below their spread (the larger standard deviation of the two) decides nothing.

    Examples:
        >>> runs = [Record("", {}, {"final": f}, {}) for f in (0.8, 0.82, 0.7, 0.7)]
        >>> a, b = Choice("", tuple(runs[:2])), Choice("", tuple(runs[2:]))
        >>> compare_means("a is above b", a, b)
        Verdict(claim='a is above b', verdict='holds', numbers='81.00 +- 1.41 against 70.00 +- 0.00')
        >>> compare_means("b is above a", b, a).verdict, compare_means("a is above c", a, None).verdict
        ('does not hold', 'not decided')
    """
    numbers = " against ".join("-" if choice is None else choice.percent() for choice in (higher, lower))
    if higher is None or lower is None:
        return Verdict(claim, "not decided", numbers)
    if not (higher.finished and lower.finished):
        return Verdict(claim, "not decided", f"{numbers} (cut off)")
    a, b = (-1.0 if mean is None else mean for mean in (higher.mean(), lower.mean()))
    if a == b == -1:
        return Verdict(claim, "not decided", numbers)
    spread = max(higher.spread(), lower.spread())
    if spread and abs(a - b) <= spread:
        return Verdict(claim, "not decided", f"{numbers}: within the spread of the seeds")
    return Verdict(claim, "holds" if a > b else "does not hold", numbers)
