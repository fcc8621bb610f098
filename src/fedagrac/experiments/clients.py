"""What [per_client] asks for: each client's results after fine-tuning, and without any exchange."""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from fedagrac.engines import current_ranks
from fedagrac.errors import InputError
from fedagrac.files import write_atomically
from fedagrac.rounds.callback import Callback
from fedagrac.rounds.personal import fine_tune, local_only

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.callbacks.run_folder import KeepRun
    from fedagrac.data.federation import Federation
    from fedagrac.experiments.run import Prepared
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import SimulationResult
    from fedagrac.storage.run_folder import RunFolder

__all__ = ["LOCAL_ONLY", "check_measurable", "keeping_clients", "train_alone"]

log = logging.getLogger("fedagrac")

LOCAL_ONLY = "local_only.json"
"""The file in the experiment's folder with the results of clients that trained alone."""

SHARED = (
    "loss", "batch_size", "sampling", "weight_decay", "buffers", "seed", "engine", "compile", "device", "dtype",
    "precision",
)  # fmt: skip
"""The options of a run that clients who train by themselves have, too."""


def check_measurable(federation: Federation) -> None:
    """Check that clients can be measured one by one: each has a test set, and one process has all clients."""
    if federation.tests is None:
        accepted = "data with a test set for each client, such as Federation.from_arrays(..., tests=)"
        raise InputError("per_client", federation.name, accepted)
    if current_ranks().size > 1:
        raise InputError("per_client", f"{current_ranks().size} processes", "one process")


def keeping_clients(prepared: Prepared, folder: RunFolder, keep: KeepRun) -> list[Callback]:
    """Return the callbacks that write a run folder, with fine-tuned clients if they are asked for."""
    chosen = prepared.experiment.per_client
    if chosen is None or chosen.fine_tune_steps is None:
        return [keep]
    tuning = _FineTune(prepared)
    return [tuning, keep, _StoreTuned(tuning, folder)]


class _FineTune(Callback):
    """Let each client train the final model. Before `KeepRun`, so that a run ends only when this is done."""

    def __init__(self, prepared: Prepared) -> None:
        self.prepared = prepared
        self.columns: dict[str, Any] | None = None

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Train and measure, unless the run diverged."""
        chosen = self.prepared.experiment.per_client
        if chosen is None or result.status == "diverged":
            return
        lr = self.prepared.experiment.lr if chosen.fine_tune_lr is None else chosen.fine_tune_lr
        assert isinstance(lr, int | float)  # checked with the experiment
        assert chosen.fine_tune_steps is not None
        options = _options(self.prepared)
        self.columns = fine_tune(result, lr, chosen.fine_tune_steps, **options).columns()


class _StoreTuned(Callback):
    """Add the results after fine-tuning to per_client.json, which `KeepRun` has written."""

    def __init__(self, tuning: _FineTune, folder: RunFolder) -> None:
        self.tuning, self.folder = tuning, folder

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Write the columns."""
        if self.tuning.columns is not None:
            self.folder.add_tuned(self.tuning.columns)


def train_alone(prepared: Prepared, out: Path) -> None:
    """Let each client train alone if that is asked for. Write its results to local_only.json, once."""
    experiment, setup = prepared.experiment, prepared.fleet.setup
    chosen, path = experiment.per_client, out / LOCAL_ONLY
    if chosen is None or not chosen.local_only or path.exists():
        return
    assert isinstance(experiment.lr, int | float)  # checked with the experiment
    options = {**_options(prepared), "participation": setup.participation, "steps": prepared.steps}
    table = local_only(prepared.module, prepared.federation, experiment.lr, experiment.rounds, **options)
    write_atomically(path, json.dumps(table.columns(), allow_nan=False).encode() + b"\n")
    log.info("clients that train alone:\n%r", table)


def _options(prepared: Prepared) -> dict[str, Any]:
    """Return the options of the runs that hold for a client alone."""
    setup = prepared.fleet.setup
    return {name: getattr(setup, name) for name in SHARED}
