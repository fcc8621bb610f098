"""Run the parts of the soak in turn and print their figures and whether every promise holds.

    python -m benchmarks.soak [PART ...] [--out DIR]

Run it from the root of the repository. It writes soak.json and the files of all parts to DIR (default:
runs/soak-TIME). The exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import sys

from benchmarks.soak import checkpoint, clients, concurrent, inputs, kills, resume, rounds
from benchmarks.soak.part import run_parts

PARTS = {
    "resume": resume.run,
    "kills": kills.run,
    "inputs": inputs.run,
    "rounds": rounds.run,
    "clients": clients.run,
    "concurrent": concurrent.run,
    "checkpoint": checkpoint.run,
}

if __name__ == "__main__":
    sys.exit(run_parts("soak", __doc__.splitlines()[0], PARTS))
