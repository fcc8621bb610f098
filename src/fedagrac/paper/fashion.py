"""What Table 1 and the figures of lambda and of the estimators share: Fashion-MNIST on 10 clients."""

from __future__ import annotations

from typing import Any, Literal

from fedagrac.paper.recipe import Scale

__all__ = ["DP1", "DP2", "RATES", "TWO", "fashion", "first_epoch", "start_of", "step_counts"]

DP1 = {"kind": "dirichlet", "alpha": 0.3}
DP2 = {"kind": "shards", "classes": 5}
TWO = {"kind": "shards", "classes": 2}

RATES = {"lr": 0.001, "cnn": 0.03}
"""The paper's learning rates by model."""

EPOCH = 240
"""Steps in a local epoch: 60,000 pictures, 10 clients, batches of 25."""


def step_counts(uneven: bool, part: int = 1) -> dict[str, Any]:
    """Return K = 100, or K_i = 100 + 150 i, or so many parts of them.

    Examples:
        >>> step_counts(True), step_counts(False, part=5)
        ({'kind': 'linear', 'first': 100, 'increment': 150}, {'kind': 'constant', 'steps': 20})
    """
    if uneven:
        return {"kind": "linear", "first": 100 // part, "increment": 150 // part}
    return {"kind": "constant", "steps": 100 // part}


def first_epoch(part: int = 1) -> int | Literal["epoch"]:
    """Return over how many steps the first gradient is averaged: a local epoch, cut down as the step counts are.

    Examples:
        >>> first_epoch(), first_epoch(5)
        ('epoch', 48)
    """
    return "epoch" if part == 1 else EPOCH // part


def start_of(model: str, scale: Scale) -> dict[str, str]:
    """Return how nu starts: at quick the CNN's from zeros, for its gradients over all pictures outlast its rounds.

    Examples:
        >>> start_of("cnn", "quick"), start_of("cnn", "paper")
        ({'init': 'zeros'}, {})
    """
    return {"init": "zeros"} if (model, scale) == ("cnn", "quick") else {}


def fashion(
    model: str, partition: dict[str, Any], steps: dict[str, Any], rounds: int, algorithm: dict[str, Any]
) -> dict[str, Any]:
    """Return the settings of a run at the paper's learning rate for the model, "lr" or "cnn"."""
    return {
        "data": {"name": "fashion-mnist", "clients": 10, "partition": partition, "seed": 0},
        "model": {"name": "logistic", "features": 784, "classes": 10} if model == "lr" else {"name": "cnn"},
        "algorithm": {"lr": RATES[model], **algorithm},
        "steps": steps,
        "batch_size": 25,
        "rounds": rounds,
        "seed": 0,
        "tf32": model == "cnn",
    }
