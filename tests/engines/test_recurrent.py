"""Recurrent layers as lanes: every variant gives the numbers of one client after another."""

import itertools
import warnings

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.core.local import Plan
from fedagrac.engines import LanesEngine, SerialEngine, Workload
from fedagrac.models import VectorModel

LAYERS = {
    "lstm": nn.LSTM,
    "gru": nn.GRU,
    "rnn": nn.RNN,
    "relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
}
RAGGED = [1, 4, 2]


class Net(nn.Module):
    """Uses all outputs and the last states; may start from states that it learns."""

    def __init__(self, layer, learned=False):
        super().__init__()
        self.layer = layer
        ways, projected = 2 if layer.bidirectional else 1, getattr(layer, "proj_size", 0) or layer.hidden_size
        shape = (layer.num_layers * ways, 1)
        self.h = nn.Parameter(torch.randn(*shape, projected) / 2) if learned else None
        self.c = nn.Parameter(torch.randn(*shape, layer.hidden_size) / 2) if learned else None  # of an LSTM
        self.out = nn.Linear((ways + 2) * projected, 3)

    def forward(self, x):
        x = x if self.layer.batch_first else x.transpose(0, 1)
        n = x.shape[0 if self.layer.batch_first else 1]
        states = None
        if self.h is not None:
            h, c = (state.expand(-1, n, -1) for state in (self.h, self.c))
            states = (h, c) if isinstance(self.layer, nn.LSTM) else h
        y, last = self.layer(x, states)
        last, *more = last if isinstance(last, tuple) else (last,)
        mean = y.mean(1 if self.layer.batch_first else 0)
        level = 0 if not more else more[0].square().sum((0, 2)).unsqueeze(1)
        return self.out(torch.cat([mean, last[0], last[-1]], -1)) * (1 + level)


def workload(net, dtype=torch.float64, clients=3):
    rng = np.random.default_rng(0)
    fed = fg.Federation.from_arrays([(rng.normal(size=(7, 5, 4)), rng.integers(0, 3, 7)) for _ in range(clients)])
    return Workload.of(VectorModel(net, "cpu", dtype), fed, None, 3, "replacement", 0.0, 0)


def run(engine, net, dtype=torch.float64):
    """Return how far the clients move in unequal numbers of steps, without any warning."""
    work = workload(net, dtype)
    x, clients = work.model.initial(), np.arange(len(RAGGED))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return engine(work).run(Plan.of(steps=np.array(RAGGED), lr=0.3), x, clients, 0).models - x


def apart(net, dtype=torch.float64):
    lanes, serial = run(LanesEngine, net, dtype), run(SerialEngine, net, dtype)
    assert float(serial.abs().max()) > 1e-3
    return float((lanes - serial).abs().max() / serial.abs().max())


@pytest.mark.parametrize("learned", [False, True])
@pytest.mark.parametrize("kind", LAYERS)
def test_every_variant_of_a_layer_moves_as_in_serial(kind, learned):
    for layers, bias, batch_first, both_ways in itertools.product((1, 2), *[(True, False)] * 3):
        torch.manual_seed(0)
        layer = LAYERS[kind](4, 6, layers, bias=bias, batch_first=batch_first, bidirectional=both_ways)
        assert apart(Net(layer, learned)) < 1e-10, (layers, bias, batch_first, both_ways)


@pytest.mark.parametrize("both_ways", [False, True])
@pytest.mark.parametrize("bias", [True, False])
def test_an_lstm_with_projections(both_ways, bias):
    torch.manual_seed(0)
    assert apart(Net(nn.LSTM(4, 6, 2, bias=bias, bidirectional=both_ways, proj_size=2), learned=True)) < 1e-10


@pytest.mark.parametrize("kind", LAYERS)
def test_dropout_lies_between_the_layers_and_nowhere_else(kind):
    """With p = 1 it is not random: the second layer sees zeros."""
    torch.manual_seed(0)
    assert apart(Net(LAYERS[kind](4, 6, 2, dropout=1.0))) < 1e-10


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_dropout_is_seeded(dtype):
    torch.manual_seed(0)
    net = Net(nn.LSTM(4, 6, 2, dropout=0.5))
    once = run(LanesEngine, net, dtype)
    torch.manual_seed(2)
    assert torch.equal(once, run(LanesEngine, net, dtype))
    net.layer.dropout = 0.0
    without = run(LanesEngine, net, dtype)
    assert not any(torch.allclose(a, b) for a, b in zip(once, without, strict=True))


@pytest.mark.parametrize("kind", LAYERS)
def test_full_gradients_of_a_layer_with_dropout_do_not_depend_on_the_engine(kind):
    torch.manual_seed(0)
    net = Net(LAYERS[kind](4, 6, 2, dropout=0.5))
    work = workload(net)
    x = work.model.initial()
    lanes, serial = (engine(work).gradients(x, np.arange(3), 0) for engine in (LanesEngine, SerialEngine))
    assert torch.equal(lanes, serial)


def test_a_frozen_layer_gets_no_gradient_and_passes_one_on():
    torch.manual_seed(0)
    net = Net(nn.GRU(4, 6), learned=True)
    net.layer.requires_grad_(False)
    assert apart(net) < 1e-10


@pytest.mark.parametrize("kind", LAYERS)
def test_float32_agrees_to_its_rounding(kind):
    torch.manual_seed(0)
    assert apart(Net(LAYERS[kind](4, 6, 2)), torch.float32) < 1e-5


def test_lanes_beyond_the_cache_give_the_same_numbers(monkeypatch):
    from fedagrac.engines.lanes import recurrent

    torch.manual_seed(0)
    net = Net(nn.GRU(4, 6))
    together = run(LanesEngine, net)
    monkeypatch.setattr(recurrent, "CACHE", 2 * 18 * 6 * 8)  # the weights of two lanes
    assert float((run(LanesEngine, net) - together).abs().max()) < 1e-14


@pytest.mark.parametrize("cell", [nn.LSTMCell, nn.GRUCell, nn.RNNCell])
@pytest.mark.parametrize("bias", [True, False])
def test_cells_in_a_loop_of_the_module(cell, bias):
    class Loop(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.out = cell(4, 6, bias=bias), nn.Linear(6, 3)

        def forward(self, x):
            state = None
            for now in x.unbind(1):
                state = self.cell(now, state)
            return self.out(state[0] if isinstance(state, tuple) else state)

    torch.manual_seed(0)
    assert apart(Loop()) < 1e-10


def test_the_layer_that_cannot_be_batched_is_named_even_behind_a_recurrent_one():
    class Looks(nn.Module):
        def forward(self, x):
            return x * 2 if float(x.detach().sum()) > 0 else x * 3

    torch.manual_seed(0)
    net = Net(nn.LSTM(4, 6))
    net.out = nn.Sequential(net.out, Looks())
    with pytest.warns(UserWarning, match=r"lanes cannot batch layer out\.1 \(Looks\).*\.item\(\)"):
        LanesEngine(workload(net))


@pytest.mark.parametrize("kind", LAYERS)
def test_lanes_do_not_look_for_their_weights_in_memory(kind, monkeypatch):
    """On a GPU a layer joins new weights for cuDNN, which fails for those of many lanes."""

    def failing(layer):
        if any(map(torch._C._functorch.is_batchedtensor, layer._flat_weights)):
            raise RuntimeError("cannot access the data pointer")

    monkeypatch.setattr(nn.RNNBase, "flatten_parameters", failing)
    net = Net(LAYERS[kind](4, 6, batch_first=True))
    assert apart(net) < 1e-12
    assert "flatten_parameters" not in net.layer.__dict__
