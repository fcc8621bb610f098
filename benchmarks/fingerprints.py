"""SHA-256 of what runs give, to show that a change of structure moved no number.

    python benchmarks/fingerprints.py write before.json      # on the old tree
    python benchmarks/fingerprints.py compare before.json    # on the new one, the same machine

Every algorithm with every engine, sampling and participation on digits; the same side by side; a sweep; a run
that is interrupted by SIGTERM and resumed; one recipe of the paper. A fingerprint covers the final model and the
history without wall times. It holds for one machine and one version of torch: rounding differs elsewhere.
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import fedagrac as fg

ALGORITHMS = [
    "fedavg",
    "fedprox",
    "fednova",
    "scaffold",
    "fedlin",
    "fedagrac",
    "fedagrac-avg",
    "fedagrac-first",
    "fedagrac-reverse",
]
ENGINES = {
    "serial": {"engine": "serial"},
    "lanes": {"engine": "lanes", "compile": False},
    "compiled": {"engine": "lanes", "compile": True},
}
SAMPLING = ("replacement", "shuffle")
PARTICIPATION = {"all": None, "3 of 6": 3, "by weight": fg.Participation(4, by="weight")}

WALL = ("wall_time", "seconds", "together")
"""What differs from run to run."""

EXPERIMENT = """
name = "fingerprint"
rounds = 60
lr = 0.1
checkpoint_every = 1000
[data]
name = "digits"
clients = 6
batch_size = 5
partition = { kind = "dirichlet", alpha = 0.3 }
[steps]
kind = "gaussian"
mean = 4
variance = 4
mode = "random"
[[algorithm]]
name = "fedavg"
[[algorithm]]
name = "fedagrac"
"""
ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1"}


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("write", "compare"):
        raise SystemExit(__doc__)
    command, path = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    found = {}
    for name, fingerprint in everything():
        found[name] = fingerprint
        print(fingerprint[:12], name, flush=True)
    if command == "write":
        path.write_text(json.dumps(found, indent=1) + "\n")
        return
    before = json.loads(path.read_text())
    moved = [name for name in {**before, **found} if before.get(name) != found.get(name)]
    print(f"{len(found)} fingerprints, {len(moved)} of them different", *moved, sep="\n")
    raise SystemExit(1 if moved else 0)


def everything() -> Iterator[tuple[str, str]]:
    yield from simulations()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "fingerprint.toml"
        file.write_text(EXPERIMENT)
        yield "sweep", sweep(file)
        yield "resumed run", resumed(file)
        yield "recipe figure-pretest", recipe(Path(folder) / "recipe")


def simulations() -> Iterator[tuple[str, str]]:
    fed = fg.Federation.load("digits", clients=6, partition=fg.Dirichlet(0.3), seed=1)
    model = fg.models.build("logistic", features=64, classes=10)
    shared = {"rounds": 4, "steps": fg.Linear(1, 4), "batch_size": 8, "weight_decay": 0.001, "seed": 3}
    for engine, how in ENGINES.items():
        for sampling in SAMPLING:
            for who, participation in PARTICIPATION.items():
                if engine == "compiled" and (sampling, who) != (SAMPLING[0], "all"):
                    continue  # compiling takes a minute, and draws nothing
                options = {**shared, **how, "sampling": sampling, "participation": participation}
                for name in ALGORITHMS if engine != "compiled" else ALGORITHMS[:1]:
                    result = fg.simulate(model, fed, fg.algorithm(name, lr=0.1), **options)
                    yield f"{name}, {engine}, {sampling}, {who}", of_result(result)
                many = [fg.algorithm(name, lr=0.1) for name in ALGORITHMS]
                for name, result in zip(ALGORITHMS, fg.simulate_many(model, fed, many, **options), strict=True):
                    yield f"{name} side by side, {engine}, {sampling}, {who}", of_result(result)


def of_result(result: Any) -> str:
    return digest(result.vector.numpy().tobytes(), [dict(record) for record in result.history])


def sweep(file: Path) -> str:
    """Run a sweep of three step sizes and two seeds through the command."""
    out = file.parent / "sweep"
    grid = ["--grid", "algorithm.lr=0.03,0.1,0.3", "--seeds", "2", "--set", "rounds=5"]
    fedagrac("sweep", file, *grid, "--out", out)
    return of_folders(out)


def resumed(file: Path) -> str:
    """Interrupt a run in its second algorithm and resume it."""
    out = file.parent / "resumed"
    process = subprocess.Popen(words("run", file, "--out", out), env=ENVIRONMENT, stderr=subprocess.DEVNULL)
    history = out / "fedagrac" / "history.jsonl"
    while process.poll() is None and (not history.exists() or len(history.read_text().splitlines()) < 5):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    if process.wait() != 143:
        raise SystemExit(f"the run ended with {process.returncode} before it was interrupted")
    fedagrac("run", "--resume", "--out", out)
    return of_folders(out)


def recipe(out: Path) -> str:
    """Run a recipe at its smallest scale; its records are JSON files, or lines of one file."""
    fedagrac("reproduce", "figure-pretest", "--scale", "quick", "--out", out)
    texts = [path.read_text() for path in out.rglob("*.json") if path.name != "environments.json"]
    texts += [line for path in out.rglob("*.jsonl") for line in path.read_text().splitlines()]
    records = [json.loads(text) for text in texts]
    named = [
        {"cell": r.get("trial", r.get("cell")), **r} for r in records
    ]  # older records name their trials cells
    kept = sorted(({key: r[key] for key in ("cell", "settings", "outcome")} for r in named), key=json.dumps)
    return digest(b"", kept)


def fedagrac(*arguments: Any) -> None:
    subprocess.run(words(*arguments), env=ENVIRONMENT, check=True, capture_output=True)


def words(*arguments: Any) -> list[str]:
    return [sys.executable, "-m", "fedagrac", *map(str, arguments)]


def of_folders(out: Path) -> str:
    """Return the fingerprint of every run folder below a folder."""
    found = {}
    for model in sorted(out.rglob("model.safetensors")):
        lines = (model.parent / "history.jsonl").read_text().splitlines()
        rounds = [json.loads(line) for line in lines]
        found[str(model.parent.relative_to(out))] = digest(model.read_bytes(), rounds)
    if not found:
        raise SystemExit(f"no runs in {out}")
    return digest(b"", found)


def digest(model: bytes, told: Any) -> str:
    return hashlib.sha256(model + json.dumps(without_wall_times(told), sort_keys=True).encode()).hexdigest()


def without_wall_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: without_wall_times(inner) for key, inner in value.items() if key not in WALL}
    return [without_wall_times(inner) for inner in value] if isinstance(value, list) else value


if __name__ == "__main__":
    main()
