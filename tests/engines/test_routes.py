"""Routes of convolutions: all give the same numbers, and the fastest is measured once and kept on disk."""

import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import vmap
from torch.nn import functional

from fedagrac.data.federation import Federation
from fedagrac.data.partitions import IID
from fedagrac.engines import LanesEngine, Workload
from fedagrac.engines.lanes.convolutions import ROUTES, routes_for
from fedagrac.engines.lanes.kernels.patches import Convolution, columns_of, rows_of
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.engines.lanes.routes import MEASURED, choose_routes, measured_routes, route_seconds
from fedagrac.engines.precision import products
from fedagrac.models import VectorModel

LANES = 3
CPU = torch.device("cpu")

SHAPES = {
    "alexnet's first": Convolution((2, 3, 13, 14), (5, 3, 11, 11), (4, 4), (5, 5)),
    "3 x 3": Convolution((2, 4, 6, 5), (3, 4, 3, 3), (1, 1), (1, 1)),
    "3 x 3, all even": Convolution((2, 8, 4, 4), (8, 8, 3, 3), (1, 1), (1, 1)),
    "5 x 5, no padding": Convolution((3, 1, 9, 7), (2, 1, 5, 5), (1, 1), (0, 0)),
    "strided 3 x 3": Convolution((1, 2, 7, 8), (7, 2, 3, 3), (2, 2), (1, 1)),
    "oblong": Convolution((2, 3, 9, 8), (5, 3, 3, 2), (2, 1), (1, 0)),
    "padding of a whole kernel": Convolution((2, 2, 5, 5), (3, 2, 2, 2), (1, 1), (2, 1)),
    "eight channels, strided": Convolution((2, 8, 9, 7), (3, 8, 3, 2), (2, 1), (1, 0)),
    "gaps": Convolution((2, 2, 9, 9), (3, 2, 2, 2), (3, 3), (0, 0)),
    "1 x 1": Convolution((2, 5, 4, 3), (7, 5, 1, 1), (1, 1), (0, 0)),
    "strided 1 x 1": Convolution((2, 5, 5, 4), (7, 5, 1, 1), (2, 2), (0, 0)),
    "padded 1 x 1": Convolution((1, 3, 4, 3), (2, 3, 1, 1), (1, 1), (1, 1)),
}


def whole_numbers(shape, seed, dtype):
    """Small whole numbers, whose sums and products are exact in any order."""
    return torch.from_numpy(np.random.default_rng(seed).integers(-3, 4, shape)).to(dtype)


def passes(c, layers, dtype):
    """The outputs, and the gradients of pictures and weights, of lanes whose pictures are not contiguous."""
    x = whole_numbers((LANES, c.inputs[1], c.inputs[0], *c.inputs[2:]), 0, dtype).transpose(1, 2)
    w = whole_numbers((LANES, *c.weight), 1, dtype)
    x.requires_grad_(), w.requires_grad_()
    with layers:
        y = vmap(lambda x, w: functional.conv2d(x, w, None, c.stride, c.padding))(x, w)
    g = whole_numbers(y.shape, 2, dtype)
    return y.detach(), *torch.autograd.grad(y, (x, w), g)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shape", SHAPES)
def test_every_route_gives_the_same_outputs_and_gradients(shape, dtype):
    c = SHAPES[shape]
    expected = []  # lane by lane, torch's own convolution
    for lane in range(LANES):
        x = whole_numbers((LANES, c.inputs[1], c.inputs[0], *c.inputs[2:]), 0, dtype).transpose(1, 2)[lane]
        w = whole_numbers((LANES, *c.weight), 1, dtype)[lane]
        x.requires_grad_(), w.requires_grad_()
        y = functional.conv2d(x, w, None, c.stride, c.padding)
        g = whole_numbers((LANES, *y.shape), 2, dtype)[lane]
        expected.append((y.detach(), *torch.autograd.grad(y, (x, w), g)))
    names = routes_for(c)
    assert {"grouped", "patches", "rows", "channels last"} <= set(names)
    assert ("patches, padded" in names) == (shape != "3 x 3, all even")
    for name in names:
        for found, parts in zip(
            passes(c, RoutedLayers({c: name}), dtype), zip(*expected, strict=True), strict=True
        ):
            assert torch.equal(found, torch.stack(parts)), name


def test_routes_fit_where_they_have_something_to_do():
    direct = {shape for shape, c in SHAPES.items() if "direct" in routes_for(c)}
    assert direct == {"3 x 3, all even", "eight channels, strided"}
    huge = Convolution((2**21, 8, 32, 32), (8, 8, 3, 3), (1, 1), (1, 1))
    assert "direct" not in routes_for(huge)
    assert [shape for shape, c in SHAPES.items() if "pointwise" in routes_for(c)] == ["1 x 1", "strided 1 x 1"]
    assert set(MEASURED) <= set(ROUTES)


def test_padding_adds_zeros_only():
    c = SHAPES["alexnet's first"]  # patches of 363 numbers, 2 x 4 x 4 places
    x = torch.ones((1, *c.inputs), dtype=torch.float64)
    columns, padded = columns_of(x, c), columns_of(x, c, 8)
    assert (columns.shape, padded.shape) == ((1, 363, 32), (1, 368, 32))
    assert torch.equal(padded[:, :363], columns)
    assert not padded[:, 363:].any()
    rows = rows_of(x, c, 8)
    assert rows.shape == (1, 32, 368)
    assert not rows[:, :, 363:].any()


def test_the_first_layer_needs_no_gradient_of_its_pictures():
    model = nn.Sequential(
        nn.Conv2d(2, 2, 3, padding=1), nn.ReLU(), nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 3, 1)
    )
    needed = convolutions_of(lambda: model[0](torch.zeros(1, 2, 4, 4)))
    assert list(needed.values()) == [False]
    needed = convolutions_of(lambda: model(torch.zeros(1, 2, 4, 4)))
    assert list(needed.values()) == [True, True]  # the first two have one shape, and one of them needs it


class Clock:
    """A timer that knows the seconds of every route beforehand, and counts."""

    def __init__(self, **microseconds):
        self.microseconds, self.calls = microseconds, []

    def __call__(self, c, name, to_pictures):
        self.calls.append((c, name, to_pictures))
        return self.microseconds.get(name, 9.0) / 1e6


def test_the_fastest_route_is_taken_and_the_next_process_times_nothing(tmp_path):
    c, other = SHAPES["3 x 3"], SHAPES["1 x 1"]
    clock = Clock(patches=2.0, pointwise=1.0)
    chosen = choose_routes({c: True, other: True}, 20, CPU, torch.float32, clock, tmp_path)
    assert chosen == {c: "patches", other: "pointwise"}
    assert {name for shape, name, _ in clock.calls if shape == c} == set(routes_for(c)) & set(MEASURED)

    again = Clock(grouped=0.1)
    assert choose_routes({c: True, other: True}, 20, CPU, torch.float32, again, tmp_path) == chosen
    assert again.calls == []
    kept = {tuple(row["weight"]): row["us"] for row in measured_routes(tmp_path)}
    assert kept[c.weight]["patches"] == pytest.approx(2.0)
    assert len(kept) == 2


@pytest.mark.parametrize(
    ("us", "expected"),
    [
        # 10 and 20 us at best; with the channels of all pixels side by side 10 + 22, 6 % more
        ({"direct": 10, "patches": 11, "rows": 30}, ["direct", "rows"]),
        # 3 + 20 us at best, and 3 + 23, 13 % more
        ({"direct": 3, "patches": 11, "rows": 30}, ["direct", "patches"]),
        # nothing would have its channels side by side, so all pictures have one layout as it is
        ({"direct": 12, "patches": 11, "rows": 30}, ["patches", "patches"]),
    ],
)
def test_compiled_steps_have_pictures_of_one_layout_unless_that_takes_clearly_longer(us, expected, tmp_path):
    first, second = SHAPES["3 x 3, all even"], SHAPES["3 x 3"]
    later = {"patches": 20.0, "rows": 23.0 if us["direct"] == 3 else 22.0}

    def seconds(c, name, to_pictures):
        return (us if c == first else later).get(name, 99.0) / 1e6

    def chosen(fused):
        shapes = {first: True, second: True}
        return list(choose_routes(shapes, 20, CPU, torch.float32, seconds, tmp_path, fused=fused).values())

    assert chosen(True) == expected
    assert chosen(False) == [min(us, key=us.get), "patches"]


def test_what_names_a_measurement(tmp_path):
    """Lanes, precision and the need of a gradient: a change of any of them is timed anew."""
    c = SHAPES["3 x 3"]

    def timed(to_pictures=True, lanes=20, dtype=torch.float32):
        clock = Clock()
        choose_routes({c: to_pictures}, lanes, CPU, dtype, clock, tmp_path)
        return len(clock.calls) > 0

    assert timed()
    assert not timed()
    assert [timed(to_pictures=False), timed(lanes=19), timed(dtype=torch.float64)] == [True] * 3
    with products("float32" if torch.backends.cuda.matmul.allow_tf32 else "tf32"):
        assert timed()
    assert len(measured_routes(tmp_path)) == 5


@pytest.mark.parametrize(
    "content", [b"", b"{", b"[]", b'{"us": {"grouped": -1}}', b'{"us": {"magic": 1}}', b"\xff"]
)
def test_an_invalid_file_is_ignored_and_replaced(content, tmp_path):
    c = SHAPES["3 x 3"]
    choose_routes({c: True}, 20, CPU, torch.float32, Clock(), tmp_path)
    (file,) = tmp_path.iterdir()
    sound = json.loads(file.read_bytes())
    file.write_bytes(content)
    assert measured_routes(tmp_path) == []
    choose_routes({c: True}, 20, CPU, torch.float32, Clock(), tmp_path)
    assert json.loads(file.read_bytes()) == sound


def test_a_route_that_is_new_or_does_not_run_is_no_obstacle(tmp_path):
    c = SHAPES["3 x 3"]
    never = Clock(**dict.fromkeys(MEASURED, float("inf")))
    assert choose_routes({c: True}, 20, CPU, torch.float32, never, tmp_path) == {c: "grouped"}
    choose_routes({c: True}, 20, CPU, torch.float32, Clock(grouped=3.0), tmp_path)
    (file,) = tmp_path.iterdir()
    table = json.loads(file.read_bytes())
    del table["us"]["patches"]
    file.write_text(json.dumps(table))
    clock = Clock(patches=1.0)
    assert choose_routes({c: True}, 20, CPU, torch.float32, clock, tmp_path) == {c: "patches"}
    assert [name for _, name, _ in clock.calls] == ["patches"]


@pytest.mark.parametrize("to_pictures", [True, False])
def test_a_route_is_timed_forward_and_backward(to_pictures):
    for name in routes_for(SHAPES["3 x 3"]):
        assert 0 < route_seconds(SHAPES["3 x 3"], name, to_pictures, 2, CPU, torch.float32) < 60


def test_a_cpu_measures_no_routes(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    rng = np.random.default_rng(0)
    fed = Federation.from_pool(rng.random((8, 1, 4, 4), np.float32), rng.integers(0, 2, 8), 2, IID())
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2))
    engine = LanesEngine(Workload.of(VectorModel(model), fed, None, 2, "replacement", 0.0, 0))
    engine.model.route(2)
    assert engine.model.layers.routes == {}
    assert measured_routes() == []


def normed():
    """Lanes of a network with a group norm, and its convolutions."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 3))
    rng = np.random.default_rng(0)
    fed = Federation.from_pool(rng.normal(size=(20, 2, 8, 8)), rng.integers(0, 3, 20), 2, IID())
    workload = Workload.of(VectorModel(module, "cpu"), fed, None, 5, "replacement", 0.0, 0)
    return LanesEngine(workload).model, convolutions_of(lambda: workload.call(workload.inputs[:5]))


def test_routes_are_used_if_two_lanes_have_the_gradient_of_the_module():
    model, convolutions = normed()
    model.use_routes(dict.fromkeys(convolutions, "patches, padded"), 5)
    assert list(model.layers.routes.values()) == ["patches, padded"]


@pytest.mark.parametrize("name", ["rows", "channels last"])
def test_norms_take_pictures_whose_channels_are_side_by_side(name):
    model, convolutions = normed()
    model.use_routes(dict.fromkeys(convolutions, name), 5)
    assert set(model.layers.routes.values()) == {name}


def test_a_route_that_fails_is_not_used(monkeypatch):
    def failing(x, w, c):
        raise RuntimeError("no such layout. Please file an issue")

    monkeypatch.setitem(ROUTES, "failing", ROUTES["patches"]._replace(run=failing))
    model, convolutions = normed()
    with pytest.warns(UserWarning, match="grouped ones: with faster routes no such layout$"):
        model.use_routes(dict.fromkeys(convolutions, "failing"), 5)
    assert not model.layers.routes


def test_a_route_that_gives_another_gradient_is_not_used(monkeypatch):
    def wrong(x, w, c):
        return ROUTES["patches"].run(x, 1.01 * w, c)

    monkeypatch.setitem(ROUTES, "wrong", ROUTES["patches"]._replace(run=wrong))
    model, convolutions = normed()
    with pytest.warns(
        UserWarning, match="faster routes the gradient is another one than that of the module itself"
    ):
        model.use_routes(dict.fromkeys(convolutions, "wrong"), 5)
    assert not model.layers.routes
