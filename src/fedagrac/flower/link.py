"""Exchanges with clients over Flower's Grid: connections, replies and failures.

A client is identified by its partition. The node that has a partition may change at any time.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedagrac.errors import FedagracError, InputError, shown
from fedagrac.flower.mailbox import Mailbox, mailbox_of
from fedagrac.flower.wire import PROTOCOL, BadReplyError, Expected, Parcel, fingerprint, pack, unpack
from fedagrac.parsing import printable

if TYPE_CHECKING:
    import numpy.typing as npt
    from flwr.serverapp import Grid
    from torch import Tensor

    from fedagrac.flower.settings import Settings
    from fedagrac.models.vector import VectorModel
    from fedagrac.rounds.guard import Guard

__all__ = ["Link", "MissedError", "RemoteGradients"]

log = logging.getLogger("fedagrac")

GRACE = 30.0
"""Seconds after the deadline in which a late reply may still arrive. It is noted and dropped."""

LAST_PULL_SECONDS = 5.0
"""Seconds after the deadline in which replies that came just before it may still be pulled from the SuperLink."""

LOOK_SECONDS = 3.0
"""Seconds between two looks at which nodes are connected, while the server waits for replies."""

HELLO = "query.hello"


class MissedError(FedagracError):
    """Clients did not send a gradient that is needed, or one that is too long."""

    def __init__(self, clients: list[int]) -> None:
        self.clients = clients
        super().__init__(f"clients {clients} sent no usable gradient")


@dataclass(frozen=True)
class _Sent:
    """A message that was sent: its node, its client if that is known, its kind, its round, and what to expect."""

    node: int
    client: int | None
    kind: str
    round: int
    expected: Expected

    @property
    def recipient(self) -> str:
        """The client or the node, for events."""
        return f"node {self.node}" if self.client is None else f"client {self.client}"


class Link:
    """The server's exchanges with clients.

    Attributes:
        x1: the model at which nodes compute their gradient when they connect before round 1; None if it is not
            needed.
        started: whether round 1 has begun. Before that, a faulty node ends the run.
        nodes: the node of each connected client.
        sizes: the number of samples that each client reported when it first connected.
        gradients: full local gradients at x_1, by client.
        events: what went wrong or changed since the last `take_events`, in words.
        bytes_down, bytes_up: bytes of the vectors sent and received since the start.
        arrived: after how many seconds each client's reply to the last exchange arrived.
    """

    def __init__(self, grid: Grid, model: VectorModel, settings: Settings, x1: Tensor | None = None) -> None:
        self.grid, self.model, self.settings, self.x1 = grid, model, settings, x1
        self.started = False
        self.nodes: dict[int, int] = {}
        self.sizes: dict[int, int] = {}
        self.gradients: dict[int, Tensor] = {}
        self.events: list[str] = []
        self.bytes_down = self.bytes_up = 0
        self.arrived: dict[int, float] = {}
        self._mailbox: Mailbox | None = None
        self._greetings: dict[int, int] = {}
        self._sent: dict[str, _Sent] = {}

    def note(self, event: str) -> None:
        """Log an event, and keep it for the history."""
        log.warning("%s", event)
        self.events.append(event)

    def take_events(self) -> list[str]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def expected(self, vectors: Mapping[str, int]) -> Expected:
        """Return what a reply may hold, given how many numbers each of its vectors has."""
        itemsize = torch.finfo(self.model.dtype).bits // 8
        return Expected({name: itemsize * size for name, size in vectors.items()})

    def exchange(
        self, kind: str, parcels: Mapping[int, Parcel], round: int, vectors: Mapping[int, Mapping[str, int]]
    ) -> dict[int, Parcel]:
        """Send each client its parcel. Return the replies that arrive in time, by client.

        Missing replies and errors are noted as events. Replies are unpacked but not checked.

        Args:
            kind: the kind of the message.
            parcels: what to send, by client.
            round: the number of rounds done.
            vectors: by client, the vectors that its reply may hold, each with how many numbers it has.
        """
        seconds = float(self.settings.round_seconds)
        waiting = {}
        for client, parcel in parcels.items():
            if client not in self.nodes:  # it left after the round was planned, which was noted
                continue
            sent = _Sent(self.nodes[client], client, kind, round, self.expected(vectors[client]))
            number = self._push(sent, parcel, seconds + GRACE)
            if number is not None:
                waiting[number] = client
        replies: dict[int, Parcel] = {}
        nodes_before, begun = dict(self.nodes), time.monotonic()
        self.arrived = {}
        end, look = begun + seconds, begun + LOOK_SECONDS
        while waiting:
            for number, reply in self._pull(waiting, end + LAST_PULL_SECONDS).items():
                client = waiting.pop(number)
                if reply is not None:
                    replies[client] = reply
                    self.arrived[client] = time.monotonic() - begun
            if not waiting or time.monotonic() >= end:
                break
            time.sleep(min(float(self.settings.poll_seconds), max(0.0, end - time.monotonic())))
            if time.monotonic() >= look:
                look = time.monotonic() + LOOK_SECONDS
                self._look(round)
                gone = [n for n, client in waiting.items() if self.nodes.get(client) != nodes_before[client]]
                for number in gone:  # the node left or was replaced, so its reply will not arrive
                    del waiting[number]
        for client in waiting.values():
            self.note(f"client {client}: no reply to {kind} within {seconds:g} s")
        return replies

    def _push(self, sent: _Sent, parcel: Parcel, seconds: float) -> str | None:
        """Send one message. Return its number, or None if it could not be sent."""
        from flwr.app import Message

        message = Message(
            pack(parcel), dst_node_id=sent.node, message_type=sent.kind, group_id=str(sent.round + 1), ttl=seconds
        )
        numbers = list(self.grid.push_messages([message]))
        if not numbers or numbers[0] is None:
            self.note(f"{sent.recipient}: the message could not be sent")
            return None
        self.bytes_down += parcel.nbytes
        self._sent[numbers[0]] = sent
        return numbers[0]

    def _pull(self, waiting: Collection[str] = (), end: float | None = None) -> dict[str, Parcel | None]:
        """Receive all messages that have arrived. Return the awaited replies; None for one that cannot be used."""
        arrived: dict[str, Parcel | None] = {}
        if self._mailbox is None:
            self._mailbox = mailbox_of(self.grid, float(self.settings.upload_seconds))
        if end is None:
            end = time.monotonic() + float(self.settings.upload_seconds)
        used = {number: number in waiting or sent.kind == HELLO for number, sent in self._sent.items()}
        wanted = {number: sent.expected if used[number] else None for number, sent in self._sent.items()}
        for arrival in self._mailbox.collect(wanted, end):
            number = arrival.number
            sent = self._sent.pop(number)
            if number in waiting:
                arrived[number] = None
            elif sent.kind != HELLO:
                if arrival.error is None:
                    self.note(f"{sent.recipient}: late reply of round {sent.round + 1}, dropped")
                continue
            if arrival.error is not None:
                self.note(f"{sent.recipient}: {_reason(arrival.error)}")
                continue
            try:
                if arrival.content is None:
                    raise BadReplyError(arrival.fault or "it is empty")
                reply = unpack(arrival.content, sent.expected)
                self.bytes_up += reply.nbytes
                if sent.kind == HELLO:
                    self.meet(sent.node, reply)
                else:
                    arrived[number] = reply
            except BadReplyError as error:
                self.note(f"{sent.recipient}: reply dropped, {error}")
        return arrived

    def roll_call(self, round: int) -> None:
        """Update the connected nodes and receive what has arrived, without waiting."""
        self._look(round)
        self._pull()

    def _look(self, round: int) -> None:
        """Greet new nodes, and remove those that left."""
        present = set(self.grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in present:
                del self.nodes[client]
                self._greetings.pop(node, None)
                self.note(f"client {client}: its node left")
        greeted = {sent.node for sent in self._sent.values() if sent.kind == HELLO}
        facts = {"protocol": PROTOCOL, "model": fingerprint(self.model), "round": 0, "batch": "full"}
        for node in sorted(present - greeted - set(self.nodes.values())):
            if self._greetings.get(node, 0) < self.settings.attempts:
                self._greetings[node] = self._greetings.get(node, 0) + 1
                x1 = None if self.started else self.x1
                ask = Parcel(facts, {} if x1 is None else {"x": x1})
                expected = self.expected({} if x1 is None else {"gradient": len(x1)})
                names = "\n".join(name for name, _ in self.model.module.named_buffers())
                expected = dataclasses.replace(expected, text=max(expected.text, len(names)))
                self._push(_Sent(node, None, HELLO, round, expected), ask, float(self.settings.wait_seconds))

    def meet(self, node: int, reply: Parcel) -> None:
        """Check the reply of a node to a greeting, and assign its client to the node."""
        client = reply.integer("client", 0, self.settings.clients - 1)
        samples = reply.integer("samples", 1, self.settings.max_samples)
        self._greetings[node] = self.settings.attempts
        other_node, samples_before = self.nodes.get(client), self.sizes.get(client, samples)
        fixed = (self.settings.samples or {}).get(str(client), samples)
        fault = None
        if reply.facts.get("model") != fingerprint(self.model):
            client_model = f"{reply.facts.get('parameters')} parameters, {reply.facts.get('dtype')}"
            server_model = f"{self.model.size} parameters, {self.model.dtype}"
            accepted = f"the server's model, layer by layer ({server_model}): all nodes must run the same app"
            fault = InputError(f"model of client {client}", client_model, accepted)
        elif fixed != samples:
            fault = InputError(f"samples of client {client}", samples, f"{fixed}, as the setting samples says")
        elif samples_before != samples:
            accepted = f"{samples_before}, as when it first connected"
            fault = InputError(f"samples of client {client}", samples, accepted)
        elif self.moving(reply) != self.model.buffers.names and self.sizes:
            accepted = f"{self.model.buffers.names}, as those of the client that connected first"
            fault = InputError(f"moving buffers of client {client}", self.moving(reply), accepted)
        elif other_node is not None and not self.started:
            accepted = f"one node for each partition: nodes {other_node} and {node} both have it"
            fault = InputError("node config partition-id", client, accepted)
        if fault is not None:
            if not self.started:
                raise fault
            raise BadReplyError(str(fault))
        if not self.sizes:
            self.model.buffers.adopt(self.moving(reply))
        if self.x1 is not None and not self.started:
            self.gradients[client] = reply.vector("gradient", len(self.x1), self.x1.dtype)
        if self.started:
            self.note(f"client {client}: {'connected again' if other_node is None else 'moved to another node'}")
        self.sizes[client] = samples
        self.nodes[client] = node

    def moving(self, reply: Parcel) -> list[str]:
        """Return the names of the buffers that a client's forward pass changes."""
        given = reply.facts.get("buffers", "")
        names = given.splitlines() if isinstance(given, str) else [None]
        known = dict(self.model.module.named_buffers())
        if len(set(names)) < len(names) or any(name not in known for name in names):
            raise BadReplyError(f"its moving buffers are {shown(given)}, expected buffers of the server's model")
        return [str(name) for name in names]

    def wait_for(self, number: int, round: int) -> None:
        """Wait until this many clients are connected; raise FedagracError after `wait_seconds`."""
        end = time.monotonic() + float(self.settings.wait_seconds)
        self.roll_call(round)
        while len(self.nodes) < number:
            if time.monotonic() >= end:
                events = "; ".join(dict.fromkeys(self.take_events()))
                missing = ", ".join(str(i) for i in range(self.settings.clients) if i not in self.nodes)
                raise FedagracError(
                    f"{len(self.nodes)} of clients = {self.settings.clients} connected within wait_seconds = "
                    f"{self.settings.wait_seconds:g}, {number} are needed before round {round + 1}; missing "
                    f"partition-id {missing}" + (f" ({events})" if events else "")
                )
            time.sleep(float(self.settings.poll_seconds))
            self.roll_call(round)


def _reason(text: str | None) -> str:
    """Return the error of a client on one line of at most 300 characters."""
    return printable(" ".join((text or "").split()))[:300] or "an error without a reason"


class RemoteGradients:
    """The service of gradients, which asks clients over the link. It asks each client only once.

    With a guard, gradients that are far longer than those of the other clients count as not sent.
    """

    def __init__(self, link: Link, dtype: torch.dtype, guard: Guard | None = None) -> None:
        self._link, self._dtype, self._guard = link, dtype, guard
        self.buffers_of: Callable[[npt.NDArray[np.int64], int], Tensor | None] = lambda clients, round: None
        self._asked: tuple[Tensor, int, str] | None = None
        self._rows: dict[int, Tensor] = {}

    def remember(self, x: Tensor, rows: Mapping[int, Tensor]) -> None:
        """Store full gradients at x that clients sent before round 1."""
        self._asked, self._rows = (x, 0, "full"), dict(rows)

    def __call__(
        self, x: Tensor, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"] = "full"
    ) -> Tensor:
        """Return the gradients at x, [m, d]; raise MissedError if clients did not reply."""
        if self._asked is None or self._asked[1:] != (round, batch) or not torch.equal(self._asked[0], x):
            self._asked, self._rows = (x, round, batch), {}
        wanted = [int(client) for client in clients if int(client) not in self._rows]
        facts = {"round": round, "batch": batch}
        buffers = self.buffers_of(np.array(wanted, np.int64), round) if wanted else None
        asks = {
            client: Parcel(facts, {"x": x} if buffers is None else {"x": x, "buffers": buffers[row]})
            for row, client in enumerate(wanted)
            if client in self._link.nodes
        }
        vectors = {client: {"gradient": len(x)} for client in asks}
        for client, reply in self._link.exchange("query.gradient", asks, round, vectors).items():
            try:
                reply.integer("round", round, round)
                reply.integer("client", client, client)
                self._rows[client] = reply.vector("gradient", len(x), self._dtype)
            except BadReplyError as error:
                self._link.note(f"client {client}: reply dropped, {error}")
        missed = [client for client in wanted if client not in self._rows]
        if missed:
            raise MissedError(missed)
        rows = torch.stack([self._rows[int(client)] for client in clients])
        faults = {} if self._guard is None else self._guard.dropped(rows.double().norm(dim=1).numpy())
        for row, fault in faults.items():
            del self._rows[int(clients[row])]
            self._link.note(f"client {clients[row]}: reply dropped, its gradient is {fault}")
        if faults:
            raise MissedError([int(clients[row]) for row in faults])
        return rows
