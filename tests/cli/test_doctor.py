"""fedagrac doctor."""

import json
from pathlib import Path

import torch

import fedagrac as fg
from command_line import command
from fedagrac.engines.lanes.kernels.patches import Convolution
from fedagrac.engines.lanes.routes import choose_routes


def test_doctor_says_what_is_usable(capsys):
    code, out, _ = command("doctor", "--json", capsys=capsys)
    assert code == 0
    findings = json.loads(out)
    assert findings["versions"]["fedagrac"] == fg.__version__
    assert findings["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert "usable" in findings["devices"]["cpu"]
    assert findings["engines"]["serial"] == "usable"
    assert findings["folders"]["runs"] == str(Path("runs").absolute())
    code, out, _ = command("doctor", capsys=capsys)
    assert code == 0
    assert fg.__version__ in out


def test_doctor_counts_the_convolutions_that_were_measured(capsys, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert "convolutions" not in json.loads(command("doctor", "--json", capsys=capsys)[1])["engines"]
    c = Convolution((1, 1, 4, 4), (1, 1, 3, 3), (1, 1), (1, 1))
    choose_routes({c: True}, 20, torch.device("cpu"), torch.float32, lambda *_: 1e-6)
    assert (
        "shapes measured: 1;"
        in json.loads(command("doctor", "--json", capsys=capsys)[1])["engines"]["convolutions"]
    )
