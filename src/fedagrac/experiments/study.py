"""Studies of experiments: constants, the theorems' bounds, step sizes, and the measured errors of algorithms."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.algorithms import Algorithm, FedaGrac
from fedagrac.core.schedule import value_at
from fedagrac.data.batches import epoch_steps
from fedagrac.errors import InputError
from fedagrac.experiments.run import Prepared, prepare
from fedagrac.heterogeneity import Explicit
from fedagrac.rounds.api import run_on
from fedagrac.rounds.callback import Callback
from fedagrac.rounds.fleet import Simulated
from fedagrac.theory.bounds import Bound, theorem1, theorem2
from fedagrac.theory.measure import Constants, constants
from fedagrac.theory.problem import LARGEST_HESSIAN, Problem, as_array
from fedagrac.theory.quadratic import Quadratic, largest_stable_lr, recommend, round_map
from fedagrac.theory.rates import Slope, prescribed_lr, slope
from fedagrac.theory.stability import first_steps_of

if TYPE_CHECKING:
    from pathlib import Path

    import numpy.typing as npt

    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord
    from fedagrac.theory.quadratic import Recommendation

__all__ = ["ErrorCurve", "Errors", "Rate", "Study", "measure_rates", "study"]

DIRECTIONS = 48
"""The number of directions in which stable step sizes are computed."""

FACTORS = (0.125, 0.25, 0.5, 1.0)
"""The sizes at which a rate is measured, as fractions of the experiment's own size."""


class Errors(Callback):
    """Measure the error of the model before the first round, every few rounds, and after the last.

    Attributes:
        problem: the problem that the run solves.
        best: F(x*), or None if it is unknown.
        every: the number of rounds between measurements.
        rounds: the rounds at which the error was measured; 0 is before the first round.
        values: F(x_t) - F(x*), or |gradient of F|^2 if F(x*) is unknown.
    """

    def __init__(self, problem: Problem, best: float | None, every: int = 1) -> None:
        self.problem = problem
        self.best = best
        self.every = every
        self.rounds: list[int] = []
        self.values: list[float] = []

    def on_start(self, run: Run) -> None:
        """Measure the error of the initial model."""
        self._measure(0, run)

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Measure the error after every `every`-th round and after the last."""
        if record["round"] % self.every == 0 or record["round"] == run.rounds:
            self._measure(record["round"], run)

    def _measure(self, t: int, run: Run) -> None:
        """Store the error after t rounds."""
        x = run.state["x"].detach().to("cpu", torch.float64)
        self.rounds.append(t)
        if self.best is not None:
            self.values.append(self.problem.total(x) - self.best)
        else:
            g = self.problem.total_gradient(x)
            self.values.append(float(g @ g))


@dataclass(frozen=True, eq=False)
class ErrorCurve:
    """The error of one run: F(x_t) - F(x*), or |gradient of F|^2 if x* is unknown.

    Attributes:
        label: the name of the run.
        lr: eta, that of the first round if it changes.
        status: how the run ended.
        rounds: the rounds at which the error was measured; 0 is before the first round.
        errors: the error at each of these rounds.
        stable_lr: the largest stable eta on the quadratic model at x*; None without such a model.
        limit: F - F(x*) at the algorithm's limit on that model with exact gradients; None if there is no limit.
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
    """FedaGrac's error as a function of T, M or Kbar, at the eta that Theorem 3 prescribes for each run.

    Attributes:
        name: T, M or Kbar.
        sizes: the value of T, M or Kbar in each run.
        errors: the error at the end of each run.
        lrs: the eta of each run.
        slope: the slope of log error over log size.
    """

    name: str
    sizes: list[float]
    errors: list[float]
    lrs: list[float]
    slope: Slope


@dataclass(frozen=True, eq=False)
class Study:
    """The results of studying an experiment.

    Attributes:
        name: the name of the experiment.
        rounds: T.
        weights: omega_i, [M].
        steps: K_i in round 1, [M].
        constants: the measured constants of the problem.
        bounds: Theorems 1 and 3 for a convex problem, Theorem 2 for any other.
        recommendation: eta and lambda for FedaGrac on the quadratic model at x*; None without such a model.
        curves: the measured errors of each algorithm.
        rates: the error as a function of T, M and Kbar; empty if it was not measured.
    """

    name: str
    rounds: int
    weights: npt.NDArray[np.float64]
    steps: npt.NDArray[np.int64]
    constants: Constants
    bounds: tuple[Bound, ...]
    recommendation: Recommendation | None
    curves: tuple[ErrorCurve, ...]
    rates: tuple[Rate, ...] = ()

    def described(self) -> dict[str, Any]:
        """Return the results as plain values for JSON."""
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
    setup = prepared.fleet.setup
    return Problem(
        prepared.module, prepared.federation, weight_decay=setup.weight_decay, batch_size=setup.batch_size
    )


def _fleet(prepared: Prepared, **changes: Any) -> Simulated:
    """Return the clients of an experiment with some options changed."""
    setup = dataclasses.replace(prepared.fleet.setup, **{"steps": prepared.steps, **changes})
    return Simulated.of(prepared.module, prepared.federation, setup)


def study(
    prepared: Prepared,
    callbacks: Sequence[Callback] = (),
    say: Callable[[str], None] = lambda stage: None,
) -> Study:
    """Measure the constants of an experiment, evaluate the bounds and run the algorithms; return the results.

    Args:
        prepared: the experiment.
        callbacks: callbacks of every run.
        say: called with the name of each stage when it begins.
    """
    fed, e = prepared.federation, prepared.experiment
    problem = problem_of(prepared)
    if problem.is_convex() and problem.weight_decay == 0:
        accepted = "a number above 0, such as 0.01: without it softmax regression is not strongly convex"
        raise InputError("weight_decay", 0.0, accepted)
    say("constants")
    measured = constants(problem)
    K = prepared.steps.counts(0, fed.num_clients, e.seed)
    prediction = None
    if measured.optimum is not None and measured.value is not None and problem.size <= LARGEST_HESSIAN:
        say("quadratic model")
        prediction = _Prediction.at(problem, measured.optimum, measured.value, K)
    fleet = _fleet(prepared, eval_every=e.rounds)
    curves = []
    for entry in prepared.entries:
        say(entry.label)
        errors = Errors(problem, measured.value, every=max(1, e.rounds // 200))
        (result,) = run_on(fleet, [entry.algorithm], [[errors, *callbacks]], [None])
        stable, limit = (None, None) if prediction is None else prediction.of(entry.algorithm)
        curves.append(
            ErrorCurve(
                label=entry.label,
                lr=value_at("lr", entry.algorithm.lr, 0),
                status=result.status,
                rounds=errors.rounds,
                errors=errors.values,
                stable_lr=stable,
                limit=limit,
            )
        )
    say("step size")
    return Study(
        name=e.name,
        rounds=e.rounds,
        weights=fed.weights,
        steps=K,
        constants=measured,
        bounds=_bounds(measured, fed.weights, K, e.rounds),
        recommendation=None if prediction is None else recommend(prediction.reduced, K, calibrations=(1.0,)),
        curves=tuple(curves),
    )


def quadratic_at(problem: Problem, point: npt.NDArray[np.float64]) -> Quadratic:
    """Return the quadratic model of a problem at a point, with every F_i to second order."""
    x = torch.from_numpy(point)
    hessians = np.stack([as_array(problem.hessian(i, x)) for i in range(problem.federation.num_clients)])
    gradients = as_array(problem.gradients(x))
    fed = problem.federation
    return Quadratic(hessians, hessians @ point - gradients, fed.weights, fed.masses)


def stiff_and_soft(model: Quadratic, at: npt.NDArray[np.float64], directions: int) -> Quadratic:
    """Return a quadratic model restricted to the stiffest and softest directions of F around a point.

    The stiffest directions decide which step is stable; the softest decide how fast a stable one converges.
    With all 248 directions of a9a one spectral radius takes seconds, and a step size needs a hundred of them.
    """
    if model.dimension <= directions:
        U = np.eye(model.dimension)
    else:
        soft = directions // 4
        vectors = np.linalg.eigh(model.hessian)[1]
        U = np.concatenate([vectors[:, :soft], vectors[:, soft - directions :]], axis=1)
    pulls = model.linear - model.hessians @ at
    return Quadratic(U.T @ model.hessians @ U, pulls @ U, model.weights, model.masses)


@dataclass(frozen=True, eq=False)
class _Prediction:
    """What the quadratic model at x* predicts about algorithms.

    Attributes:
        problem: the problem.
        model: its quadratic model at x*.
        reduced: the model restricted to the stiffest and softest directions.
        steps: K_i, [M].
        best: F(x*).
    """

    problem: Problem
    model: Quadratic
    reduced: Quadratic
    steps: npt.NDArray[np.int64]
    best: float

    @classmethod
    def at(
        cls, problem: Problem, optimum: npt.NDArray[np.float64], best: float, steps: npt.NDArray[np.int64]
    ) -> _Prediction:
        """Make the quadratic model of a problem at its optimum."""
        model = quadratic_at(problem, optimum)
        return cls(problem, model, stiff_and_soft(model, optimum, DIRECTIONS), steps, best)

    def of(self, algorithm: Algorithm) -> tuple[float | None, float | None]:
        """Return an algorithm's largest stable eta and F - F(x*) at its limit, each None if it does not exist."""
        if isinstance(algorithm, FedaGrac) and callable(algorithm.calibration):
            return None, None  # a schedule of lambda has no single limit
        if callable(algorithm.lr) or not algorithm.local.plain:
            return None, None  # neither has a schedule of eta, and with other steps the map is not affine
        epochs = epoch_steps(self.problem.federation.sizes, self.problem.batch_size)
        first = first_steps_of(algorithm, self.steps, epochs)
        stable = largest_stable_lr(algorithm, self.reduced, self.steps, first)
        if algorithm.lr >= stable:
            return stable, None
        limit = round_map(algorithm, self.model, self.steps, first).fixed_point
        return stable, self.problem.total(torch.from_numpy(limit)) - self.best


def _bounds(measured: Constants, weights: npt.ArrayLike, K: npt.ArrayLike, rounds: int) -> tuple[Bound, ...]:
    """Return the bounds of the theorems that apply to the problem."""
    if measured.local_values is None:
        return (theorem2(weights, K, L=measured.L, sigma2=measured.sigma2, gap=measured.gap, rounds=rounds),)
    return theorem1(weights, K, measured.local_values, L=measured.L), measured.theorem3(weights, K, rounds)


def measure_rates(
    prepared: Prepared,
    measured: Constants,
    seeds: int = 3,
    data_dir: str | Path | None = None,
    say: Callable[[str], None] = lambda stage: None,
) -> tuple[Rate, ...]:
    """Measure how FedaGrac's error after T rounds depends on T, on M and on Kbar; return one rate for each.

    One of the three is an eighth, a quarter, a half and the whole of the experiment's value, while the others stay
    the same (except that K_i are integers of at least 1). Every run has lambda = 1 and the eta that Theorem 3
    prescribes for it. A different number of clients is a different problem, so its constants are measured again.
    The whole experiment is part of all three rates and runs once per seed.

    Args:
        prepared: the experiment.
        measured: its constants.
        seeds: the number of seeds per setting.
        data_dir: the folder to search first for data files.
        say: called with the name of each run when it begins.
    """
    e = prepared.experiment
    if measured.mu is None:
        raise InputError("model", e.model.name, "a convex problem: the rates are those of Theorem 3")
    whole = _Part(prepared, problem_of(prepared), measured)
    whole_errors: list[float] = []
    rates = []
    for name, parts in _parts(whole, data_dir).items():
        sizes, errors, lrs = [], [], []
        for part in [*parts, whole]:
            for index, seed in enumerate(range(e.seed, e.seed + seeds)):
                say(f"{name}, seed {seed}")
                if part is whole and len(whole_errors) == index:
                    whole_errors.append(whole.run(seed))
                sizes.append(part.sizes[name])
                errors.append(whole_errors[index] if part is whole else part.run(seed))
                lrs.append(part.lr)
        rates.append(Rate(name, sizes, errors, lrs, slope(sizes, errors)))
    return tuple(rates)


@dataclass(frozen=True, eq=False)
class _Part:
    """An experiment with FedaGrac alone, with fewer rounds or smaller step counts.

    Attributes:
        prepared: the experiment.
        problem: the problem that it solves.
        constants: the constants of the problem.
        rounds: T; None for the experiment's own.
        factor: the factor on K_i.
    """

    prepared: Prepared
    problem: Problem
    constants: Constants
    rounds: int | None = None
    factor: float = 1.0

    @property
    def counts(self) -> npt.NDArray[np.int64]:
        """K_i in round 1, scaled by the factor."""
        K = self.prepared.steps.counts(0, self.prepared.federation.num_clients, self.prepared.experiment.seed)
        scaled: npt.NDArray[np.int64] = np.maximum(1, np.rint(K * self.factor).astype(np.int64))
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

    def with_clients(self, clients: int, data_dir: str | Path | None) -> _Part:
        """Return the experiment with another number of clients and the same Kbar."""
        experiment = self.prepared.experiment
        data = experiment.data.model_copy(update={"clients": clients})
        changed = experiment.model_copy(update={"data": data})
        prepared = prepare(changed, data_dir, self.prepared.imports)
        problem = problem_of(prepared)
        part = _Part(prepared, problem, constants(problem))
        return dataclasses.replace(part, factor=self.mean_steps / part.mean_steps)

    def run(self, seed: int) -> float:
        """Run the experiment with a seed; return the error at the end."""
        errors = Errors(self.problem, self.constants.value, self.length)
        fleet = _fleet(
            self.prepared,
            rounds=self.length,
            steps=Explicit([self.counts.tolist()]),
            seed=seed,
            eval_every=self.length,
            stop=None,
        )
        run_on(fleet, [FedaGrac(lr=self.lr)], [[errors]], [None])
        return errors.values[-1]


def _parts(whole: _Part, data_dir: str | Path | None) -> dict[str, list[_Part]]:
    """Return the parts of an experiment with smaller T, M or Kbar, by name."""
    fractions = FACTORS[:-1]
    clients = whole.prepared.federation.num_clients
    return {
        "T": [dataclasses.replace(whole, rounds=max(2, round(whole.length * fraction))) for fraction in fractions],
        "M": [whole.with_clients(max(2, round(clients * fraction)), data_dir) for fraction in fractions],
        "Kbar": [dataclasses.replace(whole, factor=fraction) for fraction in fractions],
    }
