"""Accuracy against simulated training time, K ~ Normal(500 or 1000, 10000): AlexNet with DP2, LR with DP1."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedagrac.heterogeneity import DeviceProfile
from fedagrac.paper import table_variance
from fedagrac.paper.grid import GridPoint, best, grid_trials, seeded
from fedagrac.paper.intervals import Interval
from fedagrac.paper.judging import compare_means, compare_rounds, decide_all, judge, of_differences
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial, TrialRecord
from fedagrac.paper.runner import run_simulations

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedagrac.report.style import Look

__all__ = ["RECIPE", "times"]

ALGORITHMS = tuple(name for name in table_variance.ALGORITHMS if name != "fedagrac-text")
CORRECTED = ("fedagrac", "scaffold", "scaffold-full")
UNCORRECTED = ("fedavg", "fednova", "fedprox")

PANELS = {
    "alexnet-500": "AlexNet, mean K 500",
    "alexnet-1000": "AlexNet, mean K 1000",
    "lr-500": "LR, mean K 500",
    "lr-1000": "LR, mean K 1000",
}

SHARED = "-".join(table_variance.SHARED)
"""The row of table-variance whose runs with eta = 0.03 and seed 0 are the panel alexnet-500."""

COUNTS: dict[Scale, dict[str, Any]] = {
    "quick": {"rounds": 15, "lr": [0.005, 0.001], "mu": [0.1], "seeds": [0]},
    "medium": {"rounds": 200, "lr": [0.005, 0.001, 0.0005], "mu": [1, 0.1, 0.01], "seeds": [0]},
    "paper": {"rounds": 200, "lr": [0.005, 0.001, 0.0005], "mu": [1, 0.1, 0.01], "seeds": [0, 1, 2]},
}

MORE_SEEDS = range(3, 7)
"""Seeds that run LR at the settings which seed 0 has found best; with two of the grid's seeds they judge."""

CLIENT = DeviceProfile("client", step_time=0.001, bandwidth_up=125e6, bandwidth_down=125e6)
"""Every client: 1 ms a step, as in the records, and 1 Gbit/s each way."""

VECTORS = {"fedagrac": (2, 2), "fedavg": (1, 1), "fednova": (1, 1), "scaffold": (2, 2), "fedprox": (1, 1)}
"""Vectors down and up for the slowest client: it has the largest K, so in FedaGrac it sends its first gradient."""

MARKERS = dict(zip(ALGORITHMS, "osD^v<", strict=True))

PARAMETERS = {"alexnet": 7_212_874, "lr": 248}


def _trials(scale: Scale) -> list[Trial]:
    """Return LR's grids and, at the paper's counts, AlexNet's runs: those of table-variance, then mean 1000."""
    trials = []
    counts = COUNTS[scale]
    for mean in (500, 1000):
        for name in ALGORITHMS:
            algorithm = table_variance.ALGORITHMS[name]
            settings = {
                "data": {"name": "a9a", "clients": 20, "partition": {"kind": "dirichlet", "alpha": 0.3}},
                "model": {"name": "logistic", "features": 123, "classes": 2},
                "algorithm": {"name": name, "calibration": 1.0} if name == "fedagrac" else algorithm,
                "steps": {"kind": "gaussian", "mean": mean, "variance": 10000, "mode": "fixed"},
                "batch_size": 20,
                "rounds": counts["rounds"],
            }
            grid = {"lr": counts["lr"], **({"mu": counts["mu"]} if name == "fedprox" else {})}
            trials += grid_trials(f"lr-{mean}/{name}", settings, grid, counts["seeds"])
    if scale == "paper":
        trials += [replace(trial, recipe=table_variance.RECIPE.name) for trial in _shared()]
        for trial in _shared():
            steps = {**trial.settings["steps"], "mean": 1000}
            name = trial.name.replace(SHARED, "alexnet-1000")
            trials.append(Trial(name, {**trial.settings, "steps": steps, "stop_at_target": False}))
    return trials


def _following(scale: Scale, records: TrialRecords) -> list[Trial]:
    """Return more seeds of logistic regression at the settings that the first seed has found best."""
    trials: list[Trial] = []
    planned = [trial for trial in _trials(scale) if trial.name.startswith("lr-")] if scale == "paper" else []
    cells: dict[str, list[Trial]] = {}
    for trial in planned:
        if trial.settings["seed"] == 0:
            cells.setdefault("/".join(trial.name.split("/")[:2]), []).append(trial)
    for cell, firsts in cells.items():
        if any(first.name not in records or not records[first.name].finished for first in firsts):
            continue
        chosen = best(records, cell)
        for first in firsts:
            if chosen is not None and first.name == f"{cell}/{chosen.setting}/seed0":
                data = {key: value for key, value in first.settings["data"].items() if key != "seed"}
                trials += seeded(f"{cell}/{chosen.setting}", {**first.settings, "data": data}, MORE_SEEDS)
    return trials


def _shared() -> list[Trial]:
    """Return the runs of table-variance that are shown here: each algorithm once, at eta = 0.03 with seed 0."""
    firsts: dict[str, Trial] = {}
    for trial in table_variance.RECIPE.trials("paper"):
        row, name, setting, seed = trial.name.split("/")
        if row == SHARED and name in ALGORITHMS and setting.startswith("lr=0.03") and seed == "seed0":
            firsts.setdefault(name, trial)
    return [firsts[name] for name in ALGORITHMS]


def _point(records: TrialRecords, panel: str, name: str) -> GridPoint | None:
    """Return an algorithm's runs in a panel at its best setting."""
    return best(records, f"{SHARED if panel == 'alexnet-500' else panel}/{name}")


def times(record: TrialRecord) -> list[float]:
    """Return the simulated seconds at the end of every round of a record, with the wire of `CLIENT`.

    The records' own clock counts 1 ms a step and nothing for the wire. A round lasts until its slowest client has
    downloaded, computed and uploaded. A start from full gradients begins with the model down and a gradient up.
    """
    name = record.settings["algorithm"]["name"]
    full = record.settings["algorithm"].get("init", "full" if name == "fedagrac" else "zeros") == "full"
    size = 4 * PARAMETERS["alexnet" if record.settings["model"]["name"] == "alexnet" else "lr"]
    down, up = VECTORS[name]
    start = CLIENT.transfer_time(size, size) if full else 0.0
    wire = CLIENT.transfer_time(down * size, up * size)
    return [start + computed + number * wire for number, computed in enumerate(record.outcome["sim_time"], 1)]


def _curve(point: GridPoint) -> tuple[list[float], list[float]]:
    """Return time and accuracy round by round, averaged over the seeds."""
    seconds = zip(*[times(record) for record in point.records], strict=False)
    accuracy = zip(*[record.outcome["accuracy"] for record in point.records], strict=False)
    pairs = list(zip(seconds, accuracy, strict=False))  # a round that diverged has no accuracy
    return [statistics.fmean(t) for t, _ in pairs], [statistics.fmean(a) for _, a in pairs]


def _ratios(point: GridPoint | None, fedavg: GridPoint | None) -> list[float]:
    """Return the bytes of a round against FedAvg's, seed by seed."""
    if point is None or fedavg is None:
        return []
    ours, theirs = (
        {seed: run.outcome["bytes_total"] / run.outcome["rounds"] for seed, run in one.by_seed().items()}
        for one in (point, fedavg)
    )
    return [ours[seed] / theirs[seed] for seed in sorted(ours.keys() & theirs.keys())]


def _stopped(record: TrialRecord) -> bool:
    """Return whether a run ended at its target, so that it has no final accuracy."""
    return bool(record.settings.get("stop_at_target")) and record.outcome["rounds"] < record.settings["rounds"]


def _spread(values: Sequence[float], digits: int = 4) -> str:
    """Return a mean, and half of its 95 % interval where there are several values."""
    if not values:
        return "-"
    interval = Interval.of(values)
    return f"{interval.mean:.{digits}g}" + (f" +- {interval.half:.3g}" if len(values) > 1 else "")


def _seconds_to(point: GridPoint, accuracy: float) -> str:
    """Return the seconds until the runs first reach an accuracy."""
    reached = []
    for record in point.records:
        pairs = zip(times(record), record.outcome["accuracy"], strict=False)
        reached += [next((t for t, a in pairs if a >= accuracy), math.nan)]
    known = [t for t in reached if not math.isnan(t)]
    if not known:
        return "-"
    text = _spread(known)
    if len(known) < len(reached):
        span = f"{min(known):.4g} to {max(known):.4g}" if len(known) > 1 else f"{known[0]:.4g}"
        text = f"{span} by {len(known)} of {len(reached)} seeds"
    return f"{text} ({100 * accuracy:.1f} %)"


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for panel in PANELS:
        chosen = {name: _point(records, panel, name) for name in ALGORITHMS}
        present = {name: point for name, point in chosen.items() if point is not None}
        whole = [point for point in present.values() if not any(map(_stopped, point.records))]
        lowest = min((point.mean() or 0.0 for point in whole), default=0.0)
        common = math.floor(1000 * lowest) / 1000  # in tenths of a percent
        for name, point in present.items():
            tried = point.rivals
            stopped = any(map(_stopped, point.records))
            rows.append((
                panel,
                name,
                point.setting + (f" (best of {tried})" if tried > 1 else ""),
                _rounds(point),
                f"stopped at {point.records[0].settings['target']:.0%}" if stopped else point.percent(),
                _spread([times(record)[-1] for record in point.records]),
                _seconds_to(point, common) if common else "-",
                _spread(_ratios(point, chosen["fedavg"]), 3),
            ))  # fmt: skip
    return Table(
        ("panel", "algorithm", "setting", "rounds", "final accuracy %", "seconds in all", "seconds to (accuracy)",
         "bytes per round / FedAvg's"),
        tuple(rows),
    )  # fmt: skip


def _rounds(point: GridPoint) -> str:
    """Return how many rounds were run, over how many seeds, and whether they were cut off."""
    rounds = min(record.outcome["rounds"] for record in point.records)
    if not all(record.finished for record in point.records):
        return f"{rounds} (cut off)"
    return f"{rounds}" + (f" x {len(point.records)} seeds" if len(point.records) > 1 else "")


def _claims(records: TrialRecords) -> list[Verdict]:
    whole = {name: record for name, record in records.items() if record.finished}
    lr = {p: {n: _point(whole, p, n) for n in ALGORITHMS} for p in PANELS if p.startswith("lr")}
    verdicts = []
    for panel, chosen in lr.items():
        for low in UNCORRECTED:
            for high in CORRECTED:
                verdicts.append(compare_means(f"{panel}: {high} ends above {low}", chosen[high], chosen[low]))
        for rival in ("scaffold", "scaffold-full"):
            claim = f"{panel}: fedagrac ends above {rival}"
            verdicts.append(compare_means(claim, chosen["fedagrac"], chosen[rival]))
    verdicts += _narrows(lr)
    for panel in ("alexnet-500", "alexnet-1000"):
        verdicts += _alexnet(records, panel)
    verdicts += [_twice(name, lr) for name in ("fedagrac", "scaffold")]
    claim = "FedProx costs more computation per step"
    verdicts.append(Verdict(claim, "not decided", "the simulated clock counts every step alike"))
    return verdicts


def _twice(name: str, lr: dict[str, dict[str, GridPoint | None]]) -> Verdict:
    """Judge that an algorithm moves about twice FedAvg's bytes; settings do not matter, so all seeds judge."""
    claim = f"{name} moves about twice FedAvg's bytes per round (nearer to 2 than to 1 or 3)"
    ratios = {panel: _ratios(chosen[name], chosen["fedavg"]) for panel, chosen in lr.items()}
    parts = {p: of_differences([0.5 - abs(ratio - 2) for ratio in some]) for p, some in ratios.items() if some}
    shown = ", ".join(f"{_spread(ratios[panel], 3)} ({panel}, {len(ratios[panel])} seeds)" for panel in parts)
    return decide_all(claim, parts, f"{shown or '-'}, with its start")


def _gaps(chosen: dict[str, GridPoint | None]) -> dict[int, float]:
    """Return, seed by seed, how far the worse of FedaGrac and SCAFFOLD ends above the best of the other three."""
    finals = {
        name: {seed: run.outcome["final"] for seed, run in point.by_seed().items()}
        for name, point in chosen.items()
        if point is not None and name != "scaffold-full"
    }
    if len(finals) < len(ALGORITHMS) - 1:
        return {}
    seeds = sorted(set.intersection(*[set(runs) for runs in finals.values()]))
    gaps = {}
    for seed in seeds[1:] or seeds:  # the first seed chose the settings
        at = {name: runs[seed] or 0.0 for name, runs in finals.items()}
        gaps[seed] = min(at["fedagrac"], at["scaffold"]) - max(at[name] for name in UNCORRECTED)
    return gaps


def _narrows(lr: dict[str, dict[str, GridPoint | None]]) -> list[Verdict]:
    """Judge the gap between FedaGrac and SCAFFOLD and the other three at both means."""
    short, long = (_gaps(chosen) for chosen in lr.values())
    subject = "the gap between {FedaGrac, SCAFFOLD} and the others"
    claims = f"LR: a larger mean narrows {subject}", f"LR: a larger mean does not close {subject}"
    if not (short and long):
        return [Verdict(claim, "not decided", "-") for claim in claims]
    numbers = [f"{100 * statistics.fmean(gaps.values()):.2f} points" for gaps in (short, long)]
    narrower = [short[seed] - long[seed] for seed in short.keys() & long.keys()]
    return [
        judge(claims[0], narrower, f"{numbers[0]} at 500, {numbers[1]} at 1000", unit=100),
        judge(claims[1], list(long.values()), f"{numbers[1]} at 1000", unit=100),
    ]


def _alexnet(records: TrialRecords, panel: str) -> list[Verdict]:
    chosen = {name: _point(records, panel, name) for name in ALGORITHMS}
    if not any(chosen.values()):
        claim = f"{panel}: FedaGrac starts slowly and then needs fewer rounds for the same accuracy"
        return [Verdict(claim, "not decided", "not run")]
    claim = f"{panel}: FedaGrac starts slowly (after 10 rounds below FedAvg)"
    early = [
        {} if point is None else {s: r.outcome["accuracy"][9] for s, r in point.by_seed().items() if _has_ten(r)}
        for point in (chosen["fedavg"], chosen["fedagrac"])
    ]
    seeds = sorted(early[0].keys() & early[1].keys())
    numbers = " against ".join(_mean_percent([at[seed] for seed in seeds]) for at in reversed(early))
    verdicts = [judge(claim, [early[0][seed] - early[1][seed] for seed in seeds], numbers, unit=100)]
    for name in ALGORITHMS[1:]:
        claim = f"{panel}: FedaGrac needs fewer rounds to 70 % than {name}"
        verdicts.append(compare_rounds(claim, chosen["fedagrac"], chosen[name]))
    return verdicts


def _has_ten(record: TrialRecord) -> bool:
    return len(record.outcome["accuracy"]) >= 10


def _mean_percent(values: list[float]) -> str:
    return f"{100 * statistics.fmean(values):.2f}" if values else "-"


def _picture(records: TrialRecords, scale: Scale) -> Figure:
    """Draw accuracy against simulated time in every panel that has records, with a marker every 10 rounds."""
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fedagrac.report.pictures import paper_style, stroke

    chosen = {panel: {name: _point(records, panel, name) for name in ALGORITHMS} for panel in PANELS}
    panels = [panel for panel in PANELS if any(chosen[panel].values())]
    with paper_style():
        figure = Figure(figsize=(0.4 + 2.6 * max(2, len(panels)), 2.9), layout="constrained")
        for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
            for name, point in chosen[panel].items():
                if point is not None:
                    _draw(axes, name, *_curve(point))
            axes.set_title(PANELS[panel], fontsize=9)
            axes.set_xlabel("simulated time (s)")
            axes.grid(alpha=0.25)
            axes.spines[["top", "right"]].set_visible(False)
        figure.axes[0].set_ylabel("test accuracy (%)")
        drawn = [name for name in ALGORITHMS if any(chosen[panel][name] for panel in panels)]
        handles = [Line2D([], [], label=name, marker=MARKERS[name], ms=4, **stroke(_look(name))) for name in drawn]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(drawn), frameon=False, handlelength=3)
    return figure


def _look(name: str) -> Look:
    """Return how an algorithm is drawn: SCAFFOLD from full gradients in its colour, dotted."""
    from fedagrac.report.style import Look, look_of

    return Look(look_of("scaffold").colour, (1.2, 1.4)) if name == "scaffold-full" else look_of(name)


def _draw(axes: Axes, name: str, seconds: Sequence[float], accuracy: Sequence[float]) -> None:
    from fedagrac.report.pictures import stroke

    axes.plot(
        seconds,
        [100 * a for a in accuracy],
        **stroke(_look(name)),
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
        "FedaGrac starts from a full local gradient of every client, whose transfer counts; SCAFFOLD starts "
        "from zeros, and beside it from full gradients too (scaffold-full)",
        "LR: Dirichlet(0.3) without balance, every algorithm at its best of eta 0.005, 0.001, 0.0005 (FedProx: "
        "with mu 1, 0.1, 0.01), lambda = 1, 3 seeds; the first seed chooses the setting, the other two judge, and "
        "four more at that setting once they have been run; final accuracy: mean of the last 10 rounds",
        "seconds to (accuracy): until a run first reaches the lowest final accuracy of the panel, which runs that "
        "stopped at their target do not have",
        "AlexNet: eta = 0.03, one seed and the other settings of table-variance; at mean 500 the runs of that "
        "table, which stop in the first round at 70 % and so have no final accuracy to compare",
        "quick: LR alone, 15 rounds, eta 0.005 and 0.001, mu 0.1, one seed; medium: LR alone, one seed; AlexNet "
        "runs at scale paper only",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=run_simulations,
    picture=_picture,
    following=_following,
)
