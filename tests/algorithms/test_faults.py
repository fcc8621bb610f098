"""Fifteen faults of other implementations. Each test fails if the fault is introduced."""

from fractions import Fraction

import numpy as np
import pytest
import torch

import fedagrac as fg
from constant_gradients import simulate
from fedagrac.core.cohort import fast_clients
from fedagrac.experiments.overrides import apply_settings
from fedagrac.experiments.schema import Experiment, default_table
from quadratics import K, half_square, quadratics

G1, G2 = np.array([1.0, 0.0]), np.array([0.0, 2.0])


class Keep(fg.Callback):
    """Keep the run for the assertions."""

    def on_end(self, run, result):
        self.run = run


def test_1_the_correction_is_applied_to_the_parameters():
    """With constant gradients and nu_i = g_i every corrected step is nu: x = -eta K_i nu at each client."""
    result = simulate(fg.Scaffold(lr=0.1, init="full"), [G1, G2], K=[2, 4])
    nu = (G1 + G2) / 2
    assert np.allclose(result.vector, -0.1 * 3 * nu, rtol=1e-12)
    uncorrected = simulate(fg.FedAvg(lr=0.1), [G1, G2], K=[2, 4])
    assert not np.allclose(result.vector, uncorrected.vector)


def test_2_fednova_multiplies_by_kbar():
    """K = 1 and 9, equal weights: 5.0 times the mean normalised update, not 1.8 times."""
    result = simulate(fg.FedNova(lr=0.1), [G1, G2], K=[1, 9])
    mean_normalised = 0.1 * (G1 + G2) / 2
    assert np.allclose(result.vector, -5.0 * mean_normalised, rtol=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "fedagrac", "fedagrac-avg", "fedagrac-first", "fedagrac-reverse"])
def test_3_control_variates_start_from_zeros_or_gradients_not_from_weights(name):
    x = [5.0, 7.0]
    plain = simulate(fg.FedAvg(lr=0.1), [G1, G2], K=[2, 4], x=x)
    zeros = simulate(fg.algorithm(name, lr=0.1, init="zeros"), [G1, G2], K=[2, 4], x=x)
    assert np.allclose(zeros.vector, plain.vector, rtol=1e-12)  # nu = nu_i = 0: the first round is FedAvg's
    full = simulate(fg.algorithm(name, lr=0.1, init="full"), [G1, G2], K=[2, 4], x=x)
    assert np.allclose(full.vector, np.array(x) - 0.1 * 3 * (G1 + G2) / 2, rtol=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "fedagrac"])
def test_4_client_and_server_use_the_same_k(name):
    """The server divides client i's displacement by the K_i that client i ran: nu_i is g_i, whatever K_i."""
    keep = Keep()
    simulate(fg.algorithm(name, lr=0.1), [G1, G2], K=[3, 11], rounds=2, callbacks=[keep])
    nu_i = keep.run.table.rows(np.array([0, 1]))["nu"].numpy()
    assert np.allclose(nu_i, [G1, G2], rtol=1e-12)
    assert np.allclose(keep.run.state["nu"], (G1 + G2) / 2, rtol=1e-12)


@pytest.mark.parametrize("batch_size", [1, 4, None])
def test_5_k_counts_sgd_steps_not_epochs_or_samples(batch_size):
    calls = []

    def counting(output, target):
        calls.append(len(output))
        return half_square(output, target)

    class Begin(fg.Callback):
        def on_start(self, run):
            calls.clear()  # those that try the loss before the run

    q = quadratics()
    fg.simulate(
        q.module(), q.federation(), fg.FedAvg(lr=0.001), rounds=1, steps=fg.Explicit([K]), loss=counting,
        batch_size=batch_size, device="cpu", engine="serial", callbacks=[Begin()],
    )  # fmt: skip
    assert len(calls) == sum(K)


def test_6_the_correction_pulls_towards_the_global_direction():
    """The gradient of client 1 is (1, 0); with the sign flipped it would never move along (0, 1)."""
    result = simulate(fg.FedaGrac(lr=0.1), [G1, G2], K=[5, 5])
    assert np.allclose(result.vector, -0.5 * (G1 + G2) / 2, rtol=1e-12)
    alone = simulate(fg.FedaGrac(lr=0.1), [G1, G2], K=[5, 5], participation=1, seed=3)  # one of the two
    assert np.allclose(alone.vector, -0.5 * (G1 + G2) / 2, rtol=1e-12)


@pytest.mark.parametrize("name", ["fedavg", "fednova", "scaffold", "fedagrac"])
def test_7_partial_participation_is_scaled_once(name):
    """The weights of a cohort sum to 1: with a common gradient, any cohort moves the model by the full step."""
    gradients, sizes = [G1] * 4, [1, 2, 3, 4]
    start = {"init": "full"} if name == "scaffold" else {}
    algorithm = fg.algorithm(name, lr=0.1, **start)
    result = simulate(algorithm, gradients, K=[4] * 4, sizes=sizes, participation=2, rounds=3)
    assert np.allclose(result.vector, -0.1 * 4 * 3 * G1, rtol=1e-12)


@pytest.mark.parametrize("name", ["scaffold", "fedagrac"])
def test_7_the_orientation_counts_every_client_once(name):
    """nu sums all M clients with the global weights; clients that have not taken part count as zeros."""
    keep = Keep()
    gradients, sizes = [G1, G2, G1 + G2, 3 * G1], [1, 2, 3, 4]
    algorithm = fg.algorithm(name, lr=0.1, init="zeros")
    simulate(algorithm, gradients, K=[1, 5, 9, 2], sizes=sizes, participation=1, rounds=3, callbacks=[keep])
    unseen = keep.run.table.unseen(np.arange(4))
    assert 1 <= len(unseen) <= 2
    nu = sum(n / 10 * g for i, (n, g) in enumerate(zip(sizes, gradients, strict=True)) if i not in unseen)
    assert np.allclose(keep.run.state["nu"], nu, rtol=1e-12)


def test_8_models_are_weighted_by_samples_and_never_by_steps():
    """Two clients, sizes 1 and 3, K = 10 and 1: x = (x_1 + 3 x_2) / 4."""
    result = simulate(fg.FedAvg(lr=0.1), [G1, G2], K=[10, 1], sizes=[1, 3])
    assert np.allclose(result.vector, -(1 * 10 * 0.1 * G1 + 3 * 1 * 0.1 * G2) / 4, rtol=1e-12)


def test_9_the_proximal_gradient_is_mu_times_the_displacement():
    """From x~ = 0 with gradient g: x_1 = -eta g, x_2 = x_1 - eta (g + mu x_1) = -(2 eta - eta^2 mu) g."""
    eta, mu = 0.1, 0.7
    result = simulate(fg.FedProx(lr=eta, mu=mu), [G2], K=[2])
    assert np.allclose(result.vector, -(2 * eta - eta**2 * mu) * G2, rtol=1e-12)


def test_10_equal_steps_make_nobody_fast():
    """In floats, 1/M summed M times is often below 1, and then every client would be fast."""
    floats_fail = 0
    for m in range(2, 31):
        for k in range(1, 31):
            assert not fast_clients([k] * m, [1] * m).any()
            assert not fast_clients([k] * m, [Fraction(1 / m)] * m).any()
            floats_fail += k > sum(1 / m * k for _ in range(m))
    assert floats_fail > 100  # the naive rule does fail, so the test above is not empty


def test_11_every_client_keeps_its_own_settings():
    """K, eta and first_steps differ per client in one plan; no client gets the values of another."""
    from fedagrac.core.local import Plan
    from fedagrac.engines import SerialEngine, Workload
    from fedagrac.models import VectorModel

    q = quadratics()
    model = VectorModel(q.module())
    engine = SerialEngine(Workload.of(model, q.federation(), half_square, None, "replacement", 0.0, 0))
    plan = Plan.of(
        steps=[1, 2, 3], lr=[0.1, 0.02, 0.003], mu=[0.0, 1.0, 5.0], first_steps=[0, 1, 2],
        correction=torch.arange(15, dtype=torch.float64).reshape(3, 5),
    )  # fmt: skip
    reply = engine.run(plan, torch.from_numpy(q.start()), np.array([0, 1, 2]), 0)
    for i in range(3):
        x, gradients = q.start(), []
        for _ in range(plan.steps[i]):
            gradients.append(q.gradient(i, x))
            x = x - plan.lr[i] * (gradients[-1] + plan.correction[i].numpy() + plan.mu[i] * (x - q.start()))
        assert np.allclose(reply.models[i], x, rtol=1e-12)
        n = plan.first_steps[i]
        expected = np.mean(gradients[:n], axis=0) if n else np.zeros(5)
        assert np.allclose(reply.first[i], expected, rtol=1e-12)


@pytest.mark.parametrize("value", ["false", "no", 0, 1])
def test_12_booleans_are_not_strings(value):
    with pytest.raises(fg.InputError, match=r"economical.*true or false"):
        fg.FedaGrac(lr=0.1, economical=value)
    text = f'"{value}"' if isinstance(value, str) else value
    with pytest.raises(fg.InputError, match=r"algorithm\[5\].economical.*true or false"):
        Experiment.of(apply_settings(default_table(), [f"algorithm.fedagrac.economical={text}"]))


@pytest.mark.parametrize("K", [[1, 9], [9, 1]])
def test_13_every_update_is_divided_by_its_own_step_count(K):
    """FedNova normalises by K_i, and the mean gradient of SCAFFOLD is that of K_i steps, whoever is client 0."""
    nova = simulate(fg.FedNova(lr=0.1), [G1, G2], K=K)
    assert np.allclose(nova.vector, -0.1 * 5.0 * (G1 + G2) / 2, rtol=1e-12)
    keep = Keep()
    simulate(fg.Scaffold(lr=0.1), [G1, G2], K=K, callbacks=[keep])
    rows = keep.run.table.rows(np.arange(2))["nu"].numpy()
    assert np.allclose(rows, [G1, G2], rtol=1e-12)


def test_14_a_buffer_does_not_pass_from_one_client_to_the_next():
    """The module subtracts a running mean of its inputs; with one step each, every client subtracts its own."""

    class Centred(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.zeros(1, dtype=torch.float64))
            self.register_buffer("mean", torch.zeros(1, dtype=torch.float64))

        def forward(self, x):
            self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
            return self.weight * (x - self.mean)

    fed = fg.Federation.from_arrays([(np.array([[a]]), np.array([[1.0]])) for a in (8.0, 2.0)])
    for engine in ("serial", "lanes"):
        result = fg.simulate(
            Centred(), fed, fg.FedAvg(lr=1.0), rounds=1, steps=fg.Constant(1), batch_size=None,
            loss=lambda output, target: -(output * target).mean(), engine=engine, compile=False, device="cpu",
        )  # fmt: skip
        # each client subtracts half of its own input, so its gradient is -input / 2
        assert result.vector.tolist() == [(8.0 / 2 + 2.0 / 2) / 2]
        assert result.buffers["mean"].tolist() == [(8.0 / 2 + 2.0 / 2) / 2]


def test_15_a_layer_that_the_user_put_into_eval_stays_in_it():
    """Dropout with p = 1 would make every output zero, and with it every gradient."""
    module = torch.nn.Sequential(torch.nn.Dropout(1.0).eval(), torch.nn.Linear(1, 1, bias=False)).double()
    torch.nn.init.zeros_(module[1].weight)
    fed = fg.Federation.from_arrays([(np.array([[3.0]]), np.array([[1.0]]))])
    result = fg.simulate(
        module, fed, fg.FedAvg(lr=1.0), rounds=1, steps=fg.Constant(1), batch_size=None,
        loss=lambda output, target: -(output * target).mean(), device="cpu",
    )  # fmt: skip
    assert result.vector.tolist() == [3.0]
    assert not result.model()[0].training
