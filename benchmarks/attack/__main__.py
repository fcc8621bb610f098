"""Attack the server and the commands, and print the figures of every part and whether every promise holds.

    python -m benchmarks.attack [PART ...] [--out DIR]

Run it from the root of the repository. It writes attack.json and the files of all parts to DIR (default:
runs/attack-TIME). The exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import sys

from benchmarks.attack import doors, files, mutations, processes
from benchmarks.soak.part import run_parts

PARTS = {"mutations": mutations.run, "files": files.run, "doors": doors.run, "processes": processes.run}

if __name__ == "__main__":
    sys.exit(run_parts("attack", __doc__.splitlines()[0], PARTS))
