"""The first screen of the page: what to believe of the paper's claims, and what has not been run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from fedagrac.paper import RECIPES

if TYPE_CHECKING:
    from fedagrac.paper.records import Trial, TrialRecord

__all__ = ["HEADLINES", "blank_rows", "headline_rows"]

Recorded = Mapping[str, Mapping[str, "TrialRecord"]]
"""The records of every recipe by the names of their trials."""

HEADLINES: dict[str, tuple[str, ...]] = {
    "table1": (
        "lr, eta 0.01: with equal data, K = 250 to 1600 needs fewer rounds than K = 100",
        "lr, eta 0.01, Dirichlet(0.1): unequal data slow FedAvg down",
        "lr, eta 0.01, Dirichlet(0.1): K = 250 to 1600 makes it worse",
        "lr, eta 0.001, Dirichlet(0.1): K = 250 to 1600 makes it worse",
        "lr, eta 0.001, Dirichlet(0.1): K ~ Uniform(100, 400) makes it worse",
        "cnn, eta 0.03, Dirichlet(0.1): K = 250 to 1600 makes it worse",
    ),
    "table2": (
        "FedaGrac reaches 60 % in time at 100 % utilization beside every device",
        "FedNova's utilization falls as the nine devices get slower",
    ),
    "figure-pretest": ("same-x: of the five only FedaGrac keeps it",),
    "figure-lambda": ("constant steps: Increase is best",),
    "figure-estimators": (
        "lr-constant, first epoch's gradient: no considerable difference (below 1 point)",
        "lr-uniform, first epoch's gradient: FedaGrac is ahead of fedagrac-avg",
    ),
    "figure-lr-lambda": ("lr-async: lambda = 1 is good (within 0.5 points of the best) for every eta",),
    "table-variance": (
        "alexnet-dp2, v10000-fixed: FedaGrac needs fewer rounds than fedavg",
        "alexnet-dp2, v10000-fixed: FedaGrac needs fewer rounds than scaffold-full",
    ),
    "figure-time": (
        "lr-500: fedagrac ends above fedavg",
        "lr-500: fedagrac ends above scaffold",
        "fedagrac moves about twice FedAvg's bytes per round (nearer to 2 than to 1 or 3)",
    ),
    "regime-map": (
        "eta 0.1: hybrid from full gradients is ahead of SCAFFOLD from full gradients in every fleet",
        "K x 5, eta 0.02, 20 rounds: hybrid is ahead of SCAFFOLD, both from full gradients, in every fleet",
    ),
    "participation": (
        "K = 18 and 182, half each, eta 0.03: cached-1 is ahead of fedavg",
        "K = 18 and 182, half each, eta 0.03: cached-1 is ahead of cohort-1",
        "K = 18 and 182, half each, eta 0.03: cached-1 is ahead of scaffold-full",
    ),
}
"""The claims of the first screen by recipe, as the recipes word them."""

WHOLE_RUN = {"alexnet": 256.0, "vgg19": 1494.0}
"""Seconds of 200 rounds of 20 clients with 500 steps on an H200: 128 and 747 us per client-step."""


def headline_rows(recorded: Recorded) -> list[tuple[str, ...]]:
    """Return the claims of the first screen with their verdicts, under a row of titles."""
    rows: list[tuple[str, ...]] = [("verdict", "claim", "numbers", "from")]
    for name, claims in HEADLINES.items():
        verdicts = {verdict.claim: verdict for verdict in RECIPES[name].claims(recorded[name])}
        for claim in claims:
            found = verdicts.get(claim)
            if found is not None:  # table-variance words no claim about rows without records
                rows.append((f"**{found.verdict}**", claim, found.numbers, f"[{name}](#{name})"))
    return rows


def blank_rows(recorded: Recorded) -> list[tuple[str, ...]]:
    """Return the recipes' parts with runs that are missing or cut off, and their cost, under a row of titles.

    The cost of a run is the mean of the finished runs of its part or else of its recipe. That of a large model is
    the time of 200 rounds on an H200.
    """
    rows: list[tuple[str, ...]] = [("recipe", "part", "runs left", "about so many minutes")]
    for name, records in recorded.items():
        parts: dict[str, list[Trial]] = {}
        for trial in RECIPES[name].trials("paper"):
            record = records.get(trial.name)
            if record is None or not record.finished:
                parts.setdefault(trial.name.split("/")[0], []).append(trial)
        for part, trials in parts.items():
            known = _seconds(records, f"{part}/") or _seconds(records, "")
            each = _whole_run(trials[0]) or known
            cost = "-" if each is None else f"{len(trials) * each / 60:.0f}"
            rows.append((name, part, str(len(trials)), cost))
    return rows


def _whole_run(trial: Trial) -> float | None:
    """Return the seconds of a run of a large model, or None for the others."""
    seconds = WHOLE_RUN.get(trial.settings.get("model", {}).get("name"))
    return None if seconds is None else seconds * float(trial.settings["steps"].get("mean", 500)) / 500


def _seconds(records: Mapping[str, TrialRecord], part: str) -> float | None:
    """Return the mean time of a run in a part: that of a group is shared by its runs."""
    times = [
        r.outcome["seconds"] / (r.outcome.get("together") or 1)
        for name, r in records.items()
        if name.startswith(part) and r.finished
    ]
    return sum(times) / len(times) if times else None
