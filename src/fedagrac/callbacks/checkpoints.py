"""The callback that writes checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fedagrac.errors import count
from fedagrac.rounds.callback import Callback
from fedagrac.storage.checkpoints import write_checkpoint
from fedagrac.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

__all__ = ["Checkpoints"]

log = logging.getLogger("fedagrac")

LARGE = 10**7
"""Bytes from which on the size of checkpoints is logged once."""


class Checkpoints(Callback):
    """Writes a checkpoint every so many rounds, and when the run is cut off by Ctrl-C or SIGTERM.

    Of several processes each writes its part.

    Attributes:
        folder: where checkpoints go, the last two are kept; or a `RunFolder`, whose history is then synced first.
        every: rounds between them.
        always: write one at the start and after the last round, too. A live fleet's start is dear, and such a run
            may be extended.

    Examples:
        >>> Checkpoints("runs/mine/fedavg/checkpoint", every=10).every
        10
    """

    def __init__(self, folder: str | Path | RunFolder, every: int = 10, always: bool = False) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else Path(folder)
        self.every, self.always = count("every", every), always
        self._written: int | None = None

    def on_start(self, run: Run) -> None:
        """Note that a run that goes on has a checkpoint."""
        self._written = len(run.history) or None
        if self.always and self._written is None:
            self._write(run)

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Write, if it is time; after the last round there is usually nothing to go on with."""
        if record.round % self.every == 0 and (record.round < run.rounds or self.always):
            self._write(run)

    def on_interrupt(self, run: Run) -> None:
        """Write, unless this round is written already."""
        if self._written != len(run.history):
            self._write(run)
        if run.ranks.rank == 0:
            log.info("saved after round %d of %d", len(run.history), run.rounds)

    def _write(self, run: Run) -> None:
        checkpoint = run.checkpoint()
        if isinstance(self.folder, RunFolder):
            path = self.folder.write_checkpoint(checkpoint, run.ranks)
        else:
            path = write_checkpoint(self.folder, checkpoint, run.ranks)
        size = path.stat().st_size
        if self._written is None and size >= LARGE:
            often = f"every {self.every} rounds" if self.every > 1 else "every round"
            log.info("checkpoints: %.0f MB %s, the last two are kept in %s", size / 1e6, often, path.parent)
        self._written = len(run.history)
