"""Partial participation: 20 of 100 clients a round, with nu over all clients or over the cohort.

The paper states the algorithm for full participation. Its authors' code averages over the cohort.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from fedagrac.paper.gaps import a9a_settings, run_gaps
from fedagrac.paper.intervals import Interval
from fedagrac.paper.judging import decide, p_text
from fedagrac.paper.recipe import Recipe, Scale, Table, TrialRecords, Verdict
from fedagrac.paper.records import Trial
from fedagrac.paper.regime_map import Advantage, advantage
from fedagrac.paper.runner import one_by_one

__all__ = ["RECIPE"]

STEPS: dict[str, dict[str, Any]] = {
    "two-speeds": {"kind": "explicit", "table": [[18] * 50 + [182] * 50]},
    "gaussian": {"kind": "gaussian", "mean": 100, "variance": 400, "mode": "fixed"},
}
"""The step counts by name: half of the clients ten times as fast, and K ~ Normal(100, 400) drawn once."""

WORDS = {"two-speeds": "K = 18 and 182, half each", "gaussian": "K ~ Normal(100, 400)"}

METHODS: dict[str, dict[str, Any]] = {
    "fedavg": {"name": "fedavg"},
    "scaffold-zeros": {"name": "scaffold"},
    "scaffold-full": {"name": "scaffold", "init": "full"},
    "cached-1": {"name": "fedagrac", "orientation": "cached", "calibration": 1.0},
    "cohort-1": {"name": "fedagrac", "orientation": "cohort", "calibration": 1.0},
    "cached-0.03": {"name": "fedagrac", "orientation": "cached", "calibration": 0.03},
    "cohort-0.03": {"name": "fedagrac", "orientation": "cohort", "calibration": 0.03},
}
"""FedaGrac is named by its orientation and lambda."""

COUNTS: dict[Scale, tuple[list[int], tuple[float, ...], int]] = {  # rounds kept, etas, seeds
    "quick": ([5, 10], (0.03,), 1),
    "medium": ([60, 200], (0.03,), 2),
    "paper": ([60, 200], (0.01, 0.03), 10),
}


def _trials(scale: Scale) -> list[Trial]:
    """Return the runs, seed by seed."""
    at, etas, seeds = COUNTS[scale]
    algorithms = {f"{name}/{eta:g}": {**table, "lr": eta} for eta in etas for name, table in METHODS.items()}
    trials = []
    for seed in range(seeds):
        for steps, table in STEPS.items():
            settings = {**a9a_settings(100, table, at, algorithms, seed), "participation": 20}
            trials.append(Trial(f"a9a/{steps}/seed{seed}", settings))
    return trials


def _gaps(records: TrialRecords, steps: str, name: str) -> str:
    """Return F - F* after the last kept round: its mean over the seeds and half of its 95 % interval."""
    runs = [
        r.outcome for key, r in records.items() if f"/{steps}/" in key and r.finished and name in r.outcome["gaps"]
    ]
    if not runs:
        return "-"
    values = [1e4 * run["gaps"][name][-1] for run in runs if name not in run["diverged"]]
    if len(values) < len(runs):
        return f"diverged with {len(runs) - len(values)} of {len(runs)} seeds"
    interval, accuracy = Interval.of(values), Interval.of([100 * run["accuracies"][name][-1] for run in runs])
    if len(values) == 1:
        return f"{interval.mean:.3g} ({accuracy.mean:.2f} %)"
    shares = f"{accuracy.mean:.2f} +- {accuracy.half:.2f} %"
    return f"{interval.mean:.3g} +- {interval.half:.3g} ({shares}, {len(values)} seeds)"


def _table(records: TrialRecords, scale: Scale) -> Table:
    etas = COUNTS[scale][1]
    rows = [
        (name, *[_gaps(records, steps, f"{name}/{eta:g}") for steps in STEPS for eta in etas]) for name in METHODS
    ]
    return Table(("method", *[f"{WORDS[steps]}, eta {eta:g}" for steps in STEPS for eta in etas]), tuple(rows))


PAIRS = (  # one that is claimed to be ahead, and the other
    ("cached-1", "fedavg"), ("cached-1", "cohort-1"), ("cached-0.03", "cohort-0.03"), ("cached-1", "cached-0.03"),
    ("cached-1", "scaffold-full"), ("cached-1", "scaffold-zeros"),
)  # fmt: skip


def _claims(records: TrialRecords) -> list[Verdict]:
    verdicts = []
    for steps, words in WORDS.items():
        for eta in COUNTS["paper"][1]:
            for one, other in PAIRS:
                ahead: Advantage = advantage(records, steps, f"{one}/{eta:g}", f"{other}/{eta:g}")
                claim = f"{words}, eta {eta:g}: {one} is ahead of {other}"
                text = (
                    f"{ahead}, {p_text(ahead.evidence.p)}, {ahead.seeds} seeds" if ahead.seeds > 1 else str(ahead)
                )
                verdicts.append(decide(claim, replace(ahead.evidence, numbers=text), "F - F*"))
    return verdicts


RECIPE = Recipe(
    name="participation",
    title="F - F* in units of 1e-4 (and test accuracy) after 200 rounds: LR on a9a, 20 of 100 clients a round",
    assumptions=(
        "not in the paper, which has every client in every round",
        "a9a, Dirichlet(0.3) drawn anew for every seed, batches of 20, weight decay 0.001, 10 paired seeds; the "
        "20 clients of a round are drawn uniformly; F* by Newton's method in float64",
        "cached: nu sums what every client sent last; cohort: only what this round's clients sent, as in the "
        "authors' code. The number is lambda; FedaGrac starts from full gradients and takes the first epoch's "
        "gradient",
        "quick: 10 rounds, eta 0.03, one seed; medium: eta 0.03, two seeds",
    ),
    trials=_trials,
    table=_table,
    claims=_claims,
    run=one_by_one(run_gaps),
)
