"""The callback that writes checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fedagrac.callbacks.base import Callback
from fedagrac.errors import count
from fedagrac.storage.checkpoints import write_checkpoint

if TYPE_CHECKING:
    from fedagrac.rounds.api import Run
    from fedagrac.rounds.record import Record

__all__ = ["Checkpoints"]

log = logging.getLogger("fedagrac")

LARGE = 10**7
"""From so many bytes on a checkpoint's size is worth a line."""


class Checkpoints(Callback):
    """Writes a checkpoint every so many rounds, and when the run is cut off by Ctrl-C or SIGTERM.

    Of several processes each writes its part.

    Attributes:
        folder: where; the last two are kept.
        every: rounds between them.

    Examples:
        >>> Checkpoints("runs/mine/fedavg/checkpoint", every=10).every
        10
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        self.folder, self.every = Path(folder), count("every", every)
        self._written: int | None = None

    def on_start(self, run: Run) -> None:
        """A run that goes on has one."""
        self._written = len(run.history) or None

    def on_round(self, run: Run, record: Record) -> None:
        """Write, if it is time; after the last round there is nothing to go on with."""
        if record["round"] % self.every == 0 and record["round"] < run.rounds:
            self._write(run)

    def on_interrupt(self, run: Run) -> None:
        """Write, unless this round is written already."""
        if self._written != len(run.history):
            self._write(run)
        if run.ranks.rank == 0:
            log.info("saved after round %d of %d", len(run.history), run.rounds)

    def _write(self, run: Run) -> None:
        size = write_checkpoint(self.folder, run.checkpoint(), run.ranks).stat().st_size
        if self._written is None and size >= LARGE:
            often = f"every {self.every} rounds" if self.every > 1 else "every round"
            log.info("checkpoints: %.0f MB %s, the last two are kept in %s", size / 1e6, often, self.folder)
        self._written = len(run.history)
