"""precision="bf16": products of numbers rounded to bfloat16; models, losses, updates and sums in float32."""

import itertools
import logging
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

import fedagrac as fg
import module_kinds
from fedagrac.callbacks import Checkpoints
from fedagrac.core.local import Plan
from fedagrac.engines import LanesEngine, SerialEngine, Workload
from fedagrac.engines.choice import Measurements
from fedagrac.engines.lanes import compiled as compiled_steps
from fedagrac.engines.lanes.convolutions import routes_for
from fedagrac.engines.lanes.kernels.recurrence import lstm
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.engines.lanes.routes import MEASURED
from fedagrac.engines.precision import products, rounded
from fedagrac.models import VectorModel
from fedagrac.storage.checkpoints import read_checkpoint

ROUNDING = 2.0**-8
"""The distance of neighbouring numbers in bfloat16, relative to them."""

ENGINES = {"serial": SerialEngine, "lanes": LanesEngine, "fixed": lambda w: LanesEngine(w, fixed=True)}
RAGGED = [1, 4, 2]


def bf16(values):
    """Round to bfloat16 in NumPy: the upper half of a float32, to nearest, ties to even."""
    bits = np.asarray(values, np.float32).view(np.uint32).astype(np.uint64)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16 << 16).astype(np.uint32).view(np.float32).astype(np.float64)


def mean_output(output, target):
    return output.mean() + 0.0 * target.sum()


def workload(module, clients, loss=None, batch_size=None, precision="bf16"):
    fed = fg.Federation.from_arrays(clients)
    return Workload.of(VectorModel(module), fed, loss, batch_size, "replacement", 0.0, 0, precision=precision)


def linear(*weights):
    """Return a linear layer without bias and with these weights."""
    layer = nn.Linear(len(weights), 1, bias=False)
    layer.weight.data = torch.tensor([weights])
    return layer


def drawn(seed=0, shape=(6,), clients=3, samples=8, classes=3):
    rng = np.random.default_rng(seed)
    return [
        (rng.normal(size=(samples, *shape)).astype(np.float32), rng.integers(0, classes, samples))
        for _ in range(clients)
    ]


def far(ours, theirs):
    """Return the largest difference, relative to the largest number of `theirs`."""
    return float((ours - theirs).abs().max() / theirs.abs().max())


def test_the_rounding_of_this_file_is_that_of_torch():
    values = np.random.default_rng(0).normal(size=1000).astype(np.float32) * 100
    np.testing.assert_array_equal(bf16(values), torch.from_numpy(values).bfloat16().double().numpy())


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_inputs_and_weights_are_rounded_and_products_are_summed_in_float32(engine):
    """256 + 1 - 256 is 0 if sums are rounded to 8 bits; 1 + 2^-9 is 1 in bfloat16, 3 + 2^-7 is 3."""
    x1 = np.array([[256.0, 1 + 2.0**-9, -256.0]], np.float32)
    w = workload(linear(1.0, 3 + 2.0**-7, 1.0), [(x1, [0.0])] * 2, mean_output)
    plan = replace(Plan.of(steps=[1, 1], lr=1.0), mean=True, exact=True)
    result = engine(w).run(plan, w.model.initial(), np.arange(2), 0)
    assert result.loss.tolist() == [3.0, 3.0]
    assert result.total.tolist() == [[256.0, 1.0, -256.0]] * 2
    # the model itself is not rounded: 3 + 2^-7 - 1
    assert result.models.tolist() == [[-255.0, 2 + 2.0**-7, 257.0]] * 2


@pytest.mark.parametrize("engine", ENGINES.values(), ids=ENGINES)
def test_full_gradients_of_logistic_regression_are_those_of_rounded_numbers(engine):
    torch.manual_seed(0)
    clients, module = drawn(), without_biases(nn.Linear(6, 3))
    w = workload(module, clients)
    gradients = engine(w).gradients(w.model.initial(), np.arange(3), 0)
    assert gradients.dtype == torch.float32
    W, b = bf16(module.weight.detach()), bf16(module.bias.detach())
    for row, (X, y) in zip(gradients.double().numpy(), clients, strict=True):
        logits = bf16(bf16(X) @ W.T + b)
        p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
        to_logits = bf16((p - np.eye(3)[y]) / len(y))
        expected = np.concatenate([bf16(to_logits.T @ bf16(X)).ravel(), bf16(to_logits.sum(0))])
        np.testing.assert_allclose(row, expected, rtol=0, atol=ROUNDING * np.abs(expected).max())
        exact = logistic_gradient(X.astype(np.float64), y, module)
        assert np.abs(row - exact).max() > ROUNDING / 16 * np.abs(exact).max()  # it is not float32


def logistic_gradient(X, y, module):
    W, b = (p.detach().double().numpy() for p in (module.weight, module.bias))
    logits = X @ W.T + b
    p = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    to_logits = (p - np.eye(3)[y]) / len(y)
    return np.concatenate([(to_logits.T @ X).ravel(), to_logits.sum(0)])


def convolutional():
    """Return a network whose biases are 0: lanes round before and after they add them."""
    torch.manual_seed(1)
    module = nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 6, 3),
        nn.ReLU(), nn.Flatten(), nn.Linear(24, 3),
    )  # fmt: skip
    return without_biases(module)


def without_biases(module):
    for name, parameter in module.named_parameters():
        if name.endswith("bias"):
            nn.init.zeros_(parameter)
    return module


def plain_gradient(module, x, y):
    """Return the gradient of an ordinary loop that rounds the arguments of every product itself."""
    first, norm, _, _, second, _, _, last = module
    x, *weights = (t.bfloat16() for t in (x, *(p for layer in (first, second, last) for p in layer.parameters())))
    h = functional.conv2d(x, weights[0], weights[1], padding=1)
    h = functional.max_pool2d(functional.relu(norm(h.float())), 2)
    h = functional.relu(functional.conv2d(h.bfloat16(), weights[2], weights[3]))
    output = functional.linear(h.flatten(1), weights[4], weights[5])
    loss = functional.cross_entropy(output.float(), y)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(module.parameters()))])


@pytest.mark.parametrize("route", ["serial", "lanes", *(name for name in MEASURED if name != "pointwise")])
def test_a_convolutional_network_has_the_gradient_of_a_loop_that_rounds_by_hand(route):
    """The last ones are the routes of convolutions on a GPU."""
    clients, module = drawn(2, (2, 8, 8)), convolutional()
    w = workload(module, clients)
    engine = ENGINES["serial" if route == "serial" else "lanes"](w)
    if route in MEASURED:
        convolutions = convolutions_of(lambda: w.call(w.inputs[:8]))
        # the direct one is for more channels, but computes any
        assert [route in routes_for(c) for c in convolutions] == [route != "direct"] * 2
        engine.model.layers = RoutedLayers(dict.fromkeys(convolutions, route))
    gradients = engine.gradients(w.model.initial(), np.arange(3), 0)
    for row, (X, y) in zip(gradients, clients, strict=True):
        expected = plain_gradient(module, torch.from_numpy(X), torch.from_numpy(y))
        if route == "serial":
            assert torch.equal(row, expected)
        assert far(row, expected) < 2 * ROUNDING


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_many_tiny_updates_move_a_float32_model_where_a_bf16_model_stands_still(engine):
    """Below 1, numbers of bfloat16 are 2^-8 apart: 1 - 2^-10 is rounded back to 1."""
    stuck, step = torch.ones(1, dtype=torch.bfloat16), 2.0**-10
    for _ in range(300):
        stuck -= step
    assert stuck == 1
    fed = fg.Federation.from_arrays([([[1.0]], [0.0]), ([[1.0]], [0.0])])
    result = fg.simulate(
        linear(1.0), fed, fg.FedAvg(lr=step), rounds=3, steps=100, loss=mean_output, engine=engine, device="cpu",
        precision="bf16", compile=False,
    )  # fmt: skip
    assert result.vector.item() == 1 - 300 * step


@pytest.mark.parametrize("engine", ["serial", "lanes"])
def test_models_states_buffers_and_losses_stay_float32(engine):
    module = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))
    seen = {}

    class Look(fg.Callback):
        def on_round(self, run, record):
            seen.update(run.server.state, buffers=run.server.buffers)

    result = fg.simulate(
        module, fg.Federation.from_arrays(drawn()), fg.FedaGrac(lr=0.1), rounds=2, steps=[2, 3, 5], batch_size=4,
        engine=engine, device="cpu", precision="bf16", compile=False, callbacks=[Look()],
    )  # fmt: skip
    assert {"x", "buffers"} < set(seen)
    assert {name: value.dtype for name, value in seen.items() if value.is_floating_point()} == dict.fromkeys(
        seen, torch.float32
    )
    assert {value.dtype for value in result.model().state_dict().values()} == {torch.float32, torch.int64}
    values = result.vector.double().numpy()
    assert (values != bf16(values)).mean() > 0.9
    assert np.float32(result.history[-1]["train_loss"]) != bf16(result.history[-1]["train_loss"])


def test_evaluation_runs_in_the_same_precision_and_takes_the_loss_in_float32():
    """The output is 3 instead of (1 + 2^-9) (3 + 2^-7); its distance to the target, 2^-12, is exact."""
    x = [[1 + 2.0**-9]]
    result = fg.simulate(
        linear(3 + 2.0**-7), fg.Federation.from_arrays([(x, [3.0])], test=(x, [3.0 + 2.0**-12])),
        fg.FedAvg(lr=1e-30), rounds=1, steps=1, loss=lambda output, y: functional.l1_loss(output[:, 0], y),
        device="cpu", precision="bf16",
    )  # fmt: skip
    assert result.history[0]["test_loss"] == 2.0**-12


@pytest.mark.parametrize("name", module_kinds.KINDS)
def test_every_kind_of_module_runs_in_bf16_like_in_float32(name):
    """In lanes it falls back where it does in float32, and nowhere else."""
    options = {"dtype": torch.float32}
    start = VectorModel(module_kinds.make(name)[1], dtype=torch.float32).initial()
    exact, said = module_kinds.simulated(name, "lanes", [2, 5], **options)
    serial, nothing = module_kinds.simulated(name, "serial", [2, 5], precision="bf16", **options)
    lanes, also_said = module_kinds.simulated(name, "lanes", [2, 5], precision="bf16", **options)
    assert (nothing, also_said) == ([], said)
    moved = exact.vector - start
    assert 1e-5 < far(serial.vector - start, moved) < 10 * ROUNDING  # rounded, in up to 14 steps
    assert far(lanes.vector - start, serial.vector - start) < 10 * ROUNDING


def test_unequal_steps_collect_the_same_first_and_mean_gradients_in_every_engine():
    clients = drawn(3, (2, 8, 8))
    w = workload(convolutional(), clients, batch_size=4)
    x = w.model.initial()
    plan = Plan.of(steps=RAGGED, lr=0.05, first_steps=[1, 2, 2], correction=torch.full((3, len(x)), 0.01))
    plan = replace(plan, mean=True, exact=True)
    reference = SerialEngine(w).run(plan, x, np.arange(3), 0)
    for name in ("lanes", "fixed"):
        result = ENGINES[name](w).run(plan, x, np.arange(3), 0)
        for part in ("first", "total", "models"):
            assert far(getattr(result, part), getattr(reference, part)) < 4 * ROUNDING


def test_compiled_steps_give_the_numbers_of_lanes():
    torch.manual_seed(0)
    w = workload(nn.Linear(6, 3), drawn(), batch_size=4)
    x, plan = w.model.initial(), Plan.of(steps=[2, 2, 2], lr=0.5)
    compiled = LanesEngine(w, width=3, compiled=True)
    ours, plain = (engine.run(plan, x, np.arange(3), 0).models - x for engine in (compiled, LanesEngine(w)))
    assert compiled.compiled
    assert far(ours, plain) < ROUNDING
    exact = workload(nn.Linear(6, 3), drawn(), batch_size=4, precision="float32")
    assert far(ours, LanesEngine(exact).run(plan, x, np.arange(3), 0).models - x) > ROUNDING / 16


def test_compiled_steps_leave_weights_rounded_for_the_next_step(monkeypatch):
    """Also when fewer lanes go on, and when a new round begins."""
    rounded_once, left = compiled_steps.with_roundings, []

    def counted(*arguments):
        graph = rounded_once(*arguments)
        sources = [n.args[0].meta["val"].shape[1:] for n in graph.graph.nodes if "_to_copy" in str(n.target)]
        left.append(sum(shape in {(5, 6), (3, 5)} for shape in sources))
        return graph

    monkeypatch.setattr(compiled_steps, "with_roundings", counted)
    torch.manual_seed(0)
    w = workload(nn.Sequential(nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3)), drawn(clients=4), batch_size=4)
    plan = Plan.of(steps=[6, 1, 3, 6], lr=0.5)
    ends, engines = [], (LanesEngine(w, compiled=True), LanesEngine(w))
    for engine in engines:
        x = w.model.initial()
        for round in range(3):
            x = engine.run(plan, x, np.arange(4), round).models.mean(0)
        ends.append(x - w.model.initial())
    assert engines[0].compiled
    assert far(*ends) < 2 * ROUNDING
    unroll = engines[0].prepared[next(iter(engines[0].prepared))].unroll
    assert len(left) > 1  # widths
    assert set(left) == {2 * (unroll - 1) + 2 * unroll}  # the steps of a call after its first, and the gradients


def test_the_state_of_a_recurrence_is_not_rounded():
    """c grows by tanh(2^-10) at each of 64 times, which bfloat16 would round away."""
    gates = torch.tensor([100.0, 100.0, 2.0**-10, 100.0]).expand(1, 64, 1, 4)
    one = torch.ones(1, 1, 1)
    c = lstm(gates, torch.zeros(1, 4, 1, dtype=torch.bfloat16), 0 * one, one, None)[1]
    assert c.dtype == torch.float32
    assert abs(c[0, -1].item() - (1 + 64 * np.tanh(2.0**-10))) < 1e-5


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize(
    ("layer", "options"),
    [
        (nn.LSTM, {"proj_size": 3}),  # the others have no projections
        *itertools.product([nn.LSTM, nn.GRU, nn.RNN], [{}, {"bidirectional": True}, {"bias": False}]),
    ],
    ids=str,
)
def test_recurrent_layers_are_as_exact_in_lanes_as_one_after_another(layer, options):
    torch.manual_seed(0)
    module = module_kinds.Recurrent(layer, **options)
    clients = [(np.random.default_rng(0).integers(0, 11, (30, 5)), np.arange(30) % 3)] * 2
    w, exact = (workload(module, clients, precision=precision) for precision in ("bf16", "float32"))
    x = w.model.initial()
    expected = SerialEngine(exact).gradients(x, np.arange(2), 0)
    for engine in (SerialEngine, LanesEngine):
        assert 1e-4 < far(engine(w).gradients(x, np.arange(2), 0), expected) < 4 * ROUNDING


class Attending(nn.Module):
    """Attention of four positions, written out or as a layer."""

    def __init__(self, layer):
        super().__init__()
        self.inputs = nn.Linear(4, 24)
        self.heads = nn.MultiheadAttention(8, 2, batch_first=True) if layer else None
        self.output = nn.Linear(8, 3)

    def forward(self, x):
        q, k, v = self.inputs(x).chunk(3, -1)
        if self.heads is None:
            q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in (q, k, v))
            attended = functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        else:
            causal = torch.triu(torch.ones(4, 4, dtype=torch.bool), 1)
            attended = self.heads(q, q, q, attn_mask=causal, need_weights=False)[0] + 0 * (k + v)
        return self.output(attended.mean(1))


@pytest.fixture
def softmax_by_autocast():
    """Let autocast take softmax in float32, which it does on GPUs alone, and keep the types that it got.

    A GPU then refuses to go back: the gradient and the output are float32, the input was not.
    """
    seen = []

    def softmax(x, dim, dtype=None):
        seen.append(x.dtype)
        with torch.autocast("cpu", enabled=False):
            return torch.softmax(x.float(), dim, dtype)

    with torch.library._scoped_library("aten", "IMPL", "AutocastCPU") as library:
        library.impl("softmax.int", softmax)
        yield seen


@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_attention_leaves_no_softmax_to_autocast(engine, layer, softmax_by_autocast):
    torch.manual_seed(0)
    w = workload(Attending(layer), drawn(5, (4, 4)), batch_size=4)
    x = w.model.initial()
    plan = Plan.of(steps=RAGGED, lr=0.1)
    with sdpa_kernel(SDPBackend.MATH):
        rounded = ENGINES[engine](w).run(plan, x, np.arange(3), 0).models
    assert softmax_by_autocast == []
    exact = SerialEngine(replace(w, precision="float32")).run(plan, x, np.arange(3), 0).models
    assert 1e-5 < far(rounded - x, exact - x) < 10 * ROUNDING


def test_attention_that_returns_its_weights_runs_in_bf16():
    layer = nn.MultiheadAttention(8, 2, batch_first=True)
    x = torch.randn(2, 4, 8)
    with products("bf16"), torch.no_grad():
        output, weights = rounded(lambda: layer(x, x, x), "bf16", x.device)
        alone, _ = rounded(lambda: layer(x, x, x, need_weights=False), "bf16", x.device)
    assert far(output, alone) < 4 * ROUNDING
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4), atol=ROUNDING, rtol=0)


def test_dropout_of_rounded_numbers_drops_the_share_that_was_asked_for():
    """In bfloat16 a uniform number is 0 once in 256 times; here p is 1/512."""
    module = nn.Sequential(nn.Linear(1, 2**14, bias=False), nn.Dropout(1 / 512))

    def zeros(output, target):
        return (output == 0).float().mean() + 0.0 * output.mean()

    w = workload(module, [([[1.0]], [0])] * 4, zeros)
    share = LanesEngine(w).run(Plan.of(steps=[20] * 4, lr=0.0), w.model.initial(), np.arange(4), 0).loss.mean()
    assert share == pytest.approx(1 / 512, rel=0.1)  # 2,560 of 1.3 million, +- 51


def test_a_run_resumes_bit_identically_and_says_if_its_precision_is_another(tmp_path, caplog):
    fed, rounds = fg.Federation.from_arrays(drawn()), []

    def run(**options):
        torch.manual_seed(0)
        return fg.simulate(
            nn.Linear(6, 3), fed, fg.Scaffold(lr=0.1), steps=3, batch_size=4, engine="lanes", device="cpu",
            compile=False, **{"precision": "bf16", "rounds": 4, **options},
        )  # fmt: skip

    class Keep(fg.Callback):
        def on_round(self, run, record):
            rounds.append(record)

    whole = run()
    run(rounds=2, callbacks=[Keep(), Checkpoints(tmp_path, every=1)])
    stored = read_checkpoint(tmp_path)
    stored = replace(stored, history=rounds[: stored.round])
    with caplog.at_level(logging.WARNING, logger="fedagrac"):
        assert torch.equal(run(resume=stored).vector, whole.vector)
        assert caplog.text == ""
        run(resume=stored, precision="float32")
    assert "resumes in float32, not bf16" in caplog.text


def test_measurements_of_engines_are_kept_for_each_precision():
    names = {Measurements(workload(nn.Linear(6, 3), drawn(), precision=p), 3).path for p in ("float32", "bf16")}
    assert len(names) == 2


def test_models_of_float64_and_unknown_names_are_refused():
    fed, options = fg.Federation.from_arrays(drawn()), {"rounds": 1, "device": "cpu"}
    with pytest.raises(fg.InputError, match=r"precision = 'bf16': .*float32.*this one is of torch\.float64"):
        fg.simulate(nn.Linear(6, 3).double(), fed, fg.FedAvg(lr=0.1), precision="bf16", **options)
    with pytest.raises(fg.InputError, match=r"precision = 'b16': .*did you mean 'bf16'"):
        fg.simulate(nn.Linear(6, 3), fed, fg.FedAvg(lr=0.1), precision="b16", **options)
