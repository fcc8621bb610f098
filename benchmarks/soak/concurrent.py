"""Run 50 commands at once in one tree of folders; ten of them ask for a folder that another one uses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from typing import TYPE_CHECKING

import tomli_w

from benchmarks.soak.part import Part, Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

PROCESSES, RIVALS, ROUNDS = 50, 10, 30
EXPERIMENT = {
    "name": "soak-concurrent",
    "rounds": ROUNDS,
    "lr": 0.1,
    "checkpoint_every": 3,
    "engine": "lanes",
    "compile": False,
    "data": {"name": "digits", "clients": 6},
    "steps": {"kind": "linear", "first": 1, "increment": 2},
    "algorithm": [{"name": "fedavg"}, {"name": "fedagrac"}],
}


def run(out: Path) -> Part:
    """Start all commands, half with default folder names in the same second, and check every folder at the end."""
    tree = out / "concurrent"
    tree.mkdir()
    (tree / "one.toml").write_text(tomli_w.dumps(EXPERIMENT), encoding="utf-8")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    running = []
    for number in range(PROCESSES):
        where = [] if number % 2 else ["--out", f"runs/mine/{number % (PROCESSES - 2 * RIVALS)}"]
        command = [sys.executable, "-m", "fedagrac", "run", "one.toml", "--json", *where]
        with (tree / f"{number}.log").open("wb") as log:
            running.append(subprocess.Popen(command, cwd=tree, stdout=log, stderr=log, env=environment))
    codes = Counter(process.wait() for process in running)
    models = {name: Counter() for name in ("fedavg", "fedagrac")}
    damaged = 0
    for folder in {path.parent for path in tree.rglob("experiment.toml") if path.parent.name in models}:
        models[folder.name][(folder / "model.safetensors").read_bytes()] += 1
        lines = (folder / "history.jsonl").read_text().splitlines()
        damaged += [json.loads(line)["round"] for line in lines] != list(range(1, ROUNDS + 1))
    runs, finish = [sum(counts.values()) for counts in models.values()], PROCESSES - RIVALS
    return Part(
        {"processes": PROCESSES, "exit codes": dict(codes), "runs": sum(runs)},
        [
            Promise("commands that finished", codes[0], "==", finish),
            Promise("commands that were refused a folder in use", codes[2], "==", RIVALS),
            Promise("different models of the same run", max(map(len, models.values())), "==", 1),
            Promise("runs of each algorithm", min(runs), "==", finish),
            Promise("histories that are not whole", damaged, "==", 0),
        ],
    )
