"""Run 100,000 registered clients: memory must follow the clients that took part, not those registered.

Digits, logistic regression (d = 650), a cohort of 100, 200 rounds. Every client draws 20 samples, K ~ Normal(20,
100), and a checkpoint follows every 10 rounds. Each algorithm runs in its own process.
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
    # settings; the server's vectors (x, nu, x_1; nu in float64 counts twice); each client's vectors (nu_i, v_i)
    "fedavg": ({}, 1, 0),
    "scaffold": ({}, 3, 1),
    "fedagrac": ({"init": "full"}, 4, 2),
}
BASE = 600 * 2**20
"""Bytes of a process without clients: torch, the data, the report's libraries."""


def run(out: Path) -> Part:
    """Run three algorithms and compare their memory and checkpoints with the vectors that they must keep."""
    part = Part()
    seen = _seen(ROUNDS - EVERY)
    part.figures |= {"clients": CLIENTS, "cohort": COHORT, "rounds": ROUNDS, "clients_seen": _seen(ROUNDS)}
    for name, (settings, vectors, rows) in ALGORITHMS.items():
        watched = watch(_experiment(name, settings), out / f"clients-{name}")
        held = (vectors + rows * seen) * VECTOR
        stored = read_checkpoint(watched.folder / "checkpoint")
        figures = watched.checkpoint(EVERY)
        took = watched.seconds_per_round
        part.figures[name] = {
            "seconds": watched.seconds,
            "seconds_to_round_1": float(watched.ends[0]),
            "ms_per_round": float(np.median(took)) * 1e3,
            "rss_max_mb": float(watched.samples[:, 1].max()) / 2**20,
            "rss_peak_with_report_mb": watched.peak / 2**20,
            "state_mb": held / 2**20,
            **figures,
        }
        # A checkpoint also holds the clients' numbers, 8 bytes each, and a JSON header.
        extra = figures["checkpoint_bytes"] - held - 8 * seen
        part.promises += [
            Promise(f"{name}: rounds done", len(watched.ends), "==", ROUNDS),
            Promise(f"{name}: clients in the checkpoint", len(stored.table.export()[0]), "==", seen),
            Promise(f"{name}: bytes of a checkpoint beyond its vectors", abs(extra), "<=", 2048),
            Promise(f"{name}: peak memory / (600 MB + 5 x state)", watched.peak / (BASE + 5 * held), "<=", 1),
        ]
    return part


def _seen(rounds: int) -> int:
    """Return how many clients take part in the first rounds, from the draws alone."""
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
