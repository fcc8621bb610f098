"""Let a stranger who has ca.crt alone try every door of a federation, and nodes claim what is not theirs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.soak.part import TESTS, Part, Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

FILES = ("test_doors.py", "test_gate.py", "test_identity.py", "test_mods.py")
"""The tests of tests/flower that are replayed; the first one starts a SuperLink, the gate and SuperNodes."""

SECONDS = 900.0


def run(out: Path) -> Part:
    """Replay the tests of the doors as they are in the checks."""
    tests = [str(TESTS / "flower" / name) for name in FILES]
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "--basetemp",
        str(out / "doors"),
        *tests,
    ]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=SECONDS, check=False, env={**os.environ, "NO_COLOR": "1"}
    )
    (out / "doors.log").write_text(done.stdout + done.stderr)
    passed = re.search(r"(\d+) passed", done.stdout)
    return Part(
        figures={"last line": (done.stdout.strip().splitlines() or [""])[-1]},
        promises=[
            Promise("tests of the doors that passed", int(passed[1]) if passed else 0, ">=", 20),
            Promise("exit code of the tests", done.returncode, "==", 0),
        ],
    )
