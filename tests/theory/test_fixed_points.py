"""Quadratics: `fedagrac.theory.quadratic` predicts the simulation of every algorithm."""

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
    "scaffold one": fg.Scaffold(lr=1.0, option="I", init="full"),
    "scaffold one half": fg.Scaffold(lr=1.0, option="I", server_lr=0.5),
    "scaffold two half": fg.Scaffold(lr=1.0, server_lr=0.5),
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


class RandomProblem:
    """Random heterogeneous least-squares clients, for predictions and simulations."""

    def __init__(self, seed, most_steps=40, more_samples=0, weight_decay=0.1):
        rng = np.random.default_rng(seed)
        self.seed, self.weight_decay = seed, weight_decay
        self.d, M = rng.integers(1, 4), rng.integers(2, 4)
        self.steps = np.exp(rng.uniform(0, np.log(most_steps + 1), M)).astype(int).tolist()
        sizes = rng.integers(2, 10, M) + self.d + more_samples
        X = [rng.normal(size=(n, self.d)) * rng.uniform(0.7, 1.3, self.d) for n in sizes]
        self.arrays = [(x, x @ rng.normal(0, 3, self.d) + rng.normal(0, 0.5, len(x))) for x in X]
        self.weights = None if rng.random() < 0.5 else rng.dirichlet(np.full(M, 3.0))
        self.x1 = rng.normal(size=self.d)
        self.fraction = rng.uniform(0.3, 0.8)

    def __repr__(self):
        return f"RandomProblem(seed={self.seed}, d={self.d}, steps={self.steps}, weights={self.weights})"

    @property
    def quadratic(self):
        return Quadratic.least_squares(self.arrays, self.weight_decay, self.weights)

    def simulate(self, algorithm, rounds, callbacks, run=fg.simulate, engine="serial"):
        module = torch.nn.Linear(self.d, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            module.weight.copy_(torch.from_numpy(self.x1)[None])
        federation = fg.Federation.from_arrays(self.arrays, weights=self.weights)
        return run(
            module, federation, algorithm, rounds=rounds, steps=fg.Explicit([self.steps]), batch_size=None,
            loss=half_square, weight_decay=self.weight_decay, callbacks=callbacks, engine=engine, compile=False,
            device="cpu", eval_every=10**6,
        )  # fmt: skip


problems = st.builds(RandomProblem, st.integers(0, 2**32 - 1))
kind_problems = st.builds(
    RandomProblem,
    st.integers(0, 2**32 - 1),
    most_steps=st.just(5),
    more_samples=st.just(30),
    weight_decay=st.just(1.0),
)  # well conditioned: every algorithm converges in about 100 rounds


def at(algorithm, lr, **settings):
    return dataclasses.replace(algorithm, lr=lr, **settings)


def rate(algorithm, problem):
    """Return the given fraction of the largest stable eta."""
    return problem.fraction * largest_stable_lr(algorithm, problem.quadratic, problem.steps)


def close(a, b, tolerance=1e-8):
    return np.linalg.norm(np.subtract(a, b)) <= tolerance * max(np.linalg.norm(b), 1e-3)


class Probe(fg.Callback):
    """Sets the state of the server before every round, and keeps the state after it.

    The simulated round is affine, so its images of 0 and of the unit vectors are its b and the columns of its A.
    """

    def __init__(self, states, d):
        self.states, self.d, self.images = states, d, []

    def put(self, run, z):
        x, *rest = torch.from_numpy(z).reshape(-1, self.d)
        run.server.state = {**run.state, "x": x}
        if rest:
            rows = torch.stack(rest[1:])
            run.server.state = {**run.state, "nu": rest[0]}
            run.server.table.put(np.arange(len(rows)), {"nu": rows, "v": rows})

    def on_start(self, run):
        self.put(run, self.states[0])

    def on_round(self, run, record):
        parts = [run.state["x"]]
        if "nu" in run.state:
            clients = np.arange(run.fleet.federation.num_clients)
            parts += [run.state["nu"], run.server.table.rows(clients)["nu"].flatten()]
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
@given(problem=problems)
def test_matrix_radius_and_fixed_point_are_those_of_simulated_rounds(name, problem):
    """The radius is that of the simulated matrix; a trajectory would not show a complex pair of eigenvalues."""
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
@given(problem=problems)
def test_rounds_of_the_map_are_rounds_of_the_simulation(name, problem):
    algorithm = at(ALL[name], rate(ALL[name], problem))
    trace = Trace()
    problem.simulate(algorithm, 3, [trace])
    one = round_map(algorithm, problem.quadratic, problem.steps)
    z = one.start(problem.x1)
    for x in trace.x:
        z = one(z)
        assert close(one.model(z), x)


class After(fg.Callback):
    """Ends one of several runs that are simulated side by side."""

    def __init__(self, rounds):
        self.rounds = rounds

    def on_round(self, run, record):
        if record["round"] == self.rounds:
            run.stop("long enough")


@settings(max_examples=20)
@given(problem=kind_problems)
def test_long_simulations_end_at_the_fixed_point(problem):
    """All algorithms side by side, each until rho^rounds = 1e-10."""
    algorithms = [at(algorithm, rate(algorithm, problem)) for algorithm in ALL.values()]
    maps = [round_map(algorithm, problem.quadratic, problem.steps) for algorithm in algorithms]
    rounds = [int(np.ceil(np.log(1e-10) / np.log(one.spectral_radius))) for one in maps]
    ends = [[After(n)] for n in rounds]
    results = problem.simulate(algorithms, max(rounds), ends, run=fg.simulate_many, engine="lanes")
    for name, one, result in zip(ALL, maps, results, strict=True):
        assert close(one.fixed_point, result.vector.numpy()), name
        if name in EXACT:
            assert close(one.fixed_point, problem.quadratic.minimiser), name


TWO = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])  # (x - 1)^2 / 2 and (x + 1)^2: minimum at -1/3


def test_fedavg_by_hand():
    """eta = 0.1, K = 1 and 3: x_1 = 0.9 x + 0.1, x_2 = 0.8^3 x - (1 - 0.8^3) = 0.512 x - 0.488."""
    one = round_map(fg.FedAvg(lr=0.1), TWO, steps=[1, 3])
    assert one([0.0]) == pytest.approx([(0.1 - 0.488) / 2])
    assert one.spectral_radius == pytest.approx((0.9 + 0.512) / 2)
    assert one.fixed_point == pytest.approx([-0.194 / (1 - 0.706)])


def test_fedprox_by_hand():
    """mu = 1, eta = 0.1, K = 1 and 2: x_1 = 0.9 x + 0.1; client 2 moves -0.2 (x + 1), then 0.7 times that."""
    one = round_map(fg.FedProx(lr=0.1, mu=1.0), TWO, steps=[1, 2])
    A, b = (0.9 + 1 - 0.2 * 1.7) / 2, (0.1 - 0.2 * 1.7) / 2
    assert one.matrix == pytest.approx(np.array([[A]]))
    assert one.fixed_point == pytest.approx([b / (1 - A)])


def test_fednova_by_hand():
    """Kbar = 2, D_1 = 0.1 x - 0.1, D_2 = 0.488 x + 0.488: x - 2 (D_1 / 2 + D_2 / 6)."""
    one = round_map(fg.FedNova(lr=0.1), TWO, steps=[1, 3])
    assert one.spectral_radius == pytest.approx(1 - 0.1 - 0.488 / 3)
    assert one.fixed_point == pytest.approx([(0.1 - 0.488 / 3) / (0.1 + 0.488 / 3)])


def test_fedlin_by_hand():
    """eta = 0.3, gbar = 1.5 x + 0.5: client 1 moves 0.3 gbar, client 2 0.1 (1 + 0.8 + 0.64) gbar."""
    one = round_map(fg.FedLin(lr=0.3), TWO, steps=[1, 3])
    assert one([1.0]) == pytest.approx([1 - (0.3 + 0.244) / 2 * 2.0])
    assert one.fixed_point == pytest.approx([-1 / 3])


def test_scaffold_by_hand():
    """One round from x = 1, nu = nu_1 = nu_2 = 0 with K = 1 and 2, eta = 0.1: x_1 = 1, x_2 = 0.28."""
    one = round_map(fg.Scaffold(lr=0.1), TWO, steps=[1, 2])
    assert one.start([1.0]) == pytest.approx([1.0, 0.0, 0.0, 0.0])
    assert one(one.start([1.0])) == pytest.approx([0.64, 1.8, 0.0, 3.6])  # gradients 0; 4 and 3.2


def test_fedagrac_by_hand():
    """The same, started from the gradients 0 and 4 at x = 1, nu = 2: c = 2 and -2.

    Client 1 moves to 0.8 with mean gradient 0. Client 2 sees 4, moves to 0.8, sees 3.6, moves to 0.64; it is fast
    and sends 4, but keeps the mean 3.8.
    """
    one = round_map(fg.FedaGrac(lr=0.1), TWO, steps=[1, 2])
    assert one.start([1.0]) == pytest.approx([1.0, 2.0, 0.0, 4.0])
    assert one(one.start([1.0])) == pytest.approx([0.72, 2.0, 0.0, 3.8])
    over_both = round_map(fg.FedaGrac(lr=0.1, local_reference="transmitted"), TWO, steps=[1, 2], first_steps=2)
    assert over_both(one.start([1.0])) == pytest.approx([0.72, 1.9, 0.0, 3.8])


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("lr", [0.001, 0.1])
def test_calibrated_algorithms_end_at_the_minimiser_at_any_rate(name, lr):
    assert close(round_map(at(EXACT[name], lr), TWO, steps=[1, 3]).fixed_point, [-1 / 3], 1e-11)


def test_fednova_is_exact_only_as_the_rate_vanishes():
    bias = [
        abs(round_map(fg.FedNova(lr=lr), TWO, steps=[1, 3]).fixed_point[0] + 1 / 3) for lr in (0.1, 1e-3, 1e-5)
    ]
    assert bias[0] > 0.05
    assert bias[1] == pytest.approx(bias[2] * 100, rel=0.01)


@pytest.mark.parametrize("calibration", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("transmit", ["hybrid", "average", "first", "reverse"])
def test_as_the_rate_vanishes_lambda_interpolates_between_fedavg_and_the_minimiser(calibration, transmit):
    """The limit minimises sum_i omega_i ((1 - lambda) K_i + lambda Kbar) F_i; omega = 1/4, 3/4, K = 2, 6."""
    q = Quadratic(TWO.hessians, TWO.linear, [0.25, 0.75])
    share = np.array([0.25, 0.75]) * ((1 - calibration) * np.array([2, 6]) + calibration * 5.0)
    x = round_map(fg.FedaGrac(lr=1e-7, calibration=calibration, transmit=transmit), q, steps=[2, 6]).fixed_point
    assert x == pytest.approx([(share[0] - 2 * share[1]) / (share[0] + 2 * share[1])], abs=1e-5)


def test_with_equal_steps_a_small_lambda_is_biased_in_proportion_to_the_rate():
    small, large = (
        abs(round_map(fg.FedaGrac(lr=lr, calibration=0.5), TWO, steps=4).fixed_point[0] + 1 / 3)
        for lr in (1e-4, 1e-3)
    )
    assert large == pytest.approx(10 * small, rel=0.01)
    assert large > 1e-4


@pytest.mark.parametrize("name", ALL)
def test_simulations_converge_just_below_the_largest_stable_rate_and_diverge_just_above(name):
    problem = RandomProblem(seed=5, most_steps=6)
    largest = largest_stable_lr(ALL[name], problem.quadratic, problem.steps)

    def distance(lr, rounds):
        algorithm, trace = at(ALL[name], lr), Trace()
        problem.simulate(algorithm, rounds, [trace])
        limit = round_map(algorithm, problem.quadratic, problem.steps).fixed_point
        return [np.linalg.norm(trace.x[k : k + 10] - limit) for k in (10, rounds - 10)]

    early, late = distance(0.95 * largest, 80)
    assert late < 0.7 * early
    early, late = distance(1.05 * largest, 80)
    assert late > 1.4 * early


def test_the_largest_stable_rate_by_hand():
    """One step: 2 / (mean curvature 1.5). FedLin's product form with K = 1 is the same."""
    for algorithm in (fg.FedAvg(lr=1.0), fg.FedNova(lr=9.0), fg.FedLin(lr=1.0)):
        assert largest_stable_lr(algorithm, TWO, steps=1) == pytest.approx(4 / 3, rel=2e-6)


def test_the_recommended_setting_ends_at_the_minimiser_faster_than_others():
    problem = RandomProblem(seed=5, most_steps=6)
    q, steps = problem.quadratic, problem.steps
    best = recommend(q, steps)
    assert best.calibration == 1.0
    assert best.bias < 1e-9
    assert best.lr < best.largest_stable_lr == largest_stable_lr(fg.FedaGrac(lr=1.0), q, steps)
    assert best.spectral_radius == round_map(fg.FedaGrac(lr=best.lr), q, steps).spectral_radius
    for factor in (0.3, 0.8, 0.97, 1.03, 1.2):
        other = round_map(fg.FedaGrac(lr=factor * best.lr), q, steps)
        assert other.spectral_radius > best.spectral_radius


def test_recommendations_for_algorithms_without_a_calibration():
    best = recommend(TWO, [1, 1], fg.FedAvg(lr=1.0))
    assert best.calibration is None
    assert best.lr == pytest.approx(1 / 1.5, rel=0.01)  # with K = 1 it is gradient descent: radius |1 - 1.5 eta|
    biased = recommend(TWO, [1, 3], fg.FedNova(lr=1.0), tolerance=0.01)
    assert 0.005 < biased.bias <= 0.01
    problem = RandomProblem(seed=5, most_steps=6)
    with pytest.raises(InputError, match="tolerance = 1e-06: expected at least"):
        recommend(problem.quadratic, problem.steps, fg.FedAvg(lr=1.0))


def test_fedavg_can_be_exact_by_coincidence():
    """K = 1 and 3, eta = 1/2: x_1 = (x + 1) / 2, x_2 = -1, whose mean rests at -1/3."""
    assert round_map(fg.FedAvg(lr=0.5), TWO, steps=[1, 3]).fixed_point == pytest.approx([-1 / 3])


def test_clients_that_share_a_minimiser_may_be_calibrated_less():
    q = Quadratic(TWO.hessians, [[1.0], [2.0]], [0.5, 0.5])  # both smallest at 1
    for calibration in (0.2, 1.0):
        x = round_map(fg.FedaGrac(lr=0.1, calibration=calibration), q, [1, 3]).fixed_point
        assert x == pytest.approx([1.0])


@pytest.mark.parametrize("name", ["fedavg", "fedagrac", "fedagrac-first of 3 transmitted"])
def test_large_states_are_solved_client_by_client_with_the_same_result(name, monkeypatch):
    rng = np.random.default_rng(3)
    X = [rng.normal(size=(40, 30)) * np.geomspace(0.1, 1, 30) for _ in range(4)]
    q = Quadratic.least_squares([(x, rng.normal(size=40)) for x in X], weight_decay=1e-3)
    for lr in (0.01, 0.3):

        def solve(lr=lr):
            one = round_map(at(ALL[name], lr), q, [2, 5, 9, 30])
            return one.spectral_radius, one.fixed_point

        radius, x = solve()
        with monkeypatch.context() as patch:
            patch.setattr(quadratic, "DENSE", 0)
            large_radius, large_x = solve()
        assert large_radius == pytest.approx(radius, rel=1e-9)
        assert close(large_x, x)


def test_directions_without_data_keep_the_smallest_norm():
    q = Quadratic([np.diag([1.0, 0.0]), np.diag([2.0, 0.0])], [[1.0, 0.0], [-2.0, 0.0]], [0.5, 0.5])
    for algorithm in ALL.values():
        one = round_map(at(algorithm, 0.1), q, [2, 2])
        assert one.spectral_radius == pytest.approx(1.0)
        assert one.fixed_point[1] == pytest.approx(0.0, abs=1e-12)
        with pytest.raises(InputError, match="positive definite"):
            largest_stable_lr(algorithm, q, [2, 2])
    assert q.minimiser == pytest.approx([-1 / 3, 0.0])


def test_who_is_fast_is_decided_exactly():
    """Three equal clients with equal steps: in floats 3 x 0.1 / 0.3 would make all of them fast."""
    thirds = Quadratic(np.ones((3, 1, 1)), [[1.0], [2.0], [6.0]], np.ones(3) / 3, masses=[1, 1, 1])
    hybrid, average = (
        round_map(fg.FedaGrac(lr=0.1, transmit=transmit), thirds, 7).matrix for transmit in ("hybrid", "average")
    )
    assert np.array_equal(hybrid, average)
    assert thirds.weights.tolist() == [float(Fraction(1, 3))] * 3


def test_diverging_powers_are_an_infinite_radius():
    assert round_map(fg.FedAvg(lr=100.0), TWO, steps=1000).spectral_radius == np.inf


def test_problems_without_a_minimum_say_so():
    with pytest.raises(InputError, match="without a minimum"):
        _ = Quadratic([[[-1.0]]], [[1.0]], [1.0]).minimiser
    flat = Quadratic([[[0.0]]], [[1.0]], [1.0])
    with pytest.raises(InputError, match="without a minimum"):
        _ = flat.minimiser
    with pytest.raises(FedagracError, match="no fixed point"):
        _ = round_map(fg.FedAvg(lr=0.1), flat, 1).fixed_point
    with pytest.raises(InputError, match="all zero"):
        largest_stable_lr(fg.FedAvg(lr=0.1), flat, 1)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (([[1.0]], [[1.0]], [1.0]), "hessians = .*shape .M, d, d."),
        (([[[1.0]]], [[1.0, 2.0]], [1.0]), "linear = .*shape .1, 1."),
        (([[[1.0]]], [[1.0]], [0.5, 0.5]), "weights = .*shape .1."),
        (([[[np.nan]]], [[1.0]], [1.0]), "hessians = 'NaN or infinity'"),
        (([[[1.0, 2.0], [0.0, 1.0]]], [[1.0, 1.0]], [1.0]), "symmetric"),
        (([[[1.0]]] * 2, [[1.0]] * 2, [1.5, -0.5]), "weights above 0"),
        (([[[1.0]]] * 2, [[1.0]] * 2, [0.5, 0.6]), "a sum of 1"),
        (([[[1.0]]] * 2, [[1.0]] * 2, [0.5, 0.5], [1]), "one mass above 0 for each of 2"),
        (([[[1.0]]] * 2, [[1.0]] * 2, [0.5, 0.5], [1, 2]), "in proportion to the weights"),
    ],
)
def test_bad_problems(arguments, message):
    with pytest.raises(InputError, match=message):
        Quadratic(*arguments)


@pytest.mark.parametrize(
    "arrays", [[], [([1.0], [1.0])], [([[1.0]], [1.0, 2.0])], [([[1.0]], [1.0]), ([[1.0, 2.0]], [1.0])]]
)
def test_bad_arrays(arrays):
    with pytest.raises(InputError, match=r"expected (X \[n_i, d\]|at least one)"):
        Quadratic.least_squares(arrays)


@pytest.mark.parametrize(
    ("algorithm", "steps", "first_steps", "message"),
    [
        (fg.FedAvg(lr=0.1), [1, 0], None, r"steps\[1\] = 0"),
        (fg.FedAvg(lr=0.1), [1, 2, 3], None, "one for each of 2 clients"),
        (fg.FedAvg(lr=0.1), 1.5, None, r"steps\[0\] = 1.5"),
        (fg.FedaGrac(lr=0.1), 1, 0, r"first_steps\[0\] = 0"),
        (fg.FedaGrac(lr=0.1, calibration=fg.schedule.Piecewise({0: 0.1, 5: 1.0})), 1, None, "calibration = "),
        ("fedavg", 1, None, "algorithm = 'fedavg'"),
    ],
)
def test_bad_rounds(algorithm, steps, first_steps, message):
    with pytest.raises(InputError, match=message):
        round_map(algorithm, TWO, steps, first_steps)


def test_bad_searches():
    with pytest.raises(InputError, match="calibrations = "):
        recommend(TWO, 1, calibrations=())
    with pytest.raises(InputError, match="tolerance = 0"):
        recommend(TWO, 1, tolerance=0)
    with pytest.raises(InputError, match="x1 = "):
        round_map(fg.FedAvg(lr=0.1), TWO, 1).start([1.0, 2.0])
