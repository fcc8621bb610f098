"""How many of torch's threads a run uses."""

import os
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.callbacks import Checkpoints
from fedagrac.engines import Workload, choice, choose_engine, choose_threads, threads
from fedagrac.models import VectorModel
from fedagrac.rounds.record import EXAMPLE
from fedagrac.storage.checkpoints import read_checkpoint

FEW, MANY = choice.MEASURE_FROM - 1, choice.MEASURE_FROM


def workload(model=None, batch_size=20):
    fed = fg.Federation.load("digits", clients=6, seed=0)
    return Workload.of(VectorModel(model or nn.Linear(64, 10)), fed, None, batch_size, "replacement", 0.0, 0)


@pytest.fixture
def free(monkeypatch):
    """Torch has two threads that the user did not set."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    monkeypatch.setattr(threads, "set_by_user", lambda number: False)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def timed(monkeypatch, free):
    """Steps take the microseconds that a test says for an engine and a number of threads."""
    times = {}

    def seconds(self, engine, m, steps):
        return times[engine.name, torch.get_num_threads()] * m * steps / 1e6

    monkeypatch.setattr(choice.Measurements, "seconds", seconds)
    return times


@pytest.mark.parametrize(
    ("one", "two", "expected"),
    [
        ((100, 50), (100, 50), 1),  # nothing gained
        ((100, 50), (700, 350), 1),  # a busy machine
        ((100, 50), (100, 44), 1),  # 50 / 44 = 1.14
        ((100, 50), (100, 43), 2),  # 50 / 43 = 1.16
        ((100, 50), (40, 90), 2),  # serial on two threads is faster than lanes on one
        ((40, 90), (100, 38), 1),
    ],
)
def test_one_thread_runs_a_model_unless_two_are_clearly_faster(timed, one, two, expected):
    timed.update(zip([("serial", 1), ("lanes", 1), ("serial", 2), ("lanes", 2)], one + two, strict=True))
    number, why = choose_threads(workload(large()), "auto", "auto", 6, MANY)
    assert number == expected
    assert why == f"threads by measurement: 1 thread {min(one)} us, 2 threads {min(two)} us"
    assert torch.get_num_threads() == 2


def test_the_engine_is_measured_with_the_chosen_threads(timed):
    timed.update({("serial", 1): 40, ("lanes", 1): 50, ("serial", 2): 60, ("lanes", 2): 45})
    seen = []

    class Keep(fg.Callback):
        def on_start(self, run):
            seen.append((run.fleet.engine.name, torch.get_num_threads(), run.fleet.engine_reason))

        def on_round(self, run, record):
            run.stop("seen")

    fed = fg.Federation.load("digits", clients=6, seed=0)
    fg.simulate(
        large(), fed, fg.FedAvg(lr=0.1), rounds=4000, steps=1, batch_size=20, device="cpu",
        callbacks=[Keep()],
    )  # fmt: skip
    ((engine, number, why),) = seen
    assert (engine, number) == ("serial", 1)
    assert why == (
        "by measurement: serial 40 us, lanes 50 us; threads by measurement: 1 thread 40 us, 2 threads 45 us"
    )
    assert torch.get_num_threads() == 2


def test_a_measurement_of_threads_is_kept_and_not_repeated(timed):
    timed.update({("serial", 1): 100, ("lanes", 1): 50, ("serial", 2): 100, ("lanes", 2): 20})
    assert choose_threads(workload(large()), "auto", "auto", 6, MANY)[0] == 2
    timed.clear()
    assert choose_threads(workload(large()), "auto", "auto", 6, MANY)[0] == 2
    assert (
        choose_engine(workload(large()), "auto", False, 6, MANY)[1] == "by measurement: lanes 20 us, serial 100 us"
    )
    assert sorted(kept["threads"] for kept in choice.measured_choices()) == [1, 2]


def test_threads_are_measured_again_after_a_measurement_on_a_busy_machine(timed):
    timed.update({("serial", 1): 100, ("lanes", 1): 50, ("serial", 2): 700, ("lanes", 2): 350})
    assert choose_threads(workload(large()), "auto", "auto", 6, MANY)[0] == 1
    timed.update({("serial", 2): 60, ("lanes", 2): 30})
    assert choose_threads(workload(large()), "auto", "auto", 6, MANY)[0] == 2


def large():
    return nn.Sequential(nn.Linear(64, 2000), nn.ReLU(), nn.Linear(2000, 10))


@pytest.mark.parametrize(
    ("model", "engine", "compile", "lanes", "client_steps", "expected"),
    [
        (None, "auto", "auto", 6, FEW, 1),
        (None, "auto", "auto", 1, MANY, 1),
        (None, "auto", "auto", 6, MANY, 1),
        (None, "lanes", False, 6, MANY, 1),  # as asked: nothing is measured
        (None, "serial", "auto", 6, MANY, 1),
        (None, "auto", "auto", 769, FEW, 1),  # 650 parameters x 20 samples x 769 = 9,997,000
        (None, "auto", "auto", 770, FEW, 2),
        (large, "auto", "auto", 6, FEW, 2),
        (large, "serial", "auto", 6, MANY, 2),
    ],
)
def test_small_models_take_one_thread_without_a_measurement(
    free, model, engine, compile, lanes, client_steps, expected
):
    number, why = choose_threads(workload(model and model()), engine, compile, lanes, client_steps)
    assert (number, why) == (expected, "1 thread: the model is small" if expected == 1 else "")


def test_a_module_that_cannot_be_measured_keeps_the_threads_of_torch(free, monkeypatch):
    monkeypatch.setattr(choice.Measurements, "seconds", lambda *_: pytest.fail("measured"))
    monkeypatch.setattr(choice.Measurements, "fastest", lambda *_: float("inf"))
    assert choose_threads(workload(large()), "auto", "auto", 6, MANY) == (2, "")


@pytest.mark.parametrize(
    ("variable", "at_import", "cores", "expected"),
    [
        (None, 8, 8, False),
        (None, 8, 16, False),  # two hardware threads a core
        (None, 6, 6, True),  # torch had six threads at the import and has eight now
        (None, 8, 24, True),  # set before the import
        ("OMP_NUM_THREADS", 8, 8, True),
        ("MKL_NUM_THREADS", 8, 8, True),
    ],
)
def test_a_number_that_the_user_set_is_recognized(monkeypatch, variable, at_import, cores, expected):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    if variable is not None:
        monkeypatch.setenv(variable, "8")
    monkeypatch.setattr(threads, "AT_IMPORT", at_import)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(cores)), raising=False)
    assert threads.set_by_user(8) == expected


def test_a_number_that_the_user_set_is_kept():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert choose_threads(workload(), "auto", "auto", 6, FEW) == (3, "")
    finally:
        torch.set_num_threads(before)


def test_a_checkpoint_records_the_chosen_threads_and_a_resumed_run_takes_them(free, monkeypatch, tmp_path):
    fed = fg.Federation.load("digits", clients=6, seed=0)
    seen = []

    class Keep(fg.Callback):
        def on_round(self, run, record):
            seen.append(torch.get_num_threads())

    def run(rounds, **options):
        torch.manual_seed(0)
        return fg.simulate(
            nn.Linear(64, 10), fed, fg.FedaGrac(lr=0.1), rounds=rounds, steps=3, batch_size=20, device="cpu",
            **options,
        ).vector  # fmt: skip

    whole = run(4)
    run(3, callbacks=[Keep(), Checkpoints(tmp_path, every=2)])
    assert (seen, torch.get_num_threads()) == ([1, 1, 1], 2)
    stored = read_checkpoint(tmp_path)
    assert stored.round == 2
    stored = replace(stored, history=[{**EXAMPLE, "round": round, "wall_time": 1.0} for round in (1, 2)])
    assert stored.facts.engine.threads == 1
    monkeypatch.setattr(threads, "set_by_user", lambda number: True)  # by itself the run would keep two
    seen.clear()
    assert torch.equal(run(4, resume=stored, callbacks=[Keep()]), whole)
    assert (seen, torch.get_num_threads()) == ([1, 1], 2)


def test_the_threads_are_restored_after_an_error(free):
    class Stop(fg.Callback):
        def on_round(self, run, record):
            raise ZeroDivisionError(torch.get_num_threads())

    fed = fg.Federation.load("digits", clients=6, seed=0)
    with pytest.raises(ZeroDivisionError, match="1"):
        fg.simulate(nn.Linear(64, 10), fed, fg.FedAvg(lr=0.1), rounds=1, steps=1, device="cpu", callbacks=[Stop()])
    assert torch.get_num_threads() == 2


@pytest.mark.skipif((os.cpu_count() or 1) < 2, reason="torch has one thread on one core")
@pytest.mark.parametrize("asked", [None, "2"])
def test_a_new_process_takes_one_thread_for_a_small_model_unless_the_environment_sets_more(asked):
    program = """
import torch, fedagrac as fg
class Keep(fg.Callback):
    def on_round(self, run, record):
        print(run.fleet.describe()["threads"])
fed = fg.Federation.load("digits", clients=6, seed=0)
fg.simulate(torch.nn.Linear(64, 10), fed, fg.FedAvg(lr=0.1), rounds=1, steps=1, device="cpu", callbacks=[Keep()])
"""
    environment = {name: value for name, value in os.environ.items() if name not in threads.VARIABLES}
    if asked is not None:
        environment["OMP_NUM_THREADS"] = asked
    output = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=True
    )
    assert output.stdout.split() == [asked or "1"]
