"""Run a recipe where only torch and numpy are installed.

python -m fedagrac.paper table-variance --scale paper --out DIR --time-budget 500
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from fedagrac.paper import RECIPES, Records, Trial, TrialRecord, records_of, run_trials
from fedagrac.paper.grid import GridPoint


def main() -> None:
    """Run the trials of a recipe that are not recorded yet, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m fedagrac.paper")
    parser.add_argument("recipe", grid_points=list(RECIPES))
    parser.add_argument("--scale", grid_points=["quick", "medium", "paper"], default="quick")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="run trials whose name contains this")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--time-budget", type=float, metavar="SECONDS")
    o = parser.parse_args()
    recipe, records = RECIPES[o.recipe], Records(o.out)

    def show(trials: list[Trial], found: list[TrialRecord]) -> None:
        if trials and not found:
            print(f"{trials[0].name} and {len(trials) - 1} others ...", flush=True)
        for trial, record in zip(trials, found, strict=False):
            best, seconds = record.outcome["best"], record.outcome["seconds"]
            reached = "-" if best is None else f"{best:.4f}"  # a regression, or a run that diverged at once
            rounds = GridPoint("", (record,)).rounds()
            print(f"{trial.name}: {rounds} rounds, best {reached}, {seconds} s", flush=True)

    if recipe.run is not None:
        trials = [trial for trial in recipe.trials(o.scale) if o.only in trial.name]
        run_trials(
            recipe.name, trials, records, functools.partial(recipe.run, data_dir=o.data_dir), o.time_budget, show
        )
    table = recipe.table(records_of(recipe, o.scale, records), o.scale)
    print(" | ".join(table.columns), *[" | ".join(row) for row in table.rows], sep="\n")


if __name__ == "__main__":
    main()
