"""fedagrac: federated optimization when clients do different amounts of work.

Importing this package imports torch and numpy and nothing else.
"""

from fedagrac import models
from fedagrac.algorithms import (
    Algorithm,
    FedaGrac,
    FedAvg,
    FedLin,
    FedNova,
    FedProx,
    Scaffold,
    algorithm,
)
from fedagrac.callbacks import Callback, Checkpoints, EarlyStop, MLflow, TensorBoard
from fedagrac.core import schedule
from fedagrac.data import IID, Dirichlet, Federation, Indices, Natural, Partition, Resample, Shards
from fedagrac.errors import FedagracError, InputError
from fedagrac.heterogeneity import (
    DEVICES,
    Clock,
    Constant,
    DeviceProfile,
    Devices,
    Explicit,
    Extreme,
    Gaussian,
    Linear,
    Participation,
    StepSchedule,
    Uniform,
)
from fedagrac.rounds.api import simulate, simulate_many
from fedagrac.rounds.guard import Guard
from fedagrac.rounds.loop import Run
from fedagrac.rounds.record import History, SimulationResult
from fedagrac.rounds.setup import Setup
from fedagrac.rounds.stop import Stop
from fedagrac.version import __version__

__all__ = [
    "DEVICES",
    "IID",
    "Algorithm",
    "Callback",
    "Checkpoints",
    "Clock",
    "Constant",
    "DeviceProfile",
    "Devices",
    "Dirichlet",
    "EarlyStop",
    "Explicit",
    "Extreme",
    "FedAvg",
    "FedLin",
    "FedNova",
    "FedProx",
    "FedaGrac",
    "FedagracError",
    "Federation",
    "Gaussian",
    "Guard",
    "History",
    "Indices",
    "InputError",
    "Linear",
    "MLflow",
    "Natural",
    "Participation",
    "Partition",
    "Resample",
    "Run",
    "Scaffold",
    "Setup",
    "Shards",
    "SimulationResult",
    "StepSchedule",
    "Stop",
    "TensorBoard",
    "Uniform",
    "__version__",
    "algorithm",
    "models",
    "schedule",
    "simulate",
    "simulate_many",
]
