"""Callbacks that send the history to TensorBoard or MLflow, which are optional extras."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from fedagrac.errors import InputError
from fedagrac.rounds.callback import Callback

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord, SimulationResult

__all__ = ["MLflow", "TensorBoard", "scalars"]


def scalars(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the fields of a record as numbers.

    A list, such as the dropped clients, becomes its length. A table, such as the steps of each client, becomes one
    number per key. Tables of texts are left out.

    Examples:
        >>> scalars({"round": 1, "train_loss": 0.5, "dropped": [3, 4], "steps": {"0": 5}})
        {'train_loss': 0.5, 'dropped': 2.0, 'steps/0': 5.0}
    """
    numbers = {}
    for name, value in record.items():
        if name == "round" or value is None:
            continue
        if isinstance(value, dict):
            known = {key: number for key, number in value.items() if isinstance(number, int | float)}
            numbers.update({f"{name}/{key}": float(number) for key, number in known.items()})
        else:
            numbers[name] = float(len(value) if isinstance(value, list) else value)
    return numbers


class TensorBoard(Callback):
    """Write every field of every round as a TensorBoard scalar (pip install 'fedagrac[tensorboard]').

    Examples:
        >>> TensorBoard("runs/board").folder
        'runs/board'
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = str(folder)
        self._writer: Any = None

    def on_start(self, run: Run) -> None:
        """Open a writer in a folder named after the algorithm."""
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise InputError("callbacks", "TensorBoard", "pip install 'fedagrac[tensorboard]' first") from error
        self._writer = SummaryWriter(f"{self.folder}/{run.algorithm.name}")

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Write the record."""
        for name, value in scalars(record).items():
            self._writer.add_scalar(name, value, record["round"])

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Close the writer."""
        self._writer.close()


class MLflow(Callback):
    """Log the algorithm's settings and every round to MLflow (pip install 'fedagrac[mlflow]').

    Examples:
        >>> MLflow(experiment="digits").experiment
        'digits'
    """

    def __init__(self, experiment: str = "fedagrac") -> None:
        self.experiment = experiment
        self._mlflow: Any = None

    def on_start(self, run: Run) -> None:
        """Start an MLflow run named after the algorithm."""
        try:
            import mlflow
        except ImportError as error:
            raise InputError("callbacks", "MLflow", "pip install 'fedagrac[mlflow]' first") from error
        self._mlflow = mlflow
        mlflow.set_experiment(self.experiment)
        mlflow.start_run(run_name=run.algorithm.name)
        mlflow.log_params({"algorithm": run.algorithm.name, **dataclasses.asdict(run.algorithm)})

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Log the record."""
        self._mlflow.log_metrics(scalars(record), step=record["round"])

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """End the MLflow run, as failed if the run diverged."""
        self._mlflow.end_run("FAILED" if result.status == "diverged" else "FINISHED")
