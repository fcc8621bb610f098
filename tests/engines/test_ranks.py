"""Several processes, one simulation: real processes over gloo, the numbers of one."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from fedagrac.engines.ranks import ALONE, LostRankError, Ranks, balanced_shares
from fedagrac.storage.run_folder import RunFolder
from processes import finish, run, wait_while_running
from sharded_guard import outcome
from sharded_run import histories

HERE = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def launch(processes, *arguments, **options):
    """Start processes as torchrun does; return the launcher."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen([*command, *map(str, arguments)], env=ENVIRONMENT, **output, **options)


def end_of(launcher):
    """Wait for the launcher; return its exit code and output. Fails when processes wait for one that is gone."""
    printed, _ = finish(launcher)
    return launcher.returncode, printed


@pytest.fixture(scope="module")
def alone():
    return {str(p): histories(p) for p in (None, 2)}


@pytest.mark.parametrize("processes", [2, 3])
def test_every_algorithm_has_the_numbers_of_one_process(processes, alone, tmp_path):
    """All clients, and two of five: then some processes have nobody in a round."""
    out = tmp_path / "found.json"
    code, printed = end_of(launch(processes, HERE / "sharded_run.py", out))
    assert code == 0, printed
    found = json.loads(out.read_text())
    assert found["size"] == processes
    for participation, expected in alone.items():
        for name, columns in expected.items():
            for key, values in columns.items():
                ours = found[participation][name][key]
                assert [v is None for v in ours] == [v is None for v in values]
                known = [(a, b) for a, b in zip(ours, values, strict=True) if a is not None]
                a, b = np.array(known).T
                assert np.abs(a - b).max() <= 1e-6 * max(1.0, np.abs(b).max()), (participation, name, key)


def test_all_processes_drop_the_same_clients_and_say_the_same_of_a_divergence(tmp_path):
    out = tmp_path / "found"
    code, printed = end_of(launch(2, HERE / "sharded_guard.py", out))
    assert code == 0, printed
    one, other = (json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1))
    alone = outcome()
    assert one["dropped"] == other["dropped"] == alone["dropped"] == [[1], [4], [1], [1]]
    np.testing.assert_allclose(one["x"], alone["x"], rtol=1e-10)
    assert one["reasons"] == other["reasons"]
    before_advice = [[reason.split(" (theory")[0] for reason in each["reasons"]] for each in (one, alone)]
    assert before_advice[0] == before_advice[1]
    assert "client 1" in alone["reasons"][1]
    assert "as the first of 3" in alone["reasons"][1]


def process_of_rank(launcher, rank):
    """Return the process that the launcher started for a rank."""
    children = psutil.Process(launcher.pid).children()
    (process,) = [child for child in children if child.environ().get("RANK") == str(rank)]
    return process


def rounds_done(history):
    return history.read_text().count("\n") if history.exists() else 0


def test_a_killed_process_ends_the_run_and_another_number_of_processes_goes_on(tmp_path):
    settings = ["--set", "rounds=30", "--set", "checkpoint_every=3"]
    files = {"whole": tmp_path / "whole", "killed": tmp_path / "killed"}
    experiment = tmp_path / "one.toml"
    experiment.write_text(
        'name = "one"\nrounds = 30\n[data]\nname = "digits"\nclients = 5\nbatch_size = 10\n'
        'partition = { kind = "dirichlet", alpha = 0.3 }\n[steps]\nkind = "linear"\nfirst = 10\nincrement = 20\n'
        '[[algorithm]]\nname = "fedagrac"\nlr = 0.05\n'
    )
    command = ["-m", "fedagrac", "run", experiment, *settings]
    launcher = launch(2, *command, "--out", files["killed"])
    history = files["killed"] / "fedagrac" / "history.jsonl"
    wait_while_running(lambda: rounds_done(history) >= 7, launcher)
    process_of_rank(launcher, 1).kill()
    code, printed = end_of(launcher)
    assert code != 0
    assert "exitcode  : -9" in printed or "gone" in printed
    assert not (files["killed"] / "fedagrac" / "status.json").exists()
    kept = sorted(p.name for p in (files["killed"] / "fedagrac" / "checkpoint").iterdir())
    assert any(name.endswith(".rank-1.safetensors") for name in kept)

    code, printed = end_of(launch(3, "-m", "fedagrac", "run", "--resume", "--out", files["killed"]))
    assert code == 0, printed
    code, _, errors = run([sys.executable, *command, "--out", files["whole"]], env=ENVIRONMENT)
    assert code == 0, errors
    rounds = {
        name: [json.loads(line) for line in (folder / "fedagrac" / "history.jsonl").read_text().splitlines()]
        for name, folder in files.items()
    }
    assert [r["round"] for r in rounds["killed"]] == list(range(1, 31))
    for ours, theirs in zip(rounds["killed"], rounds["whole"], strict=True):
        assert ours["test_loss"] == pytest.approx(theirs["test_loss"], rel=1e-5)
        assert ours["bytes_total"] == theirs["bytes_total"]
        assert ours["sim_time"] == pytest.approx(theirs["sim_time"])


def test_a_signal_to_one_process_ends_all_of_them_after_the_round(tmp_path):
    """Only rank 1 is told; both save the same round, and one process alone goes on from there."""
    experiment, out = tmp_path / "one.toml", tmp_path / "out"
    experiment.write_text(
        'name = "one"\nrounds = 5000\ncheckpoint_every = 5000\n[data]\nname = "digits"\nclients = 5\n'
        '[steps]\nkind = "linear"\nfirst = 1\nincrement = 2\n[[algorithm]]\nname = "scaffold"\nlr = 0.05\n'
    )
    launcher = launch(2, "-m", "fedagrac", "run", experiment, "--out", out)
    history = out / "scaffold" / "history.jsonl"
    wait_while_running(lambda: rounds_done(history) >= 3, launcher)
    process_of_rank(launcher, 1).send_signal(signal.SIGTERM)
    code, printed = end_of(launcher)
    assert code != 0
    assert "interrupted by SIGTERM" in printed
    assert f"resume with: torchrun --nproc-per-node 2 -m fedagrac run --resume --out {out}" in printed
    done = history.read_text().count("\n")
    stored = RunFolder(out / "scaffold").last_checkpoint()
    assert 3 <= stored.round == done < 5000
    assert stored.table.unseen(np.arange(5)).tolist() == []  # the rows of both processes


def test_shares_are_balanced_and_complete():
    steps = np.array([50, 3, 9, 20, 20, 7, 1, 30])
    owner = balanced_shares(steps, 3)
    loads = [steps[owner == rank].sum() for rank in range(3)]
    assert sum(loads) == steps.sum()
    assert max(loads) == 50  # nobody can do less than the longest client
    assert balanced_shares(steps, 3).tolist() == owner.tolist()
    assert set(balanced_shares(np.ones(2, np.int64), 4)) <= {0, 1, 2, 3}


def test_alone_nothing_is_sent():
    clients = np.array([3, 1])
    assert ALONE.share(np.array([1, 2, 3, 4])).own(clients).tolist() == [True, True]
    assert ALONE.agree({"a": 1}) == {"a": 1}
    assert ALONE.total(torch.ones(2)).tolist() == [1, 1]


def test_a_lost_process_is_named(monkeypatch):
    def gone(*_, **__):
        raise RuntimeError("Connection closed by peer [127.0.0.1]:1\nmore")

    monkeypatch.setattr("fedagrac.engines.ranks.distributed.all_reduce", gone)
    monkeypatch.setattr("fedagrac.engines.ranks.distributed.broadcast", gone)
    ranks = Ranks(rank=1, size=2)
    for use in (lambda: ranks.total(torch.ones(1)), lambda: ranks.agree(1), ranks.wait):
        with pytest.raises(LostRankError, match="resume from its last checkpoint"):
            use()
