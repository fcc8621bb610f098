"""Table 1: FedAvg's rounds to 80 % on Fashion-MNIST, with and without step asynchronism and equal data."""

from __future__ import annotations

from typing import Any

from fedagrac.paper.fashion import DP1, DP2, TWO, fashion, step_counts
from fedagrac.paper.recipe import Found, Recipe, Scale, Table, Verdict, compare_rounds, rounds_text
from fedagrac.paper.records import Cell
from fedagrac.paper.runner import run_simulations

__all__ = ["RECIPE"]

PAPER: dict[str, tuple[int | None, ...]] = {"lr": (2, 1, 91, None), "cnn": (20, 8, 265, 339)}  # None: not in 1000

ROWS: dict[str, tuple[dict[str, Any], bool, int]] = {
    # how the data are split, whether steps are uneven, and which of the paper's figures stands beside
    "neither": ({"kind": "iid"}, False, 0),
    "step-async": ({"kind": "iid"}, True, 1),
    "non-iid": (DP1, False, 2),
    "both": (DP1, True, 3),
    "non-iid-dp2": (DP2, False, 2),
    "both-dp2": (DP2, True, 3),
    "non-iid-two": (TWO, False, 2),
    "both-two": (TWO, True, 3),
}

SPLITS = {"": "Dirichlet(0.3)", "-dp2": "5 classes each", "-two": "2 classes each"}

COUNTS = {  # at most so many rounds, step counts divided by, target
    "quick": {"lr": (15, 1, 0.76), "cnn": (8, 10, 0.5)},
    "medium": {"lr": (1000, 1, 0.8), "cnn": (100, 5, 0.7)},
    "paper": {"lr": (1000, 1, 0.8), "cnn": (1000, 1, 0.8)},
}


def _cells(scale: Scale) -> list[Cell]:
    found = []
    for model in PAPER:
        rounds, part, target = COUNTS[scale][model]
        for row, (split, uneven, _) in ROWS.items():
            settings = fashion(model, split, step_counts(uneven, part), rounds, {"name": "fedavg"})
            found.append(Cell(f"{model}/{row}", {**settings, "target": target, "stop_at_target": True}))
    return found


def _table(found: Found, scale: Scale) -> Table:
    rows = []
    for row, (_, _, beside) in ROWS.items():
        split = SPLITS[row.removeprefix("non-iid").removeprefix("both")] if beside > 1 else "iid"
        cells = [
            f"{rounds_text(found.get(f'{model}/{row}'))} / {theirs[beside] or '> 1000'}"
            for model, theirs in PAPER.items()
        ]
        rows.append((row, split, "yes" if beside % 2 else "no", *cells))
    models = [f"{model} to {COUNTS[scale][model][2]:.0%} ours / paper" for model in PAPER]
    return Table(("row", "data", "step async", *models), tuple(rows))


def _claims(found: Found) -> list[Verdict]:
    verdicts = []
    for model in PAPER:
        at = {row: found.get(f"{model}/{row}") for row in ROWS}
        more_steps = f"{model}: more local steps help with equal data"
        verdicts.append(compare_rounds(more_steps, at["step-async"], at["neither"]))
        for end, split in SPLITS.items():
            unequal = f"{model}, {split}: unequal data slow FedAvg down"
            both = f"{model}, {split}: with unequal data, step asynchronism makes it worse"
            verdicts.append(compare_rounds(unequal, at["neither"], at[f"non-iid{end}"]))
            verdicts.append(compare_rounds(both, at[f"non-iid{end}"], at[f"both{end}"]))
    return verdicts


RECIPE = Recipe(
    name="table1",
    title="FedAvg's rounds to 80 % test accuracy, Fashion-MNIST, 10 clients",
    assumptions=(
        "batch size 25 (not stated for Fashion-MNIST)",
        "step asynchronism: K_i = 100 + 150 i, from a line that is commented out in the paper's source",
        "non-iid data: Dirichlet(0.3) over labels, 5 classes for each client (dp2), or 2 (two): which split is "
        "not stated; the third was added after the first two had been seen",
        "one seed",
        "smaller scales: lr to 76 % at quick; cnn with step counts divided by 10 to 50 % at quick, by 5 to 70 % "
        "at medium, so only its order compares with the paper's",
    ),
    cells=_cells,
    table=_table,
    claims=_claims,
    run=run_simulations,
)
