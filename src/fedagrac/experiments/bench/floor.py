"""The least time that a client-step can take on this machine: its arithmetic and its memory traffic.

The machine's rates are measured, not looked up: a large square matrix product and a large copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from fedagrac.data.trees import map_leaves, num_samples

if TYPE_CHECKING:
    from torch import nn

    from fedagrac.engines import Workload

__all__ = ["Floor", "copy_rate", "product_rate", "step_bytes", "step_flops"]

PASSES = 6
"""How often a step moves the model: forward and backward read it, backward writes the gradient, the update reads
gradient and model and writes the model."""


@dataclass(frozen=True)
class Floor:
    """The least time of a client-step.

    Attributes:
        flops: floating-point operations of a client-step.
        flops_per_s: the machine's rate of matrix products.
        bytes: bytes that a client-step must move.
        bytes_per_s: the machine's rate of copies, reads and writes together.

    Examples:
        >>> floor = Floor(flops=2e9, flops_per_s=1e12, bytes=1e6, bytes_per_s=1e9)
        >>> floor.arithmetic_us, floor.memory_us, floor.us
        (2000.0, 1000.0, 2000.0)
    """

    flops: float
    flops_per_s: float
    bytes: float
    bytes_per_s: float

    @property
    def arithmetic_us(self) -> float:
        """Microseconds of the operations alone."""
        return self.flops / self.flops_per_s * 1e6

    @property
    def memory_us(self) -> float:
        """Microseconds of the memory traffic alone."""
        return self.bytes / self.bytes_per_s * 1e6

    @property
    def us(self) -> float:
        """The larger of the two: arithmetic and traffic may overlap."""
        return max(self.arithmetic_us, self.memory_us)


def step_flops(module: nn.Module, workload: Workload) -> float:
    """Return the operations of matrix products and convolutions in one local step, forward and backward.

    They are counted on torch's meta device, which computes nothing. There, recurrent layers and attention consist
    of products that torch can count; on a CPU they are single operators that it cannot. A module that does not run
    there is counted on its own device.

    Args:
        module: a copy of the workload's module, which moves to the meta device.
        workload: the problem, with the batch size and the loss.
    """
    from torch.utils.flop_counter import FlopCounterMode

    samples = torch.arange(int(workload.batch_size or 1), device=workload.model.device)
    batch = workload.load(samples % num_samples(workload.inputs))
    try:
        inputs, targets = (map_leaves(lambda leaf: leaf.to("meta"), part) for part in batch)
        arguments, options = workload.arguments(inputs)
        module = module.to("meta").train()
        with FlopCounterMode(display=False) as counter:
            loss = workload.loss(module(*arguments, **options), targets)
            torch.autograd.grad(loss, list(module.parameters()), allow_unused=True)
        return float(counter.get_total_flops())
    except (NotImplementedError, RuntimeError):
        return workload.step_flops()


def step_bytes(parameters: int, itemsize: int = 4, corrected: bool = True) -> int:
    """Return the bytes that a client-step must move: six passes over the model, and one over a correction.

    Activations are left out, as they may stay in caches.

    Examples:
        >>> step_bytes(1000, corrected=False)
        24000
        >>> step_bytes(1000)
        28000
    """
    return (PASSES + corrected) * parameters * itemsize


def product_rate(device: str, dtype: torch.dtype = torch.float32) -> float:
    """Return the operations per second of a large square matrix product, at the precision that is in force."""
    n = 8192 if device.startswith("cuda") else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / _best(lambda: torch.mm(a, b, out=out), device)


def copy_rate(device: str) -> float:
    """Return the bytes per second of a large copy, reads and writes together."""
    source = torch.zeros(2**28 if device.startswith("cuda") else 2**25, device=device)  # beyond all caches
    target = torch.empty_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def _best(work: Callable[[], object], device: str, seconds: float = 0.3) -> float:
    """Return the seconds of the fastest of several repetitions."""
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        begun = time.perf_counter()
        work()
        if device.startswith("cuda"):
            torch.cuda.synchronize()
        times.append(time.perf_counter() - begun)
    return min(times)
