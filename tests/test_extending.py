"""Your own parts: every program of docs/extending.md runs by itself and does what the page says."""

import re
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

import fedagrac as fg
from fedagrac.core.streams import Purpose, stream
from fedagrac.engines import LanesEngine
from quadratics import D, K, Trace, quadratics

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
    named = [
        "An algorithm", "Compressed uploads", "A local optimizer", "A step schedule", "A metric", "A callback",
        "A partition", "A fleet",
    ]  # fmt: skip
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


def test_an_own_algorithm_is_made_by_its_import_path_and_takes_schedules_and_optimizers(
    program, tmp_path, monkeypatch
):
    program("An algorithm")  # in tmp_path, as program.py
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_remembered.py").write_text((tmp_path / "program.py").read_text().split("\nfed = ")[0])
    lr, local = fg.schedule.Exponential(0.1, 0.5), fg.SGD(momentum=0.5)
    ours = fg.algorithm("my_remembered:Remembered", lr=lr, local=local)
    q = quadratics()
    expected = q.simulate(fg.FedAvg(lr=lr, local=local)).vector
    torch.testing.assert_close(q.simulate(ours).vector, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("participation", [None, 3])
def test_compressed_uploads_are_those_of_numpy(program, participation):
    names = program("Compressed uploads")
    assert names["result"].status == "finished"
    assert names["result"].history[-1]["bytes_up"] == 10 * 65 * 4
    assert names["result"].history.last("test_accuracy") > 0.5
    q, k, cohorts = quadratics(), 2, []

    class Follow(Trace):
        def on_round(self, run, record):
            super().on_round(run, record)
            cohorts.append(run.cohort.clients)

    trace = Follow()
    algorithm = names["RandomK"](lr=0.02, k=k)
    result = q.simulate(algorithm, rounds=4, participation=participation, seed=5, callbacks=[trace])
    x = q.start()
    for t, clients in enumerate(cohorts):
        sizes = np.array([len(q.b[i]) for i in clients])
        change = np.zeros(D)
        for i, weight in zip(clients, sizes / sizes.sum(), strict=True):
            x_i = x
            for _ in range(K[i]):
                x_i = x_i - 0.02 * q.gradient(i, x_i)
            kept = stream(5, Purpose.MEMBER, round=t, client=int(i)).permutation(D)[:k]
            change[kept] += weight * D / k * (x - x_i)[kept]
        x = x - change
        assert np.abs(trace.x[t] - x).max() < 1e-10
        assert result.history[t]["bytes_up"] == len(clients) * k * 8  # float64
    whole, plain = (q.simulate(a, rounds=3).vector for a in (names["RandomK"](lr=0.02, k=D), fg.FedAvg(lr=0.02)))
    torch.testing.assert_close(whole, plain, rtol=1e-10, atol=1e-12)


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


def test_an_own_metric_is_a_column_of_the_history(program):
    names = program("A metric")
    column = names["result"].history.column("worst_recall")
    test = names["fed"].test
    output = names["result"].model()(test[0].float())
    recalls = [(output[test[1] == label].argmax(1) == label).float().mean().item() for label in range(10)]
    assert column[-1] == pytest.approx(min(recalls))
    assert len(column) == 5
    assert names["worst_recall"](torch.eye(3)[[0, 0, 1, 2]], torch.tensor([0, 1, 1, 2])).item() == 0.5


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
