"""Positions of sequences that a module does not use are not computed, and no number changes."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

import fedagrac as fg
from fedagrac.core.local import Plan
from fedagrac.engines import LanesEngine, SerialEngine, Workload
from fedagrac.engines.lanes.positions import ChangedCallsError, used_positions
from fedagrac.models import VectorModel

WIDTH, LENGTH = 8, 5


class Encoder(nn.Module):
    """A transformer of torch's own layers that reads some positions of its last layer."""

    def __init__(self, read, norm_first=False):
        super().__init__()
        self.embed, self.read = nn.Embedding(10, WIDTH), read
        layer = nn.TransformerEncoderLayer(WIDTH, 2, 16, 0.0, batch_first=True, norm_first=norm_first)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids):
        return self.head(self.read(self.layers(self.embed(ids))))


MODULES = {
    "gpt": lambda: fg.models.build("char-gpt", vocabulary=10, context=LENGTH, width=WIDTH, layers=2, heads=2),
    "first position": lambda: Encoder(lambda x: x[:, 0]),
    "norm first": lambda: Encoder(lambda x: x[:, -2, :], norm_first=True),
    "two positions": lambda: Encoder(lambda x: x[:, 0] + x[:, 1]),
    "all positions": lambda: Encoder(lambda x: x.mean(1)),
}


def workload(module):
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 10, (60, LENGTH)), rng.integers(0, 3, 60)
    fed = fg.Federation.from_pool(X, y, 4, fg.IID())
    torch.manual_seed(1)
    return Workload.of(VectorModel(module().double()), fed, None, 6, "replacement", 0.0, 0)


@pytest.mark.parametrize("fixed", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_lanes_give_the_numbers_of_serial(name, fixed):
    w = workload(MODULES[name])
    x = w.model.initial().clone()
    correction = 0.01 * torch.randn(4, len(x), dtype=x.dtype, generator=torch.Generator().manual_seed(2))
    plan = Plan.of(steps=[1, 7, 3, 7], lr=0.1, correction=correction, first_steps=2, mean=True)
    serial = SerialEngine(w).run(plan, x, np.arange(4), 0)
    engine = LanesEngine(w, fixed=fixed)
    lanes = engine.run(plan, x, np.arange(4), 0)
    for ours, theirs in ((lanes.models, serial.models), (lanes.first, serial.first), (lanes.loss, serial.loss)):
        assert float((ours - theirs).norm() / theirs.norm()) < 1e-12
    cut = engine.model.layers.positions is not None
    assert cut == (name in ("gpt", "first position", "norm first"))


def test_what_is_left_out_is_most_of_the_last_layer():
    """Of 12 parts of a layer's products, the attention's inputs are 3; the rest needs 1 of 5 positions."""
    w = workload(MODULES["gpt"])
    engine = LanesEngine(w)
    X, samples = w.model.initial().repeat(3, 1), torch.arange(18).reshape(3, 6)

    class Counter(TorchDispatchMode):
        flops = 0

        def __torch_dispatch__(self, function, types, args=(), options=None):
            result = function(*args, **(options or {}))
            if function._overloadpacket in flop_registry:
                self.flops += flop_registry[function._overloadpacket](*args, out_val=result)
            return result

    def flops():
        with Counter() as counter:
            engine.model.gradient(X, samples, None)
        return counter.flops

    cut = flops()
    engine.model.layers.positions = None
    left_out = 9 * WIDTH**2 * (LENGTH - 1)  # multiplications of one sample, forward
    assert flops() - cut == 2 * 3 * 18 * left_out


def linear(seed):
    torch.manual_seed(seed)
    return nn.Linear(WIDTH, WIDTH)


A, B = linear(0), linear(1)
X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize(
    ("forward", "cuts"),
    [
        (lambda: functional.gelu(A(X))[:, 2], {0: ((0,), 2)}),
        (lambda: (X + A(X))[:, -1], {0: ((0,), 4), 1: ((0,), 4)}),
        (lambda: B(functional.layer_norm(A(X), (WIDTH,)))[:, 0], {0: ((0,), 0)}),
        (lambda: (A(X) + A.bias)[:, 1], {0: ((0,), 1)}),
        (lambda: (A(X) * 3.0)[:, 1], {0: ((0,), 1)}),
    ],
)
def test_calls_are_cut_where_the_unused_positions_begin(forward, cuts):
    assert used_positions(forward).cuts == cuts


def looks_at_the_shape(y):
    return y[:, 0] * y.shape[1]


def reads_two_positions(y):
    return y[:, 0] + y[:, 1]


def changes_in_place(y):
    y.mul_(2.0)
    return y[:, 0]


def returns_everything(y):
    return y, y[:, 0]


@pytest.mark.parametrize(
    "forward",
    [
        lambda: A(X),  # the output has all positions
        lambda: A(X)[:, 1:3],
        lambda: A(X)[0],
        lambda: A(X)[:, torch.tensor(1)],
        lambda: (A(X).cumsum(1))[:, -1],  # mixes positions
        lambda: functional.softmax(A(X), 1)[:, -1],
        lambda: functional.layer_norm(A(X), (LENGTH, WIDTH))[:, -1],
        lambda: looks_at_the_shape(A(X)),
        lambda: reads_two_positions(A(X)),
        lambda: changes_in_place(A(X)),
        lambda: returns_everything(A(X)),
        lambda: functional.relu(A(X), inplace=True)[:, 0],
        lambda: (A(X) + torch.ones(LENGTH, 1))[:, 0],  # positions in another dimension
        lambda: torch.relu(X)[:, 0],  # nothing to save
    ],
)
def test_all_positions_are_computed_on_any_doubt(forward):
    found = used_positions(forward)
    assert found is None or not found.cuts


def test_dropout_that_returns_its_argument_is_passed_through():
    found = used_positions(lambda: B(functional.dropout(A(X), 0.0))[:, 0])
    assert found.cuts == {0: ((0,), 0)}


def test_other_calls_or_another_position_are_noticed():
    found = used_positions(lambda: A(X)[:, 1])
    assert found.arguments(0, functional.linear, (X, A.weight))[0].shape == (2, 1, WIDTH)
    with pytest.raises(ChangedCallsError):
        found.arguments(0, functional.gelu, (X,))
    with pytest.raises(ChangedCallsError):
        found.arguments(1, torch.Tensor.__getitem__, (X, (slice(None), 2)))
    with pytest.raises(ChangedCallsError):
        found.arguments(2, functional.gelu, (X,))


def test_a_module_that_changes_its_mind_is_computed_in_full():
    class Changing(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layer, self.head, self.last = (
                nn.Embedding(10, WIDTH),
                linear(2),
                nn.Linear(WIDTH, 3),
                0,
            )

        def forward(self, ids):
            return self.head(self.layer(self.embed(ids))[:, self.last])

    w = workload(Changing)
    x, plan = w.model.initial().clone(), Plan.of(steps=np.full(4, 3), lr=0.1)
    engine = LanesEngine(w)
    assert engine.model.layers.positions is not None
    w.model.module.last = 3
    serial, lanes = (one.run(plan, x, np.arange(4), 0) for one in (SerialEngine(w), engine))
    assert torch.allclose(lanes.models, serial.models, rtol=1e-12, atol=1e-14)
    assert engine.model.layers.positions is None


class Remembering(Encoder):
    """Keeps what it computed last, at which a loss may look."""

    def forward(self, ids):
        self.seen = self.layers(self.embed(ids))
        return self.head(self.read(self.seen))


def test_a_loss_that_looks_at_other_positions_gets_them():
    module = Remembering(lambda x: x[:, 0]).double()
    rng = np.random.default_rng(0)
    fed = fg.Federation.from_pool(rng.integers(0, 10, (60, LENGTH)), rng.integers(0, 3, 60), 4, fg.IID())
    model = VectorModel(module)

    def loss(output, target):
        return functional.cross_entropy(output, target) + model.module.seen.square().mean()

    w = Workload.of(model, fed, loss, 6, "replacement", 0.0, 0)
    engine = LanesEngine(w)
    assert engine.model.layers.positions is None
    plan, x = Plan.of(steps=[2, 3, 1, 2], lr=0.1), model.initial().clone()
    lanes, serial = (each.run(plan, x, np.arange(4), 0).models for each in (engine, SerialEngine(w)))
    torch.testing.assert_close(lanes, serial, rtol=1e-10, atol=1e-12)


def test_a_module_with_dropout_computes_all_positions():
    class Dropping(Encoder):
        def forward(self, ids):
            return functional.dropout(super().forward(ids), 0.5, self.training)

    engine = LanesEngine(workload(lambda: Dropping(lambda x: x[:, 0])))
    assert engine.model.layers.positions is None
    assert LanesEngine(workload(MODULES["first position"])).model.layers.positions is not None
