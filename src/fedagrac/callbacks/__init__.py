"""Callbacks: where all side effects of a run live."""

from fedagrac.callbacks.base import Callback
from fedagrac.callbacks.checkpoints import Checkpoints
from fedagrac.callbacks.early_stop import EarlyStop
from fedagrac.callbacks.trackers import MLflow, TensorBoard

__all__ = ["Callback", "Checkpoints", "EarlyStop", "MLflow", "TensorBoard"]
