"""Accuracy against simulated training time, K ~ Normal(500 or 1000, 10000): AlexNet with DP2, LR with DP1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedagrac.heterogeneity import DeviceProfile
from fedagrac.paper import table_variance
from fedagrac.paper.grid import Choice, best, choices, compare_means, grid_cells
from fedagrac.paper.recipe import Found, Recipe, Scale, Table, Verdict, compare_rounds
from fedagrac.paper.records import Cell, Record
from fedagrac.paper.runner import run_simulations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RECIPE", "times"]

ALGORITHMS = table_variance.ALGORITHMS

PANELS = {
    "alexnet-500": "AlexNet, mean K 500",
    "alexnet-1000": "AlexNet, mean K 1000",
    "lr-500": "LR, mean K 500",
    "lr-1000": "LR, mean K 1000",
}

SHARED = "alexnet-dp2-v10000-fixed"
"""The row of table-variance whose runs are the panel alexnet-500."""

COUNTS: dict[Scale, dict[str, Any]] = {
    "quick": {"rounds": 15, "lr": [0.005, 0.001], "mu": [0.1], "seeds": [0]},
    "medium": {"rounds": 200, "lr": [0.005, 0.001, 0.0005], "mu": [1, 0.1, 0.01], "seeds": [0]},
    "paper": {"rounds": 200, "lr": [0.005, 0.001, 0.0005], "mu": [1, 0.1, 0.01], "seeds": [0, 1, 2]},
}

CLIENT = DeviceProfile("client", step_time=0.001, bandwidth_up=125e6, bandwidth_down=125e6)
"""Every client: 1 ms a step, as the records' clock has it, and 1 Gbit/s each way."""

VECTORS = {"fedagrac": (2, 2), "fedavg": (1, 1), "fednova": (1, 1), "scaffold": (2, 2), "fedprox": (1, 1)}
"""Vectors down and up for the slowest client: it has the largest K, so in FedaGrac it sends its first gradient."""

MARKERS = dict(zip(ALGORITHMS, "osD^v", strict=True))

PARAMETERS = {"alexnet": 7_212_874, "lr": 248}


def _cells(scale: Scale) -> list[Cell]:
    """Return LR's grids and, at the paper's counts, AlexNet's runs: those of table-variance, then mean 1000."""
    found = []
    counts = COUNTS[scale]
    for mean in (500, 1000):
        for name in ALGORITHMS:
            settings = {
                "data": {"name": "a9a", "clients": 20, "partition": {"kind": "dirichlet", "alpha": 0.3}},
                "model": {"name": "logistic", "features": 123, "classes": 2},
                "algorithm": {"name": name, **({"calibration": 1.0} if name == "fedagrac" else {})},
                "steps": {"kind": "gaussian", "mean": mean, "variance": 10000, "mode": "fixed"},
                "batch_size": 20,
                "rounds": counts["rounds"],
            }
            grid = {"lr": counts["lr"], **({"mu": counts["mu"]} if name == "fedprox" else {})}
            found += grid_cells(f"lr-{mean}/{name}", settings, grid, counts["seeds"])
    if scale == "paper":
        shared = [cell for cell in table_variance.RECIPE.cells("paper") if cell.name in _shared_names()]
        found += [replace(cell, recipe=table_variance.RECIPE.name) for cell in shared]
        for cell in shared:
            steps = {**cell.settings["steps"], "mean": 1000}
            name = f"alexnet-1000/{cell.name.rpartition('/')[2]}/lr=0.03/seed0"
            found.append(Cell(name, {**cell.settings, "steps": steps, "stop_at_target": False}))
    return found


def _shared_names() -> list[str]:
    return [f"{SHARED}/{name}" for name in ALGORITHMS]


def _choice(found: Found, panel: str, name: str) -> Choice | None:
    """Return an algorithm's runs in a panel, at its best setting."""
    if panel == "alexnet-500":
        record = found.get(f"{SHARED}/{name}")
        return None if record is None else Choice("lr=0.03", (record,))
    return best(found, f"{panel}/{name}")


def times(record: Record) -> list[float]:
    """Return the simulated seconds at the end of every round of a record, with the wire of `CLIENT`.

    The records' own clock counts 1 ms a step and nothing for the wire. A round lasts until its slowest client has
    downloaded, computed and uploaded; FedaGrac starts with the model down and a full local gradient up.
    """
    name = record.settings["algorithm"]["name"]
    size = 4 * PARAMETERS["alexnet" if record.settings["model"]["name"] == "alexnet" else "lr"]
    down, up = VECTORS[name]
    start = CLIENT.transfer_time(size, size) if name == "fedagrac" else 0.0
    wire = CLIENT.transfer_time(down * size, up * size)
    return [start + computed + number * wire for number, computed in enumerate(record.outcome["sim_time"], 1)]


def _curve(choice: Choice) -> tuple[list[float], list[float]]:
    """Return time and accuracy round by round, means over the seeds."""
    seconds = zip(*[times(record) for record in choice.records], strict=False)
    accuracy = zip(*[record.outcome["accuracy"] for record in choice.records], strict=False)
    pairs = list(zip(seconds, accuracy, strict=False))  # a round that diverged has no accuracy
    return [statistics.fmean(t) for t, _ in pairs], [statistics.fmean(a) for _, a in pairs]


def _bytes_per_round(choice: Choice) -> float:
    return statistics.fmean(record.outcome["bytes_total"] / record.outcome["rounds"] for record in choice.records)


def _ratio(choice: Choice | None, fedavg: Choice | None) -> float | None:
    return None if choice is None or fedavg is None else _bytes_per_round(choice) / _bytes_per_round(fedavg)


def _table(found: Found, scale: Scale) -> Table:
    rows = []
    for panel in PANELS:
        chosen = {name: _choice(found, panel, name) for name in ALGORITHMS}
        there = {name: choice for name, choice in chosen.items() if choice is not None}
        lowest = min((choice.mean() or 0.0 for choice in there.values()), default=0.0)
        common = math.floor(1000 * lowest) / 1000  # in tenths of a percent
        for name, choice in there.items():
            seconds, accuracy = _curve(choice)
            reached = next((t for t, a in zip(seconds, accuracy, strict=True) if a >= common), None)
            tried = len(choices(found, f"{panel}/{name}"))
            ratio = _ratio(choice, chosen["fedavg"])
            rows.append((
                panel,
                name,
                choice.setting + (f" (best of {tried})" if tried > 1 else ""),
                _rounds(choice),
                choice.percent(),
                f"{seconds[-1]:.4g}",
                "-" if reached is None else f"{reached:.4g} ({100 * common:.1f} %)",
                "-" if ratio is None else f"{ratio:.2f}",
            ))  # fmt: skip
    return Table(
        ("panel", "algorithm", "setting", "rounds", "final accuracy %", "seconds in all", "seconds to (accuracy)",
         "bytes per round / FedAvg's"),
        tuple(rows),
    )  # fmt: skip


def _rounds(choice: Choice) -> str:
    """Return how many rounds were run, and whether that was the plan."""
    rounds = min(record.outcome["rounds"] for record in choice.records)
    if not all(record.finished for record in choice.records):
        return f"{rounds} (cut off)"
    return f"{rounds}" + (f" x {len(choice.records)} seeds" if len(choice.records) > 1 else "")


def _claims(found: Found) -> list[Verdict]:
    whole = {name: record for name, record in found.items() if record.finished}
    lr = {p: {n: _choice(whole, p, n) for n in ALGORITHMS} for p in PANELS if p.startswith("lr")}
    verdicts = []
    for panel, chosen in lr.items():
        for low in ("fedavg", "fednova", "fedprox"):
            for high in ("fedagrac", "scaffold"):
                verdicts.append(compare_means(f"{panel}: {high} ends above {low}", chosen[high], chosen[low]))
    verdicts.append(_narrows(lr))
    for panel in ("alexnet-500", "alexnet-1000"):
        verdicts += _alexnet(found, panel)
    for name in ("fedagrac", "scaffold"):
        claim = f"{name} moves about twice FedAvg's bytes per round (nearer to 2 than to 1 or 3)"
        ratios = [_ratio(chosen[name], chosen["fedavg"]) for chosen in lr.values()]
        known = [ratio for ratio in ratios if ratio is not None]
        if not known:
            verdicts.append(Verdict(claim, "not decided", "-"))
            continue
        good = all(1.5 < ratio < 2.5 for ratio in known)
        numbers = ", ".join(f"{ratio:.2f}" for ratio in known) + " with its start"
        verdicts.append(Verdict(claim, "holds" if good else "does not hold", numbers))
    claim = "FedProx costs more computation per step"
    verdicts.append(Verdict(claim, "not decided", "the simulated clock counts every step alike"))
    return verdicts


def _narrows(lr: dict[str, dict[str, Choice | None]]) -> Verdict:
    """Judge the gap between the better two and the other three at both means."""
    claim = "LR: a larger mean narrows the gap between {FedaGrac, SCAFFOLD} and the others but does not close it"
    gaps, noise = [], 0.0
    for chosen in lr.values():
        means = {name: choice.mean() for name, choice in chosen.items() if choice is not None}
        known = {name: mean for name, mean in means.items() if mean is not None}
        if len(known) < len(ALGORITHMS):
            return Verdict(claim, "not decided", "-")
        high = min(known[name] for name in ("fedagrac", "scaffold"))
        gaps.append(high - max(known[name] for name in ("fedavg", "fednova", "fedprox")))
        noise = max(noise, *[choice.spread() for choice in chosen.values() if choice is not None])
    numbers = f"{100 * gaps[0]:.2f} points at 500, {100 * gaps[1]:.2f} at 1000"
    if min(abs(gaps[0] - gaps[1]), abs(gaps[1])) <= noise:
        return Verdict(claim, "not decided", f"{numbers}: within the spread of the seeds ({100 * noise:.2f})")
    return Verdict(claim, "holds" if 0 < gaps[1] < gaps[0] else "does not hold", numbers)


def _alexnet(found: Found, panel: str) -> list[Verdict]:
    chosen = {name: _choice(found, panel, name) for name in ALGORITHMS}
    runs = {name: None if choice is None else choice.records[0] for name, choice in chosen.items()}
    if not any(runs.values()):
        claim = f"{panel}: FedaGrac starts slowly and then needs fewer rounds for the same accuracy"
        return [Verdict(claim, "not decided", "not run")]
    claim = f"{panel}: FedaGrac starts slowly (after 10 rounds below FedAvg)"
    early = [run.outcome["accuracy"][9:10] if run else [] for run in (runs["fedagrac"], runs["fedavg"])]
    if all(early):
        (mine,), (theirs,) = early
        numbers = f"{100 * mine:.2f} against {100 * theirs:.2f}"
        verdicts = [Verdict(claim, "holds" if mine < theirs else "does not hold", numbers)]
    else:
        verdicts = [Verdict(claim, "not decided", "-")]
    for name in ALGORITHMS[1:]:
        claim = f"{panel}: FedaGrac needs fewer rounds to 70 % than {name}"
        verdicts.append(compare_rounds(claim, runs["fedagrac"], runs[name]))
    return verdicts


def _picture(found: Found, scale: Scale) -> Figure:
    """Draw accuracy against simulated time, a panel for each that has records; a marker every 10 rounds."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fedagrac.report.pictures import paper_style, stroke
    from fedagrac.report.style import look_of

    chosen = {panel: {name: _choice(found, panel, name) for name in ALGORITHMS} for panel in PANELS}
    panels = [panel for panel in PANELS if any(chosen[panel].values())]
    with paper_style():
        figure = Figure(figsize=(0.4 + 2.6 * max(2, len(panels)), 2.9), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name, choice in chosen[panel].items():
                if choice is not None:
                    _draw(axes, name, *_curve(choice))
            axes.set_title(PANELS[panel], fontsize=9)
            axes.set_xlabel("simulated time (s)")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("test accuracy (%)")
        drawn = [name for name in ALGORITHMS if any(chosen[panel][name] for panel in panels)]
        handles = [
            Line2D([], [], label=name, marker=MARKERS[name], ms=4, **stroke(look_of(name))) for name in drawn
        ]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(drawn), frameon=False, handlelength=3)
    return figure


def _draw(axes: Axes, name: str, seconds: Sequence[float], accuracy: Sequence[float]) -> None:
    from fedagrac.report.pictures import stroke
    from fedagrac.report.style import look_of

    axes.plot(
        seconds,
        [100 * a for a in accuracy],
        **stroke(look_of(name)),
        marker=MARKERS[name],
        markevery=(9, 10),
        ms=3.5,
    )


RECIPE = Recipe(
    name="figure-time",
    title="Accuracy against simulated training time: 20 clients, K ~ Normal(500 or 1000, 10000) drawn once",
    assumptions=(
        "simulated time: a step takes a client 1 ms, its wire moves 1 Gbit/s each way, and a round lasts until "
        "the slowest client is done; the paper's seconds are those of one cluster",
        "bytes as this package counts them: FedaGrac's slow clients send one vector up, its fast clients two; the "
        "paper counts two each way for every client of FedaGrac and SCAFFOLD, 2.00 times FedAvg's",
        "FedProx's extra computation per step is not modelled",
        "FedaGrac begins with a full local gradient of every client, charged to its start",
        "LR: every algorithm at its best of eta 0.005, 0.001, 0.0005 (FedProx: with mu 1, 0.1, 0.01), lambda = 1, "
        "3 seeds; final accuracy: mean of the last 10 rounds",
        "seconds to (accuracy): until the curve first reaches the lowest final accuracy of the panel",
        "AlexNet: eta = 0.03, one seed and the other settings of table-variance; at mean 500 the very runs of "
        "that table, which end at 70 %",
        "quick: LR alone, 15 rounds, eta 0.005 and 0.001, mu 0.1, one seed; medium: LR alone, one seed; AlexNet "
        "runs at scale paper only",
    ),
    cells=_cells,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
)
