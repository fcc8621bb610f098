"""The figure of lambda: FedaGrac's accuracy against the calibration rate, 2-layer CNN on Fashion-MNIST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedagrac.paper.fashion import ASSUMPTIONS, PRESPLIT, fashion, first_epoch, start_of, step_counts
from fedagrac.paper.grid import GridPoint, choice, final_accuracy, grid_points, seeded
from fedagrac.paper.judging import compare_means, within
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.runner import run_simulations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RECIPE"]

LAMBDAS = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

PAPER = {  # constant steps: accuracy in % and +-; for step asynchronism the paper has a plot without numbers
    "lambda=0": (77.37, 0.8),
    "lambda=0.001": (77.23, 1.2),
    "lambda=0.005": (77.18, 0.9),
    "lambda=0.01": (77.49, 0.6),
    "lambda=0.05": (78.23, 0.5),
    "lambda=0.1": (78.26, 0.3),
    "lambda=0.5": (77.03, 0.7),
    "lambda=1": (77.29, 0.9),
    "increase": (79.21, 0.4),
}

CONSTANT, LINEAR, UNIFORM = "constant/fedagrac", "linear/fedagrac", "uniform/fedagrac"
TEXT = "linear/fedagrac-text"
"""As the paper's text has it: the first gradient is one stochastic gradient."""

CURVES = {  # how each curve is called in tables and claims
    CONSTANT: "constant steps",
    LINEAR: "K = 250 to 1600",
    TEXT: "K = 250 to 1600, first gradient of one step",
    UNIFORM: "K ~ Uniform(100, 400)",
}

COUNTS: dict[str, dict[str, tuple[int, int, tuple[int, ...]]]] = {  # rounds, step counts divided by, seeds
    "quick": {CONSTANT: (8, 5, (0,)), LINEAR: (8, 25, (0,))},
    "medium": {CONSTANT: (80, 5, (0,)), LINEAR: (48, 10, (0,)), TEXT: (48, 10, (0,)), UNIFORM: (48, 10, (0,))},
    "paper": dict.fromkeys(CURVES, (200, 1, (0, 1, 2))),
}


def _rates(scale: Scale, rounds: int) -> dict[str, float | dict[str, float]]:
    """Return lambda by name; "Increase" is 0.1 for a quarter of the rounds, 0.5 up to three quarters, then 1."""
    tried = (0.0, 0.001, 0.05, 1.0) if scale == "quick" else LAMBDAS
    named: dict[str, float | dict[str, float]] = {f"lambda={value:g}": value for value in tried}
    return {**named, "increase": {"0": 0.1, str(rounds // 4): 0.5, str(3 * rounds // 4): 1.0}}


def _trials(scale: Scale) -> list[Trial]:
    """Return the runs, all curves of one seed before the next seed."""
    trials = []
    for name, (rounds, part, seeds) in COUNTS[scale].items():
        steps = step_counts(name.partition("/")[0], part)
        for label, rate in _rates(scale, rounds).items():
            if name == TEXT and label == "lambda=0":
                continue  # nothing is calibrated, so nothing is estimated
            first: Any = 1 if name == TEXT else first_epoch(part)
            algorithm = {"name": "fedagrac", "calibration": rate, "first_steps": first, **start_of("cnn", scale)}
            trials += seeded(f"{name}/{label}", fashion("cnn", PRESPLIT, steps, rounds, algorithm), seeds)
    return sorted(trials, key=lambda trial: int(trial.settings["seed"]))


def _curve(records: TrialRecords, name: str) -> dict[str, GridPoint]:
    """Return what each lambda gave. At lambda = 0 it does not matter which first gradient is taken."""
    points = {point.setting: point for point in grid_points(records, name)}
    if name == TEXT and points:
        points |= {p.setting: p for p in grid_points(records, LINEAR) if p.setting == "lambda=0"}
    return points


def _table(records: TrialRecords, scale: Scale) -> Table:
    curves = [_curve(records, name) for name in CURVES]
    rows = []
    for label, (accuracy, spread) in PAPER.items():
        ours = [_text(curve.get(label)) for curve in curves]
        rows.append((label, f"{ours[0]} / {accuracy} +- {spread}", *ours[1:]))
    return Table(("lambda", "constant steps ours / paper", *list(CURVES.values())[1:]), tuple(rows))


def _text(point: GridPoint | None) -> str:
    return "-" if point is None else point.percent() + ("" if point.finished else " (cut off)")


def _best(curve: dict[str, GridPoint], labels: tuple[str, ...]) -> GridPoint | None:
    """Return the lambda that is best with the first seed."""
    points = [curve[label] for label in labels if label in curve]
    chosen = max(points, key=lambda point: final_accuracy(point.records[0]) or 0.0, default=None)
    return None if chosen is None else choice(chosen, len(points))


INTERIOR = tuple(f"lambda={value:g}" for value in LAMBDAS[1:-1])
ENDS = ("lambda=0", "lambda=1")


def _claims(records: TrialRecords) -> list[Verdict]:
    curve = _curve(records, CONSTANT)
    middle = _best(curve, ("lambda=0.05", "lambda=0.1"))
    at_best = _best(curve, (*ENDS, *INTERIOR)) if middle and all(end in curve for end in ENDS) else None
    verdicts = [
        _named(compare_means("constant steps: Increase is best", curve.get("increase"), at_best), None, at_best)
    ]
    for end in ENDS:
        claim = f"constant steps: lambda 0.05 or 0.1 is better than {end}"
        verdicts.append(_named(compare_means(claim, middle, curve.get(end)), middle, None))
    for name in (LINEAR, TEXT, UNIFORM):
        curve, words = _curve(records, name), CURVES[name]
        inside = _best(curve, INTERIOR) if "lambda=0.05" in curve else None
        outside = _best(curve, ENDS) if all(end in curve for end in ENDS) else None
        claim = f"{words}: lambda=0.001 ends within 1 point of FedAvg"
        verdicts.append(within(claim, curve.get("lambda=0.001"), curve.get("lambda=0"), 0.01))
        claim = f"{words}: lambda=1 over-calibrates, it ends below the best lambda between"
        verdicts.append(_named(compare_means(claim, inside, curve.get("lambda=1")), inside, None))
        claim = f"{words}: a lambda between 0 and 1 is better than both"
        verdicts.append(_named(compare_means(claim, inside, outside), inside, outside))
    return verdicts


def _named(verdict: Verdict, higher: GridPoint | None, lower: GridPoint | None) -> Verdict:
    """Return the verdict with the names of the lambdas that were chosen as the best."""
    notes = [point.setting for point in (higher, lower) if point is not None]
    numbers = verdict.numbers + (f" (best: {' against '.join(notes)})" if notes else "")
    return Verdict(verdict.claim, verdict.verdict, numbers)


def _picture(records: TrialRecords, scale: Scale) -> Figure:
    """Draw accuracy against lambda: constant steps with the paper's figures, and step asynchronism."""
    from fedagrac.report.pictures import new_figure, paper_style

    with paper_style():
        figure = new_figure(7.4, 3.6)
        left, right = figure.subplots(1, 2)
        theirs = {label: value for label, (value, _) in PAPER.items()}
        _draw(left, theirs, {k: v for k, (_, v) in PAPER.items()}, "paper", "0.45", "s--")
        for axes, name, label, colour, marks, aside in (
            (left, CONSTANT, "ours", "#dd2c22", "o-", 0.0),
            (right, LINEAR, "K = 250 to 1600", "#dd2c22", "o-", -0.2),
            (right, TEXT, "one step's gradient", "#d44a9b", "^-.", 0.0),
            (right, UNIFORM, "K ~ Uniform(100, 400)", "#3b6fb6", "v:", 0.2),
        ):
            curve = _curve(records, name)
            values = {key: 100 * mean for key, c in curve.items() if (mean := c.mean()) is not None}
            bars = {key: 100 * c.half_width() for key, c in curve.items()}
            _draw(axes, values, bars, label, colour, marks)
            _mark_diverged(axes, curve, colour, aside)
        for axes, title in ((left, "constant steps"), (right, "step asynchronism")):
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("calibration rate $\\lambda$")
            axes.set_xticks(range(len(LAMBDAS)), [f"{value:g}" for value in LAMBDAS], fontsize=8)
            axes.set_xlim(-0.4, len(LAMBDAS) - 0.6)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=7.5)
        rounds = COUNTS[scale][CONSTANT][0], COUNTS[scale][LINEAR][0]
        left.set_ylabel(f"test accuracy after {rounds[0]} rounds (%)")
        right.set_ylabel(f"test accuracy after {rounds[1]} rounds (%)")
    return figure


def _mark_diverged(axes: Axes, curve: dict[str, GridPoint], colour: str, aside: float) -> None:
    """Write "diverged" at each lambda whose runs diverged, a little aside so that no two labels overlap."""
    for i, value in enumerate(LAMBDAS):
        point = curve.get(f"lambda={value:g}")
        if point is not None and point.mean() is None:
            place = (i + aside, 0.03)
            axes.annotate(
                "diverged", place, xycoords=("data", "axes fraction"), rotation=90, color=colour, fontsize=7,
                ha="center", va="bottom",
            )  # fmt: skip


def _draw(
    axes: Axes, values: dict[str, float], widths: dict[str, float], label: str, colour: str, marks: str
) -> None:
    """Draw one curve with bars, and the schedule "Increase" as a level."""
    places = {f"lambda={value:g}": i for i, value in enumerate(LAMBDAS)}
    present = [key for key in places if key in values]
    if present:
        aside = 0.06 if label == "paper" else 0.0  # so that bars do not cover each other
        x, y = [places[key] + aside for key in present], [values[key] for key in present]
        bars = [widths.get(key, 0.0) for key in present]
        shown = bars if any(bars) else None
        axes.errorbar(x, y, shown, fmt=marks, color=colour, lw=1.4, ms=4, elinewidth=0.9, capsize=2, label=label)
    if "increase" in values:
        axes.axhline(
            values["increase"], color=colour, lw=1.0, linestyle=(0, (1.2, 1.4)), label=f"{label}: Increase"
        )


RECIPE = Recipe(
    name="figure-lambda",
    title="FedaGrac's accuracy after 200 rounds against lambda, 2-layer CNN, Fashion-MNIST, 10 clients",
    assumptions=(
        *ASSUMPTIONS,
        "accuracy after 200 rounds: the mean of the last 10 evaluations, over 3 seeds; +-: half the width of "
        "the 95 % interval (the paper does not say how it computes its +-)",
        "lambda = 0 is FedaGrac with calibration 0, which is FedAvg",
        "first gradient: the mean of the first local epoch (the authors' code averages up to the end of the pass "
        "over the data that is under way, half an epoch on average), and beside it the paper's "
        "text, one stochastic gradient. With constant steps no client is fast, so none sends a first gradient, "
        "and the two are the same algorithm",
        "quick: 4 values of lambda and Increase, nu from zeros, 8 rounds, step counts divided by 5 (constant) "
        "and 25 (K = 250 to 1600); medium: 80 and 48 rounds, divided by 5 and 10; the first epoch (240 steps) "
        "and Increase's breakpoints shrink along; one seed",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
