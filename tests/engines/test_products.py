"""Products by oneDNN give the numbers of torch's own, and only large float32 products of lanes take them."""

import copy
import warnings

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

import fedagrac as fg
from fedagrac.engines.lanes import layers
from fedagrac.engines.lanes.kernels import products
from fedagrac.engines.lanes.kernels.products import FEWEST_OPERATIONS, LaneProduct, fast, faster_products, product
from fedagrac.engines.lanes.layers import RoutedLayers

needs_onednn = pytest.mark.skipif(
    not torch.backends.mkldnn.is_available(), reason="this build of torch has no oneDNN"
)


@pytest.fixture
def calls(monkeypatch):
    """Let products take oneDNN whatever the processor is, and count those that do."""
    counted = []
    multiply = products._multiply

    def counting(a, b):
        counted.append((tuple(a.shape), tuple(b.shape)))
        return multiply(a, b)

    monkeypatch.setattr(products, "_multiply", counting)
    monkeypatch.setattr(products, "faster_products", lambda: True)
    monkeypatch.setattr(layers, "faster_products", lambda: True)
    return counted


def in_layouts(matrix):
    """The same matrix as it is, transposed in memory, with gaps between rows, and with gaps between numbers."""
    rows, columns = matrix.shape
    wide, sparse = torch.zeros(rows, columns + 3), torch.zeros(rows, columns, 2)
    wide[:, 1 : columns + 1], sparse[..., 1] = matrix, matrix
    return matrix, matrix.t().contiguous().t(), wide[:, 1 : columns + 1], sparse[..., 1]


@needs_onednn
def test_the_product_of_matrices_in_any_layout_is_that_of_integers():
    rng = np.random.default_rng(0)
    A, B = rng.integers(-8, 9, (7, 5)), rng.integers(-8, 9, (5, 6))
    for a in in_layouts(torch.from_numpy(A).float()):
        for b in in_layouts(torch.from_numpy(B).float()):
            assert product(a, b).tolist() == (A @ B).tolist()
            stacked = product(torch.stack([a, 2 * a]), torch.stack([b, 3 * b]))
            assert stacked.tolist() == [(A @ B).tolist(), (6 * A @ B).tolist()]


@needs_onednn
def test_the_gradient_of_a_product_is_that_of_torch():
    generator = torch.Generator().manual_seed(0)
    x, w, g = (torch.randn(shape, generator=generator) for shape in ((3, 8, 5), (3, 6, 5), (3, 8, 6)))
    x, w = x.requires_grad_(), w.requires_grad_()
    ours = torch.autograd.grad(LaneProduct.apply(x, w), (x, w), g)
    theirs = torch.autograd.grad(torch.bmm(x, w.mT), (x, w), g)
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_only_large_products_of_float32_on_amd_processors_are_fast(monkeypatch):
    size = round((FEWEST_OPERATIONS / 2) ** (1 / 3)) + 1
    large = torch.zeros(size, size)
    for vendor, expected in (
        ("AuthenticAMD", torch.backends.mkl.is_available()),
        ("GenuineIntel", False),
        ("", False),
    ):
        monkeypatch.setattr(products, "_vendor", lambda vendor=vendor: vendor)
        faster_products.cache_clear()
        assert fast(large, large) == expected
        assert not fast(large[:-2, :-2], large[:-2, :-2])
        assert not fast(large.double(), large.double())
    faster_products.cache_clear()


def classifier(width):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, width), nn.Tanh(), nn.Linear(width, 150), nn.ReLU(), nn.Linear(150, 10))


def trained(model, engine, compile):
    rng = np.random.default_rng(1)
    arrays = [(rng.normal(size=(60, 64)), rng.integers(0, 10, 60)) for _ in range(3)]
    return fg.simulate(
        copy.deepcopy(model), fg.Federation.from_arrays(arrays), fg.FedaGrac(lr=0.1), rounds=2,
        steps=fg.Explicit([[2, 4, 3]]), batch_size=50, engine=engine, compile=compile,
    ).vector  # fmt: skip


@needs_onednn
@pytest.mark.parametrize("compile", [False, True])
def test_lanes_with_products_of_onednn_give_the_numbers_of_serial(calls, compile):
    model = classifier(700)  # 50 x 64 x 700 and 50 x 700 x 150 are large, 50 x 150 x 10 is not
    reference = trained(model, "serial", False)
    assert not calls
    ours = trained(model, "lanes", compile)
    torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-6)
    assert {a[1] * b[1] for a, b in calls} >= {64 * 700, 700 * 150}
    assert not any({*a, *b} >= {150, 10} for a, b in calls)


@needs_onednn
def test_lanes_of_small_or_float64_models_do_not_call_onednn(calls):
    trained(classifier(20), "lanes", False)
    trained(classifier(700).double(), "lanes", False)
    assert not calls


def in_both_engines(model, arrays, compile):
    """Return the models that serial and lanes train, without a warning."""
    ends = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for engine, compiled in (("serial", False), ("lanes", compile)):
            result = fg.simulate(
                copy.deepcopy(model), fg.Federation.from_arrays(arrays), fg.FedAvg(lr=0.1), rounds=1, steps=3,
                batch_size=5, engine=engine, compile=compiled,
            )  # fmt: skip
            ends.append(result.vector)
    return ends


@pytest.mark.parametrize("compile", [False, True])
def test_group_norms_and_pools_over_whole_pictures_run_as_lanes_without_warnings(compile):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU(), nn.Conv2d(8, 8, 8), nn.GroupNorm(2, 8),
        nn.Tanh(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(), nn.GroupNorm(4, 8), nn.Linear(8, 10),
    ).double()  # fmt: skip
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=(20, 3, 8, 8)), rng.integers(0, 10, 20)) for _ in range(3)]
    serial, lanes = in_both_engines(model, arrays, compile)
    torch.testing.assert_close(lanes, serial, rtol=1e-10, atol=1e-12)


class Swapped(nn.Module):
    """A pool over whole sequences, pictures or volumes whose channels lie side by side in memory."""

    def __init__(self, dims):
        super().__init__()
        pools = nn.AdaptiveAvgPool1d(1), nn.AdaptiveAvgPool2d((1, 1)), nn.AdaptiveAvgPool3d([1, 1, 1])
        self.pool = pools[dims - 1]
        self.out = nn.Linear(4, 10)

    def forward(self, x):
        return self.out(self.pool(x.movedim(-1, 1)).flatten(1))


@pytest.mark.parametrize("dims", [1, 2, 3])
def test_pools_over_all_pixels_run_as_lanes_in_any_layout(dims):
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=(20, *[3] * dims, 4)), rng.integers(0, 10, 20)) for _ in range(3)]
    serial, lanes = in_both_engines(Swapped(dims).double(), arrays, compile=False)
    torch.testing.assert_close(lanes, serial, rtol=1e-10, atol=1e-12)


class Keywords(nn.Module):
    """Calls functions of torch with every argument by name."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        h = nn.functional.linear(input=x, weight=self.first.weight, bias=self.first.bias)
        h = nn.functional.dropout(input=h, p=0.0, training=self.training)
        h = nn.functional.group_norm(input=h, num_groups=1)
        return nn.functional.linear(weight=self.second.weight, input=h)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_functions_that_get_their_arguments_by_name_run_as_lanes(calls, monkeypatch, compile, fast):
    monkeypatch.setattr(products, "FEWEST_OPERATIONS", 1 if fast else FEWEST_OPERATIONS)
    torch.manual_seed(0)
    model = Keywords()
    rng = np.random.default_rng(0)
    arrays = [(rng.normal(size=(20, 6)), rng.integers(0, 3, 20)) for _ in range(3)]
    serial, lanes = in_both_engines(model, arrays, compile)
    torch.testing.assert_close(lanes, serial, rtol=1e-5, atol=1e-6)
    assert bool(calls) == fast


@pytest.mark.parametrize(
    "norm", [nn.GroupNorm(2, 6), nn.BatchNorm2d(6, track_running_stats=False), nn.GroupNorm(3, 6, affine=False)]
)
@pytest.mark.parametrize("bias", [True, False])
def test_norms_and_biases_of_a_gpu_have_the_gradients_of_the_module(norm, bias):
    """Gradients of weights and biases are summed within samples, and then over samples."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 6, 3, bias=bias), copy.deepcopy(norm), nn.Tanh()).double()
    x = torch.randn(4, 5, 3, 6, 7, dtype=torch.float64)  # 4 lanes
    weights = {name: torch.randn(4, *p.shape, dtype=p.dtype) for name, p in model.named_parameters()}

    def loss(parameters, inputs):
        return functional_call(model, parameters, inputs).square().mean()

    with RoutedLayers():
        lanes = vmap(grad(loss))(weights, x)
    for lane in range(4):
        alone = grad(loss)({name: value[lane] for name, value in weights.items()}, x[lane])
        for name, value in alone.items():
            torch.testing.assert_close(lanes[name][lane], value, rtol=1e-10, atol=1e-13)
