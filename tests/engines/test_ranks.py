"""Several processes, one simulation: real processes over gloo, the numbers of one."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from fedagrac.engines.launchers import find_launch, rank_seconds, why_alone
from fedagrac.engines.ranks import ALONE, LostRankError, Ranks, balanced_shares
from fedagrac.errors import InputError
from fedagrac.storage.run_folder import RunFolder
from processes import finish, run, wait_while_running
from sharded_guard import outcome
from sharded_run import histories

HERE = Path(__file__).parents[1]
OF_LAUNCHERS = ("WORLD_SIZE", "RANK", "LOCAL_", "MASTER_", "TORCHELASTIC_", "OMPI_", "PMI", "SLURM_", "MPI_")
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(OF_LAUNCHERS)}
ENVIRONMENT |= {"OMP_NUM_THREADS": "1"}
TINY = (
    'name = "tiny"\nrounds = 1\n[data]\nname = "digits"\nclients = 2\n[steps]\nkind = "constant"\nsteps = 1\n'
    '[[algorithm]]\nname = "fedavg"\nlr = 0.05\n'
)


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


def test_every_algorithm_has_the_numbers_of_one_process(alone, tmp_path):
    """All clients, and two of five: then a process sometimes has nobody in a round."""
    out = tmp_path / "found.json"
    code, printed = end_of(launch(2, HERE / "sharded_run.py", out))
    assert code == 0, printed
    found = json.loads(out.read_text())
    assert found["size"] == 2
    for participation, expected in alone.items():
        for name, columns in expected.items():
            for key, values in columns.items():
                ours = found[participation][name][key]
                assert [v is None for v in ours] == [v is None for v in values]
                known = [(a, b) for a, b in zip(ours, values, strict=True) if a is not None]
                a, b = np.array(known).T
                assert np.abs(a - b).max() <= 1e-6 * max(1.0, np.abs(b).max()), (participation, name, key)


def test_all_processes_drop_the_same_clients_aggregate_alike_and_say_the_same_of_a_divergence(tmp_path):
    out = tmp_path / "found"
    code, printed = end_of(launch(2, HERE / "sharded_guard.py", out))
    assert code == 0, printed
    one, other = (json.loads(Path(f"{out}.{rank}").read_text()) for rank in (0, 1))
    alone = outcome()
    assert one["dropped"] == other["dropped"] == alone["dropped"] == [[1], [4], [1], [1]]
    np.testing.assert_allclose(one["x"], alone["x"], rtol=1e-10)
    assert one["robust"] == other["robust"]
    np.testing.assert_allclose(one["robust"], alone["robust"], rtol=1e-10)
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


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "4", "RANK": "3", "LOCAL_RANK": "1"}, ("torchrun", 4, 3, 1)),
        ({"MASTER_ADDR": "a", "MASTER_PORT": "1", "WORLD_SIZE": "2", "RANK": "1"}, ("MASTER_ADDR", 2, 1, 0)),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0", "PMIX_RANK": "0"}, ("mpirun (Open", 2, 0, 0)),
        ({"PMI_SIZE": "3", "PMI_RANK": "2", "PMI_FD": "5", "MPI_LOCALRANKID": "1"}, ("mpirun (MPICH", 3, 2, 1)),
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "2", "SLURM_STEP_ID": "0"}, ("srun", 4, 2, 0)),
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, None),  # a script that sbatch runs
        ({"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "0", "SLURM_STEP_ID": "4294967291"}, None),  # its own step
        ({"WORLD_SIZE": "2"}, None),
        ({"WORLD_SIZE": "2", "RANK": "0", "LOCAL_RANK": "0"}, None),
        ({"WORLD_SIZE": "", "RANK": ""}, None),
        ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "0"}, None),
        ({"PMI_SIZE": "2", "PMI_RANK": "0"}, None),
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1", "RANK": "0"}, None),
        # torchrun of one process in each task of srun
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "1", "RANK": "0", "SLURM_STEP_NUM_TASKS": "4"}, None),
    ],
)
def test_a_process_is_a_rank_only_with_the_sign_of_a_launcher(variables, expected):
    launch = find_launch(variables)
    if expected is None:
        assert launch is None
    else:
        assert launch.launcher.startswith(expected[0])
        assert (launch.size, launch.rank, launch.local) == expected[1:]


@pytest.mark.parametrize(
    ("variables", "field"),
    [
        ({"WORLD_SIZE": "abc"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "2", "RANK": "-1"}, "RANK"),
        ({"WORLD_SIZE": "2", "RANK": "2"}, "RANK"),
        ({"WORLD_SIZE": "9" * 5000, "RANK": "0"}, "WORLD_SIZE"),
        ({"WORLD_SIZE": "\u0662"}, "WORLD_SIZE"),  # a digit, but no launcher writes it
        ({"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "0", "MASTER_PORT": "99999"}, "MASTER_PORT"),
        (  # two hosts
            {
                "SLURM_STEP_NUM_TASKS": "4",
                "SLURM_PROCID": "2",
                "SLURM_STEP_ID": "0",
                "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
            },
            "MASTER_ADDR",
        ),
    ],
)
def test_variables_that_cannot_be_are_named(variables, field):
    with pytest.raises(InputError) as error:
        find_launch(variables)
    assert error.value.field == field


def test_the_environment_of_one_process_that_speaks_of_several_is_explained():
    assert "SLURM_NTASKS = 4, but srun did not start it" in why_alone({"SLURM_NTASKS": "4", "SLURM_PROCID": "0"})
    assert why_alone({"WORLD_SIZE": "2", "RANK": "0", "MASTER_ADDR": "a", "MASTER_PORT": "1"}) is None
    with pytest.raises(InputError, match="FEDAGRAC_RANK_SECONDS = 'soon'"):
        rank_seconds({"FEDAGRAC_RANK_SECONDS": "soon"})
    with pytest.raises(InputError, match="FEDAGRAC_RANK_SECONDS"):
        rank_seconds({"FEDAGRAC_RANK_SECONDS": "0"})


def start(folder, **variables):
    """Start `fedagrac run` with some variables; return the process."""
    (folder / "tiny.toml").write_text(TINY)
    command = [sys.executable, "-m", "fedagrac", "run", folder / "tiny.toml", "--out", folder / "out"]
    output = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    return subprocess.Popen(command, env={**ENVIRONMENT, **variables}, **output)


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.mark.parametrize(
    "variables", [{"SLURM_NTASKS": "4", "SLURM_PROCID": "0"}, {"WORLD_SIZE": "2", "RANK": "0"}]
)
def test_without_a_launcher_the_run_is_that_of_one_process(variables, tmp_path):
    code, printed = end_of(start(tmp_path, **variables))
    assert code == 0, printed
    assert "running alone" in printed
    assert (tmp_path / "out" / "report.html").exists()


def test_a_variable_that_is_no_number_ends_the_command_by_name(tmp_path):
    code, printed = end_of(start(tmp_path, WORLD_SIZE="abc", RANK="0"))
    assert code == 2
    assert printed.splitlines()[-1].startswith("error WORLD_SIZE = 'abc'")
    assert "unset WORLD_SIZE" in printed
    assert "Traceback" not in printed


def test_a_taken_port_is_named(tmp_path):
    with socket.socket() as taken:
        taken.bind(("", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        code, printed = end_of(start(tmp_path, WORLD_SIZE="2", RANK="0", **place))
    assert code == 2
    assert f"error MASTER_PORT = {port}: expected a free port" in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(("rank", "said"), [("0", "2 of 3 processes are missing"), ("1", "nobody answers")])
def test_waiting_for_processes_has_a_limit(rank, said, tmp_path):
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "FEDAGRAC_RANK_SECONDS": "1"}
    code, printed = end_of(start(tmp_path, WORLD_SIZE="3", RANK=rank, **place))
    assert code == 1
    assert said in printed
    assert "FEDAGRAC_RANK_SECONDS" in printed
    assert "unset WORLD_SIZE RANK" in printed
    assert "Traceback" not in printed


def answers(port):
    """Return whether a process listens at a port."""
    try:
        socket.create_connection(("127.0.0.1", int(port)), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_signals_end_the_process_that_waits_for_others(number, code, tmp_path):
    port = free_port()
    process = start(tmp_path, WORLD_SIZE="2", RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    wait_while_running(lambda: answers(port), process)
    assert_ends(process, number, code)


def test_signals_end_a_process_that_waits_for_rank_0(tmp_path):
    """Somebody listens at the port, but does not answer."""
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(silent.getsockname()[1])}
        process = start(tmp_path, WORLD_SIZE="2", RANK="1", **place)
        silent.settimeout(300)
        silent.accept()[0].close()
        assert_ends(process, signal.SIGTERM, 143)


def assert_ends(process, number, code):
    """Send a signal; check that the process ends soon, with the signal's code and without a traceback."""
    time.sleep(0.5)
    sent = time.monotonic()
    process.send_signal(number)
    ended, printed = end_of(process)
    assert ended == code, printed
    assert time.monotonic() - sent < 10
    assert f"interrupted by {number.name}" in printed
    assert "Traceback" not in printed


@pytest.mark.skipif(shutil.which("mpirun") is None, reason="mpirun is not installed")
def test_mpirun_starts_ranks(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    options = ["--oversubscribe", "--allow-run-as-root"]
    command = ["mpirun", "-n", "2", *options, sys.executable, "-m", "fedagrac", "run", tmp_path / "tiny.toml"]
    code, printed, errors = run([*command, "--out", tmp_path / "out"], env=ENVIRONMENT)
    assert code == 0, errors
    assert printed.count("fedavg") == 1
