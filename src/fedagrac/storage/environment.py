"""The versions and the machine of a run, for environment.json and the records of the paper."""

from __future__ import annotations

import os
import platform
from typing import Any

import numpy as np
import torch

from fedagrac.version import __version__

__all__ = ["environment"]


def environment(device: torch.device | None = None) -> dict[str, Any]:
    """Return the versions and the machine that a reader needs to repeat a run, without environment variables."""
    gpu = torch.cuda.get_device_name(device) if device is not None and device.type == "cuda" else None
    return {
        "fedagrac": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "device": None if device is None else str(device),
        "gpu": gpu,
    }
