"""Run 20,000 rounds of a small problem: memory must stay flat and rounds must not slow down.

Digits, logistic regression, FedaGrac, 4 of 8 clients a round with 1 to 8 steps, an evaluation every round, a
checkpoint every 100 rounds. The first tenth is warm-up. The last tenth is compared with the second by wall time if
the process had a core to itself in both, and by CPU time otherwise.
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
    """Run the experiment and compare its end with the end of the warm-up."""
    seen = watch(EXPERIMENT, out / "rounds")
    warm = ROUNDS // 10
    rounds, resident, _ = seen.samples[seen.samples[:, 0] >= warm].T
    first, most = int(resident[0]), int(resident.max())
    slope = np.polyfit(rounds, resident, 1)[0]
    tenths = np.array_split(seen.seconds_per_round, 10)
    clock = np.array([np.median(tenth) for tenth in tenths])
    processor = np.diff(np.interp(np.linspace(0, ROUNDS, 11), seen.samples[:, 0], seen.samples[:, 2])) / warm
    undisturbed = processor[[1, -1]].sum() > 0.8 * clock[[1, -1]].sum()
    seconds = clock if undisturbed else processor
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
            "ms_per_round_by_tenth": (clock * 1e3).tolist(),
            "cpu_ms_per_round_by_tenth": (processor * 1e3).tolist(),
            "history_bytes_per_round": history / ROUNDS,
            **seen.checkpoint(EXPERIMENT["checkpoint_every"]),
        },
        [
            Promise("rounds done", len(seen.ends), ">=", ROUNDS),
            Promise("most memory after warm-up / at its end", most / first, "<=", 1.05),
            Promise(
                f"a round of the last tenth / of the second, by {'the clock' if undisturbed else 'CPU seconds'}",
                float(seconds[-1] / seconds[1]),
                "<=",
                1.2,
            ),
        ],
    )
