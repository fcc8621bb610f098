"""Clients one by one: their results, the summary, fine-tuning, and the Local-only baseline."""

import copy
import dataclasses
import functools
import json
import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

import fedagrac as fg
from fedagrac.callbacks.run_folder import KeepRun
from fedagrac.errors import InputError
from fedagrac.rounds import personal
from fedagrac.rounds.evaluation import Measures
from fedagrac.rounds.measurement import CHUNKS
from fedagrac.rounds.per_client import CLIENT_MEASURES, PerClient, speed_groups
from fedagrac.storage.runs import read_run


def problem(M=5, seed=0, **options):
    """Return a federation of M clients with unequal test sets, and a model, in float64."""
    rng = np.random.default_rng(seed)

    def samples(n):
        X = rng.normal(size=(n, 4))
        return X, (X[:, :3] + rng.normal(size=(n, 3))).argmax(1)

    clients, tests = [samples(6 + i) for i in range(M)], [samples(2 + i % 4) for i in range(M)]
    fed = fg.Federation.from_arrays(clients, tests=tests, **options)
    torch.manual_seed(seed)
    return fed, nn.Linear(4, 3, dtype=torch.float64)


def own_test(fed, client):
    samples = torch.from_numpy(fed.tests.shares[client])
    return fed.tests.inputs[samples], fed.tests.targets[samples]


def by_hand(fed, modules):
    """Return accuracy and loss of each client's module on its own test set."""
    accuracy, loss = [], []
    for client, module in enumerate(modules):
        X, y = own_test(fed, client)
        with torch.no_grad():
            output = module(X)
        accuracy.append(float((output.argmax(1) == y).double().mean()))
        loss.append(float(cross_entropy(output, y)))
    return accuracy, loss


# the table


def table(accuracy, steps, loss=None, **more):
    M = len(steps)
    columns = {"client": range(M), "name": map(str, range(M)), "samples": [1] * M}
    return PerClient.of(
        {
            **{k: list(v) for k, v in columns.items()},
            "steps": steps,
            "accuracy": accuracy,
            "loss": loss or [0.0] * M,
        }
    )


def test_the_summary_by_hand():
    accuracy = [0.1 * i for i in range(1, 10)] + [0.05] + [1.0] * 10
    summary = table(accuracy, list(range(20))).summary()
    assert summary["mean"] == pytest.approx((4.5 + 0.05 + 10) / 20)
    assert summary["worst_decile"] == pytest.approx((0.05 + 0.1) / 2)  # two of twenty
    assert summary["spread"] == pytest.approx(np.std(accuracy))
    assert summary["slow"] == pytest.approx(np.mean(accuracy[:7]))
    assert summary["middle"] == pytest.approx(np.mean(accuracy[7:13]))
    assert summary["fast"] == 1.0


def test_the_worst_losses_are_the_largest():
    losses = table(None, [1, 2, 3], [0.5, 4.0, 1.0])
    assert losses.summary()["worst_decile"] == 4.0  # of three clients, one
    assert losses.summary("accuracy")["mean"] is None
    assert losses.summary() == losses.summary("loss")


def test_clients_with_equal_steps_share_a_group():
    groups = {
        (3, 1, 2): ["fast", "slow", "middle"],
        (5, 5, 5): ["middle"] * 3,
        (2,) * 19 + (40,): ["slow"] * 19 + ["fast"],
        (2,) + (40,) * 19: ["slow"] + ["fast"] * 19,
        (1, 1, 2, 2, 3, 3): ["slow"] * 2 + ["middle"] * 2 + ["fast"] * 2,
        (1, 1, 9, 9): ["slow"] * 2 + ["fast"] * 2,
    }
    for steps, expected in groups.items():
        assert speed_groups(np.array(steps, float)).tolist() == expected


def test_a_client_without_results_does_not_count():
    summary = table([0.5, None, 1.0], [1, 50, 9]).summary()
    assert (summary["mean"], summary["slow"], summary["fast"]) == (0.75, 0.5, 1.0)


def test_tables_become_data_frames_and_plain_columns_and_back():
    one = table([0.5, None], [1, 2], [1.0, None])
    frame = one.to_pandas()
    assert list(frame.columns) == ["client", "name", "samples", "steps", "accuracy", "loss"]
    assert len(frame) == len(one) == 2
    assert json.loads(json.dumps(one.columns()))["accuracy"] == [0.5, None]
    again = PerClient.of(one.columns())
    np.testing.assert_array_equal(again.accuracy, one.accuracy)
    assert again.name == one.name
    assert "accuracy" not in table(None, [1, 2]).to_pandas().columns
    with pytest.raises(
        InputError, match=r"per_client.name = '1 values': expected one value for each of 2 clients"
    ):
        dataclasses.replace(one, name=("a",))


def test_results_reach_other_processes_as_json():
    measured = Measures({"test_loss": 0.5, "top5": None}, table([0.5, None], [1, 2], [1.0, 2.0]))
    again = Measures.from_plain(json.loads(json.dumps(measured.plain())))
    assert again == measured == {"test_loss": 0.5, "top5": None}
    assert again.per_client.columns() == measured.per_client.columns()
    assert Measures.from_plain(Measures({"a": 1.0}).plain()).per_client is None


def test_a_table_prints_its_summary():
    lines = repr(table([0.5, 0.75, 1.0], [1, 2, 3], [1.0, 0.5, 0.25])).splitlines()
    assert lines[0].split() == ["3", "clients", "mean", "worst", "decile", "spread", "slow", "middle", "fast"]
    assert lines[1].split() == ["accuracy", "(%)", "75.0", "50.0", "20.4", "50.0", "75.0", "100.0"]
    assert lines[2].split()[1:3] == ["0.583", "1.000"]


# in a run

NAMES = ("ann", "bob", "eve", "max", "zoe")


@pytest.mark.parametrize("chunk", [3, 1000])
@pytest.mark.parametrize("separate", [False, True])
def test_every_client_is_measured_on_its_own_test_set(chunk, separate, monkeypatch):
    """Chunks of three cut through the test sets; a test set for all may exist besides."""
    monkeypatch.setitem(CHUNKS, "cpu", chunk)
    fed, model = problem(test=(np.zeros((2, 4)), [0, 1]) if separate else None, names=NAMES)
    seen = []

    class Watch(fg.Callback):
        def on_round(self, run, record):
            seen.append(run.per_client)

    steps = fg.Linear(1, 2)
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.3), rounds=4, steps=steps, eval_every=3, callbacks=[Watch()])
    accuracy, loss = by_hand(fed, [result.model()] * 5)
    clients = result.per_client
    np.testing.assert_allclose(clients.accuracy, accuracy, rtol=1e-12)
    np.testing.assert_allclose(clients.loss, loss, rtol=1e-12)
    assert clients.steps.tolist() == [1, 3, 5, 7, 9]
    assert clients.name == NAMES
    assert clients.samples.tolist() == [2, 3, 4, 5, 2]
    assert [one is None for one in seen] == [True, True, False, False]
    assert seen[-1] is clients
    last = result.history[-1]
    assert last["client_accuracy_mean"] == pytest.approx(np.mean(accuracy), rel=1e-12)
    assert last["client_accuracy_worst_decile"] == min(accuracy)
    assert last["client_accuracy_spread"] == pytest.approx(np.std(accuracy), rel=1e-12)
    assert last["client_accuracy_slow"] == pytest.approx(np.mean(accuracy[:2]), rel=1e-12)
    assert last["client_accuracy_fast"] == pytest.approx(np.mean(accuracy[3:]), rel=1e-12)
    assert last["client_loss_mean"] == pytest.approx(np.mean(loss), rel=1e-12)
    if not separate:
        weights = np.array([2, 3, 4, 5, 2]) / 16
        assert last["test_accuracy"] == pytest.approx(weights @ accuracy, rel=1e-12)
        assert last["test_loss"] == pytest.approx(weights @ loss, rel=1e-12)
    else:
        output = result.model()(torch.zeros(2, 4, dtype=torch.float64)).detach()
        assert last["test_loss"] == pytest.approx(float(cross_entropy(output, torch.tensor([0, 1]))), rel=1e-12)


class Doubled(nn.CrossEntropyLoss):
    """A loss that is not what its base is."""

    def forward(self, output, target):
        return 2 * super().forward(output, target)


WEIGHT = torch.tensor([1.0, 5.0, 0.5], dtype=torch.float64)


@pytest.mark.parametrize(
    "loss",
    [
        cross_entropy,
        nn.CrossEntropyLoss(weight=WEIGHT, label_smoothing=0.2),
        nn.CrossEntropyLoss(ignore_index=1),
        functools.partial(cross_entropy, weight=WEIGHT),
        functools.partial(nll_loss, ignore_index=0),
        Doubled(),
        lambda output, target: (output.softmax(1)[:, 0] - target).square().mean(),
    ],
)
def test_the_loss_of_a_client_is_the_loss_of_its_own_samples(loss):
    fed, model = problem(6)
    table = fg.simulate(model, fed, fg.FedAvg(lr=1e-9), rounds=1, loss=loss, engine="serial").per_client
    with torch.no_grad():
        expected = [float(loss(model(X), y)) for X, y in (own_test(fed, i) for i in range(6))]
    np.testing.assert_allclose(table.loss, expected, rtol=1e-6)


def test_measures_of_clients_are_columns_of_the_history_and_of_the_run_folder(tmp_path):
    fed, model = problem()
    keep = KeepRun(tmp_path / "run", {"name": "mine", "algorithm": [{"name": "fedavg", "lr": 0.1}]})
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=3, eval_every=2, callbacks=[keep])
    frame = result.history.to_pandas()
    assert set(CLIENT_MEASURES) <= set(frame.columns)
    assert frame["client_accuracy_mean"].isna().tolist() == [True, False, False]
    stored = read_run(tmp_path / "run")
    assert fg.History(stored.history) == result.history
    assert PerClient.of(stored.per_client).loss.tolist() == result.per_client.loss.tolist()
    assert result.history.best("client_loss_mean") == min(result.history.column("client_loss_mean")[1:])


def test_ignored_positions_and_empty_test_sets_give_no_results():
    data = [(np.eye(2, 4), [0, 1])] * 3
    tests = [(np.eye(2, 4), [-100, -100]), None, (np.eye(3, 4), [2, -100, 1])]
    fed, model = fg.Federation.from_arrays(data, tests=tests), nn.Linear(4, 3, dtype=torch.float64)
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1, loss=nn.CrossEntropyLoss())
    assert np.isnan(result.per_client.loss).tolist() == [True, True, False]
    assert result.history[-1]["client_accuracy_mean"] == result.history[-1]["test_accuracy"]
    assert np.isnan(fg.local_only(model, fed, lr=0.1, rounds=1, loss=nn.CrossEntropyLoss()).accuracy[1])


def test_regression_has_losses_of_clients_and_no_accuracy():
    data = [(np.ones((2, 1)), np.full((2, 1), value)) for value in (0.0, 2.0)]
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.ones_(model.weight)
    result = fg.simulate(
        model, fg.Federation.from_arrays(data, tests=data), fg.FedAvg(lr=1e-12), rounds=1, loss=mse_loss
    )
    np.testing.assert_allclose(result.per_client.loss, [1.0, 1.0], rtol=1e-9)
    assert result.per_client.accuracy is None
    assert result.history[-1]["client_accuracy_mean"] is None
    assert result.history[-1]["client_loss_mean"] == pytest.approx(1.0)


def test_a_run_that_a_callback_ends_has_a_table_of_its_final_model():
    fed, model = problem()

    class Stops(fg.Callback):
        def on_round(self, run, record):
            run.stop("enough")

    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=9, eval_every=9, callbacks=[Stops()])
    assert len(result.history) == 1
    np.testing.assert_allclose(result.per_client.loss, by_hand(fed, [result.model()] * 5)[1], rtol=1e-12)


def test_without_test_sets_of_clients_there_is_no_table():
    fed = fg.Federation.load("digits", clients=2)
    model = fg.models.build("logistic", features=64, classes=10)
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1)
    assert result.per_client is None
    assert not set(CLIENT_MEASURES) & set(result.history[0])
    with pytest.raises(InputError, match="one test set per client"):
        fg.fine_tune(result, lr=0.1)
    with pytest.raises(InputError, match="one test set per client"):
        fg.local_only(model, fed, lr=0.1, rounds=1)


# training alone


def sgd(model, X, y, lr, steps):
    """Return a copy of the module after full-batch gradient descent, in plain PyTorch."""
    module = nn.Linear(4, 3, dtype=torch.float64)
    module.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(module.parameters(), lr=lr)
    for _ in range(steps):
        optimizer.zero_grad()
        cross_entropy(module(X), y).backward()
        optimizer.step()
    return module


def own_data(fed, client):
    samples = torch.from_numpy(fed.samples_of(client))
    return fed.inputs[samples], fed.targets[samples]


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("together", [1000, 2])
def test_fine_tuning_is_gradient_descent_from_the_final_model(engine, together, monkeypatch):
    monkeypatch.setattr(personal, "MODELS_BYTES", together * 15 * 8)
    fed, model = problem()
    result = fg.simulate(model, fed, fg.Scaffold(lr=0.1), rounds=2, batch_size=None, steps=fg.Linear(1, 1))
    tuned = fg.fine_tune(result, lr=0.2, steps=7, batch_size=None, engine=engine)
    modules = [sgd(result.model(), *own_data(fed, i), lr=0.2, steps=7) for i in range(5)]
    accuracy, loss = by_hand(fed, modules)
    np.testing.assert_allclose(tuned.loss, loss, rtol=1e-12)
    assert tuned.accuracy.tolist() == accuracy
    assert tuned.steps.tolist() == result.per_client.steps.tolist() == [1, 2, 3, 4, 5]
    assert (tuned.loss != result.per_client.loss).all()


@pytest.mark.parametrize("engine", ["serial", "lanes"])
@pytest.mark.parametrize("together", [1000, 2])
def test_local_only_is_gradient_descent_from_the_first_model(engine, together, monkeypatch):
    monkeypatch.setattr(personal, "MODELS_BYTES", together * 15 * 8)
    fed, model = problem()
    options = {"rounds": 3, "steps": fg.Linear(1, 2), "batch_size": None, "engine": engine}
    alone = fg.local_only(model, fed, lr=0.2, **options)
    modules = [sgd(model, *own_data(fed, i), lr=0.2, steps=3 * (1 + 2 * i)) for i in range(5)]
    np.testing.assert_allclose(alone.loss, by_hand(fed, modules)[1], rtol=1e-12)


def test_local_only_with_one_client_is_fedavg():
    """The same batches, and nothing to average."""
    fed, model = problem(1)
    options = {"rounds": 4, "steps": fg.Constant(5), "batch_size": 3, "seed": 7}
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.3), **options)
    alone = fg.local_only(model, fed, lr=0.3, **options)
    np.testing.assert_allclose(alone.loss, result.per_client.loss, rtol=1e-12)


def test_local_only_trains_in_the_rounds_in_which_a_client_takes_part():
    fed, model = problem(4)
    part = fg.Participation(2)
    options = {"rounds": 6, "steps": fg.Constant(2), "batch_size": None, "participation": part, "seed": 3}
    alone = fg.local_only(model, fed, lr=0.2, **options)
    times = sum(np.isin(np.arange(4), part.draw(t, fed.weights, 3)[0]).astype(int) for t in range(6))
    assert set(times) != {3}
    modules = [sgd(model, *own_data(fed, i), lr=0.2, steps=2 * int(times[i])) for i in range(4)]
    np.testing.assert_allclose(alone.loss, by_hand(fed, modules)[1], rtol=1e-12)


def test_fine_tuning_goes_on_with_new_batches():
    """Stochastic steps of the round after the last: the same as a third round of a single client."""
    fed, model = problem(1)
    options = {"steps": fg.Constant(5), "batch_size": 3}
    two, three = (fg.simulate(model, fed, fg.FedAvg(lr=0.3), rounds=n, **options) for n in (2, 3))
    tuned = fg.fine_tune(two, lr=0.3, **options)
    np.testing.assert_allclose(tuned.loss, three.per_client.loss, rtol=1e-12)


@pytest.mark.parametrize(
    ("options", "field"),
    [({"steps": 0}, "steps"), ({"steps": 2.5}, "steps"), ({"lr": -1}, "lr"), ({"batch": 5}, "option")],
)
def test_fine_tuning_refuses_what_it_cannot_use(options, field):
    fed, model = problem(2)
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1)
    with pytest.raises(InputError) as error:
        fg.fine_tune(result, **{"lr": 0.1, **options})
    assert error.value.field == field


def test_fine_tuning_is_stored_in_the_run_folder(tmp_path):
    fed, model = problem()
    folder = tmp_path / "run"
    keep = KeepRun(folder, {"name": "mine", "algorithm": [{"name": "fedavg", "lr": 0.1}]})
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1, callbacks=[keep])
    tuned = fg.fine_tune(result, lr=0.1, steps=3, folder=folder)
    stored = read_run(folder).per_client
    assert stored["tuned_loss"] == tuned.loss.tolist()
    assert stored["loss"] == result.per_client.loss.tolist()
    with pytest.raises(InputError, match=r"a per_client.json"):
        fg.fine_tune(result, lr=0.1, folder=tmp_path)


def test_moving_buffers_train_with_their_client():
    """BatchNorm of a client alone: its statistics are those of ordinary training."""
    fed, _ = problem(2)
    torch.manual_seed(0)
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    alone = fg.local_only(model, fed, lr=0.1, rounds=2, steps=fg.Linear(3, 2), batch_size=None)
    for client in range(2):
        X, y = own_data(fed, client)
        trained = copy.deepcopy(model)
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(2 * (3 + 2 * client)):
            optimizer.zero_grad()
            cross_entropy(trained(X), y).backward()
            optimizer.step()
        X, y = own_test(fed, client)
        with torch.no_grad():
            assert alone.loss[client] == pytest.approx(float(cross_entropy(trained.eval()(X), y)), rel=1e-12)


# the documentation

PAGE = Path(__file__).parents[2] / "docs" / "evaluation.md"
PROGRAMS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_the_programs_of_the_page_run(number, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "program.py"
    script.write_text(PROGRAMS[number])
    assert runpy.run_path(str(script))


def test_local_buffers_are_those_with_which_each_client_is_measured():
    """The same inputs, shifted client by client: with its own statistics each client sees the same numbers."""
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(40, 3)), rng.integers(0, 2, 40)
    clients = [(X + shift, y) for shift in (0.0, 5.0, -20.0)]
    fed = fg.Federation.from_arrays(clients, tests=clients)
    torch.manual_seed(0)
    norm = torch.nn.BatchNorm1d(3, momentum=1.0, affine=False)  # the statistics of the last batch
    module = torch.nn.Sequential(norm, torch.nn.Linear(3, 2)).double()
    options = {"rounds": 3, "steps": fg.Constant(2), "batch_size": None, "eval_every": 3}
    result = fg.simulate(module, fed, fg.FedAvg(lr=0.1), buffers="local", **options)
    losses = result.per_client.loss
    assert np.ptp(losses) < 1e-12
    averaged = fg.simulate(module, fed, fg.FedAvg(lr=0.1), buffers="average", **options)
    assert np.ptp(averaged.per_client.loss) > 0.01
