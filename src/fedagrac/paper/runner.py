"""Run the cells of a recipe: those without a record, until the time is up."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedagrac import heterogeneity, models
from fedagrac.algorithms import Algorithm, algorithm
from fedagrac.callbacks import Callback
from fedagrac.core.schedule import Piecewise
from fedagrac.core.streams import first_weights
from fedagrac.data import partitions as partition
from fedagrac.data.federation import Federation
from fedagrac.rounds.api import simulate_many
from fedagrac.rounds.stop import Stop
from fedagrac.storage.environment import environment

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from fedagrac.paper.records import Cell, Record, Records
    from fedagrac.rounds.api import Run
    from fedagrac.rounds.record import History

__all__ = ["Deadline", "one_by_one", "outcome_of", "run_cells", "run_simulations"]

RunGroup = Callable[[Sequence[dict[str, Any]], "Deadline"], list[dict[str, Any]]]
"""How settings that belong together are run: an outcome for each, which says whether it is "finished"."""

SIDE_BY_SIDE = ("logistic", "cnn")
"""Models so small that a grid of runs costs little more than one."""

PARTITIONS = {"iid": partition.IID, "dirichlet": partition.Dirichlet, "shards": partition.Shards}
STEPS = {
    "constant": heterogeneity.Constant,
    "gaussian": heterogeneity.Gaussian,
    "linear": heterogeneity.Linear,
    "extreme": heterogeneity.Extreme,
}


class Deadline(Callback):
    """Ends a run when the time is up; before that, says that another round is done."""

    def __init__(self, at: float | None, seen: Callable[[], None] = lambda: None) -> None:
        self.at = at
        self.seen = seen
        self.passed = False

    def on_round(self, run: Run, record: dict[str, Any]) -> None:
        """Look at the clock."""
        self.seen()
        if self.at is not None and time.monotonic() > self.at:
            self.passed = True
            run.stop("the time budget is spent")


class GiveUp(Callback):
    """Ends a run that has not reached its target after so many rounds."""

    def __init__(self, rounds: int, target: float) -> None:
        self.rounds = rounds
        self.target = target

    def on_round(self, run: Run, record: dict[str, Any]) -> None:
        """Look at the rounds so far."""
        if len(run.history) == self.rounds and run.history.rounds_to(self.target) is None:
            run.stop(f"{self.target} not reached in {self.rounds} rounds")


def run_cells(
    recipe: str,
    cells: Iterable[Cell],
    records: Records,
    run: RunGroup,
    time_budget: float | None = None,
    show: Callable[[list[Cell], list[Record]], None] = lambda cells, records: None,
    seen: Callable[[], None] = lambda: None,
) -> bool:
    """Run every cell that has no finished record; return whether all have one now.

    Cells of a small model that differ in the algorithm alone run side by side. A run that the budget cuts off is
    recorded as unfinished: its table says so, and it is run anew another time. `show` is told of the cells that
    were done before, then of every group that begins (with no records yet) and ends; `seen` of every round.
    """
    end = None if time_budget is None else time.monotonic() + time_budget
    before = [(cell, records.get(recipe, cell)) for cell in cells]
    done = [(cell, record) for cell, record in before if record is not None and record.finished]
    show([cell for cell, _ in done], [record for _, record in done])
    complete = True
    for group in _groups(cell for cell, record in before if record is None or not record.finished):
        if end is not None and time.monotonic() > end:
            return False
        show(group, [])
        begun = time.monotonic()
        outcomes = run([cell.settings for cell in group], Deadline(end, seen))
        shared = {"seconds": round(time.monotonic() - begun, 1), "together": len(group)}
        written = []
        for cell, outcome in zip(group, outcomes, strict=True):
            kept = records.get(recipe, cell)
            if kept is None or outcome["finished"] or outcome["rounds"] > kept.outcome["rounds"]:
                kept = records.put(recipe, cell, {**outcome, **shared}, environment(_device()))
            written.append(kept)
            complete = complete and outcome["finished"]
        show(group, written)
    return complete


def _groups(cells: Iterable[Cell]) -> list[list[Cell]]:
    """Return the cells that run side by side, in the order of the first of each group."""
    groups: dict[str, list[Cell]] = {}
    for cell in cells:
        small = cell.settings.get("model", {}).get("name") in SIDE_BY_SIDE
        shared = {key: value for key, value in cell.settings.items() if key != "algorithm"} if small else cell.key
        groups.setdefault(json.dumps(shared, sort_keys=True), []).append(cell)
    return list(groups.values())


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _made(kinds: dict[str, Any], settings: dict[str, Any]) -> Any:
    """Return an object named by its kind."""
    options = dict(settings)
    return kinds[options.pop("kind")](**options)


@functools.lru_cache(maxsize=2)
def _federation(name: str, clients: int, split: str, seed: int, data_dir: str | None) -> Federation:
    return Federation.load(name, clients, _made(PARTITIONS, json.loads(split)), seed, data_dir)


def _module(settings: dict[str, Any], seed: int) -> nn.Module:
    options = dict(settings)
    with first_weights(seed):
        return models.build(options.pop("name"), **options)


def run_simulations(
    group: Sequence[dict[str, Any]], deadline: Deadline, data_dir: Path | None = None
) -> list[dict[str, Any]]:
    """Run simulations from plain settings that differ in the algorithm alone; return what records keep of them."""
    shared = group[0]
    data = shared["data"]
    split = json.dumps(data["partition"], sort_keys=True)
    federation = _federation(
        data["name"], data["clients"], split, data.get("seed", 0), None if data_dir is None else str(data_dir)
    )
    target = shared.get("target")
    deadlines = [Deadline(deadline.at, deadline.seen) for _ in group]
    results = simulate_many(
        _module(shared["model"], shared["seed"]),
        federation,
        [_algorithm(settings["algorithm"]) for settings in group],
        rounds=shared["rounds"],
        steps=_made(STEPS, shared["steps"]),
        batch_size=shared["batch_size"],
        seed=shared["seed"],
        precision="tf32" if shared.get("tf32") and torch.cuda.is_available() else "float32",
        stop=Stop(accuracy=target) if shared.get("stop_at_target") else None,
        callbacks=[[own, *_give_up(shared)] for own in deadlines],
    )
    return [
        {**outcome_of(result.history, result.status, target), "finished": not own.passed}
        for result, own in zip(results, deadlines, strict=True)
    ]


def one_by_one(run: Callable[..., dict[str, Any]]) -> Callable[..., list[dict[str, Any]]]:
    """Return how a recipe's own way of running one cell runs a group of them."""

    def run_each(
        group: Sequence[dict[str, Any]], deadline: Deadline, data_dir: Path | None = None
    ) -> list[dict[str, Any]]:
        return [run(settings, deadline, data_dir) for settings in group]

    return run_each


def _give_up(settings: dict[str, Any]) -> list[GiveUp]:
    return [GiveUp(settings["give_up"], settings["target"])] if "give_up" in settings else []


def _algorithm(settings: dict[str, Any]) -> Algorithm:
    options = dict(settings)
    if isinstance(options.get("calibration"), dict):
        options["calibration"] = Piecewise({int(t): v for t, v in options["calibration"].items()})
    return algorithm(options.pop("name"), **options)


def outcome_of(history: History, status: str, target: float | None = None) -> dict[str, Any]:
    """Return what a record keeps of a history: curves to four digits, and what tables are made of."""
    accuracy = [a for a in history.column("test_accuracy") if a is not None]
    last = accuracy[-10:]
    return {
        "status": status,
        "rounds": len(history),
        "best": max(accuracy, default=None),
        "final": sum(last) / len(last) if last and status != "diverged" else None,
        "rounds_to_target": None if target is None else history.rounds_to(target),
        "accuracy": [round(a, 4) for a in accuracy],
        "train_loss": [float(f"{v:.4g}") for v in history.column("train_loss")],
        "sim_time": [float(f"{v:.6g}") for v in history.column("sim_time")],
        "bytes_total": history[-1]["bytes_total"] if history else 0,
    }
