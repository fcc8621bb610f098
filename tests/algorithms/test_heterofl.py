"""HeteroFL: sub-networks are narrower modules, and a coordinate is averaged over the clients that hold it."""

import copy
import math

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
import numpy_rivals as reference
from fedagrac.models.flow import _recorded, follow
from quadratics import SIZES, D, K, cohorts, quadratics

ETA, ROUNDS, LEVELS = 0.01, 5, (1.0, 0.5, 0.3)
HIDDEN = 5


def two_layers():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(D, HIDDEN, bias=False), nn.Linear(HIDDEN, 1, bias=False)).double()


def path_of(algorithm, **options):
    kept = []

    class Keep(fg.Callback):
        def on_round(self, run, record):
            kept.append(run.state["x"].numpy())

    quadratics().simulate(algorithm, rounds=ROUNDS, module=two_layers(), callbacks=[Keep()], **options)
    return np.array(kept)


@pytest.mark.parametrize("scaler", [True, False])
@pytest.mark.parametrize("participation", [None, 2])
@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_every_round_is_that_of_small_matrices(scaler, participation, engine):
    """With 2 of 6 clients, some rounds have no client of full width, and coordinates stay as they are."""
    algorithm = fg.HeteroFL(lr=fg.schedule.Exponential(ETA, 0.8), levels=LEVELS, scaler=scaler)
    ours = path_of(algorithm, participation=participation, engine=engine)
    etas, present = [ETA * 0.8**t for t in range(ROUNDS)], cohorts(participation, ROUNDS)
    q, weights = quadratics(), [layer.weight.detach().numpy() for layer in two_layers()]
    data = list(zip(q.A, q.b, strict=True))
    theirs = np.array(reference.heterofl(data, SIZES, K, weights, etas, present, LEVELS, scaler))
    assert np.abs(ours - theirs).max() <= 1e-10 * np.abs(theirs).max()


def test_with_full_width_alone_heterofl_is_fedavg_exactly():
    assert np.array_equal(path_of(fg.HeteroFL(lr=ETA, levels=(1.0,))), path_of(fg.FedAvg(lr=ETA)))


class Net(nn.Module):
    """A convolutional net of a given width. In training, hidden layers divide their output by `rate`."""

    def __init__(self, width=1.0, rate=1.0):
        super().__init__()
        c1, c2, h = (math.ceil(width * n) for n in (4, 8, 6))
        self.conv1, self.conv2 = nn.Conv2d(1, c1, 3), nn.Conv2d(c1, c2, 3)
        self.norm = nn.GroupNorm(c2 // 2, c2)
        self.fc1, self.fc2 = nn.Linear(4 * c2, h), nn.Linear(h, 3)
        self.rate = rate

    def forward(self, x):
        x = torch.relu(self.conv1(x) / self.rate)
        x = torch.relu(self.norm(self.conv2(x) / self.rate))
        x = torch.relu(self.fc1(nn.functional.avg_pool2d(x, 2).flatten(1)) / self.rate)
        return self.fc2(x)


def net():
    torch.manual_seed(5)
    return Net().double()


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_a_client_of_half_width_trains_the_narrow_module_with_scaler_and_masked_loss(engine):
    """One client of width 1/2 with the classes 0 and 2 of 3, against a plain loop over the narrow module."""
    rng = np.random.default_rng(2)
    X, y = rng.normal(size=(12, 1, 8, 8)), rng.choice([0, 2], 12)
    test = rng.normal(size=(6, 1, 8, 8)), np.array([0, 1, 2, 0, 1, 2])
    fed = fg.Federation.from_arrays([(X, y)], test=test)
    result = fg.simulate(
        net(), fed, fg.HeteroFL(lr=0.2, levels=(0.5,)), rounds=1, steps=fg.Constant(4), batch_size=None,
        engine=engine, device="cpu",
    )  # fmt: skip
    narrow = Net(0.5, rate=0.5).double()
    whole = net().state_dict()
    places = {name: tuple(slice(0, n) for n in value.shape) for name, value in narrow.state_dict().items()}
    narrow.load_state_dict({name: whole[name][place] for name, place in places.items()})
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.2)
    absent = torch.tensor([False, True, False])
    for _ in range(4):
        optimizer.zero_grad()
        scores = narrow(torch.from_numpy(X)).masked_fill(absent, 0.0)
        nn.functional.cross_entropy(scores, torch.from_numpy(y)).backward()
        optimizer.step()
    expected = dict(whole)
    for name, value in narrow.state_dict().items():
        expected[name] = whole[name].clone()
        expected[name][places[name]] = value
    expected["fc2.weight"][1], expected["fc2.bias"][1] = whole["fc2.weight"][1], whole["fc2.bias"][1]
    for name, value in expected.items():
        assert torch.allclose(result.params[name], value, rtol=1e-10, atol=1e-13), name


def digits(n=30):
    rng = np.random.default_rng(0)
    return rng.normal(size=(n, 1, 8, 8)), rng.integers(0, 3, n)


@pytest.mark.parametrize(
    ("module", "options", "message"),
    [
        (
            nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.LayerNorm(8), nn.Linear(8, 3)),
            {},
            "LayerNorm.*sub-net",
        ),
        (nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 3)), {}, "BatchNorm2d"),
        (
            nn.Sequential(nn.Conv2d(1, 6, 3), nn.GroupNorm(2, 6), nn.Flatten(), nn.Linear(216, 3)),
            {},
            "groups of 3",
        ),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), {"aggregate": fg.Median()}, "aggregate"),
    ],
    ids=["layer norm", "batch norm", "group norm", "median"],
)
def test_what_has_no_known_sub_network_is_refused(module, options, message):
    fed = fg.Federation.from_arrays([digits()] * 3)
    with pytest.raises(fg.InputError, match=message):
        fg.simulate(module, fed, fg.HeteroFL(lr=0.1, levels=(1.0, 0.5, 0.25)), **options)


class TwoLayers(nn.Module):
    """A hidden layer and an output layer, registered in either order."""

    def __init__(self, head_first, norm=None):
        super().__init__()
        torch.manual_seed(4)
        body, head = nn.Linear(64, 8), nn.Linear(8, 3)
        for name, layer in (("head", head), ("body", body)) if head_first else (("body", body), ("head", head)):
            self.add_module(name, layer)
        self.norm = norm

    def forward(self, x):
        x = torch.relu(self.body(x.flatten(1)))
        return self.head(x if self.norm is None else self.norm(x))


def test_the_output_layer_is_the_one_that_makes_the_output_wherever_it_is_registered():
    fed = fg.Federation.from_arrays([(digits()[0][y < 2], y[y < 2]) for y in [digits()[1]] * 3])
    options = {"rounds": 2, "steps": fg.Constant(3), "batch_size": None, "device": "cpu"}
    last, first = (
        fg.simulate(TwoLayers(order).double(), fed, fg.HeteroFL(lr=0.1, levels=(1.0, 0.5)), **options).params
        for order in (False, True)
    )
    assert list(last) != list(first)
    assert all(torch.equal(last[name], first[name]) for name in last)
    held = fg.HeteroFL(lr=0.1).held(fg.models.VectorModel(TwoLayers(head_first=True)).layout, 0.5)
    head, bias, body, rest = held.split([3 * 8, 3, 8 * 64, 8])
    assert head.view(3, 8).tolist() == [[True] * 4 + [False] * 4] * 3
    assert bias.all()
    assert torch.equal(body.view(8, 64).all(1), torch.arange(8) < 4)
    assert torch.equal(rest, torch.arange(8) < 4)


class Tied(nn.Module):
    """The output layer has the weights of the embedding, as a layer's own or in a function."""

    def __init__(self, function):
        super().__init__()
        self.embedding, self.middle = nn.Embedding(6, 8), nn.Linear(8, 8)
        self.head = None if function else nn.Linear(8, 6, bias=False)
        if self.head is not None:
            self.head.weight = self.embedding.weight

    def forward(self, x):
        x = torch.tanh(self.middle(self.embedding((x.flatten(1)[:, 0] > 0).long())))
        return nn.functional.linear(x, self.embedding.weight) if self.head is None else self.head(x)


class Through(nn.Module):
    """A hidden layer, a function of its channels and of the input, and the output layer."""

    def __init__(self, function, channels=8):
        super().__init__()
        self.body, self.head, self.function = nn.Linear(64, 8), nn.Linear(channels, 3), function

    def forward(self, x):
        x = x.flatten(1)
        return self.head(self.function(self.body(x), x))


class Using(nn.Module):
    """Two layers, and a function of the input and of the weights of the first."""

    def __init__(self, function):
        super().__init__()
        self.body, self.head, self.function = nn.Linear(64, 8), nn.Linear(8, 3), function

    def forward(self, x):
        return self.head(self.body(self.function(x.flatten(1), self.body.weight)))


def after(layer, channels=8):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, channels), layer, nn.ReLU(), nn.Linear(channels, 3))


def after_convolution(layer):
    return nn.Sequential(nn.Conv2d(1, 4, 3), layer, nn.Flatten(), nn.Linear(144, 3))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (Tied(function=False), r"model parameter head.weight = 'shared with another layer'"),
        (Tied(function=True), r"model parameter embedding.weight = 'used outside its layer'"),
        (after(nn.LayerNorm(8, elementwise_affine=False)), r"model layer 2 = 'LayerNorm'"),
        (after_convolution(nn.GroupNorm(1, 4, affine=False)), r"model layer 1 = 'GroupNorm'"),
        (after_convolution(nn.BatchNorm2d(4, affine=False)), r"model layer 1 = 'BatchNorm2d'"),
        (
            after_convolution(nn.InstanceNorm2d(4, affine=True, track_running_stats=True)),
            r"model layer 1 = 'InstanceNorm2d with moving statistics'",
        ),
        (after(nn.Softmax(1)), r"model layer 2 = 'Softmax'"),
        (Through(lambda h, x: nn.functional.layer_norm(h, (8,))), r"model = 'layer_norm'"),
        (Through(lambda h, x: torch.cat([h, h], 1), 16), r"model = 'cat'"),
        (Through(lambda h, x: h + x[:, :8]), r"model layer head = 'Linear of <input>, body'"),
    ],
)  # fmt: skip
def test_a_module_whose_sub_networks_would_be_others_is_refused_by_name(module, message):
    fed = fg.Federation.from_arrays([digits()] * 3)
    with pytest.raises(fg.InputError, match=message):
        fg.simulate(module, fed, fg.HeteroFL(lr=0.1, levels=(1.0, 0.5)))


@pytest.mark.parametrize(
    "module",
    [
        after(nn.Dropout(0.1)),
        after_convolution(nn.Sequential(nn.ReLU(), nn.AvgPool2d(1))),
        nn.Sequential(nn.Flatten(), nn.LayerNorm(64, elementwise_affine=False), nn.Linear(64, 8), nn.Linear(8, 3)),
        nn.Sequential(*after(nn.Identity()), nn.LogSoftmax(1)),
        Through(lambda h, x: h.view(len(x), -1)),
        Using(lambda x, weight: x.to(weight.dtype)),
    ],
    ids=["dropout", "pooling", "a norm of the input", "a softmax of the output", "a length", "a type"],
)
def test_layers_without_parameters_that_treat_channels_alike_or_whole_are_accepted(module):
    layout = fg.models.VectorModel(module).layout
    fg.HeteroFL(lr=0.1, levels=(1.0, 0.5)).check_model(layout, None)


BRANCHES = Through(lambda h, x: torch.relu(h) if x.sum() > 0 else h.view(*h.shape))


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (BRANCHES, None),
        (nn.Sequential(BRANCHES, nn.LogSoftmax(1)), None),
        (Through(lambda h, x: nn.functional.softmax(h, 1).view(*h.shape)), r"model = 'softmax'"),
        (Through(lambda h, x: torch.cat([h, h], 1).view(-1, *[16]) if x.sum() else h, 16), r"model = 'cat'"),
        (Through(lambda h, x: h + x[:, :8] if x.sum() else h), r"model layer head = 'Linear of <input>, body'"),
        (Using(lambda x, w: x + (x @ w.T @ w if x.sum() else x)), r"model parameter body.weight = 'used outside"),
    ],
)
def test_a_module_that_cannot_be_traced_is_recorded_while_it_computes(module, message):
    layout = fg.models.VectorModel(module).layout
    assert layout.flow().unknown
    with pytest.raises(fg.InputError, match=r"model = 'an unknown order of layers': expected .*trace"):
        fg.HeteroFL(lr=0.1, levels=(1.0, 0.5)).check_model(layout, None)  # there are no data
    fed, narrow = fg.Federation.from_arrays([digits()] * 3), fg.HeteroFL(lr=0.1, levels=(1.0, 0.5))
    if message is None:
        fg.simulate(module, fed, narrow, rounds=1, steps=1)
    else:
        with pytest.raises(fg.InputError, match=message):
            fg.simulate(module, fed, narrow, rounds=1, steps=1)


def test_a_recorded_pass_reads_what_a_traced_one_does():
    module = fg.models.build("resnet20", classes=3)
    traced = follow(module)
    recorded = _recorded(copy.deepcopy(module), (torch.zeros(2, 3, 32, 32),), {})
    layers = [[call for call in flow.calls if call.layer is not None] for flow in (traced, recorded)]
    assert layers[0] == layers[1]
    assert (traced.output, traced.apart) == (recorded.output, recorded.apart) == ({"head"}, ())


@pytest.mark.parametrize("norm", [lambda c: None, nn.InstanceNorm1d], ids=["none", "instance norm"])
def test_a_narrow_client_trains_the_narrow_module_with_statistics_of_each_channel(norm):
    """InstanceNorm has statistics of every channel by itself, so absent channels do not count."""
    X = np.random.default_rng(3).normal(size=(9, 2, 6))
    y = np.random.default_rng(4).integers(0, 3, 9)

    def build(c):
        torch.manual_seed(2)
        layers = [nn.Conv1d(2, c, 3), norm(c), nn.ReLU(), nn.Flatten(), nn.Linear(4 * c, 3)]
        return nn.Sequential(*(layer for layer in layers if layer is not None)).double()

    wide, narrow = build(4), build(2)
    part = {name: tuple(slice(0, n) for n in value.shape) for name, value in narrow.state_dict().items()}
    narrow.load_state_dict({name: value[part[name]] for name, value in wide.state_dict().items()})
    result = fg.simulate(
        wide, fg.Federation.from_arrays([(X, y)]), fg.HeteroFL(lr=0.1, levels=(0.5,), scaler=False), rounds=1,
        steps=3, batch_size=None, device="cpu",
    )  # fmt: skip
    optimizer = torch.optim.SGD(narrow.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(narrow(torch.from_numpy(X)), torch.from_numpy(y)).backward()
        optimizer.step()
    for name, value in narrow.named_parameters():
        assert torch.allclose(result.params[name][part[name]], value, rtol=1e-10, atol=1e-13), name


def test_a_server_optimizer_around_it_refuses_the_same():
    around = fg.FedAvgM(lr=0.1, inner=fg.HeteroFL(lr=0.1))
    fed, norm = fg.Federation.from_arrays([digits()] * 3), nn.LayerNorm(8)
    with pytest.raises(fg.InputError, match="LayerNorm"):
        fg.simulate(nn.Sequential(nn.Flatten(), nn.Linear(64, 8), norm, nn.Linear(8, 3)), fed, around)
    with pytest.raises(fg.InputError, match="aggregate"):
        fg.simulate(nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), fed, around, aggregate=fg.Median())


def test_a_frozen_head_is_refused_because_a_hidden_layer_would_be_taken_for_it():
    module = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.Linear(8, 3)).double()
    module[2].requires_grad_(False)
    with pytest.raises(fg.InputError, match=r"model parameter 2\.weight = 'frozen'"):
        fg.simulate(module, fg.Federation.from_arrays([digits()] * 3), fg.HeteroFL(lr=0.1))


@pytest.mark.parametrize("levels", [(), (0.0,), (1.5,), 0.5, ("a",)])
def test_bad_levels_are_refused(levels):
    with pytest.raises(fg.InputError, match="levels"):
        fg.HeteroFL(lr=0.1, levels=levels)


def test_a_narrow_client_moves_and_computes_the_share_of_the_coordinates_that_it_holds():
    """4 hidden channels of 8 inputs and 2 outputs: 32 + 4 + 8 + 2 numbers; of width 1/2: 16 + 2 + 4 + 2."""
    rng = np.random.default_rng(0)
    fed = fg.Federation.from_arrays([(rng.normal(size=(9, 8)), rng.integers(0, 2, 9)) for _ in range(2)])
    module = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    result = fg.simulate(
        module, fed, fg.HeteroFL(lr=0.1, levels=(1.0, 0.5)), rounds=1, steps=fg.Explicit([[10, 30]]),
        clock=fg.Clock(fg.DeviceProfile("one", step_time=1.0)),
    )  # fmt: skip
    record = result.history[0]
    assert record["bytes_down"] == record["bytes_up"] == 4 * (46 + 24)
    assert record["sim_time"] == pytest.approx(max(10.0, 30 * 24 / 46))


def test_all_clients_with_all_classes_have_no_masked_loss():
    fed = fg.Federation.from_arrays([digits(), digits(40)])
    masked, plain = (
        fg.simulate(
            net(), fed, fg.HeteroFL(lr=0.1, levels=(1.0, 0.5), masked_loss=m), rounds=2, device="cpu"
        ).vector
        for m in (True, False)
    )
    assert torch.equal(masked, plain)
