"""Run the trials of a recipe: those without a record, until the time is up."""

from __future__ import annotations

import functools
import importlib.util
import json
import logging
import shutil
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from fedagrac.callbacks import Callback
from fedagrac.data import Federation
from fedagrac.errors import InputError
from fedagrac.experiments.build import build_algorithm, build_federation, build_kind, build_model, build_steps
from fedagrac.files import make_folder
from fedagrac.paper.authors import PARTITIONS
from fedagrac.paper.records import key_of, progress
from fedagrac.rounds.api import run_on
from fedagrac.rounds.fleet import Simulated
from fedagrac.rounds.setup import Setup
from fedagrac.rounds.stop import Stop
from fedagrac.storage.checkpoints import CheckpointError
from fedagrac.storage.environment import environment
from fedagrac.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.paper.records import Records, Trial, TrialRecord
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import History, RoundRecord, SimulationResult
    from fedagrac.storage.checkpoints import Checkpoint

__all__ = [
    "SMOOTH",
    "Deadline",
    "GiveUp",
    "StopAtTarget",
    "first_round",
    "one_by_one",
    "outcome_of",
    "run_simulations",
    "run_trials",
    "side_by_side",
]

log = logging.getLogger("fedagrac")

RunGroup = Callable[[Sequence[dict[str, Any]], "Deadline"], list[dict[str, Any]]]
"""How settings that belong together are run: an outcome for each, which says whether it is "finished"."""

SIDE_BY_SIDE = {"logistic": 1000, "cnn": 1000, "alexnet": 3}
"""The most runs of a model that step side by side: a grid of a small model costs little more than one run.

AlexNet gains on a GPU alone, and nothing beyond three runs of 20 clients; VGG-19 gains nowhere.
"""


class Deadline(Callback):
    """Ends a run when the time is up; before that, says that another round is done.

    It is the last callback of a run, so that a run which ends anyway does not count as cut off.

    Attributes:
        at: when the time is up, on the monotonic clock; None for never.
        seen: called after every round.
        folder: where a run that is cut off or interrupted leaves its history and a checkpoint; None for nowhere.
        earlier: what earlier calls have recorded of runs that they cut off, by the keys of the settings.
        passed: whether it has cut a run off.
    """

    def __init__(
        self,
        at: float | None,
        seen: Callable[[], None] = lambda: None,
        folder: Path | None = None,
        earlier: Mapping[str, dict[str, Any]] | None = None,
    ) -> None:
        self.at = at
        self.seen = seen
        self.folder = folder
        self.earlier = earlier or {}
        self.passed = False
        self._group = self
        self._judged: tuple[int, bool] = 0, False

    def of_run(self, settings: dict[str, Any]) -> Deadline:
        """Return the deadline of one run of a group, with a folder of its own."""
        own = Deadline(self.at, self.seen, None if self.folder is None else self.folder / key_of(settings))
        own._group = self
        return own

    def late(self, round: int) -> bool:
        """Return whether the time is up, the same for all runs of a group: they are cut off after one round."""
        if self._judged[0] != round:
            self._judged = round, self.at is not None and time.monotonic() > self.at
        return self._judged[1]

    def checkpoint(self) -> Checkpoint | None:
        """Return what an earlier call has left of the run, or None if the run has to start again."""
        if self.folder is None:
            return None
        try:
            return RunFolder(self.folder).last_checkpoint()
        except CheckpointError as error:
            log.warning("%s; the run starts again", error)
            return None

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Look at the clock."""
        self.seen()
        last = run.stopped is not None or record.round == run.rounds
        if self._group.late(record.round) and not last:
            self.passed = True
            run.stop("the time budget is spent")

    def on_interrupt(self, run: Run) -> None:
        """Keep the run as it is."""
        if self.folder is not None and run.history:
            folder = RunFolder(self.folder)
            make_folder(folder.path)
            folder.write_history(run.history)
            folder.write_checkpoint(run.checkpoint(), run.ranks)

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Keep a run that was cut off; remove what was kept of one that has ended."""
        self.passed = self.passed and result.status != "diverged"
        if self.passed:
            self.on_interrupt(run)
        elif self.folder is not None:
            shutil.rmtree(self.folder, ignore_errors=True)


SMOOTH = 5
"""Tables read the round at which a target was reached from the mean accuracy over so many rounds."""


def first_round(curve: Sequence[float], target: float, window: int = 1) -> int | None:
    """Return the first round at which the mean over a centred window reaches the target, or None.

    The half of the window that follows a round must be complete, so the last rounds of a curve are never declared
    on a shortened window. Before the first rounds there is nothing to average, so their windows are shorter. The
    round is never before the curve itself first reaches the target.

    Examples:
        >>> first_round([0.1, 0.9, 0.2, 0.8, 0.9, 0.8], 0.8), first_round([0.1, 0.9, 0.2, 0.8, 0.9, 0.8], 0.8, 3)
        (2, 5)
        >>> first_round([0.7, 0.7, 0.7, 0.81, 0.81], 0.8, 5)  # not over whole windows
        >>> first_round([0.78, 0.81, 0.84], 0.8, 5)
        2
    """
    side = window // 2
    for i in range(len(curve) - side):
        part = curve[max(0, i - side) : i + side + 1]
        if sum(part) / len(part) >= target:
            return max(i + 1, next(n for n, value in enumerate(curve, 1) if value >= target))
    return None


class StopAtTarget(Callback):
    """Ends a run when its smoothed accuracy has reached the target, which is known half a window later."""

    def __init__(self, target: float, window: int) -> None:
        self.target = target
        self.window = window

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Average the last rounds, as many as there are up to a whole window."""
        last = [a for a in run.history.column("test_accuracy")[-self.window :] if a is not None]
        if len(last) > self.window // 2 and sum(last) / len(last) >= self.target:
            run.stop(f"{self.target} reached over {self.window} rounds")


class GiveUp(Callback):
    """Ends a run that has not reached its target after so many rounds."""

    def __init__(self, rounds: int, target: float) -> None:
        self.rounds = rounds
        self.target = target

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Look at the rounds so far."""
        if len(run.history) == self.rounds and run.history.rounds_to(self.target) is None:
            run.stop(f"{self.target} not reached in {self.rounds} rounds")


def run_trials(
    recipe: str,
    trials: Iterable[Trial],
    store: Records,
    run: RunGroup,
    time_budget: float | None = None,
    show: Callable[[list[Trial], list[TrialRecord]], None] = lambda trials, records: None,
    seen: Callable[[], None] = lambda: None,
    checkpoints: Path | None = None,
) -> bool:
    """Run every trial that has no finished record, and return whether all have one now.

    Trials of a model in SIDE_BY_SIDE that differ in the algorithm alone run side by side. A run that the budget
    cuts off is recorded as unfinished. A later call resumes it from its checkpoint, or starts it again.

    Args:
        recipe: whose records are written.
        trials: what to run, in this order.
        store: where the records are.
        run: runs a group of settings.
        time_budget: seconds after which no run begins and the present one ends.
        show: called with the trials that were recorded before, then with every group when it begins (without
            records) and when it ends (with them).
        seen: called after every round.
        checkpoints: where simulations that are cut off leave their checkpoints, each in a folder named by the key
            of its settings, until they have ended; None to start them again. Needs safetensors.
    """
    if checkpoints is not None and importlib.util.find_spec("safetensors") is None:
        raise InputError("checkpoints", str(checkpoints), "safetensors to be installed")
    end = None if time_budget is None else time.monotonic() + time_budget
    before = [(trial, store.get(recipe, trial)) for trial in trials]
    done = [(trial, record) for trial, record in before if record is not None and record.finished]
    show([trial for trial, _ in done], [record for _, record in done])
    complete = True
    pending = [trial for trial, record in before if record is None or not record.finished]
    for group in side_by_side(pending, checkpoints):
        if end is not None and time.monotonic() > end:
            return False
        show(group, [])
        resumed = [_rounds_kept(trial, checkpoints) > 0 for trial in group]
        begun = time.monotonic()
        cut = {t.key: kept.outcome for t in group if (kept := store.get(recipe, t)) is not None}
        outcomes = run([trial.settings for trial in group], Deadline(end, seen, checkpoints, cut))
        seconds = time.monotonic() - begun
        written = []
        for trial, outcome, was_resumed in zip(group, outcomes, resumed, strict=True):
            kept = store.get(recipe, trial)
            if kept is None or outcome["finished"] or progress(outcome) > progress(kept.outcome):
                went_on = was_resumed or "tried" in outcome
                earlier = kept.outcome.get("seconds", 0.0) if kept is not None and went_on else 0.0
                shared = {"seconds": round(earlier + seconds, 1), "together": len(group)}
                kept = store.put(recipe, trial, {**outcome, **shared}, environment(_device()))
            written.append(kept)
        complete = complete and all(outcome["finished"] for outcome in outcomes)
        show(group, written)
    return complete


def side_by_side(trials: Iterable[Trial], checkpoints: Path | None) -> list[list[Trial]]:
    """Return the trials that run side by side from the same round, in the order of the first of each group."""
    groups: list[list[Trial]] = []
    open_groups: dict[str, list[Trial]] = {}
    for trial in trials:
        shared = {key: value for key, value in trial.settings.items() if key != "algorithm"}
        alike = json.dumps([shared, _rounds_kept(trial, checkpoints)], sort_keys=True)
        most = _most_together(trial.settings.get("model", {}).get("name"))
        if len(open_groups.get(alike, range(most))) == most:
            open_groups[alike] = []
            groups.append(open_groups[alike])
        open_groups[alike].append(trial)
    return groups


def _rounds_kept(trial: Trial, checkpoints: Path | None) -> int:
    """Return the number of rounds that an earlier call has left of a trial."""
    if checkpoints is None:
        return 0
    try:
        return len(RunFolder(checkpoints / trial.key).history.read_bytes().splitlines())
    except OSError:
        return 0


def _most_together(model: str | None) -> int:
    """Return how many runs of a model step side by side on this machine."""
    if model == "alexnet" and not torch.cuda.is_available():
        return 1
    return SIDE_BY_SIDE.get(str(model), 1)


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@functools.lru_cache(maxsize=2)
def _federation(data: str, data_dir: Path | None) -> Federation:
    settings = json.loads(data)
    seed, partition = settings.pop("seed", 0), settings.get("partition", {})
    if partition.get("kind") in PARTITIONS:
        own = build_kind(partition, PARTITIONS)
        return Federation.load(**{**settings, "partition": own, "seed": seed, "data_dir": data_dir})
    return build_federation(settings, seed, data_dir)


@functools.lru_cache(maxsize=1)
def _fleet(settings: str, data_dir: Path | None) -> Simulated:
    """Return the clients of trials that differ in the algorithm alone: they share what an engine has prepared."""
    shared = json.loads(settings)
    federation = _federation(json.dumps(shared["data"], sort_keys=True), data_dir)
    at_once = shared.get("stop_at_target") and "smooth" not in shared
    setup = Setup(
        rounds=shared["rounds"],
        steps=build_steps(shared["steps"]),
        batch_size=shared["batch_size"],
        sampling=shared.get("sampling", Setup.sampling),
        seed=shared["seed"],
        precision="tf32" if shared.get("tf32") and torch.cuda.is_available() else "float32",
        stop=Stop(accuracy=shared["target"]) if at_once else None,
    )
    return Simulated.of(build_model(shared["model"], shared["seed"]), federation, setup)


def run_simulations(
    group: Sequence[dict[str, Any]], deadline: Deadline, data_dir: Path | None = None
) -> list[dict[str, Any]]:
    """Run simulations from plain settings that differ in the algorithm alone; return what records keep of them.

    Those that the same engine has brought to the same round run side by side.
    """
    shared = {key: value for key, value in group[0].items() if key != "algorithm"}
    fleet = _fleet(json.dumps(shared, sort_keys=True), data_dir)
    deadlines = [deadline.of_run(settings) for settings in group]
    resume = [own.checkpoint() for own in deadlines]
    places = [None if checkpoint is None else (checkpoint.round, checkpoint.facts.engine) for checkpoint in resume]
    results: dict[int, SimulationResult] = {}
    for place in dict.fromkeys(places):
        runs = [i for i in range(len(group)) if places[i] == place]
        ended = run_on(
            fleet,
            [build_algorithm(group[i]["algorithm"]) for i in runs],
            [[*_stops(shared), deadlines[i]] for i in runs],
            [resume[i] for i in runs],
        )
        results |= dict(zip(runs, ended, strict=True))
    target, window = shared.get("target"), shared.get("smooth", 1)
    return [
        {**outcome_of(results[i].history, results[i].status, target, window), "finished": not own.passed}
        for i, own in enumerate(deadlines)
    ]


def one_by_one(run: Callable[..., dict[str, Any]]) -> Callable[..., list[dict[str, Any]]]:
    """Return how a recipe's own way of running one trial runs a group of them."""

    def run_each(
        group: Sequence[dict[str, Any]], deadline: Deadline, data_dir: Path | None = None
    ) -> list[dict[str, Any]]:
        return [run(settings, deadline, data_dir) for settings in group]

    return run_each


def _stops(settings: dict[str, Any]) -> list[Callback]:
    """Return the callbacks that end a run early."""
    stops: list[Callback] = []
    if "give_up" in settings:
        stops.append(GiveUp(settings["give_up"], settings["target"]))
    if settings.get("stop_at_target") and "smooth" in settings:
        stops.append(StopAtTarget(settings["target"], settings["smooth"]))
    return stops


def outcome_of(history: History, status: str, target: float | None = None, window: int = 1) -> dict[str, Any]:
    """Return what a record keeps of a history: curves to four digits, and what tables are made of.

    The round at which the target was reached is read from the accuracy's mean over a window of rounds.
    """
    accuracy = [a for a in history.column("test_accuracy") if a is not None]
    last = accuracy[-10:]
    return {
        "status": status,
        "rounds": len(history),
        "best": max(accuracy, default=None),
        "final": sum(last) / len(last) if last and status != "diverged" else None,
        "rounds_to_target": None if target is None else first_round(accuracy, target, window),
        "accuracy": [round(a, 4) for a in accuracy],
        "train_loss": [float(f"{v:.4g}") for v in history.column("train_loss")],
        "sim_time": [float(f"{v:.6g}") for v in history.column("sim_time")],
        "bytes_total": history[-1]["bytes_total"] if history else 0,
    }
