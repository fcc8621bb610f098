"""Clients whose gradient is the same everywhere, so that every round can be computed by hand.

The model is one vector x, client i's loss is <g_i, x>: its gradient is g_i at every point.
"""

import numpy as np
import torch

import fedagrac as fg


def inner_product(output, target):
    return (output * target).sum(-1).mean()


class Point(torch.nn.Module):
    """x itself, whatever the input."""

    def __init__(self, x):
        super().__init__()
        self.x = torch.nn.Parameter(torch.tensor(x, dtype=torch.float64))

    def forward(self, inputs):
        return self.x.expand(len(inputs), -1)


def federation(gradients, sizes=None, weights=None):
    sizes = sizes or [1] * len(gradients)
    return fg.Federation.from_arrays(
        [(np.zeros((n, 1)), np.tile(np.asarray(g, float), (n, 1))) for g, n in zip(gradients, sizes, strict=True)],
        weights=weights,
    )


def simulate(algorithm, gradients, K, x=(0.0, 0.0), sizes=None, rounds=1, weights=None, **options):
    return fg.simulate(
        Point(list(x)),
        federation(gradients, sizes, weights),
        algorithm,
        rounds=rounds,
        steps=fg.Explicit([K]),
        batch_size=options.pop("batch_size", None),
        loss=inner_product,
        device="cpu",
        **options,
    )
