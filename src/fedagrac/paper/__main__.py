"""Run a recipe where only torch and numpy are installed.

python -m fedagrac.paper table-variance --scale paper --out DIR --time-budget 500
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from fedagrac.paper import RECIPES, Cell, Record, Records, records_of, run_cells
from fedagrac.paper.recipe import rounds_text


def main() -> None:
    """Run the cells of a recipe that are not recorded yet, and print a line for each."""
    parser = argparse.ArgumentParser(prog="python -m fedagrac.paper")
    parser.add_argument("recipe", choices=list(RECIPES))
    parser.add_argument("--scale", choices=["quick", "medium", "paper"], default="quick")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", default="", help="run cells whose name contains this")
    parser.add_argument("--data-dir", type=Path)
    parser.add_argument("--time-budget", type=float, metavar="SECONDS")
    o = parser.parse_args()
    recipe, records = RECIPES[o.recipe], Records(o.out)

    def show(cells: list[Cell], found: list[Record]) -> None:
        if cells and not found:
            print(f"{cells[0].name} and {len(cells) - 1} others ...", flush=True)
        for cell, record in zip(cells, found, strict=False):
            best, seconds = record.outcome["best"], record.outcome["seconds"]
            reached = "-" if best is None else f"{best:.4f}"  # a regression, or a run that diverged at once
            print(f"{cell.name}: {rounds_text(record)} rounds, best {reached}, {seconds} s", flush=True)

    if recipe.run is not None:
        cells = [cell for cell in recipe.cells(o.scale) if o.only in cell.name]
        run_cells(
            recipe.name, cells, records, functools.partial(recipe.run, data_dir=o.data_dir), o.time_budget, show
        )
    table = recipe.table(records_of(recipe, o.scale, records), o.scale)
    print(" | ".join(table.columns), *[" | ".join(row) for row in table.rows], sep="\n")


if __name__ == "__main__":
    main()
