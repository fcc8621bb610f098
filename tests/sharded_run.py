"""Run every algorithm, and one that draws, on digits in each process of a sharded test; rank 0 writes."""

import json
import sys
from pathlib import Path

import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.engines.ranks import leave_ranks, start_ranks
from keyed_noise import Noisy
from two_layers import LAYERED, module_for


def histories(participation):
    """Return the losses, accuracies, bytes and final model of every algorithm."""
    fed = fg.Federation.load("digits", clients=5, partition=fg.Dirichlet(0.3))
    columns = {}
    algorithms = {name: fg.algorithm(name, lr=0.1) for name in sorted(REGISTRY)}
    for name, algorithm in {**algorithms, "noisy": Noisy(lr=0.1)}.items():
        # AdamW moves as far along a gradient of 1e-7 as along one of 1, so it magnifies the rounding of float32;
        # so do hidden layers
        exact = name in LAYERED or not algorithm.local.plain
        dtype = torch.float64 if exact else torch.float32
        result = fg.simulate(
            module_for(name), fed, algorithm, rounds=4, steps=fg.Linear(2, 4), batch_size=10, eval_every=3,
            participation=participation, dtype=dtype,
        )  # fmt: skip
        keys = ("test_accuracy", "test_loss", "train_loss", "bytes_total", "sim_time", "fast", "clients")
        columns[name] = {key: result.history.column(key) for key in keys}
        columns[name]["x"] = result.vector.tolist()
    return columns


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = start_ranks()
    by_participation = {str(p): histories(p) for p in (None, 2)}
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"size": ranks.size, **by_participation}))
    leave_ranks()
