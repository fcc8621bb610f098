"""Table 1: FedAvg's rounds to 80 % on Fashion-MNIST, with and without step asynchronism and equal data."""

from __future__ import annotations

from fedagrac.paper.fashion import ASSUMPTIONS, MORE_SPLITS, PRESPLIT, SPLITS, STEPS, fashion, step_counts
from fedagrac.paper.grid import GridPoint, grid_points, seeded
from fedagrac.paper.judging import compare_rounds
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.runner import SMOOTH, run_simulations

__all__ = ["RECIPE"]

PAPER: dict[str, tuple[int | None, ...]] = {"lr": (2, 1, 91, None), "cnn": (20, 8, 265, 339)}
"""Rounds by model: neither, step asynchronism, non-iid, both; None: not in 1000."""

COLUMNS = {"cnn": ("cnn", 0.03), "lr-0.001": ("lr", 0.001), "lr-0.01": ("lr", 0.01)}
"""What is run: the model and its eta. The CNN comes first, because it takes longest."""

COUNTS = {  # at most so many rounds, step counts divided by, target
    "quick": {"lr": (15, 1, 0.76), "cnn": (8, 10, 0.5)},
    "medium": {"lr": (1000, 1, 0.8), "cnn": (100, 5, 0.7)},
    "paper": {"lr": (1000, 1, 0.8), "cnn": (1000, 1, 0.8)},
}
SEEDS = {"lr": range(10), "cnn": range(3)}
"""The seeds at the paper's counts; the smaller scales run one."""

WORDS = {
    PRESPLIT: "Dirichlet(0.1)",
    "authors": "Dirichlet(0.1), the authors' own split",
    "dirichlet-0.1-redrawn": "Dirichlet(0.1), redrawn for every seed",
    "iid": "iid",
    "shards-2": "2 classes each",
    "dirichlet-0.3": "Dirichlet(0.3)",
}


def _splits(column: str, scale: Scale) -> list[str]:
    """Return the splits of a column; at the paper's counts logistic regression has two more."""
    if scale == "quick":
        return [PRESPLIT, "iid"]
    return [*SPLITS, *(MORE_SPLITS if scale == "paper" and COLUMNS[column][0] == "lr" else ())]


def _trials(scale: Scale) -> list[Trial]:
    """Return the runs in the order in which they matter: the CNN, seed by seed, the authors' split first."""
    trials = []
    for column, (model, eta) in COLUMNS.items():
        rounds, part, target = COUNTS[scale][model]
        for split in _splits(column, scale):
            for kind in STEPS:
                settings = fashion(model, split, step_counts(kind, part), rounds, {"name": "fedavg", "lr": eta})
                settings |= {"target": target, "stop_at_target": True, "smooth": SMOOTH}
                seeds = SEEDS[model] if scale == "paper" else (0,)
                trials += seeded(f"{column}/{split}/{kind}", settings, seeds)
    return sorted(trials, key=lambda trial: (not trial.name.startswith("cnn"), trial.settings["seed"]))


def _points(records: TrialRecords, column: str) -> dict[tuple[str, str], GridPoint]:
    """Return the runs of a column by their split and step counts."""
    return {
        (split, point.setting): point for split in WORDS for point in grid_points(records, f"{column}/{split}")
    }


def _table(records: TrialRecords, scale: Scale) -> Table:
    points = {column: _points(records, column) for column in COLUMNS}
    rows = []
    for split, words in WORDS.items():
        for kind, steps in STEPS.items():
            beside = (2 if split != "iid" else 0) + (kind != "constant")
            texts = []
            for column, (model, _) in COLUMNS.items():
                point = points[column].get((split, kind))
                ours = "-" if point is None else point.rounds()
                texts.append(f"{ours} / {PAPER[model][beside] or '> 1000'}")
            rows.append((words, steps, *texts))
    titles = [
        f"{model} eta {eta:g} to {COUNTS[scale][model][2]:.0%} ours / paper" for model, eta in COLUMNS.values()
    ]
    return Table(("data", "local steps", *titles), tuple(rows))


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for column, (model, eta) in COLUMNS.items():
        points = _points(records, column)
        name = f"{model}, eta {eta:g}"
        for kind in ("linear", "uniform"):
            claim = f"{name}: with equal data, {STEPS[kind]} needs fewer rounds than {STEPS['constant']}"
            verdicts.append(compare_rounds(claim, points.get(("iid", kind)), points.get(("iid", "constant"))))
        for split, words in WORDS.items():
            if split == "iid" or split not in _splits(column, "paper"):
                continue
            constant = points.get((split, "constant"))
            claim = f"{name}, {words}: unequal data slow FedAvg down"
            verdicts.append(compare_rounds(claim, points.get(("iid", "constant")), constant))
            for kind in ("linear", "uniform"):
                claim = f"{name}, {words}: {STEPS[kind]} makes it worse"
                verdicts.append(compare_rounds(claim, constant, points.get((split, kind))))
    return verdicts


RECIPE = Recipe(
    name="table1",
    title="FedAvg's rounds to 80 % test accuracy, Fashion-MNIST, 10 clients",
    assumptions=(
        *ASSUMPTIONS,
        "the paper does not state its split, so 2 classes for each client and Dirichlet(0.3) without balance run "
        "beside the authors' Dirichlet(0.1); these two splits are drawn anew for every seed. Two further rows of "
        "logistic regression tell whether the one split with seed 1234 is special: the authors' own split, "
        "rebuilt from their code, and Dirichlet(0.1) drawn anew for every seed",
        "eta = 0.03 for the CNN; for logistic regression the paper's 0.001 and beside it 0.01, which comes "
        "closer to the paper's figures and was added after they had been compared",
        f"the target counts as reached when the mean accuracy over {SMOOTH} rounds reaches it",
        "10 seeds for logistic regression, 3 for the CNN",
        "smaller scales run one seed; quick: Dirichlet(0.1) and equal data alone, lr to 76 %, cnn to 50 % with "
        "step counts divided by 10; medium: cnn to 70 % with step counts divided by 5, so only its order "
        "compares with the paper's",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=run_simulations,
)
