"""Run a recipe in several processes of one thread each."""

from __future__ import annotations

import functools
import multiprocessing
import os
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedagrac.paper import RECIPES, Records, Trial, TrialRecord, run_trials, trials_of
from fedagrac.paper.grid import GridPoint
from fedagrac.paper.runner import side_by_side

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.paper.recipe import Scale

__all__ = ["Work", "run_in_workers", "show"]


@dataclass(frozen=True)
class Work:
    """What every process knows: the recipe, its scale, and where records, data and checkpoints are."""

    recipe: str
    scale: Scale
    out: Path
    data_dir: Path | None = None
    checkpoints: Path | None = None


def run_in_workers(work: Work, only: str, workers: int, time_budget: float | None = None) -> None:
    """Run the trials without a finished record; each process takes the next group until the time is up.

    Args:
        work: what to run.
        only: a part of the trials' names.
        workers: how many processes.
        time_budget: seconds after which no group begins and the present ones end.
    """
    recipe, store = RECIPES[work.recipe], Records(work.out)
    end = None if time_budget is None else time.time() + time_budget
    os.environ["OMP_NUM_THREADS"] = "1"  # read when a worker imports torch
    for _ in range(1 if recipe.following is None else 2):  # then those that follow from the first
        trials = [trial for trial in trials_of(recipe, work.scale, store) if only in trial.name]
        recorded = [(trial, store.get(work.recipe, trial)) for trial in trials]
        pending = [trial for trial, record in recorded if record is None or not record.finished]
        jobs = [(work, end, [trial.name for trial in group]) for group in side_by_side(pending, work.checkpoints)]
        with multiprocessing.get_context("spawn").Pool(workers) as pool:
            for _ in pool.imap_unordered(_run_group, jobs, chunksize=1):
                pass


def _run_group(job: tuple[Work, float | None, list[str]]) -> None:
    """Run the trials of one group in a worker, unless the time is up."""
    work, end, names = job
    left = None if end is None else end - time.time()
    recipe = RECIPES[work.recipe]
    if recipe.run is None or (left is not None and left < 0):
        return
    store = Records(work.out)
    trials = [trial for trial in trials_of(recipe, work.scale, store) if trial.name in names]
    run_group = functools.partial(recipe.run, data_dir=work.data_dir)
    run_trials(recipe.name, trials, store, run_group, left, show, checkpoints=work.checkpoints)


def show(trials: list[Trial], records: list[TrialRecord]) -> None:
    """Print which trials begin (no records yet), or what they gave."""
    if trials and not records:
        others = f" and {len(trials) - 1} others" if len(trials) > 1 else ""
        print(f"{trials[0].name}{others} ...", flush=True)
    for trial, record in zip(trials, records, strict=False):
        best, seconds = record.outcome["best"], record.outcome["seconds"]
        reached = "-" if best is None else f"{best:.4f}"  # a regression, or a run that diverged at once
        rounds = GridPoint("", (record,)).rounds()
        print(f"{trial.name}: {rounds} rounds, best {reached}, {seconds} s", flush=True)
