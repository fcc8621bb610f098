"""Compare the size of every algorithm's checkpoint of AlexNet with a hand calculation, and time it.

20 clients draw 50 samples of CIFAR-10 each and run one round of one step.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import fedagrac as fg
from benchmarks.soak.part import Part, Promise
from fedagrac.algorithms import REGISTRY
from fedagrac.data.locating import DataError
from fedagrac.storage.checkpoints import read_checkpoint, write_checkpoint

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

__all__ = ["run"]

CLIENTS = 20
VECTORS = {  # the server's (x, nu, x_1) and each client's (nu_i, v_i)
    "fedavg": 1,
    "fedprox": 1,
    "fednova": 1,
    "scaffold": 2 + CLIENTS,
    "fedlin": 1,
    "fedagrac": 3 + 2 * CLIENTS,
    "fedagrac-avg": 3 + 2 * CLIENTS,
    "fedagrac-first": 3 + 2 * CLIENTS,
    "fedagrac-reverse": 3 + 2 * CLIENTS,
}


class _Once(fg.Callback):
    """Writes and reads one checkpoint, and keeps its size and both times."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.figures = folder, {}

    def on_round(self, run: Run, record: RoundRecord) -> None:
        times = [time.perf_counter()]
        path = write_checkpoint(self.folder, run.checkpoint())
        times.append(time.perf_counter())
        read_checkpoint(self.folder)
        times.append(time.perf_counter())
        self.figures = {
            "bytes": path.stat().st_size,
            "write_s": times[1] - times[0],
            "read_s": times[2] - times[1],
        }
        run.stop("one checkpoint is enough")


def run(out: Path) -> Part:
    """Write one checkpoint per algorithm and return sizes and times."""
    part = Part()
    try:
        fed = fg.Federation.load("cifar10", clients=CLIENTS, partition=fg.Resample(50), seed=0)
    except DataError as error:
        part.figures["skipped"] = str(error)
        return part
    model = fg.models.build("alexnet")
    size = sum(parameter.numel() for parameter in model.parameters())
    part.figures["parameters"] = size
    uncounted = set(REGISTRY) - set(VECTORS)
    part.promises.append(Promise("algorithms without a hand calculation", len(uncounted), "==", 0))
    for name in sorted(set(REGISTRY) & set(VECTORS)):
        folder = out / f"checkpoint-{name}"
        once = _Once(folder)
        # The callback stops the run after the first of two rounds: the last would be evaluated, which takes long.
        fg.simulate(
            model, fed, fg.algorithm(name, lr=0.01), 2, steps=fg.Constant(1), eval_every=2, engine="serial",
            compile=False, callbacks=[once],
        )  # fmt: skip
        for path in folder.iterdir():
            path.unlink()  # up to a gigabyte each
        by_hand = VECTORS[name] * size * 4
        part.figures[name] = {**once.figures, "by_hand": by_hand}
        # The rest is the clients' numbers, 8 bytes each, and a JSON header.
        beyond = once.figures["bytes"] - by_hand
        part.promises.append(Promise(f"{name}: bytes beyond {VECTORS[name]} vectors", abs(beyond), "<=", 2048))
    return part
