"""SIGKILL, many times: at random moments, and in the middle of writing checkpoints and history.jsonl."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import TYPE_CHECKING

from benchmarks.soak.part import TESTS, Part, Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

KILLS = 200


def run(out: Path) -> Part:
    """Kill an experiment until it has died often enough, and compare it with one that nobody killed."""
    script = [
        sys.executable,
        str(TESTS / "killed_runs.py"),
        str(out / "kills"),
        "--kills",
        str(KILLS),
        "--seed",
        "1",
    ]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    found = json.loads(done.stdout)
    compared = [
        equal for survivor in found["survivors"] for run in survivor["runs"].values() for equal in run.values()
    ]
    return Part(
        {
            "kills": found["kills"],
            "how": found["how"],
            "random and while writing": found["random and while writing"],
            "experiments that finished": len(found["survivors"]),
        },
        [
            Promise("kills survived", found["kills"], ">=", KILLS),
            Promise("models, rounds and their order that differ", compared.count(False), "==", 0),
            Promise("temporary files left", sum(len(one["left"]) for one in found["survivors"]), "==", 0),
        ],
    )
