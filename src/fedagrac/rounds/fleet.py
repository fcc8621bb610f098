"""Fleets: the clients that carry out a server's plans.

`Fleet` is all that the round loop knows of clients. `Simulated` runs them on this machine, with an engine, a clock
and, if several processes share the work, ranks. A live fleet sends messages instead (`fedagrac.flower`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import torch

from fedagrac.algorithms.base import Cost
from fedagrac.core.cohort import Cohort, GradientService, LabelService, Population
from fedagrac.core.layout import Layout
from fedagrac.core.local import Plan, Result
from fedagrac.core.robust import Aggregation
from fedagrac.data.batches import epoch_steps, pass_steps
from fedagrac.data.describe import label_counts
from fedagrac.engines import (
    EngineRecord,
    choose_engine,
    choose_threads,
    current_ranks,
    restored_threads,
    use_threads,
)
from fedagrac.engines.precision import products
from fedagrac.heterogeneity import Clock, Devices, Epochs
from fedagrac.heterogeneity.steps import checked_counts
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.divergence import diagnose
from fedagrac.rounds.evaluation import Measures, evaluate, has_client_tests, try_evaluation
from fedagrac.rounds.exchange import Order, Replies, Spent
from fedagrac.rounds.own_models import OwnModels
from fedagrac.rounds.per_client import mean_steps
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

__all__ = ["Fleet", "Roster", "Simulated", "first_buffers"]

log = logging.getLogger("fedagrac")


class Fleet(Protocol):
    """Clients that a server can reach."""

    @property
    def model(self) -> VectorModel:
        """The module as a function of x."""

    @property
    def federation(self) -> Federation | None:
        """The clients' data if they are on this machine, otherwise None."""

    @property
    def ranks(self) -> Ranks:
        """The processes that share the fleet."""

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """omega_i of all clients, [M]."""

    def start(self, server: Server) -> Spent:
        """Bring a server to its state before round 1. Return the cost."""

    def restore(self, server: Server, checkpoint: Checkpoint) -> None:
        """Bring a server to its state at a checkpoint."""

    def round(self, servers: Sequence[Server]) -> list[Replies]:
        """Draw each server's next cohort, let the server plan, and carry out the plan. Return the replies.

        All servers have done the same number of rounds.
        """

    def evaluate(
        self,
        x: Tensor,
        metrics: Mapping[str, Metric],
        buffers: Tensor | None = None,
        own: OwnModels | None = None,
    ) -> dict[str, float | None]:
        """Measure a model with these moving buffers on the test data. Return None for values without data.

        If clients use models of their own, those are measured.
        """

    def diagnose(self, algorithm: Algorithm, replies: Replies) -> Divergence:
        """Return where a round diverged."""

    def note(self, round: int, event: str) -> None:
        """Report an event of a round."""

    def take_events(self) -> list[str] | None:
        """Return the events since the last call; None if events are not part of the history."""

    def facts(self, sim_time: float, bytes_total: int) -> Facts:
        """Return what a checkpoint must store about the fleet."""

    def describe(self) -> dict[str, Any]:
        """Return the machine, the versions and the engine of the run."""


@dataclass(frozen=True, eq=False)
class Roster:
    """All M clients of a fleet, from which cohorts are made.

    Attributes:
        sizes: n_i, the samples of each client, [M].
        masses: exact weights that are not normalised.
        weights: omega_i, [M].
        batch_size: samples per step; None for all of a client's samples.
        gradients: the local gradients of clients.
        aggregate: the robust rule in place of sums over clients; None for the sums.
        layout: how the module's parameters lie in x.
        labels: the classes that clients hold; None if they are not known.
        seed: the key of every random draw of the run.
        number_bytes: the bytes of each number of a vector.
    """

    sizes: npt.NDArray[np.int64]
    masses: Sequence[int | Fraction]
    weights: npt.NDArray[np.float64]
    batch_size: int | None
    gradients: GradientService
    aggregate: Aggregation | None = None
    layout: Layout | None = None
    labels: LabelService | None = None
    seed: int = 0
    number_bytes: int = 4

    @classmethod
    def of(
        cls,
        sizes: Sequence[int],
        batch_size: int | None,
        gradients: GradientService,
        aggregate: Aggregation | None = None,
        layout: Layout | None = None,
        labels: LabelService | None = None,
        seed: int = 0,
        number_bytes: int = 4,
    ) -> Roster:
        """Make a roster of clients that are weighted by their samples, which are summed in exact integers.

        Examples:
            >>> Roster.of([2**62, 2**62], None, lambda *_: torch.zeros(2, 1)).weights.tolist()
            [0.5, 0.5]
        """
        total = sum(sizes)
        weights = np.array([float(Fraction(size, total)) for size in sizes])
        samples = np.array(sizes, np.int64)
        return cls(
            samples, list(sizes), weights, batch_size, gradients, aggregate, layout, labels, seed, number_bytes
        )

    def cohort(
        self,
        round: int,
        clients: npt.NDArray[np.int64],
        steps: npt.NDArray[np.int64],
        masses: Sequence[int | Fraction] | None = None,
        before: npt.NDArray[np.int64] | None = None,
    ) -> Cohort:
        """Return a cohort of some clients, weighted by `masses` or else by their own masses.

        `before` are the steps of earlier rounds, [m], if batches continue where those ended.
        """
        epochs = epoch_steps(self.sizes[clients], self.batch_size)
        if masses is None:
            masses = [self.masses[int(i)] for i in clients]
        return Cohort(
            round=round,
            clients=clients,
            steps=steps,
            masses=masses,
            population_weights=self.weights[clients],
            epoch_steps=epochs,
            pass_steps=epochs if before is None else pass_steps(self.sizes[clients], self.batch_size, before),
            everyone=len(clients) == len(self.sizes),
            service=self.gradients,
            aggregate=self.aggregate,
            layout=self.layout,
            labels=self.labels,
            seed=self.seed,
            number_bytes=self.number_bytes,
        )


@dataclass(eq=False)
class Simulated:
    """Clients that this machine simulates.

    One fleet serves any number of runs. They share the model, the data on the device, and the engine with its
    compiled steps and recorded graphs.

    Attributes:
        setup: the options of the runs.
        federation: the clients and their data.
        model: the module as a function of x.
        workload: the problem as the engine sees it.
        steps: how many steps each client runs in each round.
        clock: how long a round takes.
        ranks: the processes that share the fleet.
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
    _engine: tuple[Engine, str, int] | None = None
    _engines: dict[tuple[int, EngineRecord | None, int, bool], tuple[Engine, str, int]] = field(
        default_factory=dict
    )
    _drawn: Cohort | None = None

    @classmethod
    def of(cls, model: nn.Module, federation: Federation, setup: Setup) -> Simulated:
        """Make a fleet: put the data on the device, and check that model, data and options fit together.

        The model may be any nn.Module. Its weights are x_1, and it is not changed.
        """
        M = federation.num_clients
        setup.schedule.check(M, setup.rounds)
        if setup.aggregate is not None:
            setup.aggregate.check_cohort(M if setup.cohorts is None else setup.cohorts.number(M))
        vector_model = VectorModel(model, setup.torch_device(), setup.dtype)
        workload = setup.workload(vector_model, federation)
        try_evaluation(workload, setup.metrics or {})
        steps, clock = setup.schedule, setup.clock
        if isinstance(steps, Devices) and steps.needs_flops:
            steps = steps.with_flops(workload.step_flops())
        if isinstance(steps, Epochs):
            steps = steps.with_samples(federation.sizes, setup.batch_size, setup.sampling)
        if clock is None:
            clock = Clock.of(steps) if isinstance(steps, Devices) else Clock()
        clock.check(M)
        if setup.sampling == "cyclic":
            workload = dataclasses.replace(workload, steps_before=StepsBefore(setup, steps, federation.weights))
        ranks = current_ranks().share(checked_counts(steps, 0, M, setup.seed))
        gradients = LastGradients()
        roster = Roster(
            federation.sizes,
            federation.masses,
            federation.weights,
            setup.batch_size,
            gradients,
            setup.aggregate,
            vector_model.layout,
            Labels(federation),
            setup.seed,
            vector_model.dtype.itemsize,
        )
        return cls(setup, federation, vector_model, workload, steps, clock, ranks, vector_model.initial(), roster)

    @contextlib.contextmanager
    def ready(self, together: int = 1, before: Facts | None = None, corrected: bool = True) -> Iterator[None]:
        """Choose an engine, and run a block with the precision and the threads that its runs need.

        Args:
            together: how many runs step side by side.
            before: the facts of the checkpoint that the runs resume from. The engine and the threads are then
                those of the checkpoint, because the rounding of sums depends on them.
            corrected: whether steps have a correction, so that engines are measured with one.
        """
        record = None if before is None else before.engine
        with products(self.setup.precision), restored_threads():
            chooses = not callable(self.setup.engine) and "auto" in (self.setup.engine, self.setup.compile)
            asked = (together, record, torch.get_num_threads(), corrected or not chooses)
            if asked not in self._engines:
                self._engines[asked] = self._choose(together, record, corrected)
                other = self._engines.get((*asked[:3], not asked[3]))
                if other is not None and self._alike(other, self._engines[asked]):
                    self._engines[asked] = other  # what it has prepared is shared
            self._engine = self._engines[asked]
            use_threads(self._engine[2])
            self._gradients.service = self.engine.gradients
            yield

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """omega_i of all clients, [M]."""
        return self.roster.weights

    @property
    def engine(self) -> Engine:
        """The engine that runs the clients."""
        if self._engine is None:
            raise RuntimeError("the fleet has no engine yet: use it inside `with fleet.ready():`")
        return self._engine[0]

    @property
    def engine_reason(self) -> str:
        """Why this engine was chosen."""
        return "" if self._engine is None else self._engine[1]

    def _alike(self, one: tuple[Engine, str, int], other: tuple[Engine, str, int]) -> bool:
        """Return whether two choices are engines of one kind with as many threads."""
        records = [EngineRecord.of(engine, self.workload) for engine, _, _ in (one, other)]
        return records[0] == records[1] and one[2] == other[2]

    def _choose(self, together: int, record: EngineRecord | None, corrected: bool) -> tuple[Engine, str, int]:
        """Return an engine for so many runs side by side, why it was chosen, and the number of its threads."""
        setup, M = self.setup, self.federation.num_clients
        threads, why = torch.get_num_threads(), ""
        if record is not None:
            threads = record.threads
            use_threads(threads)
        if callable(setup.engine):
            return setup.engine(self.workload), "as given", threads
        cohort = M if setup.cohorts is None else setup.cohorts.number(M)
        lanes = -(-together * cohort // self.ranks.size)
        # the steps of round 0 stand for all rounds, because the mean changes little
        work = setup.rounds * lanes * float(checked_counts(self.steps, 0, M, setup.seed).mean())
        if record is None:
            threads, why = choose_threads(self.workload, setup.engine, setup.compile, lanes, work, corrected)
            use_threads(threads)  # candidates are measured and compiled with them
        engine, reason = choose_engine(
            self.workload, setup.engine, setup.compile, lanes, work, record, corrected=corrected
        )
        return engine, "; ".join(filter(None, (reason, why))), threads

    @property
    def _gradients(self) -> LastGradients:
        assert isinstance(self.roster.gradients, LastGradients)
        return self.roster.gradients

    def check(self, algorithm: Algorithm) -> None:
        """Refuse an algorithm that cannot work with the model, the robust rule or the number of rounds."""
        algorithm.check_rounds(self.setup.rounds)
        algorithm.check_model(self.model.layout, self.setup.aggregate)

    def server(self, algorithm: Algorithm) -> Server:
        """Return a server whose model is x_1. Call `start` or `restore` before the first round."""
        folder = None if self.setup.state_dir is None else Path(self.setup.state_dir)
        return Server(
            algorithm,
            {"x": self.x},
            ClientTable(self.federation.num_clients, folder),
            first_buffers=first_buffers(self.model, self.setup.buffers),
            own_buffers=self.setup.buffers == "local" or algorithm.traits.own_buffers,
        )

    def start(self, server: Server) -> Spent:
        """Start a server. Return the cost: an epoch if the algorithm needs every client's gradient at x_1."""
        everyone = np.arange(self.federation.num_clients)
        local = everyone[self.ranks.own(everyone)]
        self._gradients.buffers_of = server.buffers_of
        server.start(
            Population(
                self.federation.weights,
                self._gradients,
                local,
                self.ranks.total,
                aggregate=self.setup.aggregate,
                layout=self.roster.layout,
                mean_steps=self._mean_steps,
            )
        )
        if server.algorithm.traits.start == "nothing":
            return Spent()
        once = np.ones(len(everyone), np.int64)
        epochs = epoch_steps(self.federation.sizes, self.setup.batch_size)
        return self._spent(0, everyone, Cost(down=once, up=once, extra_steps=epochs), 0 * once)[0]

    def _mean_steps(self) -> float:
        """Return Kbar over all clients in the first rounds: 20, or fewer with very many clients."""
        M = self.federation.num_clients
        rounds = max(1, min(self.setup.rounds, 20, 1_000_000 // M))
        counts = (checked_counts(self.steps, round, M, self.setup.seed) for round in range(rounds))
        return sum(float(self.federation.weights @ K) for K in counts) / rounds

    def restore(self, server: Server, checkpoint: Checkpoint) -> None:
        """Bring a server to its state at a checkpoint."""
        local = self.ranks.own(np.arange(self.federation.num_clients))
        server.restore(checkpoint, local, server.table.folder, self.x.device)

    def draw(self, round: int) -> Cohort:
        """Return the cohort of a round, with the steps of its members."""
        if self._drawn is None or self._drawn.round != round:
            self._drawn = self._cohort(round)
        return self._drawn

    def draw_ahead(self, round: int) -> None:
        """Draw the cohort of a coming round and its batches, while a GPU works on the present one."""
        if round < self.setup.rounds:
            local = self.local(self.draw(round))
            self.workload.draw_ahead(local.clients, local.steps, round)

    def _cohort(self, round: int) -> Cohort:
        fed, cohorts = self.federation, self.setup.cohorts
        clients, masses = np.arange(fed.num_clients), None
        if cohorts is not None:
            clients, times = cohorts.draw(round, fed.weights, self.setup.seed)
            if cohorts.by == "weight":
                masses = times.tolist()
        K = checked_counts(self.steps, round, fed.num_clients, self.setup.seed)
        before = self.workload.steps_before
        return self.roster.cohort(
            round, clients, K[clients], masses, None if before is None else before(round)[clients]
        )

    def local(self, cohort: Cohort) -> Cohort:
        """Return the members of a cohort that this process runs."""
        return cohort if self.ranks.size == 1 else cohort.part(self.ranks.own(cohort.clients), self.ranks.total)

    def round(self, servers: Sequence[Server]) -> list[Replies]:
        """Run the next round of every server, with all clients in one batch. Return the replies."""
        orders = []
        for server in servers:
            self._gradients.buffers_of = server.buffers_of
            whole = self.draw(server.rounds_done)
            order = server.plan(whole, self.local(whole))
            if order.plan.gradient:
                order = order.with_gradients(order.cohort.gradients(order.x))
            orders.append(order)
        results = self._execute(orders)
        if self.x.is_cuda:  # it works on the results until somebody reads a number
            self.draw_ahead(orders[0].whole.round + 1)
        replies = []
        for server, order, result in zip(servers, orders, results, strict=True):
            whole = order.whole
            cost = server.algorithm.cost(whole)
            moved = 0 if server.buffers is None else len(server.buffers)
            spent, arrived = self._spent(whole.round, whole.clients, cost, whole.steps, moved)
            replies.append(Replies(order, result, spent, arrived))
        return replies

    def _execute(self, orders: Sequence[Order]) -> list[Result]:
        """Run the clients of all orders in one batch. Return one result per order."""
        plans, clients = [order.plan for order in orders], [order.cohort.clients for order in orders]
        if not any(map(len, plans)):  # no client of this process takes part
            no_loss = torch.zeros(0, dtype=torch.float64, device=orders[0].x.device)
            none = orders[0].x.new_empty((0, len(orders[0].x)))
            return [
                Result(
                    none,
                    no_loss,
                    buffers=order.plan.buffers,
                    second=None if order.plan.second is None else none,
                    slots=order.plan.slots,
                )
                for order in orders
            ]
        round = orders[0].whole.round
        results: list[Result | None] = [None] * len(orders)
        for group in _joinable(plans):
            some = [plans[i] for i in group]
            if len(group) == 1:
                results[group[0]] = self.engine.run(some[0], orders[group[0]].x, clients[group[0]], round)
                continue
            starts = torch.cat([orders[i].x.expand(len(plans[i]), -1) for i in group])
            together = self.engine.run(Plan.join(some), starts, np.concatenate([clients[i] for i in group]), round)
            for i, result in zip(group, together.split(some), strict=True):
                results[i] = result
        done = [result for result in results if result is not None]
        return [self._with_second(order, result) for order, result in zip(orders, done, strict=True)]

    def _with_second(self, order: Order, result: Result) -> Result:
        """Return a result with the members' second models, if the plan asks for them."""
        if order.plan.second is None:
            return result
        second = self.engine.run(order.plan.of_second(), order.x, order.cohort.clients, order.whole.round)
        return dataclasses.replace(result, second=second.models)

    def _spent(
        self,
        round: int,
        clients: npt.NDArray[np.int64],
        cost: Cost,
        steps: npt.NDArray[np.int64],
        buffers: int = 0,
    ) -> tuple[Spent, npt.NDArray[np.float64]]:
        """Return the cost of moving vectors and computing steps, and the seconds that each client takes.

        Each client receives and sends so many numbers of moving buffers.
        """
        size, extra = len(self.x) * self.x.element_size(), buffers * self.x.element_size()
        down, up = (moved + extra for moved in cost.bytes(size))
        times = self.clock.client_times(round, clients, cost.work(steps), down, up, self.setup.seed)
        return Spent(float(times.max()), int(down.sum()), int(up.sum())), times

    def evaluate(
        self,
        x: Tensor,
        metrics: Mapping[str, Metric],
        buffers: Tensor | None = None,
        own: OwnModels | None = None,
    ) -> Measures:
        """Measure a model on the test data. The first process does so for all."""
        steps = self.mean_steps if has_client_tests(self.federation) else None
        measured = None
        if self.ranks.rank == 0:
            measured = evaluate(self.workload, x, metrics, buffers, steps, own)
        elif own is not None:
            own.pass_on()
        if self.ranks.size == 1 and measured is not None:
            return measured
        return Measures.from_plain(self.ranks.agree({} if measured is None else measured.plain()))

    @functools.cached_property
    def mean_steps(self) -> npt.NDArray[np.float64]:
        """The mean K_i of each client, [M]."""
        return mean_steps(self.steps, self.federation.num_clients, self.setup.rounds, self.setup.seed)

    def diagnose(self, algorithm: Algorithm, replies: Replies) -> Divergence:
        """Run the diverged clients once more. Return which one was the first, and after how many steps."""
        order = replies.order
        return diagnose(self.workload, self.ranks, algorithm, order.whole, order.plan, order.x, replies.result)

    def note(self, round: int, event: str) -> None:
        """Log an event of a round. Only the first process does."""
        if self.ranks.rank == 0:
            log.warning("round %d: %s", round, event)

    def take_events(self) -> list[str] | None:
        """Return None: the history of a simulation holds no events."""
        return None

    def facts(self, sim_time: float, bytes_total: int) -> Facts:
        """Return what a checkpoint must store: costs, and the engine, on which the rounding of sums depends."""
        return Facts(sim_time, bytes_total, EngineRecord.of(self.engine, self.workload))

    def describe(self) -> dict[str, Any]:
        """Return the machine, the versions and the engine of the run."""
        record = EngineRecord.of(self.engine, self.workload)
        return {
            **environment(self.model.device),
            "engine": record.name,
            "engine_compiled": record.compiled,
            "engine_width": 1 if record.name == "serial" else record.width,
            "engine_reason": self.engine_reason,
            "precision": self.setup.precision,
            "processes": self.ranks.size,
        }


def _joinable(plans: Sequence[Plan]) -> list[list[int]]:
    """Return groups of plans that an engine can run as one: simple ones with the same local optimizer.

    Either all of them keep its state between rounds or none does.
    """
    groups: dict[object, list[int]] = {}
    for i, plan in enumerate(plans):
        groups.setdefault((plan.local, plan.slots is None) if plan.simple else i, []).append(i)
    return list(groups.values())


def first_buffers(model: VectorModel, mode: str) -> Tensor | None:
    """Return the moving buffers of the user's module, [q]; None if it has none, or if they stay frozen."""
    if not model.buffers.names or mode == "frozen":
        return None
    return model.buffers.given(model.dtype)


class StepsBefore:
    """How many steps each client made before a round, from the step schedule and the cohorts alone.

    A client advances in the rounds in which it takes part, by K_i, whether or not its reply counts.
    """

    def __init__(self, setup: Setup, steps: StepSchedule, weights: npt.NDArray[np.float64]) -> None:
        self._setup, self._steps, self._weights = setup, steps, weights
        self._round, self._total = 0, np.zeros(len(weights), np.int64)

    def __call__(self, round: int) -> npt.NDArray[np.int64]:
        """Return the sums of K_i over the rounds of the run before this one in which client i took part, [M]."""
        setup, cohorts, M = self._setup, self._setup.cohorts, len(self._weights)
        round = min(round, setup.rounds)
        if round < self._round:
            self._round, self._total = 0, np.zeros(M, np.int64)
        for t in range(self._round, round):
            K = checked_counts(self._steps, t, M, setup.seed)
            present = np.arange(M) if cohorts is None else cohorts.draw(t, self._weights, setup.seed)[0]
            self._total[present] += K[present]
        self._round = round
        return self._total


class Labels:
    """The classes that the clients of a federation hold."""

    def __init__(self, federation: Federation) -> None:
        self._federation = federation
        self._held: npt.NDArray[np.bool_] | None = None

    def __call__(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return which classes clients hold, [m, classes]; None if targets are not labels."""
        if self._held is None:
            counts = label_counts(self._federation, np.arange(self._federation.num_clients))
            if counts is None:
                return None
            self._held = counts > 0
        return self._held[clients]


class LastGradients:
    """The engine's service of gradients, which keeps its last answer.

    Before and in round 1 the same gradients are needed several times: for nu, for every nu_i, and for every run.
    """

    def __init__(self) -> None:
        self.service: Callable[..., Tensor] | None = None
        self.buffers_of: Callable[[npt.NDArray[np.int64], int], Tensor | None] = lambda clients, round: None
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
        self._answer = None  # freed first, because two answers may not fit into memory
        buffers = self.buffers_of(clients, round)
        moving = {} if buffers is None else {"buffers": buffers}
        answer = self.service(x, clients, round, batch, **moving)
        if round == 0:
            self._asked, self._answer = (x, clients.copy(), round, batch), answer
        return answer
