"""20,000 rounds of a small problem: flat memory, no slowdown.

Digits, logistic regression, FedaGrac, 4 of 8 clients a round with 1 to 8 steps, evaluated every round, with a
checkpoint every 100 rounds. Warm-up is the first tenth.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from benchmarks.soak.part import Part, Promise
from benchmarks.soak.watch import watch

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

ROUNDS = 20_000
EXPERIMENT = {
    "name": "soak-rounds",
    "rounds": ROUNDS,
    "lr": 0.05,
    "participation": 4,
    "checkpoint_every": 100,
    "data": {"name": "digits", "clients": 8, "partition": {"kind": "dirichlet", "alpha": 0.3}},
    "model": {"name": "logistic"},
    "steps": {"kind": "linear", "first": 1, "increment": 1},
    "algorithm": [{"name": "fedagrac"}],
}


def run(out: Path) -> Part:
    """Run it and compare the end with the end of the warm-up."""
    seen = watch(EXPERIMENT, out / "rounds")
    warm = ROUNDS // 10
    rounds, resident = seen.samples[seen.samples[:, 0] >= warm].T
    first, most = int(resident[0]), int(resident.max())
    slope = np.polyfit(rounds, resident, 1)[0]
    tenths = np.array_split(seen.seconds_per_round, 10)
    after, last = np.median(tenths[1]), np.median(tenths[-1])
    history = (seen.folder / "history.jsonl").stat().st_size
    return Part(
        {
            "rounds": len(seen.ends),
            "seconds": seen.seconds,
            "rss_after_warm_up_mb": first / 2**20,
            "rss_max_mb": most / 2**20,
            "rss_growth": most / first - 1,
            "rss_bytes_per_round": float(slope),
            "rss_peak_with_report_mb": seen.peak / 2**20,
            "ms_per_round_by_tenth": [float(np.median(tenth)) * 1e3 for tenth in tenths],
            "history_bytes_per_round": history / ROUNDS,
            **seen.checkpoint(EXPERIMENT["checkpoint_every"]),
        },
        [
            Promise("rounds done", len(seen.ends), ">=", ROUNDS),
            Promise("most memory after warm-up / at its end", most / first, "<=", 1.05),
            Promise("median round of the last tenth / of the second", float(last / after), "<=", 1.2),
        ],
    )
