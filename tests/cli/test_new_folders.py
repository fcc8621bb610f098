"""Commands without --out get a new folder each, also in the same second, and leave none behind in vain."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from command_line import command

EXPERIMENT = """
name = "mini"
rounds = 2
weight_decay = 0.5
lr = 0.1
[data]
name = "digits"
clients = 2
batch_size = 10
[steps]
kind = "constant"
steps = 1
[[algorithm]]
name = "fedavg"
"""
SWEEP = ["sweep", "mini.toml", "--grid", "algorithm.lr=0.1,0.2", "--json"]
AT_ONE_TIME = """
import sys
import fedagrac.cli.computing
from fedagrac.cli.app import main
fedagrac.cli.computing.timestamp = lambda: "now"
main(sys.argv[1:])
"""


def test_two_sweeps_at_once_both_succeed():
    Path("mini.toml").write_text(EXPERIMENT)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    both = [subprocess.Popen([sys.executable, "-c", AT_ONE_TIME, *SWEEP], **pipes) for _ in range(2)]
    ends = [(process.communicate(timeout=300), process.returncode) for process in both]
    assert [code for _, code in ends] == [0, 0], ends
    assert sorted(path.name for path in Path("runs").iterdir()) == ["mini-sweep-now", "mini-sweep-now-2"]
    points = [[run["final_test_loss"] for run in json.loads(out)["points"][0]["runs"]] for (out, _), _ in ends]
    assert points[0] == points[1]


def test_two_studies_in_one_second_both_succeed(capsys, monkeypatch):
    Path("mini.toml").write_text(EXPERIMENT)
    monkeypatch.setattr("fedagrac.cli.computing.timestamp", lambda: "now")
    for _ in range(2):
        code, _, err = command("theory", "mini.toml", "--json", capsys=capsys)
        assert code == 0, err
    for name in ("mini-theory-now", "mini-theory-now-2"):
        assert {"theory.json", "theory.png"} <= {path.name for path in Path("runs", name).iterdir()}


@pytest.mark.parametrize("arguments", [["run", "mini.toml"], SWEEP, ["theory", "mini.toml"]])
def test_a_command_that_fails_leaves_no_folder(arguments, capsys, monkeypatch):
    """Neither before nor after its new folder was made."""
    Path("mini.toml").write_text(EXPERIMENT)
    assert command(*arguments, "--set", "model.name=no_such:net", capsys=capsys)[0] == 2
    assert command(*arguments, "--set", "participation=9", capsys=capsys)[0] == 2

    def fail(*_, **__):
        raise OSError(28, "No space left on device", "somewhere")

    monkeypatch.setattr("fedagrac.callbacks.progress.Progress.__enter__", fail)
    code, _, err = command(*arguments, capsys=capsys)
    assert (code, "somewhere: No space left on device" in err) == (1, True)
    assert [path.name for path in Path().iterdir()] == ["mini.toml"]


def test_a_study_refuses_a_folder_in_use(capsys):
    from fedagrac.storage.claims import claimed

    Path("mini.toml").write_text(EXPERIMENT)
    with claimed(Path("out")):
        code, _, err = command("theory", "mini.toml", "--out", "out", capsys=capsys)
    assert code == 2
    assert "--out = 'out': expected a folder that no other process writes to" in " ".join(err.split())
