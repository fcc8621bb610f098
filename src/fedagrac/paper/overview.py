"""The first screen of the page: what to believe of the paper's claims, and what has not been run."""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedagrac.experiments.build import build_steps
from fedagrac.paper import RECIPES
from fedagrac.paper.judging import without_p

if TYPE_CHECKING:
    from fedagrac.paper.records import Trial, TrialRecord

__all__ = ["HEADLINES", "blank_rows", "cost", "headline_rows", "steps_of"]

Recorded = Mapping[str, Mapping[str, "TrialRecord"]]
"""The records of every recipe by the names of their trials."""

HEADLINES: tuple[tuple[str, str, str], ...] = (
    (
        "table1",
        "lr, eta 0.01: with equal data, K = 250 to 1600 needs fewer rounds than K = 100",
        "equal data, LR: K = 250 to 1600 is sooner at 80 % than K = 100",
    ),
    (
        "table1",
        "lr, eta 0.01, Dirichlet(0.1): K = 250 to 1600 makes it worse",
        "one unequal split, LR: K = 100 is sooner than 250 to 1600",
    ),
    (
        "table1",
        "cnn, eta 0.03, Dirichlet(0.1): K = 250 to 1600 makes it worse",
        "the same for the CNN",
    ),
    (
        "figure-pretest",
        "same-x: of the five only FedaGrac keeps it",
        "only FedaGrac goes straight to the minimiser",
    ),
    ("figure-time", "lr-500: fedagrac ends above fedavg", "FedaGrac's accuracy ends above FedAvg's (LR, a9a)"),
    (
        "participation",
        "K = 18 and 182, half each, eta 0.03: cached-1 is ahead of fedavg",
        "FedaGrac ends nearer to the minimum than FedAvg (20 of 100 clients)",
    ),
    (
        "table-variance",
        "alexnet-dp2, v10000-fixed: FedaGrac needs fewer rounds than scaffold-full",
        "fewer rounds than SCAFFOLD, same start (AlexNet)",
    ),
    (
        "regime-map",
        "eta 0.1: hybrid from full gradients is ahead of SCAFFOLD from full gradients in every fleet",
        "nearer than SCAFFOLD from the same start in every fleet",
    ),
    (
        "figure-lambda",
        "constant steps: Increase is best",
        "an increasing lambda is best (CNN)",
    ),
    (
        "table2",
        "jetson-nano: FedaGrac ends with a better accuracy than FedNova",
        "beside nine Jetson Nanos FedaGrac ends above FedNova",
    ),
)
"""The claims of the first screen: the recipe, the claim as the recipe words it, and the claim in plain words."""

LARGE = {"alexnet": 86e-6, "vgg19": 516e-6}
"""Seconds of a client-step on an H200, for large models without records."""


def headline_rows(recorded: Recorded) -> list[tuple[str, ...]]:
    """Return the claims of the first screen with their verdicts, under a row of titles."""
    rows: list[tuple[str, ...]] = [("verdict", "claim", "numbers")]
    for name, claim, words in HEADLINES:
        for found in RECIPES[name].claims(recorded[name]):
            if found.claim == claim:  # table-variance words no claim about rows without records
                rows.append((f"**{found.verdict}**", f"[{words}](#{name})", _short(found.brief or found.numbers)))
    return rows


def _short(numbers: str) -> str:
    """Return numbers without the p-values of intervals and without remarks in parentheses at the end.

    Examples:
        >>> _short("1 against 2: difference -1 [-2, 0], p = 0.05, 3 seeds; about 9 seeds would decide (at 1)")
        '1 against 2: -1 [-2, 0], 3 seeds; 9 would decide'
    """
    shorter = re.sub(r"difference | \([^()]*\)$", "", without_p(numbers))
    return re.sub(r"about (\d+) seeds", r"\1", shorter)


@functools.cache
def _per_round(steps: str, clients: int, seed: int) -> float:
    counts = build_steps(json.loads(steps)).counts(0, clients, seed)
    return float(counts.mean())


def steps_of(settings: Mapping[str, Any], rounds: int) -> float:
    """Return the client-steps of so many rounds, of all algorithms of a trial.

    Examples:
        >>> settings = {"data": {"clients": 10}, "steps": {"kind": "constant", "steps": 100}, "seed": 0}
        >>> steps_of(settings, 20)
        20000.0
    """
    if "data" not in settings:  # lines, which cost nothing
        return float(rounds)
    clients = settings["data"]["clients"]
    each = _per_round(json.dumps(settings["steps"]), clients, settings["seed"])
    runs: int = (settings.get("participation") or clients) * len(settings.get("algorithms", [1]))
    return each * runs * rounds


def _shares(settings: Mapping[str, Any], shares: Iterable[int], rounds: int) -> float:
    """Return the client-steps of a search that gives up after so many rounds at each of these shares."""
    steps = settings["steps"]
    fast = [{**steps, "fast": max(1, round(steps["fast"] * share / 100))} for share in shares]
    return sum(steps_of({**settings, "steps": one}, rounds) for one in fast)


def _whole(settings: Mapping[str, Any]) -> float:
    """Return the client-steps of a run that uses all its rounds, and of a search that tries all its shares."""
    if "shares" in settings:
        return _shares(settings, settings["shares"], settings["give_up"])
    return steps_of(settings, settings.get("rounds") or settings["at"][-1])


def _done(record: TrialRecord) -> float:
    """Return the client-steps that a record stands for."""
    settings, outcome = record.settings, record.outcome
    if "tried" in outcome:
        *before, last = [one["share"] for one in outcome["tried"]]
        return _shares(settings, before, settings["give_up"]) + _shares(settings, [last], outcome["rounds"])
    return steps_of(settings, outcome["rounds"])


@dataclass(frozen=True)
class Rate:
    """What a client-step costs: seconds, and on which machine."""

    seconds: float
    machine: str


def _rate(records: Iterable[TrialRecord]) -> Rate | None:
    """Return the seconds of a client-step on the machine of most of these records.

    Runs side by side share their time. Runs that diverged say nothing: they ended long before their group.
    """
    machines: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.outcome.get("seconds") and record.outcome.get("status") != "diverged":
            machines.setdefault(record.environment.get("gpu") or "a CPU core", []).append(record)
    if not machines:
        return None
    machine, known = max(machines.items(), key=lambda item: len(item[1]))
    seconds = sum(r.outcome["seconds"] / (r.outcome.get("together") or 1) for r in known)
    return Rate(seconds / sum(map(_done, known)), machine)


def cost(name: str, trial: Trial, recorded: Recorded) -> tuple[float, str] | None:
    """Return what a whole run costs in seconds, and the machine; None where nothing comparable was run.

    It is the time of a client-step in the nearest runs of the same model (of the cell, the part, the recipe, then
    any recipe) times the client-steps of all the rounds that the run may take.
    """
    model = trial.settings.get("model", {}).get("name")

    def alike(records: Mapping[str, TrialRecord], start: str) -> Rate | None:
        near = [record for key, record in records.items() if key.startswith(start)]
        return _rate(record for record in near if record.settings.get("model", {}).get("name") == model)

    parts = trial.name.split("/")
    nearest = ["/".join(parts[:n]) + "/" for n in (len(parts) - 1, 1)] + [""]
    rate = next((found for start in nearest if (found := alike(recorded[name], start))), None)
    if rate is None and model in LARGE:
        rate = Rate(LARGE[model], "NVIDIA H200")
    rate = rate or next((found for records in recorded.values() if (found := alike(records, ""))), None)
    return None if rate is None else (rate.seconds * _whole(trial.settings), rate.machine)


def _cell(trial: Trial) -> str:
    """Return the name of a trial's cell: without its seed, and without its setting where a grid is run."""
    parts = trial.name.split("/")
    return "/".join(part for part in parts[:-1] if "=" not in part or part.startswith("lambda="))


def blank_rows(recorded: Recorded, trials: Mapping[str, list[Trial]]) -> list[tuple[str, ...]]:
    """Return the cells with runs that are missing or cut off, and their cost, under a row of titles."""
    rows: list[tuple[str, ...]] = [("recipe", "cell", "runs left", "minutes at most", "on")]
    for name, records in recorded.items():
        cells: dict[str, list[Trial]] = {}
        for trial in trials[name]:
            record = records.get(trial.name)
            if record is None or not record.finished:
                cells.setdefault(_cell(trial), []).append(trial)
        for cell, left in cells.items():
            costs = [cost(name, trial, recorded) for trial in left]
            known = [one for one in costs if one is not None]
            minutes = f"{sum(seconds for seconds, _ in known) / 60:.3g}" if known else "-"
            rows.append((name, cell, str(len(left)), minutes, known[0][1] if known else "-"))
    return rows
