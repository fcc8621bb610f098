"""Studies of experiments: errors, slopes, rates and the command."""

import dataclasses
import json
import math

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
import fedagrac.theory
from fedagrac.cli.app import main
from fedagrac.errors import InputError
from fedagrac.experiments.run import prepare
from fedagrac.experiments.schema import Experiment
from fedagrac.experiments.study import (
    DIRECTIONS,
    Errors,
    measure_rates,
    problem_of,
    quadratic_at,
    stiff_and_soft,
    study,
)
from fedagrac.rounds.fleet import Simulated
from fedagrac.theory import Problem, bounds, constants
from fedagrac.theory.rates import prescribed_lr, slope
from quadratics import half_square, quadratics

TABLE = {
    "name": "small", "rounds": 24, "weight_decay": 0.5, "dtype": "float64", "lr": 0.05,
    "data": {"name": "digits", "clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}, "batch_size": 5},
    "model": {"name": "logistic"},
    "steps": {"kind": "linear", "first": 2, "increment": 4},
    "algorithm": [{"name": "fedagrac"}, {"name": "fedavg"}],
}  # fmt: skip


def small(module=None, clients=4, **changes):
    """Return a convex experiment with eight parameters and clients that disagree."""
    prepared = prepare(Experiment.of({**TABLE, **changes}))
    rng = np.random.default_rng(0)
    data = []
    for i in range(clients):
        X = rng.normal(size=(40, 3))
        data.append((X, (X @ rng.normal(size=3) + 0.5 * (i - 1.5) > 0).astype(int)))
    test = np.zeros((2, 3)), np.array([0, 1])
    module = module or nn.Linear(3, 2, dtype=torch.float64)
    fleet = Simulated.of(module, fg.Federation.from_arrays(data, test=test), prepared.fleet.setup)
    return dataclasses.replace(prepared, module=module, fleet=fleet)


def test_errors_are_the_excess_of_every_round():
    """The reference is F(x_t) - F(x*) of simulated models, computed in NumPy."""
    q = quadratics()
    problem = Problem(q.module(), q.federation(), half_square, batch_size=None)

    def excess(x):
        return sum(w * (((A @ x - b) ** 2).mean() / 2) for w, A, b in zip(q.omega, q.A, q.b, strict=True))

    best = excess(q.minimiser())
    errors, seldom = Errors(problem, best), Errors(problem, best, every=4)
    q.simulate(fg.FedAvg(lr=0.05), rounds=6, callbacks=[errors, seldom])
    expected = [excess(q.start())] + [
        excess(q.simulate(fg.FedAvg(lr=0.05), rounds=t).vector.numpy()) for t in range(1, 7)
    ]
    assert errors.rounds == [0, 1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(errors.values, np.array(expected) - best, rtol=1e-8)
    assert seldom.rounds == [0, 4, 6]
    squared = Errors(problem, None)
    q.simulate(fg.FedAvg(lr=0.05), rounds=1, callbacks=[squared])
    gradient = sum(w * q.gradient(i, q.start()) for i, w in enumerate(q.omega))
    assert squared.values[0] == pytest.approx(gradient @ gradient, rel=1e-10)


def test_a_slope_and_its_interval():
    """The slope of powers is exact, and about 95 % of 400 intervals for noisy samples contain the true slope."""
    assert slope([1, 10, 100], [5.0, 0.5, 0.05]).value == pytest.approx(-1)
    rng = np.random.default_rng(0)
    x = np.tile([1.0, 2, 4, 8], 3)
    slopes = [slope(x, x**-0.5 * np.exp(rng.normal(0, 0.3, 12))) for _ in range(400)]
    held = np.mean([fitted.low <= -0.5 <= fitted.high for fitted in slopes])
    assert 0.92 < held < 0.98
    with pytest.raises(InputError, match="at least three"):
        slope([1, 2, 3], [1.0, 2.0, math.nan])


def test_the_prescribed_step_balances_the_terms_or_is_the_proofs_limit():
    prepared = small()
    measured = constants(problem_of(prepared))
    weights, K = prepared.federation.weights, [2, 6, 10, 14]
    many = prescribed_lr(measured, weights, K, 10**6)
    bound = bounds.theorem3(
        weights,
        K,
        L=measured.L,
        mu=measured.mu,
        sigma2=measured.sigma2,
        distance2=measured.distance2,
        rounds=10**6,
    )
    H, Kbar = bound.constants["H"], bound.constants["Kbar"]
    exponential = measured.mu * measured.distance2 * math.exp(-measured.mu * many * Kbar * 10**6)
    assert exponential == pytest.approx(H / (measured.mu * 10**6), rel=1e-9)
    assert prescribed_lr(measured, weights, K, 2) == bound.step_limit
    with pytest.raises(InputError, match="convex"):
        prescribed_lr(dataclasses.replace(measured, mu=None), weights, K, 2)


def test_a_convex_experiment_is_studied():
    prepared = small()
    stages = []
    result = study(prepared, say=stages.append)
    names = [bound.name for bound in result.bounds]
    assert names[0].startswith("Theorem 1")
    assert names[1].startswith("Theorem 3")
    grac, avg = result.curves
    assert grac.rounds == list(range(25))
    assert grac.errors[0] == pytest.approx(result.constants.gap)
    assert grac.limit == pytest.approx(0, abs=1e-12)
    assert avg.limit > 1e-5
    problem = problem_of(prepared)
    best = result.constants.value
    options = {"rounds": 200, "steps": prepared.steps, "batch_size": None, "weight_decay": 0.5}
    exact = fg.simulate(prepared.module, prepared.federation, fg.FedAvg(lr=0.05), **options)
    reached = problem.total(exact.vector.double()) - best
    assert reached == pytest.approx(avg.limit, rel=0.1)  # F is not quite quadratic
    assert 0 < result.recommendation.lr < result.recommendation.largest_stable_lr
    assert result.recommendation.calibration == 1.0
    json.dumps(result.described())
    assert "constants" in stages


def test_directions_are_reduced_without_moving_the_stable_step():
    """The stiffest and softest 48 of 60 directions determine the largest stable step."""
    rng = np.random.default_rng(0)
    Q = np.linalg.qr(rng.normal(size=(60, 60)))[0]
    hessians = [(Q * (np.geomspace(0.1, 10, 60) * rng.uniform(0.9, 1.1, 60))) @ Q.T for _ in range(3)]
    whole = fg.theory.Quadratic(hessians, rng.normal(size=(3, 60)), [0.5, 0.3, 0.2])
    part = stiff_and_soft(whole, whole.minimiser, DIRECTIONS)
    assert part.dimension == DIRECTIONS
    np.testing.assert_allclose(part.minimiser, 0, atol=1e-9)
    rates = [fg.theory.largest_stable_lr(fg.FedAvg(lr=1.0), q, [1, 3, 5]) for q in (whole, part)]
    assert rates[0] == pytest.approx(rates[1], rel=1e-5)


def test_a_convex_problem_needs_weight_decay():
    with pytest.raises(InputError, match=r"weight_decay = 0\.0: expected a number above 0"):
        study(small(weight_decay=0.0))


def test_a_network_is_compared_with_theorem_2():
    result = study(small(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double(), rounds=6))
    assert [bound.name for bound in result.bounds] == [
        bounds.theorem2([1.0], [1], L=1, sigma2=1, gap=1, rounds=1).name
    ]
    assert result.recommendation is None
    assert result.curves[0].limit is None
    assert result.curves[0].errors[-1] < result.curves[0].errors[0]


def test_rates_are_measured_over_rounds_clients_and_steps(monkeypatch):
    def prepare_fewer(experiment, data_dir, imports):
        return small(clients=experiment.data.clients)

    monkeypatch.setattr("fedagrac.experiments.study.prepare", prepare_fewer)
    whole = small(clients=8)
    rates = measure_rates(whole, constants(problem_of(whole)), seeds=2)
    assert [rate.name for rate in rates] == ["T", "M", "Kbar"]
    rounds, clients, steps = rates
    assert clients.sizes == [2, 2, 2, 2, 4, 4, 8, 8]
    assert rounds.sizes == [3, 3, 6, 6, 12, 12, 24, 24]
    assert min(rounds.errors) > 0
    assert rounds.slope.value < 0
    assert len(set(steps.sizes)) == 4
    assert rounds.errors[-2] != rounds.errors[-1]  # two seeds
    network = small(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    of_network = constants(problem_of(network))
    with pytest.raises(InputError, match="convex"):
        measure_rates(network, of_network)


def test_a_quadratic_model_has_the_gradients_of_the_problem():
    problem = problem_of(small())
    measured = constants(problem)
    model = quadratic_at(problem, measured.optimum)
    gradients = problem.gradients(torch.from_numpy(measured.optimum)).numpy()
    for i in range(4):
        np.testing.assert_allclose(model.gradient(i, measured.optimum), gradients[i], atol=1e-12)
    np.testing.assert_allclose(model.minimiser, measured.optimum, atol=1e-8)


def test_the_command(tmp_path, capsys, monkeypatch):
    """The experiment has eight parameters in place of the 650 in the file, which would take ten times as long."""
    monkeypatch.setattr(
        "fedagrac.experiments.run.prepare", lambda experiment, *where: small(rounds=experiment.rounds)
    )
    file = tmp_path / "small.toml"
    file.write_text(
        'name = "small"\nrounds = 4\nweight_decay = 1.0\nlr = 0.01\n'
        '[data]\nname = "digits"\nclients = 3\nbatch_size = 5\n[model]\nname = "logistic"\n'
        '[steps]\nkind = "linear"\nfirst = 1\nincrement = 2\n[[algorithm]]\nname = "fedagrac"\n'
    )
    with pytest.raises(SystemExit) as ended:
        main(["theory", str(file), "--out", str(tmp_path / "out")])
    assert ended.value.code in (0, None)
    shown = capsys.readouterr().out
    assert "up to the constant inside O(.)" in shown
    assert "recommended for FedaGrac" in shown
    assert (tmp_path / "out" / "theory.png").stat().st_size > 10_000
    stored = json.loads((tmp_path / "out" / "theory.json").read_text())
    assert stored["constants"]["mu"] == pytest.approx(0.5, abs=1e-9)
    assert len(stored["curves"][0]["errors"]) == 5
    for wrong, field in ((["--seeds", "0"], "--seeds"), (["--out", str(tmp_path / "out")], "--out")):
        with pytest.raises(SystemExit) as ended:
            main(["theory", str(file), *wrong])
        assert ended.value.code == 2
        assert field in capsys.readouterr().err
