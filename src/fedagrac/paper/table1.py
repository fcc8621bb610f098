"""Table 1: FedAvg's rounds to 80 % on Fashion-MNIST, with and without step asynchronism and equal data."""

from __future__ import annotations

from fedagrac.paper.recipe import Found, Recipe, Scale, Table, Verdict, compare_rounds, rounds_text
from fedagrac.paper.records import Cell
from fedagrac.paper.runner import run_simulations

__all__ = ["RECIPE"]

COLUMNS = ("neither", "step-async", "non-iid", "both")

PAPER: dict[str, tuple[int | None, ...]] = {"lr": (2, 1, 91, None), "cnn": (20, 8, 265, 339)}  # None: not in 1000

ROUNDS = {  # at most so many rounds
    "quick": {"lr": 150, "cnn": 12},
    "medium": {"lr": 1000, "cnn": 150},
    "paper": {"lr": 1000, "cnn": 1000},
}


def _cells(scale: Scale) -> list[Cell]:
    found = []
    for row in PAPER:
        for column in COLUMNS:
            uneven = column in ("step-async", "both")
            unequal = column in ("non-iid", "both")
            settings = {
                "data": {
                    "name": "fashion-mnist",
                    "clients": 10,
                    "partition": {"kind": "dirichlet", "alpha": 0.3} if unequal else {"kind": "iid"},
                    "seed": 0,
                },
                "model": {"name": "logistic", "features": 784, "classes": 10} if row == "lr" else {"name": "cnn"},
                "algorithm": {"name": "fedavg", "lr": 0.001 if row == "lr" else 0.03},
                "steps": {"kind": "linear", "first": 100, "increment": 150}
                if uneven
                else {"kind": "constant", "steps": 100},
                "batch_size": 25,
                "rounds": ROUNDS[scale][row],
                "seed": 0,
                "target": 0.8,
                "stop_at_target": True,
                "tf32": row == "cnn",
            }
            found.append(Cell(f"{row}/{column}", settings))
    return found


def _table(found: Found, scale: Scale) -> Table:
    rows = []
    for row, theirs in PAPER.items():
        mine = [rounds_text(found.get(f"{row}/{column}")) for column in COLUMNS]
        cells = [f"{a} / {b or '> 1000'}" for a, b in zip(mine, theirs, strict=True)]
        rows.append((row, *cells))
    return Table(("model", *[f"{c} ours / paper" for c in COLUMNS]), tuple(rows))


def _claims(found: Found) -> list[Verdict]:
    verdicts = []
    for row in PAPER:
        at = {column: found.get(f"{row}/{column}") for column in COLUMNS}
        more_steps, unequal = (
            f"{row}: more local steps help with equal data",
            f"{row}: unequal data slow FedAvg down",
        )
        both = f"{row}: with unequal data, step asynchronism makes it worse"
        verdicts.append(compare_rounds(more_steps, at["step-async"], at["neither"]))
        verdicts.append(compare_rounds(unequal, at["neither"], at["non-iid"]))
        verdicts.append(compare_rounds(both, at["non-iid"], at["both"]))
    return verdicts


RECIPE = Recipe(
    name="table1",
    title="FedAvg's rounds to 80 % test accuracy, Fashion-MNIST, 10 clients",
    assumptions=(
        "batch size 25 (not stated for Fashion-MNIST)",
        "step asynchronism: K_i = 100 + 150 i, from a line that is commented out in the paper's source",
        "non-iid data: Dirichlet(0.3) over labels (which split is not stated)",
        "one seed",
    ),
    cells=_cells,
    table=_table,
    claims=_claims,
    run=run_simulations,
)
