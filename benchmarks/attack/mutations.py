"""Receive 100,000 mutated replies: each is dropped, or means what an honest one might; nothing else happens."""

from __future__ import annotations

import logging
import sys
import time
from typing import TYPE_CHECKING, Any

from benchmarks.soak.part import TESTS, Part, Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]

REPLIES, SEED = 100_000, 18
MOST_MEMORY = 64
"""MB by which the process may grow after its first replies. Some replies stand for 2 GB."""

EVERY = 10.0
"""Seconds between two lines of progress."""


def run(out: Path) -> Part:
    """Receive all replies and count what came of them."""
    sys.path.insert(0, str(TESTS))
    from mutated_replies import D, Trial, peak_memory

    logging.getLogger("fedagrac").setLevel(logging.CRITICAL)
    begun, said = time.monotonic(), time.monotonic()

    def progress(tally: Any) -> None:
        nonlocal said
        now = time.monotonic()
        if now - said >= EVERY:
            said = now
            left = (now - begun) * (REPLIES / tally.tried - 1)
            text = (
                f"mutations: {tally.tried:,} of {REPLIES:,} replies, {len(tally.faults)} faults, {left:.0f} s left"
            )
            print(text, file=sys.stderr, flush=True)

    used = time.process_time()
    tally = Trial(SEED).run(REPLIES, progress)
    used = time.process_time() - used
    (out / "mutations-faults.txt").write_text("\n".join(tally.faults), encoding="utf-8", errors="backslashreplace")
    return Part(
        {
            "replies": tally.tried,
            "accepted": tally.accepted,
            "events": tally.events,
            "CPU ms for each": used / tally.tried * 1e3,
            "ways": dict(tally.ways.most_common()),
            "faults": tally.faults[:5],
        },
        [
            Promise("mutated replies", tally.tried, ">=", REPLIES),
            Promise(
                "errors that escaped, replies used that no honest client sends, honest ones lost",
                len(tally.faults),
                "==",
                0,
            ),
            Promise("bytes of the largest array that was inflated", tally.largest_array, "<=", 8 * D + 1024),
            Promise("characters of the longest event", tally.longest_event, "<=", 500),
            Promise("CPU seconds of a reply in the slowest batch", tally.slowest, "<=", 0.5),
            Promise("MB by which the process grew", (peak_memory() - tally.memory) / 2**20, "<=", MOST_MEMORY),
        ],
    )
