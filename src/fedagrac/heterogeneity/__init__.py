"""How clients differ and when they come: step counts, participation, the simulated clock."""

from fedagrac.heterogeneity.clock import Clock
from fedagrac.heterogeneity.participation import Participation
from fedagrac.heterogeneity.steps import (
    Constant,
    Explicit,
    Extreme,
    Gaussian,
    Linear,
    StepSchedule,
    Uniform,
)

__all__ = [
    "Clock",
    "Constant",
    "Explicit",
    "Extreme",
    "Gaussian",
    "Linear",
    "Participation",
    "StepSchedule",
    "Uniform",
]
