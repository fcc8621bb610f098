"""FedaGrac's accuracy over the learning rate eta and the calibration rate lambda: the paper's heat maps."""

from __future__ import annotations

import itertools
import math
from typing import TYPE_CHECKING, Any

from fedagrac.paper.grid import Choice, choices, compare_means, grid_cells
from fedagrac.paper.recipe import Found, Recipe, Scale, Table, Verdict
from fedagrac.paper.records import Cell
from fedagrac.paper.runner import run_simulations

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RECIPE"]

PANELS = {
    "lr-async": "LR, K ~ Normal(500, 10000)",
    "lr-constant": "LR, K = 500",
    "alexnet-async": "AlexNet, K ~ Normal(500, 10000)",
    "alexnet-constant": "AlexNet, K = 500",
}

STEPS: dict[str, dict[str, Any]] = {
    "async": {"kind": "gaussian", "mean": 500, "variance": 10000, "mode": "fixed"},
    "constant": {"kind": "constant", "steps": 500},
}

ETAS: dict[Scale, list[float]] = {
    "quick": [0.001, 0.005, 0.05],
    "medium": [0.0005, 0.001, 0.005, 0.01, 0.05],
    "paper": [0.0005, 0.001, 0.005, 0.01, 0.05],
}
LAMBDAS: dict[Scale, list[float]] = {
    "quick": [0.01, 0.1, 1.0],
    "medium": [0.001, 0.01, 0.05, 0.1, 0.5, 1.0],
    "paper": [0.001, 0.01, 0.05, 0.1, 0.5, 1.0],
}
ROUNDS: dict[Scale, int] = {"quick": 25, "medium": 100, "paper": 100}
SEEDS: dict[Scale, list[int]] = {"quick": [0], "medium": [0], "paper": [0, 1, 2]}

GOOD = {"lr": 0.005, "alexnet": 0.02}
"""A lambda is good at an eta if it is so close to the best lambda there."""

Cells = dict[tuple[float, float], Choice]
"""The runs of a panel by eta and lambda."""


def _cells(scale: Scale) -> list[Cell]:
    found = []
    for panel in PANELS if scale == "paper" else ("lr-async", "lr-constant"):
        model, _, steps = panel.partition("-")
        settings = {
            "data": {
                "name": "a9a" if model == "lr" else "cifar10",
                "clients": 20,
                "partition": {"kind": "dirichlet", "alpha": 0.3},
            },
            "model": {"name": "logistic", "features": 123, "classes": 2} if model == "lr" else {"name": "alexnet"},
            "algorithm": {"name": "fedagrac", "first_steps": "epoch"},
            "steps": STEPS[steps],
            "batch_size": 20 if model == "lr" else 25,
            "rounds": ROUNDS[scale],
            "tf32": model == "alexnet",
        }
        grid = {"lr": ETAS[scale], "calibration": LAMBDAS[scale]}
        found += grid_cells(f"{panel}/fedagrac", settings, grid, SEEDS[scale] if model == "lr" else [0])
    return found


def _runs(found: Found, panel: str) -> Cells:
    """Return what ran to an end (or diverged), by eta and lambda."""
    whole = {name: record for name, record in found.items() if record.finished}
    runs = {}
    for choice in choices(whole, f"{panel}/fedagrac"):
        used = choice.records[0].settings["algorithm"]
        runs[used["lr"], used["calibration"]] = choice
    return runs


def _table(found: Found, scale: Scale) -> Table:
    rows = []
    for panel in PANELS:
        runs = _runs(found, panel)
        if runs:
            for eta in ETAS[scale]:
                there = [runs.get((eta, lam)) for lam in LAMBDAS[scale]]
                rows.append((panel, f"{eta:g}", *["-" if one is None else one.percent() for one in there]))
    return Table(("panel", "eta", *[f"lambda {lam:g}" for lam in LAMBDAS[scale]]), tuple(rows))


def _claims(found: Found) -> list[Verdict]:
    verdicts = []
    for panel in PANELS:
        runs = _runs(found, panel)
        etas, lambdas = sorted({eta for eta, _ in runs}), sorted({lam for _, lam in runs})
        complete = len(runs) == len(etas) * len(lambdas) and min(len(etas), len(lambdas)) > 1
        judges = _LR_CLAIMS if panel.startswith("lr") else _ALEXNET_CLAIMS
        for claim, judge in judges.items():
            named = f"{panel}: {claim}"
            if complete:
                verdicts.append(judge(named, runs, etas, lambdas))
            else:
                verdicts.append(Verdict(named, "not decided", "the grid is not complete" if runs else "not run"))
    return verdicts


def _mean(choice: Choice) -> float:
    return choice.mean() or 0.0  # a run that diverged has learned nothing


def _good_lambda(
    claim: str, runs: Cells, etas: list[float], lambdas: list[float], lam: float, good: float
) -> Verdict:
    """Judge that a lambda is nearly as good as the best one at each of these etas."""
    if lam not in lambdas or not etas:
        return Verdict(claim, "not decided", f"lambda {lam:g} or its etas not run")
    behind = {eta: max(_mean(runs[eta, other]) for other in lambdas) - _mean(runs[eta, lam]) for eta in etas}
    worst = max(behind, key=lambda eta: behind[eta])
    numbers = f"at most {100 * behind[worst]:.2f} points below the best lambda, at eta {worst:g}"
    return Verdict(claim, "holds" if behind[worst] <= good else "does not hold", numbers)


def _one_is_good(claim: str, runs: Cells, etas: list[float], lambdas: list[float]) -> Verdict:
    return _good_lambda(claim, runs, etas, lambdas, 1.0, GOOD["lr"])


def _best_of_all(claim: str, runs: Cells, etas: list[float], lambdas: list[float]) -> Verdict:
    place = (0.005, 1.0)
    rival = max((at for at in runs if at != place), key=lambda at: _mean(runs[at]))
    verdict = compare_means(claim, runs.get(place), runs[rival])
    numbers = f"{verdict.numbers} (the best other: eta {rival[0]:g}, lambda {rival[1]:g})"
    return Verdict(claim, verdict.verdict, numbers)


def _smaller_is_better(claim: str, runs: Cells, etas: list[float], lambdas: list[float]) -> Verdict:
    pairs = [
        (runs[small, lam], runs[large, lam])
        for lam in lambdas
        if lam != 1
        for small, large in itertools.pairwise(etas)
    ]
    verdicts = [compare_means(claim, small, large).verdict for small, large in pairs]
    better, worse = verdicts.count("holds"), verdicts.count("does not hold")
    numbers = f"from one eta to the next smaller: better {better} times, worse {worse} times of {len(pairs)}"
    if worse:
        return Verdict(claim, "does not hold", numbers)
    return Verdict(claim, "holds" if pairs and better == len(pairs) else "not decided", numbers)


def _best_eta(claim: str, runs: Cells, etas: list[float], lambdas: list[float]) -> Verdict:
    best = [max(etas, key=lambda eta: _mean(runs[eta, lam])) for lam in lambdas]
    numbers = ", ".join(f"{eta:g} for {best.count(eta)} lambdas" for eta in etas if eta in best)
    if not {0.01, 0.05} <= set(etas):
        return Verdict(claim, "not decided", numbers)
    good = set(best) <= {0.01, 0.05} and best.count(0.05) > best.count(0.01)
    return Verdict(claim, "holds" if good else "does not hold", numbers)


def _small_eta_fails(claim: str, runs: Cells, etas: list[float], lambdas: list[float]) -> Verdict:
    small = [_mean(choice) for (eta, _), choice in runs.items() if eta <= 0.001]
    if not small:
        return Verdict(claim, "not decided", "-")
    stuck = sum(accuracy < 0.2 for accuracy in small)
    numbers = f"{stuck} of {len(small)} below 20 %, the best at {100 * max(small):.2f} %"
    return Verdict(claim, "holds" if 2 * stuck > len(small) else "does not hold", numbers)


def _middle_is_good(claim: str, runs: Cells, etas: list[float], lambdas: list[float]) -> Verdict:
    return _good_lambda(claim, runs, [eta for eta in etas if 0.01 <= eta <= 0.05], lambdas, 0.05, GOOD["alexnet"])


_LR_CLAIMS = {
    "lambda = 1 is good (within 0.5 points of the best) for every eta": _one_is_good,
    "best at lambda = 1, eta = 0.005": _best_of_all,
    "for lambda != 1, a smaller eta is better": _smaller_is_better,
}
_ALEXNET_CLAIMS = {
    "most lambdas are best at eta = 0.05, the others at 0.01": _best_eta,
    "at eta <= 0.001 most do not train (below 20 %)": _small_eta_fails,
    "lambda = 0.05 is good (within 2 points of the best) for eta from 0.01 to 0.05": _middle_is_good,
}


def _picture(found: Found, scale: Scale) -> Figure:
    """Draw a heat map for every panel with records: eta down, lambda across, the accuracy written in."""
    from fedagrac.report.heatmaps import HeatMap, plot_heat_maps

    etas, lambdas = ETAS[scale], LAMBDAS[scale]
    maps = []
    for panel, title in PANELS.items():
        runs = _runs(found, panel)
        if runs:
            maps.append(
                HeatMap(
                    title=title,
                    down="eta",
                    rows=tuple(f"{eta:g}" for eta in etas),
                    across="lambda",
                    columns=tuple(f"{lam:g}" for lam in lambdas),
                    values=tuple(tuple(_percent(runs.get((eta, lam))) for lam in lambdas) for eta in etas),
                    what="test accuracy (%), mean of the last 10 rounds",
                )
            )
    return plot_heat_maps(maps, across=2, one_scale=False)


def _percent(choice: Choice | None) -> float | None:
    """Return the accuracy in percent; None where nothing ran, NaN where it diverged."""
    if choice is None:
        return None
    mean = choice.mean()
    return math.nan if mean is None else 100 * mean


RECIPE = Recipe(
    name="figure-lr-lambda",
    title="FedaGrac over eta and lambda: 20 clients, DP1, mean K 500, accuracy of the last 10 of 100 rounds",
    assumptions=(
        "the axes (the figure is not in the paper's source): eta 0.0005 to 0.05, lambda 0.001 to 1",
        "first gradient: the mean of the first local epoch, as in the authors' code",
        "LR: 3 seeds; AlexNet: one seed, and augmentation (crops and flips) as in the authors' code",
        "a lambda is good where it is within 0.5 points (LR) or 2 points (AlexNet) of the best one at that eta",
        "quick: LR alone, 25 rounds, 3 etas by 3 lambdas, one seed; medium: LR alone, one seed; AlexNet runs at "
        "scale paper only",
    ),
    cells=_cells,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
