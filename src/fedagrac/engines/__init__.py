"""Engines: how the local rules of a cohort are executed."""

from fedagrac.engines.base import Engine
from fedagrac.engines.choice import EngineRecord, choose_engine, measured_choices
from fedagrac.engines.lanes.engine import LanesEngine
from fedagrac.engines.lanes.memory import keep_freed_memory
from fedagrac.engines.ranks import Ranks, current_ranks
from fedagrac.engines.serial import SerialEngine
from fedagrac.engines.threads import choose_threads, restored_threads, use_threads
from fedagrac.engines.workload import Loss, Workload

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
    "choose_threads",
    "current_ranks",
    "keep_freed_memory",
    "measured_choices",
    "restored_threads",
    "use_threads",
]

ENGINES = ("serial", "lanes")
"""The names of all engines."""
