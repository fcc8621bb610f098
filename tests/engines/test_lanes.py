"""Lanes give the numbers of serial, however clients are packed."""

import ctypes
import platform
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.core.local import Plan
from fedagrac.data.pictures import Images
from fedagrac.engines import LanesEngine, SerialEngine, Workload, keep_freed_memory
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.engines.lanes.pools import Maxima
from fedagrac.engines.lanes.waves import draw_wave
from fedagrac.models import VectorModel
from quadratics import half_square, quadratics

RAGGED = [1, 7, 3, 100, 7, 1]  # with K = 1, equal neighbours and one lane 100 times longer


def far(a, b):
    return float((a - b).norm() / b.norm())


def pictures(clients=5, channels=1, size=12, seed=0):
    """Byte pictures with keyed crops and flips, labels that depend on them, ragged clients."""
    rng = np.random.default_rng(seed)
    X = rng.integers(0, 256, (150, channels, size, size), dtype=np.uint8)
    y = (X.mean((1, 2, 3)) * 10).astype(np.int64) % 4
    shares = fg.Dirichlet(0.5, least=6).split(y, clients, seed)
    images = Images((0.5,) * channels, (0.25,) * channels, padding=2)
    pool = torch.from_numpy(X), torch.from_numpy(y)
    return fg.Federation(*pool, shares, tuple(part[:40] for part in pool), None, "random", (), images)


def convolutional():
    torch.manual_seed(3)
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.GroupNorm(2, 6), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 8, 3),
        nn.Tanh(), nn.Flatten(), nn.LayerNorm(128), nn.Linear(128, 4),
    )  # fmt: skip


@pytest.mark.parametrize("name", sorted(REGISTRY))
@pytest.mark.parametrize("sampling", ["shuffle", "full"])
def test_every_algorithm_and_sampling_mode(name, sampling):
    q = quadratics()
    options = {"batch_size": None} if sampling == "full" else {"batch_size": 20, "sampling": sampling}
    serial, lanes = (
        fg.simulate(
            q.module(), q.federation(), fg.algorithm(name, lr=0.01), rounds=4, steps=fg.Explicit([RAGGED]),
            loss=half_square, engine=engine, device="cpu", weight_decay=0.1, **options,
        )
        for engine in ("serial", "lanes")
    )  # fmt: skip
    assert far(lanes.vector, serial.vector) < 1e-12
    assert lanes.history.column("train_loss") == pytest.approx(serial.history.column("train_loss"), rel=1e-11)


@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_convolutions_norms_and_augmented_pictures(name):
    whole = {"levels": (1.0,)} if name == "heterofl" else {}  # there is no narrow LayerNorm
    serial, lanes = (
        fg.simulate(
            convolutional(), pictures(), fg.algorithm(name, lr=0.05, **whole), rounds=2,
            steps=fg.Explicit([[1, 9, 4, 2, 9]]), batch_size=5, engine=engine, device="cpu", dtype=torch.float64,
            participation=3,
        ).vector
        for engine in ("serial", "lanes")
    )  # fmt: skip
    assert far(lanes, serial) < 1e-10


@pytest.mark.parametrize(("model", "shape"), [("cnn", (1, 28)), ("alexnet", (3, 32))])
def test_the_papers_networks_without_dropout(model, shape):
    fed = pictures(clients=3, channels=shape[0], size=shape[1])

    def network():
        torch.manual_seed(0)
        built = fg.models.build(model)
        for layer in built:
            if isinstance(layer, nn.Dropout | nn.Dropout2d):
                layer.p = 0.0
        return built

    serial, lanes = (
        fg.simulate(
            network(), fed, fg.FedaGrac(lr=0.1), rounds=1, steps=fg.Explicit([[1, 3, 2]]), batch_size=4,
            engine=engine, device="cpu", dtype=torch.float64,
        ).vector
        for engine in ("serial", "lanes")
    )  # fmt: skip
    start = torch.cat([p.detach().reshape(-1) for p in network().parameters()]).double()
    assert far(lanes - start, serial - start) < 1e-10


@pytest.mark.parametrize("name", ["fedavg", "fedagrac"])
def test_convolutions_as_products_of_patches_give_the_same(name):
    """Every convolution routed, with strides and paddings, against the serial engine's plain conv2d."""
    torch.manual_seed(2)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 5, stride=2, padding=2), nn.ReLU(), nn.Conv2d(4, 6, (3, 2), padding=(1, 0), bias=False),
        nn.ReLU(), nn.Conv2d(6, 6, 3, groups=2), nn.Flatten(), nn.Linear(6 * 4 * 3, 4),
    )  # fmt: skip

    def all_routed(workload):
        inputs, _ = workload.load(torch.zeros(5, dtype=torch.int64))
        convolutions = convolutions_of(lambda: workload.call(inputs))
        assert len(convolutions) == 2  # the grouped one stays as it is
        engine = LanesEngine(workload)
        engine.model.layers = RoutedLayers(dict.fromkeys(convolutions, "patches"))
        return engine

    serial, lanes = (
        fg.simulate(
            model, pictures(), fg.algorithm(name, lr=0.05), rounds=2, steps=fg.Explicit([[1, 9, 4, 2, 9]]),
            batch_size=5, engine=engine, device="cpu", dtype=torch.float64,
        ).vector
        for engine in ("serial", all_routed)
    )  # fmt: skip
    assert far(lanes, serial) < 1e-10


def test_float32_agrees_for_convex_models():
    fed = fg.Federation.load("digits", clients=12, partition=fg.Dirichlet(0.3), seed=0)
    serial, lanes = (
        fg.simulate(
            fg.models.build("logistic", features=64, classes=10), fed, fg.FedaGrac(lr=0.1), rounds=5,
            steps=fg.Gaussian(30, 400), engine=engine, device="cpu",
        ).vector
        for engine in ("serial", "lanes")
    )  # fmt: skip
    assert far(lanes, serial) < 1e-5


def engines(batch_size=4, sampling="replacement", width=None, fixed=None):
    q = quadratics()
    w = Workload.of(VectorModel(q.module()), q.federation(), half_square, batch_size, sampling, 0.0, 0)
    return q, SerialEngine(w), LanesEngine(w, width, fixed)


@pytest.mark.parametrize("width", [1, 2, 3, 4, 6, None])
@pytest.mark.parametrize("mean", [False, True])
@pytest.mark.parametrize("fixed", [False, True])
def test_any_packing_gives_every_part_of_the_reply(width, mean, fixed, monkeypatch):
    """Per-lane K, eta, mu, correction and first_steps; waves of every width; exact peeling and fixed widths."""
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.TABLE_STEPS", 20)  # the longest lane needs several tables
    q, serial, lanes = engines(width=width, fixed=fixed)
    x = torch.from_numpy(q.start())
    plan = Plan.of(
        steps=RAGGED, lr=np.linspace(0.01, 0.03, 6), mu=[0, 0.5, 0, 0.1, 0, 2.0], first_steps=[0, 5, 1, 50, 0, 9],
        correction=torch.arange(30, dtype=torch.float64).reshape(6, 5) / 20, mean=mean,
    )  # fmt: skip
    clients = np.array([3, 0, 5, 1, 2, 4])
    a, b = serial.run(plan, x, clients, 2), lanes.run(plan, x, clients, 2)
    assert far(b.models, a.models) < 1e-12
    assert far(b.loss, a.loss) < 1e-12
    assert far(b.first, a.first) < 1e-12
    assert (b.total is None) == (a.total is None) == (not mean)
    if mean:
        assert far(b.total, a.total) < 1e-12


def test_compiled_steps_give_every_part_of_the_reply(monkeypatch):
    """Calls of five steps, two widths, several tables, per-lane everything; and twice, to see what is left."""
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.TABLE_STEPS", 20)
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.COMPILED_WIDTHS", 2)
    q = quadratics()
    w = Workload.of(VectorModel(q.module()), q.federation(), half_square, 4, "replacement", 0.1, 0)
    serial, lanes = SerialEngine(w), LanesEngine(w, compiled=True)
    x = torch.from_numpy(q.start())
    for round, steps in enumerate([RAGGED, [13, 7, 3, 40, 7, 1]]):
        plan = Plan.of(
            steps=steps, lr=np.linspace(0.01, 0.03, 6), mu=[0, 0.5, 0, 0.1, 0, 2.0], mean=True,
            first_steps=[0, 5, 1, 50, 0, 9], correction=torch.arange(30, dtype=torch.float64).reshape(6, 5) / 20,
        )  # fmt: skip
        a, b = (engine.run(plan, x, np.arange(6), round) for engine in (serial, lanes))
        for part in ("models", "loss", "first", "total"):
            assert far(getattr(b, part), getattr(a, part)) < 1e-12
    assert lanes.compiled
    assert len(lanes.prepared) == 1


@pytest.mark.parametrize("width", [None, 1])
def test_compiled_convolutions_norms_and_pictures(width, monkeypatch):
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.COMPILED_WIDTHS", 1)
    w = Workload.of(VectorModel(convolutional(), dtype=torch.float64), pictures(), None, 5, "replacement", 0.0, 0)
    x, clients = w.model.initial(), np.arange(5)
    plan = Plan.of(steps=[1, 9, 4, 2, 9], lr=0.05, correction=torch.ones((5, len(x)), dtype=torch.float64) / 50)
    lanes = LanesEngine(w, width, compiled=True)
    a, b = (engine.run(plan, x, clients, 1) for engine in (SerialEngine(w), lanes))
    assert lanes.compiled
    assert far(b.models - x, a.models - x) < 1e-10


@pytest.mark.parametrize(("high", "wide", "window"), [(8, 8, 2), (9, 7, 2), (10, 11, 3), (2, 5, 2)])
def test_fused_maxima_and_their_gradients_are_those_of_torch(high, wide, window):
    """Whole numbers of a small range: most windows have several maxima, of which the first gets the gradient."""
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.integers(-2, 2, (3, 5, high, wide))).double().requires_grad_()
    expected, found = nn.functional.max_pool2d(x, window), Maxima.apply(x, window)
    assert torch.equal(found, expected)
    g = torch.from_numpy(rng.normal(size=expected.shape))
    assert torch.equal(*(torch.autograd.grad(y, x, g)[0] for y in (expected, found)))


def test_fused_dropout_drops_its_share_and_every_mask_is_new():
    """A million places: the share kept is within five deviations; masks, and neighbours, are unrelated."""
    n, p = 2**20, 0.3
    torch.manual_seed(0)
    with RoutedLayers(side_by_side=True, fused=True):
        first, second = (nn.functional.dropout(torch.ones(n, dtype=torch.float64), p) for _ in range(2))
    assert first.unique().tolist() == [0.0, pytest.approx(1 / 0.7)]
    a, b = first > 0, second > 0
    kept = 1 - p
    assert abs(float(a.double().mean()) - kept) < 5 * (kept * p / n) ** 0.5
    for one, other in ((a, b), (a[1:], a[:-1]), (a[16:], a[:-16]), (a[1024:], a[:-1024])):
        both = float((one & other).double().mean())
        assert abs(both - kept**2) < 5 * (kept**2 * (1 - kept**2) / n) ** 0.5


def test_compiled_pools_of_odd_pictures_are_exact_and_dropout_is_keyed(monkeypatch):
    monkeypatch.setattr("fedagrac.engines.lanes.fixed.COMPILED_WIDTHS", 1)
    clients, plan = np.arange(5), Plan.of(steps=[3, 1, 2, 2, 3], lr=0.05)

    def engines(p):
        torch.manual_seed(3)
        model = nn.Sequential(
            nn.Conv2d(1, 4, 3), nn.MaxPool2d(2), nn.ReLU(), nn.Dropout(p), nn.Flatten(), nn.Linear(36, 4)
        )
        w = Workload.of(VectorModel(model, dtype=torch.float64), pictures(size=9), None, 5, "replacement", 0.0, 0)
        return SerialEngine(w), LanesEngine(w, compiled=True), w.model.initial()

    serial, lanes, x = engines(0.0)
    assert far(lanes.run(plan, x, clients, 0).models, serial.run(plan, x, clients, 0).models) < 1e-12
    _, lanes, x = engines(0.4)
    once, again, other = (lanes.run(plan, x, clients, t).models for t in (0, 0, 1))
    assert lanes.compiled
    assert torch.equal(once, again)
    assert not torch.equal(once, other)


def test_without_a_compiler_steps_run_uncompiled_and_say_so(tmp_path):
    """A real process that finds no compiler."""
    script = """
import warnings, torch, fedagrac as fg
fed = fg.Federation.load("digits", clients=4, seed=0)
def run(**options):
    return fg.simulate(torch.nn.Linear(64, 10, dtype=torch.float64), fed, fg.FedaGrac(lr=0.1), rounds=2,
                       steps=fg.Linear(2, 3), device="cpu", **options).vector
with warnings.catch_warnings(record=True) as said:
    warnings.simplefilter("always")
    torch.manual_seed(0); compiled = run(engine="lanes", compile=True)
torch.manual_seed(0); serial = run(engine="serial")
print([str(w.message) for w in said], float((compiled - serial).norm() / serial.norm()) < 1e-10)
"""
    environment = {"PATH": str(tmp_path), "HOME": str(tmp_path), "CXX": "no-such-compiler"}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "steps run uncompiled, which is slower" in done.stdout
    assert done.stdout.strip().endswith("True")


def test_recorded_steps_serve_later_rounds():
    """The buffers of one wave are those of the next: nothing of an earlier round may show."""
    q, serial, lanes = engines(fixed=True)
    x = torch.from_numpy(q.start())
    for round, steps in enumerate([RAGGED, [5] * 6, [1, 1, 2, 1, 1, 30]]):
        plan = Plan.of(steps=steps, lr=0.02, mean=True, first_steps=[2, 0, 0, 3, 0, 1], mu=0.1)
        a, b = (engine.run(plan, x, np.arange(6), round) for engine in (serial, lanes))
        for part in ("models", "loss", "first", "total"):
            assert far(getattr(b, part), getattr(a, part)) < 1e-12
        x = a.models.mean(0)
    assert len(lanes.prepared) == 1


def test_lanes_are_grouped_by_batch_size_and_sorted_by_steps():
    _, _, lanes = engines(batch_size=20, sampling="shuffle", width=2)  # sizes 12 and 18 are below a batch
    plan = Plan.of(steps=RAGGED, lr=0.01)
    waves = list(lanes.packing(plan, np.arange(6)))
    assert [w.tolist() for w in waves] == [[0], [2], [3, 1], [4, 5]]


def test_nothing_is_padded():
    _, _, lanes = engines()
    plan = Plan.of(steps=RAGGED, lr=0.01)
    (members,) = lanes.packing(plan, np.arange(6))
    wave = draw_wave(lanes.workload, members, plan, np.arange(6), 0)
    assert len(wave.samples) == sum(RAGGED)
    assert wave.running.tolist() == [6] + [4] * 2 + [3] * 4 + [1] * 93


@pytest.mark.parametrize("batch", ["full", "first"])
def test_gradients_at_a_point(batch):
    """Two clients share a size, so they share a batch; the others run alone."""
    q = quadratics(sizes=[12, 30, 12, 7, 30, 30])
    w = Workload.of(VectorModel(q.module()), q.federation(), half_square, 4, "replacement", 0.2, 0)
    x = torch.from_numpy(q.start())
    a, b = (engine.gradients(x, np.arange(6), 3, batch) for engine in (SerialEngine(w), LanesEngine(w)))
    assert far(b, a) < 1e-12
    if batch == "full":
        assert np.allclose(b[3], q.gradient(3, q.start()) + 0.2 * q.start(), rtol=1e-12)


def test_a_wave_that_does_not_fit_is_run_in_halves(monkeypatch):
    q, serial, lanes = engines()
    plan = Plan.of(steps=RAGGED, lr=0.01, mean=True, first_steps=3)
    x, clients = torch.from_numpy(q.start()), np.arange(6)
    real, tried = LanesEngine.step_wave, []

    def small(self, wave, *arguments):
        tried.append(len(wave.rows))
        if len(wave.rows) > 2:
            raise torch.OutOfMemoryError("too many")
        real(self, wave, *arguments)

    monkeypatch.setattr(LanesEngine, "step_wave", small)
    with pytest.warns(UserWarning, match="out of memory"):
        reply = lanes.run(plan, x, clients, 0)
    assert far(reply.models, serial.run(plan, x, clients, 0).models) < 1e-12
    assert tried == [6, 3, 2, 1, 3, 2, 1]
    tried.clear()
    lanes.run(plan, x, clients, 0)
    assert max(tried) <= 2  # the width that fits is remembered


def test_an_engine_does_not_change_the_allocator_of_the_process(monkeypatch):
    def refuse(*_):
        raise AssertionError("a library function was looked up")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    keep_freed_memory.cache_clear()  # an earlier answer would hide a call
    q, _, lanes = engines()
    lanes.run(Plan.of(steps=RAGGED, lr=0.01), torch.from_numpy(q.start()), np.arange(6), 0)


def test_freed_memory_is_kept_on_request_where_the_c_library_can():
    assert keep_freed_memory() == (platform.libc_ver()[0] == "glibc")
    assert keep_freed_memory() == keep_freed_memory()


def test_engines_declare_how_they_run():
    _, serial, lanes = engines(width=2)
    assert [(e.name, e.width, e.compiled) for e in (serial, lanes)] == [("serial", 1, False), ("lanes", 2, False)]


def test_dropout_is_keyed_by_the_wave():
    fed = fg.Federation.load("digits", clients=6, seed=0)

    def run():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))
        return fg.simulate(
            model, fed, fg.FedAvg(lr=0.1), rounds=2, steps=fg.Linear(1, 2), engine="lanes", device="cpu"
        ).vector

    a = run()
    torch.manual_seed(77)
    assert torch.equal(run(), a)


class Stubborn(nn.Module):
    """A layer that looks at its numbers, which no batched forward can do."""

    def forward(self, x):
        return x if float(x.detach().sum()) < 1e9 else -x


def test_what_cannot_be_batched_runs_one_after_another_and_says_so():
    fed = fg.Federation.load("digits", clients=3, seed=0)

    def model():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 8), Stubborn(), nn.Linear(8, 10))

    with pytest.warns(UserWarning, match=r"lanes cannot batch layer 1 \(Stubborn\)"):
        lanes = fg.simulate(model(), fed, fg.FedAvg(lr=0.1), rounds=2, engine="lanes", device="cpu")
    serial = fg.simulate(model(), fed, fg.FedAvg(lr=0.1), rounds=2, engine="serial", device="cpu")
    assert torch.equal(lanes.vector, serial.vector)


def test_a_loss_that_cannot_be_batched_is_named():
    fed = fg.Federation.load("digits", clients=3, seed=0)

    def loss(output, target):
        value = nn.functional.cross_entropy(output, target)
        return value if float(value.detach()) < 1e9 else value * 0

    model = fg.models.build("logistic", features=64, classes=10)
    with pytest.warns(UserWarning, match="lanes cannot batch the loss"):
        fg.simulate(model, fed, fg.FedAvg(lr=0.1), rounds=1, loss=loss, engine="lanes", device="cpu")


@pytest.mark.parametrize("name", ["fedagrac", "fedsam", "fedlesam", "mime", "fedbn", "ditto", "diloco"])
def test_the_statistics_of_batch_normalization_move_alike(name):
    """A gradient beside the model, at its ascent or at x~, must not move them a second time."""

    def normalized():
        torch.manual_seed(4)
        return nn.Sequential(nn.Flatten(), nn.Linear(144, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 4))

    serial, lanes = (
        fg.simulate(
            normalized(), pictures(), fg.algorithm(name, lr=0.02), rounds=2, steps=fg.Explicit([[1, 9, 4, 2, 9]]),
            batch_size=5, engine=engine, device="cpu", dtype=torch.float64,
        )
        for engine in ("serial", "lanes")
    )  # fmt: skip
    assert far(lanes.vector, serial.vector) < 1e-8
    for key, values in serial.buffers.items():
        assert torch.allclose(lanes.buffers[key].double(), values.double(), rtol=1e-7), key
    assert lanes.history.column("test_loss") == pytest.approx(serial.history.column("test_loss"), rel=1e-7)


def test_rounding_in_a_deep_network_is_not_taken_for_a_wrong_gradient():
    """In float32 some ReLU tips to the other side of zero, and gradients of lanes and module differ by 0.1 %."""
    torch.manual_seed(2)
    fed = pictures(channels=3, size=32, seed=2)
    w = Workload.of(VectorModel(fg.models.build("resnet20")), fed, None, 4, "replacement", 0.0, 0)
    engine = LanesEngine(w)  # a warning would be an error here
    x, plan = w.model.initial().clone(), Plan.of(steps=[1, 2], lr=0.01)
    lanes, serial = (one.run(plan, x, np.arange(2), 0).models for one in (engine, SerialEngine(w)))
    assert far(lanes, serial) < 1e-4


@pytest.mark.parametrize("error", [1.02, 2.0])
def test_a_wrong_rule_is_noticed_in_float32(error, monkeypatch):
    """Torch's own rule is taken instead; if it were wrong, too, clients would run one after another."""
    from fedagrac.engines.lanes import layers
    from fedagrac.engines.lanes.model import LaneModel

    right = layers._group_norm
    monkeypatch.setattr(layers, "_group_norm", lambda *args, **options: error * right(*args, **options))
    w = Workload.of(VectorModel(convolutional()), pictures(), None, 8, "replacement", 0.0, 0)
    assert LanesEngine(w).model.layers is None
    compared = LaneModel._compared
    monkeypatch.setattr(LaneModel, "_compared", lambda model, *args: bool(model.layers) and compared(model, *args))
    with pytest.warns(UserWarning, match="another gradient than the module itself"):
        LanesEngine(w)


class SharedGradients(nn.Module):
    """More than 100,000 parameters, two that get one tensor as their gradient, and one that gets none."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(144, 701), nn.Tanh(), nn.Linear(701, 4))
        self.one, self.other, self.unused = (nn.Parameter(torch.ones(4)) for _ in range(3))

    def forward(self, x):
        return self.layers(x) + (self.one + self.other)


@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("corrected", [False, True])
def test_serial_steps_by_parameter_give_the_bits_of_steps_of_one_vector(corrected, weight_decay):
    """Steps that collect gradients need the whole vector, others move one parameter after another."""
    w = Workload.of(VectorModel(SharedGradients()), pictures(), None, 8, "replacement", weight_decay, 0)
    x = w.model.initial().clone()
    correction = 0.01 * torch.randn(3, len(x), generator=torch.Generator().manual_seed(5)) if corrected else None
    one, other = (
        SerialEngine(w).run(Plan.of([3, 5, 4], 0.1, correction, first_steps=first), x, np.arange(3), 0)
        for first in (0, 5)
    )
    assert torch.equal(one.models, other.models)
    assert torch.equal(one.loss, other.loss)
