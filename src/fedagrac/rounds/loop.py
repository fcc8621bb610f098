"""The round loop: it drives servers over a fleet until every run has ended.

Callbacks, the guard, evaluation, stopping rules and interruptions are handled here for every kind of fleet.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from fedagrac.errors import InputError
from fedagrac.rounds.callback import Callback
from fedagrac.rounds.evaluation import Measures, has_client_tests, measured_names
from fedagrac.rounds.exchange import Lengths, Replies, Spent
from fedagrac.rounds.interrupts import INTERRUPTIONS, Held
from fedagrac.rounds.record import NO_METRICS, History, RoundRecord, SimulationResult, Status
from fedagrac.rounds.stop import Stop
from fedagrac.storage.checkpoints import Checkpoint

if TYPE_CHECKING:
    from fedagrac.algorithms import Algorithm
    from fedagrac.algorithms.base import State
    from fedagrac.core.cohort import Cohort
    from fedagrac.core.local import Plan
    from fedagrac.data.federation import Federation
    from fedagrac.engines import Ranks
    from fedagrac.rounds.divergence import Divergence
    from fedagrac.rounds.fleet import Fleet
    from fedagrac.rounds.per_client import PerClient
    from fedagrac.rounds.server import Server
    from fedagrac.rounds.setup import Setup
    from fedagrac.storage.clients import ClientTable

__all__ = ["Run", "run_rounds"]


@dataclass(eq=False)
class Run:
    """A run in progress, as callbacks see it: a server, its fleet, and the cost so far.

    Attributes:
        server: the algorithm with its state and history.
        fleet: the clients.
        setup: the options.
        callbacks: the objects that watch the run.
        sim_time: seconds on the fleet's clock so far.
        bytes_total: bytes moved so far, in both directions.
        started: the time at which the run started, less the wall time of the rounds before it was resumed.
        replies: the replies of the current round; None between rounds.
        stopped: why a callback ended the run, or None.
        divergence: where the run diverged, or None.
        result: the result, once the run has ended.
        per_client: the results of each client after the last round; None if they were not measured then.
    """

    server: Server
    fleet: Fleet
    setup: Setup
    callbacks: Sequence[Callback] = ()
    sim_time: float = 0.0
    bytes_total: int = 0
    started: float = field(default_factory=time.perf_counter)
    replies: Replies | None = None
    stopped: str | None = None
    divergence: Divergence | None = None
    result: SimulationResult | None = None
    per_client: PerClient | None = None

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm that runs."""
        return self.server.algorithm

    @property
    def state(self) -> State:
        """The server's vectors; `state["x"]` is the global model."""
        return self.server.state

    @property
    def history(self) -> History:
        """The rounds so far."""
        return self.server.history

    @property
    def table(self) -> ClientTable:
        """The rows that the server keeps for each client, or for those that this process runs."""
        return self.server.table

    @property
    def federation(self) -> Federation | None:
        """The clients' data if they are on this machine, otherwise None."""
        return self.fleet.federation

    @property
    def rounds(self) -> int:
        """The largest number of rounds."""
        return self.setup.rounds

    @property
    def ranks(self) -> Ranks:
        """The processes that share the fleet."""
        return self.fleet.ranks

    @property
    def cohort(self) -> Cohort | None:
        """The clients of the current round; None between rounds."""
        return None if self.replies is None else self.replies.order.whole

    @property
    def plan(self) -> Plan | None:
        """What the clients of this process did in the current round; None between rounds."""
        return None if self.replies is None else self.replies.order.plan

    def stop(self, reason: str) -> None:
        """End the run after this round."""
        self.stopped = reason

    def begin(self, checkpoint: Checkpoint | None = None) -> None:
        """Start at x_1, or resume from a checkpoint."""
        if checkpoint is None:
            self._spend(self.fleet.start(self.server))
            return
        self.fleet.restore(self.server, checkpoint)
        self.sim_time, self.bytes_total = checkpoint.facts.sim_time, checkpoint.facts.bytes_total
        if self.history:
            self.started -= self.history[-1].wall_time

    def checkpoint(self) -> Checkpoint:
        """Return a checkpoint of the run as it is now."""
        facts = self.fleet.facts(self.sim_time, self.bytes_total)
        return Checkpoint(self.server.rounds_done, self.server.saved_state, self.server.table, facts)

    def _spend(self, spent: Spent) -> None:
        self.sim_time += spent.seconds
        self.bytes_total += spent.down + spent.up

    def take_in(self, replies: Replies) -> tuple[Status, str] | None:
        """Aggregate the replies, evaluate, record the round and call the callbacks.

        Return the status and the reason if the run has ended, otherwise None.
        """
        number = self.server.rounds_done + 1
        self.per_client = None
        kept = self._guarded(replies)
        train_loss = math.nan
        if len(kept.dropped) - len(replies.dropped) < len(replies.order.whole):
            train_loss = self.server.take_in(kept)
        live = replies.asked is not None
        diverged = not math.isfinite(train_loss) or self._lost(live)
        due = (number % self.setup.eval_every == 0 or number == self.rounds) and not diverged
        measured = self._evaluate() if due else None
        record = self._record(replies, kept, train_loss)
        if measured is not None:
            record.measured(measured)
        self.history.append(record)
        reached = (self.setup.stop or Stop()).reached(record)
        if reached is not None and not due and not diverged:  # the last round is always evaluated
            record.measured(self._evaluate())
        if live and record.test_loss is not None and not math.isfinite(record.test_loss):
            diverged = True
        if diverged:
            self.divergence = self.fleet.diagnose(self.algorithm, kept)
        self.replies = kept
        for callback in self.callbacks:
            callback.on_round(self, record)
        self.replies = None  # freed, because its vectors may not fit beside those of the next round
        self.stopped = self.ranks.agree(self.stopped)
        if self.divergence is not None:
            return "diverged", str(self.divergence)
        reason = self.stopped or reached
        if reason is not None:
            return "stopped", f"round {number}: {reason}"
        return ("finished", f"all {self.rounds} rounds done") if number == self.rounds else None

    def _lost(self, live: bool) -> bool:
        """Return whether the model or its buffers are not finite; on a live fleet, whether a squared norm is not.

        The numbers of a live fleet come from other machines. A vector whose squared norm overflows is finite, but
        nothing can be computed with it, and a checkpoint with it could not be used.
        """
        if live:
            return not all(bool(torch.isfinite(v.dot(v))) for v in self.server.saved_state.values())
        vectors = [vector for vector in (self.server.x, self.server.buffers) if vector is not None]
        return not all(bool(torch.isfinite(vector).all()) for vector in vectors)

    def _guarded(self, replies: Replies) -> Replies:
        """Return the replies that the guard accepts, and note the clients that it drops.

        The plan does not change: a first gradient that was asked for counts, even if its client is no longer fast
        among the remaining clients.
        """
        guard, order = self.setup.guard, replies.order
        if guard is None:
            return replies
        local = Lengths.of(order.plan, order.x, replies.result).rows()
        rows = torch.zeros((len(local), len(order.whole)), dtype=torch.float64)
        rows[:, torch.from_numpy(order.local)] = torch.from_numpy(local)
        lengths = Lengths(*self.ranks.total(rows).numpy())
        dropped = {int(order.whole.clients[row]): fault for row, fault in guard.faults(lengths).items()}
        for client, fault in dropped.items():
            name = None if self.federation is None else self.federation.known_name(client)
            known = "" if name is None else f" ({name})"
            self.fleet.note(order.whole.round + 1, f"client {client}{known}: dropped, {fault}")
        return replies.without(dropped)

    def _evaluate(self) -> Measures:
        """Measure the global model, and keep the results of each client."""
        metrics = self.setup.metrics or {}
        own = self.server.own_models(self.fleet.weights, self.ranks, self.fleet.model.layout)
        if own is not None and not own.personal and not has_client_tests(self.federation):
            own = None
        measured = Measures.of(self.fleet.evaluate(self.server.x, metrics, self.server.buffers, own))
        self.per_client = measured.per_client
        return measured

    def _record(self, replies: Replies, kept: Replies, train_loss: float) -> RoundRecord:
        """Return the record of a round, without test results."""
        whole, events = replies.order.whole, self.fleet.take_events()
        self._spend(replies.spent)
        record = RoundRecord(
            round=self.server.rounds_done + 1,
            test_accuracy=None,
            test_loss=None,
            train_loss=train_loss,
            clients=len(whole),
            fast=int(whole.fast.sum()),
            steps_mean=float(whole.steps.mean()),
            bytes_up=replies.spent.up,
            bytes_down=replies.spent.down,
            bytes_total=self.bytes_total,
            sim_time=self.sim_time,
            wall_time=time.perf_counter() - self.started,
            metrics=dict.fromkeys(measured_names(self.federation, self.setup.metrics)) or NO_METRICS,
        )
        if self.setup.guard is not None or replies.asked is not None:
            record.dropped = sorted(kept.dropped)
        if replies.asked is not None:
            record.asked = replies.asked
            record.first_gradients = int((kept.order.plan.first_steps > 0).sum())
            record.steps = {str(i): int(k) for i, k in zip(whole.clients, whole.steps, strict=True)}
            used = kept.order.whole
            record.weights = {str(i): float(w) for i, w in zip(used.clients, used.weights, strict=True)}
            record.events = events
            record.add_contacts(kept.contacts, kept.dropped)
        return record

    def ended_before(self) -> tuple[Status, str] | None:
        """Return how a resumed run had ended, or None if it had not.

        A run has ended if it has no rounds left, or if its last round meets the stopping rule.
        """
        done = self.server.rounds_done
        if done >= self.rounds:
            return "finished", f"all {self.rounds} rounds done"
        reached = (self.setup.stop or Stop()).reached(self.history[-1]) if self.history else None
        return None if reached is None else ("stopped", f"round {done}: {reached}")

    def end(self, status: Status, reason: str) -> None:
        """Make the result and pass it to the callbacks."""
        if self.per_client is None and status != "diverged" and has_client_tests(self.federation):
            self._evaluate()
        self.result = SimulationResult(
            algorithm=self.algorithm,
            federation=self.fleet.federation,
            vector=self.server.x.cpu(),
            history=self.history,
            status=status,
            reason=reason,
            vector_model=self.fleet.model,
            divergence=self.divergence,
            buffer_vector=None if self.server.buffers is None else self.server.buffers.cpu(),
            per_client=self.per_client,
            own=self.server.own_models(self.fleet.weights, self.ranks, self.fleet.model.layout),
        )
        for callback in self.callbacks:
            callback.on_end(self, self.result)


def run_rounds(runs: Sequence[Run]) -> list[SimulationResult]:
    """Do the rounds of runs that share a fleet. Return a result for each.

    All runs have done the same number of rounds.
    """
    fleet = runs[0].fleet
    if len({run.server.rounds_done for run in runs}) > 1:
        raise InputError("runs", [run.server.rounds_done for run in runs], "runs after the same round")
    for run in runs:
        for callback in run.callbacks:
            callback.on_start(run)
    for run in runs:
        ended = run.ended_before()
        if ended is not None:
            run.end(*ended)
    active = [run for run in runs if run.result is None]
    try:
        with Held(fleet.ranks.size > 1) as signals:  # no process leaves the others in the middle of a round
            while active:
                replies = fleet.round([run.server for run in active])
                with Held():  # a round is taken in completely or not at all
                    for run, replies_of_run in zip(active, replies, strict=True):
                        ended = run.take_in(replies_of_run)
                        if ended is not None:
                            run.end(*ended)
                    active = [run for run in active if run.result is None]
                pending = fleet.ranks.first_given(signals.pending)
                if pending is not None:
                    signals.pending = pending
                    break
    except INTERRUPTIONS:
        with Held():
            for run in active:
                for callback in run.callbacks:
                    callback.on_interrupt(run)
        raise
    return [run.result for run in runs if run.result is not None]
