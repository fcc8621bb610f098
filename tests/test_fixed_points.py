"""Quadratics: what `fedagrac.theory.quadratic` predicts is what the simulation does, for every algorithm."""

import dataclasses
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import fedagrac as fg
from fedagrac.errors import FedagracError, InputError
from fedagrac.theory import quadratic
from fedagrac.theory.quadratic import Quadratic, largest_stable_lr, recommend, round_map
from quadratics import Trace, half_square

EXACT = {
    "scaffold": fg.Scaffold(lr=1.0),
    "scaffold full": fg.Scaffold(lr=1.0, init="full"),
    "fedlin": fg.FedLin(lr=1.0),
    "fedagrac": fg.FedaGrac(lr=1.0),
    "fedagrac-avg": fg.FedaGrac(lr=1.0, transmit="average"),
    "fedagrac-first": fg.FedaGrac(lr=1.0, transmit="first"),
    "fedagrac-reverse": fg.FedaGrac(lr=1.0, transmit="reverse"),
    "fedagrac transmitted": fg.FedaGrac(lr=1.0, local_reference="transmitted"),
    "fedagrac of 3": fg.FedaGrac(lr=1.0, first_steps=3, init="zeros"),
    "fedagrac-first of 3 transmitted": fg.FedaGrac(
        lr=1.0, transmit="first", first_steps=3, local_reference="transmitted"
    ),
}
BIASED = {
    "fedavg": fg.FedAvg(lr=1.0),
    "fedprox": fg.FedProx(lr=1.0, mu=0.4),
    "fednova": fg.FedNova(lr=1.0),
    "fedagrac half": fg.FedaGrac(lr=1.0, calibration=0.5),
    "fedagrac-reverse of 3 transmitted half": fg.FedaGrac(
        lr=1.0, transmit="reverse", first_steps=3, local_reference="transmitted", calibration=0.5
    ),
}
ALL = EXACT | BIASED


@dataclasses.dataclass
class Problem:
    """Random least-squares clients, to predict and to simulate."""

    seed: int
    d: int
    sizes: list
    steps: list
    weights: list | None
    weight_decay: float
    fraction: float

    def __post_init__(self):
        rng = np.random.default_rng(self.seed)
        X = [rng.normal(size=(n + 2 * self.d, self.d)) * rng.uniform(0.7, 1.3, self.d) for n in self.sizes]
        self.arrays = [(x, x @ rng.normal(0, 3, self.d) + rng.normal(0, 0.5, len(x))) for x in X]
        self.x1 = rng.normal(size=self.d)

    @property
    def quadratic(self):
        return Quadratic.least_squares(self.arrays, self.weight_decay, self.weights)

    def settings(self, rounds, callbacks):
        module = torch.nn.Linear(self.d, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(self.x1)[None])
        federation = fg.Federation.from_arrays(self.arrays, weights=self.weights)
        return (module, federation), dict(
            rounds=rounds, steps=fg.Explicit([self.steps]), batch_size=None, loss=half_square, callbacks=callbacks,
            weight_decay=self.weight_decay, device="cpu", compile=False, eval_every=10**6,
        )  # fmt: skip

    def simulate(self, algorithm, rounds, callbacks=()):
        (module, federation), options = self.settings(rounds, callbacks)
        return fg.simulate(module, federation, algorithm, engine="serial", **options)

    def simulate_many(self, algorithms, rounds):
        (module, federation), options = self.settings(rounds, None)
        return fg.simulate_many(module, federation, algorithms, engine="lanes", **options)


@st.composite
def problems(draw, most_steps=40):
    M = draw(st.integers(2, 3))
    raw = draw(st.none() | st.lists(st.integers(1, 9), min_size=M, max_size=M))
    return Problem(
        seed=draw(st.integers(0, 2**32 - 1)),
        d=draw(st.integers(1, 3)),
        sizes=draw(st.lists(st.integers(1, 9), min_size=M, max_size=M)),
        steps=draw(st.lists(st.integers(1, 6) | st.integers(1, most_steps), min_size=M, max_size=M)),
        weights=raw and [v / sum(raw) for v in raw],
        weight_decay=draw(st.sampled_from([0.0, 0.3])),
        fraction=draw(st.floats(0.3, 0.8)),
    )


def at(algorithm, lr, **settings):
    return dataclasses.replace(algorithm, lr=lr, **settings)


def rate(algorithm, problem):
    """Return the given fraction of the largest stable eta."""
    return problem.fraction * largest_stable_lr(algorithm, problem.quadratic, problem.steps)


def close(a, b, tolerance=1e-8):
    return np.linalg.norm(np.subtract(a, b)) <= tolerance * max(np.linalg.norm(b), 1e-3)


class Probe(fg.Callback):
    """Puts the server's whole state before every round, and keeps what one simulated round makes of it.

    The simulated round is affine, so its images of 0 and of the unit vectors are its b and the columns of its A.
    """

    def __init__(self, states, d):
        self.states, self.d, self.images = states, d, []

    def put(self, run, z):
        x, *rest = torch.from_numpy(z).reshape(-1, self.d)
        run.state = {**run.state, "x": x}
        if rest:
            rows = torch.stack(rest[1:])
            run.state = {**run.state, "nu": rest[0]}
            run.table.put(np.arange(len(rows)), {"nu": rows, "v": rows})

    def on_start(self, run):
        self.put(run, self.states[0])

    def on_round(self, run, record):
        parts = [run.state["x"]]
        if "nu" in run.state:
            parts += [run.state["nu"], run.table.rows(np.arange(run.federation.num_clients))["nu"].flatten()]
        self.images.append(torch.cat(parts).numpy().copy())
        if len(self.images) < len(self.states):
            self.put(run, self.states[len(self.images)])


def simulated_map(problem, algorithm, size):
    probe = Probe([np.zeros(size), *np.eye(size)], problem.d)
    problem.simulate(algorithm, size + 1, [probe])
    offset, *columns = probe.images
    return np.stack(columns, axis=1) - offset[:, None], offset


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(problem=problems())
def test_matrix_radius_and_fixed_point_are_those_of_simulated_rounds(name, problem):
    """Eigenvalues may be complex pairs, so the radius is not read off a trajectory but off the simulated matrix."""
    lr = 2 * problem.fraction / problem.quadratic.curvature
    algorithm = at(ALL[name], lr * np.max(problem.steps) if name == "fedlin" else lr)
    one = round_map(algorithm, problem.quadratic, problem.steps)
    A, b = simulated_map(problem, algorithm, one.size)
    assert close(one.matrix, A)
    assert close(one.offset, b)
    radius = np.abs(np.linalg.eigvals(A)).max()
    assert one.spectral_radius == pytest.approx(radius, rel=1e-8)
    assert close(one.fixed_point, np.linalg.solve(np.eye(one.size) - A, b)[: problem.d])


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=20)
@given(problem=problems())
def test_rounds_of_the_map_are_rounds_of_the_simulation(name, problem):
    algorithm = at(ALL[name], rate(ALL[name], problem))
    trace = Trace()
    problem.simulate(algorithm, 3, [trace])
    one = round_map(algorithm, problem.quadratic, problem.steps)
    z = one.start(problem.x1)
    for x in trace.x:
        z = one(z)
        assert close(one.model(z), x)


@settings(max_examples=20)
@given(problem=problems(most_steps=12))
def test_long_simulations_end_at_the_fixed_point(problem):
    algorithms = [at(algorithm, rate(algorithm, problem)) for algorithm in ALL.values()]
    maps = [round_map(algorithm, problem.quadratic, problem.steps) for algorithm in algorithms]
    slowest = max(one.spectral_radius for one in maps)
    rounds = int(np.ceil(np.log(1e-10) / np.log(slowest)))
    print("rounds", rounds, slowest, problem.steps)
    for name, one, result in zip(ALL, maps, problem.simulate_many(algorithms, rounds), strict=True):
        assert close(one.fixed_point, result.vector.numpy()), name
        if name in EXACT:
            assert close(one.fixed_point, problem.quadratic.minimiser), name
