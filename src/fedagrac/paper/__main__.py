"""Run a recipe, or merge records, where only torch and numpy are installed.

python -m fedagrac.paper table-variance --scale paper --out DIR --time-budget 500
python -m fedagrac.paper regime-map --scale paper --out DIR --time-budget 500 --workers 8
python -m fedagrac.paper merge FROM INTO
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from fedagrac.paper import RECIPES, Records, records_of, run_trials, trials_of
from fedagrac.paper.workers import Work, run_in_workers, show


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the trials of a recipe that are not recorded yet, or merge one folder of records into another."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    if given[:1] == ["merge"]:
        merge(given[1:])
    else:
        run(given)


def merge(arguments: Sequence[str]) -> None:
    """Take over the records of one folder that are missing in another one or unfinished there."""
    parser = argparse.ArgumentParser(prog="python -m fedagrac.paper merge")
    parser.add_argument("source", type=Path, metavar="FROM")
    parser.add_argument("into", type=Path, metavar="INTO")
    options = parser.parse_args(arguments)
    if not options.source.is_dir():
        parser.error(f"FROM: expected a folder with records, got {options.source}")
    taken = Records(options.into).merge(Records(options.source))
    print(f"{taken} records taken over into {options.into}")


def run(arguments: Sequence[str]) -> None:
    """Run a recipe, print a line for each trial, then the table."""
    parser = argparse.ArgumentParser(prog="python -m fedagrac.paper")
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--scale", choices=["quick", "medium", "paper"], default="quick")
    parser.add_argument("--out", type=Path, required=True, help="folder for RECIPE.jsonl")
    parser.add_argument("--only", default="", help="run trials whose name contains this")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--time-budget", type=float, metavar="SECONDS")
    parser.add_argument("--checkpoints", type=Path, metavar="DIR", help="resume here what the budget has cut off")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each")
    options = parser.parse_args(arguments)
    recipe, store = RECIPES[options.recipe], Records(options.out)
    work = Work(recipe.name, options.scale, options.out, options.data_dir, options.checkpoints)
    if recipe.run is not None and options.workers > 1:
        run_in_workers(work, options.only, options.workers, options.time_budget)
    elif recipe.run is not None:
        run_group = functools.partial(recipe.run, data_dir=options.data_dir)
        end = None if options.time_budget is None else time.monotonic() + options.time_budget
        for _ in range(1 if recipe.following is None else 2):  # then those that follow from the first
            trials = [t for t in trials_of(recipe, options.scale, store) if options.only in t.name]
            left = None if end is None else end - time.monotonic()
            run_trials(recipe.name, trials, store, run_group, left, show, checkpoints=options.checkpoints)
    table = recipe.table(records_of(recipe, options.scale, store), options.scale)
    print(" | ".join(table.columns), *[" | ".join(row) for row in table.rows], sep="\n")


if __name__ == "__main__":
    main()
