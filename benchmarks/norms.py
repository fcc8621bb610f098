"""BatchNorm with averaged buffers beside GroupNorm: a CNN on Fashion-MNIST, 20 clients, split evenly or by label.

    PYTHONPATH=src python benchmarks/norms.py --seeds 3 --rounds 15

Prints the test accuracy of each seed for both norms and each way to treat buffers.
"""

import argparse
import statistics

import torch
from torch import nn

import fedagrac as fg


def network(norm):
    """Return two convolutions, each with a norm, and a linear layer."""

    def normalised(channels):
        return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(4, channels)

    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), normalised(8), nn.ReLU(), nn.Conv2d(8, 16, 3, stride=2), normalised(16),
        nn.ReLU(), nn.Flatten(), nn.Linear(16 * 25, 10),
    )  # fmt: skip


def main():
    """Run the comparison."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=15)
    args = parser.parse_args()
    for split, partition in (("IID", fg.IID()), ("Dirichlet(0.3)", fg.Dirichlet(0.3))):
        fed = fg.Federation.load("fashion-mnist", clients=20, partition=partition, seed=0)
        for norm, buffers in (("group", "average"), ("batch", "average"), ("batch", "local"), ("batch", "frozen")):
            accuracies = []
            for seed in range(args.seeds):
                torch.manual_seed(seed)
                result = fg.simulate(
                    network(norm), fed, fg.FedAvg(lr=0.05), rounds=args.rounds, eval_every=args.rounds,
                    steps=fg.Uniform(5, 35), batch_size=25, seed=seed, buffers=buffers,
                )  # fmt: skip
                accuracies.append(100 * result.history.last())
            mean, spread = statistics.fmean(accuracies), statistics.stdev(accuracies) if args.seeds > 1 else 0.0
            each = ", ".join(f"{accuracy:.2f}" for accuracy in accuracies)
            print(f"{split}, {norm}, {buffers}: {mean:.2f} +- {spread:.2f} ({each})", flush=True)


if __name__ == "__main__":
    main()
