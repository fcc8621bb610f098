"""The callback that stops a run which no longer improves."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fedagrac.errors import count
from fedagrac.rounds.callback import Callback

if TYPE_CHECKING:
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

__all__ = ["EarlyStop"]


class EarlyStop(Callback):
    """Stop a run when its test loss has not improved for `patience` evaluations.

    Examples:
        >>> EarlyStop(patience=10).patience
        10
    """

    def __init__(self, patience: int) -> None:
        self.patience = count("patience", patience)
        self._best, self._waited = float("inf"), 0

    def on_start(self, run: Run) -> None:
        """Reset the best test loss."""
        self._best, self._waited = float("inf"), 0

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Compare the test loss with the best so far, and stop the run if it is time."""
        loss = record["test_loss"]
        if loss is None:
            return
        if loss < self._best:
            self._best, self._waited = loss, 0
            return
        self._waited += 1
        if self._waited >= self.patience:
            run.stop(f"test loss has not improved for {self.patience} evaluations")
