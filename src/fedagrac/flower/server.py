"""The server of a federation: `server_app`, and the run that it starts.

It runs the round loop of a simulation over a live fleet. The server keeps all state, and it writes a checkpoint
after every round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedagrac.callbacks.checkpoints import Checkpoints
from fedagrac.callbacks.run_folder import KeepRun
from fedagrac.core.streams import first_weights
from fedagrac.data.federation import Federation
from fedagrac.errors import InputError
from fedagrac.flower.extra import require_flower
from fedagrac.flower.fleet import FlowerFleet
from fedagrac.flower.link import Link
from fedagrac.flower.watch import Watch
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.callback import Callback, checked_callbacks
from fedagrac.rounds.loop import Run, run_rounds
from fedagrac.rounds.server import Server
from fedagrac.storage.claims import claimed
from fedagrac.storage.clients import ClientTable
from fedagrac.storage.run_folder import RunFolder

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from torch import nn

    from fedagrac.engines import Loss
    from fedagrac.flower.settings import Settings
    from fedagrac.rounds.evaluation import Metric
    from fedagrac.rounds.record import RoundRecord, SimulationResult

__all__ = ["initial_model", "run_federation", "server_app"]

log = logging.getLogger("fedagrac")


def server_app(
    model: Callable[[Context], nn.Module],
    test: Callable[[Context], Any] | None = None,
    loss: Loss | None = None,
    callbacks: Callable[[Context], Sequence[Any]] | None = None,
    metrics: Mapping[str, Metric] | None = None,
) -> ServerApp:
    """Make the Flower ServerApp.

    Args:
        model: returns the module whose weights are x_1.
        test: returns (inputs, targets) to evaluate the global model on; None to evaluate nothing.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
        callbacks: returns objects with on_start, on_round and on_end, such as `fedagrac.TensorBoard("board")`.
        metrics: other measures of the test data: {name: (output, target) -> scalar}.

    The functions `model`, `test` and `callbacks` receive Flower's Context.
    """
    require_flower()
    from flwr.serverapp import ServerApp

    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        from fedagrac.flower.settings import Settings

        logging.getLogger("fedagrac").setLevel(logging.INFO)
        _log_like_flower()
        settings = Settings.of(context.run_config)
        run_federation(
            grid,
            settings,
            initial_model(settings, model, context),
            test=None if test is None else test(context),
            loss=loss,
            callbacks=() if callbacks is None else callbacks(context),
            metrics=metrics,
        )

    return app


def initial_model(settings: Settings, model: Callable[[Context], nn.Module], context: Context) -> VectorModel:
    """Build the module with weights from the seed of the run, as in an experiment."""
    with first_weights(settings.seed):
        return VectorModel(model(context), dtype=settings.torch_dtype)


def _log_like_flower() -> None:
    """Send this package's log messages to Flower's handlers, so that `flwr log` shows them."""
    from flwr.supercore.logger import FLOWER_LOGGER

    logger = logging.getLogger("fedagrac")
    logger.handlers = list(FLOWER_LOGGER.handlers)
    logger.propagate = False


def run_federation(
    grid: Grid,
    settings: Settings,
    model: VectorModel,
    test: tuple[Any, Any] | Federation | None = None,
    loss: Loss | None = None,
    callbacks: Sequence[Any] = (),
    metrics: Mapping[str, Metric] | None = None,
) -> Run:
    """Start or resume the run in the folder `settings.out` and do its rounds. Return the run, which has ended."""
    from fedagrac.flower.settings import ClientSteps

    algorithm = settings.build_algorithm()
    if isinstance(settings.build_steps(), ClientSteps) and algorithm.traits.needs_steps:
        accepted = "a schedule of the server (such as constant or linear): "
        accepted += f"the local rule of {algorithm.name} needs K_i before it starts, so clients cannot choose K_i"
        raise InputError("steps.kind", "client", accepted)
    user_callbacks = checked_callbacks(callbacks)
    setup = settings.setup(loss, metrics)
    algorithm.check_rounds(settings.rounds)
    algorithm.check_model(model.layout, setup.aggregate)
    fleet = FlowerFleet(settings, model, Link(grid, model, settings))
    if test is not None:
        pool = test if isinstance(test, Federation) else Federation.from_arrays([test], test=test)
        fleet.test = setup.workload(model, pool)
    folder = RunFolder(Path(settings.out))
    described = settings.model_dump(mode="json", exclude_none=True)
    experiment = {**described, "algorithm": [{**described["algorithm"], "label": algorithm.name}]}
    checkpoints = Checkpoints(folder, every=1, always=True, keep=settings.keep_checkpoints)
    storing = [KeepRun(folder.path, experiment), checkpoints, LogRounds(folder.path)]
    table = ClientTable(settings.clients)
    own_buffers = settings.buffers == "local" or algorithm.traits.own_buffers
    server = Server(algorithm, {"x": model.initial()}, table, own_buffers=own_buffers)
    watch = Watch(settings, fleet.link)
    run = Run(server, fleet, setup, [*storing, *user_callbacks, watch])
    with claimed(folder.path), watch.watching(folder.path):
        checkpoint = folder.last_checkpoint()
        if checkpoint is None and folder.history.exists() and folder.history.stat().st_size:
            raise InputError("out", settings.out, "a new folder: this one holds a run without a checkpoint")
        run.begin(checkpoint)
        run_rounds([run])
    return run


class LogRounds(Callback):
    """Log a line for every round, which `flwr log` shows."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Log how many clients replied, and the test results."""
        measured = {"test_accuracy": record.test_accuracy, "test_loss": record.test_loss, **record.metrics}
        shown = ", ".join(f"{name} {value:.4f}" for name, value in measured.items() if value is not None)
        text = "round %d: %d of %d clients, train loss %.4f %s"
        log.info(text, record.round, record.clients, record.asked, record.train_loss, shown)

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Log how the run ended."""
        log.info("%s: %s; written to %s", result.status, result.reason, self.folder.absolute())
