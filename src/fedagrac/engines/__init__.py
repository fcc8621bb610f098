"""Engines: how a cohort's local rules are executed."""

from fedagrac.engines.base import Engine, Loss, Workload
from fedagrac.engines.choice import choose_engine, measured_choices
from fedagrac.engines.lanes import LanesEngine
from fedagrac.engines.serial import SerialEngine

__all__ = [
    "ENGINES",
    "Engine",
    "LanesEngine",
    "Loss",
    "SerialEngine",
    "Workload",
    "choose_engine",
    "measured_choices",
]

ENGINES = ("serial", "lanes")
"""Every engine by name."""
