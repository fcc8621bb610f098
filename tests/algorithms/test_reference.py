"""The trajectory of every algorithm equals the equations of its paper in plain NumPy."""

from functools import partial

import numpy as np
import pytest

import fedagrac as fg
import numpy_reference as reference
from fedagrac.algorithms import PAPER_NAMES
from numpy_rivals import adaptive, heavy_ball
from quadratics import K, Trace, cohorts, quadratics

ROUNDS, ETA = 7, 0.02


def assert_agrees(algorithm, expected, **options):
    trace = Trace()
    quadratics().simulate(algorithm, rounds=ROUNDS, callbacks=[trace], **options)
    assert len(trace.x) == len(expected) == ROUNDS
    for ours, theirs in zip(trace.x, expected, strict=True):
        assert np.linalg.norm(ours - theirs) <= 1e-10 * np.linalg.norm(theirs)


def problem():
    q = quadratics()
    return q.gradient, q.omega, K, q.start(), ETA, ROUNDS


def test_fedavg_follows_its_equations():
    assert_agrees(fg.FedAvg(lr=ETA), reference.fedavg(*problem()))


@pytest.mark.parametrize("mu", [0.01, 0.5, 3.0])
def test_fedprox_follows_its_equations(mu):
    assert_agrees(fg.FedProx(lr=ETA, mu=mu), reference.fedprox(*problem(), mu=mu))


def test_fednova_follows_its_equations():
    assert_agrees(fg.FedNova(lr=ETA), reference.fednova(*problem()))


@pytest.mark.parametrize("gradient", ["full", "first"])  # the same with full batches
def test_fedlin_follows_its_equations(gradient):
    assert_agrees(fg.FedLin(lr=ETA, gradient=gradient), reference.fedlin(*problem()))


@pytest.mark.parametrize("economical", [True, False])
def test_scaffold_follows_its_equations(economical):
    assert_agrees(fg.Scaffold(lr=ETA, economical=economical), reference.scaffold(*problem()))


@pytest.mark.parametrize("option", ["I", "II"])
@pytest.mark.parametrize("server_lr", [0.5, 1.0, 1.3])
def test_scaffold_follows_both_options_of_its_paper_with_any_server_step(option, server_lr):
    ours = fg.Scaffold(lr=ETA, option=option, server_lr=server_lr)
    assert_agrees(ours, reference.scaffold(*problem(), option=option, server_lr=server_lr))


SOME = 3
FALLING = fg.schedule.Exponential(0.03, 0.6)
ETAS = [0.03 * 0.6**t for t in range(ROUNDS)]
RULES = {
    "fedavg": reference.fedavg,
    "fedprox": partial(reference.fedprox, mu=0.1),
    "fednova": reference.fednova,
    "fedlin": reference.fedlin,
    "scaffold": reference.scaffold,
    "fedagrac": partial(reference.fedagrac, lam=lambda t: 1.0),
    "fedagrac-avg": partial(reference.fedagrac, lam=lambda t: 1.0, transmit="average"),
    "fedagrac-first": partial(reference.fedagrac, lam=lambda t: 1.0, transmit="first"),
    "fedagrac-reverse": partial(reference.fedagrac, lam=lambda t: 1.0, transmit="reverse"),
}


def some_clients():
    """Return the problem with a falling step size, and three of the six clients in each round."""
    q = quadratics()
    return (q.gradient, q.omega, K, q.start(), ETAS, ROUNDS), {"cohorts": cohorts(SOME, ROUNDS)}


@pytest.mark.parametrize("name", PAPER_NAMES)
def test_with_absent_clients_and_a_falling_step_size(name):
    given, present = some_clients()
    assert_agrees(fg.algorithm(name, lr=FALLING), RULES[name](*given, **present), participation=SOME)


@pytest.mark.parametrize("nesterov", [False, True])
def test_fednova_with_momentum_divides_by_the_norm_of_its_coefficients(nesterov):
    given, present = some_clients()
    ours = fg.FedNova(lr=FALLING, local=fg.SGD(momentum=0.6, nesterov=nesterov))
    theirs = reference.fednova(*given, momentum=0.6, nesterov=nesterov, **present)
    assert_agrees(ours, theirs, participation=SOME)


ADAM = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}


@pytest.mark.parametrize("inner", ["fedagrac", "scaffold"])
@pytest.mark.parametrize("outer", ["fedavgm", "fedadam"])
def test_a_server_optimizer_moves_along_the_change_that_the_algorithm_inside_makes(outer, inner):
    if outer == "fedavgm":
        settings, rule = {"momentum": 0.7, "server_lr": 0.8}, heavy_ball(momentum=0.7, server_lr=0.8)
    else:
        settings, rule = ADAM, adaptive("fedadam", **ADAM)
    given, present = some_clients()
    ours = fg.algorithm(outer, lr=FALLING, inner=fg.algorithm(inner, lr=FALLING), **settings)
    assert_agrees(ours, RULES[inner](*given, server=rule, **present), participation=SOME)


def test_option_one_with_absent_clients():
    """A client's control variate is its gradient at the model of the last round in which it took part."""
    q, x = quadratics(), quadratics().start()
    c_i, c = np.zeros((6, 5)), np.zeros(5)

    class Follow(fg.Callback):
        def on_round(self, run, record):
            nonlocal x, c
            S = run.cohort.clients
            local = []
            for i in S:
                y = x.copy()
                for _ in range(K[i]):
                    y = y - ETA * (q.gradient(i, y) - c_i[i] + c)
                local.append(y)
            new = np.array([q.gradient(i, x) for i in S])
            c = c + q.omega[S] @ (new - c_i[S])
            c_i[S] = new
            x = q.omega[S] @ np.array(local) / q.omega[S].sum()
            assert np.linalg.norm(run.state["x"].numpy() - x) <= 1e-10 * np.linalg.norm(x)
            assert np.linalg.norm(run.state["nu"].numpy() - c) <= 1e-10 * np.linalg.norm(c)

    q.simulate(fg.Scaffold(lr=ETA, option="I"), rounds=ROUNDS, participation=2, callbacks=[Follow()])


@pytest.mark.parametrize("transmit", ["hybrid", "average", "first", "reverse"])
@pytest.mark.parametrize("start", ["full", "zeros"])
@pytest.mark.parametrize("local_reference", ["mean", "transmitted"])
@pytest.mark.parametrize("lam", [1.0, 0.3])
def test_fedagrac_follows_algorithm_1(transmit, start, local_reference, lam):
    ours = fg.FedaGrac(lr=ETA, calibration=lam, transmit=transmit, init=start, local_reference=local_reference)
    theirs = reference.fedagrac(
        *problem(), lam=lambda t: lam, transmit=transmit, start=start, reference=local_reference
    )
    assert_agrees(ours, theirs)


@pytest.mark.parametrize("first_steps", [1, 4, 10])
def test_fedagrac_averages_its_first_steps(first_steps):
    ours = fg.FedaGrac(lr=ETA, transmit="first", first_steps=first_steps)
    assert_agrees(ours, reference.fedagrac(*problem(), lam=lambda t: 1.0, transmit="first", n_first=first_steps))


def test_fedagrac_follows_a_calibration_schedule():
    ours = fg.FedaGrac(lr=ETA, calibration=fg.schedule.Piecewise({0: 0.1, 2: 0.5, 5: 1.0}))
    assert_agrees(ours, reference.fedagrac(*problem(), lam=lambda t: 0.1 if t < 2 else 0.5 if t < 5 else 1.0))


@pytest.mark.parametrize("value", [-1.0, float("nan"), float("inf"), "1", None])
@pytest.mark.parametrize("kind", [fg.FedaGrac, partial(fg.DiLoCo, merge="calibrated")], ids=["fedagrac", "diloco"])
def test_a_calibration_schedule_is_checked_for_every_round_before_the_first(kind, value):
    later = kind(lr=ETA, calibration=lambda t: 1.0 if t < 2 else value)
    with pytest.raises(fg.InputError, match=r"calibration of \w+ in round 3 = .*: expected a number of at"):
        quadratics().simulate(later)


def test_tiny_steps_use_the_accumulated_mean_gradient():
    """Below eta K = 0.01 the mean is accumulated; the trajectory still equals that of the paper."""
    q = quadratics()
    trace = Trace()
    q.simulate(fg.FedaGrac(lr=1e-4), rounds=5, callbacks=[trace])
    expected = reference.fedagrac(q.gradient, q.omega, K, q.start(), 1e-4, 5, lam=lambda t: 1.0)
    assert np.linalg.norm(trace.x[-1] - expected[-1]) <= 1e-10 * np.linalg.norm(expected[-1])


def test_step_counts_that_change_every_round():
    q = quadratics()
    table = [[2, 3, 5, 8, 13, 40], [40, 1, 1, 1, 1, 1], [7, 7, 7, 7, 7, 7]]
    trace = Trace()
    q.simulate(fg.FedaGrac(lr=ETA), rounds=3, steps=fg.Explicit(table), callbacks=[trace])
    x = q.start()
    nu_i = [q.gradient(i, x) for i in range(6)]
    nu = sum(w * g for w, g in zip(q.omega, nu_i, strict=True))
    for t, row in enumerate(table):
        K_bar = float(q.omega @ row)
        models, sent, means = [], [], []
        for i, k in enumerate(row):
            y, gradients = x.copy(), []
            for _ in range(k):
                gradients.append(q.gradient(i, y))
                y = y - ETA * (gradients[-1] + nu - nu_i[i])
            models.append(y)
            means.append(np.mean(gradients, axis=0))
            sent.append(gradients[0] if k > K_bar + 1e-9 else means[-1])
        x, nu, nu_i = q.omega @ models, q.omega @ sent, means
        assert np.linalg.norm(trace.x[t] - x) <= 1e-10 * np.linalg.norm(x)


def test_weight_decay_adds_its_multiple_of_x_to_every_gradient():
    q = quadratics()

    def decayed(i, x):
        return q.gradient(i, x) + 0.3 * x

    for ours, theirs in (
        (fg.FedAvg(lr=ETA), reference.fedavg(decayed, q.omega, K, q.start(), ETA, ROUNDS)),
        (fg.FedLin(lr=ETA), reference.fedlin(decayed, q.omega, K, q.start(), ETA, ROUNDS)),
        (fg.FedaGrac(lr=ETA), reference.fedagrac(decayed, q.omega, K, q.start(), ETA, ROUNDS, lam=lambda t: 1.0)),
    ):
        assert_agrees(ours, theirs, weight_decay=0.3)


def test_user_given_weights_replace_sample_counts():
    q = quadratics()
    omega = np.array([0.3, 0.05, 0.05, 0.2, 0.3, 0.1])
    expected = reference.fednova(q.gradient, omega, K, q.start(), ETA, ROUNDS)
    assert_agrees(fg.FedNova(lr=ETA), expected, federation=q.federation(weights=omega))
