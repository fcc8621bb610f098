"""FedPer, FedBN and Ditto: models of the clients' own, as in the papers, and measured as what clients use."""

import copy
import logging

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
import numpy_rivals as reference
from quadratics import SIZES, D, K, cohorts, quadratics

ETA, ROUNDS = 0.02, 6


class TwoParts(nn.Module):
    """The linear function of the quadratics, with its coordinates in two layers."""

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        self.head = nn.Linear(D - 2, 1, bias=False, dtype=torch.float64)
        with torch.no_grad():
            start = torch.from_numpy(quadratics().start())
            self.body.weight.copy_(start[None, :2])
            self.head.weight.copy_(start[None, 2:])

    def forward(self, x):
        return self.body(x[:, :2]) + self.head(x[:, 2:])


class Models(fg.Callback):
    """Keeps the models of the server and of all clients after every round."""

    def __init__(self):
        self.path = []

    def on_round(self, run, record):
        layout = run.fleet.model.layout
        models = [run.state["x"]]
        for i in range(len(SIZES)):
            known = not len(run.table.unseen(np.array([i])))
            rows = run.table.rows(np.array([i])) if known else run.algorithm.enter(run.state, [i])
            models.append(run.algorithm.own_models(run.state, rows, layout)[0])
        self.path.append(torch.stack(models).numpy())


def path_of(algorithm, **options):
    kept = Models()
    quadratics().simulate(algorithm, rounds=ROUNDS, module=TwoParts(), callbacks=[kept], **options)
    return np.array(kept.path)


LR = fg.schedule.Exponential(ETA, 0.8)
ETAS = [ETA * 0.8**t for t in range(ROUNDS)]
CASES = {
    "fedper": (fg.FedPer(lr=LR), reference.fedper, {"personal": np.arange(D) >= 2}),
    "fedper, first layer": (
        fg.FedPer(lr=LR, personal=("body",)),
        reference.fedper,
        {"personal": np.arange(D) < 2},
    ),
    "ditto": (fg.Ditto(lr=LR, mu=0.3), reference.ditto, {"mu": 0.3}),
}


@pytest.mark.parametrize("participation", [None, 3])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_the_models_of_all_clients_are_those_of_the_papers_equations(name, participation, engine):
    algorithm, rule, options = CASES[name]
    ours = path_of(algorithm, participation=participation, engine=engine)
    q = quadratics()
    theirs = np.array(rule(q, SIZES, K, q.start(), ETAS, cohorts(participation, ROUNDS), **options))
    assert np.abs(ours - theirs).max() <= 1e-10 * np.abs(theirs).max()


@pytest.mark.parametrize("inner", ["fedper", "ditto"])
@pytest.mark.parametrize("outer", ["fedavgm", "fedadam"])
def test_a_server_optimizer_moves_the_shared_coordinates_and_clients_keep_their_own(outer, inner):
    inside, rule, options = CASES[inner]
    settings = {"momentum": 0.7, "server_lr": 0.8}
    server = reference.heavy_ball(**settings)
    if outer == "fedadam":
        settings = {"server_lr": 0.1, "beta1": 0.8, "beta2": 0.9, "tau": 0.01}
        server = reference.adaptive("fedadam", **settings)
    q, ours = quadratics(), path_of(fg.algorithm(outer, lr=LR, inner=inside, **settings), participation=3)
    theirs = np.array(rule(q, SIZES, K, q.start(), ETAS, cohorts(3, ROUNDS), server=server, **options))
    assert np.abs(ours - theirs).max() <= 1e-10 * np.abs(theirs).max()


def test_a_server_optimizer_around_fedbn_without_momentum_is_fedbn():
    data = [blobs(0, 20), blobs(1, 35)]
    fed = fg.Federation.from_arrays(data, tests=data)
    alone, around = (
        fg.simulate(with_batch_norm(), fed, algorithm, rounds=3, steps=fg.Explicit([[2, 5]]), device="cpu")
        for algorithm in (fg.FedBN(lr=0.1), fg.FedAvgM(lr=0.1, momentum=0.0, inner=fg.FedBN(lr=0.1)))
    )
    assert torch.equal(alone.vector, around.vector)
    assert np.array_equal(alone.per_client.loss, around.per_client.loss)


def test_the_global_model_of_ditto_is_that_of_fedavg_exactly():
    kept = []

    class Keep(fg.Callback):
        def on_round(self, run, record):
            kept.append(run.state["x"].numpy())

    quadratics().simulate(fg.FedAvg(lr=ETA), rounds=ROUNDS, module=TwoParts(), callbacks=[Keep()])
    assert np.array_equal(path_of(fg.Ditto(lr=ETA, mu=0.7))[:, 0], np.array(kept))


def test_without_mu_the_clients_of_ditto_train_alone():
    q, ours = quadratics(), path_of(fg.Ditto(lr=ETA, mu=0.0))[-1]
    for i, k in enumerate(K):
        alone = reference.descend(lambda z, i=i: q.gradient(i, z), q.start(), k * ROUNDS, ETA)
        assert np.abs(ours[1 + i] - alone).max() <= 1e-12 * np.abs(alone).max()


def test_without_personal_layers_fedper_is_fedavg_exactly(caplog):
    with caplog.at_level(logging.WARNING, "fedagrac"):
        shared = quadratics().simulate(fg.FedPer(lr=ETA, personal=()), module=TwoParts())
    assert torch.equal(shared.vector, quadratics().simulate(fg.FedAvg(lr=ETA), module=TwoParts()).vector)
    assert "no layer of the model is personal" in caplog.text


def test_with_personal_layers_alone_nothing_is_shared(caplog):
    with caplog.at_level(logging.WARNING, "fedagrac"):
        own = path_of(fg.FedPer(lr=ETA, personal="*"))[-1]
    assert np.array_equal(own[0], quadratics().start())
    assert np.abs(own[1:] - path_of(fg.Ditto(lr=ETA, mu=0.0))[-1, 1:]).max() <= 1e-13
    assert "clients share nothing" in caplog.text


@pytest.mark.parametrize(
    ("personal", "message"),
    [(("neck",), "personal = 'neck'.*body.weight, head.weight"), (3, "personal = 3"), (("",), "personal")],
)
def test_names_that_match_no_layer_are_refused(personal, message):
    with pytest.raises(fg.InputError, match=message):
        quadratics().simulate(fg.FedPer(lr=ETA, personal=personal), module=TwoParts())


def test_personal_layers_are_not_moved():
    """2 of the 5 numbers are shared, of 8 bytes each, by 6 clients."""
    result = quadratics().simulate(fg.FedPer(lr=ETA), rounds=1, module=TwoParts())
    assert result.history[0]["bytes_down"] == result.history[0]["bytes_up"] == 6 * 2 * 8


# FedBN against a loop in plain PyTorch


def with_batch_norm():
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3)).double()


def blobs(seed, n):
    rng = np.random.default_rng(seed)
    return rng.normal(size=(n, 4)) * (1 + seed) + seed, rng.integers(0, 3, n)


@pytest.mark.parametrize("participation", [None, 2])
def test_fedbn_keeps_batch_normalization_local_as_a_plain_loop_does(participation):
    """An absent client keeps its batch normalization, and receives the shared layers when it takes part again."""
    data, steps, rounds = [blobs(0, 20), blobs(1, 35), blobs(2, 25)], [2, 5, 3], 4
    fed = fg.Federation.from_arrays(data, tests=data)
    result = fg.simulate(
        with_batch_norm(), fed, fg.FedBN(lr=fg.schedule.Exponential(0.1, 0.7)), rounds=rounds,
        steps=fg.Explicit([steps]), batch_size=None, participation=participation, device="cpu",
    )  # fmt: skip
    clients, omega = [with_batch_norm() for _ in data], np.array([20, 35, 25]) / 80
    for t in range(rounds):
        present = range(3) if participation is None else fg.Participation(2).draw(t, omega, 0)[0].tolist()
        for i in present:
            (X, y), optimizer = data[i], torch.optim.SGD(clients[i].parameters(), lr=0.1 * 0.7**t)
            for _ in range(steps[i]):
                optimizer.zero_grad()
                nn.functional.cross_entropy(clients[i](torch.from_numpy(X)), torch.from_numpy(y)).backward()
                optimizer.step()
        shared = {
            name: sum(omega[i] * dict(clients[i].named_parameters())[name].data for i in present)
            / sum(omega[i] for i in present)
            for name, _ in clients[0].named_parameters()
            if not name.startswith("1.")
        }
        for module in clients:
            for name, value in shared.items():
                dict(module.named_parameters())[name].data.copy_(value)
    for name, value in shared.items():
        assert torch.allclose(result.params[name], value, rtol=1e-10, atol=0)
    losses = []
    for module, (X, y) in zip(clients, data, strict=True):
        module.eval()
        with torch.no_grad():
            losses.append(float(nn.functional.cross_entropy(module(torch.from_numpy(X)), torch.from_numpy(y))))
    assert np.allclose(result.per_client.loss, losses, rtol=1e-10)


# what is measured


def classes(seed, n=40):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(n, 4))
    return X, (X[:, seed % 4] > 0).astype(np.int64)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()


def trained(algorithm, **given):
    owned = {}

    class Keep(fg.Callback):
        def on_end(self, run, result):
            for i in range(run.federation.num_clients):
                rows = run.table.rows(np.array([i]))
                owned[i] = run.algorithm.own_models(run.state, rows, run.fleet.model.layout)[0]

    data = [classes(seed) for seed in range(3)]
    fed = fg.Federation.from_arrays(data, **given)
    result = fg.simulate(
        net(), fed, algorithm, rounds=4, steps=fg.Explicit([[3, 9, 20]]), batch_size=10, callbacks=[Keep()],
        device="cpu", metrics={"mass": lambda output, target: output.softmax(1)[:, 1].mean()},
    )  # fmt: skip
    modules = []
    for i in range(3):
        module = copy.deepcopy(net())
        torch.nn.utils.vector_to_parameters(owned[i], module.parameters())
        modules.append(module)
    return result, modules


def of(module, X, y):
    with torch.no_grad():
        output = module(torch.from_numpy(X))
    right = float((output.argmax(1).numpy() == y).mean())
    return right, float(output.softmax(1)[:, 1].mean())


ALGORITHMS = [fg.FedPer(lr=0.5), fg.Ditto(lr=0.5, mu=0.1)]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["fedper", "ditto"])
def test_the_test_sets_of_clients_are_measured_with_their_own_models(algorithm):
    tests = [classes(seed + 3, 30) for seed in range(3)]
    result, modules = trained(algorithm, tests=tests)
    accuracies = [of(module, *test)[0] for module, test in zip(modules, tests, strict=True)]
    assert np.allclose(result.per_client.accuracy, accuracies)
    given = [of(result.model(client), *test)[0] for client, test in enumerate(tests)]
    assert np.allclose(given, accuracies)
    with pytest.raises(fg.InputError, match="client = 3: expected a client from 0 to 2"):
        result.model(3)
    assert result.history[-1]["test_accuracy"] == pytest.approx(np.mean(accuracies))
    masses = [of(module, *test)[1] for module, test in zip(modules, tests, strict=True)]
    assert result.history[-1]["mass"] == pytest.approx(np.mean(masses))


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=["fedper", "ditto"])
def test_on_common_test_data_the_clients_models_count_by_their_weights(algorithm):
    common = classes(7, 60)
    result, modules = trained(algorithm, test=common, weights=[0.5, 0.25, 0.25])
    measured = np.array([of(module, *common) for module in modules])
    expected = np.array([0.5, 0.25, 0.25]) @ measured
    assert result.history[-1]["test_accuracy"] == pytest.approx(expected[0])
    assert result.history[-1]["mass"] == pytest.approx(expected[1])


def test_own_models_that_diverge_end_the_run():
    """The clients' own models have a step size that is too large for mu alone: |1 - eta mu| > 1."""
    result = quadratics().simulate(fg.Ditto(lr=ETA, mu=1e4), rounds=60)
    assert result.status == "diverged"
