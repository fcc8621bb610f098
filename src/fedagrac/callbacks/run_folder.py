"""The callback that writes a run folder."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagrac.rounds.callback import Callback
from fedagrac.storage.run_folder import RunFolder, write_description

if TYPE_CHECKING:
    from collections.abc import Mapping

    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord, SimulationResult

__all__ = ["KeepRun"]


class KeepRun(Callback):
    """Write experiment.toml, environment.json, history.jsonl, status.json and model.safetensors.

    If clients have test sets, per_client.json holds the results of each.

    Attributes:
        folder: the run folder, which is made when the run starts.
        experiment: the fully resolved experiment, with this run's algorithm only.
    """

    def __init__(self, folder: str | Path, experiment: Mapping[str, Any]) -> None:
        self.folder = RunFolder(Path(folder))
        self.experiment = experiment

    def on_start(self, run: Run) -> None:
        """Make the folder, describe the run, and write the rounds that a resumed run has done."""
        environment = {**run.fleet.describe(), "command": Path(sys.argv[0]).name}
        write_description(self.folder.path, self.experiment, environment)
        self.folder.reopen()
        self.folder.write_history(run.history)

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Append one line to the history."""
        self.folder.append_round(record)

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Write the results of each client, the final model, and how the run ended."""
        if result.per_client is not None:
            self.folder.write_per_client(result.per_client.columns())
        rounds = len(result.history)
        tensors = {**result.params, **result.buffers}
        self.folder.write_end(tensors, result.status, result.reason, rounds, result.divergence)
