"""fedagrac: federated optimization when clients do different amounts of work.

Importing the package is cheap. The first use of a name imports the module that defines it, and with it torch and
numpy, and nothing else.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from fedagrac.version import __version__ as __version__

if TYPE_CHECKING:
    from fedagrac import models as models
    from fedagrac.algorithms import MIFA as MIFA
    from fedagrac.algorithms import Algorithm as Algorithm
    from fedagrac.algorithms import DiLoCo as DiLoCo
    from fedagrac.algorithms import Ditto as Ditto
    from fedagrac.algorithms import FedACG as FedACG
    from fedagrac.algorithms import FedAdagrad as FedAdagrad
    from fedagrac.algorithms import FedAdam as FedAdam
    from fedagrac.algorithms import FedaGrac as FedaGrac
    from fedagrac.algorithms import FedAvg as FedAvg
    from fedagrac.algorithms import FedAvgM as FedAvgM
    from fedagrac.algorithms import FedBN as FedBN
    from fedagrac.algorithms import FedCM as FedCM
    from fedagrac.algorithms import FedDyn as FedDyn
    from fedagrac.algorithms import FedExP as FedExP
    from fedagrac.algorithms import FedLESAM as FedLESAM
    from fedagrac.algorithms import FedLin as FedLin
    from fedagrac.algorithms import FedNova as FedNova
    from fedagrac.algorithms import FedPer as FedPer
    from fedagrac.algorithms import FedProx as FedProx
    from fedagrac.algorithms import FedSAM as FedSAM
    from fedagrac.algorithms import FedVARP as FedVARP
    from fedagrac.algorithms import FedYogi as FedYogi
    from fedagrac.algorithms import HeteroFL as HeteroFL
    from fedagrac.algorithms import Mime as Mime
    from fedagrac.algorithms import MimeLite as MimeLite
    from fedagrac.algorithms import Scaffnew as Scaffnew
    from fedagrac.algorithms import Scaffold as Scaffold
    from fedagrac.algorithms import ServerOptimizer as ServerOptimizer
    from fedagrac.algorithms import algorithm as algorithm
    from fedagrac.algorithms.base import Cost as Cost
    from fedagrac.algorithms.base import Stateless as Stateless
    from fedagrac.algorithms.base import Traits as Traits
    from fedagrac.algorithms.base import average as average
    from fedagrac.callbacks import Callback as Callback
    from fedagrac.callbacks import Checkpoints as Checkpoints
    from fedagrac.callbacks import EarlyStop as EarlyStop
    from fedagrac.callbacks import MLflow as MLflow
    from fedagrac.callbacks import TensorBoard as TensorBoard
    from fedagrac.core import schedule as schedule
    from fedagrac.core.cohort import Cohort as Cohort
    from fedagrac.core.layout import Layout as Layout
    from fedagrac.core.local import Plan as Plan
    from fedagrac.core.local import Result as Result
    from fedagrac.core.local import Second as Second
    from fedagrac.core.optimizers import SGD as SGD
    from fedagrac.core.optimizers import Adam as Adam
    from fedagrac.core.optimizers import AdamW as AdamW
    from fedagrac.core.optimizers import LocalOptimizer as LocalOptimizer
    from fedagrac.core.robust import Median as Median
    from fedagrac.core.robust import NormBounded as NormBounded
    from fedagrac.core.robust import TrimmedMean as TrimmedMean
    from fedagrac.data import IID as IID
    from fedagrac.data import ClientTests as ClientTests
    from fedagrac.data import Dirichlet as Dirichlet
    from fedagrac.data import DiskArray as DiskArray
    from fedagrac.data import Federation as Federation
    from fedagrac.data import Images as Images
    from fedagrac.data import Indices as Indices
    from fedagrac.data import Natural as Natural
    from fedagrac.data import Partition as Partition
    from fedagrac.data import Resample as Resample
    from fedagrac.data import Shards as Shards
    from fedagrac.errors import FedagracError as FedagracError
    from fedagrac.errors import InputError as InputError
    from fedagrac.heterogeneity import DEVICES as DEVICES
    from fedagrac.heterogeneity import Clock as Clock
    from fedagrac.heterogeneity import Constant as Constant
    from fedagrac.heterogeneity import DeviceProfile as DeviceProfile
    from fedagrac.heterogeneity import Devices as Devices
    from fedagrac.heterogeneity import Epochs as Epochs
    from fedagrac.heterogeneity import Explicit as Explicit
    from fedagrac.heterogeneity import Extreme as Extreme
    from fedagrac.heterogeneity import Gaussian as Gaussian
    from fedagrac.heterogeneity import Geometric as Geometric
    from fedagrac.heterogeneity import Linear as Linear
    from fedagrac.heterogeneity import Participation as Participation
    from fedagrac.heterogeneity import StepSchedule as StepSchedule
    from fedagrac.heterogeneity import Uniform as Uniform
    from fedagrac.rounds import metrics as metrics
    from fedagrac.rounds.api import simulate as simulate
    from fedagrac.rounds.api import simulate_many as simulate_many
    from fedagrac.rounds.guard import Guard as Guard
    from fedagrac.rounds.loop import Run as Run
    from fedagrac.rounds.per_client import PerClient as PerClient
    from fedagrac.rounds.personal import fine_tune as fine_tune
    from fedagrac.rounds.personal import local_only as local_only
    from fedagrac.rounds.record import History as History
    from fedagrac.rounds.record import RoundRecord as RoundRecord
    from fedagrac.rounds.record import SimulationResult as SimulationResult
    from fedagrac.rounds.setup import Setup as Setup
    from fedagrac.rounds.stop import Stop as Stop

_NAMES = {
    "fedagrac.algorithms": (
        "Algorithm DiLoCo Ditto FedACG FedAdagrad FedAdam FedAvg FedAvgM FedBN FedCM FedDyn FedExP FedLESAM "
        "FedLin FedNova FedPer FedProx FedSAM FedVARP FedYogi FedaGrac HeteroFL MIFA Mime MimeLite Scaffnew "
        "Scaffold ServerOptimizer algorithm"
    ),
    "fedagrac.algorithms.base": "Cost Stateless Traits average",
    "fedagrac.callbacks": "Callback Checkpoints EarlyStop MLflow TensorBoard",
    "fedagrac.core.cohort": "Cohort",
    "fedagrac.core.optimizers": "Adam AdamW LocalOptimizer SGD",
    "fedagrac.core.layout": "Layout",
    "fedagrac.core.local": "Plan Result Second",
    "fedagrac.core.robust": "Median NormBounded TrimmedMean",
    "fedagrac.data": (
        "ClientTests Dirichlet DiskArray Federation IID Images Indices Natural Partition Resample Shards"
    ),
    "fedagrac.errors": "FedagracError InputError",
    "fedagrac.heterogeneity": (
        "Clock Constant DEVICES DeviceProfile Devices Epochs Explicit Extreme Gaussian Geometric Linear "
        "Participation StepSchedule Uniform"
    ),
    "fedagrac.rounds.api": "simulate simulate_many",
    "fedagrac.rounds.guard": "Guard",
    "fedagrac.rounds.loop": "Run",
    "fedagrac.rounds.per_client": "PerClient",
    "fedagrac.rounds.personal": "fine_tune local_only",
    "fedagrac.rounds.record": "History RoundRecord SimulationResult",
    "fedagrac.rounds.setup": "Setup",
    "fedagrac.rounds.stop": "Stop",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}

_ROOMS = ("algorithms", "callbacks", "core", "data", "engines", "errors", "heterogeneity", "rounds", "theory")
_MODULES = {
    "metrics": "fedagrac.rounds.metrics",
    "models": "fedagrac.models",
    "schedule": "fedagrac.core.schedule",
}

__all__ = sorted([*_HOMES, *_MODULES])  # noqa: PLE0605


def __dir__() -> list[str]:
    """Return all names, also those that are not imported yet."""
    return sorted({*globals(), *__all__, *_ROOMS})


if not TYPE_CHECKING:  # type checkers know the names above, and no others

    def __getattr__(name: str) -> Any:
        """Import what a name stands for when it is first used, and return it."""
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif name in _MODULES or name in _ROOMS:
            value = importlib.import_module(_MODULES.get(name, f"fedagrac.{name}"))
        else:
            raise AttributeError(f"module 'fedagrac' has no attribute {name!r}")
        globals()[name] = value
        return value
