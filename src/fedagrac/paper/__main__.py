"""Run a recipe where only torch and numpy are installed.

python -m fedagrac.paper table-variance --scale paper --out DIR --time-budget 500
"""

from __future__ import annotations

import argparse
import functools
from pathlib import Path

from fedagrac.paper import table_variance
from fedagrac.paper.records import Cell, Record, Records
from fedagrac.paper.runner import run_cells, run_simulation

RECIPES = {"table-variance": table_variance}


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
    cells = [cell for cell in RECIPES[o.recipe].cells(o.scale) if o.only in cell.name]

    def show(cell: Cell, record: Record | None) -> None:
        if record is None:
            print(f"{cell.name} ...", flush=True)
            return
        out = record.outcome
        print(
            f"{cell.name}: {out['rounds']} rounds, target at {out['rounds_to_target']}, best {out['best']:.4f}, "
            f"{'finished' if record.finished else 'cut off'}, {out['seconds']} s",
            flush=True,
        )

    run = functools.partial(run_simulation, data_dir=o.data_dir)
    run_cells(o.recipe, cells, Records(o.out), run, o.time_budget, show)


if __name__ == "__main__":
    main()
