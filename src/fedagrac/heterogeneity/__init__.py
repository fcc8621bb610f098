"""How clients differ and when they come: step counts, devices, participation, the simulated clock and wire."""

from fedagrac.heterogeneity.clock import Clock
from fedagrac.heterogeneity.devices import DEVICES, DeviceProfile, Devices
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
    "DEVICES",
    "Clock",
    "Constant",
    "DeviceProfile",
    "Devices",
    "Explicit",
    "Extreme",
    "Gaussian",
    "Linear",
    "Participation",
    "StepSchedule",
    "Uniform",
]
