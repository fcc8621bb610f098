"""The callback that writes checkpoints."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from fedagrac.errors import count
from fedagrac.rounds.callback import Callback
from fedagrac.storage.checkpoints import KEPT, write_checkpoint
from fedagrac.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

__all__ = ["Checkpoints"]

log = logging.getLogger("fedagrac")

LARGE = 10**7
"""Checkpoints of at least this many bytes log their size once."""


class Checkpoints(Callback):
    """Write a checkpoint every few rounds, and when the run is interrupted by Ctrl-C or SIGTERM.

    If several processes share the run, each one writes its part.

    Attributes:
        folder: the folder of checkpoints; or a `RunFolder`, whose history is synced before each checkpoint.
        every: the number of rounds between checkpoints.
        always: whether to write one at the start and after the last round, too. The start of a live fleet is
            expensive, and such a run may be extended.
        keep: how many checkpoints are kept.

    A round in which the run diverged is not written, so that the run can be resumed from the round before.

    Examples:
        >>> Checkpoints("runs/mine/fedavg/checkpoint", every=10).every
        10
    """

    def __init__(
        self, folder: str | Path | RunFolder, every: int = 10, always: bool = False, keep: int = KEPT
    ) -> None:
        self.folder = folder if isinstance(folder, RunFolder) else Path(folder)
        self.every, self.always, self.keep = count("every", every), always, count("keep", keep)
        self._written: int | None = None

    def on_start(self, run: Run) -> None:
        """Note that a resumed run has a checkpoint; write the first one if `always` is set."""
        self._written = len(run.history) or None
        if self.always and self._written is None:
            self._write(run)

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Write a checkpoint if one is due; after the last round only if `always` is set."""
        due = record.round % self.every == 0 and (record.round < run.rounds or self.always)
        if due and run.divergence is None:
            self._write(run)

    def on_interrupt(self, run: Run) -> None:
        """Write a checkpoint, unless there is one of this round."""
        if self._written != len(run.history):
            self._write(run)
        if run.ranks.rank == 0:
            log.info("saved after round %d of %d", len(run.history), run.rounds)

    def _write(self, run: Run) -> None:
        """Write a checkpoint, and log its size if it is the first one and large."""
        checkpoint = run.checkpoint()
        if isinstance(self.folder, RunFolder):
            path = self.folder.write_checkpoint(checkpoint, run.ranks, self.keep)
        else:
            path = write_checkpoint(self.folder, checkpoint, run.ranks, self.keep)
        size = path.stat().st_size
        if self._written is None and size >= LARGE:
            often = f"every {self.every} rounds" if self.every > 1 else "every round"
            text = "checkpoints: %.0f MB %s, the last %d are kept in %s"
            log.info(text, size / 1e6, often, self.keep, path.parent)
        self._written = len(run.history)
