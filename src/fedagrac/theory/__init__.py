"""The paper's theory as something to run: constants, bounds, fixed points and rates of a problem of one's own.

`fedagrac theory EXPERIMENT.toml` does all of it for an experiment (`fedagrac.experiments.study`). No experiment,
file or picture enters here.
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
