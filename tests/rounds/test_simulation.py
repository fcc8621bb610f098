"""The round loop: history, evaluation, stopping, models, callbacks."""

import math

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from constant_gradients import simulate as simulate_constant
from fedagrac.algorithms import REGISTRY
from fedagrac.rounds import evaluation
from quadratics import K, half_square, quadratics


@pytest.fixture(scope="module")
def digits():
    return fg.Federation.load("digits", clients=6, partition=fg.Dirichlet(0.5), seed=0)


def logistic():
    return fg.models.build("logistic", features=64, classes=10)


def run(fed, algorithm=None, **options):
    settings = {"rounds": 4, "steps": fg.Linear(2, 3), "device": "cpu"} | options
    return fg.simulate(settings.pop("model", None) or logistic(), fed, algorithm or fg.FedAvg(lr=0.1), **settings)


FIELDS = "round test_accuracy test_loss train_loss steps_mean bytes_up bytes_down sim_time wall_time"


def test_every_record_carries_the_promised_fields(digits):
    result = run(digits)
    assert [record["round"] for record in result.history] == [1, 2, 3, 4]
    for record in result.history:
        assert set(FIELDS.split()) <= set(record)
        assert 0 <= record["test_accuracy"] <= 1
        assert record["clients"] == 6
        assert record["steps_mean"] == np.mean([2, 5, 8, 11, 14, 17])
    times = result.history.column("wall_time")
    assert times == sorted(times)
    frame = result.history.to_pandas()
    assert list(frame["round"]) == [1, 2, 3, 4]


def test_csv_holds_every_round(digits, tmp_path):
    import pandas as pd

    result = run(digits)
    result.history.to_csv(tmp_path / "history.csv")
    table = pd.read_csv(tmp_path / "history.csv")
    assert table["test_accuracy"].tolist() == pytest.approx(result.history.column("test_accuracy"))


def test_accuracy_and_loss_are_those_of_the_final_model(digits):
    result = run(digits)
    X, y = digits.test
    output = result.model().eval()(X)
    assert result.history[-1]["test_accuracy"] == (output.argmax(1) == y).double().mean().item()
    assert result.history[-1]["test_loss"] == pytest.approx(
        nn.functional.cross_entropy(output, y).item(), rel=1e-6
    )
    assert torch.equal(torch.cat([p.reshape(-1) for p in result.params.values()]), result.vector)
    assert list(result.params) == ["1.weight", "1.bias"]


def test_training_loss_is_weighted_by_omega():
    """One step each from x~: the training loss is sum_i omega_i F_i(x~)."""
    q = quadratics()
    x = q.start()
    expected = sum(w * 0.5 * np.mean((q.A[i] @ x - q.b[i]) ** 2) for i, w in enumerate(q.omega))
    result = q.simulate(fg.FedAvg(lr=0.01), rounds=1, steps=fg.Constant(1))
    assert result.history[0]["train_loss"] == pytest.approx(expected, rel=1e-12)


def test_evaluation_happens_every_n_rounds_and_after_the_last(digits):
    result = run(digits, rounds=8, eval_every=3)
    assert [r["round"] for r in result.history if r["test_accuracy"] is not None] == [3, 6, 8]


def test_without_test_data_metrics_are_none(digits):
    fed = fg.Federation.from_arrays([([[1.0], [2.0]], [0, 1])])
    result = run(fed, model=nn.Linear(1, 2), metrics={"m": lambda o, t: 1.0}, steps=fg.Constant(2))
    assert {result.history[0][name] for name in ("test_accuracy", "test_loss", "m")} == {None}
    assert result.rounds_to(accuracy=0.1) is None


def test_regression_has_a_loss_but_no_accuracy():
    q = quadratics()
    fed = fg.Federation.from_arrays(list(zip(q.A, q.b, strict=True)), test=(q.A[0], q.b[0]))
    result = q.simulate(fg.FedAvg(lr=0.01), federation=fed, rounds=2)
    x = result.vector.numpy()
    assert result.history[-1]["test_accuracy"] is None
    assert result.history[-1]["test_loss"] == pytest.approx(0.5 * np.mean((q.A[0] @ x - q.b[0]) ** 2), rel=1e-12)


def test_metrics_see_the_whole_test_set(digits, monkeypatch):
    monkeypatch.setitem(evaluation.CHUNKS, "cpu", 100)
    result = run(digits, metrics={"samples": lambda output, target: len(output)})
    assert result.history[0]["samples"] == 360


def test_chunked_evaluation_is_the_same(digits, monkeypatch):
    whole = run(digits).history
    monkeypatch.setitem(evaluation.CHUNKS, "cpu", 77)
    pieces = run(digits).history
    assert pieces.column("test_accuracy") == whole.column("test_accuracy")
    assert pieces.column("test_loss") == pytest.approx(whole.column("test_loss"), rel=1e-6)


def test_rounds_to_is_the_first_round_at_or_above(digits):
    result = run(digits, fg.FedaGrac(lr=0.1), rounds=10)
    accuracies = result.history.column("test_accuracy")
    assert result.rounds_to(accuracy=accuracies[4]) == next(
        i + 1 for i, a in enumerate(accuracies) if a >= accuracies[4]
    )
    assert result.rounds_to(accuracy=1.0) is None


# stopping


def test_a_run_stops_at_the_accuracy(digits):
    free = run(digits, fg.FedaGrac(lr=0.1), rounds=12)
    target = free.history.column("test_accuracy")[3]
    result = run(digits, fg.FedaGrac(lr=0.1), rounds=12, stop=fg.Stop(accuracy=target))
    assert len(result.history) == free.rounds_to(target) <= 4
    assert result.status == "stopped"
    assert "accuracy" in result.reason


def test_a_run_stops_at_the_simulated_time(digits):
    result = run(digits, rounds=50, stop=fg.Stop(sim_time=0.05), eval_every=10)  # 17 steps of 1 ms a round
    assert [r["sim_time"] for r in result.history] == pytest.approx([0.017, 0.034, 0.051])
    assert result.history[-1]["test_accuracy"] is not None  # the last round is always evaluated


def test_a_run_stops_at_the_bytes(digits):
    result = run(digits, rounds=50, stop=fg.Stop(bytes=3 * 12 * 650 * 4))  # 12 vectors of 650 floats a round
    assert len(result.history) == 3


def test_a_callback_can_stop_a_run(digits):
    class Enough(fg.Callback):
        def on_round(self, run, record):
            if record["round"] == 2:
                run.stop("enough")

    result = run(digits, rounds=50, callbacks=[Enough()])
    assert (len(result.history), result.status, result.reason) == (2, "stopped", "round 2: enough")


UNUSABLE = {
    "a cosine that ends too early": (fg.schedule.Cosine(0.1, 2), r"lr of fedavg in round 3 = 0.0: .*last="),
    "zero": (
        fg.schedule.Piecewise({0: 0.1, 3: 0.0}),
        r"lr of fedavg in round 4 = 0.0: .*above 0 in each of the 4",
    ),
    "negative": (lambda done: 0.1 - 0.06 * done, r"lr of fedavg in round 3 = -0.0"),
    "nan": (lambda done: 0.1 if done < 2 else math.nan, r"lr of fedavg in round 3 = nan"),
    "infinite": (lambda done: 0.1 if done < 2 else math.inf, r"lr of fedavg in round 3 = inf"),
    "too short": (lambda done: [0.1, 0.05][done], r"lr of fedavg in round 3 = .*IndexError"),
    "inside": (fg.schedule.Warmup(1, then=fg.schedule.Cosine(0.1, 2)), r"lr of fedavg in round 3 = 0.0"),
}


@pytest.mark.parametrize("name", UNUSABLE)
def test_a_step_size_that_becomes_unusable_is_refused_before_any_work(digits, name):
    class Started(fg.Callback):
        def on_start(self, run):
            raise AssertionError("work has begun")

    lr, message = UNUSABLE[name]
    with pytest.raises(fg.InputError, match=message):
        run(digits, fg.FedAvg(lr=lr), callbacks=[Started()])


def test_a_schedule_that_ends_with_the_run_is_used_to_the_end(digits):
    assert len(run(digits, fg.FedAvg(lr=fg.schedule.Cosine(0.1, 4))).history) == 4
    assert len(run(digits, fg.FedAvg(lr=fg.schedule.Cosine(0.1, 2, last=0.01))).history) == 4


@pytest.mark.parametrize("calibration", [lambda done: -0.5 if done else 1.0, lambda done: math.nan])
def test_a_calibration_that_becomes_unusable_is_refused_wherever_it_is(digits, calibration):
    calibrated = fg.FedaGrac(lr=0.1, calibration=calibration)
    for algorithm in (
        calibrated, fg.FedAdam(lr=0.1, inner=calibrated), fg.DiLoCo(lr=0.1, calibration=calibration),
    ):  # fmt: skip
        with pytest.raises(fg.InputError, match=r"calibration of (fedagrac|diloco) in round [12] = "):
            run(digits, algorithm)
    assert run(digits, fg.FedaGrac(lr=0.1, calibration=lambda done: float(done > 0))).status == "finished"


def test_early_stop_waits_for_its_patience(digits):
    result = run(digits, fg.FedAvg(lr=1e-9), rounds=50, callbacks=[fg.EarlyStop(patience=3)], steps=fg.Constant(1))
    losses = result.history.column("test_loss")
    assert len(losses) < 50
    assert min(losses[-3:]) >= min(losses[:-3])


def test_a_diverging_run_ends_with_its_history():
    q = quadratics()
    result = q.simulate(fg.FedAvg(lr=10.0), rounds=50)
    assert result.status == "diverged"
    assert "smaller lr" in result.reason
    assert 1 <= len(result.history) < 50
    assert not math.isfinite(result.history[-1]["train_loss"]) or not torch.isfinite(result.vector).all()


# bytes and time

D_BYTES = 2 * 8  # two float64


@pytest.mark.parametrize(
    ("name", "options", "down", "up"),
    [  # vectors per round for K = 1, 2, 9: one fast client of three
        ("fedavg", {}, 3, 3),
        ("fedprox", {}, 3, 3),
        ("fednova", {}, 3, 3),
        ("scaffold", {}, 6, 6),
        ("scaffold", {"economical": True}, 6, 3),
        ("fedlin", {}, 6, 6),
        ("fedagrac", {}, 6, 4),
        ("fedagrac", {"economical": False}, 6, 6),
        ("fedagrac-avg", {}, 6, 3),
        ("fedagrac-first", {}, 6, 6),
        ("fedagrac-reverse", {}, 6, 5),
        ("fedavgm", {}, 3, 3),
        ("fedavgm", {"inner": fg.Scaffold(lr=0.1)}, 6, 6),
        ("fedadam", {}, 3, 3),
        ("fedyogi", {}, 3, 3),
        ("fedadagrad", {}, 3, 3),
        ("feddyn", {}, 3, 3),
        ("fedcm", {}, 6, 3),
        ("fedacg", {}, 3, 3),
        ("mimelite", {}, 6, 6),
        ("mime", {}, 9, 6),
        ("fedvarp", {}, 3, 3),
        ("mifa", {}, 3, 3),
        ("fedexp", {}, 3, 3),
        ("scaffnew", {}, 3, 3),
        ("fedsam", {}, 3, 3),
        ("fedlesam", {}, 3, 3),
        ("heterofl", {"levels": (1.0,)}, 3, 3),
        ("fedper", {"personal": ()}, 3, 3),
        ("fedbn", {}, 3, 3),
        ("ditto", {}, 3, 3),
        ("fedagrac", {"local": fg.SGD(momentum=0.5)}, 6, 7),
        ("scaffold", {"economical": True, "local": fg.SGD(momentum=0.5)}, 6, 6),
        ("diloco", {}, 3, 3),
        ("diloco", {"merge": "calibrated", "init": "zeros"}, 6, 6),
        ("diloco", {"merge": "calibrated", "init": "zeros", "local": fg.SGD()}, 6, 3),
    ],
)
def test_bytes_of_a_round_are_the_vectors_that_move(name, options, down, up):
    gradients = [np.array([1.0, 0.0])] * 3
    result = simulate_constant(fg.algorithm(name, lr=0.1, **options), gradients, K=[1, 2, 9], rounds=3)
    assert result.history.column("bytes_down") == [down * D_BYTES] * 3
    assert result.history.column("bytes_up") == [up * D_BYTES] * 3
    assert result.history.column("fast") == [1] * 3
    start = 6 * D_BYTES if name.startswith("fedagrac") else 0  # x_1 down and a gradient up, for three clients
    assert result.history[-1]["bytes_total"] == start + 3 * (down + up) * D_BYTES


def test_every_algorithm_is_in_the_table_of_bytes():
    rows = test_bytes_of_a_round_are_the_vectors_that_move.pytestmark[0].args[1]
    assert {row[0] for row in rows} == set(REGISTRY)


def test_bytes_follow_the_dtype_and_the_cohort():
    q = quadratics()
    single = q.simulate(fg.FedAvg(lr=0.01), module=q.module(torch.float32), participation=2, rounds=1)
    assert single.history[0]["bytes_up"] == 2 * 5 * 4
    assert single.history[0]["clients"] == 2


def test_the_slowest_client_decides_the_simulated_time():
    gradients = [np.array([1.0, 0.0])] * 2
    clock = fg.Clock(fg.DeviceProfile("test", step_time=0.5))
    plain = simulate_constant(fg.FedAvg(lr=0.1), gradients, K=[3, 8], clock=clock, rounds=2)
    assert plain.history.column("sim_time") == [4.0, 8.0]
    fedlin = simulate_constant(fg.FedLin(lr=0.1), gradients, K=[3, 8], clock=clock)
    assert fedlin.history[0]["sim_time"] == 4.5  # and one full local gradient
    fedagrac = simulate_constant(fg.FedaGrac(lr=0.1), gradients, K=[3, 8], clock=clock)
    assert fedagrac.history[0]["sim_time"] == 4.5  # once, for the start
    batched = simulate_constant(fg.FedLin(lr=0.1), gradients, K=[3, 8], clock=clock, sizes=[10, 45], batch_size=10)
    assert batched.history[0]["sim_time"] == (8 + 5) * 0.5  # ceil(45 / 10) batches in a local epoch


# models


class Tied(nn.Module):
    """Two layers that share one weight, a frozen layer, a buffer and an unused parameter."""

    def __init__(self):
        super().__init__()
        self.a = nn.Linear(4, 4, bias=False)
        self.b = nn.Linear(4, 4, bias=False)
        self.b.weight = self.a.weight
        self.frozen = nn.Linear(4, 2)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.ones(3))
        self.register_buffer("scale", torch.tensor(2.0))

    def forward(self, x):
        return self.frozen(self.b(torch.relu(self.a(x)))) * self.scale


def test_tied_frozen_and_unused_parameters():
    torch.manual_seed(0)
    model = Tied()
    X, y = torch.randn(20, 4), torch.randint(0, 2, (20,))
    fed = fg.Federation.from_arrays([(X[:10], y[:10]), (X[10:], y[10:])])
    result = fg.simulate(
        model, fed, fg.FedAvg(lr=0.1), rounds=1, steps=fg.Constant(3), batch_size=None, device="cpu"
    )
    assert len(result.vector) == 16 + 3
    final = result.model()
    assert final.a.weight is final.b.weight
    assert torch.equal(final.frozen.weight, model.frozen.weight)
    assert torch.equal(final.unused, torch.ones(3))
    # by hand, with an ordinary optimiser
    expected = []
    for part in (slice(0, 10), slice(10, 20)):
        import copy

        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD([p for p in local.parameters() if p.requires_grad], lr=0.1)
        for _ in range(3):
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(X[part]), y[part]).backward()
            optimiser.step()
        expected.append(local.a.weight.detach())
    assert torch.allclose(final.a.weight, (expected[0] + expected[1]) / 2, rtol=1e-5, atol=1e-7)


def test_dropout_is_active_in_training_keyed_and_off_in_evaluation(digits):
    def model():
        torch.manual_seed(1)
        return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))

    a = run(digits, model=model()).vector
    torch.manual_seed(99)  # the global state is irrelevant
    assert torch.equal(run(digits, model=model()).vector, a)
    without = model()
    without[2].p = 0.0
    assert not torch.equal(run(digits, model=without).vector, a)
    result = run(digits, model=model())
    X, y = digits.test
    assert result.history[-1]["test_accuracy"] == (result.model().eval()(X).argmax(1) == y).double().mean().item()


@pytest.mark.parametrize("name", ["scaffold", "fedagrac"])
def test_the_orientation_is_exact_with_dropout_and_partial_participation(digits, name):
    """The gradient of a new client at x_1 equals the one that the start summed, with the same dropout."""

    class Check(fg.Callback):
        def on_round(self, run, record):
            every = np.arange(run.federation.num_clients)
            seen = every[~np.isin(every, run.table.unseen(every))]
            rest = run.table.unseen(every)
            rows = run.table.rows(seen)
            v = rows["v"] if "v" in rows else rows["nu"]
            omega = run.federation.weights
            total = (torch.from_numpy(omega[seen])[:, None] * v.double()).sum(0)
            if len(rest):
                absent = run.fleet.engine.gradients(run.state["x1"], rest, 0).double()
                total += (torch.from_numpy(omega[rest])[:, None] * absent).sum(0)
            assert torch.allclose(run.state["nu"], total, rtol=1e-4, atol=1e-6)

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5), nn.Linear(16, 10))
    algorithm = fg.algorithm(name, lr=0.05, init="full")
    run(digits, algorithm, model=model, participation=2, rounds=6, callbacks=[Check()])


def test_float64_everywhere_when_the_model_is(digits):
    model = logistic().double()
    result = run(digits, model=model)
    assert result.vector.dtype == torch.float64
    assert run(digits, dtype=torch.float64).vector.dtype == torch.float64


def test_embeddings_keep_integer_inputs():
    class Bag(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding = nn.Embedding(10, 4)
            self.out = nn.Linear(4, 2)

        def forward(self, tokens):
            return self.out(self.embedding(tokens).mean(1))

    tokens = torch.randint(0, 10, (12, 5))
    fed = fg.Federation.from_arrays([(tokens, torch.randint(0, 2, (12,)))])
    result = fg.simulate(
        Bag(), fed, fg.FedaGrac(lr=0.1), rounds=2, steps=fg.Constant(2), batch_size=4, device="cpu"
    )
    assert result.status == "finished"


def test_an_optimiser_loop_gives_the_same_minibatch_run(digits):
    """FedAvg equals torch.optim.SGD on the same batches."""
    from fedagrac.data.batches import batch_positions

    result = run(digits, rounds=2, batch_size=8, seed=5)
    x = logistic()
    for t in range(2):
        local = []
        for i in range(6):
            import copy

            model = copy.deepcopy(x)
            optimiser = torch.optim.SGD(model.parameters(), lr=0.1)
            samples = digits.samples_of(i)
            for positions in batch_positions(len(samples), 2 + 3 * i, 8, "replacement", 5, t, i):
                batch = samples[positions]
                optimiser.zero_grad()
                nn.functional.cross_entropy(model(digits.inputs[batch]), digits.targets[batch]).backward()
                optimiser.step()
            local.append(model.state_dict())
        x.load_state_dict({k: sum(w * s[k] for w, s in zip(digits.weights, local, strict=True)) for k in local[0]})
    expected = torch.cat([p.detach().reshape(-1) for p in x.parameters()])
    assert torch.allclose(result.vector, expected, rtol=1e-5, atol=1e-7)


# bad input


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 0}, "rounds"),
        ({"rounds": 1.5}, "rounds"),
        ({"batch_size": 0}, "batch_size"),
        ({"steps": 10.0}, "steps.*StepSchedule"),
        ({"steps": fg.Explicit([[1, 2]])}, "one for each of 6 clients"),
        ({"sampling": "epoch"}, "sampling"),
        ({"weight_decay": -1}, "weight_decay"),
        ({"seed": -1}, "seed"),
        ({"engine": "serail"}, "did you mean 'serial'"),
        ({"compile": "yes"}, "compile"),
        ({"engine": "serial", "compile": True}, "compile"),
        ({"device": "cuda"}, "CUDA devices are usable"),
        ({"device": "tpu"}, "device"),
        ({"precision": "tf32"}, "needs a GPU"),
        ({"precision": "b16"}, "did you mean 'bf16'"),
        ({"dtype": torch.float16}, "float32 or torch.float64"),
        ({"eval_every": 0}, "eval_every"),
        ({"participation": 7}, "at most the number of clients, 6"),
        ({"participation": 0.0}, "participation"),
        ({"metrics": {"round": len}}, "no field of the history"),
        ({"metrics": {"m": 3}}, "metrics.m"),
        ({"callbacks": [object()]}, "on_start"),
        ({"loss": lambda o, t: o}, "scalar"),
        ({"loss": nn.CrossEntropyLoss(reduction="none")}, "scalar"),
        ({"loss": nn.functional.mse_loss}, "it said"),
        ({"model": nn.Linear(3, 10)}, "inputs of shape"),
        ({"model": nn.Linear(64, 5)}, "labels from 0 to 4"),
        ({"model": nn.Sequential(nn.Linear(64, 10), nn.BatchNorm1d(10)), "batch_size": 1}, "more than 1 value"),
        ({"model": nn.LazyLinear(10)}, "lazy"),
        ({"model": nn.Flatten()}, "trainable"),
        ({"model": 3}, "torch.nn.Module"),
    ],
)
@pytest.mark.filterwarnings("ignore:Using a target size", "ignore:Lazy modules")
def test_bad_arguments_are_refused_before_any_work(digits, options, message):
    if options.get("device") == "cuda" and torch.cuda.is_available():
        pytest.skip("a GPU is usable here")
    with pytest.raises(fg.InputError, match=message):
        run(digits, **options)


def test_wrong_kinds_of_arguments_are_named(digits):
    with pytest.raises(fg.InputError, match=r"algorithm.*FedaGrac"):
        run(digits, "fedavg")
    with pytest.raises(fg.InputError, match="federation"):
        run([1, 2], fg.FedAvg(lr=0.1))


def test_labels_out_of_range_and_float_targets_are_explained():
    negative = fg.Federation.from_arrays([([[1.0], [2.0]], [-1, 1])])
    with pytest.raises(fg.InputError, match="labels from -1 to 1"):
        run(negative, model=nn.Linear(1, 2), steps=fg.Constant(1))
    floating = fg.Federation.from_arrays([([[1.0], [2.0]], [0.5, 1.0])])
    with pytest.raises(fg.InputError, match="mse_loss"):
        run(floating, model=nn.Linear(1, 2), steps=fg.Constant(1))


@pytest.mark.parametrize("stop", [{"accuracy": 68}, {"accuracy": 0}, {"sim_time": -1}, {"bytes": 1.5}])
def test_bad_stop_rules_are_refused(stop):
    with pytest.raises(fg.InputError, match=r"stop\."):
        fg.Stop(**stop)


def test_citations_name_what_was_used(digits):
    text = run(digits, fg.Scaffold(lr=0.1)).citations()
    assert "karimireddy2020scaffold" in text
    assert "alpaydin1998digits" in text
    assert text.count("@") == 3
    assert run(digits, fg.FedaGrac(lr=0.1)).citations().count("wu2023fedagrac") == 1
    around = run(digits, fg.FedAdam(lr=0.1, server_lr=0.01, inner=fg.FedNova(lr=0.1))).citations()
    assert all(key in around for key in ("reddi2021fedopt", "wang2020fednova"))


def test_quadratics_with_minibatches_follow_numpy():
    """SCAFFOLD with minibatches equals its equations in NumPy on the same batches."""
    from fedagrac.data.batches import batch_positions

    q = quadratics()
    result = fg.simulate(
        q.module(), q.federation(), fg.Scaffold(lr=0.02), rounds=3, steps=fg.Explicit([K]), batch_size=4,
        loss=half_square, sampling="shuffle", seed=11, device="cpu",
    )  # fmt: skip
    x, nu, nu_i = q.start(), np.zeros(5), [np.zeros(5)] * 6
    for t in range(3):
        models, means = [], []
        for i in range(6):
            y, total = x.copy(), np.zeros(5)
            for positions in batch_positions(len(q.b[i]), K[i], 4, "shuffle", 11, t, i):
                A, b = q.A[i][positions], q.b[i][positions]
                g = A.T @ (A @ y - b) / len(b)
                total += g
                y = y - 0.02 * (g + nu - nu_i[i])
            models.append(y)
            means.append(total / K[i])
        x, nu, nu_i = q.omega @ models, q.omega @ means, means
    assert np.linalg.norm(result.vector.numpy() - x) <= 1e-10 * np.linalg.norm(x)
