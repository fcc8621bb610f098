"""The callback that shows a progress bar over all runs of an experiment, with the time left."""

from __future__ import annotations

from types import TracebackType
from typing import TYPE_CHECKING

from fedagrac.rounds.callback import Callback

if TYPE_CHECKING:
    from rich.console import Console

    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord, SimulationResult

__all__ = ["Progress"]


class Progress(Callback):
    """Show one bar over `runs` runs of `rounds` rounds each. Use it as a context manager.

    Examples:
        >>> with Progress(runs=2, rounds=10, console=None) as bar:
        ...     bar.name = "fedavg"
    """

    def __init__(self, runs: int, rounds: int, console: Console | None = None) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        self.rounds, self.name = rounds, ""
        self._bar = Bar(
            TextColumn("{task.description:<17}", style="bold"),
            BarColumn(bar_width=None),
            MofNCompleteColumn(),
            TextColumn("rounds"),
            TextColumn("{task.fields[accuracy]}"),
            TimeRemainingColumn(compact=True),
            TextColumn("left"),
            console=console or Console(stderr=True),
            transient=True,
        )
        self._task = self._bar.add_task("", total=runs * rounds, accuracy="")

    def __enter__(self) -> Progress:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, name: str) -> None:
        """Show the name of the current stage."""
        self.name = name
        self._bar.update(self._task, description=name, accuracy="")

    def skip(self) -> None:
        """Count a run as done without running it."""
        self._bar.advance(self._task, self.rounds)

    def on_start(self, run: Run) -> None:
        """Show the name of the run, and count the rounds that a resumed run has done."""
        self._bar.update(self._task, description=self.name or run.algorithm.name, accuracy="")
        self._bar.advance(self._task, len(run.history))

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Advance the bar by one round, and show the accuracy."""
        if record["test_accuracy"] is not None:
            self._bar.update(self._task, accuracy=f"accuracy {record['test_accuracy']:.1%}")
        self._bar.advance(self._task)

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Count the remaining rounds of a run that ended early as done."""
        self._bar.advance(self._task, self.rounds - len(run.history))
