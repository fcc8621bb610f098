"""Compiled steps, wherever torch is installed."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional
from torch.utils import cpp_extension

from fedagrac.core.local import Plan
from fedagrac.data.federation import Federation
from fedagrac.data.partitions import IID
from fedagrac.data.pictures import Images
from fedagrac.engines import LanesEngine, SerialEngine, Workload
from fedagrac.engines.lanes import norms
from fedagrac.engines.lanes.compiled import (
    CannotCompileError,
    compile_step,
    traced_step,
    with_roundings,
    without_identities,
)
from fedagrac.engines.lanes.kernels.patches import pixels_of
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.models import VectorModel


def test_steps_compile_when_torch_is_in_a_folder_with_spaces(tmp_path, monkeypatch):
    """Inductor splits the linker's options at spaces."""
    folder = tmp_path / "a folder with spaces"
    folder.symlink_to(cpp_extension.TORCH_LIB_PATH)
    monkeypatch.setattr(cpp_extension, "TORCH_LIB_PATH", str(folder))
    x = torch.arange(4.0)

    def step(buffers):
        buffers[0].mul_(2).add_(1)

    compiled = compile_step(step, [x])
    expected = 2 * x + 1
    compiled()
    assert x.tolist() == expected.tolist()
    assert str(folder) == cpp_extension.TORCH_LIB_PATH


def test_rows_of_pixels_have_one_order_in_memory_for_both_products():
    """[2, 1, 3, 2, 2] pictures are [2, 4, 3] rows, multiplied as they are and transposed."""
    pictures = torch.arange(24.0).reshape(2, 1, 3, 2, 2)
    rows = pictures.permute(0, 1, 3, 4, 2).reshape(2, 4, 3) + 1
    right, left = torch.arange(6.0).reshape(1, 3, 2).expand(2, 3, 2), torch.arange(8.0).reshape(2, 4, 1)
    products, sums = torch.zeros(2, 4, 2), torch.zeros(2, 3, 1)
    buffers = [pictures, right.contiguous(), left, products, sums]

    def step(buffers):
        pictures, right, left, products, sums = buffers
        flat = pixels_of(pictures + 1)
        products.copy_(flat @ right)
        sums.copy_(flat.transpose(1, 2) @ left)

    graph, _ = traced_step(step, buffers, ())
    forced = [node for node in graph.graph.nodes if "inductor_force_stride_order" in str(node.target)]
    assert [node.args[1] for node in forced] == [[12, 3, 1]]
    assert not any("fedagrac" in str(node.target) for node in graph.graph.nodes)
    products.zero_(), sums.zero_()  # what tracing has written
    compile_step(step, buffers)
    assert torch.equal(products, rows @ right)
    assert torch.equal(sums, rows.transpose(1, 2) @ left)


def rounding_step(x, other):
    """Rounds the first two rows of x, changes x, and rounds them again."""
    first = x[:2].detach().to(torch.bfloat16)
    x[:2].sub_(first.view(2, 1) * 0.5)
    other.add_(x[:2].to(torch.bfloat16).float().sum())


def test_rounded_inputs_are_read_and_written_where_a_step_would_round():
    x, other = torch.tensor([[1 + 2.0**-10], [3.0], [5.0]]), torch.zeros(1)
    graph = make_fx(rounding_step)(x.clone(), other.clone())
    graph = without_identities(with_roundings(graph, [0, 1], [x.bfloat16(), other.bfloat16()]))
    rounded = torch.tensor([[2.0], [4.0], [0.0]], dtype=torch.bfloat16)  # not those of x: the step must read these
    unread = torch.zeros(1, dtype=torch.bfloat16)
    graph(x, other, rounded, unread)
    assert x.tolist() == [[2.0**-10], [1.0], [5.0]]
    assert other.tolist() == [1 + 2.0**-10]  # rounded after x had changed, so from x
    assert rounded.tolist() == [[2.0**-10], [1.0], [0.0]]  # the first rows alone
    assert unread.tolist() == [0.0]


def test_what_is_rounded_through_another_view_or_to_another_type_is_left_alone():
    def step(x):
        x.sub_(x.reshape(-1).to(torch.bfloat16).reshape(x.shape) + x.to(torch.float16))

    x = torch.tensor([[1 + 2.0**-10], [3.0]])
    expected, rounded = x.clone(), torch.zeros(2, 1, dtype=torch.bfloat16)
    step(expected)
    graph = with_roundings(make_fx(step)(x.clone()), [0], [rounded])
    graph(x, rounded)
    assert torch.equal(x, expected)
    assert not rounded.any()


def gpu_like():
    """An engine with compiled steps and the layers of a GPU, on routes of several kinds, and its workload."""
    torch.manual_seed(3)
    model = nn.Sequential(
        nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(1, 5),
        nn.Conv2d(5, 4, 3, padding=1), nn.GELU(), nn.Conv2d(4, 3, 3, stride=2),
        nn.Flatten(), nn.LayerNorm(12), nn.Linear(12, 4),
    )  # fmt: skip
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.integers(0, 256, (60, 1, 11, 10), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, 4, 60))
    images = Images((0.5,), (0.25,), padding=2)
    fed = Federation(X, y, IID().split(y.numpy(), 3, seed=0), None, None, "random", (), images)
    workload = Workload.of(VectorModel(model, dtype=torch.float64), fed, None, 5, "replacement", 0.0, 0)
    inputs, _ = workload.load(torch.zeros(5, dtype=torch.int64))
    names = ["patches, padded", "direct", "rows, padded"]
    routes = dict(zip(convolutions_of(lambda: workload.call(inputs)), names, strict=True))
    engine = LanesEngine(workload, compiled=True)
    engine.model.layers = RoutedLayers(routes, fused=True)
    return workload, engine


def moves(engine, x):
    """How far every client moves the model x in one round."""
    plan = Plan.of(steps=[1, 4, 2], lr=0.05, correction=torch.ones((3, len(x)), dtype=torch.float64) / 50)
    return engine.run(plan, x, np.arange(3), 1).models - x


def far(a, b):
    return float((a - b).norm() / b.norm())


def test_steps_with_the_layers_of_a_gpu_compile_to_the_numbers_of_serial(monkeypatch):
    """Our kernels are opaque operations to the compiler; pools and the update are fused."""
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.COMPILED_WIDTHS", 1)
    workload, engine = gpu_like()
    x = workload.model.initial()
    assert far(moves(engine, x), moves(SerialEngine(workload), x)) < 1e-12
    assert engine.compiled


def test_a_gpu_compiles_one_width_a_round_and_the_next_wider_one_stands_for_the_others():
    rng = np.random.default_rng(0)
    fed = Federation.from_arrays([(rng.normal(size=(9, 4)), rng.integers(0, 3, 9)) for _ in range(3)])
    model = VectorModel(nn.Linear(4, 3), dtype=torch.float64)
    workload = Workload.of(model, fed, None, 5, "replacement", 0.0, 0)
    x, engine = model.initial(), LanesEngine(workload, compiled=True)
    plan = Plan.of(steps=[1, 20, 10], lr=0.05)  # calls of five steps: three lanes, two, then one

    def moves(engine):
        return engine.run(plan, x, np.arange(3), 1).models - x

    expected = moves(SerialEngine(workload))
    assert far(moves(engine), expected) < 1e-12
    (fixed,) = engine.prepared.values()
    everything = dict(fixed._prepared)
    fixed._prepared.clear()
    fixed.gradual = True
    for widths in ([3], [3, 2], [3, 2, 1], [3, 2, 1]):
        assert far(moves(engine), expected) < 1e-12
        assert [kind.width for kind in fixed._prepared] == widths
    assert set(fixed._prepared) == set(everything)


@pytest.mark.parametrize("shape", [(3, 6), (3, 6, 5), (3, 6, 4, 5), (2, 6, 1, 1), (2, 6, 2, 3, 2)], ids=str)
@pytest.mark.parametrize("affine", [True, False])
@pytest.mark.parametrize("groups", [1, 2, 6])
def test_the_group_norm_of_compiled_steps_on_a_gpu_is_that_of_torch_lane_by_lane(shape, affine, groups):
    """Outputs and gradients of pictures, weights and biases, also if the channels of a pixel are neighbours."""
    numbers = torch.Generator().manual_seed(0)

    def random(*sizes):
        return torch.randn(*sizes, generator=numbers, dtype=torch.float64)

    for to_pictures in (True, False) if affine else (True,):
        x = random(4, *shape).movedim(2, -1).contiguous().movedim(-1, 2).requires_grad_(to_pictures)
        w, b = (random(4, 6).requires_grad_() for _ in range(2))
        sources = ([x] if to_pictures else []) + ([w, b] if affine else [])

        def norm(x, w, b):
            return functional.group_norm(x, groups, w if affine else None, b if affine else None, 1e-3)

        # contiguous: torch 2.13 crashes where channels are neighbours and pictures need no gradient
        expected = torch.stack([norm(x[i].contiguous(), w[i], b[i]) for i in range(4)])
        with RoutedLayers(fused=True):
            found = torch.func.vmap(norm)(x, w, b)
        g = random(*expected.shape)
        for ours, theirs in zip(
            (found, *torch.autograd.grad(found, sources, g)),
            (expected, *torch.autograd.grad(expected, sources, g)),
            strict=True,
        ):
            torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)


AFTER_NORM = {
    "relu": functional.relu,
    "inplace": lambda y: (functional.relu(y, inplace=True), y * 1)[1],
    "method": lambda y: y.relu(),
    "both": lambda y: functional.relu(y) * y,
    "twice": lambda y: torch.relu(torch.relu(y) + functional.relu(y)),
    "changed": lambda y: functional.relu(y.add_(1.0)),
    "later": lambda y: (y.mul_(-1), functional.relu(y))[1],
}


@pytest.mark.parametrize("after", AFTER_NORM)
@pytest.mark.parametrize("affine", [True, False])
def test_relu_after_a_group_norm_of_compiled_steps_on_a_gpu_is_that_of_torch(after, affine, monkeypatch):
    """It is one function with the norm, unless something was done to the norm's output before."""
    joined, true_signs = [], norms._through_relu
    monkeypatch.setattr(norms, "_through_relu", lambda *some: joined.append(after) or true_signs(*some))
    numbers = torch.Generator().manual_seed(0)
    shapes = (4, 3, 6, 4, 5), (4, 6), (4, 6)
    sources = [torch.randn(*shape, generator=numbers, dtype=torch.float64).requires_grad_() for shape in shapes]

    def normed(x, w, b):
        return AFTER_NORM[after](functional.group_norm(x, 2, *((w, b) if affine else (None, None)), 1e-3))

    expected = torch.stack([normed(*(source[i] for source in sources)) for i in range(4)])
    with RoutedLayers(fused=True):
        found = torch.func.vmap(normed)(*sources)
    g = torch.randn(*expected.shape, generator=numbers, dtype=torch.float64)
    used = sources if affine else sources[:1]
    for ours, theirs in zip(
        (found, *torch.autograd.grad(found, used, g)),
        (expected, *torch.autograd.grad(expected, used, g)),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-11, atol=1e-12)
    assert len(joined) == (after not in {"changed", "later"})


def test_views_that_change_nothing_are_left_out_and_writing_through_them_counts():
    def step(x, y):
        through = x.permute(0, 1).view(2, 3)
        through.add_(y.permute(1, 0).reshape(2, 3).contiguous().view(2, 3))
        y.copy_(through.permute(1, 0).permute(0, 1))

    x, y = torch.arange(6.0).reshape(2, 3), torch.ones(3, 2)
    expected = [t.clone() for t in (x, y)]
    step(*expected)
    graph = without_identities(make_fx(step)(x.clone(), y.clone()))
    views = [
        node for node in graph.graph.nodes if str(node.target) in ("aten.permute.default", "aten.view.default")
    ]
    assert all(node.args[0].meta["val"].stride() != node.meta["val"].stride() for node in views)
    assert len(views) == 2  # the two that transpose
    graph(x, y)
    assert torch.equal(x, expected[0])
    assert torch.equal(y, expected[1])


def test_dropout_for_compiled_steps_on_a_gpu_drops_its_share():
    """The backward pass computes the mask of the forward pass again."""
    torch.manual_seed(0)
    x = torch.ones(2**14, dtype=torch.float64, requires_grad=True)
    with RoutedLayers(fused=True):
        first, second = nn.functional.dropout(x, 0.25), nn.functional.dropout(x, 0.25)
    assert first.unique().tolist() == [0.0, pytest.approx(4 / 3)]
    assert float((first > 0).double().mean()) == pytest.approx(0.75, abs=5 * (0.75 * 0.25 / 2**14) ** 0.5)
    assert not torch.equal(first, second)
    assert torch.equal(torch.autograd.grad(first.sum(), x)[0], first)


def test_what_cannot_be_compiled_for_a_gpu_still_has_fixed_shapes_and_says_so(monkeypatch):
    def fail(*arguments):
        raise CannotCompileError("no compiler here")

    monkeypatch.setattr("fedagrac.engines.lanes.fixed.compile_step", fail)
    workload, engine = gpu_like()
    x, routes = workload.model.initial(), dict(engine.model.layers.routes)
    with pytest.warns(UserWarning, match="steps run uncompiled, which is slower: no compiler here"):
        moved = moves(engine, x)
    assert (engine.compiled, engine.fixed, engine.model.layers.fused) == (False, True, False)
    assert engine.model.layers.routes == routes
    assert len(engine.prepared) == 1
    assert far(moved, moves(SerialEngine(workload), x)) < 1e-12
