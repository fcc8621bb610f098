"""Nothing is lost by crashes, full disks, read-only folders, or two processes that want the same folder."""

import contextlib
import json
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import processes
from fedagrac import files as folders
from fedagrac.cli import app as cli
from fedagrac.errors import InputError
from fedagrac.experiments.run import prepare, run_experiment
from fedagrac.experiments.schema import Experiment
from fedagrac.files import write_atomically
from fedagrac.storage.claims import claimed, is_leftover, make_unused_folder, remove_leftovers
from fedagrac.storage.run_folder import RunFolder

HERE = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "80"}
KILLS = 50


def test_a_run_killed_fifty_times_ends_like_an_uninterrupted_run(tmp_path):
    """Real processes get SIGKILL at random moments, and while they write a checkpoint or history.jsonl."""
    script = [sys.executable, HERE / "killed_runs.py", tmp_path, "--kills", KILLS]
    done = subprocess.run([*map(str, script)], env=ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    outcome = json.loads(done.stdout)
    assert outcome["kills"] == KILLS
    for aim in ("at a random moment", "half a line of history.jsonl", "half a checkpoint"):
        assert outcome["how"][aim] > 0
    for survivor in outcome["survivors"]:
        assert survivor["left"] == []
        for name, run in survivor["runs"].items():
            assert run == {"same model": True, "same rounds": True, "each once": True}, name


EXPERIMENT = """
name = "mini"
rounds = {rounds}
lr = 0.1
checkpoint_every = 2
engine = "serial"
[data]
name = "digits"
clients = 3
batch_size = 10
[steps]
kind = "constant"
steps = 1
[[algorithm]]
name = "fedagrac"
"""


@contextlib.contextmanager
def small_disk(folder, kilobytes):
    """Mount a file system in memory; skip the test if that is not allowed."""
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode != 0:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def run(*arguments):
    """Run the command in this process. Return its exit code."""
    with pytest.raises(SystemExit) as done:
        cli.main([*map(str, arguments)])
    return done.value.code


@pytest.mark.parametrize("free", [60, 100])
def test_a_full_disk_is_reported_and_leaves_a_checkpoint_to_resume_from(free, tmp_path, capsys):
    file, disk = tmp_path / "mini.toml", tmp_path / "disk"
    file.write_text(EXPERIMENT.format(rounds=300))
    with small_disk(disk, 600):
        (disk / "something else").write_bytes(bytes((600 - free) * 1024))
        out = disk / "out"
        assert run("run", file, "--out", out, "--json") == 1
        errors = " ".join(capsys.readouterr().err.split())
        assert "No space left on device" in errors
        assert "Traceback" not in errors
        assert f"resume with: fedagrac run --resume --out {out}" in errors
        stored = RunFolder(out / "fedagrac").last_checkpoint()
        assert 0 < stored.round < 300
        (disk / "something else").unlink()
        run_experiment(prepare(Experiment.load(file)), out, resume=True)
        kept = (out / "fedagrac" / "model.safetensors").read_bytes()
        rounds = [
            json.loads(line)["round"] for line in (out / "fedagrac" / "history.jsonl").read_text().splitlines()
        ]
    assert rounds == list(range(1, 301))
    run_experiment(prepare(Experiment.load(file)), tmp_path / "whole")
    assert kept == (tmp_path / "whole" / "fedagrac" / "model.safetensors").read_bytes()


def test_a_read_only_folder_is_reported_and_can_still_be_read(tmp_path, capsys):
    file, disk = tmp_path / "mini.toml", tmp_path / "disk"
    file.write_text(EXPERIMENT.format(rounds=6))
    with small_disk(disk, 30_000):
        out = disk / "out"
        assert run("run", file, "--out", out, "--json") == 0
        (out / "fedagrac" / "status.json").unlink()
        subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
        capsys.readouterr()
        for arguments in ((file, "--out", disk / "other"), ("--resume", "--out", out)):
            assert run("run", *arguments) == 1
            errors = capsys.readouterr().err
            assert "Read-only file system" in errors
            assert "Traceback" not in errors
        assert RunFolder(out / "fedagrac").last_checkpoint().round == 4


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "status.json"
    write_atomically(path, b"before")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folders, "sync", full)
    with pytest.raises(OSError, match="No space left") as error:
        write_atomically(path, b"after")
    assert error.value.filename == str(path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch):
    """The content comes first: in the other order a power failure could leave an empty file."""
    seen = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: seen.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    write_atomically(tmp_path / "a", b"x")
    assert seen == [str(tmp_path / f".a.{os.getpid()}"), str(tmp_path)]


def test_one_process_at_a_time_writes_to_a_folder(tmp_path):
    out = tmp_path / "out"
    with claimed(out):
        with pytest.raises(InputError, match="no other process writes to"), claimed(out):
            pass
        (out / "experiment.toml").write_text("")
    with claimed(out):  # free again
        pass
    assert out.exists()
    with claimed(tmp_path / "new"):
        pass
    assert not (tmp_path / "new").exists()  # nothing was written
    (tmp_path / "empty").mkdir()
    with claimed(tmp_path / "empty"):
        pass
    assert (tmp_path / "empty").exists()  # it was there before
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"), claimed(tmp_path / "file"):
        pass


def test_a_claim_ends_with_its_process(tmp_path):
    script = "import os, signal, sys\nfrom pathlib import Path\nfrom fedagrac.storage.claims import claimed\n"
    script += "with claimed(Path(sys.argv[1])):\n    os.kill(os.getpid(), signal.SIGKILL)"
    done = subprocess.run([sys.executable, "-c", script, str(tmp_path / "out")], check=False)
    assert done.returncode == -9
    with claimed(tmp_path / "out"):
        pass


def test_only_temporary_files_of_this_package_and_of_safetensors_are_removed(tmp_path):
    kept = ["status.json", ".bashrc", ".lock", ".round-00000001.safetensors", ".thing.12", "round-1.safetensors.7"]
    kept += [".tmp", ".tmp-notes"]
    gone = [".status.json.12", ".round-00000001.safetensors.4711", ".history.jsonl.1", ".experiment.toml.99"]
    gone += [".tmppammBI"]
    for name in [*kept, *gone]:
        (tmp_path / name).write_text("")
    remove_leftovers(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == set(kept)
    assert is_leftover(Path(".lock"))


def test_the_command_refuses_a_folder_in_use(tmp_path, capsys):
    file, out = tmp_path / "mini.toml", tmp_path / "out"
    file.write_text(EXPERIMENT.format(rounds=2))
    with claimed(out):
        assert run("run", file, "--out", out) == 2
    assert "no other process writes to" in " ".join(capsys.readouterr().err.split())


def test_processes_that_make_a_folder_at_the_same_time_get_different_ones(tmp_path, monkeypatch):
    """All start from the same name, as commands in the same second do."""
    monkeypatch.chdir(tmp_path)
    made = []
    threads = [
        threading.Thread(target=lambda: made.append(make_unused_folder(Path("runs/a-1")))) for _ in range(30)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(made)) == 30
    assert all(path.is_dir() for path in made)


def test_concurrent_commands_in_one_tree_do_not_touch_one_another(tmp_path):
    """Two of four processes want the same folder; `make soak` starts fifty."""
    file = tmp_path / "mini.toml"
    file.write_text(EXPERIMENT.format(rounds=40))
    running = []
    for place in ("a", "a", "b/c", None):
        where = [] if place is None else ["--out", str(tmp_path / "tree" / place)]
        command = [sys.executable, "-m", "fedagrac", "run", str(file), "--json", *where]
        output = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        running.append(subprocess.Popen(command, env=ENVIRONMENT, cwd=tmp_path, **output))
    ends = [(processes.finish(process), process.returncode) for process in running]
    codes = [code for _, code in ends]
    assert sorted(codes[:2]) == [0, 2], ends
    assert codes[2:] == [0, 0], ends
    models = [path.read_bytes() for path in tmp_path.rglob("model.safetensors")]
    assert len(models) == 3
    assert len(set(models)) == 1
    for history in tmp_path.rglob("history.jsonl"):
        assert [json.loads(line)["round"] for line in history.read_text().splitlines()] == list(range(1, 41))
