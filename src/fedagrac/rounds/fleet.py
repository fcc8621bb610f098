"""Fleets: whoever carries a server's plans out, and when their replies come back.

`Fleet` is all that the round loop knows of clients. `Simulated` runs them on this machine, with an engine, a clock
and, where several processes share the work, ranks. A live fleet sends messages instead (`fedagrac.flower`).
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from fedagrac.algorithms.base import Cost
from fedagrac.core.cohort import Cohort, GradientService, Population
from fedagrac.core.local import Plan, Result
from fedagrac.data.batches import epoch_steps
from fedagrac.engines import EngineRecord, choose_engine, current_ranks
from fedagrac.heterogeneity import Clock, Devices
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.divergence import diagnose
from fedagrac.rounds.evaluation import evaluate
from fedagrac.rounds.exchange import Order, Replies, Spent
from fedagrac.rounds.server import Server
from fedagrac.storage.checkpoints import Facts
from fedagrac.storage.clients import ClientTable
from fedagrac.storage.environment import environment

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor, nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.data.federation import Federation
    from fedagrac.engines import Engine, Ranks, Workload
    from fedagrac.heterogeneity import StepSchedule
    from fedagrac.rounds.divergence import Divergence
    from fedagrac.rounds.evaluation import Metric
    from fedagrac.rounds.setup import Setup
    from fedagrac.storage.checkpoints import Checkpoint

__all__ = ["Fleet", "Roster", "Simulated"]

log = logging.getLogger("fedagrac")


class Fleet(Protocol):
    """Clients that a server can reach."""

    @property
    def model(self) -> VectorModel:
        """The module as a function of x."""

    @property
    def federation(self) -> Federation | None:
        """The clients' data, where they are on this machine; otherwise None."""

    @property
    def ranks(self) -> Ranks:
        """The processes that share the fleet."""

    def start(self, server: Server) -> Spent:
        """Bring a server to the state before round 1; return what that cost."""

    def restore(self, server: Server, checkpoint: Checkpoint) -> None:
        """Bring a server to where a checkpoint left it."""

    def round(self, servers: Sequence[Server]) -> list[Replies]:
        """Draw each server's next cohort, let it plan, carry the plans out, and return what came back.

        All servers have done the same number of rounds.
        """

    def evaluate(self, x: Tensor, metrics: Mapping[str, Metric]) -> dict[str, float | None]:
        """Measure a model on the test data; every value is None where there are none."""

    def diagnose(self, algorithm: Algorithm, replies: Replies) -> Divergence:
        """Find out where a round left the finite numbers."""

    def note(self, round: int, event: str) -> None:
        """Report what happened to a client in a round."""

    def take_events(self) -> list[str] | None:
        """Return what was noted since the last call; None where events are not part of the history."""

    def facts(self, sim_time: float, bytes_total: int) -> Facts:
        """Return what a checkpoint must say about the fleet."""

    def describe(self) -> dict[str, Any]:
        """Return where the run takes place: machine, versions, engine."""


@dataclass(frozen=True, eq=False)
class Roster:
    """All M clients of a fleet, for making cohorts of them.

    Attributes:
        sizes: n_i, samples per client, [M].
        masses: exact, unnormalised weights.
        weights: omega_i, [M].
        batch_size: samples per step; None for all of a client's.
        gradients: the fleet's service of local gradients.
    """

    sizes: npt.NDArray[np.int64]
    masses: Sequence[int | Fraction]
    weights: npt.NDArray[np.float64]
    batch_size: int | None
    gradients: GradientService

    def cohort(
        self,
        round: int,
        clients: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        masses: Sequence[int | Fraction] | None = None,
    ) -> Cohort:
        """Return a cohort of some clients, weighted by their masses unless others are given."""
        if masses is None:
            masses = [self.masses[int(i)] for i in clients]
        return Cohort(
            round=round,
            clients=clients,
            steps=steps,
            masses=masses,
            population_weights=self.weights[clients],
            epoch_steps=epoch_steps(self.sizes[clients], self.batch_size),
            everyone=len(clients) == len(self.sizes),
            service=self.gradients,
        )


@dataclass(eq=False)
class Simulated:
    """Clients that this machine simulates.

    One fleet serves any number of runs: they share the model, the data on the device and the engine, with what it
    has compiled or recorded.

    Attributes:
        setup: the options of the runs.
        workload: the problem as the engine sees it.
        steps: how many steps each client runs in each round.
        clock: how long a round takes.
        x: the first model, x_1.
        roster: all clients.
    """

    setup: Setup
    federation: Federation
    model: VectorModel
    workload: Workload
    steps: StepSchedule
    clock: Clock
    ranks: Ranks
    x: Tensor
    roster: Roster
    _engine: tuple[Engine, str] | None = None
    _engines: dict[tuple[int, EngineRecord | None], tuple[Engine, str]] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, federation: Federation, setup: Setup) -> Simulated:
        """Put the data on the device and check that model, data and options fit.

        The model may be any nn.Module; its weights as given are x_1. It is not changed.
        """
        M = federation.num_clients
        setup.steps.check(M, setup.rounds)
        vector_model = VectorModel(model, setup.torch_device(), setup.dtype)
        workload = setup.workload(vector_model, federation)
        steps, clock = setup.steps, setup.clock
        if isinstance(steps, Devices) and steps.needs_flops:
            steps = steps.with_flops(workload.step_flops())
        if clock is None:
            clock = Clock.of(steps) if isinstance(steps, Devices) else Clock()
        clock.check(M)
        ranks = current_ranks().share(steps.counts(0, M, setup.seed))
        gradients = LastGradients()
        roster = Roster(federation.sizes, federation.masses, federation.weights, setup.batch_size, gradients)
        return cls(setup, federation, vector_model, workload, steps, clock, ranks, vector_model.initial(), roster)

    @contextlib.contextmanager
    def ready(self, together: int = 1, before: Facts | None = None) -> Iterator[None]:
        """Run a block with an engine chosen, and with the precision and the threads that its runs need.

        Args:
            together: how many runs step side by side.
            before: what the checkpoint says from which they go on. The engine and the threads are then those of
                the beginning, because sums are rounded by how they are shared out.
        """
        record = None if before is None else before.engine
        with _precision(self.setup.precision, self.model.device), _threads(record):
            if (together, record) not in self._engines:
                self._engines[together, record] = self._choose(together, record)
            self._engine = self._engines[together, record]
            self._gradients.service = self.engine.gradients
            yield

    @property
    def engine(self) -> Engine:
        """What runs the clients."""
        if self._engine is None:
            raise RuntimeError("the fleet has no engine yet: use it inside `with fleet.ready():`")
        return self._engine[0]

    @property
    def engine_reason(self) -> str:
        """Why this engine was chosen."""
        return "" if self._engine is None else self._engine[1]

    def _choose(self, together: int, record: EngineRecord | None) -> tuple[Engine, str]:
        setup, M = self.setup, self.federation.num_clients
        if callable(setup.engine):
            return setup.engine(self.workload), "as given"
        cohort = M if setup.cohorts is None else setup.cohorts.number(M)
        lanes = -(-together * cohort // self.ranks.size)
        # round 0 speaks for all: who takes part and how much they do changes little on average
        work = setup.rounds * lanes * float(self.steps.counts(0, M, setup.seed).mean())
        return choose_engine(self.workload, setup.engine, setup.compile, lanes, work, record)

    @property
    def _gradients(self) -> LastGradients:
        assert isinstance(self.roster.gradients, LastGradients)
        return self.roster.gradients

    def server(self, algorithm: Algorithm) -> Server:
        """Return a server whose model is x_1; `start` or `restore` makes it ready."""
        folder = None if self.setup.state_dir is None else Path(self.setup.state_dir)
        return Server(algorithm, {"x": self.x}, ClientTable(self.federation.num_clients, folder))

    def start(self, server: Server) -> Spent:
        """Start a server; where its algorithm needs every client's full gradient at x_1, that costs an epoch."""
        everyone = np.arange(self.federation.num_clients)
        local = everyone[self.ranks.own(everyone)]
        server.start(Population(self.federation.weights, self._gradients, local, self.ranks.total))
        if server.algorithm.traits.start == "nothing":
            return Spent()
        once = np.ones(len(everyone), np.int64)
        epochs = epoch_steps(self.federation.sizes, self.setup.batch_size)
        return self._spent(0, everyone, Cost(down=once, up=once, extra_steps=epochs), 0 * once)[0]

    def restore(self, server: Server, checkpoint: Checkpoint) -> None:
        """Bring a server to where a checkpoint left it."""
        local = self.ranks.own(np.arange(self.federation.num_clients))
        server.restore(checkpoint, local, server.table.folder, self.x.device)

    def draw(self, round: int) -> Cohort:
        """Return who takes part in a round, and with how many steps."""
        fed, cohorts = self.federation, self.setup.cohorts
        clients, masses = np.arange(fed.num_clients), None
        if cohorts is not None:
            clients, times = cohorts.draw(round, fed.weights, self.setup.seed)
            if cohorts.by == "weight":
                masses = times.tolist()
        K = self.steps.counts(round, fed.num_clients, self.setup.seed)
        return self.roster.cohort(round, clients, K[clients], masses)

    def local(self, cohort: Cohort) -> Cohort:
        """Return the members of a cohort that this process runs."""
        return cohort if self.ranks.size == 1 else cohort.part(self.ranks.own(cohort.clients), self.ranks.total)

    def round(self, servers: Sequence[Server]) -> list[Replies]:
        """Run the next round of every server; their clients step together as one batch."""
        orders = []
        for server in servers:
            whole = self.draw(server.rounds_done)
            orders.append(server.plan(whole, self.local(whole)))
        replies = []
        for server, order, result in zip(servers, orders, self._execute(orders), strict=True):
            whole = order.whole
            cost = server.algorithm.cost(whole)
            spent, arrived = self._spent(whole.round, whole.clients, cost, whole.steps)
            replies.append(Replies(order, result, spent, arrived))
        return replies

    def _execute(self, orders: Sequence[Order]) -> list[Result]:
        plans, clients = [order.plan for order in orders], [order.cohort.clients for order in orders]
        if not any(map(len, plans)):  # none of the clients that this process runs takes part
            nothing = [order.x.new_empty((0, len(order.x))) for order in orders]
            return [Result(models, models.new_zeros(0, dtype=torch.float64)) for models in nothing]
        round = orders[0].whole.round
        if len(orders) == 1:
            return [self.engine.run(plans[0], orders[0].x, clients[0], round)]
        starts = [order.x.expand(len(order.plan), -1) for order in orders]
        return self.engine.run(
            Plan.join(plans), torch.cat(starts), np.concatenate(clients), round
        ).split(plans)  # fmt: skip

    def _spent(
        self, round: int, clients: npt.NDArray[np.int64], cost: Cost, steps: npt.NDArray[np.int64]
    ) -> tuple[Spent, npt.NDArray[np.float64]]:
        """Return what vectors moved and steps computed cost, and when each client was done."""
        size = len(self.x) * self.x.element_size()
        down, up = cost.down * size, cost.up * size
        done = steps + cost.extra_steps
        times = self.clock.client_times(round, clients, done, down, up, self.setup.seed)
        return Spent(float(times.max()), int(down.sum()), int(up.sum())), times

    def evaluate(self, x: Tensor, metrics: Mapping[str, Metric]) -> dict[str, float | None]:
        """Measure a model on the test data; of several processes the first does so for all."""
        measured = evaluate(self.workload, x, metrics) if self.ranks.rank == 0 else {}
        return self.ranks.agree(measured)

    def diagnose(self, algorithm: Algorithm, replies: Replies) -> Divergence:
        """Run the clients that left the finite numbers once more, and find the first of them."""
        order = replies.order
        asked = order.whole, order.plan, order.x, replies.result
        return diagnose(self.workload, self.ranks, algorithm, *asked)

    def note(self, round: int, event: str) -> None:
        """Log what happened to a client; of several processes the first does."""
        if self.ranks.rank == 0:
            log.warning("round %d: %s", round, event)

    def take_events(self) -> list[str] | None:
        """Return None: the history of a simulation holds no events."""
        return None

    def facts(self, sim_time: float, bytes_total: int) -> Facts:
        """Return what a checkpoint must say: the engine, so that the run goes on with the same rounding."""
        return Facts(sim_time, bytes_total, EngineRecord.of(self.engine, self.workload))

    def describe(self) -> dict[str, Any]:
        """Return where the run takes place: machine, versions, engine."""
        record = EngineRecord.of(self.engine, self.workload)
        return {
            **environment(self.model.device),
            "engine": record.name,
            "engine_compiled": record.compiled,
            "engine_width": 1 if record.name == "serial" else record.width,
            "engine_reason": self.engine_reason,
            "processes": self.ranks.size,
        }


class LastGradients:
    """The engine's service of gradients, with its last answer.

    Before and in round 1 the same question is asked several times: for nu, for every nu_i, and by every run.
    """

    def __init__(self) -> None:
        self.service: GradientService | None = None
        self._asked: tuple[Tensor, npt.NDArray[np.int64], int, str] | None = None
        self._answer: Tensor | None = None

    def __call__(
        self, x: Tensor, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"] = "full"
    ) -> Tensor:
        """Return the gradients at x, [m, d]."""
        assert self.service is not None
        if self._answer is not None and self._asked is not None:
            last = self._asked
            if last[0] is x and last[2:] == (round, batch) and np.array_equal(last[1], clients):
                return self._answer
        self._answer = None  # before the next one is made: two need not fit
        answer = self.service(x, clients, round, batch)
        if round == 0:
            self._asked, self._answer = (x, clients.copy(), round, batch), answer
        return answer


@contextlib.contextmanager
def _threads(record: EngineRecord | None) -> Iterator[None]:
    """Use as many threads as the record says; those of the caller come back afterwards."""
    before = torch.get_num_threads()
    if record is not None and record.threads != before:
        torch.set_num_threads(record.threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != before:
            torch.set_num_threads(before)


@contextlib.contextmanager
def _precision(precision: str, device: torch.device) -> Iterator[None]:
    """Compute full float32 products unless TF32 was asked for: cuDNN would use TF32 for convolutions."""
    if device.type != "cuda":
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
