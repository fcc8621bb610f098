"""Which engine a run takes, and why."""

import hashlib
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.engines import Workload, choice, choose_engine, measured_choices
from fedagrac.errors import InputError
from fedagrac.models import VectorModel
from fedagrac.rounds.fleet import Simulated
from fedagrac.rounds.setup import Setup


@pytest.mark.parametrize(
    ("model", "clients", "batch_size", "participation", "expected"),
    [
        (lambda: nn.Linear(64, 10), 6, 20, None, "lanes"),
        (lambda: nn.Linear(64, 10), 3, 20, None, "serial"),  # nothing to batch
        (lambda: nn.Linear(64, 10), 50, 20, 2, "serial"),
        (lambda: nn.Linear(64, 10), 6, None, None, "serial"),  # full batches of six different sizes
        (
            lambda: nn.Sequential(nn.Unflatten(1, (1, 8, 8)), nn.Conv2d(1, 10, 8), nn.Flatten()),
            6,
            20,
            None,
            "serial",
        ),
        (lambda: nn.Sequential(nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 10)), 6, 20, None, "serial"),
        # 80,000 parameters: arithmetic outweighs the calls that four lanes share, not those of 20
        (lambda: nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10)), 4, 20, None, "serial"),
        (lambda: nn.Sequential(nn.Linear(64, 1000), nn.ReLU(), nn.Linear(1000, 10)), 20, 20, None, "lanes"),
        # few parameters, each used at 64 places: arithmetic outweighs the calls
        (
            lambda: nn.Sequential(
                nn.Unflatten(1, (64, 1)),
                nn.Linear(1, 200),
                nn.ReLU(),
                nn.Linear(200, 200),
                nn.Flatten(),
                nn.AvgPool1d(1280),
                nn.Linear(10, 10),
            ),
            20,
            20,
            None,
            "serial",
        ),
    ],
)
def test_auto_takes_the_engine_that_the_measurements_favour(model, clients, batch_size, participation, expected):
    fed = fg.Federation.load("digits", clients=clients, partition=fg.Dirichlet(0.5), seed=0)

    class Keep(fg.Callback):
        def on_start(self, run):
            self.engine = run.fleet.engine.name

    keep = Keep()
    fg.simulate(
        model(), fed, fg.FedAvg(lr=0.1), rounds=1, steps=fg.Constant(1), batch_size=batch_size,
        participation=participation, device="cpu", callbacks=[keep],
    )  # fmt: skip
    assert keep.engine == expected


def workload(model=None, clients=6):
    fed = fg.Federation.load("digits", clients=clients, seed=0)
    return Workload.of(VectorModel(model or nn.Linear(64, 10)), fed, None, 20, "replacement", 0.0, 0)


@pytest.fixture
def timed(monkeypatch):
    """Candidates take the times that a test says; compiling takes ten seconds on a clock of its own."""
    times, measured, now = {}, [], [0.0]

    def make(name):
        def build(w):
            if "compiled" in name:
                now[0] += 10.0
            engine = choice.SerialEngine(w)
            engine.kind = name
            return engine

        return build

    def seconds(self, engine, m, steps):
        measured.append(engine.kind)
        return times[engine.kind] * m * steps / 1e6

    monkeypatch.setattr(choice, "CANDIDATES", {name: make(name) for name in choice.CANDIDATES})
    monkeypatch.setattr(choice.Measurements, "seconds", seconds)
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])
    return times, measured


ALL = ["serial", "lanes", "compiled lanes", "compiled client"]


@pytest.mark.parametrize(
    ("us", "client_steps", "expected"),
    [
        ((100, 10, 1, 50), 1e4, "lanes"),  # too short to measure: the rule for small models
        ((10, 100, 1, 50), 1e5, "serial"),  # 1 s of work: not worth ten of compiling
        ((100, 10, 1, 50), 1e6, "lanes"),  # 10 s
        ((100, 10, 1, 50), 1e8, "compiled lanes"),
        ((2000, 9000, 9000, 1000), 1e6, "compiled client"),
        ((2000, 1000, 1900, 1900), 1e6, "lanes"),
        ((100, 90, 1000, 1), 1e8, "compiled client"),  # so close that both are tried
    ],
)
def test_the_fastest_for_the_whole_run_is_taken(timed, us, client_steps, expected):
    times, measured = timed
    times.update(zip(ALL, us, strict=True))
    engine, why = choose_engine(workload(), "auto", "auto", 6, client_steps)
    assert engine.kind == expected
    assert why.startswith("by rule" if client_steps < choice.MEASURE_FROM else "by measurement")
    long_run = min(us[:2]) * client_steps / 1e6 > choice.COMPILE_FROM
    assert {"compiled lanes", "compiled client"}.isdisjoint(measured) != long_run


def test_only_the_faster_way_is_tried_compiled_where_the_other_is_far_behind(timed):
    times, measured = timed
    times.update(zip(ALL, (2000, 9000, 1, 1000), strict=True))
    assert choose_engine(workload(), "auto", "auto", 6, 1e6)[0].kind == "compiled client"
    assert "compiled lanes" not in measured


def test_steps_are_compared_under_the_same_load(timed, monkeypatch):
    """Compiled lanes take half as long, but while they compile other programs come: all takes thrice as long."""
    times, measured = timed
    times.update(zip(ALL, (1000, 100, 50, 900), strict=True))
    quiet = choice.Measurements.seconds

    def seconds(self, engine, m, steps):
        busy = "compiled lanes" in [*measured, engine.kind]
        return quiet(self, engine, m, steps) * (3 if busy else 1)

    monkeypatch.setattr(choice.Measurements, "seconds", seconds)
    engine, why = choose_engine(workload(), "auto", "auto", 6, 1e8)
    assert engine.kind == "compiled lanes"
    assert why == "by measurement: compiled lanes 150 us, lanes 300 us, serial 1e+03 us"


def test_two_clients_are_timed_as_two(monkeypatch):
    """Their lanes take 0.3 s a step each, serial 0.2 s: the time of a wave belongs to the clients that it has."""
    now = [0.0]

    def slowly(engine, seconds):
        true_run = engine.run

        def run(self, plan, x, clients, round):
            now[0] += seconds * plan.steps.sum()
            return true_run(self, plan, x, clients, round)

        monkeypatch.setattr(engine, "run", run)

    slowly(choice.SerialEngine, 0.2)
    slowly(choice.LanesEngine, 0.3)
    monkeypatch.setattr(choice.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(choice.time, "process_time", lambda: now[0])
    measurements = choice.Measurements(workload(clients=2), 2)
    measurements.fastest(["serial", "lanes"])
    assert {name: row["us"] for name, row in measurements.rows.items()} == {
        "serial": pytest.approx(0.2e6), "lanes": pytest.approx(0.3e6)
    }  # fmt: skip


def convolutions(depth):
    layers = [layer for _ in range(depth) for layer in (nn.Conv2d(4, 4, 3, padding=1), nn.ReLU())]
    return nn.Sequential(nn.Unflatten(1, (4, 4, 4)), *layers, nn.Flatten(), nn.Linear(64, 10))


@pytest.mark.parametrize(("depth", "seconds", "tried"), [(2, 210.0, False), (2, 400.0, True), (60, 400.0, False)])
def test_a_run_does_not_wait_long_for_steps_that_may_not_be_faster(timed, depth, seconds, tried):
    """Compiling takes 20 s and 0.15 s for each operation; at most a tenth of the run is spent on a trial."""
    times, measured = timed
    times.update(zip(ALL, (1000, 9000, 1, 1), strict=True))
    choose_engine(workload(convolutions(depth)), "auto", "auto", 6, seconds * 1000)
    assert ("compiled client" in measured) == tried


def test_the_time_to_compile_grows_with_the_operations_of_a_step():
    shallow, deep = (choice.compile_seconds(workload(convolutions(depth))) for depth in (2, 60))
    assert 20 < shallow < 40 < deep
    assert choice.compile_seconds(workload()) < 40  # five steps of a small model


@pytest.mark.parametrize(
    ("engine", "compile", "possible"),
    [
        ("serial", "auto", ["serial"]),
        ("serial", False, ["serial"]),
        ("lanes", False, ["lanes"]),
        ("lanes", True, ["compiled lanes"]),
        ("lanes", "auto", ["lanes", "compiled lanes"]),
        ("auto", False, ["serial", "lanes"]),
        ("auto", True, ["compiled lanes", "compiled client"]),
        ("auto", "auto", ALL),
    ],
)
def test_what_was_asked_for_is_kept(engine, compile, possible):
    assert choice.candidates(workload(), engine, compile) == possible


@pytest.mark.parametrize(
    ("engine", "compile", "possible"),
    [
        ("auto", "auto", ["serial", "lanes", "compiled lanes"]),
        ("lanes", "auto", ["lanes", "compiled lanes"]),
        ("lanes", False, ["lanes"]),
        ("lanes", True, ["compiled lanes"]),
        ("auto", True, ["compiled lanes"]),
    ],
)
def test_a_gpu_compiles_many_lanes_only(engine, compile, possible):
    on_gpu = SimpleNamespace(model=SimpleNamespace(device=torch.device("cuda")))
    assert choice.candidates(on_gpu, engine, compile) == possible


def test_serial_is_never_compiled():
    with pytest.raises(InputError, match="serial is for reading"):
        choose_engine(workload(), "serial", True, 6, 1.0)


def test_a_measurement_is_kept_and_not_repeated(timed):
    times, measured = timed
    times.update(zip(ALL, (100, 10, 1, 50), strict=True))
    choose_engine(workload(), "auto", "auto", 6, 1e5)
    assert set(measured) == {"serial", "lanes"}
    measured.clear()
    times.update({"serial": 1, "lanes": 1000})
    engine, why = choose_engine(workload(), "auto", "auto", 6, 1e5)
    assert (engine.kind, measured) == ("lanes", [])
    assert "lanes 10 us, serial 100 us" in why
    (kept,) = measured_choices()
    assert (kept["parameters"], kept["lanes"], kept["torch"]) == (650, 6, torch.__version__)
    choose_engine(workload(nn.Linear(64, 10, bias=False)), "auto", "auto", 6, 1e5)  # another model: another file
    assert len(measured_choices()) == 2


def test_other_code_of_the_engines_is_measured_anew(timed, monkeypatch):
    times, measured = timed
    times.update(zip(ALL, (100, 10, 1, 50), strict=True))
    choose_engine(workload(), "auto", "auto", 6, 1e5)
    version, digest = measured_choices()[0]["fedagrac"].split("+")
    sources = sorted(Path(choice.__file__).parent.rglob("*.py"))
    assert (version, digest) == (
        fg.__version__, hashlib.sha256(b"".join(path.read_bytes() for path in sources)).hexdigest()[:10],
    )  # fmt: skip
    measured.clear()
    monkeypatch.setattr(choice, "code_version", lambda: f"{version}+edited")
    times.update({"serial": 1, "lanes": 1000})
    assert choose_engine(workload(), "auto", "auto", 6, 1e5)[0].kind == "serial"
    assert set(measured) == {"serial", "lanes"}


@pytest.mark.parametrize(("algorithm", "corrected"), [(fg.FedAvg(lr=0.1), False), (fg.FedaGrac(lr=0.1), True)])
def test_engines_are_measured_with_the_correction_that_the_algorithm_has(monkeypatch, algorithm, corrected):
    seen = set()

    def run(self, plan, x, clients, round):
        seen.add((plan.correction is not None, round))
        return true_run(self, plan, x, clients, round)

    true_run = choice.SerialEngine.run
    monkeypatch.setattr(choice.SerialEngine, "run", run)
    fed = fg.Federation.load("digits", clients=6, seed=0)
    fleet = Simulated.of(
        nn.Linear(64, 10), fed, Setup(rounds=4000, steps=fg.Constant(1), batch_size=20, device="cpu")
    )
    with fleet.ready(corrected=algorithm.traits.corrects):
        pass
    assert seen == {(corrected, 0)}
    assert [kept["corrected"] for kept in measured_choices()] == [corrected]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"candidates": {"lanes": {"us": "x"}}}', '{"candidates": 3}'])
def test_a_damaged_file_is_measured_again(timed, content):
    times, measured = timed
    times.update(zip(ALL, (100, 10, 1, 50), strict=True))
    choose_engine(workload(), "auto", "auto", 6, 1e5)
    (path,) = choice.measurements_folder().iterdir()
    path.write_text(content)
    measured.clear()
    assert choose_engine(workload(), "auto", "auto", 6, 1e5)[0].kind == "lanes"
    assert measured
    assert json.loads(path.read_text())["candidates"].keys() == {"serial", "lanes"}


def test_a_real_measurement(monkeypatch):
    """Serial and lanes, timed for real; what is chosen is the faster of the two."""
    w = workload(clients=12)
    engine, why = choose_engine(w, "auto", False, 12, 1e5)
    (kept,) = measured_choices()
    us = {name: row["us"] for name, row in kept["candidates"].items()}
    assert us.keys() == {"serial", "lanes"}
    assert engine.name == min(us, key=us.get)
    assert why.startswith("by measurement")
    assert np.isfinite(list(us.values())).all()


def test_measuring_changes_no_number():
    fed = fg.Federation.load("digits", clients=12, seed=0)

    def run(**options):
        torch.manual_seed(0)
        return fg.simulate(
            nn.Linear(64, 10), fed, fg.FedAvg(lr=0.1), rounds=30, steps=fg.Constant(60), device="cpu",
            compile=False, **options,
        ).vector  # fmt: skip

    auto = run()
    assert len(measured_choices()) == 1
    assert any(torch.equal(auto, run(engine=engine)) for engine in ("serial", "lanes"))


def test_a_module_that_lanes_cannot_batch_runs_in_serial_however_long_the_run_is():
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.out = nn.GRU(8, 4, batch_first=True), nn.Linear(4, 10)

        def forward(self, x):
            packed = nn.utils.rnn.pack_padded_sequence(x.reshape(-1, 8, 8), [8] * len(x), batch_first=True)
            return self.out(self.layer(packed)[1][0])

    fed = fg.Federation.load("digits", clients=6, seed=0)
    workload = Workload.of(VectorModel(Packed()), fed, None, 20, "replacement", 0.0, 0)
    engine, reason = choose_engine(workload, "auto", "auto", lanes=6, client_steps=1e9)
    assert engine.name == "serial"
    assert "serial" in reason
