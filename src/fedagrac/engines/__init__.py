"""Engines: how a cohort's local rules are executed."""

from fedagrac.engines.base import Engine, Loss, Workload
from fedagrac.engines.choice import EngineRecord, choose_engine, measured_choices
from fedagrac.engines.lanes import LanesEngine
from fedagrac.engines.serial import SerialEngine
from fedagrac.engines.sharded import Ranks, current_ranks

__all__ = [
    "ENGINES",
    "Engine",
    "EngineRecord",
    "LanesEngine",
    "Loss",
    "Ranks",
    "SerialEngine",
    "Workload",
    "choose_engine",
    "current_ranks",
    "measured_choices",
]

ENGINES = ("serial", "lanes")
"""Every engine by name."""
