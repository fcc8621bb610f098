"""What an operator sees of a running server: the JSON log, the metrics, and why it failed."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from fedagrac.flower.logs import JsonLines, json_log
from fedagrac.flower.metrics import Gauges, metrics_server
from fedagrac.rounds.callback import Callback
from fedagrac.storage.status import forget_failure, patience, recording_failure

if TYPE_CHECKING:
    from fedagrac.flower.link import Link
    from fedagrac.flower.settings import Settings
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord, SimulationResult

__all__ = ["Watch"]

log = logging.getLogger("fedagrac")


class Watch(Callback):
    """Show a run to its operator, as the settings `log`, `metrics_port` and `metrics_host` say.

    Attributes:
        gauges: the numbers of the metrics.
    """

    def __init__(self, settings: Settings, link: Link) -> None:
        self.settings, self._link = settings, link
        longest = patience(float(settings.round_seconds), float(settings.wait_seconds), settings.attempts)
        self.gauges = Gauges(settings.rounds, longest, connected=lambda: len(link.nodes))
        self._lines = JsonLines()
        self._folder: Path | None = None

    @contextlib.contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Write the log and serve the metrics inside the block; record why the block fails."""
        settings, self._folder = self.settings, folder
        with contextlib.ExitStack() as stack:
            if settings.log == "json":
                self._lines = stack.enter_context(json_log(folder))
            if settings.metrics_port:
                stack.enter_context(metrics_server(self.gauges, settings.metrics_host, settings.metrics_port))
            try:
                with recording_failure(folder, lambda: self._link.events):
                    yield
            except Exception as error:
                self.gauges.state = "failed"
                log.error("failed: %s", error)
                raise

    def on_start(self, run: Run) -> None:
        """Note that rounds begin."""
        self.gauges.begin(run.history[-1] if run.history else None)
        self._lines.round = len(run.history) + 1
        if self._folder is not None:
            forget_failure(self._folder)

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Update the metrics, and the round that the log names."""
        self.gauges.take_in(record, {} if run.replies is None else run.replies.contacts)
        self._lines.round = min(record.round + 1, run.rounds)

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Note how the run ended."""
        self.gauges.state = result.status
