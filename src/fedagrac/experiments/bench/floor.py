"""The least time that a client-step can take on this machine: its arithmetic and its memory traffic.

The machine's rates are measured, not looked up: a large square matrix product and a large copy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedagrac.engines.lanes.kernels.products import fast, product

__all__ = ["Floor", "copy_rate", "product_rate", "step_bytes"]

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
    """Return the operations per second of a large square matrix product, at the precision that is in force.

    The library is the one that lanes take for large products on this machine.
    """
    n = 8192 if device.startswith("cuda") else 1024
    a, b = (torch.randn(n, n, device=device).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    multiply = (lambda: product(a, b)) if fast(a, b) else lambda: torch.mm(a, b, out=out)
    return 2 * n**3 / _best(multiply, device)


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
