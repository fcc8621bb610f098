"""Plans, results and the mean gradient of the local rule."""

import numpy as np
import pytest
import torch

from fedagrac.core.local import EXACT_BELOW, Plan, Result, mean_gradient
from fedagrac.engines import SerialEngine, Workload
from fedagrac.models import VectorModel
from quadratics import half_square, quadratics


def engine(dtype=torch.float64, **options):
    q = quadratics()
    settings = {"batch_size": None, "sampling": "replacement", "weight_decay": 0.0, "seed": 0} | options
    model = VectorModel(q.module(dtype))
    return q, SerialEngine(Workload.of(model, q.federation(), half_square, **settings))


def test_numbers_are_given_to_every_member():
    plan = Plan.of(steps=[2, 3, 5], lr=0.1, mu=0.2, first_steps=4)
    assert plan.lr.tolist() == [0.1] * 3
    assert plan.mu.tolist() == [0.2] * 3
    assert plan.first_steps.tolist() == [2, 3, 4]  # never more than K_i


@pytest.mark.parametrize(
    ("steps", "lr", "mu", "mean", "expected"),
    [
        ([5], 0.1, 0.0, True, False),
        ([5], EXACT_BELOW / 5, 0.0, True, False),
        ([5], 0.9 * EXACT_BELOW / 5, 0.0, True, True),
        ([500, 1], 0.005, 0.0, True, True),
        ([5], 0.1, 0.5, True, True),
        ([5], 0.0001, 0.5, False, False),
    ],
)
def test_the_mean_is_accumulated_only_where_reconstruction_fails(steps, lr, mu, mean, expected):
    assert Plan.of(steps=steps, lr=lr, mu=mu, mean=mean).accumulate is expected


@pytest.mark.parametrize("lr", [0.02, 1e-4])
def test_reconstruction_and_accumulation_give_the_same_mean(lr):
    q, serial = engine()
    x = torch.from_numpy(q.start())
    correction = torch.arange(10, dtype=torch.float64).reshape(2, 5) / 7
    clients = np.array([1, 4])
    reconstructing = Plan(np.array([3, 8]), np.full(2, lr), correction, np.zeros(2), np.zeros(2, int), mean=False)
    accumulating = Plan(
        np.array([3, 8]), np.full(2, lr), correction, np.zeros(2), np.zeros(2, int), True, exact=True
    )
    free = serial.run(reconstructing, x, clients, 0)
    exact = serial.run(accumulating, x, clients, 0)
    assert free.total is None
    assert exact.total is not None
    a, b = mean_gradient(reconstructing, x, free), mean_gradient(accumulating, x, exact)
    assert torch.allclose(a, b, rtol=1e-9)


def test_float32_reconstruction_is_as_inaccurate_as_the_threshold_assumes():
    """At eta K = 0.0005 reconstruction loses three digits in float32; accumulation does not."""
    q, serial = engine(torch.float32)
    x = torch.from_numpy(q.start()).float()
    steps, lr = np.array([5]), np.full(1, 1e-4)
    plan = Plan(steps, lr, None, np.zeros(1), np.zeros(1, int), mean=True)
    reply = serial.run(plan, x, np.array([3]), 0)
    y, truth = q.start(), np.zeros(5)
    for _ in range(5):
        truth += q.gradient(3, y) / 5
        y = y - 1e-4 * q.gradient(3, y)

    def error(mean):
        return np.linalg.norm(mean[0].double().numpy() - truth) / np.linalg.norm(truth)

    accumulated = error(mean_gradient(plan, x, reply))
    reconstructed = error(mean_gradient(plan, x, Result(reply.models, reply.loss)))
    assert accumulated < 1e-6
    assert reconstructed > 10 * accumulated


def test_the_reply_holds_first_gradients_only_where_asked():
    q, serial = engine()
    x = torch.from_numpy(q.start())
    plan = Plan.of(steps=[4, 4], lr=0.02, first_steps=[0, 1])
    reply = serial.run(plan, x, np.array([0, 1]), 0)
    assert torch.equal(reply.first[0], torch.zeros(5, dtype=torch.float64))
    assert np.allclose(reply.first[1], q.gradient(1, q.start()), rtol=1e-12)
    assert serial.run(Plan.of(steps=[4], lr=0.02), x, np.array([0]), 0).first is None


def test_the_loss_is_the_mean_over_the_steps():
    q, serial = engine()
    x = q.start()
    losses = []
    y = x
    for _ in range(6):
        losses.append(0.5 * np.mean((q.A[2] @ y - q.b[2]) ** 2))
        y = y - 0.02 * q.gradient(2, y)
    reply = serial.run(Plan.of(steps=[6], lr=0.02), torch.from_numpy(x), np.array([2]), 0)
    assert float(reply.loss[0]) == pytest.approx(np.mean(losses), rel=1e-12)


def test_full_gradients_are_those_of_the_whole_local_data():
    q, serial = engine(batch_size=3, weight_decay=0.25)
    rows = serial.gradients(torch.from_numpy(q.start()), np.arange(6), 0)
    for i in range(6):
        assert np.allclose(rows[i], q.gradient(i, q.start()) + 0.25 * q.start(), rtol=1e-12)


def test_full_gradients_of_large_clients_are_computed_in_pieces(monkeypatch):
    q, serial = engine()
    whole = serial.gradients(torch.from_numpy(q.start()), np.arange(6), 0)
    monkeypatch.setattr("fedagrac.engines.serial.FULL_GRADIENT_CHUNK", 7)
    assert torch.allclose(serial.gradients(torch.from_numpy(q.start()), np.arange(6), 0), whole, rtol=1e-12)


def test_the_first_batch_gradient_is_that_of_step_zero():
    q, serial = engine(batch_size=3)
    x = torch.from_numpy(q.start())
    clients = np.arange(6)
    reply = serial.run(Plan.of(steps=[1] * 6, lr=0.5), x, clients, 4)
    assert torch.allclose(serial.gradients(x, clients, 4, "first"), (x - reply.models) / 0.5, rtol=1e-12)
