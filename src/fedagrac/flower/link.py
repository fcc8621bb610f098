"""Exchanges with clients over Flower's Grid: connections, replies and failures.

A client is identified by its partition. The node that has a partition may change at any time.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedagrac.errors import FedagracError, InputError, shown
from fedagrac.flower.identity import KeyHolders
from fedagrac.flower.logs import fault_of
from fedagrac.flower.mailbox import Arrival, Mailbox, mailbox_of
from fedagrac.flower.wire import PROTOCOL, BadReplyError, Expected, Parcel, fingerprint, pack, unpack
from fedagrac.parsing import printable
from fedagrac.rounds.exchange import Contact

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

CHALLENGE_SECONDS = 60.0
"""The longest time in which a node must answer a greeting after another node claimed its partition."""

MOST_LABELS = 8192
"""The largest number of classes that clients may report."""

HELLO = "query.hello"


class MissedError(FedagracError):
    """Clients did not send a gradient that is needed, or one that is too long."""

    def __init__(self, clients: list[int]) -> None:
        self.clients = clients
        super().__init__(f"clients {clients} sent no usable gradient")


@dataclass(frozen=True)
class _Sent:
    """A message that was sent.

    Attributes:
        node: the node.
        client: its client if that is known.
        kind: the kind of the message.
        round: the number of rounds done.
        expected: what the reply may hold.
        end: when the reply is no longer awaited; 0 if a reply may come at any time.
        nbytes: the bytes of its vectors.
    """

    node: int
    client: int | None
    kind: str
    round: int
    expected: Expected
    nbytes: int = 0
    end: float = 0.0

    @property
    def recipient(self) -> str:
        """The client or the node, for events."""
        return f"node {self.node}" if self.client is None else f"client {self.client}"


@dataclass(frozen=True, eq=False)
class _Claim:
    """The claim of a node to a partition that another node has.

    Attributes:
        node: the node that claims the partition.
        reply: its answer to the greeting.
        ask: when the other node is greeted again.
        due: when the claim is granted, unless the other node has answered by then.
    """

    node: int
    reply: Parcel
    ask: float
    due: float


class Link:
    """The server's exchanges with clients.

    Attributes:
        x1: the model at which nodes compute their gradient when they connect before round 1; None if it is not
            needed.
        started: whether the first round of this process has begun.
        adopted: whether it is known which buffers of the model move.
        nodes: the node of each connected client.
        excluded: clients that do not take part. Their nodes are not assigned to them.
        sizes: the number of samples of each client, as it reported when it first connected.
        labels: the classes of each client's samples, if the algorithm needs them and targets are labels.
        gradients: full local gradients at x_1, by client.
        events: what went wrong or changed since the last `take_events`, in words.
        bytes_down, bytes_up: bytes of the vectors sent and received since the start.
        arrived: after how many seconds each client's reply to the last exchange arrived.
        contacts: the messages of each client since the last `take_contacts`.
    """

    def __init__(self, grid: Grid, model: VectorModel, settings: Settings, x1: Tensor | None = None) -> None:
        self.grid, self.model, self.settings, self.x1 = grid, model, settings, x1
        self.started = self.adopted = False
        self.nodes: dict[int, int] = {}
        self.excluded: frozenset[int] = frozenset()
        self.sizes: dict[int, int] = {}
        self.labels: dict[int, npt.NDArray[np.int64]] = {}
        self.gradients: dict[int, Tensor] = {}
        self.events: list[str] = []
        self.bytes_down = self.bytes_up = 0
        self.arrived: dict[int, float] = {}
        self.contacts: defaultdict[int, Contact] = defaultdict(Contact)
        self._mailbox: Mailbox | None = None
        # by node: how often it was greeted, which client it claims to be, why it was refused
        self._greetings: dict[int, int] = {}
        self._wants: dict[int, int] = {}
        self._refusals: dict[int, str] = {}
        # by client: who claims it, when its node was last greeted because of that, its moving buffers
        self._claims: dict[int, _Claim] = {}
        self._challenged: dict[int, float] = {}
        self._moving: dict[int, tuple[str, ...]] = {}
        self._sent: dict[str, _Sent] = {}
        self._key_holders: KeyHolders | None = None
        if settings.keys is not None:
            self._key_holders = KeyHolders(settings.keys, grid.run.run_id)

    def note(self, event: str) -> None:
        """Log an event, and keep it for the history. It may hold text that comes from a client."""
        event = printable(event)
        log.warning("%s", event)
        self.events.append(event)
        client, fault = fault_of(event)
        if client is not None:
            self.contacts[client].fault = fault

    def take_events(self) -> list[str]:
        """Return the events since the last call."""
        events, self.events = self.events, []
        return events

    def take_contacts(self) -> dict[int, Contact]:
        """Return the messages of each client since the last call; seconds are those of the last exchange."""
        for client, seconds in self.arrived.items():
            self.contacts[client].seconds = seconds
        contacts = dict(self.contacts)
        self.contacts.clear()
        return contacts

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
        waiting, begun = {}, time.monotonic()
        for client, parcel in parcels.items():
            if client not in self.nodes:  # it left after the round was planned, which was noted
                continue
            expected = self.expected(vectors[client])
            sent = _Sent(self.nodes[client], client, kind, round, expected, end=begun + seconds)
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
        self._sent[numbers[0]] = dataclasses.replace(sent, nbytes=parcel.nbytes)
        if sent.client is not None:
            self.contacts[sent.client].sent += parcel.nbytes
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
            sent = self._sent.pop(arrival.number)
            if sent.kind == HELLO:
                self._answered(sent, arrival)
            elif arrival.number in waiting:
                arrived[arrival.number] = self._received(sent, arrival)
            elif arrival.error is None:
                self.note(f"{sent.recipient}: late reply of round {sent.round + 1}, dropped")
        return arrived

    def _received(self, sent: _Sent, arrival: Arrival) -> Parcel | None:
        """Return an awaited reply; None, with an event, if it cannot be used."""
        if arrival.error is not None:
            self.note(f"{sent.recipient}: {_reason(arrival.error)}")
            return None
        try:
            reply = self._unpacked(sent, arrival)
        except BadReplyError as error:
            self.note(f"{sent.recipient}: reply dropped, {error}")
            return None
        if sent.client is not None:
            self._heard(self.contacts[sent.client], reply)
        return reply

    def _heard(self, contact: Contact, reply: Parcel) -> None:
        """Note what a client sent, and when."""
        contact.received += reply.nbytes
        contact.seen = time.time()

    def _answered(self, sent: _Sent, arrival: Arrival) -> None:
        """Take in the answer to a greeting; refuse the node if it is an error or cannot be used."""
        if arrival.error is not None:
            self._refuse(sent.node, _reason(arrival.error))
            return
        try:
            reply = self._unpacked(sent, arrival)
            self.meet(sent.node, reply)
            contact = self.contacts[int(reply.facts["client"])]  # the client of a greeting is known now
            contact.sent += sent.nbytes
            self._heard(contact, reply)
        except BadReplyError as error:
            self._refuse(sent.node, f"refused, {error}")

    def _unpacked(self, sent: _Sent, arrival: Arrival) -> Parcel:
        """Return what a client sent; raise BadReplyError if it cannot be read or is more than was asked for."""
        if arrival.content is None:
            raise BadReplyError(arrival.fault or "it is empty")
        reply = unpack(arrival.content, sent.expected)
        self.bytes_up += reply.nbytes
        return reply

    def roll_call(self, round: int) -> None:
        """Update the connected nodes and receive what has arrived, without waiting."""
        self._look(round)
        self._pull()

    def _look(self, round: int) -> None:
        """Greet new nodes, remove those that left, and decide about claims."""
        present = set(self.grid.get_node_ids())
        for client, node in list(self.nodes.items()):
            if node not in present:
                del self.nodes[client]
                self.note(f"client {client}: its node left")
                self._greet_again(client)
        for node in (self._greetings.keys() | self._wants.keys()) - present:
            for of_node in (self._greetings, self._wants, self._refusals):
                of_node.pop(node, None)
        self._settle(present, round)
        claiming = {claim.node for claim in self._claims.values()}
        for node in sorted(present - claiming - set(self.nodes.values())):
            if self._greetings.get(node, 0) < self.settings.attempts and self._greet(node, round):
                self._greetings[node] = self._greetings.get(node, 0) + 1

    def _greet(self, node: int, round: int) -> bool:
        """Greet a node unless its answer to an earlier greeting is awaited. Return whether it was greeted."""
        if any(sent.node == node and sent.kind == HELLO for sent in self._sent.values()):
            return False
        facts = {"protocol": PROTOCOL, "model": fingerprint(self.model), "round": 0, "batch": "full"}
        x1 = None if self.started else self.x1
        challenge = {} if self._key_holders is None else self._key_holders.challenge(node)
        ask = Parcel({**facts, **challenge}, {} if x1 is None else {"x": x1})
        expected = self.expected({} if x1 is None else {"gradient": len(x1)})
        names = "\n".join(name for name, _ in self.model.module.named_buffers())
        labels = 5 * MOST_LABELS if self.settings.build_algorithm().traits.labels else 0
        expected = dataclasses.replace(expected, text=max(expected.text, len(names), labels))
        self._push(_Sent(node, None, HELLO, round, expected), ask, float(self.settings.wait_seconds))
        return True

    def _greet_again(self, client: int) -> None:
        """Let nodes that were refused this partition be greeted again."""
        for node in [node for node, wanted in self._wants.items() if wanted == client]:
            self._greetings.pop(node, None)
            self._refusals.pop(node, None)

    def _refuse(self, node: int, reason: str) -> None:
        """Note that a node does not take part, and why; only once if it is greeted again to no avail."""
        if self._refusals.get(node) != printable(reason):
            self._refusals[node] = printable(reason)
            self.note(f"node {node}: {reason}")

    def meet(self, node: int, reply: Parcel) -> None:
        """Check the reply of a node to a greeting, and assign its client to the node.

        Raise BadReplyError for a node that is refused. If another node has the client, that one is greeted again
        first.
        """
        client = self._wants[node] = reply.integer("client", 0, self.settings.clients - 1)
        if client in self.excluded:
            self._greetings[node] = self.settings.attempts
            raise BadReplyError(f"client {client} is excluded")
        fault = self._fault(client, reply)
        if fault is not None:
            raise BadReplyError(str(fault))
        if self._key_holders is not None:
            self._key_holders.check(node, client, reply)
        if self.x1 is not None and not self.started:
            reply.vector("gradient", len(self.x1), self.x1.dtype)
        if self.nodes.get(client, node) == node:
            self._assign(client, node, reply)
        else:
            self._claim(client, node, reply)

    def _fault(self, client: int, reply: Parcel) -> InputError | None:
        """Return what is wrong with a client that greets, or None."""
        samples = reply.integer("samples", 1, self.settings.max_samples)
        samples_before = self.sizes.get(client, samples)
        fixed = (self.settings.samples or {}).get(str(client), samples)
        if reply.facts.get("model") != fingerprint(self.model):
            client_model = f"{reply.facts.get('parameters')} parameters, {reply.facts.get('dtype')}"
            server_model = f"{self.model.size} parameters, {self.model.dtype}"
            accepted = f"the server's model, layer by layer ({server_model}): all nodes must run the same app"
            return InputError(f"model of client {client}", client_model, accepted)
        if fixed != samples:
            return InputError(f"samples of client {client}", samples, f"{fixed}, as the setting samples says")
        if samples_before != samples:
            accepted = f"{samples_before}, as when it first connected"
            return InputError(f"samples of client {client}", samples, accepted)
        _labels(reply)
        moving = self.moving(reply)
        if self.adopted and moving != self.model.buffers.names:
            accepted = f"{self.model.buffers.names}, as those of the other clients"
            return InputError(f"moving buffers of client {client}", moving, accepted)
        return None

    def _assign(self, client: int, node: int, reply: Parcel) -> None:
        """Let a node have a client, and refuse another node that claims it."""
        claim = self._claims.pop(client, None)
        if claim is not None:
            belongs = f"belongs to node {node}, which is connected"
            self._refuse(claim.node, f"refused, node config partition-id = {client} {belongs}")
        for other in [other for other, its_node in self.nodes.items() if its_node == node and other != client]:
            del self.nodes[other]
            self.note(f"client {other}: its node has become client {client}")
        if self.started and client not in self.nodes:
            self.note(f"client {client}: connected{' again' if client in self._moving else ''}")
        if self.x1 is not None and not self.started:
            self.gradients[client] = reply.vectors["gradient"]
        self._moving[client] = tuple(self.moving(reply))
        self.sizes[client] = reply.integer("samples", 1, self.settings.max_samples)
        if (labels := _labels(reply)) is not None:
            self.labels[client] = labels
        self.nodes[client] = node
        self._refusals.pop(node, None)

    def _claim(self, client: int, node: int, reply: Parcel) -> None:
        """Keep a claim to a partition that another node has, until that node has answered or has had its time.

        A node may be busy with a request. It can answer a greeting after that, so its time begins then.
        """
        holder, now = self.nodes[client], time.monotonic()
        if client in self._claims:
            other = f"node {holder}, and node {self._claims[client].node} claims it, too"
            raise BadReplyError(f"node config partition-id = {client} belongs to {other}")
        seconds = min(CHALLENGE_SECONDS, float(self.settings.wait_seconds))
        ask = max(now, self._challenged.get(client, -math.inf) + seconds)
        busy = [sent.end for sent in self._sent.values() if sent.node == holder and sent.kind != HELLO]
        self._claims[client] = _Claim(node, reply, ask, max(ask, *busy, now) + seconds)
        self.note(f"node {node}: claims client {client}; node {holder}, which has it, is greeted again")

    def _settle(self, present: Collection[int], round: int) -> None:
        """Greet the nodes whose partitions others claim. Grant claims if these nodes left or did not answer."""
        now = time.monotonic()
        for client, claim in list(self._claims.items()):
            holder = self.nodes.get(client)
            if claim.node not in present or client in self.excluded:
                del self._claims[client]
            elif holder is None or now >= claim.due:
                del self._claims[client]
                if holder is not None:
                    self._greetings[holder] = self.settings.attempts
                    self.note(f"client {client}: moved to another node, because node {holder} did not answer")
                self._assign(client, claim.node, claim.reply)
            elif now >= claim.ask > self._challenged.get(client, -math.inf):
                self._challenged[client] = now
                self._greet(holder, round)

    def exclude(self, clients: frozenset[int]) -> None:
        """Set the clients that do not take part. Changes are noted."""
        for client in sorted(clients - self.excluded):
            self.note(f"client {client}: excluded")
            node = self.nodes.pop(client, None)
            if node is not None:
                self._greetings[node] = self.settings.attempts
        for client in sorted(self.excluded - clients):
            self.note(f"client {client}: no longer excluded")
            self._greet_again(client)
        self.excluded = clients

    def agree_on_buffers(self) -> bool:
        """Take the moving buffers that most clients have, and refuse the others. Return whether all agree."""
        votes = Counter(self._moving[client] for client in self.nodes)
        chosen = votes.most_common(1)[0][0]
        self.model.buffers.adopt(chosen)
        self.adopted = True
        for client, node in list(self.nodes.items()):
            if self._moving[client] != chosen:
                del self.nodes[client], self.sizes[client]
                accepted = f"{list(chosen)}, as those of most clients"
                given = list(self._moving.pop(client))
                self._refuse(node, f"refused, {InputError(f'moving buffers of client {client}', given, accepted)}")
        return len(votes) == 1

    def moving(self, reply: Parcel) -> list[str]:
        """Return the names of the buffers that a client's forward pass changes."""
        given = reply.facts.get("buffers", "")
        names = given.splitlines() if isinstance(given, str) else [None]
        known = dict(self.model.module.named_buffers())
        if len(set(names)) < len(names) or any(name not in known for name in names):
            raise BadReplyError(f"its moving buffers are {shown(given)}, expected buffers of the server's model")
        return [str(name) for name in names]

    def labels_of(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_] | None:
        """Return which classes clients hold, as they reported, [m, classes]; None if no client reported any."""
        if not self.labels:
            return None
        classes = 1 + max(int(labels.max(initial=-1)) for labels in self.labels.values())
        held = np.zeros((len(clients), classes), np.bool_)
        for row, client in enumerate(clients.tolist()):
            held[row, self.labels.get(client, slice(None))] = True
        return held

    def wait_for(self, wanted: Collection[int], number: int, round: int, patient: bool = False) -> None:
        """Wait until this many of the wanted clients are connected; raise FedagracError after `wait_seconds`.

        With `patient`, wait until all of them are, and be content with this many after `wait_seconds`.
        """
        end = time.monotonic() + float(self.settings.wait_seconds)
        self.roll_call(round)
        while (connected := len(self.nodes.keys() & set(wanted))) < (len(wanted) if patient else number):
            if time.monotonic() >= end:
                if connected >= number:
                    return
                raise FedagracError(self._too_few(wanted, number, round))
            time.sleep(float(self.settings.poll_seconds))
            self.roll_call(round)

    def _too_few(self, wanted: Collection[int], number: int, round: int) -> str:
        """Return the error if too few clients are connected: who is missing, and who was refused and why."""
        refusals = [f"node {node}: {reason}" for node, reason in self._refusals.items()]
        events = "; ".join(dict.fromkeys([*self.take_events(), *refusals]))
        missing = [client for client in sorted(wanted) if client not in self.nodes]
        everyone = len(wanted) == self.settings.clients
        whole = f"clients = {self.settings.clients}" if everyone else f"{len(wanted)} clients"
        return (
            f"{len(wanted) - len(missing)} of {whole} connected within wait_seconds = "
            f"{self.settings.wait_seconds:g}, {number} are needed before round {round + 1}; missing "
            f"partition-id {', '.join(map(str, missing))}" + (f" ({events})" if events else "")
        )


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

    def assume(self, clients: npt.NDArray[np.int64], gradient: Tensor) -> None:
        """Let clients that sent no gradient count with this one, at the point that was asked for last."""
        self._rows |= {int(client): gradient for client in clients}

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


def _labels(reply: Parcel) -> npt.NDArray[np.int64] | None:
    """Return the classes that a client reported, or None if it reported none."""
    given = reply.facts.get("labels")
    if given is None:
        return None
    words = given.split() if isinstance(given, str) else [""]
    if not all(word.isascii() and word.isdigit() and len(word) < 5 and int(word) < MOST_LABELS for word in words):
        raise BadReplyError(f"its labels are {shown(given)}, expected classes from 0 to {MOST_LABELS - 1}")
    return np.array([int(word) for word in words], np.int64)
