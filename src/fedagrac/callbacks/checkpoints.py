"""The callback that writes checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from fedagrac.callbacks.base import Callback
from fedagrac.checkpoints import write_checkpoint
from fedagrac.errors import count

if TYPE_CHECKING:
    from fedagrac.results import Record
    from fedagrac.simulation import Run

__all__ = ["Checkpoints"]


class Checkpoints(Callback):
    """Writes a checkpoint every so many rounds; of several processes each writes its part.

    Attributes:
        folder: where; the last two are kept.
        every: rounds between them.

    Examples:
        >>> Checkpoints("runs/mine/fedavg/checkpoint", every=10).every
        10
    """

    def __init__(self, folder: str | Path, every: int = 10) -> None:
        self.folder, self.every = Path(folder), count("every", every)

    def on_round(self, run: Run, record: Record) -> None:
        """Write, if it is time; after the last round there is nothing to go on with."""
        if record["round"] % self.every == 0 and record["round"] < run.rounds:
            write_checkpoint(self.folder, run.checkpoint(), run.ranks)
