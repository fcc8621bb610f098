"""Reading run folders: the content of a stored run, and the order of runs."""

import json

import numpy as np
import pytest

import fedagrac as fg
from fedagrac.data.describe import describe
from fedagrac.errors import InputError
from fedagrac.storage.runs import find_runs, read_run
from run_folders import record, write_run


def test_a_run_is_read_as_it_was_written(tmp_path):
    records = [record(1, 0.5, top5=0.9), record(2, None)]
    folder = write_run(tmp_path / "run", records, "scaffold", label="mine", lr=0.1, seed=3, stop={"accuracy": 0.7})
    run = read_run(folder)
    assert run.history == records
    assert (run.name, run.algorithm, run.label, run.seed, run.target) == ("written", "scaffold", "mine", 3, 0.7)
    assert run.algorithm_settings == {"name": "scaffold", "label": "mine", "lr": 0.1}
    assert (run.status, run.reason) == ("finished", "all rounds done")
    assert run.environment == {"torch": "2.13.0", "device": "cpu"}
    assert run.federation is None


def test_a_run_without_a_status_is_unfinished_and_loses_its_incomplete_line(tmp_path):
    folder = write_run(tmp_path / "run", [record(1, 0.5)], status=None)
    with (folder / "history.jsonl").open("a") as file:
        file.write('{"round": 2, "test_acc')
    run = read_run(folder)
    assert [r["round"] for r in run.history] == [1]
    assert run.status == "unfinished"
    assert "status.json is missing" in run.reason


def test_runs_come_in_the_order_of_the_experiment_file_and_each_once(tmp_path):
    for name in ("fedavg", "fednova", "scaffold"):
        write_run(tmp_path / name, [record(1, 0.5)], name)
    entries = "".join(f'[[algorithm]]\nname = "{name}"\n' for name in ("scaffold", "fedavg"))
    (tmp_path / "experiment.toml").write_text(f'name = "mine"\n{entries}')
    runs = find_runs([tmp_path, tmp_path / "fedavg"])
    assert [run.algorithm for run in runs] == ["scaffold", "fedavg", "fednova"]


def test_federation_lists_must_fit_together(tmp_path):
    facts = vars(describe(fg.Federation.from_arrays([([[0.0]], [0])]), np.array([1])))
    folder = write_run(tmp_path / "run", [record(1, 0.5)])
    for changed in ({"steps": [1, 2]}, {"labels": [[1], [2]]}, {"shown": [0, 1], "labels": None}):
        (folder / "federation.json").write_text(json.dumps({**facts, **changed}))
        with pytest.raises(InputError, match="as many"):
            read_run(folder)
