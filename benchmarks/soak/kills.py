"""Send SIGKILL many times: at random moments and in the middle of writing checkpoints and history.jsonl."""

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
    """Kill an experiment many times and compare its results with those of one that was not killed."""
    script = [sys.executable, TESTS / "killed_runs.py", out / "kills", "--kills", KILLS, "--seed", 1]
    done = subprocess.run([*map(str, script)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr)
    campaign = json.loads(done.stdout)
    compared = [
        equal for survivor in campaign["survivors"] for run in survivor["runs"].values() for equal in run.values()
    ]
    return Part(
        {
            "kills": campaign["kills"],
            "how": campaign["how"],
            "random and while writing": campaign["random and while writing"],
            "experiments that finished": len(campaign["survivors"]),
        },
        [
            Promise("kills survived", campaign["kills"], ">=", KILLS),
            Promise("models, rounds and their order that differ", compared.count(False), "==", 0),
            Promise("temporary files left", sum(len(one["left"]) for one in campaign["survivors"]), "==", 0),
        ],
    )
