"""The limit of each algorithm on quadratics with unequal steps: the minimiser, or another fixed point."""

import numpy as np
import pytest

import fedagrac as fg
from quadratics import K, quadratics

ETA = 0.02
ROUNDS = 200  # after 170 rounds all algorithms that converge are within 1e-10


def distance(algorithm, rounds=ROUNDS):
    q = quadratics()
    result = q.simulate(algorithm, rounds=rounds)
    return np.linalg.norm(result.vector.numpy() - q.minimiser())


@pytest.mark.parametrize("transmit", ["hybrid", "average", "first", "reverse"])
def test_calibrated_fedagrac_reaches_the_exact_minimiser(transmit):
    assert distance(fg.FedaGrac(lr=ETA, calibration=1.0, transmit=transmit)) < 1e-9


def test_scaffold_reaches_the_exact_minimiser():
    assert distance(fg.Scaffold(lr=ETA)) < 1e-9


def test_fedlin_reaches_the_exact_minimiser():
    assert distance(fg.FedLin(lr=0.3), rounds=200) < 1e-9


def round_map(eta, mu=0.0):
    """Return T and r of a round x -> T x + r of FedAvg or FedProx, from H_i and each client's minimiser."""
    q = quadratics()
    identity = np.eye(len(q.start()))
    T, r = np.zeros_like(identity), np.zeros(len(identity))
    for i, w in enumerate(q.omega):
        H = q.hessian(i)
        # y <- (1 - eta (H + mu)) y + eta (H x_i* + mu x~): powers of a matrix, summed in closed form
        S = identity - eta * (H + mu * identity)
        power = np.linalg.matrix_power(S, K[i])
        total = np.linalg.solve(identity - S, identity - power)
        T += w * (power + eta * mu * total)
        r += w * eta * total @ H @ q.local_minimiser(i)
    return T, r


def fixed_point(T, r):
    return np.linalg.solve(np.eye(len(r)) - T, r)


def test_fedavg_ends_at_its_own_fixed_point_and_not_at_the_minimiser():
    q = quadratics()
    x = q.simulate(fg.FedAvg(lr=ETA), rounds=ROUNDS).vector.numpy()
    assert np.linalg.norm(x - fixed_point(*round_map(ETA))) < 1e-9
    assert np.linalg.norm(x - q.minimiser()) > 0.1


def test_fedprox_ends_at_its_own_fixed_point_and_not_at_the_minimiser():
    q = quadratics()
    x = q.simulate(fg.FedProx(lr=ETA, mu=0.5), rounds=ROUNDS).vector.numpy()
    assert np.linalg.norm(x - fixed_point(*round_map(ETA, mu=0.5))) < 1e-9
    assert np.linalg.norm(x - q.minimiser()) > 0.1


def test_fednova_stops_short_of_the_minimiser():
    assert distance(fg.FedNova(lr=ETA)) > 1e-3


def test_half_calibrated_fedagrac_stops_short_of_the_minimiser():
    half = distance(fg.FedaGrac(lr=ETA, calibration=0.5))
    assert 1e-3 < half < distance(fg.FedAvg(lr=ETA))
