"""FedaGrac's accuracy over the learning rate eta and the calibration rate lambda: the paper's heat maps."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedagrac.paper.grid import GridPoint, choice, final_accuracy, grid_points, grid_trials
from fedagrac.paper.intervals import holm
from fedagrac.paper.judging import accuracy_evidence, agreed, compare_means, decide_all, nearly_as_high
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.runner import run_simulations
from fedagrac.paper.table_variance import DP1

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
"""A lambda is good at an eta if it ends this close to the best lambda there."""

GIVE_UP = {"give_up": 15, "target": 0.12}
"""AlexNet: a run that has not reached 12 % after 15 rounds does not train, and ends there."""

ByRates = dict[tuple[float, float], GridPoint]
"""The runs of a panel by eta and lambda."""


def _trials(scale: Scale) -> list[Trial]:
    trials = []
    for panel in PANELS if scale == "paper" else ("lr-async", "lr-constant"):
        model, _, steps = panel.partition("-")
        settings = {
            "data": {
                "name": "a9a" if model == "lr" else "cifar10",
                "clients": 20,
                "partition": {"kind": "dirichlet", "alpha": 0.3} if model == "lr" else DP1,
            },
            "model": {"name": "logistic", "features": 123, "classes": 2} if model == "lr" else {"name": "alexnet"},
            "algorithm": {"name": "fedagrac", "first_steps": "epoch"},
            "steps": STEPS[steps],
            "batch_size": 20 if model == "lr" else 25,
            "rounds": ROUNDS[scale],
            "tf32": model == "alexnet",
            **({} if model == "lr" else GIVE_UP),
        }
        grid = {"lr": ETAS[scale], "calibration": LAMBDAS[scale]}
        trials += grid_trials(f"{panel}/fedagrac", settings, grid, SEEDS[scale] if model == "lr" else [0])
    return trials


def _runs(records: TrialRecords, panel: str) -> ByRates:
    """Return the runs that ended or diverged, by eta and lambda."""
    whole = {name: record for name, record in records.items() if record.finished}
    runs = {}
    for point in grid_points(whole, f"{panel}/fedagrac"):
        used = point.records[0].settings["algorithm"]
        runs[used["lr"], used["calibration"]] = point
    return runs


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for panel in PANELS:
        runs = _runs(records, panel)
        if runs:
            for eta in ETAS[scale]:
                points = [runs.get((eta, lam)) for lam in LAMBDAS[scale]]
                rows.append((panel, f"{eta:g}", *["-" if one is None else one.percent() for one in points]))
    return Table(("panel", "eta", *[f"lambda {lam:g}" for lam in LAMBDAS[scale]]), tuple(rows))


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for panel in PANELS:
        runs = _runs(records, panel)
        etas, lambdas = sorted({eta for eta, _ in runs}), sorted({lam for _, lam in runs})
        complete = len(runs) == len(etas) * len(lambdas) and min(len(etas), len(lambdas)) > 1
        judges = _LR_CLAIMS if panel.startswith("lr") else _ALEXNET_CLAIMS
        for claim, judge_panel in judges.items():
            named = f"{panel}: {claim}"
            if complete:
                verdicts.append(judge_panel(named, runs, etas, lambdas))
            else:
                verdicts.append(Verdict(named, "not decided", "the grid is not complete" if runs else "not run"))
    return verdicts


def _first(point: GridPoint) -> float:
    """Return the accuracy with the first seed, which chooses; a run that diverged has learned nothing."""
    return final_accuracy(point.records[0]) or 0.0


def _good_lambda(
    claim: str, runs: ByRates, etas: list[float], lambdas: list[float], lam: float, good: float
) -> Verdict:
    """Judge that a lambda is nearly as good as the best other one at each of these etas.

    The first seed chooses the best other lambda at every eta, and the other seeds judge. The claim is about all
    etas together, so Holm's correction applies.
    """
    others = [other for other in lambdas if other != lam]
    if lam not in lambdas or not etas or not others:
        return Verdict(claim, "not decided", f"lambda {lam:g} or its etas not run")
    parts, texts = {}, {}
    for eta in etas:
        rival = choice(max((runs[eta, other] for other in others), key=_first), len(others))
        parts[f"eta {eta:g}"], numbers = nearly_as_high(runs[eta, lam], rival, good)
        texts[f"eta {eta:g}"] = f"{numbers} ({rival.setting.split('=')[-1]})"
    worst = min(
        parts, key=lambda eta: (parts[eta].sign, -parts[eta].p if parts[eta].sign < 0 else parts[eta].p, eta)
    )
    numbers = f"against the best other lambda, the least clear at {worst}: {texts[worst]}: {parts[worst].numbers}"
    return decide_all(claim, parts, numbers)


def _one_is_good(claim: str, runs: ByRates, etas: list[float], lambdas: list[float]) -> Verdict:
    return _good_lambda(claim, runs, etas, lambdas, 1.0, GOOD["lr"])


def _best_of_all(claim: str, runs: ByRates, etas: list[float], lambdas: list[float]) -> Verdict:
    place = (0.005, 1.0)
    rival = max((at for at in runs if at != place), key=lambda at: _first(runs[at]))
    verdict = compare_means(claim, runs.get(place), choice(runs[rival], len(runs) - 1))
    numbers = f"{verdict.numbers} (the best other: eta {rival[0]:g}, lambda {rival[1]:g})"
    return Verdict(claim, verdict.verdict, numbers)


def _smaller_is_better(claim: str, runs: ByRates, etas: list[float], lambdas: list[float]) -> Verdict:
    """Judge that each eta is worse than the next smaller one, with Holm's correction over all pairs."""
    parts = {
        f"eta {small:g} against {large:g} at lambda {lam:g}": accuracy_evidence(
            runs[small, lam], runs[large, lam]
        )[0]
        for lam in lambdas
        if lam != 1
        for small, large in itertools.pairwise(etas)
    }
    corrected = holm([part.p for part in parts.values()])
    said = [replace(part, p=p).decided for part, p in zip(parts.values(), corrected, strict=True)]
    seeds = min((part.seeds for part in parts.values()), default=0)
    numbers = (
        f"from one eta to the next smaller: better {said.count(1)} times, worse {said.count(-1)} times of "
        f"{len(said)}, {seeds} seeds"
    )
    return decide_all(claim, parts, numbers)


def _by_seed(runs: ByRates) -> list[dict[tuple[float, float], float]]:
    """Return the accuracies of the whole grid, seed by seed; a run that diverged has learned nothing."""
    points = {at: point.by_seed() for at, point in runs.items()}
    seeds = sorted(set.intersection(*[set(by_seed) for by_seed in points.values()]))
    return [{at: final_accuracy(by_seed[seed]) or 0.0 for at, by_seed in points.items()} for seed in seeds]


def _best_eta(claim: str, runs: ByRates, etas: list[float], lambdas: list[float]) -> Verdict:
    if not {0.01, 0.05} <= set(etas):
        return Verdict(claim, "not decided", "eta 0.01 or 0.05 not run")
    verdicts = []
    for accuracy in _by_seed(runs):
        best = [max(etas, key=lambda eta: accuracy[eta, lam]) for lam in lambdas]
        good = set(best) <= {0.01, 0.05} and best.count(0.05) > best.count(0.01)
        numbers = ", ".join(f"{eta:g} for {best.count(eta)} lambdas" for eta in etas if eta in best)
        verdicts.append(Verdict(claim, "holds" if good else "does not hold", numbers))
    return agreed(verdicts)


def _small_eta_fails(claim: str, runs: ByRates, etas: list[float], lambdas: list[float]) -> Verdict:
    small = {at: point for at, point in runs.items() if at[0] <= 0.001}
    if not small:
        return Verdict(claim, "not decided", "-")
    verdicts = []
    for accuracy in _by_seed(small):
        stuck = sum(value < 0.2 for value in accuracy.values())
        numbers = f"{stuck} of {len(small)} below 20 %, the best at {100 * max(accuracy.values()):.2f} %"
        verdicts.append(Verdict(claim, "holds" if 2 * stuck > len(small) else "does not hold", numbers))
    return agreed(verdicts)


def _middle_is_good(claim: str, runs: ByRates, etas: list[float], lambdas: list[float]) -> Verdict:
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


def _picture(records: TrialRecords, scale: Scale) -> Figure:
    """Draw a heat map of accuracy for every panel with records: eta down, lambda across."""
    from fedagrac.report.heatmaps import HeatMap, plot_heat_maps

    etas, lambdas = ETAS[scale], LAMBDAS[scale]
    maps = []
    for panel, title in PANELS.items():
        runs = _runs(records, panel)
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


def _percent(point: GridPoint | None) -> float | None:
    """Return the accuracy in percent; None where nothing ran, NaN where it diverged."""
    if point is None:
        return None
    mean = point.mean()
    return math.nan if mean is None else 100 * mean


RECIPE = Recipe(
    name="figure-lr-lambda",
    title="FedaGrac over eta and lambda: 20 clients, DP1, mean K 500, accuracy of the last 10 of 100 rounds",
    assumptions=(
        "the axes (the figure is not in the paper's source): eta 0.0005 to 0.05, lambda 0.001 to 1",
        "DP1: for AlexNet as the authors' code draws it (Dirichlet(0.3), balanced, at least 10 samples); for LR "
        "on a9a Dirichlet(0.3) alone",
        "first gradient: the mean of the first local epoch (the authors' code averages up to the end of the pass "
        "over the data that is under way, half an epoch on average)",
        "LR: 3 seeds; AlexNet: one seed, and augmentation (crops and flips) as in the authors' code; an AlexNet "
        "run that has not reached 12 % after 15 rounds ends there",
        "a lambda is good where it is within 0.5 points (LR) or 2 points (AlexNet) of the best other lambda at "
        "that eta. The first seed chooses that lambda, the other seeds judge",
        "quick: LR alone, 25 rounds, 3 etas by 3 lambdas, one seed; medium: LR alone, one seed; AlexNet runs at "
        "scale paper only",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
