"""Engines: how a cohort's local rules are executed."""

from collections.abc import Callable

from fedagrac.engines.base import Engine, Loss, Workload
from fedagrac.engines.lanes import LanesEngine
from fedagrac.engines.serial import SerialEngine

__all__ = ["ENGINES", "Engine", "LanesEngine", "Loss", "SerialEngine", "Workload"]

ENGINES: dict[str, Callable[[Workload], Engine]] = {"serial": SerialEngine, "lanes": LanesEngine}
"""Every engine by name."""
