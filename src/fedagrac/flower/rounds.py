"""One round with clients that may err: the plan goes out, and what comes back is checked and put together.

Algorithms plan and aggregate as in a simulation; here is only who is asked what, and whose answer counts. Files
and time may not enter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.cohort import Cohort, Population
from fedagrac.core.local import Plan, Result
from fedagrac.experiments.schema import build_guard
from fedagrac.flower.link import Link, MissedError
from fedagrac.flower.settings import ClientSteps
from fedagrac.flower.wire import BadReplyError, Parcel
from fedagrac.rounds.guard import step_lengths

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.algorithms import Algorithm
    from fedagrac.algorithms.base import Rows, State
    from fedagrac.flower.settings import Settings
    from fedagrac.models.vector import VectorModel
    from fedagrac.storage.clients import ClientTable

__all__ = ["Collected", "Round", "needs_steps_first"]

LONG = 2**40
"""More steps than any client does: plans made for it ask for first gradients of any length."""


@dataclass(frozen=True, eq=False)
class Collected:
    """What came back of a round: the members that answered, their part of the plan, and their result."""

    cohort: Cohort
    rows: Rows
    plan: Plan
    result: Result

    def alone(self, members: npt.NDArray[np.int64]) -> Collected:
        """Return what came of some members, their weights normalised over them."""
        rows = {name: values[torch.from_numpy(members)] for name, values in self.rows.items()}
        return Collected(self.cohort.alone(members), rows, self.plan.part(members), self.result.part(members))


@dataclass(frozen=True, eq=False)
class Round:
    """A round that is being asked for.

    Attributes:
        number: rounds already done.
        state: the server's vectors before the round.
        table: what the server remembers of each client; newcomers get their rows here.
        cohort_of: makes a cohort of some clients with some step counts.
    """

    number: int
    settings: Settings
    algorithm: Algorithm
    model: VectorModel
    link: Link
    state: State
    table: ClientTable
    cohort_of: Callable[[npt.NDArray[np.int64], npt.NDArray[np.int64]], Cohort]

    def collect(self) -> Collected | None:
        """Ask everyone who is there once; return what came and may count, or None if too little came."""
        collected = self.ask()
        return None if collected is None else self.guarded(collected)

    def ask(self) -> Collected | None:
        """Ask everyone who is there once; return what came, or None if that is too little."""
        rule = self.settings.build_steps()
        if isinstance(rule, ClientSteps):
            return self.ask_for_steps_and_model(rule)
        K = rule.counts(self.number, self.settings.clients, self.settings.seed)
        begun = self.planned(lambda clients: K[clients])
        if begun is None:
            return None
        cohort, rows, plan = begun
        parcels = {int(i): _ask(self.state["x"], plan, row, cohort) for row, i in enumerate(cohort.clients)}
        replies = self.link.exchange("train.steps", parcels, cohort.round)
        good = self.checked(replies, cohort, plan, lambda row: (int(plan.steps[row]), int(plan.steps[row])))
        return self.collected(cohort, rows, plan, good)

    def ask_for_steps_and_model(self, rule: Any) -> Collected | None:
        """Do the two exchanges of Algorithm 1: K_i and the model from all; the first gradient from the fast."""
        # what a client does before its K is known: the same plan for any K (see `needs_steps_first`), and the
        # longest first gradient that it might be asked for, once as a fast client and once as a slow one
        begun = self.planned(lambda clients: LONG * (1 + np.arange(len(clients)) % 2))
        if begun is None:
            return None
        cohort, rows, plan = begun
        swapped = self.cohort_of(cohort.clients, 3 * LONG - cohort.steps)
        other = self.algorithm.plan(self.state, rows, swapped)
        longest = np.maximum(plan.first_steps, other.first_steps)
        plan = dataclasses.replace(plan, first_steps=longest)
        parcels = {
            int(i): _ask(self.state["x"], plan, row, cohort, chosen=True) for row, i in enumerate(cohort.clients)
        }
        replies = self.link.exchange("train.steps", parcels, cohort.round)
        good = self.checked(
            replies, cohort, dataclasses.replace(plan, first_steps=0 * longest), lambda _: (1, rule.max_steps)
        )
        K = np.array([int(reply.facts["steps"]) for reply in good.values()], np.int64)
        if len(good) < self.settings.min_clients:
            return None
        members = np.array(list(good), np.int64)
        answered = self.cohort_of(cohort.clients[members], K)
        kept = {name: values[torch.from_numpy(members)] for name, values in rows.items()}
        final = self.algorithm.plan(self.state, kept, answered)
        firsts = self.ask_for_first_gradients(answered, final)
        vectors = [
            {**reply.vectors, **({"first": firsts[row]} if row in firsts else {})}
            for row, reply in enumerate(good.values())
        ]
        # whoever missed the second exchange contributes its mean gradient
        came = np.array([row in firsts for row in range(len(answered))])
        final = dataclasses.replace(final, first_steps=np.where(came, final.first_steps, 0))
        loss = [reply.number("loss") for reply in good.values()]
        return Collected(answered, kept, final, _result(self.state["x"], final, vectors, loss))

    def ask_for_first_gradients(self, cohort: Cohort, plan: Plan) -> dict[int, Tensor]:
        """Do the second exchange; return the first gradients by row."""
        rows = {int(cohort.clients[row]): int(row) for row in np.flatnonzero(plan.first_steps)}
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

    def planned(
        self, steps: Callable[[npt.NDArray[np.int64]], npt.NDArray[np.int64]]
    ) -> tuple[Cohort, Rows, Plan] | None:
        """Plan the round with those who are there; without those whose gradient is needed and does not come."""
        left_out: set[int] = set()
        while True:
            clients = np.array(sorted(set(self.link.nodes) - left_out), np.int64)
            if len(clients) < self.settings.min_clients:
                return None
            cohort = self.cohort_of(clients, steps(clients))
            try:
                self.admit(cohort)
                rows = self.table.rows(clients)
                return cohort, rows, self.algorithm.plan(self.state, rows, cohort)
            except MissedError as missed:
                left_out |= set(missed.clients)

    def admit(self, cohort: Cohort) -> None:
        """Give rows to members that take part for the first time."""
        new = self.table.unseen(cohort.clients)
        if len(new):
            newcomers = self.cohort_of(new, cohort.steps[np.isin(cohort.clients, new)])
            self.table.put(new, self.algorithm.enter(self.state, newcomers))

    def checked(
        self,
        replies: dict[int, Parcel],
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

    def collected(self, cohort: Cohort, rows: Rows, plan: Plan, good: dict[int, Parcel]) -> Collected | None:
        """Return the part of the round that came back, its weights normalised over those who answered."""
        if len(good) < self.settings.min_clients:
            return None
        members = np.array(list(good), np.int64)
        part = plan.part(members)
        kept = {name: values[torch.from_numpy(members)] for name, values in rows.items()}
        loss = [reply.number("loss") for reply in good.values()]
        vectors = [dict(reply.vectors) for reply in good.values()]
        result = _result(self.state["x"], part, vectors, loss)
        return Collected(cohort.alone(members), kept, part, result)

    def guarded(self, collected: Collected) -> Collected:
        """Leave out the updates that the guard drops, and note whose they are."""
        guard = build_guard(self.settings.guard)
        if guard is None:
            return collected
        found = guard.dropped(step_lengths(collected.plan, self.state["x"], collected.result))
        for row, what in found.items():
            self.link.note(f"client {collected.cohort.clients[row]}: dropped, its update is {what}")
        kept = np.array([row for row in range(len(collected.cohort)) if row not in found], np.int64)
        return collected.alone(kept) if 0 < len(kept) < len(collected.cohort) else collected


def needs_steps_first(algorithm: Algorithm) -> bool:
    """Say whether the local rule (step size, correction, proximal term) depends on K_i, as FedLin's does.

    Examples:
        >>> from fedagrac import FedAvg, FedLin
        >>> needs_steps_first(FedAvg(lr=0.1)), needs_steps_first(FedLin(lr=0.1))
        (False, True)
    """

    def service(x: Tensor, clients: npt.NDArray[np.int64], *_: Any, **__: Any) -> Tensor:
        return torch.zeros((len(clients), len(x)))

    def plan(steps: list[int]) -> Plan:
        ones, K = np.ones(2, np.int64), np.array(steps)
        cohort = Cohort(0, np.arange(2), K, [1, 1], ones / 2, ones, True, service)
        state = algorithm.start(torch.zeros(1), Population(ones / 2, service))
        return algorithm.plan(state, algorithm.enter(state, cohort), cohort)

    one, other = plan([1, 3]), plan([7, 2])
    corrections = [torch.zeros(2, 1) if p.correction is None else p.correction for p in (one, other)]
    same = np.array_equal(one.lr, other.lr) and np.array_equal(one.mu, other.mu)
    return not (same and torch.equal(*corrections))


def _ask(x: Tensor, plan: Plan, row: int, cohort: Cohort, chosen: bool = False) -> Parcel:
    """Return what one member is told."""
    facts = {
        "round": cohort.round,
        "steps": 0 if chosen else int(plan.steps[row]),
        "lr": float(plan.lr[row]),
        "mu": float(plan.mu[row]),
        "first": int(plan.first_steps[row]),
        "mean": plan.mean,
    }
    vectors = {"x": x}
    if plan.correction is not None:
        vectors["c"] = plan.correction[row]
    return Parcel(facts, vectors)


def _result(x: Tensor, plan: Plan, vectors: list[dict[str, Tensor]], loss: list[float]) -> Result:
    """Return the members' replies as one result."""
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
