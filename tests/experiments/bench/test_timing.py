"""Benchmarks run and count what they claim. No test depends on a time."""

import itertools
import json
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from fedagrac.cli.app import main
from fedagrac.experiments import bench
from fedagrac.experiments.bench import timing
from fedagrac.experiments.bench.timing import Bench, engine_times
from fedagrac.heterogeneity import Constant

SMALL = replace(bench.CASES["lr-a9a"], clients=4, samples=40, steps=Constant(3))


def test_one_workload_from_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(bench.CASES, "lr-a9a", SMALL)
    options = ["--engines", "serial,lanes", "--budget", "0.1", "--out", str(tmp_path), "--json"]
    with pytest.raises(SystemExit) as done:
        main(["bench", "lr-a9a", *options])
    assert done.value.code == 0
    printed = json.loads(capsys.readouterr().out)
    assert [row["engine"] for row in printed["rows"]] == ["serial", "lanes"]
    for row in printed["rows"]:
        assert row["us"] > 0
        assert row["plain_us"] > 0
        assert row["rounds"] >= 3
    assert json.loads((tmp_path / "bench.json").read_text())["rows"] == printed["rows"]


def test_the_pfl_workload_is_the_public_one():
    case = bench.CASES["pfl"]
    assert sum(p.numel() for p in case.model().parameters()) == 1_626_442
    assert (case.clients, case.cohort, case.samples, case.batch, case.lr, case.client_steps()) == (
        1000,
        50,
        50,
        10,
        0.1,
        250,
    )


SIZES = {  # parameters, samples of a step, lanes of a round
    "char-gpt": (826_714, 16, 20),
    "char-lstm": (819_920, 16, 20),
    "resnet18": (11_173_962, 25, 20),
    "resnet20": (269_722, 25, 20),
    "alexnet": (7_212_874, 25, 20),
    "vgg19": (20_554_826, 25, 20),
    "cnn": (21_840, 25, 20),
    "fl-simulator": (11_181_642, 50, 10),
    "fl-simulator-scaffold": (11_181_642, 50, 10),
    "blazefl-cnn": (62_006, 50, 100),
    "blazefl-resnet18": (11_181_642, 50, 100),
}


@pytest.mark.parametrize("name", SIZES)
def test_workloads_have_the_size_that_they_are_named_for(name):
    case = bench.CASES[name]
    assert (sum(p.numel() for p in case.model().parameters()), case.batch, case.lanes()) == SIZES[name]


def test_the_workload_of_fl_simulator_is_five_epochs_of_ten_clients():
    case = bench.CASES["fl-simulator"]
    assert case.client_steps() == 10 * 5 * (500 // 50)
    assert case.make_algorithm().local.clip == 10.0


def test_a_gpu_times_whole_rounds_and_a_cpu_short_ones():
    case = bench.CASES["vgg19"]
    assert case.on("cuda") is case
    assert (case.on("cpu").clients, case.on("cpu").client_steps()) == (2, 20)
    assert ("vgg19", "compiled lanes") not in bench.planned(["vgg19"], ["serial", "compiled lanes"], "cpu")


def test_the_plain_loop_makes_as_many_steps_per_client_as_the_timed_round(monkeypatch):
    asked = []

    def no_steps(case, device, per_client):
        asked.append((case.clients, per_client))
        return itertools.repeat(None)

    monkeypatch.setattr(timing, "plain_steps", no_steps)
    timing.plain_loop(bench.CASES["vgg19"], "cpu", seconds=0.0)
    assert asked == [(2, 10)]


def test_auto_is_a_row_with_what_it_takes_and_how_far_it_is_behind(monkeypatch):
    monkeypatch.setitem(bench.CASES, "lr-a9a", SMALL)
    rows = list(bench.compare(["lr-a9a"], ["serial", "lanes", "auto"], Bench("cpu", budget=0.05)))
    us = {row["engine"]: row["us"] for row in rows}
    auto = rows[-1]
    assert [row["engine"] for row in rows] == ["serial", "lanes", "auto"]
    assert auto["takes"] in us
    assert auto["behind"] == pytest.approx(auto["us"] / min(us["serial"], auto["plain_us"]) - 1)
    assert all("behind" not in row for row in rows[:-1])


def test_engines_are_timed_with_the_threads_that_they_are_given():
    threads = torch.get_num_threads()
    row = engine_times(SMALL, "serial", threads + 1, Bench("cpu", budget=0.01))
    assert row["threads"] == threads + 1
    assert torch.get_num_threads() == threads


def test_a_small_model_is_timed_with_the_one_thread_that_a_run_takes():
    code = (
        "import os; [os.environ.pop(v, None) for v in ('OMP_NUM_THREADS', 'MKL_NUM_THREADS')];"
        "import torch; torch.set_num_threads(len(os.sched_getaffinity(0)));"
        "from dataclasses import replace; from fedagrac.experiments.bench import CASES, Bench;"
        "from fedagrac.experiments.bench.timing import run_threads; from fedagrac.heterogeneity import Constant;"
        "case = replace(CASES['lr-a9a'], clients=4, samples=40, steps=Constant(3));"  # too short to be measured
        "print(run_threads(case, Bench('cpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "1"


def test_the_module_runs_without_the_libraries_of_the_command_line(tmp_path):
    code = (
        "import sys; sys.modules.update({name: None for name in ('typer', 'rich', 'pydantic', 'matplotlib')});"
        "from fedagrac.experiments.bench.__main__ import main;"
        f"main(['--only', 'lr-a9a', '--engines', 'lanes', '--budget', '0.01', '--json', {str(tmp_path / 'b')!r}])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout)["engine"] == "lanes"
    assert json.loads((tmp_path / "b").read_text())["rows"][0]["workload"] == "lr-a9a"


def test_the_spread_of_steps():
    points = bench.SWEEPS["spread"][1]
    K = points["one 100 x faster"].steps.counts(0, 20, 0)
    assert K.max() == 100 * K.min()
    assert list(bench.SWEEPS["clients"][1])[0::6] == ["10", "10000"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["lr"],
        ["--parts", "speed"],
        ["--engines", "lane"],
        ["--budget", "0"],
        ["--precision", "half"],
        ["--precision", "tf32", "--device", "cpu"],
        ["--device", "tpu"],
    ],
)
def test_wrong_names_are_refused(arguments, capsys):
    with pytest.raises(SystemExit) as done:
        main(["bench", *arguments])
    assert done.value.code == 2
    assert "expected" in capsys.readouterr().err
