"""Checkpoints: a resumed run equals an uninterrupted run, bit for bit."""

import json
import logging
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.callbacks import Checkpoints
from fedagrac.cli.app import main
from fedagrac.engines import EngineRecord
from fedagrac.engines.ranks import ALONE, Ranks
from fedagrac.experiments.run import differences
from fedagrac.storage.checkpoints import (
    Checkpoint,
    CheckpointError,
    Facts,
    check_fits,
    read_checkpoint,
    write_checkpoint,
)
from fedagrac.storage.clients import ClientTable
from fedagrac.storage.run_folder import RunFolder, read_history


def run(name, rounds=7, **options):
    fed = fg.Federation.load("digits", clients=6, partition=fg.Dirichlet(0.3))
    model = fg.models.build("logistic", features=64, classes=10)
    settings = {"steps": fg.Gaussian(8, 9, mode="random"), "batch_size": 10, **options}
    return fg.simulate(model, fed, fg.algorithm(name, lr=0.1), rounds=rounds, **settings)


@pytest.mark.parametrize("options", [{}, {"participation": 3}, {"sampling": "shuffle", "engine": "serial"}])
@pytest.mark.parametrize("name", sorted(REGISTRY))
def test_a_resumed_run_equals_an_uninterrupted_run(name, options, tmp_path):
    whole = run(name, callbacks=[Checkpoints(tmp_path, every=3)], **options)
    stored = read_checkpoint(tmp_path)
    assert stored.round == 6
    again = run(name, resume=replace(stored, history=whole.history[:6]), **options)
    assert torch.equal(again.vector, whole.vector)
    for key in ("test_loss", "train_loss", "test_accuracy", "bytes_total", "sim_time", "fast"):
        assert again.history.column(key) == whole.history.column(key)
    assert len(again.history) == 7


@pytest.mark.parametrize("name", ["fedagrac", "diloco"])
def test_state_in_files_gives_the_same_numbers(name, tmp_path):
    files = run(name, participation=3, state_dir=tmp_path / "state")
    assert torch.equal(files.vector, run(name, participation=3).vector)
    assert list((tmp_path / "state").iterdir()) == []  # the files have no name


FACTS = Facts(1.5, 64, EngineRecord("lanes", False, 3, 2, "cpu", "2.13"), (4, 9), {"note": "ü", "steps": {"K": 3}})


def checkpoint(round=3, clients=(4, 1)):
    table = ClientTable(6)
    rows = torch.tensor([[float(c), 10.0 * c] for c in clients])
    table.put(np.array(clients, dtype=np.int64), {"nu": rows})
    state = {"x": torch.tensor([1.0, 2.0]), "nu": torch.tensor([0.5, 0.25], dtype=torch.float64)}
    return Checkpoint(round, state, table, FACTS)


def test_everything_is_read_back_and_two_are_kept(tmp_path):
    for round in (3, 5, 12):
        write_checkpoint(tmp_path, checkpoint(round))
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "round-00000005.safetensors",
        "round-00000012.safetensors",
    ]
    stored = read_checkpoint(tmp_path)
    assert (stored.round, stored.facts) == (12, FACTS)
    assert stored.state["x"].tolist() == [1, 2]
    assert stored.state["nu"].dtype == torch.float64
    assert stored.table.rows(np.array([1, 4]))["nu"].tolist() == [[1, 10], [4, 40]]
    assert stored.table.unseen(np.arange(6)).tolist() == [0, 2, 3, 5]
    assert read_checkpoint(tmp_path / "nothing") is None


def test_the_rounds_are_on_the_disk_before_their_checkpoint(tmp_path, monkeypatch):
    """After a power failure there must be no checkpoint whose rounds are lost."""
    folder, seen = tmp_path / "checkpoint", []
    (tmp_path / "history.jsonl").write_text('{"round": 1}\n')
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    path = RunFolder(tmp_path).write_checkpoint(checkpoint(1), ALONE)
    assert seen == [str(tmp_path / "history.jsonl"), str(folder / f".{path.name}.{os.getpid()}"), str(folder)]


def test_a_checkpoint_whose_rounds_are_lost_is_not_used(tmp_path, caplog):
    folder, history = tmp_path / "checkpoint", tmp_path / "history.jsonl"
    history.write_text('{"round": 1}\n{"round": 2}\n{"rou')
    write_checkpoint(folder, checkpoint(2))
    write_checkpoint(folder, checkpoint(4))
    with caplog.at_level(logging.WARNING, logger="fedagrac"):
        stored = RunFolder(tmp_path).last_checkpoint()
    assert (stored.round, [record["round"] for record in stored.history]) == (2, [1, 2])
    assert "damaged" in caplog.text


def test_parts_of_several_processes_become_one_table(tmp_path, monkeypatch):
    monkeypatch.setattr(Ranks, "wait", lambda self: None)
    write_checkpoint(tmp_path, checkpoint(clients=(5, 0)), Ranks(rank=1, size=2))
    assert read_checkpoint(tmp_path) is None  # the first process has not written yet
    write_checkpoint(tmp_path, checkpoint(clients=(4, 1)), Ranks(rank=0, size=2))
    stored = read_checkpoint(tmp_path)
    assert stored.table.rows(np.array([0, 1, 4, 5]))["nu"][:, 0].tolist() == [0, 1, 4, 5]
    local = stored.table.of(np.array([True, True, False, False, False, False]), None, torch.device("cpu"))
    assert local.unseen(np.arange(6)).tolist() == [2, 3, 4, 5]
    (tmp_path / "round-00000003.rank-1.safetensors").unlink()
    with pytest.raises(CheckpointError, match="rank-1"):
        read_checkpoint(tmp_path)


def test_rows_come_back_on_the_device_of_the_run():
    """The "meta" device stands for a GPU; rows from a file are on the CPU at first."""
    table = checkpoint().table.of(np.ones(6, np.bool_), None, torch.device("meta"))
    assert table.rows(np.array([4, 1]))["nu"].device.type == "meta"


def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path, caplog):
    write_checkpoint(tmp_path, checkpoint(3))
    newest = write_checkpoint(tmp_path, checkpoint(6))
    whole = newest.read_bytes()
    altered = whole.replace(b'\\"sim_time\\": 1.5', b'\\"sim_time\\": 2.5')
    assert altered != whole  # another fact, tensors untouched
    for damaged in (whole[:100], b"", whole[:-1] + bytes([whole[-1] ^ 1]), altered):
        newest.write_bytes(damaged)
        with caplog.at_level(logging.WARNING, logger="fedagrac"):
            assert read_checkpoint(tmp_path).round == 3
        assert "damaged" in caplog.text
    (tmp_path / "round-00000003.safetensors").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="damaged"):
        read_checkpoint(tmp_path)


def test_another_format_is_refused(tmp_path):
    path = write_checkpoint(tmp_path, checkpoint())
    save_file(load_file(path), path, metadata={"fedagrac": json.dumps({"format": 99})})
    with pytest.raises(CheckpointError, match="format 99, expected 3"):
        read_checkpoint(tmp_path)
    save_file(load_file(path), path)
    with pytest.raises(CheckpointError, match="format None, expected 3"):
        read_checkpoint(tmp_path)


def test_a_history_longer_than_its_checkpoint_is_cut(tmp_path):
    path = tmp_path / "history.jsonl"
    path.write_text('{"round": 1}\n{"round": 2}\n{"round": 3}\n{"rou')
    assert [r["round"] for r in read_history(path, 2)] == [1, 2]
    for bad in (4, 5):
        with pytest.raises(CheckpointError):
            read_history(path, bad)
    with pytest.raises(CheckpointError):
        read_history(tmp_path / "none", 1)


def test_a_checkpoint_that_does_not_fit_is_refused(tmp_path):
    whole = run("fedagrac", callbacks=[Checkpoints(tmp_path, every=3)])
    stored = read_checkpoint(tmp_path)
    with pytest.raises(CheckpointError, match="history"):
        run("fedagrac", resume=stored)
    with pytest.raises(fg.InputError, match="before round 6"):
        run("fedagrac", rounds=6, resume=replace(stored, history=whole.history[:6]))


@pytest.mark.parametrize(
    ("made", "fits"),
    [
        (torch.ones(2, 1, dtype=torch.float64), True),
        (torch.ones(2, 3, dtype=torch.float64), False),
        (torch.ones(2, 1), False),
    ],
    ids=["one number", "a vector", "float32"],
)
def test_a_count_of_a_client_is_one_number_in_float64(made, fits):
    table, x = ClientTable(6), torch.zeros(3)
    table.put(np.array([4, 1]), {"v": torch.zeros(2, 3), "made": made})
    stored, traits = Checkpoint(1, {"x": x}, table, FACTS), fg.Traits(rows=("v", "made"), counts=("made",))
    if fits:
        check_fits(stored, traits, x)
        return
    with pytest.raises(CheckpointError, match=r"the clients' made has .* expected 1 of torch\.float64"):
        check_fits(stored, traits, x)


def test_differences_between_lists():
    assert differences({"a": [{"lr": 1}]}, {"a": [{"lr": 2}]}) == ["a.0.lr: 1 -> 2"]
    assert differences({"a": [1]}, {"a": [1, 2]}) == ["a: [1] -> [1, 2]"]
    assert differences({"a": 1}, {"a": 1}) == []


EXPERIMENT = """
name = "mini"
rounds = 6
lr = 0.1
checkpoint_every = 2
[data]
name = "digits"
clients = 4
batch_size = 10
[steps]
kind = "constant"
steps = 3
[[algorithm]]
name = "fedavg"
[[algorithm]]
name = "fedlin"
"""


def command(*arguments):
    with pytest.raises(SystemExit) as done:
        main([*map(str, arguments)])
    return done.value.code


def test_the_command_resumes_an_interrupted_run(tmp_path, capsys):
    """The run of FedLin loses its last rounds and its end; the run of FedAvg does not change."""
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT)
    assert command("run", file, "--out", out, "--state-dir", tmp_path / "state", "--json") == 0
    models = {name: (out / name / "model.safetensors").read_bytes() for name in ("fedavg", "fedlin")}
    history = out / "fedlin" / "history.jsonl"
    whole = history.read_text()
    (out / "fedlin" / "status.json").unlink()
    (out / "fedlin" / "model.safetensors").unlink()
    history.write_text("\n".join(whole.splitlines()[:5]) + '\n{"rou')
    before = (out / "fedavg" / "history.jsonl").stat().st_mtime_ns
    assert command("run", "--resume", "--out", out, "--json") == 0
    assert {name: (out / name / "model.safetensors").read_bytes() for name in models} == models
    assert (out / "fedavg" / "history.jsonl").stat().st_mtime_ns == before

    def timeless(text):
        return [{k: v for k, v in json.loads(line).items() if k != "wall_time"} for line in text.splitlines()]

    assert timeless(history.read_text()) == timeless(whole)
    printed = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert [run["rounds"] for run in printed["runs"]] == [6, 6]


def test_the_command_logs_the_size_of_checkpoints(tmp_path, capsys):
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT)
    assert command("run", file, "--out", out) == 0
    size = sum(path.stat().st_size for path in out.glob("*/checkpoint/*"))
    assert len(list(out.glob("*/checkpoint/*"))) == 4  # the last two of each run
    assert f"checkpoints: {size / 1e6:.3g} MB on disk" in capsys.readouterr().err


def test_large_checkpoints_log_their_size_once(tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("fedagrac.callbacks.checkpoints.LARGE", 1000)
    with caplog.at_level(logging.INFO, logger="fedagrac"):
        run("fedavg", callbacks=[Checkpoints(tmp_path, every=2)])
    assert caplog.text.count("MB every 2 rounds, the last 2 are kept in") == 1


def test_the_command_refuses_what_cannot_be_resumed(tmp_path, capsys):
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT)
    assert command("run", file, "--resume") == 2
    assert "--out DIR" in capsys.readouterr().err
    assert command("run", "--resume", "--out", out) == 2
    assert "there is no experiment.toml" in capsys.readouterr().err
    assert not out.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("x")
    assert command("run", file, "--resume", "--out", tmp_path / "mine") == 2
    assert "holds other files" in capsys.readouterr().err
    assert (
        command("run", file, "--resume", "--out", out, "--json") == 0
    )  # with the experiment file it may also start
    capsys.readouterr()
    assert command("run", file, "--resume", "--out", out, "--set", "algorithm.fedavg.lr=0.2") == 2
    assert "algorithm.0.lr: 0.1 -> 0.2" in capsys.readouterr().err
    file.write_text(EXPERIMENT.replace("checkpoint_every = 2", "checkpoint_every = -2"))
    assert command("run", file, "--out", tmp_path / "other") == 2
    assert "checkpoint_every" in capsys.readouterr().err


def test_without_a_checkpoint_an_interrupted_run_starts_again(tmp_path, capsys):
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.replace("checkpoint_every = 2", "checkpoint_every = 0"))
    assert command("run", file, "--out", out, "--json") == 0
    model = (out / "fedlin" / "model.safetensors").read_bytes()
    assert not (out / "fedlin" / "checkpoint").exists()
    (out / "fedlin" / "status.json").unlink()
    assert command("run", "--resume", "--out", out, "--json") == 0
    assert (out / "fedlin" / "model.safetensors").read_bytes() == model
