"""Which buffers move, which modules are refused, and the modes of layers."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import fedagrac as fg
from fedagrac.errors import FedagracError, InputError
from fedagrac.models.vector import VectorModel
from moving_buffers import CLASSES, ENGINES, FEATURES, LR, clients, far, federation, module, train

PAIR = clients([12])[0]


def run(net, engine="serial", pairs=None, steps=3, rounds=2, **options):
    options = {"batch_size": None, "device": "cpu", **ENGINES[engine], **options}
    algorithm = fg.FedAvg(lr=LR)
    return fg.simulate(net, federation(pairs or [PAIR]), algorithm, rounds, steps=fg.Constant(steps), **options)


def modes(net):
    return [layer.training for layer in net.modules()]


class Linear(nn.Linear):
    """A linear model in float64 with a buffer; subclasses change something in the forward pass."""

    def __init__(self, buffer=None):
        super().__init__(FEATURES, CLASSES, dtype=torch.float64)
        self.register_buffer("kept", buffer)
        self.calls = 0


class Late(Linear):
    """Changes its buffer only after many forward passes."""

    def __init__(self, how):
        super().__init__(torch.zeros(2))
        self.how = how

    def forward(self, x):
        self.calls += 1
        if self.calls > 40:
            if self.how == "replaced":
                self.kept = self.kept + x.detach().mean()
            else:
                self.kept += 1
        return super().forward(x)


@pytest.mark.parametrize("how", ["replaced", "in place"])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_buffer_that_changes_only_after_many_steps_is_refused_by_name(engine, how):
    with pytest.raises(
        FedagracError, match="model buffer kept changed during training, but not in the trial step"
    ):
        run(Late(how), engine, clients(), steps=30)


class Cache(Linear):
    """Has no tensor in its buffer before the first forward pass."""

    def forward(self, x):
        self.kept = x.detach()
        return super().forward(x)


class Growing(Linear):
    def forward(self, x):
        self.kept = torch.cat([self.kept, x.detach().mean(0)])
        return super().forward(x)


class Cleared(Linear):
    def forward(self, x):
        self.kept = None
        return super().forward(x)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (Cache, "model buffer kept = None: expected a tensor before the first forward pass"),
        (lambda: Growing(torch.zeros(2)), r"model buffer kept = .*expected real numbers of shape \(2,\)"),
        (lambda: Cleared(torch.zeros(2)), r"model buffer kept = None: expected real numbers of shape \(2,\)"),
    ],
    ids=["none at first", "growing", "cleared"],
)
def test_buffers_without_a_fixed_shape_are_refused_by_name(make, message):
    with pytest.raises(InputError, match=message):
        run(make())


class Momentum(Linear):
    """Keeps a moving average of its weights in a frozen parameter."""

    def __init__(self, share, after=0, start=1.0):
        super().__init__()
        self.slow = nn.Parameter(start * self.weight.detach(), requires_grad=False)
        self.share, self.after = share, after

    def forward(self, x):
        self.calls += 1
        if self.calls > self.after:
            self.slow.data = (1 - self.share) * self.slow + self.share * self.weight.detach()
        return super().forward(x) + functional.linear(x, self.slow)


def test_a_forward_pass_that_writes_parameters_is_refused_by_name():
    """It would pass from client to client what no algorithm averages."""
    message = "model parameter slow = 'changed by the forward pass': .*register_buffer"
    with pytest.raises(InputError, match=message):
        run(Momentum(share=0.5, start=0.0))
    embedding = nn.Sequential(nn.Embedding(4, 3, max_norm=0.1), nn.Flatten())
    ids = torch.zeros(6, 1, dtype=torch.int64), torch.zeros(6, dtype=torch.int64)
    with pytest.raises(InputError, match=r"model parameter 0\.weight = 'changed by the forward pass'"):
        fg.simulate(embedding, fg.Federation.from_arrays([ids]), fg.FedAvg(lr=LR), 1, device="cpu")
    with pytest.raises(FedagracError, match="model parameter slow changed during training"):
        run(Momentum(share=0.5, after=10), steps=20)


class Constants(nn.Module):
    """A mask with infinities, a buffer that nobody filled, and tables of integers: nothing moves."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mask", torch.full((3, 3), -torch.inf).triu(1))
        self.register_buffer("unused", torch.tensor([torch.nan, 1.0]))
        self.register_buffer("positions", torch.arange(4), persistent=False)
        self.register_buffer("flag", torch.tensor(True))

    def forward(self, x):
        return self.out(x)


@pytest.mark.parametrize("engine", ENGINES)
def test_constant_buffers_cost_nothing(engine):
    net = Constants().double()
    result = run(net, engine)
    assert result.buffers == {}
    assert result.history.column("bytes_up") == [8 * CLASSES * (FEATURES + 1)] * 2
    assert result.model().mask.tolist() == net.mask.tolist()
    assert torch.equal(result.model().positions, torch.arange(4))


class Shared(nn.Module):
    """Two layers count with one buffer; a flag says whether data were seen."""

    def __init__(self):
        super().__init__()
        self.one, self.two = (nn.BatchNorm1d(FEATURES, dtype=torch.float64) for _ in range(2))
        self.two.running_mean = self.one.running_mean
        self.out = nn.Linear(FEATURES, CLASSES, dtype=torch.float64)
        self.register_buffer("seen", torch.tensor(False))

    def forward(self, x):
        self.seen = torch.ones_like(self.seen)
        return self.out(self.two(self.one(x)))


@pytest.mark.parametrize("engine", ENGINES)
def test_shared_buffers_and_flags_are_those_of_ordinary_training(engine):
    torch.manual_seed(0)
    net = Shared()
    plain = copy.deepcopy(net)
    train(plain, *PAIR, steps=6)
    result = run(net, engine)
    ours = result.model()
    assert far(ours.state_dict(), plain.state_dict()) < 1e-12
    assert ours.two.running_mean is ours.one.running_mean
    assert ours.seen.item() is True
    assert result.buffers["one.num_batches_tracked"].dtype == torch.int64


@pytest.mark.parametrize("engine", ENGINES)
def test_layers_left_in_eval_stay_in_it(engine):
    """Dropout is off, and BatchNorm uses the statistics it was given, in a module that otherwise trains."""

    def make():
        torch.manual_seed(3)
        net = nn.Sequential(
            nn.Linear(FEATURES, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.BatchNorm1d(8), nn.Linear(8, CLASSES)
        ).double()
        net[1].running_mean += 0.3
        net[1].running_var *= 2
        for layer in (net[1], net[2]):
            layer.eval()
        return net

    net, plain = make(), make()
    expected = modes(net)
    optimizer = torch.optim.SGD(plain.parameters(), lr=LR)
    for _ in range(6):
        optimizer.zero_grad()
        functional.cross_entropy(plain(PAIR[0]), PAIR[1]).backward()
        optimizer.step()
    result = run(net, engine)
    assert far(result.model().state_dict(), plain.state_dict()) < 1e-12
    assert result.model()[1].running_mean.tolist() == net[1].running_mean.tolist()
    assert int(result.model()[3].num_batches_tracked) == 6
    assert sorted(result.buffers) == ["3.num_batches_tracked", "3.running_mean", "3.running_var"]
    assert modes(net) == modes(result.model()) == expected


@pytest.mark.parametrize("engine", ENGINES)
def test_a_module_wholly_in_eval_is_trained_in_train_mode(engine):
    """Loaders return modules in eval(), which says nothing of single layers."""
    expected = run(module("norm"), engine)
    net = module("norm").eval()
    result = run(net, engine)
    assert far(result.model().state_dict(), expected.model().state_dict()) == 0
    assert modes(net) == modes(result.model()) == [False] * 5


class KeepsStatistics(nn.Module):
    """Its own train() leaves BatchNorm in eval(), as detection networks do."""

    def __init__(self):
        super().__init__()
        self.net = module("norm")
        self.net[1].running_mean += 0.5

    def train(self, mode=True):
        super().train(mode)
        self.net[1].eval()
        return self

    def forward(self, x):
        return self.net(x)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("before", ["new", "train", "eval"])
def test_a_train_method_of_the_modules_own_is_honoured(before, engine):
    net = KeepsStatistics()
    if before != "new":
        getattr(net, before)()
    plain = KeepsStatistics()
    train(plain, *PAIR, steps=6)
    result = run(net, engine)
    assert far(result.model().state_dict(), plain.state_dict()) < 1e-12
    assert result.buffers == {}


def test_evaluation_runs_in_eval_mode_and_training_goes_on_in_train_mode():
    """Evaluating in every round or at the end only gives the same model."""
    often, once = (run(module("norm"), rounds=4, eval_every=every) for every in (1, 4))
    assert far(often.model().state_dict(), once.model().state_dict()) == 0
    expected = functional.cross_entropy(often.model().eval()(PAIR[0]), PAIR[1]).item()
    assert often.history[-1]["test_loss"] == pytest.approx(expected, abs=1e-12)


def test_an_exported_module_has_buffers_of_its_own():
    model = VectorModel(module("norm"))
    model.buffers.find(lambda: model.module(PAIR[0]))
    x, q = model.initial(), model.buffers.given(torch.float64)
    assert model.buffers.size == len(q) == 9
    exported = model.export(x, q + 1)
    again = model.export(x)
    assert exported[1].running_mean.tolist() == [1.0] * 4
    assert int(exported[1].num_batches_tracked) == 1
    assert again[1].running_mean.tolist() == [0.0] * 4


def test_averaged_counters_are_rounded():
    model = VectorModel(module("norm"))
    model.buffers.adopt(["1.num_batches_tracked"])
    counters = model.buffers.rows(torch.tensor([[2.4], [2.6]], dtype=torch.float64))["1.num_batches_tracked"]
    assert (counters.tolist(), counters.dtype) == ([2, 3], torch.int64)
    with pytest.raises(InputError, match=r"moving buffers = .*expected buffers of the module: 1\.running_mean"):
        model.buffers.adopt(["1.variance"])


def test_batch_norm_with_one_sample_in_a_step_is_refused_before_any_work():
    """torch cannot normalise one number; the client is named, not met in round 5."""
    pairs = [*clients(), (PAIR[0][:1], PAIR[1][:1])]
    for options in ({"batch_size": 1}, {"batch_size": None}, {"batch_size": 4, "sampling": "shuffle"}):
        with pytest.raises(InputError, match=r"inputs of shape \(1, 5\).*more than 1 value per channel"):
            run(module("norm"), pairs=pairs, **options)


def test_iid_clients_with_batch_norm_learn_as_well_as_with_group_norm():
    accuracy = {}
    fed = fg.Federation.load("digits", clients=10, partition=fg.IID())
    for norm in (nn.BatchNorm1d(32), nn.GroupNorm(4, 32)):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Flatten(), nn.Linear(64, 32), norm, nn.ReLU(), nn.Linear(32, 10))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            result = fg.simulate(
                net, fed, fg.FedAvg(lr=0.1), 15, steps=fg.Constant(10), eval_every=15, device="cpu"
            )
        accuracy[type(norm).__name__] = result.history[-1]["test_accuracy"]
    assert np.abs(accuracy["BatchNorm1d"] - accuracy["GroupNorm"]) < 0.05, accuracy
    assert min(accuracy.values()) > 0.85, accuracy
