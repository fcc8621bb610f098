"""The contract of a callback: all side effects of a run live in callbacks."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fedagrac.rounds.api import Run
    from fedagrac.rounds.record import Record, SimulationResult

__all__ = ["Callback"]


class Callback:
    """Called at the start, after every round and at the end of a run; override what you need.

    Examples:
        >>> class Print(Callback):
        ...     def on_round(self, run, record):
        ...         print(record["round"], record["test_accuracy"])
    """

    def on_start(self, run: Run) -> None:
        """Before the first round."""

    def on_round(self, run: Run, record: Record) -> None:
        """After every round; `run.stop(reason)` ends the run."""

    def on_interrupt(self, run: Run) -> None:
        """When the process is asked to end (Ctrl-C, SIGTERM): the last round to stand is that of the history."""

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """After the last round, whatever ended the run."""
