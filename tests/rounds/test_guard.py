"""The server's guard: what it drops, and that a dropped client counts as one that did not reply."""

import logging
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

import fedagrac as fg
from constant_gradients import simulate as simulate_constant
from fedagrac.algorithms import REGISTRY
from fedagrac.callbacks.trackers import scalars
from fedagrac.core.local import Plan, Result
from fedagrac.engines import SerialEngine
from fedagrac.errors import InputError
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.report import read_run
from fedagrac.rounds.exchange import Lengths
from fedagrac.storage.checkpoints import read_checkpoint
from quadratics import Quadratics, quadratics

BAD = 3
SIZES = [10, 20, 10, 40]
K = [2, 4, 9, 5, 5]
"""Kbar is 4.94 with client 3 and 4.88 without it, so the same other clients are fast."""


def clients():
    """Return four clients and, as client 3, one with the data of all, which leaves the mean gradient unchanged."""
    q = quadratics(seed=1, sizes=SIZES)
    A, b = list(q.A), list(q.b)
    A.insert(BAD, np.concatenate(q.A))
    b.insert(BAD, np.concatenate(q.b))
    return Quadratics(A, b)


@dataclass(frozen=True)
class AllBut(fg.Participation):
    """All clients but one take part in some rounds, and all clients in the others."""

    absent: int = BAD
    rounds: tuple[int, ...] = (0, 1, 2, 3)

    def number(self, clients):
        return clients

    def draw(self, round, weights, seed):
        everyone = np.arange(len(weights))
        present = everyone[everyone != self.absent] if round in self.rounds else everyone
        return present, np.ones(len(present), np.int64)


def spoilt(spoil, rounds=(0, 1, 2, 3), client=BAD):
    """Return an engine that spoils the replies of one client in some rounds."""

    class Spoilt(SerialEngine):
        def run(self, plan, x, clients, round):
            result = super().run(plan, x, clients, round)
            for row in np.flatnonzero(clients == client) if round in rounds else []:
                spoil(result, row, x if x.ndim == 1 else x[row])
            return result

    return Spoilt


def to_nan(result, row, x):
    result.models[row, 0] = torch.nan


def far_away(result, row, x):
    result.models[row] = x + 1e3 * (result.models[row] - x)


def to_inf_loss(result, row, x):
    result.loss[row] = torch.inf


def test_the_rule_is_ten_times_the_median_of_what_is_finite():
    guard = fg.Guard(factor=10.0)
    assert guard.dropped(np.array([1.0, 2.0, 3.0, 20.0])) == {}  # median 2.5
    assert guard.dropped(np.array([1.0, 2.0, 3.0, 25.1])) == {3: "10 x the median"}
    assert guard.dropped(np.array([1.0, np.nan, 3.0, 21.0, np.inf])) == {1: "not finite", 4: "not finite"}
    assert guard.dropped(np.array([0.0, 0.0, 7.0])) == {}  # most did not move
    assert guard.dropped(np.array([np.nan, np.nan])) == {0: "not finite", 1: "not finite"}


def test_a_fast_client_may_go_further_and_steps_are_compared():
    """One step of length 1 or 30, and 100 steps of length 1: x is the mean of the first and the last client."""
    gradients = [[1.0, 0.0], [0.0, 30.0], [1.0, 0.0]]
    result = simulate_constant(fg.FedAvg(lr=1.0), gradients, K=[1, 1, 100], guard=fg.Guard(10.0))
    assert result.history[0]["dropped"] == [1]
    np.testing.assert_allclose(result.vector.numpy(), [-50.5, 0.0], atol=1e-12)


def test_slow_clients_of_fedlin_are_not_outliers():
    """The eta_i of FedLin is eta / K_i, so a step with K = 1 is a hundred times as long as with K = 100."""
    gradients = [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0]]
    result = simulate_constant(fg.FedLin(lr=1.0), gradients, K=[1, 100, 100], guard=fg.Guard(2.0))
    assert result.history[0]["dropped"] == []


@pytest.mark.parametrize("spoil", [to_nan, far_away, to_inf_loss])
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_dropped_client_changes_nothing(name, spoil):
    """In two rounds client 3 is spoilt and dropped; in the other run it is absent in these rounds.

    With FedLESAM these are not its first: the server keeps the model that a client received in its first round.
    """
    q, options = clients(), {"rounds": 4, "steps": fg.Explicit([K])}
    personal = {"personal": ()} if name == "fedper" else {}  # otherwise its only layer would be personal
    algorithm = fg.algorithm(name, lr=0.02, **personal)
    rounds = (1, 2) if name == "fedlesam" else (0, 1)
    guarded = q.simulate(algorithm, engine=spoilt(spoil, rounds), guard=fg.Guard(10.0), **options)
    absent = q.simulate(algorithm, engine="serial", participation=AllBut(5, rounds=rounds), **options)
    assert guarded.history.column("dropped") == [[BAD] if t in rounds else [] for t in range(4)]
    assert float((guarded.vector - absent.vector).abs().max()) < 1e-12
    for ours, theirs in zip(guarded.history, absent.history, strict=True):
        assert ours["train_loss"] == pytest.approx(theirs["train_loss"], rel=1e-12)
    unguarded = q.simulate(algorithm, engine=spoilt(spoil, rounds), **options)
    assert "dropped" not in unguarded.history[0]
    assert unguarded.status == "diverged" or float((unguarded.vector - absent.vector).abs().max()) > 1e-3


def long_first(result, row, x):
    result.first[row] = 1e30


def long_total(result, row, x):
    result.total[row] *= 1e3


def nan_slot(result, row, x):
    result.slots[1][row] = torch.nan


@pytest.mark.parametrize(
    ("algorithm", "spoil", "what"),
    [
        (fg.FedaGrac(lr=0.02), long_first, "its first gradient"),
        (fg.FedaGrac(lr=0.02, transmit="first"), long_first, "its first gradient"),
        (fg.FedaGrac(lr=0.001), long_total, "its gradient sum"),
        (fg.algorithm("scaffold", lr=0.001), long_total, "its gradient sum"),
        (fg.DiLoCo(lr=0.02), nan_slot, "its update"),
    ],
    ids=["first", "all first", "sum", "sum of SCAFFOLD", "state of AdamW"],
)
def test_a_client_whose_model_is_good_is_dropped_for_its_other_vectors(algorithm, spoil, what, caplog):
    """Client 3 is fast, so it sends a first gradient; sums are sent because eta K is below 0.01."""
    q, options = clients(), {"rounds": 4, "steps": fg.Explicit([K])}
    with caplog.at_level(logging.WARNING, "fedagrac"):
        guarded = q.simulate(algorithm, engine=spoilt(spoil, (0, 1)), guard=fg.Guard(10.0), **options)
    absent = q.simulate(algorithm, engine="serial", participation=AllBut(5, rounds=(0, 1)), **options)
    assert guarded.history.column("dropped") == [[BAD], [BAD], [], []]
    assert [message.partition(" is ")[0] for message in caplog.messages] == [
        f"round {t}: client {BAD}: dropped, {what}" for t in (1, 2)
    ]
    assert float((guarded.vector - absent.vector).abs().max()) < 1e-12
    unguarded = q.simulate(algorithm, engine=spoilt(spoil, (0, 1)), **options)
    assert unguarded.status == "diverged" or float((unguarded.vector - absent.vector).abs().max()) > 1e-6


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("lr", [0.02, 0.001])
def test_good_clients_have_the_numbers_of_a_run_without_a_guard(name, lr):
    q, options = clients(), {"rounds": 4, "steps": fg.Explicit([K])}
    guarded = q.simulate(fg.algorithm(name, lr=lr), guard=fg.Guard(10.0), **options)
    assert torch.equal(guarded.vector, q.simulate(fg.algorithm(name, lr=lr), **options).vector)
    assert guarded.history.column("dropped") == [[]] * 4


def test_the_only_first_gradient_is_compared_with_the_mean_gradients_of_the_others():
    """One step of eta = 1 from 0 to -g: the mean gradients of the first two are (3, 4) and (6, 8)."""
    plan = Plan.of(steps=[1, 1, 1], lr=1.0, first_steps=[0, 0, 1], mean=True)
    models, loss = -torch.tensor([[3.0, 4.0], [6.0, 8.0], [3.0, 4.0]]), torch.zeros(3)
    for length, dropped in ((99.0, {}), (101.0, {2: "its first gradient is 10.1 x the median"})):
        first = torch.tensor([[0.0, 0.0], [0.0, 0.0], [length, 0.0]])
        lengths = Lengths.of(plan, torch.zeros(2), Result(models, loss, first))
        assert lengths.mean.tolist() == [5.0, 10.0, 5.0]
        assert fg.Guard(10.0).faults(lengths) == dropped


@pytest.mark.parametrize(
    ("buffers", "dropped"),
    [
        ([[1.0, 0.0, 10], [2.0, 1.0, 10], [1.0, 1.0, 400]], []),  # a counter of steps, 10 and 400 of them
        ([[0.0, 0.0, 10], [0.0, 0.0, 10], [0.0, 9.0, 400]], []),  # as long as the counter
        ([[1.0, 0.0, 10], [2.0, 1.0, 10], [1e9, 1.0, 400]], [2]),
        ([[1e30, 0.0, 10], [2.0, 1.0, 10], [1.0, 1.0, 400]], [0]),
        ([[0.0, 0.0, 0], [0.0, 0.0, 0], [8.0, 0.0, 0]], []),  # below ten times the floor of 1
        ([[0.0, 0.0, 0], [0.0, 0.0, 0], [11.0, 0.0, 0]], [2]),
    ],
)
def test_buffers_are_too_long_only_if_they_also_moved_too_fast(buffers, dropped):
    plan = replace(Plan.of(steps=[10, 10, 400], lr=1.0), buffers=torch.zeros(3, 3))
    models, loss = torch.ones(3, 2), torch.zeros(3)
    lengths = Lengths.of(plan, torch.zeros(2), Result(models, loss, buffers=torch.tensor(buffers)))
    faults = {row: fault for row, fault in fg.Guard(10.0).faults(lengths).items() if "buffers" in fault}
    assert list(faults) == dropped


def test_dropped_clients_are_charged_for_what_they_did():
    q, options = clients(), {"rounds": 2, "steps": fg.Explicit([K])}
    guarded = q.simulate(fg.FedaGrac(lr=0.02), engine=spoilt(far_away), guard=fg.Guard(), **options)
    plain = q.simulate(fg.FedaGrac(lr=0.02), **options)
    for name in ("bytes_total", "sim_time", "clients", "fast", "steps_mean"):
        assert guarded.history.column(name) == plain.history.column(name)


def test_a_client_that_becomes_fast_by_a_drop_counts_with_its_mean_gradient():
    """K = 1, 3, 50: Kbar falls from 18 to 2. Client 1 is fast then, but its mean gradient counts."""
    q = quadratics(seed=2, sizes=[10, 10, 10])
    states = []

    class Keep(fg.Callback):
        def on_round(self, run, record):
            states.append({name: value.numpy().copy() for name, value in run.state.items()})

    algorithm = fg.FedaGrac(lr=0.01, init="zeros", first_steps=1)
    options = {"rounds": 1, "steps": fg.Explicit([[1, 3, 50]]), "callbacks": [Keep()], "guard": fg.Guard()}
    result = q.simulate(algorithm, engine=spoilt(far_away, client=2), **options)
    assert result.history[0]["dropped"] == [2]
    means = []
    for i, steps in enumerate([1, 3]):
        x, total = q.start(), np.zeros(5)
        for _ in range(steps):
            g = q.gradient(i, x)
            total, x = total + g, x - 0.01 * g
        means.append(total / steps)
    np.testing.assert_allclose(states[0]["nu"], (means[0] + means[1]) / 3, rtol=1e-9)


def test_a_cohort_drawn_by_weight_keeps_how_often_each_was_drawn():
    """A client drawn twice counts twice among the remaining clients."""
    q, drawn = quadratics(seed=1), {}

    class Keep(fg.Callback):
        def on_round(self, run, record):
            how = run.setup.participation
            drawn["clients"], drawn["times"] = how.draw(0, run.federation.weights, run.setup.seed)

    options = {"rounds": 1, "steps": fg.Constant(3), "participation": fg.Participation(9, by="weight")}
    result = q.simulate(
        fg.FedAvg(lr=0.02), engine=spoilt(far_away), guard=fg.Guard(), callbacks=[Keep()], **options
    )
    assert result.history[0]["dropped"] == [BAD]
    assert max(drawn["times"]) > 1
    expected, counted = np.zeros(5), 0
    for i, times in zip(drawn["clients"], drawn["times"], strict=True):
        x = q.start()
        for _ in range(3):
            x = x - 0.02 * q.gradient(i, x)
        if i != BAD:
            expected, counted = expected + times * x, counted + times
    np.testing.assert_allclose(result.vector.numpy(), expected / counted, rtol=1e-12)


def test_without_a_finite_update_the_run_has_diverged_and_keeps_its_model():
    def all_nan(result, row, x):
        result.models[:] = torch.nan

    q = clients()
    result = q.simulate(fg.FedAvg(lr=0.02), engine=spoilt(all_nan, (1,)), guard=fg.Guard(), steps=fg.Explicit([K]))
    before = q.simulate(fg.FedAvg(lr=0.02), rounds=1, steps=fg.Explicit([K]))
    assert (result.status, len(result.history)) == ("diverged", 2)
    assert result.history[-1]["dropped"] == [0, 1, 2, 3, 4]
    assert "round 2" in result.reason
    assert float((result.vector - before.vector).abs().max()) < 1e-12


def test_every_drop_is_logged(caplog):
    with caplog.at_level(logging.WARNING, "fedagrac"):
        simulate_constant(fg.FedAvg(lr=1.0), [[1.0], [214.0], [1.0]], K=[1, 1, 1], x=[0.0], guard=fg.Guard())
    assert caplog.messages == ["round 1: client 1: dropped, its update is 214 x the median"]


def test_runs_side_by_side_are_guarded_each_by_itself():
    """In the second run the step size is too large for client 3; the first run keeps all clients."""
    q = clients()
    q.A[BAD] = 1e4 * q.A[BAD]
    options = {"rounds": 3, "steps": fg.Explicit([K]), "guard": fg.Guard(1e9), "batch_size": None, "device": "cpu"}
    loss = torch.nn.functional.mse_loss

    def squeezed(output, target):
        return loss(output.squeeze(-1), target)

    federation, algorithms = q.federation(), [fg.FedAvg(lr=1e-10), fg.FedAvg(lr=0.01)]
    together = fg.simulate_many(q.module(), federation, algorithms, loss=squeezed, **options)
    assert [result.history.column("dropped") for result in together] == [[[], [], []], [[BAD]] * 3]
    for result, algorithm in zip(together, algorithms, strict=True):
        alone = fg.simulate(q.module(), federation, algorithm, loss=squeezed, **options)
        assert float((result.vector - alone.vector).abs().max()) < 1e-10


def test_the_trackers_get_the_number_of_drops():
    assert scalars({"round": 1, "dropped": [3, 4], "train_loss": 0.5}) == {"dropped": 2.0, "train_loss": 0.5}


@pytest.mark.parametrize("factor", [0.5, 1, "x", True, float("inf")])
def test_a_wrong_factor_is_named(factor):
    with pytest.raises(InputError, match=r"guard\.factor = .*: expected a number above 1"):
        fg.Guard(factor=factor)
    with pytest.raises(InputError, match=r"guard\.factor = .*: expected a number above 1"):
        Experiment.of({**table(), "guard": {"factor": factor}})


def test_other_wrong_settings_are_named():
    with pytest.raises(InputError, match=r"guard\.facto = 3: expected a known setting.*did you mean 'factor'"):
        Experiment.of({**table(), "guard": {"facto": 3}})
    with pytest.raises(InputError, match="guard = 10"):
        Experiment.of({**table(), "guard": 10})
    with pytest.raises(InputError, match="guard = 10: expected a fedagrac Guard such as"):
        clients().simulate(fg.FedAvg(lr=0.1), guard=10)


def table():
    return {"name": "one", "steps": {"kind": "constant", "steps": 2}, "algorithm": [{"name": "fedavg", "lr": 0.1}]}


def test_an_experiment_says_whether_it_is_guarded():
    assert "guard" not in Experiment.of(table()).resolved()
    assert Experiment.of({**table(), "guard": {}}).resolved()["guard"] == {"factor": 10.0}
    assert Experiment.of({**table(), "guard": {"factor": 3}}).resolved()["guard"] == {"factor": 3}


def test_a_guarded_experiment_writes_who_was_dropped(tmp_path):
    """With a factor of 1.01, one or two of four clients are dropped in every round."""
    data = {"clients": 4, "partition": {"kind": "dirichlet", "alpha": 0.3}}
    experiment = Experiment.of({**table(), "rounds": 3, "data": data, "guard": {"factor": 1.01}})
    (folder,) = run_experiment(prepare(experiment), tmp_path)
    stored = read_run(folder)
    assert stored.experiment["guard"] == {"factor": 1.01}
    assert all(1 <= len(dropped) <= 2 for dropped in (record["dropped"] for record in stored.history))


def test_a_resumed_guarded_run_equals_an_uninterrupted_run(tmp_path):
    q, options = clients(), {"rounds": 4, "steps": fg.Explicit([K]), "guard": fg.Guard()}
    engine = spoilt(far_away, (1, 2))
    whole = q.simulate(
        fg.FedaGrac(lr=0.02), engine=engine, callbacks=[fg.Checkpoints(tmp_path, every=3)], **options
    )
    checkpoint = replace(read_checkpoint(tmp_path), history=whole.history[:3])
    again = q.simulate(fg.FedaGrac(lr=0.02), engine=engine, resume=checkpoint, **options)
    assert torch.equal(again.vector, whole.vector)
    assert again.history.column("dropped") == [[], [BAD], [BAD], []]


def test_a_reply_counts_as_finite_only_in_all_its_parts():
    models, loss = torch.zeros(3, 2), torch.zeros(3, dtype=torch.float64)
    first, total = torch.zeros(3, 2), torch.zeros(3, 2)
    first[0, 1], total[2, 0] = torch.nan, -torch.inf
    assert Result(models, loss, first, total).finite().tolist() == [False, True, False]
