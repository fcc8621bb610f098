"""Memory: how much is free, how many lanes fit into it, and whether freed memory stays with the process."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.engines.workload import Workload

__all__ = ["LaneMemory", "free_memory", "keep_freed_memory"]

MEMORY_SHARE = 0.4
"""Share of the free memory that one wave may plan to use."""

KEPT = 2**30
"""Bytes that may stay with the process after they were freed."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


class LaneMemory:
    """Estimates how many lanes of a workload fit into the free memory."""

    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self._activations: dict[int, int] = {}

    def fitting_width(self, vectors: int, batch: int, steps: int) -> int:
        """Return how many lanes fit, at least 1, if each needs this many d-vectors and this many steps.

        What a backward pass keeps is measured on one batch. What libraries need in addition is unknown, so a wave
        that does not fit after all is run again in halves.
        """
        model = self.workload.model
        if batch not in self._activations:
            self._activations[batch] = self._kept_bytes(batch)
        tables = 8 * steps * batch * (1 if self.workload.federation.images is None else 4)
        per_lane = (
            vectors * model.size * torch.finfo(model.dtype).bits // 8 + 2 * self._activations[batch] + tables
        )
        return max(1, int(MEMORY_SHARE * free_memory(model.device) / per_lane))

    def _kept_bytes(self, batch: int) -> int:
        """Return the bytes that one lane keeps from a forward pass for its backward pass."""
        w = self.workload
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        samples = torch.zeros(batch, dtype=torch.int64, device=w.model.device)
        inputs, targets = w.load(samples, generators=w.generators([0], 0))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            w.loss(w.call(inputs), targets)
        w.model.buffers.put(None)
        return sum(kept.values())


def free_memory(device: torch.device) -> int:
    """Return the free bytes on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        # unlike SC_AVPHYS_PAGES, this counts the page cache as free
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return 2**32


@functools.cache
def keep_freed_memory() -> bool:
    """Let this process keep memory that it frees, up to 1 GiB, and return whether that worked.

    A step allocates and frees the same megabytes again and again. By default glibc returns them to the system each
    time, and the system then hands out zeroed pages one fault at a time. That takes a third of the time of a batch
    of small convolutions on a CPU.

    The setting holds for the whole process and cannot be undone, so no engine makes it by itself: call this
    function once before a long simulation on a CPU, as the command line does. Without glibc nothing changes. No
    result depends on it.

    Examples:
        >>> keep_freed_memory() in (True, False)
        True
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_MMAP_THRESHOLD: KEPT, _TRIM_THRESHOLD: KEPT, _TOP_PAD: KEPT // 16}
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings.items())
