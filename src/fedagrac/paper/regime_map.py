"""When does FedaGrac beat SCAFFOLD from the same start? A map over fleets: how much faster, how many are fast.

The paper has no such figure. It compares the two at one kind of fleet for each data set.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from fedagrac.paper.gaps import a9a_settings, run_gaps
from fedagrac.paper.intervals import Interval, holm
from fedagrac.paper.judging import LEAST_SEEDS, decide_all, of_differences, of_signs
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.runner import one_by_one

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["RECIPE", "Advantage", "two_speeds"]

CLIENTS = 20
RATIOS = (10, 100, 30, 3)
"""How many times as many steps a fast client makes; in the order in which they are run."""

FAST = (1, 10, 19, 4, 16)
"""How many of the 20 clients are fast, in the order in which they are run."""

COUNTS: dict[Scale, dict[str, Any]] = {  # Kbar, the rounds after which F - F* is kept, and what is run
    "quick": {"mean": 20, "at": [5, 10], "ratios": (10,), "fast": (1, 10), "etas": (0.1,), "seeds": 1},
    "medium": {"mean": 100, "at": [20, 60], "ratios": (10, 100), "fast": (1, 10, 19), "etas": (0.03,), "seeds": 2},
    "paper": {
        "mean": 100, "at": [20, 60], "ratios": RATIOS, "fast": FAST, "etas": (0.01, 0.03, 0.1), "seeds": 10,
    },
}  # fmt: skip

LONG: dict[str, Any] = {"mean": 500, "at": [20], "eta": 0.02, "ratios": RATIOS, "fast": (10, 19, 1, 16, 4)}
"""Rounds of several local epochs, at the paper's counts alone: there a first gradient differs from the mean."""

MIDDLE = {"quick": 0.1, "medium": 0.03, "paper": 0.03}
"""The eta at which the other starts and first gradients are compared."""

ESTIMATORS = {"hybrid": "fedagrac", "first": "fedagrac-first", "reverse": "fedagrac-reverse"}
"""What differs from SCAFFOLD; FedaGrac-avg at lambda = 1 from the same start is SCAFFOLD."""

MARGIN = 0.05
"""Two algorithms are level where the 95 % interval of the ratio of their F - F* is within so much of 1."""

LARGEST = 100.0
"""A run that diverged counts with this F - F*; then the sign test judges."""


def two_speeds(ratio: int, fast: int, mean: int) -> list[int]:
    """Return the steps of 20 clients, `fast` of which make `ratio` times the steps of the others.

    The mean over the clients stays near `mean`, so that fleets of one map do the same work.

    Examples:
        >>> two_speeds(10, 1, 100)[:2], two_speeds(100, 19, 100)[-2:], set(two_speeds(1, 5, 100))
        ([690, 69], [105, 1], {100})
    """
    slow = mean / (1 + (ratio - 1) * fast / CLIENTS)
    return [max(1, round(ratio * slow))] * fast + [max(1, round(slow))] * (CLIENTS - fast)


def _algorithms(etas: Sequence[float], starts: Sequence[str], firsts: Sequence[int | str]) -> dict[str, Any]:
    """Return algorithms by names such as "hybrid/full/epoch/0.03"; SCAFFOLD runs where epochs do."""
    tables: dict[str, Any] = {}
    for eta in etas:
        for start in starts:
            if "epoch" in firsts:
                tables[f"scaffold/{start}/{eta:g}"] = {"name": "scaffold", "init": start, "lr": eta}
            for name, registered in ESTIMATORS.items():
                for first in firsts:
                    tables[f"{name}/{start}/{first}/{eta:g}"] = {
                        "name": registered, "init": start, "first_steps": first, "lr": eta,
                    }  # fmt: skip
    return tables


def _fleets(scale: Scale) -> list[tuple[str, int, int]]:
    """Return the fleets by name: ratio and number of fast clients. With ratio 1 there is one fleet."""
    fleets = _named(COUNTS[scale])
    return [*fleets, ("ratio1", 1, 0)] if scale == "paper" else fleets


def _named(counts: dict[str, Any]) -> list[tuple[str, int, int]]:
    return [(f"ratio{r}-fast{f}", r, f) for r in counts["ratios"] for f in counts["fast"]]


def _cells(
    part: str,
    fleets: Sequence[tuple[str, int, int]],
    mean: int,
    at: list[int],
    algorithms: dict[str, Any],
    seeds: int,
) -> list[Trial]:
    """Return the runs of one part, fleet by fleet, each with all its seeds."""
    trials = []
    for name, ratio, fast in fleets:
        for seed in range(seeds):
            steps = {"kind": "explicit", "table": [two_speeds(ratio, fast, mean)]}
            settings = a9a_settings(CLIENTS, steps, at, algorithms, seed)
            trials.append(Trial(f"{part}/{name}/seed{seed}", settings))
    return trials


def _trials(scale: Scale) -> list[Trial]:
    """Return the runs: the map, long rounds, the other starts and first gradients, then both of these."""
    counts, middle = COUNTS[scale], [MIDDLE[scale]]
    forms = _algorithms(middle, ["zeros"], ["epoch"]) | _algorithms(middle, ["full"], [1, 20])
    parts = {
        "map": _algorithms(counts["etas"], ["full"], ["epoch"]),
        "forms": forms,
        "zeros": _algorithms(middle, ["zeros"], [1, 20]),
    }
    trials = []
    for part, algorithms in parts.items():
        trials += _cells(part, _fleets(scale), counts["mean"], counts["at"], algorithms, counts["seeds"])
        if part == "map" and scale == "paper":
            long = _algorithms([LONG["eta"]], ["full"], ["epoch"])
            trials += _cells("long", _named(LONG), LONG["mean"], LONG["at"], long, counts["seeds"])
    return trials


class Advantage:
    """How far one algorithm is ahead of another in one fleet: log(F - F*) of the other less that of the one.

    Where a run diverged, the sign test judges.

    Examples:
        >>> ahead = Advantage([0.5, 0.7, 0.6])
        >>> ahead.sign, str(ahead)
        (1, '-45% [-57%, -30%]')
        >>> Advantage([0.5, -0.5, 0.1]).sign, Advantage([]).sign, Advantage([0.01, 0.0, -0.01]).level
        (0, 0, True)
    """

    def __init__(self, logs: Sequence[float], diverged: bool = False) -> None:
        self.seeds = len(logs)
        self.interval = Interval.of(logs) if logs else None
        wins, losses = sum(log > 0 for log in logs), sum(log < 0 for log in logs)
        self.evidence = of_signs(wins, losses, len(logs), "ahead") if diverged else of_differences(logs)
        self.diverged = diverged

    @property
    def mean(self) -> float:
        """The mean over the seeds; 0 without seeds."""
        return 0.0 if self.interval is None else self.interval.mean

    @property
    def sign(self) -> int:
        """1 where it is ahead, -1 where it is behind, 0 where the seeds do not decide."""
        return self.evidence.decided

    @property
    def level(self) -> bool:
        """Whether the whole 95 % interval is within 5 % of the other."""
        if self.interval is None or self.seeds < LEAST_SEEDS or self.diverged:
            return False
        return max(abs(math.expm1(-self.interval.low)), abs(math.expm1(-self.interval.high))) < MARGIN

    def __str__(self) -> str:
        """Return by how much F - F* is smaller or larger than the other's, with its 95 % interval."""
        if self.interval is None:
            return "-"
        if self.diverged:
            return f"diverged with some seeds, {self.evidence.numbers}"
        if not math.isfinite(self.interval.half):
            return f"{_percent(self.interval.mean)} (one seed)"
        low, high = _percent(self.interval.high), _percent(self.interval.low)
        return f"{_percent(self.interval.mean)} [{low}, {high}]"

    @property
    def cell(self) -> str:
        """The same with the number of seeds."""
        return f"{self} ({self.seeds} seeds)" if self.seeds > 1 else str(self)


def _percent(log: float) -> str:
    return f"{100 * math.expm1(-log):+.0f}%"


def advantage(records: TrialRecords, fleet: str, one: str, other: str, after: int | None = None) -> Advantage:
    """Return how far an algorithm is ahead of another in a fleet, after the last kept round or after this one."""
    by_seed: dict[str, dict[str, float]] = {}
    for name, record in records.items():
        _, cell, seed = name.split("/")
        at = record.settings["at"]
        if cell == fleet and record.finished and (after is None or after in at):
            needed = len(at) - 1 if after is None else at.index(after)
            kept = {key: _gap(gaps, needed) for key, gaps in record.outcome["gaps"].items()}
            by_seed.setdefault(seed, {}).update(kept)
    pairs = [(gaps[other], gaps[one]) for gaps in by_seed.values() if one in gaps and other in gaps]
    logs = [math.log(theirs / ours) for theirs, ours in pairs]
    return Advantage(logs, diverged=any(LARGEST in pair for pair in pairs))


def _gap(gaps: Sequence[float], point: int) -> float:
    """Return F - F* after a kept round; a large one for a run that did not come so far."""
    value = gaps[point] if len(gaps) > point else LARGEST
    return min(max(value, 1e-12), LARGEST) if math.isfinite(value) else LARGEST


def _words(ratio: int, fast: int) -> tuple[str, str]:
    return (f"{ratio} x", f"{100 * fast // CLIENTS} %") if fast else ("1 x", "all alike")


def _ordered(scale: Scale) -> list[tuple[str, int, int]]:
    return sorted(_fleets(scale), key=lambda fleet: fleet[1:])


def _table(records: TrialRecords, scale: Scale) -> Table:
    rows = []
    for fleet, ratio, fast in _ordered(scale):
        steps = two_speeds(ratio, fast, COUNTS[scale]["mean"])
        texts = [
            advantage(records, fleet, f"{name}/full/epoch/{eta:g}", f"scaffold/full/{eta:g}").cell
            for eta in COUNTS[scale]["etas"]
            for name in ESTIMATORS
        ]
        if scale == "paper":
            eta = LONG["eta"]
            pairs = [(f"{name}/full/epoch/{eta:g}", f"scaffold/full/{eta:g}") for name in ESTIMATORS]
            texts += [advantage(records, fleet, *pair).cell for pair in pairs]
        rows.append((*_words(ratio, fast), f"{steps[0]} and {steps[-1]}", *texts))
    titles = [f"{name}, eta {eta:g}" for eta in COUNTS[scale]["etas"] for name in ESTIMATORS]
    if scale == "paper":
        titles += [f"{name}, K x 5, eta {LONG['eta']:g}, 20 rounds" for name in ESTIMATORS]
    return Table(("fast clients make", "share that is fast", "K", *titles), tuple(rows))


def _judge_all(
    claim: str, records: TrialRecords, one: str, other: str, counts: dict[str, Any], after: int | None = None
) -> Verdict:
    """Judge that an algorithm is ahead in every fleet, with Holm's correction over the fleets.

    One fleet where it is behind decides against it.
    """
    fleets = {fleet: words_of(ratio, fast) for fleet, ratio, fast in _named(counts)}
    found = {fleet: advantage(records, fleet, one, other, after) for fleet in sorted(fleets)}
    found = {fleet: ahead for fleet, ahead in found.items() if ahead.seeds > 1}
    if not found:
        return Verdict(claim, "not decided", "-")
    corrected = holm([ahead.evidence.p for ahead in found.values()])
    signs = [replace(a.evidence, p=p).decided for a, p in zip(found.values(), corrected, strict=True)]
    level = sum(ahead.level for ahead, sign in zip(found.values(), signs, strict=True) if sign == 0)
    rest = f"within {MARGIN:.0%} in {level}, not decided in {signs.count(0) - level}"
    run = (
        f"{len(found)} fleets" if len(found) == len(fleets) else f"{len(found)} fleets run ({len(fleets)} planned)"
    )
    numbers = f"of {run} ahead in {signs.count(1)}, behind in {signs.count(-1)}, {rest}"
    for word, sign in (("best", 1), ("worst", -1)):
        chosen = max(found, key=lambda fleet: sign * found[fleet].mean)
        numbers += f"; {word}, {fleets[chosen]}: {found[chosen]}, {found[chosen].seeds} seeds"
    parts = {fleets[fleet]: ahead.evidence for fleet, ahead in found.items()}
    seeds = min(ahead.seeds for ahead in found.values())
    brief = f"ahead in {signs.count(1)} of {len(found)}, behind in {signs.count(-1)}, "
    brief += f"within {MARGIN:.0%} in {level}, {seeds} seeds"
    return replace(decide_all(claim, parts, numbers, len(fleets)), brief=brief)


def words_of(ratio: int, fast: int) -> str:
    """Return a fleet in words.

    Examples:
        >>> words_of(100, 4)
        '4 of 20 clients 100 times as fast'
    """
    return f"{fast} of {CLIENTS} clients {ratio} times as fast"


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for eta in COUNTS["paper"]["etas"]:
        for name in ESTIMATORS:
            claim = (
                f"eta {eta:g}: {name} from full gradients is ahead of SCAFFOLD from full gradients in every fleet"
            )
            verdicts.append(
                _judge_all(claim, records, f"{name}/full/epoch/{eta:g}", f"scaffold/full/{eta:g}", COUNTS["paper"])
            )
    early = COUNTS["paper"]["at"][0]
    for eta in COUNTS["paper"]["etas"]:
        claim = (
            f"eta {eta:g}, after {early} rounds: hybrid is ahead of SCAFFOLD, both from full gradients, everywhere"
        )
        pair = f"hybrid/full/epoch/{eta:g}", f"scaffold/full/{eta:g}"
        verdicts.append(_judge_all(claim, records, *pair, COUNTS["paper"], early))
    eta = LONG["eta"]
    for name in ESTIMATORS:
        claim = (
            f"K x 5, eta {eta:g}, 20 rounds: {name} is ahead of SCAFFOLD, both from full gradients, in every fleet"
        )
        verdicts.append(_judge_all(claim, records, f"{name}/full/epoch/{eta:g}", f"scaffold/full/{eta:g}", LONG))
    eta = MIDDLE["paper"]
    for name in ESTIMATORS:
        claim = f"eta {eta:g}: {name} from zeros is ahead of SCAFFOLD from zeros in every fleet"
        verdicts.append(
            _judge_all(claim, records, f"{name}/zeros/epoch/{eta:g}", f"scaffold/zeros/{eta:g}", COUNTS["paper"])
        )
    claim = f"eta {eta:g}: SCAFFOLD from full gradients is ahead of SCAFFOLD from zeros in every fleet"
    verdicts.append(
        _judge_all(claim, records, f"scaffold/full/{eta:g}", f"scaffold/zeros/{eta:g}", COUNTS["paper"])
    )
    for first, words in ((1, "one step's"), (20, "20 steps'")):
        claim = f"eta {eta:g}, from full gradients: hybrid with {words} first gradient is ahead of SCAFFOLD"
        pair = f"hybrid/full/{first}/{eta:g}", f"scaffold/full/{eta:g}"
        verdicts.append(_judge_all(claim + " in every fleet", records, *pair, COUNTS["paper"]))
    for start, begun in (("full", "from full gradients"), ("zeros", "from zeros")):
        for first, words in ((1, "one step's"), (20, "20 steps'")):
            claim = f"eta {eta:g}, {begun}: hybrid with an epoch's first gradient is ahead of that with {words}"
            pair = f"hybrid/{start}/epoch/{eta:g}", f"hybrid/{start}/{first}/{eta:g}"
            verdicts.append(_judge_all(claim + " in every fleet", records, *pair, COUNTS["paper"]))
    return verdicts


def _picture(records: TrialRecords, scale: Scale) -> Figure:
    """Draw a map per row and estimator: blue where F - F* is below SCAFFOLD's, red where it is above."""
    from fedagrac.report.pictures import new_figure, paper_style

    rows = [(f"eta {eta:g}", eta, "full", "epoch") for eta in COUNTS[scale]["etas"]]
    if scale == "paper":
        eta = MIDDLE[scale]
        rows.append((f"K x 5, eta {LONG['eta']:g}, 20 rounds", LONG["eta"], "full", "epoch"))
        rows.append((f"eta {eta:g}, both from zeros", eta, "zeros", "epoch"))
        rows += [(f"eta {eta:g}, first_steps={first}", eta, "full", str(first)) for first in (20, 1)]
    with paper_style():
        figure = new_figure(2.3 * len(ESTIMATORS) + 0.9, 1.9 * len(rows) + 0.5)
        grid = figure.subplots(len(rows), len(ESTIMATORS), sharex=True, sharey=True, squeeze=False)
        for row, (words, eta, start, first) in zip(grid, rows, strict=True):
            for axes, name in zip(row, ESTIMATORS, strict=True):
                pair = f"{name}/{start}/{first}/{eta:g}", f"scaffold/{start}/{eta:g}"
                image = _draw(axes, records, scale, *pair)
                axes.set_title(f"{name}, {words}", fontsize=8)
            row[0].set_ylabel("share that is fast")
        for axes in grid[-1]:
            axes.set_xlabel("a fast client's steps, times a slow one's", fontsize=7)
        bar = figure.colorbar(image, ax=grid, shrink=0.7)
        bar.set_label("F - F* at the end, against SCAFFOLD's")
        bar.set_ticks([-1, 0, 1], labels=["half", "equal", "double"])
    return figure


def _draw(axes: Axes, records: TrialRecords, scale: Scale, one: str, other: str) -> Any:
    """Draw the map of one algorithm against another and return its image.

    A decided cell has the change in percent, or how many times as large F - F* is; a level one "=", one that is
    not decided "?". A cell with fewer than three seeds has no colour.
    """
    ratios, fasts = sorted(COUNTS[scale]["ratios"]), sorted(COUNTS[scale]["fast"])
    values = [[math.nan] * len(ratios) for _ in fasts]
    for i, fast in enumerate(fasts):
        for j, ratio in enumerate(ratios):
            fleet = f"ratio{ratio}-fast{fast}"
            ahead = advantage(records, fleet, one, other)
            if ahead.seeds:
                enough = ahead.seeds >= LEAST_SEEDS
                values[i][j] = -ahead.mean / math.log(2) if enough else math.nan
                change = _percent(ahead.mean) if ahead.mean > -math.log(2) else f"x {math.exp(-ahead.mean):.1f}"
                text = change if ahead.sign else "=" if ahead.level else "?"
                text = text if enough else "one seed" if ahead.seeds == 1 else f"{ahead.seeds} seeds"
                colour = "white" if abs(ahead.mean) > 0.8 * math.log(2) and enough else "black"
                axes.text(j, i, text, ha="center", va="center", fontsize=7, color=colour)
    image = axes.imshow(values, cmap="RdBu_r", vmin=-1, vmax=1, origin="lower", aspect="auto")
    axes.set_xticks(range(len(ratios)), [str(ratio) for ratio in ratios])
    axes.set_yticks(range(len(fasts)), [f"{100 * fast // CLIENTS} %" for fast in fasts])
    return image


RECIPE = Recipe(
    name="regime-map",
    title="F - F* after 60 rounds against SCAFFOLD's from the same start: LR on a9a, 20 clients of two speeds",
    assumptions=(
        "not in the paper: a map of where FedaGrac's estimates of the global orientation help. FedaGrac-avg at "
        "lambda = 1 is SCAFFOLD if both start alike, so hybrid, first and reverse are compared with it",
        "a9a, Dirichlet(0.3) drawn anew for every seed, batches of 20, weight decay 0.001, lambda = 1, 10 paired "
        "seeds; F* by Newton's method in float64",
        "fleets of two speeds with a mean of 100 steps over the clients, so that all do the same work; 1, 4, 10, "
        "16 or 19 of 20 clients are fast, whichever data they hold",
        "a cell is the geometric mean over the seeds of (F - F*) / (F - F* of SCAFFOLD) less 1, with its 95 % "
        "interval and the number of seeds: below zero the estimate is ahead. Claims about all fleets are decided "
        "with Holm's correction over the fleets; two are level where the interval is within 5 %",
        "rounds of several local epochs (a mean of 500 steps, about six epochs) run at eta 0.02 for 20 rounds; at "
        "a mean of 100 steps a first epoch is most of a round, so the estimates hardly differ. This part was "
        "added after the map had been seen",
        "the map has full gradients at the start and the first epoch's gradient at three etas; other starts and "
        "first gradients run at eta 0.03 alone",
        "quick: a mean of 20 steps, two fleets, 10 rounds, one seed; medium: six fleets, eta 0.03, two seeds",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=one_by_one(run_gaps),
    picture=_picture,
)
