"""Runs with cyclic sampling: positions follow from the steps that a client made before."""

from dataclasses import replace

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.callbacks import Checkpoints
from fedagrac.data.batches import batch_lengths, batch_positions
from fedagrac.engines import LanesEngine
from fedagrac.storage.checkpoints import read_checkpoint
from quadratics import K, Trace, half_square, quadratics

ETA, BATCH, SEED = 0.02, 7, 11


def run(algorithm, q=None, rounds=6, dtype=torch.float64, **options):
    q = q or quadratics()
    trace = Trace()
    settings = {"steps": fg.Explicit([K]), "batch_size": BATCH, "seed": SEED, "device": "cpu", **options}
    settings = {"loss": half_square, "sampling": "cyclic", "callbacks": [trace], **settings}
    result = fg.simulate(q.module(dtype), q.federation(), algorithm, rounds=rounds, **settings)
    return np.array(trace.x), result


class Loader:
    """A client's own walk through its samples, in the order of the run; the short batch at the end is kept."""

    def __init__(self, q, client):
        self.q, self.client, self.step = q, client, 0
        n = len(q.b[client])
        steps = -(-n // BATCH)
        rows = batch_positions(n, steps, BATCH, "cyclic", SEED, 0, client)
        lengths = batch_lengths(n, steps, BATCH, "cyclic")
        self.passes = [row[: None if lengths is None else lengths[k]] for k, row in enumerate(rows)]

    def exhausted(self):
        return self.step > 0 and self.step % len(self.passes) == 0

    def gradient(self, x):
        """Return the gradient at x over the next batch."""
        rows = self.passes[self.step % len(self.passes)]
        self.step += 1
        A, b = self.q.A[self.client][rows], self.q.b[self.client][rows]
        return A.T @ (A @ x - b) / len(rows)


def agrees(ours, theirs):
    return np.linalg.norm(ours - theirs) <= 1e-10 * np.linalg.norm(theirs)


@pytest.mark.parametrize("size", [30, 28, 5])  # with a short batch, without one, and below a batch
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_rounds_of_one_client_are_one_walk_of_plain_sgd(size, engine):
    q = quadratics(sizes=[size])
    x, loader = q.start(), Loader(q, 0)
    for _ in range(4 * 5):
        x = x - ETA * loader.gradient(x)
    ours, _ = run(fg.FedAvg(lr=ETA), q, rounds=4, steps=fg.Constant(5), engine=engine)
    assert agrees(ours[-1], x)


@pytest.mark.parametrize("participation", [None, 2, fg.Participation(4, by="weight")])
def test_absent_clients_do_not_advance(participation):
    """FedAvg in NumPy, with a loader for each client that is drawn only in rounds in which it takes part."""
    q, seen = quadratics(), set()
    loaders, x = [Loader(q, i) for i in range(6)], q.start()

    class Follow(fg.Callback):
        def on_round(self, run, record):
            nonlocal x
            models = []
            for i in run.cohort.clients.tolist():
                seen.add(i)
                y = x.copy()
                for _ in range(K[i]):
                    y = y - ETA * loaders[i].gradient(y)
                models.append(y)
            x = run.cohort.weights @ np.array(models)
            assert agrees(run.state["x"].numpy(), x)

    run(fg.FedAvg(lr=ETA), rounds=8, participation=participation, callbacks=[Follow()])
    assert len(seen) > 3


@pytest.mark.parametrize("name", ["fedavg", "scaffold", "fedlin", "fedagrac", "fedagrac-first"])
@pytest.mark.parametrize("participation", [None, 3])
def test_lanes_agree_with_serial(name, participation):
    options = {"gradient": "first"} if name == "fedlin" else {}
    algorithm = fg.algorithm(name, lr=ETA, **options)
    serial, _ = run(algorithm, engine="serial", participation=participation)
    lanes, _ = run(algorithm, engine="lanes", participation=participation)
    assert agrees(lanes, serial)


@pytest.mark.parametrize("options", [{"fixed": True}, {"width": 2}])
def test_short_batches_run_in_lanes_of_any_kind(options):
    """Prepared steps have one shape, so a wave with a short batch does not use them."""
    lanes, _ = run(fg.FedaGrac(lr=ETA), engine=lambda workload: LanesEngine(workload, **options))
    serial, _ = run(fg.FedaGrac(lr=ETA), engine="serial")
    assert agrees(lanes, serial)


def test_buffers_and_transforms_follow_their_lanes_through_short_batches():
    q = quadratics()
    torch.manual_seed(0)
    module = torch.nn.Sequential(torch.nn.BatchNorm1d(5), torch.nn.Linear(5, 1)).double()

    def noisy(inputs, generator):
        return inputs + 0.1 * torch.rand(inputs.shape, generator=generator, dtype=inputs.dtype)

    def final(engine):
        arrays = [(A, b[:, None]) for A, b in zip(q.A, q.b, strict=True)]
        return fg.simulate(
            module, fg.Federation.from_arrays(arrays, transform=noisy), fg.FedAvg(lr=ETA), rounds=3,
            steps=fg.Explicit([K]), batch_size=BATCH, sampling="cyclic", loss=torch.nn.functional.mse_loss,
            engine=engine, device="cpu",
        )  # fmt: skip

    lanes, serial = final("lanes"), final("serial")
    assert agrees(lanes.vector.numpy(), serial.vector.numpy())
    assert agrees(*[run.model()[0].running_mean.numpy() for run in (lanes, serial)])


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("participation", [None, 2])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(engine, participation, tmp_path):
    options = {
        "engine": engine, "participation": participation, "steps": fg.Uniform(2, 9, mode="random"),
        "dtype": torch.float32,
    }  # fmt: skip
    algorithm = fg.FedaGrac(lr=ETA, first_steps="pass")
    straight, whole = run(algorithm, rounds=7, **options)
    run(algorithm, rounds=7, callbacks=[Checkpoints(tmp_path, every=4)], **options)
    stored = read_checkpoint(tmp_path)
    resumed, _ = run(algorithm, rounds=7, resume=replace(stored, history=whole.history[:4]), **options)
    assert np.array_equal(resumed, straight[4:])


def test_the_order_is_the_same_for_every_algorithm():
    """It depends on the seed and the client alone."""
    first, _ = run(fg.FedAvg(lr=ETA))
    second, _ = run(fg.FedaGrac(lr=ETA, calibration=0.0))
    assert np.array_equal(first, second)
    other, _ = run(fg.FedAvg(lr=ETA), seed=SEED + 1)
    assert not np.array_equal(first, other)


def authors_first_gradient(loader, x, eta, correction, steps):
    """One round of a client by the rule of the authors' public code, restated.

    The first gradient is that of step 0. When the loader turns out to be exhausted, for the first time in the
    round, it becomes the mean of the gradients so far; if there are none yet, step 0 still follows and decides.
    """
    gradients, first, ended = [], None, False
    for k in range(steps):
        if loader.exhausted() and not ended:
            ended = True
            if gradients:
                first = np.mean(gradients, axis=0)
        g = loader.gradient(x)
        gradients.append(g)
        if k == 0:
            first = g
        x = x - eta * (g + correction)
    return x, np.mean(gradients, axis=0), first


@pytest.mark.parametrize("transmit", ["hybrid", "first"])
@pytest.mark.parametrize("steps", [K, [4, 9, 3, 8, 4, 6]])
def test_first_steps_pass_is_the_rule_of_the_authors_code(transmit, steps):
    """Clients with 2 to 8 steps in a pass: passes end within rounds, do not end, and end exactly with a round."""
    q, lam = quadratics(), 0.5
    loaders, x = [Loader(q, i) for i in range(6)], q.start()
    nu, nu_i = np.zeros(5), np.zeros((6, 5))
    fast = np.array(steps) > q.omega @ steps + 1e-9
    expected, kinds = [], set()
    for _ in range(8):
        models, sent = [], []
        for i, k in enumerate(steps):
            left = loaders[i].step % len(loaders[i].passes)
            y, mean, first = authors_first_gradient(loaders[i], x, ETA, lam * (nu - nu_i[i]), k)
            kinds.add((loaders[i].step >= k and left == 0, left + k > len(loaders[i].passes)))
            models.append(y)
            sent.append(first if transmit == "first" or fast[i] else mean)
            nu_i[i] = mean
        x, nu = q.omega @ np.array(models), q.omega @ np.array(sent)
        expected.append(x)
    algorithm = fg.FedaGrac(lr=ETA, calibration=lam, transmit=transmit, first_steps="pass", init="zeros")
    ours, _ = run(algorithm, rounds=8, steps=fg.Explicit([steps]))
    assert len(kinds) > 2
    assert agrees(ours, np.array(expected))
    epoch, _ = run(
        fg.FedaGrac(lr=ETA, calibration=lam, transmit=transmit, init="zeros"), rounds=8, steps=fg.Explicit([steps])
    )
    assert not agrees(epoch, np.array(expected))
