"""A diverged run reports the round, the client that diverged first, and after how many steps."""

import json
import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

import constant_gradients
import fedagrac as fg
from fedagrac.engines import SerialEngine
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.report import read_run
from fedagrac.rounds import divergence
from fedagrac.rounds.divergence import Divergence
from quadratics import Quadratics, half_square, quadratics

SIZES = [10, 12, 14, 16]


@pytest.fixture(autouse=True)
def _time_enough(monkeypatch):
    """Make the diagnosis independent of the load of the machine."""
    monkeypatch.setattr(divergence, "SECONDS", 600.0)
    monkeypatch.setattr(divergence, "THEORY_SECONDS", 600.0)


def scaled(factors, seed=3):
    """Return least squares whose inputs have one factor per client; the curvature grows with its square."""
    q = quadratics(seed=seed, sizes=SIZES)
    return Quadratics([factor * A for factor, A in zip(factors, q.A, strict=True)], q.b)


def steps_until_lost(q, i, x, lr, K):
    """Return after how many steps of plain gradient descent client i is no longer finite; None if it stays."""
    x = x.copy()
    with np.errstate(all="ignore"):
        for k in range(K):
            loss = np.square(q.A[i] @ x - q.b[i]).mean()
            x = x - lr * q.gradient(i, x)
            if not (np.isfinite(x).all() and np.isfinite(loss)):
                return k + 1
    return None


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_step_size_beyond_the_type_diverges_like_any_other(engine):
    fed = fg.Federation.load("digits", clients=2)
    model = fg.models.build("logistic", features=64, classes=10)
    options = {"rounds": 3, "steps": fg.Constant(2), "engine": engine, "compile": False}
    result = fg.simulate(model, fed, fg.FedAvg(lr=1e300), **options)
    assert (result.status, result.divergence.round) == ("diverged", 1)


def test_the_one_client_that_diverges_is_named_with_its_step():
    q, K = scaled([1, 1, 1e4, 1]), 60
    result = q.simulate(fg.FedAvg(lr=0.01), rounds=3, steps=fg.Constant(K))
    step = steps_until_lost(q, 2, q.start(), 0.01, K)
    assert 1 < step < K
    diagnosis = result.divergence
    expected = Divergence(round=1, lr=0.01, client=2, step=step, steps=K, clients=1)
    assert replace(diagnosis, stable_lr=None) == expected
    assert result.status == "diverged"
    assert result.reason.startswith(
        f"round 1: the model or loss of client 2 is not finite after {step} of its 60 local steps; "
        "try a smaller lr than 0.01"
    )
    assert len(result.history) == 1


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_of_several_the_first_by_steps_is_named(engine):
    """Clients 0 and 3 both diverge; client 3 does so first, because its data are larger."""
    q, K = scaled([1e3, 1, 1, 1e5]), 120
    steps = [steps_until_lost(q, i, q.start(), 0.01, K) for i in range(4)]
    assert steps[1] is steps[2] is None
    assert steps[3] < steps[0]
    diagnosis = q.simulate(fg.FedAvg(lr=0.01), rounds=3, steps=fg.Constant(K), engine=engine).divergence
    assert (diagnosis.client, diagnosis.step, diagnosis.clients) == (3, steps[3], 2)


def test_a_later_round_starts_from_the_model_before_it():
    """Client 2 does not diverge in the 60 steps of round 1, so the plain loop runs the earlier rounds, too."""
    q, K, lr = scaled([1, 1, 30, 1]), 60, 0.01
    result = q.simulate(fg.FedAvg(lr=lr), rounds=5, steps=fg.Constant(K))
    x, rounds = q.start(), 0
    while all(steps_until_lost(q, i, x, lr, K) is None for i in range(4)):
        ends = []
        for i in range(4):
            y = x.copy()
            for _ in range(K):
                y = y - lr * q.gradient(i, y)
            ends.append(y)
        x, rounds = q.omega @ np.array(ends), rounds + 1
    assert rounds >= 1
    diagnosis = result.divergence
    assert (diagnosis.round, diagnosis.client, diagnosis.step) == (rounds + 1, 2, steps_until_lost(q, 2, x, lr, K))


def test_of_clients_that_diverge_at_the_same_step_the_lowest_number_is_named():
    q = quadratics(seed=3, sizes=[10, 10, 10])
    same = Quadratics([1e150 * q.A[0]] * 3, [q.b[0]] * 3)
    diagnosis = same.simulate(fg.FedAvg(lr=1.0), rounds=2, steps=fg.Constant(9)).divergence
    assert (diagnosis.client, diagnosis.clients) == (0, 3)
    assert diagnosis.step == steps_until_lost(same, 0, same.start(), 1.0, 9)


class Nan(SerialEngine):
    """Replace the replies of clients 1 and 3 by NaN, although their steps are finite."""

    def run(self, plan, x, clients, round):
        result = super().run(plan, x, clients, round)
        result.models[np.isin(clients, [1, 3])] = torch.nan
        return result


def test_a_divergence_that_cannot_be_repeated_has_no_step():
    q = scaled([1, 1, 1, 1])
    result = q.simulate(fg.FedAvg(lr=0.01), rounds=3, steps=fg.Constant(4), engine=Nan)
    assert (result.divergence.client, result.divergence.step, result.divergence.clients) == (1, None, 2)
    assert result.reason == (
        "round 1: the model or loss of client 1 is not finite, and of 1 other; try a smaller lr than 0.01"
    )


def test_when_time_is_over_there_is_no_step(monkeypatch):
    monkeypatch.setattr(divergence, "SECONDS", -1.0)
    q = scaled([1e3, 1, 1, 1e5])
    diagnosis = q.simulate(fg.FedAvg(lr=0.01), rounds=3, steps=fg.Constant(120)).divergence
    assert (diagnosis.client, diagnosis.step, diagnosis.clients) == (0, None, 2)


def test_a_server_whose_step_overflows_is_named():
    """FedNova multiplies by Kbar / K_i: here one step of 1.5e308 beside 100 steps of length zero."""
    gradients = [[1.5e308, 0.0], [0.0, 0.0]]
    result = constant_gradients.simulate(fg.FedNova(lr=1.0), gradients, K=[1, 100])
    assert result.status == "diverged"
    assert result.divergence == Divergence(round=1, lr=1.0)
    assert result.reason == (
        "round 1: every client's model is finite, but the server's is not; try a smaller lr than 1"
    )


def test_a_run_that_diverges_leaves_the_others_alone():
    q = scaled([1, 1, 3, 1])
    algorithms = [fg.FedAvg(lr=0.01), fg.FedAvg(lr=50.0), fg.FedaGrac(lr=0.01)]
    options = {"rounds": 2, "steps": fg.Constant(60), "batch_size": None, "loss": half_square, "device": "cpu"}
    options |= {"engine": "lanes", "compile": False}
    together = fg.simulate_many(q.module(), q.federation(), algorithms, **options)
    assert [result.status for result in together] == ["finished", "diverged", "finished"]
    assert [result.divergence is None for result in together] == [True, False, True]
    steps = [steps_until_lost(q, i, q.start(), 50.0, 60) for i in range(4)]
    assert [step is None for step in steps] == [True, True, False, True]
    assert (together[1].divergence.client, together[1].divergence.step) == (2, steps[2])
    for result, algorithm in zip(together, algorithms, strict=True):
        alone = fg.simulate(q.module(), q.federation(), algorithm, **options)
        assert torch.allclose(result.vector, alone.vector, rtol=1e-10, atol=0.0, equal_nan=True)


def test_theory_says_below_which_lr_least_squares_are_stable():
    """With one step FedAvg is gradient descent on F, stable below 2 / (largest eigenvalue of the Hessian)."""
    pytest.importorskip("scipy")
    q = scaled([1, 1, 3, 1])
    H = sum(w * q.hessian(i) for i, w in enumerate(q.omega))
    limit = 2 / np.linalg.eigvalsh(H)[-1]
    result = q.simulate(fg.FedAvg(lr=100 * limit), rounds=200, steps=fg.Constant(1), engine="serial")
    assert result.status == "diverged"
    assert result.divergence.stable_lr == pytest.approx(limit, rel=1e-3)
    assert result.reason.endswith(f"(theory, for exact gradients: stable below about {limit:.2g})")


@pytest.mark.parametrize("name", ["scaffold", "fedagrac", "fedprox", "fedlin", "fednova"])
def test_the_stable_lr_of_every_algorithm_is_stable(name):
    pytest.importorskip("scipy")
    q = scaled([1, 1, 3, 1])
    options = {"steps": fg.Explicit([[1, 2, 3, 4]]), "engine": "serial"}
    lr = q.simulate(fg.algorithm(name, lr=100.0), rounds=200, **options).divergence.stable_lr
    below, above = (q.simulate(fg.algorithm(name, lr=part * lr), rounds=50, **options) for part in (0.9, 1.2))
    assert below.history[-1]["train_loss"] < 2 * below.history[0]["train_loss"]
    assert above.history[-1]["train_loss"] > 1e3 * above.history[0]["train_loss"]


def test_without_scipy_the_diagnosis_has_no_stable_lr(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
    result = scaled([1, 1, 3, 1]).simulate(fg.FedAvg(lr=100.0), rounds=200, steps=fg.Constant(1), engine="serial")
    assert result.reason.endswith("try a smaller lr than 100")


def test_the_run_folder_stores_the_diagnosis(tmp_path):
    """With an lr beyond float32, every client of the first run diverges; the second run is not affected."""
    algorithms = [{"name": "fedavg", "lr": 1e37}, {"name": "fedagrac", "lr": 0.1}]
    table = {"name": "one", "rounds": 2, "data": {"clients": 3}, "steps": {"kind": "constant", "steps": 5}}
    lost, kept = run_experiment(prepare(Experiment.of({**table, "algorithm": algorithms})), tmp_path)
    status = json.loads((lost / "status.json").read_text())
    assert status["status"] == "diverged"
    diagnosis = Divergence(**status["divergence"])
    assert (diagnosis.round, diagnosis.steps, diagnosis.clients) == (1, 5, 3)
    assert 1 <= diagnosis.step <= 5
    assert status["reason"] == str(diagnosis) == read_run(lost).reason
    ended = {"status": "finished", "reason": "all 2 rounds done", "rounds": 2}
    assert json.loads((kept / "status.json").read_text()) == ended
