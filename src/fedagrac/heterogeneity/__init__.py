"""How clients differ and when they take part: steps, devices, participation, the simulated clock and wire."""

from fedagrac.heterogeneity.clock import Clock
from fedagrac.heterogeneity.devices import DEVICES, DeviceProfile, Devices
from fedagrac.heterogeneity.participation import Participation
from fedagrac.heterogeneity.steps import (
    Constant,
    Epochs,
    Explicit,
    Extreme,
    Gaussian,
    Geometric,
    Linear,
    StepSchedule,
    Uniform,
)

__all__ = [
    "DEVICES",
    "STEP_SCHEDULES",
    "Clock",
    "Constant",
    "DeviceProfile",
    "Devices",
    "Epochs",
    "Explicit",
    "Extreme",
    "Gaussian",
    "Geometric",
    "Linear",
    "Participation",
    "StepSchedule",
    "Uniform",
]

STEP_SCHEDULES: dict[str, type[StepSchedule]] = {
    "constant": Constant,
    "gaussian": Gaussian,
    "uniform": Uniform,
    "linear": Linear,
    "extreme": Extreme,
    "explicit": Explicit,
    "devices": Devices,
    "geometric": Geometric,
    "epochs": Epochs,
}
"""All step schedules by the name of their kind."""
