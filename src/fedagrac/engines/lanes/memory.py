"""Memory of the machine: how much is free, and freed memory that stays at hand."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import os
import sys

import torch

__all__ = ["free_memory", "keep_freed_memory"]

KEPT = 2**30
"""Bytes that may stay with the process after they were freed."""

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD = -1, -2, -3  # malloc.h


def free_memory(device: torch.device) -> int:
    """Return the free bytes on the device."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    with contextlib.suppress(OSError, StopIteration), open("/proc/meminfo", encoding="ascii") as lines:
        # what the page cache holds counts as free, unlike in SC_AVPHYS_PAGES
        return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))
    if hasattr(os, "sysconf") and "SC_AVPHYS_PAGES" in os.sysconf_names:
        return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    return 2**32


@functools.cache
def keep_freed_memory() -> bool:
    """Let the C library keep freed memory for the next step instead of handing it back; return whether it does.

    A step allocates and frees the same megabytes over and over. By default glibc returns them to the system each
    time, which then hands out zeroed pages one fault at a time: a third of the time of a batch of small
    convolutions. Elsewhere than on glibc nothing is changed.
    """
    if not sys.platform.startswith("linux"):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = {_MMAP_THRESHOLD: KEPT, _TRIM_THRESHOLD: KEPT, _TOP_PAD: KEPT // 16}
    return all(mallopt(ctypes.c_int(name), ctypes.c_int(value)) for name, value in settings.items())
