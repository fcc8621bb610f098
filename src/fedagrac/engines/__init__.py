"""Engines: how a cohort's local rules are executed."""

from fedagrac.engines.choice import EngineRecord, choose_engine, measured_choices
from fedagrac.engines.lanes.engine import LanesEngine
from fedagrac.engines.ranks import Ranks, current_ranks
from fedagrac.engines.serial import SerialEngine
from fedagrac.engines.workload import Engine, Loss, Workload

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
