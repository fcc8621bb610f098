"""Runs side by side have the same numbers as runs on their own."""

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.callbacks import Callback
from fedagrac.core.local import Plan, Result
from fedagrac.engines import LanesEngine, SerialEngine


def far(a, b):
    """Return the relative distance of two vectors."""
    return float((a - b).norm() / b.norm())


@pytest.fixture(scope="module")
def federation():
    return fg.Federation.load("digits", clients=5, partition=fg.Dirichlet(0.5), seed=1)


def logistic():
    return fg.models.build("logistic", features=64, classes=10).double()


OPTIONS = {"steps": fg.Linear(1, 3), "batch_size": 8, "weight_decay": 0.01, "seed": 3}


@pytest.mark.parametrize("engine", ["serial", "lanes", lambda w: LanesEngine(w, fixed=True)])
@pytest.mark.parametrize("participation", [None, 3])
def test_every_algorithm_beside_all_others(federation, engine, participation):
    options = {**OPTIONS, "engine": engine, "participation": participation}
    names = sorted(REGISTRY.keys() - {"fedper"})  # its personal layer would be the only one
    algorithms = [fg.algorithm(name, lr=0.02) for name in names]
    algorithms += [fg.FedaGrac(lr=0.1), fg.FedProx(lr=0.1), fg.FedPer(lr=0.1, personal="*.bias")]
    together = fg.simulate_many(logistic(), federation, algorithms, rounds=4, **options)
    for result, algorithm in zip(together, algorithms, strict=True):
        alone = fg.simulate(logistic(), federation, algorithm, rounds=4, **options)
        assert far(result.vector, alone.vector) < 1e-12, algorithm
        for key in ("train_loss", "test_loss", "test_accuracy", "bytes_total", "sim_time"):
            assert result.history.column(key) == pytest.approx(alone.history.column(key), rel=1e-10)


def test_compiled_lanes_of_several_runs(federation, monkeypatch):
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.COMPILED_WIDTHS", 1)
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.UNROLL", (2, 1))  # compiles in half the time
    algorithms = [fg.FedProx(lr=0.1, mu=1.0), fg.FedaGrac(lr=0.05), fg.FedAvg(lr=0.1)]
    options = {**OPTIONS, "rounds": 2}
    together = fg.simulate_many(
        logistic(), federation, algorithms, engine=lambda w: LanesEngine(w, compiled=True), **options
    )
    for result, algorithm in zip(together, algorithms, strict=True):
        alone = fg.simulate(logistic(), federation, algorithm, engine="serial", **options)
        assert far(result.vector, alone.vector) < 1e-12, algorithm


def test_a_run_that_ends_leaves_the_others_alone(federation):
    class EndsAfter(Callback):
        def __init__(self, rounds):
            self.rounds, self.ended = rounds, None

        def on_round(self, run, record):
            if record["round"] == self.rounds:
                run.stop("enough")

        def on_end(self, run, result):
            self.ended = len(run.history)

    first, second = EndsAfter(2), EndsAfter(100)
    algorithms = [fg.Scaffold(lr=0.05), fg.FedaGrac(lr=0.05), fg.FedAvg(lr=1e200)]
    a, b, c = fg.simulate_many(
        logistic(), federation, algorithms, rounds=5, callbacks=[[first], [second], []], **OPTIONS
    )
    assert (a.status, b.status, c.status) == ("stopped", "finished", "diverged")
    assert (len(a.history), len(b.history)) == (2, 5)
    assert (first.ended, second.ended) == (2, 5)
    alone = fg.simulate(logistic(), federation, algorithms[1], rounds=5, **OPTIONS)
    assert far(b.vector, alone.vector) < 1e-12


def test_a_stop_rule_ends_each_run_at_its_own_round(federation):
    algorithms = [fg.FedAvg(lr=0.005), fg.FedAvg(lr=0.1)]
    options = {**OPTIONS, "stop": fg.Stop(accuracy=0.7), "rounds": 40}
    together = fg.simulate_many(logistic(), federation, algorithms, **options)
    alone = [fg.simulate(logistic(), federation, algorithm, **options) for algorithm in algorithms]
    assert [len(r.history) for r in together] == [len(r.history) for r in alone]
    assert len(together[0].history) != len(together[1].history)


def test_the_starting_gradients_are_computed_once(federation):
    calls = []

    class Counting(SerialEngine):
        def gradients(self, x, clients, round, batch="full"):
            calls.append(round)
            return super().gradients(x, clients, round, batch)

    grid = [fg.FedaGrac(lr=lr) for lr in (0.01, 0.02, 0.05)]
    fg.simulate_many(logistic(), federation, grid, rounds=2, engine=Counting, **OPTIONS)
    assert calls == [0]


def test_joined_plans_and_split_results():
    plans = [
        Plan.of(steps=[2, 3], lr=0.1),
        Plan.of(steps=[4], lr=0.2, correction=torch.ones(1, 2), first_steps=9, mean=True),
        Plan.of(steps=[1], lr=0.001, mean=True),
    ]
    joined = Plan.join(plans)
    assert joined.steps.tolist() == [2, 3, 4, 1]
    assert joined.lr.tolist() == [0.1, 0.1, 0.2, 0.001]
    assert joined.first_steps.tolist() == [0, 0, 4, 0]
    assert joined.correction.tolist() == [[0, 0], [0, 0], [1, 1], [0, 0]]
    assert joined.accumulate  # the last asked for it
    rows = torch.arange(8.0).reshape(4, 2)
    parts = Result(rows, torch.arange(4.0), rows + 10, rows + 20).split(plans)
    assert [part.models.tolist() for part in parts] == [[[0, 1], [2, 3]], [[4, 5]], [[6, 7]]]
    assert [part.first is None for part in parts] == [True, False, True]
    assert [part.total is None for part in parts] == [True, True, False]
    assert not Plan.join(plans[:1] * 2).accumulate
    assert Plan.join(plans[:1] * 2).correction is None


def test_engines_start_each_row_at_its_own_model(federation):
    from fedagrac.engines import Workload
    from fedagrac.models.vector import VectorModel

    w = Workload.of(VectorModel(logistic()), federation, None, 4, "replacement", 0.0, 0)
    starts = torch.randn(4, w.model.size, dtype=torch.float64)
    plan = Plan.of(steps=[3, 1, 7, 2], lr=0.1, mu=0.5)
    clients = np.array([1, 1, 0, 4])
    expected = torch.stack(
        [
            SerialEngine(w).run(Plan.of(steps=[k], lr=0.1, mu=0.5), x, clients[i : i + 1], 2).models[0]
            for i, (k, x) in enumerate(zip(plan.steps, starts, strict=True))
        ]
    )
    for engine in (SerialEngine(w), LanesEngine(w), LanesEngine(w, width=3), LanesEngine(w, fixed=True)):
        assert far(engine.run(plan, starts, clients, 2).models, expected) < 1e-12


@pytest.mark.parametrize(
    ("bad", "word"),
    [
        ({"algorithms": []}, "at least one"),
        ({"callbacks": [[]]}, "of 2 algorithms"),
        ({"step": fg.Constant(3)}, "one of steps"),
    ],
)
def test_bad_input(federation, bad, word):
    arguments = {"algorithms": [fg.FedAvg(lr=0.1), fg.FedAvg(lr=0.2)], **bad}
    with pytest.raises(fg.InputError, match=word):
        fg.simulate_many(logistic(), federation, **arguments)
