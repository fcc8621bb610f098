"""The live fleet: cohorts, a start without all clients, nodes that join, and what a resume waits for."""

import json

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.errors import FedagracError, InputError

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from fedagrac.flower.settings import Settings
from fedagrac.storage.checkpoints import read_checkpoint_of
from flower_grid import FED, K, Node, StandIn, close, config, federation, flower, model, vector
from keyed_noise import Noisy

FIVE = fg.Federation.load("digits", clients=5, partition=fg.Dirichlet(0.5), seed=0)
K5 = [3, 5, 12, 2, 7]
SAMPLES = json.dumps({str(i): int(n) for i, n in enumerate(FED.sizes)})


def data_of_five(context):
    samples = FIVE.samples_of(context.node_config["partition-id"])
    return FIVE.inputs[samples], FIVE.targets[samples]


def five(tmp_path, spoil=None, **changes):
    settings = config(tmp_path, clients=5, steps__table=json.dumps([K5]), **changes)
    nodes = {10 + i: Node(settings, i, data=data_of_five, steps=K5[i]) for i in range(5)}
    return settings, StandIn(nodes, spoil)


RULES = {
    "number": ({"participation": 2}, 2),
    "fraction": ({"participation": 0.6}, 0.6),
    "weight": ({"participation__size": 4, "participation__by": "weight"}, fg.Participation(4, by="weight")),
}


@pytest.mark.parametrize("form", ["explicit", "client"])
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("name", ["fedavg", "fedagrac", "scaffold"])
def test_cohorts_are_those_of_a_simulation(name, rule, form, tmp_path):
    ours, theirs = RULES[rule]
    settings, grid = five(tmp_path, rounds=5, algorithm__name=name, **ours)
    if form == "client":
        settings = {**settings, "steps.kind": "client"}
        del settings["steps.table"]
        for node in grid.nodes.values():
            node.context.run_config.clear()
            node.context.run_config.update(settings)
    run = flower(settings, grid)
    options = {"steps": fg.Explicit([K5]), "batch_size": 10, "engine": "serial", "participation": theirs}
    expected = fg.simulate(model(None).double(), FIVE, fg.algorithm(name, lr=0.1), 5, **options)
    assert close(run.state["x"], expected.vector)
    assert run.history.column("clients") == expected.history.column("clients")
    assert run.history.column("train_loss") == pytest.approx(expected.history.column("train_loss"))
    asked = [node - 10 for node, kind in grid.sent if kind == "train.steps"]
    assert asked == [int(client) for steps in run.history.column("steps") for client in steps]
    assert all(record["events"] == [] for record in run.history)


def test_a_resumed_run_with_cohorts_has_the_same_numbers(tmp_path):
    settings, grid = five(tmp_path, rounds=6, participation=2)
    whole = flower({**settings, "out": str(tmp_path / "whole")}, grid)
    flower({**settings, "rounds": 3}, grid)
    resumed = flower(settings, grid)
    assert torch.equal(resumed.state["x"], whole.state["x"])
    assert resumed.history.column("steps") == whole.history.column("steps")


def test_an_algorithm_draws_the_random_numbers_of_a_simulation(tmp_path, monkeypatch):
    monkeypatch.setitem(REGISTRY, "noisy", (Noisy, {}))
    settings, grid = five(tmp_path, rounds=3, participation=2, algorithm__name="noisy", seed=11)
    options = {"steps": fg.Explicit([K5]), "batch_size": 10, "engine": "serial", "participation": 2, "seed": 11}
    expected = fg.simulate(model(None).double(), FIVE, Noisy(lr=0.1), 3, **options)
    assert close(flower(settings, grid).state["x"], expected.vector)


def test_drawn_clients_that_are_not_connected_are_absent(tmp_path):
    """min_clients counts among the drawn. Client 1 leaves after the start."""
    settings, grid = five(tmp_path, rounds=6, participation=2, min_clients=1, algorithm__name="fedavg")
    rule = fg.Participation(2)
    drawn = [rule.draw(t, FIVE.weights, 0)[0].tolist() for t in range(6)]
    assert sum(1 in clients for clients in drawn) >= 2  # so the test tests something

    def leave(node, kind, round, reply):
        if kind == "train.steps":
            grid.nodes.pop(11, None)
        return None if node == 11 and kind == "train.steps" else reply

    grid.spoil, nodes = leave, dict(grid.nodes)
    run = flower(settings, grid)
    expected = [[i for i in clients if i != 1] for clients in drawn]
    assert [list(map(int, steps)) for steps in run.history.column("steps")] == expected
    needed = {**settings, "min_clients": 2, "out": str(tmp_path / "two")}
    grid.nodes = nodes
    with pytest.raises(FedagracError, match=r"1 of 2 clients connected .* 2 are needed .* missing partition-id 1"):
        flower(needed, grid)


def test_excluded_clients_take_nobodys_place_in_a_cohort(tmp_path):
    sizes = json.dumps({str(i): int(n) for i, n in enumerate(FIVE.sizes)})
    settings, grid = five(tmp_path, rounds=8, participation=3, exclude="[1, 3]", samples=sizes)
    run = flower(settings, grid)
    assert run.history.column("clients") == [3] * 8
    assert all(set(steps) == {"0", "2", "4"} for steps in run.history.column("steps"))
    settings = {**settings, "participation": 2, "out": str(tmp_path / "two")}
    run = flower(settings, five(tmp_path, participation=2)[1])
    drawn = [set(steps) for steps in run.history.column("steps")]
    assert all(len(clients) == 2 and clients <= {"0", "2", "4"} for clients in drawn)
    assert len({frozenset(clients) for clients in drawn}) > 1
    settings = {**settings, "participation": 0.6, "exclude": "[1]", "out": str(tmp_path / "fraction")}
    run = flower(settings, five(tmp_path, participation=0.6)[1])
    assert run.history.column("clients") == [3] * 8  # 0.6 of 5, not of the 4 that are left


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"participation": 0}, "participation = 0"),
        ({"participation": 4}, "participation = 4: expected at most the number of clients, 3"),
        ({"participation": 1.5}, "participation = 1.5: .* a fraction in"),
        ({"participation": "all"}, "participation = 'all'"),
        ({"participation__size": 2, "participation__by": "name"}, "participation.by = 'name'"),
        ({"participation": 2, "min_clients": 3}, "min_clients = 3: expected at most the cohort, 2"),
        ({"start_clients": 4}, "start_clients = 4: expected at most clients = 3"),
        ({"start_clients": -1}, "start_clients = -1"),
        ({"exclude": "[3]"}, r"exclude = \[3\]: expected a list of different partitions from 0 to 2"),
        ({"exclude": "[0, 0]"}, r"exclude = \[0, 0\]"),
        ({"exclude": "[0, 1, 2]"}, "and not of all"),
        ({"exclude": "[true]"}, "exclude"),
        ({"exclude": "[0]", "start_clients": 3}, "at most clients = 3 less 1 excluded"),
        ({"keep_checkpoints": 0}, "keep_checkpoints = 0"),
    ],
)
def test_bad_settings_of_cohorts_are_named(changes, message, tmp_path):
    with pytest.raises(InputError, match=message):
        Settings.of(config(tmp_path, **changes))


def test_min_clients_is_the_cohort_by_default(tmp_path):
    assert Settings.of(config(tmp_path, participation=2)).min_clients == 2
    assert Settings.of(config(tmp_path, participation=0.34)).min_clients == 1


@pytest.mark.parametrize("changes", [{"start_clients": 2}, {"exclude": "[1]"}])
def test_a_start_without_all_clients_needs_their_numbers_of_samples(changes, tmp_path):
    settings = config(tmp_path, **changes)
    with pytest.raises(InputError, match="samples = None: expected the number of samples of each partition"):
        flower(settings, federation(settings))


class Reference:
    """FedaGrac that transmits mean gradients, which is SCAFFOLD: full batches of softmax regression in NumPy."""

    def __init__(self, x, present, lr=0.1):
        self.x, self.lr, n = x, lr, FED.sizes.astype(float)
        self.data = [(FED.inputs[FED.samples_of(i)].double().numpy().reshape(-1, 64),
                      FED.targets[FED.samples_of(i)].numpy()) for i in range(3)]  # fmt: skip
        self.omega, self.n = n / n.sum(), n
        gradients = {i: self.gradient(i, x) for i in present}
        total = sum(n[i] for i in present)
        self.nu = sum(n[i] / total * gradients[i] for i in present)
        self.rows = [gradients.get(i, self.nu) for i in range(3)]

    def gradient(self, i, x):
        inputs, targets = self.data[i]
        logits = inputs @ x[:640].reshape(10, 64).T + x[640:]
        p = np.exp(logits - logits.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        p[np.arange(len(targets)), targets] -= 1
        return np.concatenate([(p.T @ inputs).ravel(), p.sum(0)]) / len(targets)

    def round(self, cohort):
        models, means = [], []
        for i in cohort:
            x, total = self.x.copy(), 0.0
            for _ in range(K[i]):
                g = self.gradient(i, x)
                x, total = x - self.lr * (g + self.nu - self.rows[i]), total + g
            models.append(x)
            means.append(total / K[i])
        weights = [self.n[i] / sum(self.n[j] for j in cohort) for i in cohort]
        self.x = sum(w * x for w, x in zip(weights, models, strict=True))
        self.nu = self.nu + sum(self.omega[i] * (m - self.rows[i]) for i, m in zip(cohort, means, strict=True))
        for i, mean in zip(cohort, means, strict=True):
            self.rows[i] = mean


FEDAGRAC = {"algorithm__name": "fedagrac-avg"}
SCAFFOLD = {"algorithm__name": "scaffold", "algorithm__init": "full"}


@pytest.mark.parametrize("algorithm", [FEDAGRAC, SCAFFOLD], ids=["fedagrac", "scaffold"])
def test_a_client_that_joins_later_began_with_the_mean_gradient_of_those_present(algorithm, tmp_path):
    """Client 1 is absent at the start and connects during round 2."""
    settings = config(
        tmp_path, rounds=4, batch_size="full", start_clients=2, min_clients=2, samples=SAMPLES, **algorithm
    )
    grid = federation(settings)
    late = grid.nodes.pop(11)

    def join(node, kind, round, reply):
        if round == 2:
            grid.nodes[11] = late
        return reply

    grid.spoil = join
    run = flower(settings, grid)
    assert run.history.column("clients") == [2, 2, 3, 3]
    assert run.history[0]["events"] == ["started without clients 1"]
    assert run.history[2]["events"] == ["client 1: connected"]
    assert run.history[2]["weights"] == {str(i): int(n) / int(FED.sizes.sum()) for i, n in enumerate(FED.sizes)}
    x1 = read_checkpoint_of(tmp_path / "run" / "checkpoint", 0).state["x"].numpy()
    expected = Reference(x1, present=[0, 2])
    for cohort in ([0, 2], [0, 2], [0, 1, 2], [0, 1, 2]):
        expected.round(cohort)
    np.testing.assert_allclose(run.state["x"].numpy(), expected.x, rtol=0, atol=1e-12)
    np.testing.assert_allclose(run.state["nu"].numpy(), expected.nu, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["fedagrac", "fedagrac-first", "scaffold"])
@pytest.mark.parametrize("present", [[0], [0, 2], [0, 1, 2]])
def test_nu_is_the_sum_over_all_clients_at_a_start_without_some(present, name, tmp_path):
    settings = config(
        tmp_path, rounds=1, start_clients=len(present), min_clients=1, samples=SAMPLES, algorithm__name=name,
        algorithm__init="full",
    )  # fmt: skip
    flower(settings, StandIn({10 + i: Node(settings, i) for i in present}))
    start = read_checkpoint_of(tmp_path / "run" / "checkpoint", 0)
    clients, rows = start.table.export()
    assert clients.tolist() == [0, 1, 2]
    expected = Reference(start.state["x"].numpy(), present)
    sent = rows["v" if "v" in rows else "nu"].numpy()
    np.testing.assert_allclose(sent, expected.rows, rtol=0, atol=1e-14)
    np.testing.assert_allclose(start.state["nu"].numpy(), expected.omega @ sent, rtol=0, atol=1e-14)
    np.testing.assert_allclose(start.state["nu"].numpy(), expected.nu, rtol=0, atol=1e-14)


def test_a_start_gradient_that_the_guard_drops_counts_as_absent_if_enough_are_left(tmp_path):
    def far(node, kind, round, reply):
        if node == 11 and kind == "query.hello":
            vector(reply.content, "gradient", lambda v: 1e9 * v)
        return reply

    settings = config(tmp_path, rounds=1, start_clients=2, samples=SAMPLES, guard__factor=10.0, poll_seconds=0.001)
    run = flower(settings, federation(settings, far))
    start = read_checkpoint_of(tmp_path / "run" / "checkpoint", 0)
    expected = Reference(start.state["x"].numpy(), present=[0, 2])
    np.testing.assert_allclose(start.state["nu"].numpy(), expected.nu, rtol=0, atol=1e-14)
    assert run.history[0]["clients"] == 3
    assert any("its gradient is" in event for event in run.history[0]["events"])


class SlowToReturn(StandIn):
    """A grid that shows node 12 only from the third look on, and counts looks."""

    looks = 0

    def get_node_ids(self):
        self.looks += 1
        return [node for node in self.nodes if node != 12 or self.looks > 2]


def interrupted(tmp_path, **changes):
    """Do two of four rounds. Return the settings, and the model of a run that was not interrupted."""
    settings = config(tmp_path, rounds=4, min_clients=2, **changes)
    whole = flower({**settings, "out": str(tmp_path / "whole")}, federation(settings))
    flower({**settings, "rounds": 2}, federation(settings))
    return settings, whole.state["x"]


def test_a_resumed_run_waits_for_the_nodes_that_it_knew(tmp_path):
    settings, expected = interrupted(tmp_path, wait_seconds=20.0)
    grid = SlowToReturn(federation(settings).nodes)
    run = flower(settings, grid)
    assert grid.looks > 2
    assert run.history.column("clients") == [3, 3, 3, 3]
    assert torch.equal(run.state["x"], expected)
    assert run.history[2]["events"] == ["resumed after round 2"]


def test_a_resumed_run_goes_on_without_a_node_that_does_not_return(tmp_path):
    settings, _ = interrupted(tmp_path)
    grid = federation(settings)
    del grid.nodes[12]
    run = flower(settings, grid)
    assert run.history.column("clients") == [3, 3, 2, 2]
    without = "resumed without clients 2, which did not connect within wait_seconds = 0.3"
    assert run.history[2]["events"] == ["resumed after round 2", without]
    again = flower({**settings, "rounds": 5, "wait_seconds": 30.0}, grid)  # it is not waited for a second time
    assert again.history[4]["clients"] == 2
    del grid.nodes[11]
    with pytest.raises(FedagracError, match=r"1 of 2 clients connected .* 2 are needed .* missing partition-id 1"):
        flower({**settings, "rounds": 6}, grid)
