"""Run the cells of a recipe: those without a record, until the time is up."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from fedagrac import heterogeneity, models
from fedagrac.algorithms import algorithm
from fedagrac.callbacks import Callback
from fedagrac.callbacks.run_folder import environment
from fedagrac.data import partition
from fedagrac.data.federation import Federation
from fedagrac.schedule import Piecewise
from fedagrac.simulation import Stop, simulate
from fedagrac.streams import Purpose, torch_seed

if TYPE_CHECKING:
    from pathlib import Path

    from torch import nn

    from fedagrac.paper.records import Cell, Record, Records
    from fedagrac.results import History
    from fedagrac.simulation import Run

__all__ = ["Deadline", "run_cells", "run_simulation"]

PARTITIONS = {"iid": partition.IID, "dirichlet": partition.Dirichlet, "shards": partition.Shards}
STEPS = {
    "constant": heterogeneity.Constant,
    "gaussian": heterogeneity.Gaussian,
    "linear": heterogeneity.Linear,
    "extreme": heterogeneity.Extreme,
}


class Deadline(Callback):
    """Ends a run when the time is up."""

    def __init__(self, at: float | None) -> None:
        self.at = at
        self.passed = False

    def on_round(self, run: Run, record: dict[str, Any]) -> None:
        """Look at the clock."""
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
    run: Callable[[dict[str, Any], Deadline], dict[str, Any]],
    time_budget: float | None = None,
    show: Callable[[Cell, Record | None], None] = lambda cell, record: None,
) -> bool:
    """Run every cell that has no finished record; return whether all have one now.

    A run that the budget cuts off is recorded as unfinished: its table says so, and it is run anew another time.
    """
    end = None if time_budget is None else time.monotonic() + time_budget
    complete = True
    for cell in cells:
        record = records.get(recipe, cell)
        if record is None or not record.finished:
            if end is not None and time.monotonic() > end:
                complete = False
                continue
            show(cell, None)
            deadline = Deadline(end)
            begun = time.monotonic()
            outcome = run(cell.settings, deadline)
            outcome |= {"finished": not deadline.passed, "seconds": round(time.monotonic() - begun, 1)}
            if record is None or outcome["finished"] or outcome.get("rounds", 0) > record.outcome.get("rounds", 0):
                record = records.put(recipe, cell, outcome, environment(_device()))
            complete = complete and outcome["finished"]
        show(cell, record)
    return complete


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
    with torch.random.fork_rng([]):
        torch.default_generator.manual_seed(torch_seed(seed, Purpose.MODEL))
        return models.build(options.pop("name"), **options)


def run_simulation(settings: dict[str, Any], deadline: Deadline, data_dir: Path | None = None) -> dict[str, Any]:
    """Run one simulation from plain settings; return its curves and what tables need."""
    data = settings["data"]
    split = json.dumps(data["partition"], sort_keys=True)
    federation = _federation(
        data["name"], data["clients"], split, data.get("seed", 0), None if data_dir is None else str(data_dir)
    )
    chosen = dict(settings["algorithm"])
    if isinstance(chosen.get("calibration"), dict):
        chosen["calibration"] = Piecewise({int(t): v for t, v in chosen["calibration"].items()})
    target = settings.get("target")
    result = simulate(
        _module(settings["model"], settings["seed"]),
        federation,
        algorithm(chosen.pop("name"), **chosen),
        rounds=settings["rounds"],
        steps=_made(STEPS, settings["steps"]),
        batch_size=settings["batch_size"],
        seed=settings["seed"],
        precision="tf32" if settings.get("tf32") and torch.cuda.is_available() else "float32",
        stop=Stop(accuracy=target) if settings.get("stop_at_target") else None,
        callbacks=[
            deadline,
            *([GiveUp(settings["give_up"], settings["target"])] if "give_up" in settings else []),
        ],
    )
    return outcome_of(result.history, result.status, target)


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
