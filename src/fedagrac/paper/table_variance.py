"""Rounds to a target accuracy as the variance of K grows: the paper's table of AlexNet and VGG-19 on CIFAR-10."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import Any

from fedagrac.paper.authors import SEED, gaussian_steps
from fedagrac.paper.grid import GridPoint, at_target, fewest_rounds, grid_points, grid_trials
from fedagrac.paper.judging import compare_rounds
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.runner import SMOOTH, run_simulations

__all__ = ["ALGORITHMS", "AUTHORS", "DP1", "RECIPE", "SHARED"]

ALGORITHMS: dict[str, dict[str, Any]] = {
    "fedagrac": {"name": "fedagrac", "first_steps": "epoch"},
    "fedavg": {"name": "fedavg"},
    "fednova": {"name": "fednova"},
    "scaffold": {"name": "scaffold"},
    "fedprox": {"name": "fedprox"},
    "scaffold-full": {"name": "scaffold", "init": "full"},
    "fedagrac-text": {"name": "fedagrac", "first_steps": 1},
}
"""The paper's five in the order of its columns, SCAFFOLD from full gradients, and FedaGrac as the text has it."""

FIVE = tuple(ALGORITHMS)[:5]

PAPER: dict[str, dict[str, tuple[int | None, ...]]] = {  # None: not within 200 rounds; columns as in FIVE
    "alexnet-dp1": {
        "v0": (113, 123, 127, 113, 145),
        "v100-fixed": (106, 130, 147, 114, 144),
        "v100-random": (116, 140, 154, 133, 140),
        "v10000-fixed": (126, 156, 172, 141, 142),
        "v10000-random": (121, 177, 170, 136, 152),
    },
    "alexnet-dp2": {
        "v0": (152, 183, 186, 160, 147),
        "v100-fixed": (111, 179, 119, 124, 143),
        "v100-random": (112, None, 195, 137, 141),
        "v10000-fixed": (111, None, 113, 131, 145),
        "v10000-random": (118, None, None, 123, 152),
    },
    "vgg19-dp2": {
        "v0": (73, 83, 79, 72, 90),
        "v100-fixed": (73, 75, 72, 66, 72),
        "v100-random": (73, 85, 74, 78, 102),
        "v10000-fixed": (77, 73, 70, 72, 77),
        "v10000-random": (71, 85, 76, 72, 99),
    },
}

TARGETS = {"alexnet-authors-dp1": 0.68, "alexnet-dp1": 0.68, "alexnet-dp2": 0.70, "vgg19-dp2": 0.80}

DP1 = {"kind": "dirichlet", "alpha": 0.3, "balance": True, "least": 10}
"""DP1 as the authors' code draws it."""

DP2 = {"kind": "shards", "classes": 5}

AUTHORS: dict[str, dict[str, Any]] = {
    "dp1": {"partition": {"kind": "authors-dirichlet", "alpha": 0.3}, "seed": SEED},
    "dp2": {"partition": {"kind": "authors-classes", "classes": 5}, "seed": SEED},
    "v100-fixed": gaussian_steps(500, 100, clients=20),
    "v10000-fixed": gaussian_steps(500, 10_000, clients=20),
}
"""The authors' own splits and step counts; the other rows have draws of our own."""

AUTHORS_ROW = ("alexnet-authors-dp1", "v10000-fixed")
"""The row with the authors' own split and K, at eta = 0.01; its seeds vary first models and batches."""

AUTHORS_SEEDS = range(4)

SHARED = ("alexnet-dp2", "v10000-fixed")
"""The row that is run over several seeds, and whose runs figure-time shows as well."""

CHOOSER = 0
"""The seed that chooses each algorithm's setting."""

JUDGES = range(1, 9)
"""Seeds that judge the shared row."""

OTHER_JUDGES = range(1, 4)
"""Seeds that judge the other rows."""

LOWER_TARGETS = (0.69, 0.695)
"""In the shared row, FedaGrac and SCAFFOLD are compared at these accuracies too."""

ETAS = (0.03, 0.01, 0.008, 0.005)
MUS = (0.1, 1, 0.01)
LAMBDAS = (1.0, 0.05, 0.03, 0.01, 0.02, 0.04)

EQUAL = {"fednova": "fedavg", "scaffold-full": "fedagrac"}
"""With V = 0 all K are equal: these are the same algorithm as another one (at lambda = 1), and are not run."""

ORDER = (  # the rows after the first, the most telling ones first
    ("alexnet-dp1", "v10000-random"), ("alexnet-dp2", "v10000-random"), ("alexnet-dp1", "v0"),
    ("alexnet-dp2", "v0"), ("alexnet-dp1", "v100-fixed"), ("alexnet-dp1", "v100-random"),
    ("alexnet-dp2", "v100-fixed"), ("alexnet-dp2", "v100-random"), ("vgg19-dp2", "v10000-random"),
    ("vgg19-dp2", "v10000-fixed"), ("vgg19-dp2", "v0"), ("vgg19-dp2", "v100-fixed"),
    ("vgg19-dp2", "v100-random"),
)  # fmt: skip

SMALL: dict[Scale, tuple[tuple[str, str], ...]] = {  # what is run instead where AlexNet would take days
    "quick": tuple(("lr-dp1", column) for column in ("v0", "v10000-fixed", "v10000-random")),
    "medium": tuple(
        (row, column) for row in ("cnn-dp1", "cnn-dp2") for column in ("v0", "v64-fixed", "v64-random")
    ),
}
SMALL_ROUNDS = {"quick": (15, 0.83), "medium": (60, 0.75)}
"""At most so many rounds, to such an accuracy."""

MODELS: dict[str, tuple[dict[str, Any], str, int, float]] = {  # the model, its data, batch size and first eta
    "lr": ({"name": "logistic", "features": 123, "classes": 2}, "a9a", 20, 0.005),
    "cnn": ({"name": "cnn"}, "fashion-mnist", 25, 0.03),
    "alexnet": ({"name": "alexnet"}, "cifar10", 25, 0.03),
    "vgg19": ({"name": "vgg19"}, "cifar10", 25, 0.03),
}


def _settings(row: str, column: str, rounds: int, target: float) -> dict[str, Any]:
    """Return what all runs of a row share."""
    model, dp = row.partition("-")[0], row.rpartition("-")[2]
    variance, _, mode = column[1:].partition("-")
    module, data, batch, _ = MODELS[model]
    clients, mean = (10, 40) if model == "cnn" else (20, 500)
    split: dict[str, Any] = {"partition": DP1 if dp == "dp1" else DP2}
    steps = {"kind": "gaussian", "mean": mean, "variance": int(variance), "mode": mode or "fixed"}
    if (row, column) == AUTHORS_ROW:
        split, steps = AUTHORS[dp], AUTHORS[column]
    return {
        "data": {"name": data, "clients": clients, **split},
        "model": module,
        "steps": steps,
        "batch_size": batch,
        "rounds": rounds,
        "target": target,
        "stop_at_target": True,
        "tf32": True,
    }


RAW = tuple(
    f"{'-'.join(SHARED)}/{setting}/seed0"
    for setting in (
        "fedagrac/lr=0.03 calibration=1.0", "fedavg/lr=0.03", "fednova/lr=0.03", "scaffold/lr=0.03",
        "fedprox/lr=0.03 mu=0.1", "fedagrac-text/lr=0.03 calibration=0.05",
    )
)  # fmt: skip
"""The first runs, which stop in the first round at the target; all others stop when 5 rounds average it."""


def _row(
    row: str,
    column: str,
    names: Iterable[str] = (*FIVE, "scaffold-full"),
    etas: Iterable[float] | None = None,
    grid: bool = False,
    counts: tuple[int, float] | None = None,
    seeds: Iterable[int] = (CHOOSER,),
) -> list[Trial]:
    """Return runs of one row: of these algorithms at these etas, and if asked over all of mu and lambda."""
    rounds, target = counts or (200, TARGETS[row])
    settings = _settings(row, column, rounds, target)
    model = row.partition("-")[0]
    options: dict[str, dict[str, Any]] = {
        "fedprox": {"mu": MUS if grid else MUS[:1]},
        "fedagrac": {"calibration": LAMBDAS if grid else LAMBDAS[:1]},
        "fedagrac-text": {"calibration": [0.05]},
    }
    trials = []
    for name in names:
        if column == "v0" and name in EQUAL:
            continue
        algorithm = dict(ALGORITHMS[name])
        if model == "cnn" and name == "fedagrac":
            algorithm["first_steps"] = 8
        points = {"lr": list(etas or [MODELS[model][3]]), **options.get(name, {})}
        run = {**settings, "algorithm": algorithm}
        trials += grid_trials(f"{row}-{column}/{name}", run, points, list(seeds))
    return [trial if trial.name in RAW else _smooth(trial) for trial in trials]


def _smooth(trial: Trial) -> Trial:
    """Return a run that stops when the mean accuracy over 5 rounds is at the target."""
    return replace(trial, settings={**trial.settings, "smooth": SMOOTH})


@functools.cache
def _planned(scale: Scale) -> tuple[Trial, ...]:
    """Return the runs that depend on no outcome, the most telling ones first."""
    if scale != "paper":
        return tuple(t for row, column in SMALL[scale] for t in _row(row, column, counts=SMALL_ROUNDS[scale]))
    compared = ("fedagrac", "scaffold-full", "scaffold")
    trials = _row(*SHARED, compared)
    for seed in JUDGES:
        trials += _row(*SHARED, compared, seeds=[seed])
    for seed in AUTHORS_SEEDS:
        trials += _row(*AUTHORS_ROW, etas=[0.01], seeds=[seed])
    trials += _row("alexnet-dp1", "v10000-fixed", etas=[0.01])
    for row, column in ORDER:
        trials += _row(row, column)
    for row, column in (SHARED, ("alexnet-dp1", "v10000-fixed")):
        trials += _row(row, column, ALGORITHMS)
        trials += _row(row, column, etas=ETAS, grid=True)
    for row, column in ORDER:
        trials += _row(row, column, etas=ETAS, grid=True)
    return tuple({trial.key: trial for trial in trials}.values())


def _trials(scale: Scale) -> list[Trial]:
    """Return the runs of the table: seed 0 over the grids, and the seeds that judge the shared row at eta 0.03."""
    return list(_planned(scale))


@functools.cache
def _grids() -> dict[str, tuple[str, ...]]:
    """Return the names of the choosing seed's runs by row and algorithm."""
    grids: dict[str, list[str]] = {}
    for scale in ("quick", "medium", "paper"):
        for trial in _planned(scale):
            cell = "/".join(trial.name.split("/")[:2])
            if trial.settings["seed"] == CHOOSER:
                grids.setdefault(cell, []).append(trial.name)
    return {cell: tuple(names) for cell, names in grids.items()}


def _left(records: TrialRecords, cell: str) -> int:
    """Return how many settings of a cell the choosing seed has not run to their end."""
    return sum(name not in records or not records[name].finished for name in _grids().get(cell, ()))


def _chosen(records: TrialRecords, cell: str) -> GridPoint | None:
    """Return an algorithm's runs in a row at the setting that the choosing seed finds best.

    Until that seed has run the whole grid, this is the setting with most seeds, and of those the best one.
    """
    points = grid_points(records, cell)
    firsts = {point.setting: records.get(f"{cell}/{point.setting}/seed{CHOOSER}") for point in points}
    scores = {setting: -1.0 if run is None else fewest_rounds(run) or 0.0 for setting, run in firsts.items()}
    seeds = 1 if _left(records, cell) else 0  # the number of seeds counts only then
    point = max(points, key=lambda point: (seeds * len(point.records), scores[point.setting]), default=None)
    tried = len(_grids().get(cell, ()))
    return point and replace(point, rivals=tried, chosen_by=CHOOSER if tried > 1 else None)


def _following(scale: Scale, records: TrialRecords) -> list[Trial]:
    """Return the runs of the judging seeds at the settings that the choosing seed has found best."""
    trials = []
    for cell in _grids():
        if scale != "paper" or cell.startswith(("lr-", "cnn-", "-".join(AUTHORS_ROW))):
            continue
        if cell.endswith("/fedagrac-text") or _left(records, cell):
            continue
        chosen = _chosen(records, cell)
        first = next(t for t in _planned("paper") if chosen and t.name == f"{cell}/{chosen.setting}/seed{CHOOSER}")
        for seed in JUDGES if cell.startswith("-".join(SHARED)) else OTHER_JUDGES:
            settings = {**first.settings, "seed": seed, "data": {**first.settings["data"], "seed": seed}}
            name = first.name.removesuffix(f"seed{CHOOSER}") + f"seed{seed}"
            trials.append(_smooth(Trial(name, settings)))
    return trials


def _points(records: TrialRecords, row: str) -> dict[str, GridPoint | None]:
    """Return each algorithm's runs in a row at its best setting."""
    points = {name: _chosen(records, f"{row}/{name}") for name in ALGORITHMS}
    if row.endswith("-v0"):
        points |= {name: points[other] for name, other in EQUAL.items()}
    return points


def _rows(
    records: TrialRecords,
) -> Iterator[tuple[str, str, dict[str, GridPoint | None], tuple[int | None, ...] | None]]:
    """Yield every row with records: its name and column, its runs, and the paper's figures if it has any."""
    paper = [(row, column, theirs) for row, columns in PAPER.items() for column, theirs in columns.items()]
    paper.insert(0, (*AUTHORS_ROW, PAPER["alexnet-dp1"][AUTHORS_ROW[1]]))
    small = [(row, column, None) for rows in SMALL.values() for row, column in rows]
    for row, column, theirs in [*paper, *small]:
        points = _points(records, f"{row}-{column}")
        if any(points.values()):
            yield row, column, points, theirs


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for row, column, points, theirs in _rows(records):
        texts = [_text(records, f"{row}-{column}/{name}", points[name]) for name in ALGORITHMS]
        if theirs is not None:
            texts[:5] = [f"{ours} / {rounds or '> 200'}" for ours, rounds in zip(texts[:5], theirs, strict=True)]
        target = next(point for point in points.values() if point is not None).records[0].settings["target"]
        rows.append((f"{row} {target:.0%}", column, *texts))
    titles = [f"{name} ours / paper" if name in FIVE else name for name in ALGORITHMS]
    return Table(("setting", "variance of K", *titles), tuple(rows))


def _text(records: TrialRecords, cell: str, point: GridPoint | None) -> str:
    """Return the rounds of the judging seeds at the best setting, that setting, and how many were tried."""
    if point is None:
        return "-"
    text = f"{point.judging().rounds()}, {point.setting}"
    left, tried = _left(records, cell), len(_grids().get(cell, ()))
    if left:
        return f"{text}, grid incomplete: {tried - left} of {tried}"
    return text + (f", best of {tried}" if tried > 1 else "")


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for row, column, points, _ in _rows(records):
        ours = points["fedagrac"]
        for name in (*FIVE[1:], "scaffold-full"):
            if column == "v0" and EQUAL.get(name) == "fedagrac":
                continue
            claim = f"{row}, {column}: FedaGrac needs fewer rounds than {name}"
            verdicts.append(compare_rounds(claim, ours, points[name]))
        for target in LOWER_TARGETS if (row, column) == SHARED else ():
            for name in ("scaffold", "scaffold-full"):
                claim = f"{row}, {column}: FedaGrac needs fewer rounds to {target:.1%} than {name}"
                verdicts.append(compare_rounds(claim, at_target(ours, target), at_target(points[name], target)))
    return verdicts


RECIPE = Recipe(
    name="table-variance",
    title="Rounds to the target: 20 clients, K ~ Normal(500, V), CIFAR-10, at most 200 rounds",
    assumptions=(
        "DP1: Dirichlet(0.3) as the authors' code draws it: a client that holds its equal share gets nothing "
        "more, and every client holds at least 10 samples. Older records with Dirichlet(0.3) alone are kept but "
        "not shown",
        "first gradient: the mean of the first local epoch (the authors' code averages up to the end of the pass "
        "over the data that is under way, half an epoch on average); the paper's text (one "
        "stochastic gradient, lambda = 0.05) runs beside it as fedagrac-text",
        "FedaGrac starts from full gradients. SCAFFOLD runs from zeros, as is usual, and from full gradients too "
        "(scaffold-full), because the start alone makes a difference",
        "every algorithm at its best of eta 0.01, 0.008, 0.005 (the paper's grid) and 0.03 (ours), FedProx also "
        "of mu 1, 0.1, 0.01, FedaGrac also of lambda 0.01 to 0.05 (the paper's) and 1 (ours)",
        "seed 0 chooses the setting by its first round at the target; then seeds 1 to 3 (in the row alexnet-dp2, "
        "v10000-fixed 1 to 8) run at that setting, and they alone are in the cells and judge the claims. Until "
        "seed 0 has run the whole grid, a cell shows the setting with most seeds and says how much of the grid "
        "is done. eta = 0.03 was run first, and the row with eight judging seeds was chosen, after runs of older "
        "versions of this table had been seen",
        f"the target counts as reached when the mean accuracy over {SMOOTH} rounds reaches it. The first runs of "
        "seed 0 stopped in their first round at the target, so they say only that it took longer than two "
        "rounds less",
        "alexnet-authors-dp1 has the authors' own split and their own K, rebuilt from their code, at eta = 0.01 "
        "(FedProx mu 0.1, lambda 1); its seeds vary the first model and the batches",
        "with V = 0 FedNova is FedAvg and SCAFFOLD from full gradients is FedaGrac at lambda = 1, so they are "
        "run once",
        "VGG-19: convolutions start from He's normal distribution, as in the authors' code",
        "augmentation: crops with padding 4 and flips, as in the authors' code",
        "quick: not the paper's setting but logistic regression on a9a (row lr-dp1), eta 0.005, batch 20, with "
        "the paper's clients and step counts, 83 % in at most 15 rounds",
        "medium: the 2-layer CNN on Fashion-MNIST (rows cnn-dp1, cnn-dp2), 10 clients, K ~ Normal(40, 64), which "
        "spreads as much as Normal(500, 10000) does, and a first gradient over 8 steps, a fifth of K as a local "
        "epoch is of the paper's; 75 % in at most 60 rounds",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=run_simulations,
    following=_following,
)
