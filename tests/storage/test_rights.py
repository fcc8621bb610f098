"""Files on disk are not writable for every user and hold no environment variables."""

import json
import os
import platform
import stat
import subprocess
import sys

import matplotlib
import pytest

import fedagrac as fg
from fedagrac.callbacks.run_folder import KeepRun
from fedagrac.files import make_folder

EXPERIMENT = """
name = "small"
rounds = 2
lr = 0.1
checkpoint_every = 1
data.clients = 4
steps = { kind = "gaussian", mean = 3, variance = 1 }
algorithm = [{ name = "fedagrac" }]
"""
SECRET = "5f1c0de5ec2e7"
VARIABLES = ("API_TOKEN", "AWS_SECRET_ACCESS_KEY", "FEDAGRAC_PASSWORD", "USER", "LOGNAME", "HOSTNAME")
RUN_FACTS = {
    "fedagrac", "python", "torch", "numpy", "platform", "machine", "cpus", "threads", "device", "gpu", "engine",
    "engine_compiled", "engine_width", "engine_reason", "precision", "processes", "command",
}  # fmt: skip


@pytest.fixture
def umask_of_zero():
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.fixture(scope="module")
def made_by_the_command(tmp_path_factory):
    """Run a small experiment with its report under a umask of zero, with secrets in the environment."""
    folder = tmp_path_factory.mktemp("command")
    (folder / "small.toml").write_text(EXPERIMENT)
    home = folder / f"home-{SECRET}"
    home.mkdir(mode=0o755)
    home_folders = {"HOME": str(home), "XDG_CACHE_HOME": "", "MPLCONFIGDIR": matplotlib.get_cachedir()}
    secrets = {name: f"{name}-{SECRET}" for name in VARIABLES}
    done = subprocess.run(
        [sys.executable, "-m", "fedagrac", "run", "small.toml", "--out", "out/here", "--state-dir", "out/state"],
        cwd=folder,
        env={**os.environ, **home_folders, **secrets},
        umask=0,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return folder


def written(*folders):
    paths = [path for folder in folders for path in [folder, *folder.rglob("*")]]
    assert paths
    return paths


def writable_by_everybody(paths):
    return [path for path in paths if not path.is_symlink() and path.lstat().st_mode & stat.S_IWOTH]


def test_the_command_writes_nothing_that_everybody_may_write_to(made_by_the_command):
    paths = written(made_by_the_command / "out", made_by_the_command / f"home-{SECRET}")
    names = {path.name for path in paths}
    assert names >= {"here", "state", "round-00000001.safetensors", "report.html", "figures", "history.jsonl"}
    assert writable_by_everybody(paths) == []


def test_the_group_keeps_the_rights_that_the_umask_gives_it(made_by_the_command):
    out = made_by_the_command / "out" / "here"
    assert stat.S_IMODE((out / "report.html").stat().st_mode) == 0o664
    assert stat.S_IMODE((out / "fedagrac" / "history.jsonl").stat().st_mode) == 0o664
    assert stat.S_IMODE((out / "fedagrac" / "checkpoint").stat().st_mode) == 0o775


@pytest.mark.usefixtures("umask_of_zero")
def test_the_library_writes_nothing_that_everybody_may_write_to(tmp_path):
    from fedagrac.flower.app import write_app

    fed = fg.Federation.load("digits", clients=4, seed=0)
    experiment = {"name": "mine", "algorithm": [{"name": "fedagrac"}]}
    folder = tmp_path / "new" / "run"
    callbacks = [KeepRun(folder, experiment), fg.Checkpoints(folder / "checkpoint", every=1)]
    fg.simulate(
        fg.models.build("logistic", features=64, classes=10), fed, fg.FedaGrac(lr=0.1), 2, steps=fg.Constant(2),
        callbacks=callbacks, state_dir=tmp_path / "state" / "rows",
    )  # fmt: skip
    write_app(tmp_path / "app")
    paths = written(tmp_path / "new", tmp_path / "state", tmp_path / "app")
    assert len(paths) > 12
    assert writable_by_everybody(paths) == []


@pytest.mark.usefixtures("umask_of_zero")
def test_the_folders_above_a_new_one_are_made_with_the_same_rights(tmp_path):
    make_folder(tmp_path / "a" / "b" / "c")
    assert [stat.S_IMODE((tmp_path / p).stat().st_mode) for p in ("a", "a/b", "a/b/c")] == [0o775] * 3
    make_folder(tmp_path / "a" / "b")  # again: nothing happens
    (tmp_path / "file").touch()
    with pytest.raises(FileExistsError):
        make_folder(tmp_path / "file")


def test_no_variable_of_the_environment_reaches_the_disk(made_by_the_command):
    out = made_by_the_command / "out"
    files = [path for path in out.rglob("*") if path.is_file()]
    assert len(files) > 15
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path
    facts = json.loads((out / "here" / "fedagrac" / "environment.json").read_text())
    assert set(facts) == RUN_FACTS
    assert set(json.loads((out / "here" / "environment.json").read_text())) < RUN_FACTS
    assert platform.node() not in facts["platform"].split("-")
