"""The figure of estimators: four ways to estimate the global orientation, LR and CNN on Fashion-MNIST."""

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

ALGORITHMS = ("fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse")

PANELS = {  # as the paper's (a) to (d): model, whether steps are uneven
    "lr-constant": ("lr", False),
    "cnn-constant": ("cnn", False),
    "lr-async": ("lr", True),
    "cnn-async": ("cnn", True),
}

READINGS = {"epoch": "first epoch's gradient", "one": "one step's gradient"}

CALIBRATION = {"lr": 1.0, "cnn": 0.05}

COUNTS: dict[str, dict[str, tuple[int, int, tuple[int, ...]]]] = {  # rounds, step counts divided by, seeds
    "quick": {
        "lr-constant": (15, 5, (0,)),
        "cnn-constant": (4, 25, (0,)),
        "lr-async": (15, 5, (0,)),
        "cnn-async": (4, 25, (0,)),
    },
    "medium": {
        "lr-constant": (100, 1, (0, 1, 2)),
        "cnn-constant": (50, 5, (0,)),
        "lr-async": (100, 1, (0,)),
        "cnn-async": (50, 5, (0,)),
    },
    "paper": {
        "lr-constant": (200, 1, (0, 1, 2)),
        "cnn-constant": (200, 1, (0, 1, 2)),
        "lr-async": (200, 1, (0, 1, 2)),
        "cnn-async": (200, 1, (0,)),
    },
}


def _reads(panel: str, name: str, reading: str) -> str:
    """Return the reading that a run is made for: "epoch" where nobody sends a first gradient in any case.

    FedaGrac-avg never sends one; FedaGrac has its fast clients send it, and with constant steps none is fast.
    """
    if name == "fedagrac-avg" or (name == "fedagrac" and not PANELS[panel][1]):
        return "epoch"
    return reading


def _cells(scale: Scale) -> list[Cell]:
    found = []
    for panel, (model, uneven) in PANELS.items():
        rounds, part, seeds = COUNTS[scale][panel]
        for reading in READINGS:
            first: Any = 1 if reading == "one" else first_epoch(part)
            for name in ALGORITHMS:
                if _reads(panel, name, reading) != reading:
                    continue
                algorithm = {"name": name, "calibration": CALIBRATION[model], "first_steps": first}
                algorithm |= start_of(model, scale)
                settings = fashion(model, DP1, step_counts(uneven, part), rounds, algorithm)
                found += seeded(f"{panel}/{name}/{reading}", settings, seeds)
    return found


def _choice(found: Found, panel: str, name: str, reading: str) -> Choice | None:
    wanted = _reads(panel, name, reading)
    return next((c for c in choices(found, f"{panel}/{name}") if c.setting == wanted), None)


def _table(found: Found, scale: Scale) -> Table:
    rows = []
    for panel in PANELS:
        for reading, words in READINGS.items():
            four = [_choice(found, panel, name, reading) for name in ALGORITHMS]
            texts = ["-" if c is None else c.percent() + ("" if c.finished else " (cut off)") for c in four]
            rows.append((panel, words, *texts))
    return Table(("panel", "first gradient", *ALGORITHMS), tuple(rows))


def _claims(found: Found) -> list[Verdict]:
    verdicts = []
    for panel, (_, uneven) in PANELS.items():
        for reading, words in READINGS.items():
            four = {name: _choice(found, panel, name, reading) for name in ALGORITHMS}
            if not uneven:
                verdicts.append(_alike(f"{panel}, {words}: no considerable difference (below 1 point)", four))
                continue
            for name in ALGORITHMS[1:]:
                claim = f"{panel}, {words}: FedaGrac is ahead of {name}"
                verdicts.append(compare_means(claim, four["fedagrac"], four[name]))
    return verdicts


def _alike(claim: str, four: dict[str, Choice | None]) -> Verdict:
    there = [choice for choice in four.values() if choice is not None and choice.finished]
    if len(there) < len(four):
        return Verdict(claim, "not decided", "-")
    means = [mean for choice in there if (mean := choice.mean()) is not None]
    if len(means) < len(four):
        return Verdict(claim, "does not hold" if means else "not decided", f"{len(four) - len(means)} diverged")
    gap = max(means) - min(means)
    numbers = f"largest gap {100 * gap:.2f} points"
    if gap < 0.01:
        return Verdict(claim, "holds", numbers)
    if gap - 0.01 < max(choice.spread() for choice in there):
        return Verdict(claim, "not decided", f"{numbers}, closer to 1 than the seeds' spread")
    return Verdict(claim, "does not hold", numbers)


def _picture(found: Found, scale: Scale) -> Figure:
    """Draw accuracy against rounds: a column for each panel with records, a row for each reading."""
    from fedagrac.report.pictures import add_legend, new_figure, paper_style
    from fedagrac.report.style import look_of

    there = {
        panel: about for panel, about in PANELS.items() if any(name.startswith(panel) for name in found)
    } or PANELS
    with paper_style():
        figure = new_figure(max(5.2, 0.4 + 2.3 * len(there)), 4.6)
        grid = figure.subplots(2, len(there), sharex="col", sharey="col", squeeze=False)
        for column, (panel, (model, uneven)) in zip(grid.T, there.items(), strict=True):
            drawn: list[float] = []
            for axes, reading in zip(column, READINGS, strict=True):
                for name in ALGORITHMS:
                    choice = _choice(found, panel, name, reading)
                    drawn += [] if choice is None else _draw(axes, choice, name)
                axes.grid(alpha=0.25)
                axes.spines[["top", "right"]].set_visible(False)
            if drawn:  # the first climb is left out: it would flatten the rest
                drawn.sort()
                column[0].set_ylim(max(0.0, drawn[len(drawn) // 6] - 1), min(100.0, drawn[-1] + 1))
            title = f"{'LR' if model == 'lr' else '2-layer CNN'}, {'step async' if uneven else 'constant steps'}"
            column[0].set_title(title, fontsize=9)
            column[1].set_xlabel("round")
        for axes, words in zip(grid[:, 0], READINGS.values(), strict=True):
            axes.set_ylabel(f"{words}\ntest accuracy (%)")
        add_legend(figure, [(name, look_of(name)) for name in ALGORITHMS], "outside lower center", 4)
    return figure


def _draw(axes: Axes, choice: Choice, name: str) -> list[float]:
    """Draw the mean over the seeds, and a band from the lowest to the highest; return the mean."""
    from fedagrac.report.pictures import stroke
    from fedagrac.report.style import look_of

    curves = [record.outcome["accuracy"] for record in choice.records]
    columns = list(zip(*curves, strict=False))  # the rounds that all seeds have
    x, mean = range(1, len(columns) + 1), [100 * sum(column) / len(column) for column in columns]
    look = look_of(name)
    # thin lines over the thick one: they nearly coincide
    axes.plot(x, mean, **stroke(look) | {"lw": 0.6 * look.width, "zorder": 5 - look.width})
    if len(curves) > 1:
        low, high = [100 * min(c) for c in columns], [100 * max(c) for c in columns]
        axes.fill_between(x, low, high, color=look.colour, alpha=0.15, lw=0)
    return mean


RECIPE = Recipe(
    name="figure-estimators",
    title="Four estimates of the global orientation, LR and 2-layer CNN, Fashion-MNIST, 10 clients, 200 rounds",
    assumptions=(
        "10 clients, batch size 25, K = 100 or K_i = 100 + 150 i as in table1; non-iid data: Dirichlet(0.3)",
        "200 rounds (not stated); lambda = 1 for LR and 0.05 for the CNN, the paper's choices for convex and "
        "other objectives; compared by the mean of the last 10 evaluations",
        "first gradient: the mean of the first local epoch, as in the authors' code, and beside it the paper's "
        "text, one stochastic gradient",
        "with constant steps nobody is fast, so FedaGrac and FedaGrac-avg are the same algorithm, and so are "
        "FedaGrac-first and FedaGrac-reverse; with the epoch's gradient all four are, up to rounding, where a "
        "local epoch (240 steps on average) is no shorter than K = 100. Runs of the CNN then differ by their "
        "dropout only",
        "3 seeds, one for the CNN with step asynchronism",
        "quick: LR 15 rounds with step counts divided by 5, CNN 4 rounds divided by 25 and nu from zeros; "
        "medium: LR 100 rounds, CNN 50 rounds divided by 5; the first epoch shrinks along; one seed (medium: 3 "
        "for LR with constant steps)",
    ),
    cells=_cells,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
