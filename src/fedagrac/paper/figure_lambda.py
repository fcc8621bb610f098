"""The figure of lambda: FedaGrac's accuracy against the calibration rate, 2-layer CNN on Fashion-MNIST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedagrac.paper.fashion import DP1, fashion, first_epoch, start_of, step_counts
from fedagrac.paper.grid import Choice, choices, compare_means, seeded
from fedagrac.paper.recipe import Found, Recipe, Scale, Table, Verdict
from fedagrac.paper.records import Cell
from fedagrac.paper.runner import run_simulations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RECIPE"]

LAMBDAS = (0.0, 0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0)

PAPER = {  # constant steps: accuracy in % and +-; of step asynchronism there is a plot without numbers
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

CONSTANT, ASYNC = "constant/fedagrac", "async/fedagrac"
TEXT = "async/fedagrac-text"

COUNTS: dict[str, dict[str, tuple[int, int, tuple[int, ...]]]] = {  # rounds, step counts divided by, seeds
    "quick": {CONSTANT: (8, 5, (0,)), ASYNC: (8, 25, (0,))},
    "medium": {CONSTANT: (80, 5, (0,)), ASYNC: (48, 10, (0,)), TEXT: (48, 10, (0,))},
    "paper": {CONSTANT: (200, 1, (0, 1, 2)), ASYNC: (200, 1, (0,)), TEXT: (200, 1, (0,))},
}


def _rates(scale: Scale, rounds: int) -> dict[str, float | dict[str, float]]:
    """Return lambda by name; "Increase" is 0.1 for a quarter of the rounds, 0.5 up to three quarters, then 1."""
    tried = (0.0, 0.001, 0.05, 1.0) if scale == "quick" else LAMBDAS
    named: dict[str, float | dict[str, float]] = {f"lambda={value:g}": value for value in tried}
    return {**named, "increase": {"0": 0.1, str(rounds // 4): 0.5, str(3 * rounds // 4): 1.0}}


def _cells(scale: Scale) -> list[Cell]:
    found = []
    for name, (rounds, part, seeds) in COUNTS[scale].items():
        steps = step_counts(name != CONSTANT, part)
        for label, rate in _rates(scale, rounds).items():
            if name == TEXT and label == "lambda=0":
                continue  # nothing is calibrated, so nothing is estimated
            first: Any = 1 if name == TEXT else first_epoch(part)
            algorithm = {"name": "fedagrac", "calibration": rate, "first_steps": first, **start_of("cnn", scale)}
            found += seeded(f"{name}/{label}", fashion("cnn", DP1, steps, rounds, algorithm), seeds)
    return found


def _curve(found: Found, name: str) -> dict[str, Choice]:
    """Return what each lambda gave; one stochastic gradient changes nothing where nothing is calibrated."""
    there = {choice.setting: choice for choice in choices(found, name)}
    if name == TEXT and there:
        there |= {c.setting: c for c in choices(found, ASYNC) if c.setting == "lambda=0"}
    return there


def _table(found: Found, scale: Scale) -> Table:
    curves = [_curve(found, name) for name in (CONSTANT, ASYNC, TEXT)]
    rows = []
    for label, (accuracy, spread) in PAPER.items():
        ours = [_text(curve.get(label)) for curve in curves]
        rows.append((label, f"{ours[0]} / {accuracy} +- {spread}", *ours[1:]))
    columns = "lambda", "constant steps ours / paper", "step async", "step async, first gradient of one step"
    return Table(columns, tuple(rows))


def _text(choice: Choice | None) -> str:
    return "-" if choice is None else choice.percent() + ("" if choice.finished else " (cut off)")


def _best(curve: dict[str, Choice], labels: tuple[str, ...]) -> Choice | None:
    there = [curve[label] for label in labels if label in curve]
    return max(there, key=lambda choice: choice.mean() or 0.0, default=None)


INTERIOR = tuple(f"lambda={value:g}" for value in LAMBDAS[1:-1])
ENDS = ("lambda=0", "lambda=1")


def _claims(found: Found) -> list[Verdict]:
    curve = _curve(found, CONSTANT)
    middle = _best(curve, ("lambda=0.05", "lambda=0.1"))
    at_best = _best(curve, (*ENDS, *INTERIOR)) if middle and all(end in curve for end in ENDS) else None
    verdicts = [
        _named(compare_means("constant steps: Increase is best", curve.get("increase"), at_best), None, at_best)
    ]
    for end in ENDS:
        claim = f"constant steps: lambda 0.05 or 0.1 is better than {end}"
        verdicts.append(_named(compare_means(claim, middle, curve.get(end)), middle, None))
    for name, reading in ((ASYNC, "step async"), (TEXT, "step async, first gradient of one step")):
        curve = _curve(found, name)
        inside = _best(curve, INTERIOR) if "lambda=0.05" in curve else None
        outside = _best(curve, ENDS) if all(end in curve for end in ENDS) else None
        verdicts.append(_like_fedavg(f"{reading}: lambda=0.001 ends within 1 point of FedAvg", curve))
        claim = f"{reading}: lambda=1 over-calibrates, it ends below the best lambda between"
        verdicts.append(_named(compare_means(claim, inside, curve.get("lambda=1")), inside, None))
        claim = f"{reading}: a lambda between 0 and 1 is better than both"
        verdicts.append(_named(compare_means(claim, inside, outside), inside, outside))
    return verdicts


def _like_fedavg(claim: str, curve: dict[str, Choice]) -> Verdict:
    small, none = curve.get("lambda=0.001"), curve.get("lambda=0")
    numbers = f"{_text(small)} against {_text(none)}"
    if small is None or none is None or not (small.finished and none.finished):
        return Verdict(claim, "not decided", numbers)
    a, b = small.mean(), none.mean()
    if a is None or b is None:
        return Verdict(claim, "not decided", numbers)
    if abs(a - b) <= 0.01:
        return Verdict(claim, "holds", numbers)
    noisy = abs(a - b) - 0.01 < max(small.spread(), none.spread())
    return Verdict(claim, "not decided" if noisy else "does not hold", numbers)


def _named(verdict: Verdict, higher: Choice | None, lower: Choice | None) -> Verdict:
    """Say which lambda was the best."""
    notes = [choice.setting for choice in (higher, lower) if choice is not None]
    numbers = verdict.numbers + (f" (best: {' against '.join(notes)})" if notes else "")
    return Verdict(verdict.claim, verdict.verdict, numbers)


def _picture(found: Found, scale: Scale) -> Figure:
    """Draw accuracy against lambda: constant steps with the paper's figures, and step asynchronism."""
    from fedagrac.report.pictures import new_figure, paper_style

    with paper_style():
        figure = new_figure(7.4, 3.6)
        left, right = figure.subplots(1, 2)
        theirs = {label: value for label, (value, _) in PAPER.items()}
        _draw(left, theirs, {k: v for k, (_, v) in PAPER.items()}, "paper", "0.45", "s--")
        for axes, name, label, colour, marks in (
            (left, CONSTANT, "ours", "#dd2c22", "o-"),
            (right, ASYNC, "first epoch's gradient", "#dd2c22", "o-"),
            (right, TEXT, "one step's gradient", "#d44a9b", "^-."),
        ):
            curve = _curve(found, name)
            values = {key: 100 * mean for key, c in curve.items() if (mean := c.mean()) is not None}
            spreads = {key: 100 * c.spread() for key, c in curve.items()}
            _draw(axes, values, spreads, label, colour, marks)
            _mark_diverged(axes, curve, colour)
        for axes, title in ((left, "constant steps"), (right, "step asynchronism")):
            axes.set_title(title, fontsize=9)
            axes.set_xlabel("calibration rate $\\lambda$")
            axes.set_xticks(range(len(LAMBDAS)), [f"{value:g}" for value in LAMBDAS], fontsize=8)
            axes.set_xlim(-0.4, len(LAMBDAS) - 0.6)
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
            if axes.get_legend_handles_labels()[0]:
                axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.2), ncols=2, frameon=False, fontsize=7.5)
        rounds = COUNTS[scale][CONSTANT][0], COUNTS[scale][ASYNC][0]
        left.set_ylabel(f"test accuracy after {rounds[0]} rounds (%)")
        right.set_ylabel(f"test accuracy after {rounds[1]} rounds (%)")
    return figure


def _mark_diverged(axes: Axes, curve: dict[str, Choice], colour: str) -> None:
    """Say at which lambda a run diverged; the second curve of a panel says it beside the first."""
    for i, value in enumerate(LAMBDAS):
        choice = curve.get(f"lambda={value:g}")
        if choice is not None and choice.mean() is None:
            place = (i + (0.16 if colour != "#dd2c22" else -0.16), 0.03)
            axes.annotate(
                "diverged", place, xycoords=("data", "axes fraction"), rotation=90, color=colour, fontsize=7,
                ha="center", va="bottom",
            )  # fmt: skip


def _draw(
    axes: Axes, values: dict[str, float], spreads: dict[str, float], label: str, colour: str, marks: str
) -> None:
    """Draw one curve with bars of its spread, and the schedule "Increase" as a level."""
    places = {f"lambda={value:g}": i for i, value in enumerate(LAMBDAS)}
    there = [key for key in places if key in values]
    if there:
        aside = 0.06 if label == "paper" else 0.0  # so that bars do not cover each other
        x, y = [places[key] + aside for key in there], [values[key] for key in there]
        bars = [spreads.get(key, 0.0) for key in there]
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
        "10 clients, batch size 25, K = 100 or K_i = 100 + 150 i as in table1; non-iid data: Dirichlet(0.3)",
        "accuracy after 200 rounds: the mean of the last 10 evaluations; +-: standard deviation over seeds, 3 "
        "with constant steps, one with step asynchronism",
        "lambda = 0 is FedaGrac with calibration 0, which is FedAvg",
        "first gradient: the mean of the first local epoch, as in the authors' code, and beside it the paper's "
        "text, one stochastic gradient; with constant steps nobody is fast, nobody sends a first gradient, and "
        "the two are the same algorithm",
        "quick: 5 values of lambda, nu from zeros, 8 rounds, step counts divided by 5 (constant) and 25 (step "
        "async); medium: 80 and 48 rounds, divided by 5 and 10; the first epoch (240 steps) and Increase's "
        "breakpoints shrink along; one seed",
    ),
    cells=_cells,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
