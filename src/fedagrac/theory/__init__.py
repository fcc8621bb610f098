"""The paper's theory as something to run: constants, bounds, fixed points and rates of a problem of one's own."""

from __future__ import annotations

from fedagrac.theory import bounds
from fedagrac.theory.constants import Constants, constants
from fedagrac.theory.problem import Problem

__all__ = ["Constants", "Problem", "bounds", "constants"]
