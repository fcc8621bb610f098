"""An experiment studied: its constants, the bounds, the step sizes, and what its algorithms really do."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.algorithms import Algorithm, FedaGrac
from fedagrac.data.batches import epoch_steps
from fedagrac.errors import InputError
from fedagrac.experiments.run import Prepared, prepare
from fedagrac.heterogeneity import Explicit
from fedagrac.rounds.api import simulate
from fedagrac.theory.bounds import Bound, theorem1, theorem2
from fedagrac.theory.measure import Constants, constants
from fedagrac.theory.problem import LARGEST_HESSIAN, Problem, as_array
from fedagrac.theory.quadratic import Quadratic, largest_stable_lr, recommend, round_map
from fedagrac.theory.rates import Errors, Slope, prescribed_lr, slope
from fedagrac.theory.stability import first_steps_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from fedagrac.rounds.callback import Callback
    from fedagrac.theory.quadratic import Recommendation

__all__ = ["Curve", "Rate", "Study", "measure_rates", "study"]

DIRECTIONS = 48
"""Directions in which step sizes are looked for."""

FACTORS = (0.125, 0.25, 0.5, 1.0)
"""The sizes at which a rate is measured, in parts of the experiment's own."""


@dataclass(frozen=True, eq=False)
class Curve:
    """The error of one run: F(x_t) - F(x*), or |gradient|^2 where x* is not known.

    Attributes:
        label, lr, status: which algorithm, with which eta, and how its run ended.
        rounds, errors: when it was measured, 0 for the start, and what was found.
        stable_lr: the largest eta at which it converges on the quadratic model at x*; None where there is none.
        limit: F - F(x*) where it would end on that model with exact gradients.
    """

    label: str
    lr: float
    status: str
    rounds: list[int]
    errors: list[float]
    stable_lr: float | None
    limit: float | None


@dataclass(frozen=True, eq=False)
class Rate:
    """How FedaGrac's error depends on one of T, M and Kbar, each run with the eta that Theorem 3 prescribes.

    Attributes:
        name: T, M or Kbar.
        sizes, errors: one pair per run.
        lrs: the step size of each run.
        slope: of log error over log size.
    """

    name: str
    sizes: list[float]
    errors: list[float]
    lrs: list[float]
    slope: Slope


@dataclass(frozen=True, eq=False)
class Study:
    """What was found out about an experiment.

    Attributes:
        weights, steps: omega_i and the K_i of round 1, [M].
        bounds: Theorems 1 and 3 of a convex problem, Theorem 2 of any other.
        recommendation: the step size and lambda for FedaGrac on the quadratic model at x*; None without one.
        curves: one per algorithm.
        rates: how the error depends on T, M and Kbar; empty where they were not measured.
    """

    name: str
    rounds: int
    weights: npt.NDArray[np.float64]
    steps: npt.NDArray[np.int64]
    constants: Constants
    bounds: tuple[Bound, ...]
    recommendation: Recommendation | None
    curves: tuple[Curve, ...]
    rates: tuple[Rate, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return everything as plain values, for JSON."""
        c = self.constants
        return {
            "name": self.name,
            "rounds": self.rounds,
            "steps": self.steps.tolist(),
            "constants": {
                "L": c.L, "mu": c.mu, "sigma2": c.sigma2, "B": c.B, "gap": c.gap, "distance2": c.distance2,
                "optimal_value": c.value, "points": c.points,
                "local_values": None if c.local_values is None else c.local_values.tolist(),
            },
            "bounds": [
                {
                    "name": b.name, "terms": dict(b.terms), "total": b.total, "step_size": b.step_size,
                    "step_limit": b.step_limit, "condition": b.condition, "constants": dict(b.constants),
                    "note": b.note,
                }
                for b in self.bounds
            ],
            "recommendation": None if self.recommendation is None else dataclasses.asdict(self.recommendation),
            "curves": [dataclasses.asdict(curve) for curve in self.curves],
            "rates": [dataclasses.asdict(rate) for rate in self.rates],
        }  # fmt: skip


def problem_of(prepared: Prepared) -> Problem:
    """Return the problem that an experiment solves."""
    options = prepared.options()
    shared = {"weight_decay": options["weight_decay"], "batch_size": options["batch_size"]}
    return Problem(prepared.module, prepared.federation, **shared)


def study(
    prepared: Prepared,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda stage: None,
) -> Study:
    """Measure the constants of an experiment, evaluate the bounds, and run its algorithms beside them.

    `callbacks` see every run; `say` is told what is being done.
    """
    fed, e = prepared.federation, prepared.experiment
    problem = problem_of(prepared)
    if problem.is_convex() and problem.weight_decay == 0:
        wanted = "a number above 0, such as 0.01: without it softmax regression is not strongly convex"
        raise InputError("weight_decay", 0.0, wanted)
    say("constants")
    found = constants(problem)
    K = prepared.steps.counts(0, fed.num_clients, e.seed)
    epochs = epoch_steps(fed.sizes, problem.batch_size)
    model = small = None
    if found.optimum is not None and problem.size <= LARGEST_HESSIAN:
        say("quadratic model")
        model = quadratic_at(problem, found.optimum)
        small = stiff_and_soft(model, found.optimum, DIRECTIONS)
    every = max(1, e.rounds // 200)
    curves = []
    for entry in prepared.entries:
        say(entry.label)
        errors = Errors(problem, found.value, every)
        result = simulate(
            prepared.module,
            fed,
            entry.algorithm,
            callbacks=[errors, *callbacks],
            **{**prepared.options(), "eval_every": e.rounds},
        )
        stable, limit = None, None
        if model is not None and small is not None and found.value is not None:
            stable, limit = _predicted(entry.algorithm, model, small, K, epochs, problem, found.value)
        curves.append(
            Curve(entry.label, entry.algorithm.lr, result.status, errors.rounds, errors.values, stable, limit)
        )
    say("step size")
    advice = None if small is None else recommend(small, K, calibrations=(1.0,))
    bounds = _bounds(found, fed.weights, K, e.rounds)
    return Study(e.name, e.rounds, fed.weights, K, found, bounds, advice, tuple(curves))


def quadratic_at(problem: Problem, point: npt.NDArray[np.float64]) -> Quadratic:
    """Return the quadratic model of a problem at a point: every F_i to second order."""
    x = torch.from_numpy(point)
    hessians = np.stack([as_array(problem.hessian(i, x)) for i in range(problem.federation.num_clients)])
    gradients = as_array(problem.gradients(x))
    fed = problem.federation
    return Quadratic(hessians, hessians @ point - gradients, fed.weights, fed.masses)


def stiff_and_soft(model: Quadratic, at: npt.NDArray[np.float64], directions: int) -> Quadratic:
    """Return a quadratic model on the stiffest and the softest directions of F alone, around a point.

    Which step is stable is decided by the stiffest directions, how fast a stable one converges by the softest.
    With all 248 of a9a a spectral radius takes seconds, and a step size takes a hundred of them.
    """
    if model.dimension <= directions:
        U = np.eye(model.dimension)
    else:
        soft = directions // 4
        vectors = np.linalg.eigh(model.hessian)[1]
        U = np.concatenate([vectors[:, :soft], vectors[:, soft - directions :]], axis=1)
    pulls = model.linear - model.hessians @ at
    return Quadratic(U.T @ model.hessians @ U, pulls @ U, model.weights, model.masses)


def _predicted(
    algorithm: Algorithm,
    model: Quadratic,
    small: Quadratic,
    K: npt.NDArray[np.int64],
    epochs: npt.NDArray[np.int64],
    problem: Problem,
    best: float,
) -> tuple[float | None, float | None]:
    """Return the largest stable eta on the quadratic model, and the excess where the algorithm ends on it."""
    if isinstance(algorithm, FedaGrac) and callable(algorithm.calibration):
        return None, None  # a schedule has no one limit
    first = first_steps_of(algorithm, K, epochs)
    stable = largest_stable_lr(algorithm, small, K, first)
    if algorithm.lr >= stable:
        return stable, None
    limit = round_map(algorithm, model, K, first).fixed_point
    return stable, problem.total(torch.from_numpy(limit)) - best


def _bounds(found: Constants, weights: npt.ArrayLike, K: npt.ArrayLike, rounds: int) -> tuple[Bound, ...]:
    """Return the theorems that speak of the problem."""
    if found.local_values is None:
        return (theorem2(weights, K, L=found.L, sigma2=found.sigma2, gap=found.gap, rounds=rounds),)
    return theorem1(weights, K, found.local_values, L=found.L), found.theorem3(weights, K, rounds)


def measure_rates(
    prepared: Prepared,
    found: Constants,
    seeds: int = 3,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda stage: None,
) -> tuple[Rate, ...]:
    """Measure how FedaGrac's error after T rounds depends on T, on M and on Kbar.

    One of them is an eighth, a quarter, a half and the whole of the experiment's, the others stay (up to K_i being
    whole numbers of at least 1); every run has lambda = 1 and the eta that Theorem 3 prescribes for it. Another
    number of clients is another problem: its constants are measured anew. The whole, the last of all three, runs
    once. `found` are the constants of the whole experiment.
    """
    e = prepared.experiment
    whole = _Part(prepared, problem_of(prepared), found)
    if found.mu is None:
        raise InputError("model", e.model.name, "a convex problem: the rates are those of Theorem 3")
    clients = prepared.federation.num_clients
    several = [_with_clients(prepared, max(2, round(clients * factor)), data_dir) for factor in FACTORS[:-1]]
    problems = [problem_of(one) for one in several]
    fewer = [_Part(one, own, constants(own)) for one, own in zip(several, problems, strict=True)]
    parts: dict[str, list[_Part]] = {
        "T": [dataclasses.replace(whole, rounds=max(2, round(e.rounds * factor))) for factor in FACTORS[:-1]],
        "M": [dataclasses.replace(one, steps=whole.mean_steps / one.mean_steps) for one in fewer],  # Kbar stays
        "Kbar": [dataclasses.replace(whole, steps=factor) for factor in FACTORS[:-1]],
    }
    of_whole: list[float] = []
    rates = []
    for name, some in parts.items():
        sizes, errors, lrs = [], [], []
        for part in [*some, whole]:
            for place, seed in enumerate(range(e.seed, e.seed + seeds)):
                say(f"{name}, seed {seed}")
                if part is whole and len(of_whole) == place:
                    of_whole.append(whole.run(seed))
                sizes.append(part.sizes[name])
                errors.append(of_whole[place] if part is whole else part.run(seed))
                lrs.append(part.lr)
        rates.append(Rate(name, sizes, errors, lrs, slope(sizes, errors)))
    return tuple(rates)


def _with_clients(prepared: Prepared, clients: int, data_dir: str | Path | None) -> Prepared:
    """Return the experiment with another number of clients."""
    experiment = prepared.experiment
    data = experiment.data.model_copy(update={"clients": clients})
    return prepare(experiment.model_copy(update={"data": data}), data_dir, prepared.imports)


@dataclass(frozen=True, eq=False)
class _Part:
    """A problem, and how much of the rounds and steps of its experiment are run."""

    prepared: Prepared
    problem: Problem
    constants: Constants
    rounds: int | None = None
    steps: float = 1.0

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """The K_i of round 1, each times the same number."""
        K = self.prepared.steps.counts(0, self.prepared.federation.num_clients, self.prepared.experiment.seed)
        scaled: npt.NDArray[np.int64] = np.maximum(1, np.rint(K * self.steps).astype(np.int64))
        return scaled

    @property
    def mean_steps(self) -> float:
        """Kbar."""
        return float(self.prepared.federation.weights @ self.counts)

    @property
    def length(self) -> int:
        """T."""
        return self.rounds or self.prepared.experiment.rounds

    @property
    def sizes(self) -> dict[str, float]:
        """T, M and Kbar by name."""
        return {
            "T": float(self.length),
            "M": float(self.prepared.federation.num_clients),
            "Kbar": self.mean_steps,
        }

    @property
    def lr(self) -> float:
        """The eta that Theorem 3 prescribes."""
        return prescribed_lr(self.constants, self.prepared.federation.weights, self.counts, self.length)

    def run(self, seed: int) -> float:
        """Return the error at the end."""
        errors = Errors(self.problem, self.constants.value, self.length)
        changed = {
            "rounds": self.length,
            "steps": Explicit([self.counts.tolist()]),
            "seed": seed,
            "eval_every": self.length,
            "stop": None,
        }
        simulate(
            self.prepared.module,
            self.prepared.federation,
            FedaGrac(lr=self.lr),
            callbacks=[errors],
            **{**self.prepared.options(), **changed},
        )
        return errors.values[-1]
