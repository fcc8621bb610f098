"""Callbacks: all side effects of a run."""

from fedagrac.callbacks.checkpoints import Checkpoints
from fedagrac.callbacks.early_stop import EarlyStop
from fedagrac.callbacks.trackers import MLflow, TensorBoard
from fedagrac.rounds.callback import Callback

__all__ = ["Callback", "Checkpoints", "EarlyStop", "MLflow", "TensorBoard"]
