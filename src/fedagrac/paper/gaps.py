"""Runs judged by F - F*: how far logistic regression on two classes is from its minimum after so many rounds."""

from __future__ import annotations

import functools
import json
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.callbacks import Callback
from fedagrac.errors import InputError
from fedagrac.experiments.build import build_algorithm, build_federation, build_model, build_steps
from fedagrac.rounds.api import run_on
from fedagrac.rounds.fleet import Simulated
from fedagrac.rounds.setup import Setup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    import numpy.typing as npt

    from fedagrac.data import Federation
    from fedagrac.paper.runner import Deadline
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

    Vector = npt.NDArray[np.float64]

__all__ = ["Objective", "a9a_settings", "run_gaps"]


def a9a_settings(
    clients: int, steps: dict[str, Any], at: Sequence[int], algorithms: dict[str, Any], seed: int
) -> dict[str, Any]:
    """Return the settings of runs on a9a: the step counts, the rounds that are kept, and the algorithms.

    Examples:
        >>> a9a_settings(20, {"kind": "constant", "steps": 5}, [10], {}, seed=3)["data"]["seed"]
        3
    """
    partition = {"kind": "dirichlet", "alpha": 0.3}
    return {
        "data": {"name": "a9a", "clients": clients, "seed": seed, "partition": partition},
        "model": {"name": "logistic", "features": 123, "classes": 2},
        "steps": steps,
        "batch_size": 20,
        "weight_decay": 0.001,
        "at": at,
        "algorithms": algorithms,
        "seed": seed,
    }


class Objective:
    """F(x) = mean log-loss over all training samples + weight_decay / 2 |x|^2, for two classes, in float64.

    x holds the weights and then the biases of both classes. At the minimum the two classes' rows are opposite, so
    Newton's method runs over their difference u: mean log(1 + exp(-s a.u)) + weight_decay / 4 |u|^2, s = +-1.

    Examples:
        >>> objective = Objective(np.array([[1.0], [-1.0], [1.0]]), np.array([1, 0, 0]), 0.5)
        >>> round(objective.value(np.zeros(4)), 6)  # log 2
        0.693147
        >>> objective.value(np.zeros(4)) > objective.minimum
        True
    """

    def __init__(self, inputs: Vector, targets: npt.NDArray[np.int64], weight_decay: float) -> None:
        if set(np.unique(targets)) != {0, 1}:
            raise InputError("targets", f"{len(np.unique(targets))} classes", "two classes, 0 and 1")
        self.features = np.hstack([inputs.reshape(len(inputs), -1), np.ones((len(inputs), 1))]).astype(np.float64)
        self.signs = np.where(targets == 1, 1.0, -1.0)
        self.weight_decay = weight_decay

    @classmethod
    def of(cls, federation: Federation, weight_decay: float) -> Objective:
        """Return the objective of a federation whose weights are its sample counts."""
        inputs, targets = np.asarray(federation.inputs), np.asarray(federation.targets)
        return cls(inputs, targets.astype(np.int64), weight_decay)

    def value(self, x: Vector) -> float:
        """Return F(x)."""
        width = self.features.shape[1] - 1
        weights, biases = x[: 2 * width].reshape(2, width), x[2 * width :]
        difference = np.append(weights[1] - weights[0], biases[1] - biases[0])
        losses = np.logaddexp(0.0, -self.signs * (self.features @ difference))
        return float(losses.mean() + self.weight_decay / 2 * (x @ x))

    @functools.cached_property
    def minimum(self) -> float:
        """F*, by Newton's method until the gradient's norm is below 1e-12."""
        u = np.zeros(self.features.shape[1])
        for _ in range(100):
            margins = self.signs * (self.features @ u)
            wrong = np.exp(-np.logaddexp(0.0, margins))
            gradient = -(self.features.T @ (self.signs * wrong)) / len(margins) + self.weight_decay / 2 * u
            if np.linalg.norm(gradient) < 1e-12:
                break
            curvature = (self.features * (wrong * (1 - wrong) / len(margins))[:, None]).T @ self.features
            u = u - np.linalg.solve(curvature + self.weight_decay / 2 * np.eye(len(u)), gradient)
        losses = np.logaddexp(0.0, -self.signs * (self.features @ u))
        return float(losses.mean() + self.weight_decay / 4 * (u @ u))


class Gaps(Callback):
    """Keeps F - F* and the test accuracy after the rounds that were asked for."""

    def __init__(self, objective: Objective, rounds: list[int]) -> None:
        self.objective = objective
        self.rounds = rounds
        self.gaps: list[float] = []
        self.accuracy: list[float] = []

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Compute F after this round if it was asked for."""
        if record.round in self.rounds:
            x = run.state["x"].detach().cpu().double().numpy()
            gap = self.objective.value(x) - self.objective.minimum
            self.gaps.append(float(f"{gap:.5g}"))
            self.accuracy.append(round(record.test_accuracy or 0.0, 4))


@functools.lru_cache(maxsize=2)
def _problem(data: str, weight_decay: float, data_dir: Path | None) -> tuple[Federation, Objective]:
    settings = json.loads(data)
    federation = build_federation(settings, settings.pop("seed"), data_dir)
    return federation, Objective.of(federation, weight_decay)


def run_gaps(settings: dict[str, Any], deadline: Deadline, data_dir: Path | None = None) -> dict[str, Any]:
    """Run the algorithms of one trial side by side.

    Args:
        settings: data, model, steps, batch_size, weight_decay, participation, seed; "algorithms", tables by name;
            "at", the rounds after which F - F* is kept, of which the last ends the runs.
        deadline: ends the runs when the time is up.
        data_dir: the folder to search first for data files.

    Returns:
        What a record keeps: under "gaps" F - F* of every algorithm after each of these rounds (fewer if it
        diverged or was cut off), under "accuracies" the test accuracy, and the minimum F*.
    """
    data = json.dumps(settings["data"], sort_keys=True)
    federation, objective = _problem(data, settings["weight_decay"], data_dir)
    at = settings["at"]
    setup = Setup(
        rounds=at[-1],
        steps=build_steps(settings["steps"]),
        batch_size=settings["batch_size"],
        weight_decay=settings["weight_decay"],
        participation=settings.get("participation"),
        seed=settings["seed"],
        engine="lanes",
        compile=at[-1] > 10,  # compiled steps stay on disk for the trials that follow; quick ones gain nothing
        eval_every=at[0],
    )
    fleet = Simulated.of(build_model(settings["model"], settings["seed"]), federation, setup)
    names = list(settings["algorithms"])
    watched = {name: Gaps(objective, at) for name in names}
    deadlines = [deadline.of_run({**settings, "name": name}) for name in names]
    results = run_on(
        fleet,
        [build_algorithm(settings["algorithms"][name]) for name in names],
        [[watched[name], own] for name, own in zip(names, deadlines, strict=True)],
        [None] * len(names),
    )
    return {
        "gaps": {name: watched[name].gaps for name in names},
        "accuracies": {name: watched[name].accuracy for name in names},
        "minimum": float(f"{objective.minimum:.8g}"),
        "diverged": [n for n, result in zip(names, results, strict=True) if result.status == "diverged"],
        "rounds": max(len(result.history) for result in results),
        "best": None,
        "rounds_to_target": None,
        "finished": not any(own.passed for own in deadlines),
    }
