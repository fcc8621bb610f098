"""Fuzz every reader of files and messages with atheris for some seconds."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.soak.part import TESTS, Part, Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

SECONDS = 15


def run(out: Path) -> Part:
    """Fuzz every target and count inputs and crashes."""
    if importlib.util.find_spec("atheris") is None:
        return Part({"skipped": "atheris is not installed: pip install -c constraints.txt -e '.[dev,fuzz]'"})
    script = [sys.executable, str(TESTS.parent / "fuzz" / "run.py"), "--seconds", str(SECONDS), "--json"]
    done = subprocess.run(
        [*script, "--crashes", str(out / "crashes")], capture_output=True, text=True, check=False
    )
    if not done.stdout:
        raise RuntimeError(done.stderr)
    rows = json.loads(done.stdout)
    return Part(
        {"inputs": sum(row["inputs"] for row in rows), **{row["target"]: row["inputs"] for row in rows}},
        [
            Promise("inputs tried", sum(row["inputs"] for row in rows), ">=", 10_000),
            Promise("fewest inputs of a target", min(row["inputs"] for row in rows), ">=", 100),
            Promise("crashes", sum(len(row["crashes"]) for row in rows), "==", 0),
        ],
    )
