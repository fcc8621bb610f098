"""Receiving replies: one node's bytes never raise, and take no more memory or time than was asked for.

`Grid.pull_messages` of Flower hands over a reply once. It pulls all its objects, waits up to three minutes for
those that a node has not uploaded yet, and inflates them, whatever their number and size. If one reply cannot be
read, the others of the same call are lost. So replies are received one by one here. A reply from another machine
is first announced with the list of its objects, then pulled object by object, and inflated if its sizes are right.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from fedagrac.errors import shown
from fedagrac.flower.wire import VECTORS, BadReplyError, Expected

if TYPE_CHECKING:
    from flwr.app import Message, RecordDict
    from flwr.proto.message_pb2 import ObjectTree
    from flwr.serverapp import Grid
    from flwr.superlink.grid import HttpGrid

__all__ = ["Arrival", "Mailbox", "OneByOne", "Uploads", "check_objects", "mailbox_of"]

ANNOUNCEMENT = 2**24
"""The largest announcement of a reply in bytes. An object has about 70; if they are too many, they are deleted."""


@dataclass(frozen=True, eq=False)
class Arrival:
    """A reply that arrived, or the end of one that cannot be used.

    Attributes:
        number: the number of the message that was answered.
        content: what the client sent; None if there is nothing to use.
        error: the error that the client or Flower reported, which may be empty; None if there is none.
        fault: what is wrong with the bytes of the reply; None if they could be read.
    """

    number: str
    content: RecordDict | None = None
    error: str | None = None
    fault: str | None = None

    @classmethod
    def of(cls, number: str, message: Message) -> Arrival:
        """Return a message as an arrival."""
        return cls(number, error=message.error.reason) if message.has_error() else cls(number, message.content)


class Mailbox(Protocol):
    """Where replies arrive."""

    def collect(self, wanted: Mapping[str, Expected | None], end: float) -> Iterator[Arrival]:
        """Yield what has arrived, without waiting.

        Args:
            wanted: what the reply to each message may hold; None if the reply is late and is not used.
            end: the time at which to stop, on the clock `time.monotonic`.
        """


def mailbox_of(grid: Grid, upload_seconds: float) -> Mailbox:
    """Return the mailbox for a grid."""
    from flwr.superlink.grid import HttpGrid

    return Uploads(grid, upload_seconds) if isinstance(grid, HttpGrid) else OneByOne(grid)


@dataclass(frozen=True, eq=False)
class OneByOne:
    """A mailbox over any grid. Every reply is pulled by itself, so a bad one affects no other."""

    grid: Grid

    def collect(self, wanted: Mapping[str, Expected | None], end: float) -> Iterator[Arrival]:
        """Yield what has arrived."""
        for number in wanted:
            arrivals: list[Arrival] = []
            try:
                for message in self.grid.pull_messages([number]):
                    if message.metadata.reply_to_message_id == number:
                        arrivals = [Arrival.of(number, message)]
            except Exception as error:  # the reply is untrusted, so any error is possible
                arrivals = [Arrival(number, fault=_told(error))]
            yield from arrivals


@dataclass(eq=False)
class _Upload:
    """A reply that was announced and is being pulled.

    Attributes:
        root: the object of the message.
        missing: the objects that have not been pulled, children first.
        contents: the objects that have been pulled.
        bytes_left: how many more bytes the reply may have.
        end: when it must be complete.
    """

    root: str
    missing: deque[str]
    contents: dict[str, bytes]
    bytes_left: int
    end: float


class Uploads:
    """The mailbox over Flower's HTTP API, which the server uses if nodes are other processes.

    It uses Flower's inner interface to the SuperLink; the extra `flower` pins the version.
    """

    def __init__(self, grid: HttpGrid, upload_seconds: float) -> None:
        self._grid, self._upload_seconds = grid, upload_seconds
        self._uploads: dict[str, _Upload] = {}

    def collect(self, wanted: Mapping[str, Expected | None], end: float) -> Iterator[Arrival]:
        """Yield what has arrived. A late reply is not pulled."""
        for number, expected in wanted.items():
            if time.monotonic() >= end:
                return
            try:
                arrival = self._advance(number, expected, end)
            except Exception as error:  # the reply is untrusted, so any error is possible
                self._grid.get_node_ids()  # raises if the SuperLink itself is the cause
                self._forget(number)
                arrival = Arrival(number, fault=_told(error))
            if arrival is not None:
                yield arrival

    def _advance(self, number: str, expected: Expected | None, end: float) -> Arrival | None:
        """Pull what is there of one reply. Return it once it is complete, is an error, or is late."""
        if number not in self._uploads:
            arrival = self._announced(number, expected or Expected({}), end)
            if arrival is not None or number not in self._uploads:
                return arrival
        upload = self._uploads[number]
        if expected is None:
            self._forget(number)
            return Arrival(number)
        self._pull(upload, end)
        if upload.missing:
            if time.monotonic() < upload.end:
                return None
            left, seconds = len(upload.missing), self._upload_seconds
            raise BadReplyError(f"its upload lacks {left} objects after upload_seconds = {seconds:g}")
        self._forget(number)
        return Arrival.of(number, inflate(upload.root, upload.contents, expected))

    def _announced(self, number: str, expected: Expected, end: float) -> Arrival | None:
        """Look whether there is a reply, and begin to receive it. Return it if it is an error."""
        from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse

        ask, most = PullAppMessagesRequest(message_ids=[number]), max(ANNOUNCEMENT, 2 * expected.most_structure)
        announced = self._call("PullMessages", "pull-messages", ask, PullAppMessagesResponse, most, end)
        for message, tree in zip(announced.messages_list, announced.message_object_trees, strict=True):
            # the metadata inside the reply are the node's own; these were checked by the SuperLink
            if message.metadata.reply_to_message_id != number:
                continue
            objects = deque(_objects(tree, expected.most_objects))
            done = time.monotonic() + self._upload_seconds
            self._uploads[number] = _Upload(tree.object_id, objects, {}, expected.most_bytes, done)
            if message.HasField("error"):
                self._forget(number)
                return Arrival(number, error=message.error.reason)
            if len(objects) > expected.most_objects:
                raise BadReplyError(f"it has more than {expected.most_objects} objects")
        return None

    def _pull(self, upload: _Upload, end: float) -> None:
        """Pull objects of a reply until one is not there yet, or until the time is over."""
        from flwr.proto.message_pb2 import PullObjectRequest, PullObjectResponse

        while upload.missing and time.monotonic() < end:
            name = upload.missing[0]
            ask = PullObjectRequest(node=self._grid.node, run_id=self._grid.run.run_id, object_id=name)
            answer = self._call("PullObject", "pull-object", ask, PullObjectResponse, upload.bytes_left, end)
            if not answer.object_found:
                raise BadReplyError("its objects are gone: the upload was given up")
            if not answer.object_available:
                return
            upload.contents[name] = answer.object_content
            upload.bytes_left -= len(answer.object_content)
            upload.missing.popleft()

    def _forget(self, number: str) -> None:
        """Stop receiving a reply, and let the SuperLink delete its objects."""
        from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest

        upload = self._uploads.pop(number, None)
        if upload is not None:
            run = self._grid.run.run_id
            ask = ConfirmMessageReceivedRequest(node=self._grid.node, run_id=run, message_object_id=upload.root)
            with contextlib.suppress(Exception):  # the SuperLink deletes them with the run in any case
                self._grid._runtime_client.ConfirmMessageReceived(ask)

    def _call(
        self, method: str, path: str, ask: Any, answer: Callable[[], Any], most_bytes: int, end: float
    ) -> Any:
        """Call a method of the SuperLink. Raise BadReplyError if its answer is too large or takes too long."""
        from flwr.supercore.protobuf.client import ProtobufRequestContext
        from flwr.supercore.protobuf.constants import PROTOBUF_MEDIA_TYPE

        client = self._grid._runtime_client
        types = {"content-type": PROTOBUF_MEDIA_TYPE, "accept": PROTOBUF_MEDIA_TYPE}

        def send() -> bytes:
            request = client._client.build_request(
                method="POST",
                url=f"{client._base_url}/v1/runtime/{path}",
                content=ask.SerializeToString(deterministic=True),
                headers={**types, "accept-encoding": "identity"},
            )
            context = ProtobufRequestContext(f"/flwr.proto.Runtime/{method}", ask, request)
            received = bytearray()
            with contextlib.closing(client._send(context, stream=True)) as response:
                response.raise_for_status()
                request.extensions["timeout"]["read"] = client._client.timeout.read  # Flower sets none for a body
                for part in response.iter_raw():
                    received += part
                    if len(received) > most_bytes:
                        raise BadReplyError(f"it has more than {most_bytes} bytes")
                    if time.monotonic() >= end:
                        raise BadReplyError("it could not be received in time")
            return bytes(received)

        result = answer()
        result.ParseFromString(client._retry_invoker.invoke(send) if client._retry_invoker else send())
        return result


def _objects(tree: ObjectTree, most: int) -> list[str]:
    """Return the objects of a reply, each once and children first; at most one more than `most`."""
    from flwr.supercore.inflatable.inflatable_object import iterate_object_tree

    names = (node.object_id for node in itertools.islice(iterate_object_tree(tree), 2 * most + 1))
    return list(dict.fromkeys(names))[: most + 1]


def inflate(root: str, contents: Mapping[str, bytes], expected: Expected) -> Message:
    """Return the message in the objects of a reply; raise an error if they cannot be read or are too large."""
    from flwr.app import Message
    from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents

    check_objects(contents, expected)
    message = inflate_object_from_contents(root, dict(contents))
    if not isinstance(message, Message):
        raise BadReplyError(f"it is an object of type {type(message).__name__}, expected Message")
    return message


def check_objects(contents: Mapping[str, bytes], expected: Expected) -> None:
    r"""Raise BadReplyError if the objects of a reply would become larger than what was asked for.

    An array refers to its chunks by number. It may name one chunk many times, so a reply of a few megabytes can
    stand for any number of bytes.

    Examples:
        >>> chunk, array = b"ArrayChunk  1000\0" + bytes(1000), b'Array c 29\0{"arraychunk_ids": [0, 0, 0]}'
        >>> check_objects({"c": chunk, "a": array}, Expected({"model": 1000}))
        Traceback (most recent call last):
        ...
        fedagrac.flower.wire.BadReplyError: one of its arrays has 3000 bytes, expected at most 2024
    """
    bodies = {name: _Body.of(content, expected.most_structure) for name, content in contents.items()}
    arrays = {name: body for name, body in bodies.items() if body.kind == "Array"}
    if len(arrays) > len(expected.vectors):
        raise BadReplyError(f"it has {len(arrays)} arrays, expected at most {len(expected.vectors)}")
    longest = max((expected.most_in(name) for name in expected.vectors), default=0)
    for body in arrays.values():
        # Flower takes any object with data for a chunk, also an array, which may stand for many bytes itself
        if any(bodies[name].kind != "ArrayChunk" for name in body.children):
            raise BadReplyError("one of its arrays consists of other objects than chunks")
        chunks = body.json()["arraychunk_ids"]
        nbytes = sum(bodies[body.children[int(i)]].size for i in chunks)
        if nbytes > longest:
            raise BadReplyError(f"one of its arrays has {nbytes} bytes, expected at most {longest}")
    for body in bodies.values():
        if body.kind == "ArrayRecord":
            expected.check_names(body.json(), VECTORS)


@dataclass(frozen=True, eq=False)
class _Body:
    """An object as it travels.

    Attributes:
        kind: the name of its class.
        children: the objects that it refers to.
        size: the bytes of its body.
        text: the body; empty if it holds numbers.
    """

    kind: str
    children: list[str]
    size: int
    text: bytes

    @classmethod
    def of(cls, content: bytes, most: int) -> _Body:
        """Read the head of an object; raise BadReplyError if it is too large and does not hold numbers."""
        end = content.find(b"\x00", 0, most)
        kind, children, _ = content[: max(end, 0)].decode().split(" ")
        numbers = kind == "ArrayChunk"
        if not numbers and len(content) > most:
            raise BadReplyError(
                f"an object of type {shown(kind)} has {len(content)} bytes, expected at most {most}"
            )
        size = len(content) - end - 1
        return cls(kind, children.split(",") if children else [], size, b"" if numbers else content[end + 1 :])

    def json(self) -> dict[str, Any]:
        """Return the body, which is a table in JSON."""
        table = json.loads(self.text.decode())
        if not isinstance(table, dict):
            raise BadReplyError(f"an object of type {self.kind} has no table")
        return table


def _told(error: Exception) -> str:
    """Return what is wrong with a reply, on one line."""
    if isinstance(error, BadReplyError):
        return str(error)
    return f"it cannot be read ({type(error).__name__}: {shown(str(error))})"
