"""The evaluation of a model on the test data."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from fedagrac.engines.lanes.pools import TilingPools

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.engines.workload import Workload

__all__ = ["Metric", "evaluate"]

Metric = Callable[["Tensor", "Tensor"], "Tensor | float"]
"""A function (output, target) -> scalar over the whole test set."""

CHUNKS = {"cpu": 512, "cuda": 4096}
"""Samples per batch. On a CPU, 512 fit its caches and take half the time of 4096 for a small CNN."""


def evaluate(
    workload: Workload, x: Tensor, metrics: Mapping[str, Metric], buffers: Tensor | None = None
) -> dict[str, float | None]:
    """Return test_loss, test_accuracy and the metrics by name.

    test_accuracy is None if the task is not classification. Without test data every value is None.
    """
    names = ["test_accuracy", "test_loss", *metrics]
    if workload.test is None:
        return dict.fromkeys(names)
    inputs, targets = workload.test
    module = workload.model.module
    workload.model.bind(x)
    workload.model.buffers.put(buffers)
    module.eval()
    # sums stay on the device, because reading a number would wait for every chunk
    loss = torch.zeros((), dtype=torch.float64, device=x.device)
    correct = torch.zeros((), dtype=torch.int64, device=x.device)
    chunk = CHUNKS.get(x.device.type, 4096)
    outputs = []
    classification = False
    pools = TilingPools() if x.device.type == "cpu" else contextlib.nullcontext()
    with torch.inference_mode(), pools:
        for X, y in zip(torch.split(inputs, chunk), torch.split(targets, chunk), strict=True):
            output = module(workload.prepare(X))
            loss += workload.loss(output, y).double() * len(X)
            classification = not y.is_floating_point() and output.ndim == y.ndim + 1
            if classification:
                correct += (output.argmax(1) == y).sum()
            if metrics:
                outputs.append(output)
        whole = torch.cat(outputs) if outputs else None
        values = (
            {name: float(metric(whole, targets)) for name, metric in metrics.items()} if whole is not None else {}
        )
    accuracy = int(correct) / targets.numel() if classification else None
    return {"test_accuracy": accuracy, "test_loss": float(loss) / len(inputs), **values}
