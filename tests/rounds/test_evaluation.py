"""Evaluation: loss and accuracy computed by hand, and pools that equal those of torch."""

import numpy as np
import pytest
import torch
from torch import nn

import fedagrac as fg
from fedagrac.engines import Workload
from fedagrac.engines.lanes.pools import TilingPools
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.evaluation import evaluate
from fedagrac.rounds.measurement import CHUNKS


@pytest.mark.parametrize("shape", [(3, 2, 9, 7), (2, 4, 8, 8), (1, 1, 2, 5)])
@pytest.mark.parametrize(
    "pool",
    [
        nn.MaxPool2d(2),
        nn.MaxPool2d(2, 2),
        nn.MaxPool2d(3, 2, 1),
        nn.MaxPool2d(2, stride=1),
        nn.MaxPool2d((2, 1)),
        nn.MaxPool2d(2, ceil_mode=True),
        nn.MaxPool2d(2, return_indices=True),
        lambda x: nn.functional.max_pool2d(x, 2, 2, 0, 1),
    ],
)
def test_pools_are_those_of_torch(shape, pool):
    x = torch.from_numpy(np.random.default_rng(0).integers(-3, 3, shape)).double()
    expected = pool(x)
    with TilingPools():
        pooled = pool(x)
    if isinstance(expected, tuple):
        assert all(torch.equal(a, b) for a, b in zip(expected, pooled, strict=True))
    else:
        assert torch.equal(expected, pooled)


def test_loss_and_accuracy_over_chunks(monkeypatch):
    """Five samples in chunks of two: means over samples, not over chunks."""
    monkeypatch.setitem(CHUNKS, "cpu", 2)
    X = np.eye(5, 3, dtype=np.float64)
    y = np.array([0, 1, 2, 1, 1])
    fed = fg.Federation.from_arrays([(X, y)], test=(X, y))
    model = nn.Linear(3, 3, bias=False, dtype=torch.float64)
    with torch.no_grad():
        model.weight.copy_(2 * torch.eye(3))
    w = Workload.of(VectorModel(model), fed, None, None, "replacement", 0.0, 0)
    measured = evaluate(w, w.model.initial(), {})
    right = -np.log(np.exp(2) / (np.exp(2) + 2))
    assert measured["test_loss"] == pytest.approx((3 * right + 2 * np.log(3)) / 5, rel=1e-14)
    assert measured["test_accuracy"] == 3 / 5  # two rows of zeros give class 0
