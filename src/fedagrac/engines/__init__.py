"""Engines: how a cohort's local rules are executed."""

from fedagrac.engines.base import Engine, Loss, Workload
from fedagrac.engines.serial import SerialEngine

__all__ = ["ENGINES", "Engine", "Loss", "SerialEngine", "Workload"]

ENGINES: dict[str, type[SerialEngine]] = {"serial": SerialEngine}
"""Every engine by name."""
