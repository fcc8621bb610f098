"""A live fleet: clients on other machines, reached over Flower.

The round loop, the algorithms and the records are those of a simulation. Here is only who is asked what, whose
answer can be used, and what is done when too few answer.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.cohort import Cohort, Population
from fedagrac.core.local import Plan, Result
from fedagrac.engines.ranks import ALONE, Ranks
from fedagrac.errors import FedagracError, InputError
from fedagrac.flower.link import Link, MissedError, RemoteGradients
from fedagrac.flower.settings import ClientSteps
from fedagrac.flower.wire import BadReplyError, Parcel, fingerprint
from fedagrac.rounds.divergence import Divergence
from fedagrac.rounds.evaluation import evaluate
from fedagrac.rounds.exchange import Order, Replies, Spent
from fedagrac.rounds.fleet import Roster
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
    from fedagrac.rounds.evaluation import Metric
    from fedagrac.storage.checkpoints import Checkpoint

__all__ = ["FlowerFleet"]

log = logging.getLogger("fedagrac")


@dataclass(eq=False)
class FlowerFleet:
    """Clients that are reached by messages.

    Attributes:
        settings: what the federation does.
        model: the module as a function of x.
        link: the line to the clients.
        test: the problem with test data to evaluate on; None to evaluate nothing.
    """

    settings: Settings
    model: VectorModel
    link: Link
    test: Workload | None = None
    federation: None = None
    ranks: Ranks = ALONE
    gradients: RemoteGradients = field(init=False)

    def __post_init__(self) -> None:
        self.gradients = RemoteGradients(self.link, self.model.dtype)

    @property
    def roster(self) -> Roster:
        """All clients, with the sample counts that they reported at the start."""
        sizes = np.array([self.link.sizes[i] for i in range(self.settings.clients)], np.int64)
        return Roster(sizes, sizes.tolist(), sizes / sizes.sum(), self.settings.batch, self.gradients)

    def start(self, server: Server) -> Spent:
        """Wait for all clients; they send their full gradients along where the algorithm needs them."""
        begun, x = time.monotonic(), server.x
        if server.algorithm.traits.start == "gradients":
            self.link.x1 = x
        log.info("waiting for %d clients", self.settings.clients)
        self.link.wait_for(self.settings.clients, 0)
        self.gradients.remember(x, self.link.gradients)
        server.start(Population(self.roster.weights, self.gradients))
        self.link.started = True
        return Spent(time.monotonic() - begun, self.link.bytes_down, self.link.bytes_up)

    def restore(self, server: Server, checkpoint: Checkpoint) -> None:
        """Go on where a run of the same settings was cut off."""
        before, now = checkpoint.facts.identity, self.identity()
        for key in dict.fromkeys([*now, *before]):  # a guard may have come or gone
            if before.get(key) != now.get(key):
                accepted = f"another folder: it holds a run with {key} = {before.get(key)!r}"
                raise InputError("out", self.settings.out, accepted)
        clients = self.settings.clients
        if len(checkpoint.facts.sizes) != clients:
            raise CheckpointError(f"the checkpoint cannot be used: it is not of {clients} clients")
        server.restore(checkpoint, np.ones(clients, np.bool_), None, self.model.device)
        self.link.sizes = dict(enumerate(checkpoint.facts.sizes))
        if checkpoint.round < self.settings.rounds:
            self.link.note(f"resumed after round {checkpoint.round}")
            self.link.wait_for(self.settings.min_clients, checkpoint.round)
        self.link.started = True

    def identity(self) -> dict[str, Any]:
        """Return what a run must share with its checkpoint."""
        return {**self.settings.identity(), "model": fingerprint(self.model)}

    def round(self, servers: Sequence[Server]) -> list[Replies]:
        """Do one round with everyone who is connected; ask again where too few answer."""
        (server,) = servers
        t, settings = server.rounds_done, self.settings
        begun, down, up = time.monotonic(), self.link.bytes_down, self.link.bytes_up
        for _ in range(settings.attempts):
            self.link.wait_for(settings.min_clients, t)
            asked = sorted(self.link.nodes)
            replies = self._ask(server)
            if replies is not None:
                answered = set(replies.order.whole.clients.tolist())
                spent = Spent(time.monotonic() - begun, self.link.bytes_down - down, self.link.bytes_up - up)
                dropped = {client: "no usable reply" for client in asked if client not in answered}
                return [dataclasses.replace(replies, spent=spent, asked=len(asked), dropped=dropped)]
            self.link.note(f"fewer than min_clients = {settings.min_clients} usable replies, asked again")
        raise FedagracError(
            f"round {t + 1}: fewer than min_clients = {settings.min_clients} usable replies in "
            f"attempts = {settings.attempts}; run again to resume from the last checkpoint"
        )

    def _ask(self, server: Server) -> Replies | None:
        """Ask everyone who is there once; return what came, or None if that is too little."""
        rule = self.settings.build_steps()
        if isinstance(rule, ClientSteps):
            return self._ask_for_steps_and_model(server, rule)
        K = rule.counts(server.rounds_done, self.settings.clients, self.settings.seed)
        order = self._planned(server, lambda clients: K[clients])
        if order is None:
            return None
        cohort, plan = order.cohort, order.plan
        asks = {int(client): _ask(order, row) for row, client in enumerate(cohort.clients)}
        answers = self.link.exchange("train.steps", asks, cohort.round)
        good = self.checked(answers, cohort, plan, lambda row: (int(plan.steps[row]), int(plan.steps[row])))
        if len(good) < self.settings.min_clients:
            return None
        answered = order.alone(np.array(list(good), np.int64))
        return self._replies(answered, [dict(reply.vectors) for reply in good.values()], list(good.values()))

    def _ask_for_steps_and_model(self, server: Server, rule: ClientSteps) -> Replies | None:
        """Do the two exchanges of Algorithm 1: K_i and the model from all; the first gradient from the fast.

        The local rule is the same for any K_i, or the algorithm would have been refused, so it is planned for the
        most steps that a client may do. Every client keeps the first gradient that it may be asked for.
        """
        order = self._planned(server, lambda clients: np.full(len(clients), rule.max_steps))
        if order is None:
            return None
        cohort, first_steps = order.cohort, server.algorithm.traits.first_steps
        longest = np.zeros(len(cohort), np.int64)
        if first_steps is not None:
            longest = cohort.epoch_steps if first_steps == "epoch" else longest + first_steps
        order = dataclasses.replace(order, plan=dataclasses.replace(order.plan, first_steps=longest))
        asks = {int(client): _ask(order, row, chosen=True) for row, client in enumerate(cohort.clients)}
        answers = self.link.exchange("train.steps", asks, cohort.round)
        unasked = dataclasses.replace(order.plan, first_steps=0 * longest)
        good = self.checked(answers, cohort, unasked, lambda _: (1, rule.max_steps))
        if len(good) < self.settings.min_clients:
            return None
        arrived = dict(self.link.arrived)
        K = np.array([int(reply.facts["steps"]) for reply in good.values()], np.int64)
        done = self.roster.cohort(cohort.round, cohort.clients[list(good)], K)
        final = server.plan(done, done)
        firsts = self._ask_for_first_gradients(final)
        self.link.arrived = arrived
        # whoever missed the second exchange contributes its mean gradient
        came = np.array([row in firsts for row in range(len(done))])
        plan = dataclasses.replace(final.plan, first_steps=np.where(came, final.plan.first_steps, 0))
        vectors = [
            {**reply.vectors, **({"first": firsts[row]} if row in firsts else {})}
            for row, reply in enumerate(good.values())
        ]
        return self._replies(dataclasses.replace(final, plan=plan), vectors, list(good.values()))

    def _ask_for_first_gradients(self, order: Order) -> dict[int, Tensor]:
        """Do the second exchange; return the first gradients by row."""
        cohort = order.cohort
        rows = {int(cohort.clients[row]): int(row) for row in np.flatnonzero(order.plan.first_steps)}
        asks = {client: Parcel({"round": cohort.round}) for client in rows if client in self.link.nodes}
        firsts = {}
        for client, reply in self.link.exchange("train.first", asks, cohort.round).items():
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
        self, server: Server, steps: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> Order | None:
        """Plan the round with those who are there; without those whose gradient is needed and does not come."""
        left_out: set[int] = set()
        while True:
            clients = np.array(sorted(set(self.link.nodes) - left_out), np.int64)
            if len(clients) < self.settings.min_clients:
                return None
            cohort = self.roster.cohort(server.rounds_done, clients, steps(clients))
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
        """Return the replies that can be used, by row of the cohort; name and drop the others."""
        good = {}
        d, dtype = self.model.size, self.model.dtype
        for row, client in enumerate(cohort.clients.tolist()):
            if client not in replies:
                continue
            reply = replies[client]
            try:
                reply.integer("client", client, client)
                reply.integer("round", cohort.round, cohort.round)
                reply.integer("steps", *bounds(row))
                reply.number("loss")
                reply.vector("model", d, dtype)
                if plan.first_steps[row] > 0:
                    reply.vector("first", d, dtype)
                if "total" in reply.vectors:
                    reply.vector("total", d, dtype)
                good[row] = reply
            except BadReplyError as error:
                self.link.note(f"client {client}: reply dropped, {error}")
        return good

    def _replies(self, order: Order, vectors: list[dict[str, Tensor]], answers: list[Parcel]) -> Replies:
        result = _result(order, vectors, [answer.number("loss") for answer in answers])
        arrived = np.array([self.link.arrived[int(client)] for client in order.whole.clients])
        return Replies(order, result, Spent(), arrived)

    def evaluate(self, x: Tensor, metrics: Mapping[str, Metric]) -> dict[str, float | None]:
        """Measure a model on the server's test data, where it has any."""
        if self.test is None:
            return dict.fromkeys(["test_accuracy", "test_loss", *metrics])
        return evaluate(self.test, x, metrics)

    def diagnose(self, algorithm: Algorithm, replies: Replies) -> Divergence:
        """Return where it diverged: at the server, because a reply that is not finite never counts."""
        return Divergence(replies.order.whole.round + 1, algorithm.lr)

    def note(self, round: int, event: str) -> None:
        """Log what happened to a client, and keep it for the history."""
        self.link.note(event)

    def take_events(self) -> list[str] | None:
        """Return what was noted since the last call."""
        return self.link.take_events()

    def facts(self, sim_time: float, bytes_total: int) -> Facts:
        """Return what a checkpoint must say: who the clients are, and which settings made the run."""
        return Facts(sim_time, bytes_total, None, tuple(self.roster.sizes.tolist()), self.identity())

    def describe(self) -> dict[str, Any]:
        """Return where the server runs."""
        return {**environment(self.model.device), "engine": "flower"}


def _ask(order: Order, row: int, chosen: bool = False) -> Parcel:
    """Return what one member is told; it chooses its number of steps itself where that is `chosen`."""
    plan = order.plan
    facts = {
        "round": order.cohort.round,
        "steps": 0 if chosen else int(plan.steps[row]),
        "lr": float(plan.lr[row]),
        "mu": float(plan.mu[row]),
        "first": int(plan.first_steps[row]),
        "mean": plan.mean,
    }
    vectors = {"x": order.x}
    if plan.correction is not None:
        vectors["c"] = plan.correction[row]
    return Parcel(facts, vectors)


def _result(order: Order, vectors: list[dict[str, Tensor]], loss: list[float]) -> Result:
    """Return the members' replies as one result."""
    x, plan = order.x, order.plan
    models = torch.stack([v["model"] for v in vectors])
    first = total = None
    if plan.first_steps.any():
        nothing = torch.zeros_like(x)
        asked = [v["first"] if n else nothing for v, n in zip(vectors, plan.first_steps, strict=True)]
        first = torch.stack(asked)
    if any("total" in v for v in vectors):
        # the others' sums follow from their models accurately enough, or they would have sent them too
        sums = []
        for row, v in enumerate(vectors):
            c = 0 if plan.correction is None else plan.correction[row]
            reconstructed = (x - v["model"]) / float(plan.lr[row]) - int(plan.steps[row]) * c
            sums.append(v.get("total", reconstructed))
        total = torch.stack(sums)
    return Result(models, torch.tensor(loss, dtype=torch.float64), first, total)
