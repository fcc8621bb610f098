"""The paper's theory as functions: constants, bounds, fixed points and rates of any problem.

This package only computes: it runs no simulation and reads no files. `fedagrac.experiments.study` applies it to an
experiment, and `fedagrac theory EXPERIMENT.toml` is the command for that.
"""

from __future__ import annotations

from fedagrac.theory import bounds
from fedagrac.theory.measure import Constants, constants
from fedagrac.theory.problem import Problem
from fedagrac.theory.quadratic import Quadratic, Recommendation, largest_stable_lr, recommend, round_map

__all__ = [
    "Constants",
    "Problem",
    "Quadratic",
    "Recommendation",
    "bounds",
    "constants",
    "largest_stable_lr",
    "recommend",
    "round_map",
]
