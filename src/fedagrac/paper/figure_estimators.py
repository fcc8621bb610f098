"""The figure of estimators: four ways to estimate the global orientation, LR and CNN on Fashion-MNIST."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from fedagrac.paper.fashion import (
    ASSUMPTIONS,
    AUTHORS_SPLIT,
    AUTHORS_STEPS,
    PRESPLIT,
    STEPS,
    fashion,
    first_epoch,
    start_of,
    step_counts,
)
from fedagrac.paper.grid import GridPoint, grid_points, seeded
from fedagrac.paper.judging import all_within, compare_means
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.runner import run_simulations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RECIPE"]

ALGORITHMS = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse")

PANELS = {  # model and step counts: the paper's (a) to (d), then the authors' other step counts
    "lr-constant": ("lr", "constant"),
    "cnn-constant": ("cnn", "constant"),
    "lr-linear": ("lr", "linear"),
    "cnn-linear": ("cnn", "linear"),
    "lr-uniform": ("lr", "uniform"),
    "cnn-uniform": ("cnn", "uniform"),
}

READINGS = {"epoch": "first epoch's gradient", "one": "one step's gradient"}

CALIBRATION = {"lr": 1.0, "cnn": 0.05}

AUTHORS = "authors-lr"
"""The panel that runs as the authors' code does: their split, their K_i, cyclic batches, nu from zeros."""

AUTHORS_WORDS = "authors' code"

AUTHORS_ROUNDS = 50

OPTION_ONE = "scaffold-one"

FIVE: dict[str, dict[str, Any]] = {
    **{name: {"name": name, "calibration": 1.0, "first_steps": "pass", "init": "zeros"} for name in ALGORITHMS},
    OPTION_ONE: {"name": "scaffold", "option": "I"},
}
"""What runs there: the four estimates, and SCAFFOLD's option I (its option II is FedaGrac-avg)."""

COUNTS: dict[str, dict[str, tuple[int, int, tuple[int, ...]]]] = {
    # by model: rounds, step counts divided by, seeds
    "quick": {"lr": (15, 5, (0,)), "cnn": (4, 25, (0,))},
    "medium": {"lr": (100, 1, (0,)), "cnn": (50, 5, (0,))},
    "paper": {"lr": (200, 1, (0, 1, 2)), "cnn": (200, 1, (0, 1, 2))},
}


def _reads(panel: str, name: str, reading: str) -> str:
    """Return the reading that a run is made for: "epoch" where no client sends a first gradient in any case.

    FedaGrac-avg never sends one. In FedaGrac the fast clients send it, and with constant steps none is fast.
    """
    if name == "fedagrac-avg" or (name == "fedagrac" and PANELS[panel][1] == "constant"):
        return "epoch"
    return reading


def _panels(scale: Scale) -> list[str]:
    """Return the panels that are run at a scale."""
    return [panel for panel, (_, kind) in PANELS.items() if scale != "quick" or kind != "uniform"]


def _trials(scale: Scale) -> list[Trial]:
    """Return the runs, all panels of one seed before the next seed."""
    trials = []
    for panel in _panels(scale):
        model, kind = PANELS[panel]
        rounds, part, seeds = COUNTS[scale][model]
        for reading in READINGS:
            first: Any = 1 if reading == "one" else first_epoch(part)
            for name in ALGORITHMS:
                if _reads(panel, name, reading) != reading:
                    continue
                algorithm = {"name": name, "calibration": CALIBRATION[model], "first_steps": first}
                algorithm |= start_of(model, scale)
                settings = fashion(model, PRESPLIT, step_counts(kind, part), rounds, algorithm)
                trials += seeded(f"{panel}/{name}/{reading}", settings, seeds)
    trials.sort(key=lambda trial: int(trial.settings["seed"]))
    return trials + _authors_trials() if scale == "paper" else trials


def _authors_trials() -> list[Trial]:
    """Return the runs of the panel of the authors' code, seed by seed."""
    trials = []
    for name, algorithm in FIVE.items():
        settings = fashion("lr", PRESPLIT, AUTHORS_STEPS, AUTHORS_ROUNDS, algorithm)
        settings |= {"data": {**settings["data"], **AUTHORS_SPLIT}, "sampling": "cyclic"}
        trials += seeded(f"{AUTHORS}/{name}/pass", settings, COUNTS["paper"]["lr"][2])
    return sorted(trials, key=lambda trial: int(trial.settings["seed"]))


def _authors_points(records: TrialRecords) -> dict[str, GridPoint | None]:
    """Return the runs of the panel of the authors' code by their names."""
    return {name: next(iter(grid_points(records, f"{AUTHORS}/{name}")), None) for name in FIVE}


def _shown(point: GridPoint | None) -> str:
    return "-" if point is None else point.percent() + ("" if point.finished else " (cut off)")


def _point(records: TrialRecords, panel: str, name: str, reading: str) -> GridPoint | None:
    wanted = _reads(panel, name, reading)
    return next((c for c in grid_points(records, f"{panel}/{name}") if c.setting == wanted), None)


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for panel in PANELS:
        for reading, words in READINGS.items():
            four = [_point(records, panel, name, reading) for name in ALGORITHMS]
            rows.append((panel, words, *map(_shown, four), ""))
    if scale == "paper":
        rows.append((AUTHORS, AUTHORS_WORDS, *map(_shown, _authors_points(records).values())))
    return Table(("panel", "first gradient", *ALGORITHMS, "SCAFFOLD option I"), tuple(rows))


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for panel, (_, kind) in PANELS.items():
        for reading, words in READINGS.items():
            four = {name: _point(records, panel, name, reading) for name in ALGORITHMS}
            if kind == "constant":
                verdicts.append(_alike(f"{panel}, {words}: no considerable difference (below 1 point)", four))
                continue
            for name in ALGORITHMS[1:]:
                claim = f"{panel}, {words}: FedaGrac is ahead of {name}"
                verdicts.append(compare_means(claim, four["fedagrac"], four[name]))
    five = _authors_points(records)
    for name in list(FIVE)[1:]:
        claim = f"{AUTHORS}, {AUTHORS_WORDS}: FedaGrac is ahead of {name}"
        verdicts.append(compare_means(claim, five["fedagrac"], five[name]))
    return verdicts


def _alike(claim: str, four: dict[str, GridPoint | None]) -> Verdict:
    """Judge that all four estimates end within one point of each other."""
    finished = {name: point for name, point in four.items() if point is not None and point.finished}
    if len(finished) < len(four):
        return Verdict(claim, "not decided", "-")
    return all_within(claim, finished, 0.01)


def _picture(records: TrialRecords, scale: Scale) -> Figure:
    """Draw accuracy against rounds: a column for each panel with records, a row for each reading."""
    from fedagrac.report.pictures import add_legend, new_figure, paper_style
    from fedagrac.report.style import look_of

    shown = {
        panel: about for panel, about in PANELS.items() if any(name.startswith(panel) for name in records)
    } or PANELS
    with paper_style():
        figure = new_figure(max(5.2, 0.4 + 2.3 * len(shown)), 4.6)
        grid = figure.subplots(2, len(shown), sharex="col", sharey="col", squeeze=False)
        for column, (panel, (model, kind)) in zip(grid.T, shown.items(), strict=True):
            drawn: list[float] = []
            for axes, reading in zip(column, READINGS, strict=True):
                for name in ALGORITHMS:
                    point = _point(records, panel, name, reading)
                    drawn += [] if point is None else _draw(axes, point, name)
                axes.grid(alpha=0.25)
                axes.spines[["top", "right"]].set_visible(False)
            if drawn:  # leave out the first climb, which would flatten the rest
                drawn.sort()
                column[0].set_ylim(max(0.0, drawn[len(drawn) // 6] - 1), min(100.0, drawn[-1] + 1))
            column[0].set_title(f"{'LR' if model == 'lr' else '2-layer CNN'}\n{STEPS[kind]}", fontsize=9)
            column[1].set_xlabel("round")
        for axes, words in zip(grid[:, 0], READINGS.values(), strict=True):
            axes.set_ylabel(f"{words}\ntest accuracy (%)")
        add_legend(figure, [(name, look_of(name)) for name in ALGORITHMS], "outside lower center", 4)
    return figure


def _draw(axes: Axes, point: GridPoint, name: str) -> list[float]:
    """Draw the mean over the seeds and a band from the lowest to the highest, and return the mean."""
    from fedagrac.report.pictures import stroke
    from fedagrac.report.style import look_of

    curves = [record.outcome["accuracy"] for record in point.records]
    columns = list(zip(*curves, strict=False))  # the rounds that all seeds have
    x, mean = range(1, len(columns) + 1), [100 * sum(column) / len(column) for column in columns]
    look = look_of(name)
    # thin lines over the thick one, because they nearly coincide
    axes.plot(x, mean, **stroke(look) | {"lw": 0.6 * look.width, "zorder": 5 - look.width})
    if len(curves) > 1:
        low, high = [100 * min(c) for c in columns], [100 * max(c) for c in columns]
        axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0)
    return mean


RECIPE = Recipe(
    name="figure-estimators",
    title="Four estimates of the global orientation, LR and 2-layer CNN, Fashion-MNIST, 10 clients, 200 rounds",
    assumptions=(
        *ASSUMPTIONS,
        "200 rounds (not stated); lambda = 1 for LR and 0.05 for the CNN, the paper's choices for convex and "
        "other objectives; compared by the mean of the last 10 evaluations over 3 seeds",
        "first gradient: the mean of the first local epoch, and beside it the paper's text, one stochastic "
        "gradient",
        f"{AUTHORS} runs LR as the authors' public code does (github.com/HarliWu/FedaGrac): its split sample by "
        "sample, its K_i ~ Uniform(100, 400), batches in a fixed order that continue from round to round, nu from "
        "zeros, and a first gradient that averages up to the end of the pass over the data that is under way (one "
        f"stochastic gradient if that pass does not end within the round); lambda = 1, {AUTHORS_ROUNDS} rounds. "
        "There FedaGrac-avg is SCAFFOLD with option II",
        "with constant steps no client is fast, so FedaGrac and FedaGrac-avg are the same algorithm, and so are "
        "FedaGrac-first and FedaGrac-reverse. With the epoch's gradient, a client whose local epoch is no "
        "shorter than K = 100 sends the same estimate in all four. Such runs of the CNN differ by their dropout "
        "alone",
        "quick: LR 15 rounds with step counts divided by 5, CNN 4 rounds divided by 25 and nu from zeros, "
        "without Uniform(100, 400); medium: LR 100 rounds, CNN 50 rounds divided by 5; the first epoch shrinks "
        "along; one seed",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
