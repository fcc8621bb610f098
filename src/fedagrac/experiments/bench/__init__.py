"""Benchmarks: the time per client-step of every engine beside that of an ordinary PyTorch loop, and where it goes.

    fedagrac bench
    python -m fedagrac.experiments.bench --device cuda --precision tf32  # needs only torch and numpy

Data are random, with the shape, type and size of the real ones. Times include gathering, augmentation, dropout,
calibration and aggregation. The plain loop, with a module and an SGD optimiser per client, is timed before and
after each engine, which shows a drift of the machine's speed. On a CPU the process keeps the memory it frees,
for the engines and for the loop.
"""

from fedagrac.experiments.bench.cases import CASES, SWEEPS, Case
from fedagrac.experiments.bench.floor import Floor, copy_rate, product_rate, step_bytes
from fedagrac.experiments.bench.profile import KINDS, kind_of, profile_rounds
from fedagrac.experiments.bench.timing import Bench, cases_for, compare, engines_for, machine, planned, sweep

__all__ = [
    "CASES",
    "KINDS",
    "SWEEPS",
    "Bench",
    "Case",
    "Floor",
    "cases_for",
    "compare",
    "copy_rate",
    "engines_for",
    "kind_of",
    "machine",
    "planned",
    "product_rate",
    "profile_rounds",
    "step_bytes",
    "sweep",
]
