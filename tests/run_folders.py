"""Run folders: written by hand, so that every number in a report is known, or by the command."""

import json

import pytest
import tomli_w

from fedagrac.cli.app import main


def small_experiment(rounds, clients, steps, algorithms):
    """Return the table of an experiment that takes a second."""
    return {
        "name": "small",
        "rounds": rounds,
        "lr": 0.1,
        "target": 0.2,
        "data": {"clients": clients, "partition": {"kind": "shards", "classes": 3}},
        "steps": steps,
        "algorithm": [{"name": name} for name in algorithms],
    }


def run_small(folder, experiment):
    """Run an experiment by the command; return its folder."""
    file = folder / "small.toml"
    file.write_text(tomli_w.dumps(experiment))
    with pytest.raises(SystemExit) as stop:
        main(["run", str(file), "--out", str(folder / "mine")])
    assert not stop.value.code
    return folder / "mine"


def record(number, accuracy=None, test_loss=None, train_loss=1.0, **more):
    """Return one line of a history: every round costs 1,000 bytes and half a simulated second."""
    return {
        "round": number,
        "test_accuracy": accuracy,
        "test_loss": test_loss,
        "train_loss": train_loss,
        "clients": 2,
        "fast": 1,
        "steps_mean": 3.5,
        "bytes_up": 400,
        "bytes_down": 600,
        "bytes_total": 1000 * number,
        "sim_time": 0.5 * number,
        "wall_time": 0.1 * number,
        **more,
    }


def write_run(folder, records, algorithm="fedavg", status="finished", reason="all rounds done", **settings):
    """Write a run folder and return it; `label`, `lr` and `inner` go to the algorithm."""
    folder.mkdir(parents=True, exist_ok=True)
    entry = {"name": algorithm, **{key: settings.pop(key) for key in ("label", "lr", "inner") if key in settings}}
    experiment = {"name": "written", "seed": 0, **settings, "algorithm": [entry]}
    (folder / "experiment.toml").write_text(tomli_w.dumps(experiment))
    (folder / "environment.json").write_text(json.dumps({"torch": "2.13.0", "device": "cpu"}))
    (folder / "history.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    if status is not None:
        (folder / "status.json").write_text(json.dumps({"status": status, "reason": reason}))
    return folder
