"""Your own parts: every program of docs/extending.md runs by itself and does what the page says."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.engines import LanesEngine

PAGE = Path(__file__).parents[1] / "docs" / "extending.md"
SECTIONS = dict(re.findall(r"^## (.*?)$.*?^```python\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL))


@pytest.fixture
def program(tmp_path, monkeypatch):
    """Return a function that runs a section's program and returns its names."""
    monkeypatch.chdir(tmp_path)

    def run(section):
        script = tmp_path / "program.py"
        script.write_text(SECTIONS[section])
        return runpy.run_path(str(script))

    return run


def test_every_program_of_the_page_is_tested_and_short():
    named = ["An algorithm", "A local optimizer", "A step schedule", "A callback", "A partition", "A fleet"]
    assert list(SECTIONS) == named
    assert PAGE.read_text().count("```python\n") == len(named)
    assert all(len(code.splitlines()) <= 42 for code in SECTIONS.values())


def test_an_own_algorithm_is_fedavg_where_everyone_takes_part_and_remembers_the_absent(program):
    names = program("An algorithm")
    assert names["result"].status == "finished"
    model, fed = names["model"], names["fed"]
    options = {"rounds": 5, "steps": fg.Linear(2, 4)}
    ours = fg.simulate(model, fed, names["Remembered"](lr=0.1), **options)
    theirs = fg.simulate(model, fed, fg.FedAvg(lr=0.1), **options)
    torch.testing.assert_close(ours.vector, theirs.vector, rtol=1e-4, atol=1e-5)
    without_memory = fg.simulate(model, fed, fg.FedAvg(lr=0.1), participation=5, **options)
    assert not torch.allclose(names["result"].vector, without_memory.vector, rtol=1e-2)


def test_an_own_local_optimizer_makes_its_steps_on_every_engine(program):
    names = program("A local optimizer")
    assert names["result"].status == "finished"
    fed = fg.Federation.from_arrays([([[0.0]] * 4, [[3.0]] * 4), ([[0.0]] * 4, [[-1.0]] * 4)])
    point = torch.nn.Linear(1, 1).double()
    torch.nn.init.zeros_(point.bias)
    options = {
        "rounds": 1,
        "steps": fg.Explicit([[1, 3]]),
        "batch_size": None,
        "loss": torch.nn.functional.mse_loss,
    }
    for engine in ("serial", LanesEngine, lambda w: LanesEngine(w, fixed=True)):
        algorithm = fg.FedAvg(lr=0.1, local=names["Lion"]())
        result = fg.simulate(point, fed, algorithm, engine=engine, **options)
        bias = result.vector[1].item()  # one step of 0.1 up, three steps of 0.1 down
        assert bias == pytest.approx((0.1 - 0.3) / 2, abs=1e-12)


def test_an_own_schedule_decides_the_steps(program):
    names = program("A step schedule")
    counts = np.array([names["steps"].counts(t, 10, seed=0) for t in range(5)])
    assert set(counts.flat) == {4, 40}
    assert names["result"].history.column("steps_mean") == pytest.approx(counts.mean(axis=1).tolist())


def test_an_own_callback_sees_every_round_and_ends_the_run(program, capsys):
    names = program("A callback")
    assert len(names["watch"].seen) == 5
    assert "finished - all 5 rounds done" in capsys.readouterr().out
    strict = names["Imbalance"](ratio=1.0)
    result = fg.simulate(names["model"], names["fed"], fg.FedAvg(lr=0.1), rounds=5, callbacks=[strict])
    assert (result.status, len(result.history)) == ("stopped", 1)


def test_an_own_partition_splits_the_data(program):
    fed = program("A partition")["fed"]
    assert fed.sizes.sum() == 1437
    assert all(len(set(fed.targets[fed.samples_of(i)].tolist())) <= 3 for i in range(10))


def test_an_own_fleet_drops_late_replies(program):
    for result in program("A fleet")["results"]:
        last = result.history[-1]
        assert last["dropped"] == [5, 6, 7, 8, 9]  # K_i = 2 + 4 i, 1 ms a step, 20 ms
        assert (last["asked"], last["clients"]) == (10, 5)
