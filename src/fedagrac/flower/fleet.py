"""A live fleet: clients on other machines, reached over Flower.

The round loop, the algorithms and the records are those of a simulation. This module decides what clients are
asked, which replies can be used, and what happens if there are too few.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.cohort import Cohort, Population
from fedagrac.core.local import Plan, Result
from fedagrac.engines.ranks import ALONE, Ranks
from fedagrac.errors import FedagracError, InputError, shown
from fedagrac.experiments.build import build_aggregate, build_guard
from fedagrac.flower.link import Link, MissedError, RemoteGradients
from fedagrac.flower.operating import EXCLUSIONS, read_exclusions
from fedagrac.flower.settings import NOTED, ClientSteps
from fedagrac.flower.suspects import LiveDivergence, far_longer, longest_update
from fedagrac.flower.wire import BadReplyError, Parcel, fingerprint, slot_names
from fedagrac.rounds.evaluation import evaluate
from fedagrac.rounds.exchange import Order, Replies, Spent
from fedagrac.rounds.fleet import Roster, first_buffers
from fedagrac.rounds.own_models import OwnModels
from fedagrac.rounds.server import Server
from fedagrac.storage.checkpoints import CheckpointError, Facts
from fedagrac.storage.environment import environment

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms import Algorithm
    from fedagrac.engines import Workload
    from fedagrac.flower.settings import Settings
    from fedagrac.models.vector import VectorModel
    from fedagrac.rounds.divergence import Divergence
    from fedagrac.rounds.evaluation import Metric
    from fedagrac.storage.checkpoints import Checkpoint

__all__ = ["FlowerFleet"]

log = logging.getLogger("fedagrac")


@dataclass(frozen=True)
class Drawn:
    """The cohort of a round, before anyone is asked.

    Attributes:
        times: how often each client was drawn, by its number.
        by_weight: whether clients count as often as they were drawn, instead of by their samples.
        needed: how many usable replies the round needs.
    """

    times: Mapping[int, int]
    by_weight: bool
    needed: int


@dataclass(eq=False)
class FlowerFleet:
    """Clients that are reached by messages.

    Attributes:
        settings: the settings of the federation.
        model: the module as a function of x.
        link: the exchanges with clients.
        test: the problem with the server's test data; None to evaluate nothing.
        federation: None, because the clients' data are on other machines.
        ranks: the only process that runs the server.
        gradients: the local gradients of clients.
    """

    settings: Settings
    model: VectorModel
    link: Link
    test: Workload | None = None
    federation: None = None
    ranks: Ranks = ALONE
    gradients: RemoteGradients = field(init=False)
    _refused_file: str = ""

    def __post_init__(self) -> None:
        self.gradients = RemoteGradients(self.link, self.model.dtype, build_guard(self.settings.guard))

    @property
    def roster(self) -> Roster:
        """All clients, with the numbers of samples that they reported at the start."""
        sizes = [self.link.sizes[i] for i in range(self.settings.clients)]
        aggregate = build_aggregate(self.settings.aggregate)
        return Roster.of(
            sizes,
            self.settings.batch,
            self.gradients,
            aggregate,
            self.model.layout,
            self.link.labels_of,
            self.settings.seed,
            self.model.dtype.itemsize,
        )

    @property
    def weights(self) -> npt.NDArray[np.float64]:
        """omega_i of all clients, [M]."""
        return self.roster.weights

    def start(self, server: Server) -> Spent:
        """Wait for clients and start a server. Return the cost.

        If the algorithm needs full gradients at x_1, clients send them when they connect.
        """
        begun, x, settings = time.monotonic(), server.x, self.settings
        if server.algorithm.traits.start == "gradients":
            self.link.x1 = x
        self._read_exclusions()
        wanted = self._eligible.tolist()
        number = min(settings.start_clients or len(wanted), len(wanted))
        if number < settings.clients and settings.samples is None:
            accepted = "the number of samples of each partition, because not all clients are needed at the start: "
            raise InputError("samples", None, accepted + "otherwise the weights of absent ones are not known")
        log.info("waiting for %d clients", number)
        self.link.wait_for(wanted, number, 0)
        while not self.link.agree_on_buffers():
            self.link.wait_for(wanted, number, 0)
        self.link.sizes |= {int(client): samples for client, samples in (settings.samples or {}).items()}
        server.begin_buffers(first_buffers(self.model, settings.buffers))
        self.gradients.buffers_of = server.buffers_of
        if server.buffers is None:  # otherwise gradients must be those at the server's buffers
            self.gradients.remember(x, self.link.gradients)
        present = sorted(self.link.nodes)
        while True:
            try:
                absent = self._start_from(server, present)
                break
            except MissedError as missed:
                present = [client for client in present if client not in missed.clients]
                if len(present) < number:
                    raise
        if len(absent):
            self.link.note(f"started without clients {', '.join(map(str, absent))}")
        self.link.started = True
        return Spent(time.monotonic() - begun, self.link.bytes_down, self.link.bytes_up)

    def _start_from(self, server: Server, present: Sequence[int]) -> npt.NDArray[np.int64]:
        """Start a server from the gradients of the clients that are present. Return the other clients.

        The gradient at x_1 of every other client counts as the weighted mean over those present. Then nu, the
        weighted sum over all clients, is that mean, too.
        """
        roster, everyone = self.roster, np.arange(self.settings.clients)
        absent = np.setdiff1d(everyone, present)
        population = Population(roster.weights, self.gradients, aggregate=roster.aggregate, layout=roster.layout)
        if len(absent):
            total = sum(roster.masses[client] for client in present)
            weights = np.zeros(len(everyone))
            weights[present] = [float(Fraction(roster.masses[client]) / total) for client in present]
            population = dataclasses.replace(population, weights=weights, clients=np.array(present))
        server.start(population)
        if server.algorithm.traits.start == "gradients":
            if len(absent):
                self.gradients.assume(absent, population.gradient(server.x))
            # all rows are made now: later, gradients at x_1 of some clients would have to be remembered
            server.admit(roster.cohort(0, everyone, np.ones(len(everyone), np.int64)))
        return absent

    @property
    def _eligible(self) -> npt.NDArray[np.int64]:
        """The clients that are not excluded."""
        return np.setdiff1d(np.arange(self.settings.clients), list(self.link.excluded))

    def _read_exclusions(self) -> None:
        """Update the excluded clients: those of the settings and those in the file that the operator writes."""
        clients, path = self.settings.clients, Path(self.settings.out) / EXCLUSIONS
        try:
            excluded = frozenset([*self.settings.exclude, *read_exclusions(path, clients)])
            if len(excluded) == clients:
                raise InputError(str(path), sorted(excluded), "a client that is not excluded")
        except InputError as error:
            if self._refused_file != str(error):
                self.link.note(f"the list of excluded clients stays as it was: {error}")
            self._refused_file = str(error)
            return
        self._refused_file = ""
        self.link.exclude(excluded)

    def restore(self, server: Server, checkpoint: Checkpoint) -> None:
        """Bring a server to its state at a checkpoint of a run with the same settings."""
        before, now = checkpoint.facts.identity, self.identity()
        for key in dict.fromkeys([*now, *before]):  # either may have a key that the other lacks, such as a guard
            if before.get(key) != now.get(key) and key in NOTED:
                self.link.note(f"{key} was {shown(before.get(key))}, is {shown(now.get(key))}")
            elif before.get(key) != now.get(key):
                accepted = f"another folder: it holds a run with {key} = {before.get(key)!r}"
                raise InputError("out", self.settings.out, accepted)
        clients = self.settings.clients
        if len(checkpoint.facts.sizes) != clients:
            raise CheckpointError(
                f"the checkpoint cannot be used: it has {len(checkpoint.facts.sizes)} clients, expected {clients}"
            )
        self._check_sizes(checkpoint.facts.sizes)
        self.model.buffers.adopt(checkpoint.facts.buffers)
        self.link.adopted = True
        server.begin_buffers(first_buffers(self.model, self.settings.buffers))
        self.gradients.buffers_of = server.buffers_of
        server.restore(checkpoint, np.ones(clients, np.bool_), None, self.model.device)
        self.link.sizes = dict(enumerate(checkpoint.facts.sizes))
        if checkpoint.round < self.settings.rounds:
            self.link.note(f"resumed after round {checkpoint.round}")
            self._wait_for_known(checkpoint)
        self.link.started = True

    def _wait_for_known(self, checkpoint: Checkpoint) -> None:
        """Wait for the clients that were connected at a checkpoint; after `wait_seconds`, go on with enough."""
        self._read_exclusions()
        known = checkpoint.facts.connected or range(self.settings.clients)
        wanted = [client for client in known if client not in self.link.excluded] or self._eligible.tolist()
        self.link.wait_for(wanted, min(self.settings.min_clients, len(wanted)), checkpoint.round, patient=True)
        missing = [str(client) for client in wanted if client not in self.link.nodes]
        if missing:
            waited = f"wait_seconds = {self.settings.wait_seconds:g}"
            self.link.note(f"resumed without clients {', '.join(missing)}, which did not connect within {waited}")

    def _check_sizes(self, sizes: Sequence[int]) -> None:
        """Refuse a checkpoint whose sample counts are not those of the settings."""
        settings = self.settings
        for client, size in enumerate(sizes):
            fixed = (settings.samples or {}).get(str(client), size)
            if size != fixed:
                accepted = f"{size}, with which the run in {settings.out} began"
                raise InputError(f"samples.{client}", fixed, accepted)
            if size > settings.max_samples:
                accepted = f"at least {size}, the samples of client {client} in {settings.out}"
                raise InputError("max_samples", settings.max_samples, accepted)

    def identity(self) -> dict[str, Any]:
        """Return the settings that a run must share with its checkpoint."""
        return {**self.settings.identity(), "model": fingerprint(self.model)}

    def round(self, servers: Sequence[Server]) -> list[Replies]:
        """Do one round with the connected clients of its cohort, and again if there are too few usable replies."""
        (server,) = servers
        t, settings = server.rounds_done, self.settings
        begun, down, up = time.monotonic(), self.link.bytes_down, self.link.bytes_up
        for _ in range(settings.attempts):
            self._read_exclusions()
            drawn = self.draw(t)
            self.link.wait_for(drawn.times, drawn.needed, t)
            asked = sorted(drawn.times.keys() & self.link.nodes.keys())
            replies = self._ask(server, drawn)
            if replies is not None:
                self._note_far_longer(replies)
                answered = set(replies.order.whole.clients.tolist())
                spent = Spent(time.monotonic() - begun, self.link.bytes_down - down, self.link.bytes_up - up)
                contacts = self.link.take_contacts()
                faults = {client: contact.fault for client, contact in contacts.items()}
                dropped = {i: faults.get(i) or "no usable reply" for i in asked if i not in answered}
                return [
                    dataclasses.replace(replies, spent=spent, asked=len(asked), dropped=dropped, contacts=contacts)
                ]
            self.link.note(f"fewer than min_clients = {drawn.needed} usable replies, asking again")
        raise FedagracError(
            f"round {t + 1}: fewer than min_clients = {drawn.needed} usable replies in "
            f"attempts = {settings.attempts}; run again to resume from the last checkpoint"
        )

    def draw(self, round: int) -> Drawn:
        """Return the cohort of a round. Without excluded clients it is that of a simulation with the same seed.

        Excluded clients are not drawn, and others are drawn in their place.
        """
        eligible, cohorts = self._eligible, self.settings.cohorts
        clients, times = eligible, np.ones(len(eligible), np.int64)
        by_weight = cohorts is not None and cohorts.by == "weight"
        size = len(eligible) if cohorts is None else cohorts.number(self.settings.clients)
        if cohorts is not None and (by_weight or size < len(eligible)):
            weights = self.roster.weights[eligible]
            if len(eligible) < self.settings.clients:
                weights = weights / weights.sum()
            drawn, times = dataclasses.replace(cohorts, size=size).draw(round, weights, self.settings.seed)
            clients = eligible[drawn]
        counted = dict(zip(clients.tolist(), times.tolist(), strict=True))
        return Drawn(counted, by_weight, min(self.settings.min_clients, len(counted)))

    def _note_far_longer(self, replies: Replies) -> None:
        """Note clients that sent a vector far longer than the others did. With a guard, they are dropped."""
        if self.settings.guard is None:
            for client, what in far_longer(replies).items():
                self.link.note(f"client {client}: {what}; it counts, because there is no guard")

    def _ask(self, server: Server, drawn: Drawn) -> Replies | None:
        """Ask the connected clients of a cohort once. Return the replies, or None if there are too few."""
        rule = self.settings.build_steps()
        if isinstance(rule, ClientSteps):
            return self._ask_for_steps_and_model(server, drawn, rule)
        K = rule.counts(server.rounds_done, self.settings.clients, self.settings.seed)
        order = self._planned(server, drawn, lambda clients: K[clients])
        if order is None:
            return None
        cohort, plan = order.cohort, order.plan
        asks = {int(client): _message(order, row) for row, client in enumerate(cohort.clients)}
        vectors = {int(client): _vectors(order, row) for row, client in enumerate(cohort.clients)}
        answers = self.link.exchange("train.steps", asks, cohort.round, vectors)
        good = self.checked(answers, cohort, plan, lambda row: (int(plan.steps[row]), int(plan.steps[row])))
        if len(good) < drawn.needed:
            return None
        answered = order.alone(np.array(list(good), np.int64))
        return self._replies(answered, [dict(reply.vectors) for reply in good.values()], list(good.values()))

    def _ask_for_steps_and_model(self, server: Server, drawn: Drawn, rule: ClientSteps) -> Replies | None:
        """Do the two exchanges of Algorithm 1: K_i and the model from all, then the first gradients of some.

        The local rule does not depend on K_i (`Traits.needs_steps` is refused), so it is planned for the largest
        number of steps. Every client keeps its first gradient until the second exchange.
        """
        order = self._planned(server, drawn, lambda clients: np.full(len(clients), rule.max_steps))
        if order is None:
            return None
        cohort, first_steps = order.cohort, server.algorithm.traits.first_steps
        longest = np.zeros(len(cohort), np.int64)
        if first_steps is not None:
            longest = longest + first_steps if isinstance(first_steps, int) else cohort.epoch_steps
        order = dataclasses.replace(order, plan=dataclasses.replace(order.plan, first_steps=longest))
        asks = {int(client): _message(order, row, chosen=True) for row, client in enumerate(cohort.clients)}
        without_first = dataclasses.replace(order.plan, first_steps=0 * longest)
        one_step = dataclasses.replace(order, plan=dataclasses.replace(without_first, steps=0 * longest + 1))
        vectors = {int(client): _vectors(one_step, row) for row, client in enumerate(cohort.clients)}
        answers = self.link.exchange("train.steps", asks, cohort.round, vectors)
        good = self.checked(answers, cohort, without_first, lambda _: (1, rule.max_steps))
        if len(good) < drawn.needed:
            return None
        arrived = dict(self.link.arrived)
        K = np.array([int(reply.facts["steps"]) for reply in good.values()], np.int64)
        masses = [cohort.masses[row] for row in good]
        done = self.roster.cohort(cohort.round, cohort.clients[list(good)], K, masses)
        final = server.plan(done, done)
        firsts = self._ask_for_first_gradients(final)
        self.link.arrived = arrived
        # a client that missed the second exchange counts with its mean gradient
        sent_first = np.array([row in firsts for row in range(len(done))])
        plan = dataclasses.replace(final.plan, first_steps=np.where(sent_first, final.plan.first_steps, 0))
        sent = [
            {**reply.vectors, **({"first": firsts[row]} if row in firsts else {})}
            for row, reply in enumerate(good.values())
        ]
        return self._replies(dataclasses.replace(final, plan=plan), sent, list(good.values()))

    def _ask_for_first_gradients(self, order: Order) -> dict[int, Tensor]:
        """Do the second exchange. Return the first gradients by row."""
        cohort = order.cohort
        rows = {int(cohort.clients[row]): int(row) for row in np.flatnonzero(order.plan.first_steps)}
        asks = {client: Parcel({"round": cohort.round}) for client in rows if client in self.link.nodes}
        firsts = {}
        vectors = {client: {"first": self.model.size} for client in asks}
        for client, reply in self.link.exchange("train.first", asks, cohort.round, vectors).items():
            try:
                reply.integer("client", client, client)
                reply.integer("round", cohort.round, cohort.round)
                firsts[rows[client]] = reply.vector("first", self.model.size, self.model.dtype)
            except BadReplyError as error:
                self.link.note(f"client {client}: first gradient dropped, {error}")
        for client, row in rows.items():
            if row not in firsts:
                self.link.note(f"client {client}: missed the second exchange, its mean gradient is used")
        return firsts

    def _planned(
        self, server: Server, drawn: Drawn, steps: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> Order | None:
        """Return the order for the connected clients of a cohort, or None if there are too few.

        Clients that do not send a gradient that the plan needs are left out.
        """
        left_out: set[int] = set()
        while True:
            connected = (drawn.times.keys() & self.link.nodes.keys()) - left_out
            if len(connected) < drawn.needed:
                return None
            clients = np.array(sorted(connected), np.int64)
            masses = [drawn.times[client] for client in clients.tolist()] if drawn.by_weight else None
            cohort = self.roster.cohort(server.rounds_done, clients, steps(clients), masses)
            try:
                return server.plan(cohort, cohort)
            except MissedError as missed:
                left_out |= set(missed.clients)

    def checked(
        self,
        replies: Mapping[int, Parcel],
        cohort: Cohort,
        plan: Plan,
        bounds: Callable[[int], tuple[int, int]],
    ) -> dict[int, Parcel]:
        """Return the usable replies by row of the cohort. The others are dropped and noted as events."""
        good = {}
        d, dtype = self.model.size, self.model.dtype
        for row, client in enumerate(cohort.clients.tolist()):
            if client not in replies:
                continue
            reply = replies[client]
            try:
                reply.integer("client", client, client)
                reply.integer("round", cohort.round, cohort.round)
                K = reply.integer("steps", *bounds(row))
                reply.number("loss")
                reply.vector("model", d, dtype)
                if plan.first_steps[row] > 0:
                    reply.vector("first", d, dtype)
                if _sends_sum(plan, row, K):
                    reply.vector("total", d, dtype)
                elif "total" in reply.vectors:
                    raise BadReplyError(f"total was not asked for with steps = {K}")
                if plan.gradient:
                    reply.vector("gradient", d, dtype)
                if plan.buffers is not None:
                    reply.vector("buffers", plan.buffers.shape[1], dtype)
                for name in slot_names(plan.slots):
                    reply.vector(name, d, dtype)
                good[row] = reply
            except BadReplyError as error:
                self.link.note(f"client {client}: reply dropped, {error}")
        return good

    def _replies(self, order: Order, vectors: list[dict[str, Tensor]], answers: list[Parcel]) -> Replies:
        """Return the replies to an order, without their cost."""
        if order.plan.gradient:
            order = order.with_gradients(torch.stack([sent["gradient"] for sent in vectors]))
        result = _result(order, vectors, [answer.number("loss") for answer in answers])
        arrived = np.array([self.link.arrived[int(client)] for client in order.whole.clients])
        return Replies(order, result, Spent(), arrived)

    def evaluate(
        self,
        x: Tensor,
        metrics: Mapping[str, Metric],
        buffers: Tensor | None = None,
        own: OwnModels | None = None,
    ) -> dict[str, float | None]:
        """Measure a model on the server's test data. Return None for every value if there are none."""
        if self.test is None:
            return dict.fromkeys(["test_accuracy", "test_loss", *metrics])
        return evaluate(self.test, x, metrics, buffers, own=own)

    def diagnose(self, algorithm: Algorithm, replies: Replies) -> Divergence:
        """Return a divergence at the server, because replies that are not finite are dropped."""
        longest, factor = longest_update(replies)
        whole = replies.order.whole
        return LiveDivergence(whole.round + 1, algorithm.lr_in(whole), longest=longest, factor=factor)

    def note(self, round: int, event: str) -> None:
        """Log an event, and keep it for the history."""
        self.link.note(event)

    def take_events(self) -> list[str] | None:
        """Return the events since the last call."""
        return self.link.take_events()

    def facts(self, sim_time: float, bytes_total: int) -> Facts:
        """Return what a checkpoint must store: costs, the clients' samples, and the settings of the run."""
        return Facts(
            sim_time,
            bytes_total,
            sizes=tuple(self.roster.sizes.tolist()),
            identity=self.identity(),
            buffers=tuple(self.model.buffers.names),
            connected=tuple(sorted(self.link.nodes)),
        )

    def describe(self) -> dict[str, Any]:
        """Return the machine and the versions of the server."""
        return {**environment(self.model.device), "engine": "flower"}


def _message(order: Order, row: int, chosen: bool = False) -> Parcel:
    """Return the message to one member. With `chosen`, the member chooses its number of steps."""
    plan = order.plan
    facts = {
        "round": order.cohort.round,
        "steps": 0 if chosen else int(plan.steps[row]),
        "lr": float(plan.lr[row]),
        "mu": float(plan.mu[row]),
        "first": int(plan.first_steps[row]),
        "mean": plan.mean,
    }
    if plan.ascent is not None:
        facts["ascent"] = float(plan.ascent[row])
    if plan.anchored:
        facts["anchored"] = True
    if plan.gradient:
        facts["gradient"] = True
    if plan.before is not None:
        facts["before"] = int(plan.before[row])
    parts = {"c": plan.correction, "buffers": plan.buffers, "start": plan.start, "mask": plan.mask}
    parts |= {"beside": plan.beside, "scale": plan.scale}
    if plan.second is not None:
        parts["second"] = plan.second.start
        facts |= {"second-lr": float(plan.second.lr[row]), "second-mu": float(plan.second.mu[row])}
    parts |= dict(zip(slot_names(plan.slots), plan.slots or (), strict=True))
    vectors = {name: rows[row] for name, rows in parts.items() if rows is not None}
    return Parcel(facts, {"x": order.x, **vectors})


def _sends_sum(plan: Plan, row: int, steps: int) -> bool:
    """Return whether a member that did these steps sends the sum of its gradients."""
    return plan.mean and plan.inexact(row, steps)


def _vectors(order: Order, row: int) -> dict[str, int]:
    """Return the vectors that one member is asked for, each with how many numbers it has."""
    plan, d = order.plan, len(order.x)
    vectors = {"model": d}
    if plan.first_steps[row] > 0:
        vectors["first"] = d
    if _sends_sum(plan, row, int(plan.steps[row])):
        vectors["total"] = d
    if plan.gradient:
        vectors["gradient"] = d
    if plan.buffers is not None:
        vectors["buffers"] = plan.buffers.shape[1]
    if plan.second is not None:
        vectors["second"] = d
    return vectors | dict.fromkeys(slot_names(plan.slots), d)


def _result(order: Order, vectors: list[dict[str, Tensor]], loss: list[float]) -> Result:
    """Return the members' replies as one result."""
    x, plan = order.x, order.plan
    models = torch.stack([v["model"] for v in vectors])
    first = total = None
    if plan.first_steps.any():
        zeros = torch.zeros_like(x)
        first = torch.stack([v["first"] if n else zeros for v, n in zip(vectors, plan.first_steps, strict=True)])
    if any("total" in v for v in vectors):
        # members send their sum if reconstructing it would be inaccurate; the other sums are reconstructed
        sums = []
        for row, v in enumerate(vectors):
            c = 0 if plan.correction is None else plan.correction[row]
            reconstructed = (x - v["model"]) / float(plan.lr[row]) - int(plan.steps[row]) * c
            sums.append(v.get("total", reconstructed))
        total = torch.stack(sums)
    buffers = None if plan.buffers is None else torch.stack([v["buffers"] for v in vectors])
    second = None if plan.second is None else torch.stack([v["second"] for v in vectors])
    slots = None
    if plan.slots is not None:
        slots = tuple(torch.stack([v[name] for v in vectors]) for name in slot_names(plan.slots))
    return Result(models, torch.tensor(loss, dtype=torch.float64), first, total, buffers, second, slots)
