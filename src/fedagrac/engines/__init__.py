"""Engines: how a cohort's local rules are executed."""

from collections.abc import Callable

import numpy as np
from torch import nn

from fedagrac.engines.base import Engine, Loss, Workload
from fedagrac.engines.lanes import LanesEngine
from fedagrac.engines.serial import SerialEngine

__all__ = ["ENGINES", "Engine", "LanesEngine", "Loss", "SerialEngine", "Workload", "choose_engine"]

ENGINES: dict[str, Callable[[Workload], Engine]] = {"serial": SerialEngine, "lanes": LanesEngine}
"""Every engine by name."""

SMALL = 100_000
"""Parameters up to which a model without convolutions runs faster as lanes on a CPU."""


def choose_engine(workload: Workload, lanes: int) -> str:
    """Return the engine for `engine="auto"`: lanes on a GPU, and on a CPU for small models without convolutions.

    Only clients of one batch size can share a batch; with fewer than four of them at a time there is too little to
    share. The rule is that of the measurements in docs/performance.md; it depends on nothing that varies from run
    to run, so neither do the numbers.
    """
    model = workload.model
    kinds = len(np.unique(workload.batch_sizes(np.arange(workload.federation.num_clients))))
    convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in model.module.modules())
    wins = model.device.type == "cuda" or (model.size <= SMALL and not convolves)
    return "lanes" if wins and lanes >= 4 * kinds else "serial"
