"""The server's side: rounds of any registered algorithm over clients that come, go and err.

The algorithm's `plan` and `aggregate` are those of the simulation; this module only carries plans to clients and
results back. The server holds all state, x and every client's rows, and writes a checkpoint after every round.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.callbacks.run_folder import (
    append_round,
    environment,
    write_description,
    write_end,
    write_history,
)
from fedagrac.core.cohort import Cohort, Population
from fedagrac.core.streams import first_weights
from fedagrac.data.batches import epoch_steps
from fedagrac.data.federation import Federation
from fedagrac.engines import Loss, Workload
from fedagrac.errors import FedagracError, InputError
from fedagrac.flower.extra import require_flower
from fedagrac.flower.link import Link, RemoteGradients
from fedagrac.flower.rounds import Round, needs_steps_first
from fedagrac.flower.wire import BadReplyError, Parcel, fingerprint
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.divergence import Divergence
from fedagrac.rounds.evaluation import evaluate
from fedagrac.rounds.record import History
from fedagrac.storage.checkpoints import Checkpoint, CheckpointError, check_fits, read_checkpoint, write_checkpoint
from fedagrac.storage.claims import claimed
from fedagrac.storage.clients import ClientTable

if TYPE_CHECKING:
    import numpy.typing as npt
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp
    from torch import nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.algorithms.base import State
    from fedagrac.flower.settings import Settings

__all__ = ["FlowerRun", "build_model", "server_app"]

log = logging.getLogger("fedagrac")


def server_app(
    model: Callable[[Context], nn.Module],
    test: Callable[[Context], Any] | None = None,
    loss: Loss | None = None,
) -> ServerApp:
    """Make the Flower ServerApp.

    Args:
        model: returns the module whose weights are x_1.
        test: returns (inputs, targets) to evaluate the global model on; None to evaluate nothing.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
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
        FlowerRun.of(grid, settings, build_model(settings, model, context), test and test(context), loss).run()

    return app


def build_model(settings: Settings, model: Callable[[Context], nn.Module], context: Context) -> VectorModel:
    """Build the module; random weights are those of the run's seed, as in an experiment."""
    with first_weights(settings.seed):
        return VectorModel(model(context), dtype=settings.torch_dtype)


def _log_like_flower() -> None:
    """Send this package's messages where Flower's go, so that `flwr log` shows them."""
    from flwr.supercore.logger import FLOWER_LOGGER

    own = logging.getLogger("fedagrac")
    own.handlers = list(FLOWER_LOGGER.handlers)
    own.propagate = False


@dataclass(eq=False)
class FlowerRun:
    """A federation in progress.

    Attributes:
        state: the server's vectors; `state["x"]` is the global model.
        table: what the server remembers of each client.
        history: the rounds so far.
    """

    settings: Settings
    algorithm: Algorithm
    model: VectorModel
    evaluation: Workload | None
    link: Link
    gradients: RemoteGradients
    folder: Path
    state: State = field(default_factory=dict)
    table: ClientTable = field(default_factory=lambda: ClientTable(0))
    history: History = field(default_factory=History)
    bytes_before: int = 0
    time_before: float = 0.0
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(
        cls,
        grid: Grid,
        settings: Settings,
        model: VectorModel,
        test: tuple[Any, Any] | Federation | None = None,
        loss: Loss | None = None,
    ) -> FlowerRun:
        """Check everything that needs no client."""
        from fedagrac.flower.settings import ClientSteps

        algorithm = settings.build_algorithm()
        if isinstance(settings.build_steps(), ClientSteps) and needs_steps_first(algorithm):
            accepted = "a schedule of the server (such as constant or linear): "
            accepted += f"{algorithm.name}'s local rule needs K_i before it starts, clients must not choose it"
            raise InputError("steps.kind", "client", accepted)
        evaluation = None
        if test is not None:
            pool = test if isinstance(test, Federation) else Federation.from_arrays([test], test=test)
            drawing = settings.batch, settings.sampling, float(settings.weight_decay), settings.seed
            evaluation = Workload.of(model, pool, loss, *drawing)
        link = Link(grid, model, settings)
        gradients = RemoteGradients(link, model.dtype)
        return cls(settings, algorithm, model, evaluation, link, gradients, Path(settings.out))

    def run(self) -> None:
        """Start or resume, and do the rounds; nobody else writes into the folder meanwhile."""
        with claimed(self.folder):
            self._rounds()

    def _rounds(self) -> None:
        self.begin()
        while len(self.history) < self.settings.rounds:
            self.round()
            if not bool(torch.isfinite(self.state["x"]).all()):
                # it was the server's own step: a reply that is not finite never counts
                overflow = Divergence(len(self.history), self.algorithm.lr)
                return self.end("diverged", str(overflow), overflow)
        return self.end("finished", f"all {len(self.history)} rounds done")

    def begin(self) -> None:
        """Go on from the last checkpoint, or wait for all clients and make the state before round 1."""
        known = self.identity()
        history = self.folder / "history.jsonl"
        stored = read_checkpoint(self.folder / "checkpoint", history=history)
        if stored is not None:
            self.resume(stored, known)
            return
        if history.exists() and history.stat().st_size:
            raise InputError("out", str(self.folder), "a new folder: this one holds a run without a checkpoint")
        x = self.model.initial()
        if self.algorithm.starts_with_gradients:
            self.link.x1 = x
        log.info("waiting for %d clients", self.settings.clients)
        self.link.wait_for(self.settings.clients, 0)
        self.gradients.remember(x, self.link.gradients)
        self.table = ClientTable(self.settings.clients)
        self.state = self.algorithm.start(x, Population(self.weights, self.gradients))
        facts = {**environment(self.model.device), "engine": "flower"}
        described = self.settings.model_dump(mode="json", exclude_none=True)
        experiment = {**described, "algorithm": [{**described["algorithm"], "label": self.algorithm.name}]}
        write_description(self.folder, experiment, facts)
        write_history(self.folder, [])
        self.link.started = True
        self.save()

    def resume(self, stored: Checkpoint, known: dict[str, Any]) -> None:
        """Go on where a run of the same settings was cut off."""
        kept = stored.facts.get("identity")
        kept = kept if isinstance(kept, dict) else {}
        for key in dict.fromkeys([*known, *kept]):  # a guard may have come or gone
            before = kept.get(key)
            if before != known.get(key):
                raise InputError(
                    "out", str(self.folder), f"another folder: it holds a run with {key} = {before!r}"
                )
        _check_facts(stored, self.settings.clients)
        check_fits(stored, self.algorithm, self.model.initial())
        self.history = History(stored.history)
        write_history(self.folder, self.history)
        self.state, self.table = stored.state, stored.table
        self.bytes_before, self.time_before = int(stored.facts["bytes"]), float(stored.facts["seconds"])
        self.link.sizes = dict(enumerate(stored.facts["sizes"]))
        if stored.round < self.settings.rounds:
            self.link.note(f"resumed after round {stored.round}")
            self.link.wait_for(self.settings.min_clients, stored.round)
        self.link.started = True

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with its checkpoint."""
        return {**self.settings.identity(), "model": fingerprint(self.model)}

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """n_i of all clients, as they reported them at the start."""
        return np.array([self.link.sizes[i] for i in range(self.settings.clients)], np.int64)

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """omega_i of all clients."""
        weights: npt.NDArray[np.float64] = self.sizes / self.sizes.sum()
        return weights

    def cohort_of(self, clients: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]) -> Cohort:
        """Return a cohort of these clients in the next round, in the order of their numbers."""
        sizes = self.sizes
        return Cohort(
            round=len(self.history),
            clients=clients,
            steps=steps,
            masses=sizes[clients].tolist(),
            population_weights=self.weights[clients],
            epoch_steps=epoch_steps(sizes[clients], self.settings.batch),
            everyone=len(clients) == len(sizes),
            service=self.gradients,
        )

    def round(self) -> None:
        """Do one round: plan, send, collect, aggregate, write down; ask again where too few answered."""
        t = len(self.history)
        down, up = self.link.bytes_down, self.link.bytes_up
        collected = None
        for _ in range(self.settings.attempts):
            self.link.wait_for(self.settings.min_clients, t)
            asked = len(self.link.nodes)
            collected = self.next_round().collect()
            if collected is not None:
                break
            self.link.note(f"fewer than min_clients = {self.settings.min_clients} usable replies, asked again")
        if collected is None:
            raise FedagracError(
                f"round {t + 1}: fewer than min_clients = {self.settings.min_clients} usable replies in "
                f"attempts = {self.settings.attempts}; run again to resume from the last checkpoint"
            )
        c = collected
        self.state, rows = self.algorithm.aggregate(self.state, c.rows, c.cohort, c.plan, c.result)
        self.table.put(c.cohort.clients, rows)
        number = t + 1
        due = number % self.settings.eval_every == 0 or number == self.settings.rounds
        measured: dict[str, float | None] = dict.fromkeys(["test_accuracy", "test_loss"])
        if due and self.evaluation is not None:
            measured = evaluate(self.evaluation, self.state["x"], {})
        seconds = self.time_before + time.perf_counter() - self.began
        record = {
            "round": number,
            **measured,
            "train_loss": float(np.dot(c.cohort.weights, c.result.loss.numpy())),
            "clients": len(c.cohort),
            "asked": asked,
            "dropped": asked - len(c.cohort),
            "first_gradients": int((c.plan.first_steps > 0).sum()),
            "fast": int(c.cohort.fast.sum()),
            "steps_mean": float(c.cohort.steps.mean()),
            "steps": {str(i): int(k) for i, k in zip(c.cohort.clients, c.cohort.steps, strict=True)},
            "bytes_up": self.link.bytes_up - up,
            "bytes_down": self.link.bytes_down - down,
            "bytes_total": self.bytes_before + self.link.bytes_up + self.link.bytes_down,
            "sim_time": seconds,
            "wall_time": seconds,
            "events": self.link.take_events(),
        }
        self.history.append(record)
        append_round(self.folder, record)
        self.save()
        said = ", ".join(f"{k} {v:.4f}" for k, v in measured.items() if v is not None)
        loss = record["train_loss"]
        log.info("round %d: %d of %d clients, train loss %.4f %s", number, len(c.cohort), asked, loss, said)

    def next_round(self) -> Round:
        """Return the next round, as it can be asked for now."""
        s, a = self.settings, self.algorithm
        return Round(len(self.history), s, a, self.model, self.link, self.state, self.table, self.cohort_of)

    def save(self) -> None:
        """Write a checkpoint: everything that a run started anew needs to go on."""
        facts = {
            "identity": self.identity(),
            "sizes": self.sizes.tolist(),
            "bytes": self.bytes_before + self.link.bytes_up + self.link.bytes_down,
            "seconds": self.time_before + time.perf_counter() - self.began,
        }
        checkpoint = Checkpoint(len(self.history), self.state, self.table, facts)
        write_checkpoint(self.folder / "checkpoint", checkpoint)

    def end(self, status: str, reason: str, divergence: Divergence | None = None) -> None:
        """Keep the final model and say how the run ended."""
        told = status, reason, len(self.history), divergence
        write_end(self.folder, self.model.views(self.state["x"]), *told)
        log.info("%s: %s; written to %s", status, reason, self.folder.absolute())


def _check_facts(stored: Checkpoint, clients: int) -> None:
    """Check what a checkpoint says besides its vectors: samples of each client, bytes and seconds so far."""
    facts = Parcel(stored.facts)
    sizes = stored.facts.get("sizes")
    try:
        facts.integer("bytes", 0, 2**62)
        facts.number("seconds")
        if stored.table.num_clients != clients or not isinstance(sizes, list) or len(sizes) != clients:
            raise BadReplyError(f"it is not of {clients} clients")
        for size in sizes:
            Parcel({"samples": size}).integer("samples", 1, 2**62)
    except BadReplyError as error:
        raise CheckpointError(f"the checkpoint cannot be used: {error}") from None
