"""100,000 registered clients, a cohort of 100, 200 rounds: memory follows the clients seen, not those registered.

Digits, logistic regression (d = 650), every client draws 20 samples of its own, K ~ Normal(20, 100), a checkpoint
every 10 rounds. Each algorithm runs in a process of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.soak.part import Part, Promise
from benchmarks.soak.watch import watch
from fedagrac.heterogeneity import Participation
from fedagrac.storage.checkpoints import read_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

CLIENTS, COHORT, ROUNDS, EVERY = 100_000, 100, 200, 10
VECTOR = 650 * 4
ALGORITHMS: dict[str, tuple[dict[str, Any], int, int]] = {
    # settings, the server's vectors (x, nu, x_1; nu in float64 counts twice), rows of each client seen (nu_i, v_i)
    "fedavg": ({}, 1, 0),
    "scaffold": ({}, 3, 1),
    "fedagrac": ({"init": "full"}, 4, 2),
}
BASE = 600 * 2**20
"""The process without any client: torch, the data, the report's libraries."""


def run(out: Path) -> Part:
    """Run the three algorithms and hold memory and checkpoints against the vectors they must hold."""
    part = Part()
    seen = _seen(ROUNDS - EVERY)
    part.figures |= {"clients": CLIENTS, "cohort": COHORT, "rounds": ROUNDS, "clients_seen": _seen(ROUNDS)}
    for name, (settings, vectors, rows) in ALGORITHMS.items():
        found = watch(_experiment(name, settings), out / f"clients-{name}")
        held = (vectors + rows * seen) * VECTOR
        stored = read_checkpoint(found.folder / "checkpoint")
        figures = found.checkpoint(EVERY)
        took = found.seconds_per_round
        part.figures[name] = {
            "seconds": found.seconds,
            "seconds_to_round_1": float(found.ends[0]),
            "ms_per_round": float(np.median(took)) * 1e3,
            "rss_max_mb": float(found.samples[:, 1].max()) / 2**20,
            "rss_peak_with_report_mb": found.peak / 2**20,
            "state_mb": held / 2**20,
            **figures,
        }
        # a checkpoint adds the clients' numbers, 8 bytes each, and a head of JSON
        extra = figures["checkpoint_bytes"] - held - 8 * seen
        part.promises += [
            Promise(f"{name}: rounds done", len(found.ends), "==", ROUNDS),
            Promise(f"{name}: clients in the checkpoint", len(stored.table.export()[0]), "==", seen),
            Promise(f"{name}: bytes of a checkpoint beyond its vectors", abs(extra), "<=", 2048),
            Promise(f"{name}: peak memory / (600 MB + 5 x state)", found.peak / (BASE + 5 * held), "<=", 1),
        ]
    return part


def _seen(rounds: int) -> int:
    """Count the clients that take part in the first rounds, from the draws alone."""
    weights = np.full(CLIENTS, 1 / CLIENTS)
    return len(np.unique(np.concatenate([Participation(COHORT).draw(t, weights, 0)[0] for t in range(rounds)])))


def _experiment(name: str, settings: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": f"soak-clients-{name}",
        "rounds": ROUNDS,
        "lr": 0.05,
        "participation": COHORT,
        "checkpoint_every": EVERY,
        "data": {"name": "digits", "clients": CLIENTS, "partition": {"kind": "resample", "size": 20}},
        "model": {"name": "logistic"},
        "steps": {"kind": "gaussian", "mean": 20, "variance": 100},
        "algorithm": [{"name": name, **settings}],
    }
