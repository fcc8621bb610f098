"""Evaluation: loss, accuracy and metrics computed by hand, and pools that equal those of torch."""

import dataclasses
import functools

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy, mse_loss, nll_loss

import fedagrac as fg
from fedagrac.data.partitions import StoredShares
from fedagrac.engines import Workload
from fedagrac.engines.lanes.pools import TilingPools
from fedagrac.errors import InputError
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.evaluation import evaluate, try_evaluation
from fedagrac.rounds.measurement import CHUNKS


@pytest.mark.parametrize("shape", [(3, 2, 9, 7), (2, 4, 8, 8), (1, 1, 2, 5)])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(2, 2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        lambda x: nn.functional.max_pool2d(x, 2, 2, 0, 1),
    ],
)
def test_pools_are_those_of_torch(shape, pool):
    x = torch.from_numpy(np.random.default_rng(0).integers(-3, 3, shape)).double()
    expected = pool(x)
    with TilingPools():
        pooled = pool(x)
    if isinstance(expected, tuple):
        assert all(torch.equal(a, b) for a, b in zip(expected, pooled, strict=True))
    else:
        assert torch.equal(expected, pooled)


class Identity(nn.Module):
    """Returns its input, plus 0 times a parameter, so that outputs are given by hand."""

    def __init__(self, shape=lambda output: output):
        super().__init__()
        self.zero = nn.Parameter(torch.zeros(1, dtype=torch.float64))
        self.shape = shape

    def forward(self, *inputs, **named):
        output = inputs or named
        return self.shape(output[0] + self.zero if len(inputs) == 1 else output)


def workload_of(inputs, targets, loss=cross_entropy, module=None):
    """Return a workload whose training and test data are these samples; both may be trees."""
    plain = fg.Federation.from_arrays([(np.zeros((2, 2)), [0, 1])])
    w = Workload.of(VectorModel(Identity()), plain, cross_entropy, None, "replacement", 0.0, 0)
    model = VectorModel(module or Identity())
    return dataclasses.replace(w, model=model, loss=loss, inputs=inputs, targets=targets, test=(inputs, targets))


def evaluated(w, **metrics):
    return evaluate(w, w.model.initial(), metrics)


def scores(labels, classes):
    """Return outputs whose largest score is that of the label, [n, C, ...]."""
    return 3.0 * nn.functional.one_hot(labels, classes).movedim(-1, 1).double()


def test_loss_and_accuracy_over_chunks(monkeypatch):
    """Five samples in chunks of two: means over samples, not over chunks."""
    monkeypatch.setitem(CHUNKS, "cpu", 2)
    X = np.eye(5, 3, dtype=np.float64)
    y = np.array([0, 1, 2, 1, 1])
    fed = fg.Federation.from_arrays([(X, y)], test=(X, y))
    model = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(2 * torch.eye(3))
    w = Workload.of(VectorModel(model), fed, None, None, "replacement", 0.0, 0)
    measured = evaluate(w, w.model.initial(), {})
    right = -np.log(np.exp(2) / (np.exp(2) + 2))
    assert measured["test_loss"] == pytest.approx((3 * right + 2 * np.log(3)) / 5, rel=1e-14)
    assert measured["test_accuracy"] == 3 / 5  # two rows of zeros give class 0


# ignored positions

PADDED = torch.tensor([[0, 1, 2], [2, -100, -100], [-100, -100, -100], [-100, -100, -100], [1, 0, -100]])


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_a_perfect_model_on_padded_targets_has_accuracy_one(chunk, monkeypatch):
    """With chunks of one or two, one of them has no position that counts."""
    monkeypatch.setitem(CHUNKS, "cpu", chunk)
    outputs = scores(PADDED.clamp(min=0), 3)
    outputs[0, :, 0] = torch.tensor([1.0, 0.0, 0.0])  # unequal losses: chunks must be weighted by positions
    measured = evaluated(workload_of(outputs, PADDED))
    assert measured["test_accuracy"] == 1.0
    by_hand = 5 * -np.log(np.exp(3) / (np.exp(3) + 2)) - np.log(np.exp(1) / (np.exp(1) + 2))
    assert measured["test_loss"] == pytest.approx(by_hand / 6, rel=1e-13)


@pytest.mark.parametrize(
    ("loss", "ignored"),
    [
        (nn.CrossEntropyLoss(), -100),
        (nn.CrossEntropyLoss(ignore_index=0), 0),
        (nn.NLLLoss(ignore_index=2), 2),
        (functools.partial(cross_entropy, ignore_index=1), 1),
        (functools.partial(nll_loss, ignore_index=1), 1),
        (functools.partial(cross_entropy, label_smoothing=0.1), -100),
        (lambda output, target: cross_entropy(output, target, ignore_index=1), None),
    ],
)
def test_which_positions_are_ignored_follows_from_the_loss(loss, ignored, monkeypatch):
    monkeypatch.setitem(CHUNKS, "cpu", 2)
    rng = np.random.default_rng(0)
    labels = torch.from_numpy(rng.integers(0, 3, 7))
    if ignored == -100:
        labels[[1, 4]] = -100
    outputs = torch.from_numpy(rng.normal(size=(7, 3)))
    measured = evaluated(workload_of(outputs, labels, loss))
    counted = np.ones(7, bool) if ignored is None else labels.numpy() != ignored
    right = outputs.numpy().argmax(1) == labels.numpy()
    assert measured["test_accuracy"] == right[counted].mean()
    if ignored is not None:  # a loss of the user's own is averaged over samples
        assert measured["test_loss"] == pytest.approx(float(loss(outputs, labels)), rel=1e-13)


def test_class_weights_weigh_in_the_mean_of_chunks_too(monkeypatch):
    monkeypatch.setitem(CHUNKS, "cpu", 2)
    labels = torch.tensor([0, 1, 2, 2, 1])
    outputs = torch.from_numpy(np.random.default_rng(0).normal(size=(5, 3)))
    loss = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 0.2], dtype=torch.float64))
    measured = evaluated(workload_of(outputs, labels, loss))
    assert measured["test_loss"] == pytest.approx(float(loss(outputs, labels)), rel=1e-13)


def test_test_data_that_are_ignored_altogether_give_no_value():
    measured = evaluated(workload_of(torch.zeros(3, 2, dtype=torch.float64), torch.full((3,), -100)))
    assert measured == {"test_accuracy": None, "test_loss": None}


# shapes


def flat_loss(output, target):
    """A loss of a user who has the classes last."""
    return cross_entropy(output.flatten(0, -2), target.flatten())


def test_accuracy_per_token_with_the_classes_in_dimension_1_or_last():
    labels = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    outputs = scores(labels.clone().fill_(2), 5)  # always says 2: right at two of eight positions
    assert evaluated(workload_of(outputs, labels))["test_accuracy"] == 2 / 8
    last = outputs.movedim(1, -1).contiguous()
    assert evaluated(workload_of(last, labels, flat_loss))["test_accuracy"] == 2 / 8


def test_accuracy_is_none_if_both_dimensions_could_be_the_classes_and_the_loss_is_not_torchs():
    labels = torch.tensor([[0, 1, 2, 3], [3, 2, 1, 0]])
    outputs = scores(labels, 4).movedim(1, -1).contiguous()
    assert evaluated(workload_of(outputs, labels, flat_loss))["test_accuracy"] is None
    assert evaluated(workload_of(scores(labels, 4), labels))["test_accuracy"] == 1.0
    metric = fg.metrics.accuracy(dim=-1)
    assert evaluated(workload_of(outputs, labels, flat_loss), last=metric)["last"] == 1.0


def test_regression_has_no_accuracy():
    measured = evaluated(workload_of(torch.ones(4, 1).double(), torch.zeros(4, 1).double(), mse_loss))
    assert measured == {"test_accuracy": None, "test_loss": 1.0}


def test_losses_and_metrics_get_trees_whole(monkeypatch):
    monkeypatch.setitem(CHUNKS, "cpu", 2)
    a, b = torch.arange(5.0).double(), torch.arange(5.0, 10.0).double()
    seen = []

    def loss(output, target):
        seen.append(output["sum"].tolist())
        return (output["sum"] - target[0]).square().mean() + (output["pair"][1] - target[1]).abs().mean()

    def metric(output, target):
        assert output["pair"][0].tolist() == a.tolist()
        assert output["sum"].shape == target[0].shape == (5,)
        return output["sum"].sum()

    module = Identity(lambda given: {"sum": given["a"] + given["b"], "pair": (given["a"], given["b"])})
    targets = (a + b + 2, b + 3)
    w = workload_of({"a": a, "b": b}, targets, loss, module)
    measured = evaluated(w, total=metric)
    assert seen == [[5.0, 7.0], [9.0, 11.0], [13.0]]
    assert measured == {"test_accuracy": None, "test_loss": 4.0 + 3.0, "total": 45.0}


def test_a_tuple_of_inputs_becomes_arguments():
    a = torch.tensor([[1.0, 0.0], [0.0, 1.0]]).double()
    w = workload_of((a, 2 * a), torch.tensor([0, 1]), module=Identity(lambda given: given[0] + given[1]))
    assert evaluated(w)["test_loss"] == pytest.approx(np.log(1 + np.exp(-3)), rel=1e-13)


# the trial before round 1


def digits_run(**options):
    fed = fg.Federation.load("digits", clients=2)
    model = fg.models.build("logistic", features=64, classes=10)
    seen = []

    class Watch(fg.Callback):
        def on_round(self, run, record):
            seen.append(record)

    with pytest.raises(InputError) as error:
        fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=2, callbacks=[Watch()], eval_every=2, **options)
    assert seen == []
    return str(error.value)


def fails(output, target):
    raise ZeroDivisionError("nothing to divide by")


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (
            fails,
            ["metrics.mine = 'fails'", "output (360, 10) float32, target (360,) int64", "nothing to divide by"],
        ),
        (lambda output, target: None, ["metrics.mine", "-> scalar", "it returned NoneType"]),
        (lambda output, target: output.mean(0), ["metrics.mine", "it returned a tensor of shape (10,)"]),
        (lambda output, target: "0.5", ["metrics.mine", "it returned str"]),
        (fg.metrics.mse, ["metrics.mine = 'mse'", "one shape for both", "broadcast"]),
    ],
)
def test_a_metric_that_cannot_be_used_is_refused_before_round_1(metric, words):
    message = digits_run(metrics={"mine": metric})
    assert all(word in message for word in words), message


@pytest.mark.parametrize("name", ["test_loss", "steps", "val_loss", "client_accuracy_mean", "client_loss_mean"])
def test_names_of_the_history_are_reserved(name):
    assert "a name that no field of the history has" in digits_run(metrics={name: fg.metrics.accuracy()})


def test_a_metric_that_needs_many_samples_is_tried_on_all():
    calls = []

    def needs_every_class(output, target):
        calls.append(len(target))
        if len(set(target.tolist())) < 10:
            raise ValueError("only some classes")
        return 0.5

    fed = fg.Federation.load("digits", clients=2)
    model = fg.models.build("logistic", features=64, classes=10)
    metrics = {"auc": needs_every_class}
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1, metrics=metrics)
    assert result.history[0]["auc"] == 0.5
    assert calls[0] < 10 < calls[1] == 360


def test_a_model_or_a_loss_that_fails_on_test_data_is_refused_before_round_1():
    class Reads(nn.Linear):
        def forward(self, x):
            if not self.training and (x > 1).any():
                raise RuntimeError("cannot read this")
            return super().forward(x)

    train, test = (np.zeros((4, 2)), [0, 1, 0, 1]), (np.full((4, 2), 5.0), [0, 1, 0, 1])
    fed = fg.Federation.from_arrays([train], test=test)
    with pytest.raises(InputError, match=r"model = 'Reads'.*eval mode; it said: cannot read this"):
        fg.simulate(Reads(2, 2, dtype=torch.float64), fed, fg.FedAvg(lr=0.1), rounds=1)

    def loss(output, target):
        assert output.abs().sum() < 100, "too large"
        return cross_entropy(output, target)

    model = nn.Linear(2, 2, dtype=torch.float64)
    nn.init.constant_(model.weight, 50.0)
    with pytest.raises(InputError, match=r"loss = 'loss'.*of the test data; it said: too large"):
        fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1, loss=loss)


def test_metrics_need_outputs_with_a_row_per_sample():
    module = Identity(lambda given: (given, given.mean()))
    w = workload_of(torch.eye(2).double(), torch.tensor([0, 1]), lambda output, target: output[1], module)
    try_evaluation(w, {})
    with pytest.raises(InputError, match=r"model output\[1\] = \(\): expected a tensor with one row per sample"):
        try_evaluation(w, {"mine": lambda output, target: 0.0})


def test_the_trial_leaves_the_random_state_alone():
    w = workload_of(torch.eye(2).double(), torch.tensor([0, 1]), module=nn.Sequential(Identity(), nn.Dropout()))
    torch.manual_seed(1)
    before = torch.get_rng_state()
    try_evaluation(w, {"noise": lambda output, target: torch.rand(())})
    assert torch.equal(before, torch.get_rng_state())


# metrics


def test_metrics_of_classes_by_hand():
    output = torch.tensor([[4.0, 3, 2, 1], [4, 3, 2, 1], [4, 3, 2, 1], [1, 2, 3, 4]])
    target = torch.tensor([0, 1, 2, -100])
    assert fg.metrics.accuracy()(output, target) == 1 / 3
    assert fg.metrics.top_k(2)(output, target) == 2 / 3
    assert fg.metrics.top_k(9)(output, target) == 1.0
    assert fg.metrics.accuracy(ignore_index=2)(output, target) == 1 / 3
    assert fg.metrics.accuracy(ignore_index=None)(output, target) == 1 / 4
    tokens = output.T[None]  # [1, C, T] with four positions
    assert fg.metrics.top_k(2)(tokens, target[None]) == 2 / 3
    assert fg.metrics.accuracy(dim=2)(output[None], target[None]) == 1 / 3


def test_perplexity_by_hand():
    output = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.1, 0.8, 0.1], [0.2, 0.2, 0.6]]))
    target = torch.tensor([0, 1, -100])
    assert float(fg.metrics.perplexity()(output, target)) == pytest.approx(1 / np.sqrt(0.5 * 0.8), rel=1e-6)
    assert float(fg.metrics.perplexity(ignore_index=1)(output, torch.tensor([0, 1, 2]))) == pytest.approx(
        1 / np.sqrt(0.5 * 0.6), rel=1e-6
    )
    tokens, labels = output.T[None], torch.tensor([[0, 1, 2]])
    every = (0.5 * 0.8 * 0.6) ** (-1 / 3)
    assert float(fg.metrics.perplexity(ignore_index=None)(tokens, labels)) == pytest.approx(every, rel=1e-6)


def test_metrics_of_regression_by_hand():
    output, target = torch.tensor([[1.0], [2.0], [6.0]]), torch.tensor([[1.0], [4.0], [4.0]])
    assert float(fg.metrics.mse(output, target)) == 8 / 3
    assert float(fg.metrics.mae(output, target)) == 4 / 3
    assert float(fg.metrics.rmse(output, target)) == pytest.approx(np.sqrt(8 / 3), rel=1e-15)
    assert fg.metrics.r2(output, target) == pytest.approx(1 - 8 / 6, rel=1e-15)  # the mean 3 leaves 4 + 1 + 1
    assert fg.metrics.r2(target, target) == 1.0
    constant = torch.ones(3, 1)
    assert (fg.metrics.r2(constant, constant), fg.metrics.r2(output, constant)) == (1.0, 0.0)


@pytest.mark.parametrize("metric", [fg.metrics.mse, fg.metrics.mae, fg.metrics.rmse, fg.metrics.r2])
def test_shapes_that_torch_would_broadcast_are_refused(metric):
    with pytest.raises(InputError, match=r"output \(3, 1\), target \(3,\).*one shape for both"):
        metric(torch.zeros(3, 1), torch.zeros(3))


@pytest.mark.parametrize("metric", [fg.metrics.accuracy(), fg.metrics.top_k(2), fg.metrics.perplexity()])
def test_classes_are_needed_for_metrics_of_classes(metric):
    with pytest.raises(InputError, match=r"output \(3,\), target \(3,\).*scores \[n, C, ...\]"):
        metric(torch.zeros(3), torch.zeros(3, dtype=torch.int64))


# the history


def test_the_best_loss_is_the_smallest():
    names = {
        "test_loss": 2,
        "my_mse": 2,
        "perplexity": 2,
        "rmse": 2,
        "mae": 2,
        "word_error": 2,
        "top5": 3,
        "f1": 3,
    }
    base = {**dict.fromkeys(fg.rounds.record.ALWAYS, 0), "test_accuracy": None}
    history = fg.History(
        [{**base, "round": i + 1, **dict.fromkeys(names, value)} for i, value in enumerate([3, 2, None])]
    )
    assert {name: history.best(name) for name in names} == names
    assert history.best("test_loss", smallest=False) == history.best("f1") == 3
    assert history.best("f1", smallest=True) == 2
    assert history.best() is None
    with pytest.raises(KeyError):
        history.best("unknown")


def test_an_accuracy_in_percent_is_refused_with_the_fraction():
    with pytest.raises(InputError, match=r"accuracy = 90: expected a fraction in \(0, 1\]: 0.9, not 90"):
        fg.History().rounds_to(90)
    with pytest.raises(InputError, match=r"stop.accuracy = 67.5: .* 0.675, not 67.5"):
        fg.Stop(accuracy=67.5)
    for wrong in (-1, 0, 1000, float("nan"), "0.5"):
        with pytest.raises(InputError, match="a fraction"):
            fg.History().rounds_to(wrong)


# validation


def test_held_out_samples_are_measured_in_the_rounds_of_an_evaluation():
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(12, 3)), rng.integers(0, 2, 12)
    fed = fg.Federation.from_arrays([(X[:6], y[:6]), (X[6:], y[6:])])
    fed.validation = StoredShares([np.array([1, 3]), np.array([7])])
    model = nn.Linear(3, 2, dtype=torch.float64)
    result = fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=3, eval_every=2, engine="serial")
    assert result.history.column("val_loss")[0] is None
    held = [1, 3, 7]
    output = result.model()(torch.from_numpy(X[held])).detach()
    last = result.history[-1]
    assert last["val_loss"] == pytest.approx(float(cross_entropy(output, torch.from_numpy(y[held]))), rel=1e-12)
    assert last["val_accuracy"] == float((output.argmax(1).numpy() == y[held]).mean())
    assert last["test_loss"] is None
