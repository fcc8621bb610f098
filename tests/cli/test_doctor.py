"""fedagrac doctor."""

import json
from pathlib import Path

import torch

import fedagrac as fg
from command_line import command


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
