"""Hostile replies as real bytes: through Flower's grid, its HTTP client, its object store and its deserialiser."""

import hashlib
import json
import re
import time
import tracemalloc

import httpx
import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import fedagrac as fg
import flower_processes

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.superlink.grid import HttpGrid

from fedagrac.flower import client_app
from fedagrac.flower.mailbox import Uploads
from fedagrac.flower.server import initial_model, run_federation
from fedagrac.flower.settings import Settings
from fedagrac.flower.wire import Expected

import mutated_replies  # isort: skip

K = [3, 5, 12]
FED = fg.Federation.load("digits", clients=3, partition=fg.Dirichlet(0.5), seed=0)
BAD = 11


def model(context):
    return fg.models.build("logistic", features=64, classes=10)


def data(context):
    samples = FED.samples_of(context.node_config["partition-id"])
    return FED.inputs[samples], FED.targets[samples]


def with_body(content, body, kind=None, children=None):
    """Return an object with another body, and a head that fits it, so that the SuperLink accepts the object."""
    old_kind, old_children, _ = content.partition(b"\0")[0].decode().split(" ")
    children = old_children if children is None else ",".join(children)
    return f"{kind or old_kind} {children} {len(body)}".encode() + b"\0" + body


def body_of(content):
    return content.partition(b"\0")[2]


def name_of(content):
    return hashlib.sha256(content).hexdigest()


def as_bytes(thing, change, contents):
    """Write an object and its children to `contents`, each changed as it travels. Return its tree."""
    content, children = thing.deflate(), {}
    for old, child in (thing.children or {}).items():
        tree = as_bytes(child, change, contents)
        children[tree.object_id] = tree
        if tree.object_id != old:
            content = content.replace(old.encode(), tree.object_id.encode())
    content = change(type(thing).__name__, content, contents)
    for name in content.partition(b"\0")[0].decode().split(" ")[1].split(","):
        if name and name not in children:
            children[name] = ObjectTree(object_id=name, children=children_of(contents[name], contents))
    contents[name_of(content)] = content
    return ObjectTree(object_id=name_of(content), children=children.values())


def children_of(content, contents):
    """Return the trees of the children that an object names."""
    names = content.partition(b"\0")[0].decode().split(" ")[1].split(",")
    return [ObjectTree(object_id=name, children=children_of(contents[name], contents)) for name in names if name]


def unchanged(kind, content, contents):
    return content


class SuperLink:
    """The SuperLink's API for servers in this process, with Flower's own object store. Nodes run real ClientApps.

    `spoil` changes a reply before it becomes bytes, `change` its bytes, and `missing` says which of its objects
    are never uploaded.
    """

    def __init__(self, run_config, spoil=None, change=None, missing=None, rounds=(2,)):
        self.app, self.rounds = client_app(model, data), rounds
        self.contexts = {
            10 + i: Context(1, 0, {"partition-id": i}, RecordDict(), run_config) for i in range(len(K))
        }
        self.spoil, self.change = spoil or (lambda reply: reply), change or unchanged
        self.missing = missing or (lambda contents: ())
        self.store, self.waiting, self.pulled, self.confirmed = InMemoryObjectStore(), {}, [], []
        self.grid = HttpGrid(token="t")
        self.grid.set_run(Run.create_empty(1))
        client = RuntimeHttpClient("http://superlink")
        client._client.close()
        client._client = httpx.Client(transport=httpx.MockTransport(self.answer))
        self.grid._client = client

    def answer(self, request):
        """Answer a request of the server."""
        method = getattr(self, request.url.path.rsplit("/", 1)[1].replace("-", "_"))
        return httpx.Response(200, stream=httpx.ByteStream(method(request.read()).SerializeToString()))

    def get_nodes(self, _):
        return GetNodesResponse(nodes=[NodeInfo(node_id=node) for node in self.contexts])

    def push_messages(self, data):
        ask = PushAppMessagesRequest.FromString(data)
        missing = [name for tree in ask.message_object_trees for name in self.store.preregister(1, tree)]
        numbers = [message.metadata.message_id for message in ask.messages_list]
        self.waiting |= dict(zip(numbers, ask.messages_list, strict=True))
        return PushAppMessagesResponse(message_ids=numbers, objects_to_push=missing, session_id="s")

    def push_object(self, data):
        ask = PushObjectRequest.FromString(data)
        self.store.put(ask.object_id, ask.object_content)
        return PushObjectResponse(stored=True)

    def pull_messages(self, data):
        answer = PullAppMessagesResponse()
        for number in PullAppMessagesRequest.FromString(data).message_ids:
            if number in self.waiting:
                self.reply(number, self.waiting.pop(number), answer)
        return answer

    def reply(self, number, asked, answer):
        """Let the node answer a message, and store the objects of its reply."""
        metadata, contents = asked.metadata, {}
        names = [number, *self.descendants(number)]
        message = inflate_object_from_contents(number, {name: self.store.get(name) for name in names})
        message.metadata.__dict__["_message_id"] = number
        self.store.delete(number)
        try:
            reply = self.app(message, self.contexts[metadata.dst_node_id])
        except Exception as error:
            reply = Message(Error(code=2, reason=str(error)), reply_to=message)
        bad = metadata.dst_node_id == BAD and metadata.message_type == "train.steps"
        bad = bad and int(metadata.group_id) in self.rounds
        reply = self.spoil(reply) if bad else reply
        tree = as_bytes(reply, self.change if bad else unchanged, contents)
        announced = message_to_proto(remove_content_from_message(reply))
        announced.metadata.message_id = tree.object_id
        announced.metadata.reply_to_message_id = number  # the SuperLink checks it
        self.store.preregister(1, tree)
        lacking = self.missing(contents) if bad else ()
        for name, content in contents.items():
            if name not in lacking:
                self.store.put(name, content)
        answer.messages_list.append(announced)
        answer.message_object_trees.append(self.store.get_object_tree(tree.object_id))

    def descendants(self, name):
        for child in self.store.store[name].child_object_ids:
            yield child
            yield from self.descendants(child)

    def pull_object(self, data):
        name = PullObjectRequest.FromString(data).object_id
        content = self.store.get(name)
        self.pulled.append(name)
        return PullObjectResponse(
            object_found=content is not None, object_available=bool(content), object_content=content or b""
        )

    def confirm_message_received(self, data):
        name = ConfirmMessageReceivedRequest.FromString(data).message_object_id
        self.confirmed.append(name)
        self.store.delete(name)
        return ConfirmMessageReceivedResponse()


def config(tmp_path, **changes):
    settings = {
        "clients": 3, "min_clients": 2, "rounds": 3, "batch_size": 10, "dtype": "float64", "round_seconds": 600.0,
        "wait_seconds": 20.0, "poll_seconds": 0.01, "out": str(tmp_path / "run"), "algorithm.name": "fedagrac",
        "algorithm.lr": 0.1, "steps.kind": "explicit", "steps.table": json.dumps([K]),
    }  # fmt: skip
    return {**settings, **{key.replace("__", "."): value for key, value in changes.items()}}


def federation(tmp_path, link=None, **changes):
    """Run a federation over a SuperLink in this process. Return the run and the SuperLink."""
    settings = config(tmp_path, **changes)
    superlink = SuperLink(settings, **(link or {}))
    checked = Settings.of(settings)
    return run_federation(superlink.grid, checked, initial_model(checked, model, None)), superlink


KNOWN = {}


def without_client_1(tmp_path):
    """Return the model of a run in which client 1 sends an error in round 2; computed once."""

    def fail(reply):
        return Message(metadata=reply.metadata, error=Error(code=2, reason="no"))

    if not KNOWN:
        run, _ = federation(tmp_path / "absent", {"spoil": fail})
        assert [record["events"] for record in run.history] == [[], ["client 1: no"], []]
        KNOWN["x"] = run.state["x"]
    return KNOWN["x"]


def change_body(kind, body):
    """Return a change of the bodies of one kind of objects."""

    def change(name, content, contents):
        return with_body(content, body(body_of(content))) if name == kind else content

    return change


def rename(kind, other):
    return lambda name, content, contents: (
        with_body(content, body_of(content), kind=other) if name == kind else content
    )


def deep_json(body):
    return b"[" * 30_000


UNREADABLE = {
    "array with broken JSON": change_body("Array", lambda body: b"{" + body),
    "array with deep JSON": change_body("Array", deep_json),
    "array whose JSON is a list": change_body("Array", lambda body: b"[]"),
    "array without chunks": change_body("Array", lambda body: b"{}"),
    "array with a chunk that is not there": change_body("Array", lambda body: body.replace(b"[0]", b"[7]")),
    "array with a chunk of no number": change_body("Array", lambda body: body.replace(b"[0]", b'["a"]')),
    "array of no shape": change_body("Array", lambda body: body.replace(b"[650]", b'"x"')),
    "facts that end early": change_body("ConfigRecord", lambda body: body[:-5]),
    "facts that are not UTF-8": change_body("ConfigRecord", lambda body: body.replace(b"steps", 5 * b"\xff")),
    "message that ends early": change_body("Message", lambda body: body[:-3]),
    "record of another kind": rename("ConfigRecord", "MetricRecord"),
    "records of another kind": rename("RecordDict", "ArrayRecord"),
    "records that are a list": change_body("RecordDict", lambda body: b"[1]"),
    "message of another kind": rename("Message", "RecordDict"),
    "vectors with other names than arrays": change_body("ArrayRecord", lambda body: b'{"model": "0"}'),
}  # fmt: skip


@pytest.mark.parametrize("fault", UNREADABLE)
def test_a_reply_that_cannot_be_read_is_dropped_and_the_others_count(fault, tmp_path):
    run, link = federation(tmp_path, {"change": UNREADABLE[fault]})
    assert [record["dropped"] for record in run.history] == [[], [1], []]
    (event,) = run.history[1]["events"]
    assert event.startswith("client 1: reply dropped, ")
    assert torch.equal(run.state["x"], without_client_1(tmp_path))
    assert len(link.store) == 0  # also the objects of the dropped reply were deleted
    assert len(link.confirmed) == len(set(link.confirmed))  # no reply was received twice


@pytest.mark.parametrize("fault", ["array with broken JSON", "facts that end early", "records of another kind"])
def test_flowers_own_way_of_receiving_raises(fault, tmp_path):
    """The changed bytes pass the checks of the object store and end Flower's pull_messages."""
    link = SuperLink(config(tmp_path), change=UNREADABLE[fault], rounds=(1,))
    ask = Message(RecordDict(), dst_node_id=BAD, message_type="train.steps", group_id="1", ttl=60.0)
    link.app = lambda message, context: Message(full_reply(), reply_to=message)
    numbers = list(link.grid.push_messages([ask]))
    with pytest.raises(Exception):  # noqa: B017, PT011  # JSON, protobuf and types
        link.grid.pull_messages(numbers)


def full_reply():
    facts = ConfigRecord({"client": 1, "round": 0, "steps": 5, "loss": 1.0})
    return RecordDict({"facts": facts, "vectors": ArrayRecord({"model": Array(np.arange(650.0))})})


def test_a_reply_counts_for_the_node_that_the_superlink_names(tmp_path):
    """Client 1 writes the number of another client's message into its reply."""

    def spoil(reply):
        reply.metadata.__dict__["_reply_to_message_id"] = "0" * 64
        return reply

    run, _ = federation(tmp_path, {"spoil": spoil})
    assert [record["events"] for record in run.history] == [[], [], []]


def test_a_tree_of_objects_that_protobuf_refuses_to_read_is_the_fault_of_its_node(tmp_path):
    """Two replies can make a tree that is deeper than the limit of protobuf, which is 100."""

    def deepen(kind, content, contents):
        for _ in range(120 if kind == "ArrayChunk" else 0):
            contents[name_of(content)] = content
            content = with_body(content, body_of(content), children=[name_of(content)])
        return content

    run, _ = federation(tmp_path, {"change": deepen})
    (event,) = run.history[1]["events"]
    assert "client 1: reply dropped, it cannot be read (DecodeError" in event
    assert torch.equal(run.state["x"], without_client_1(tmp_path))


def test_an_error_of_the_superlink_about_one_reply_is_the_fault_of_its_node(tmp_path):
    settings = config(tmp_path)
    link = SuperLink(settings, change=lambda *_: 1 / 0)  # raises while the reply is handed over
    answer = link.answer

    def fail(request):
        try:
            return answer(request)
        except ZeroDivisionError:
            return httpx.Response(500, stream=httpx.ByteStream(b""))

    link.grid._client._client = httpx.Client(transport=httpx.MockTransport(fail))
    checked = Settings.of(settings)
    run = run_federation(link.grid, checked, initial_model(checked, model, None))
    (event,) = run.history[1]["events"]
    assert "client 1: reply dropped, it cannot be read (HTTPStatusError" in event
    assert torch.equal(run.state["x"], without_client_1(tmp_path))


def test_a_superlink_that_is_gone_is_nobodys_bad_reply(tmp_path):
    settings = config(tmp_path)
    link = SuperLink(settings)
    answer = link.answer

    def vanish(request):
        if len(link.pulled) > 40:
            raise httpx.ConnectError("gone")
        return answer(request)

    link.grid._client._client = httpx.Client(transport=httpx.MockTransport(vanish))
    checked = Settings.of(settings)
    with pytest.raises(httpx.ConnectError):
        run_federation(link.grid, checked, initial_model(checked, model, None))


def flood(arrays):
    def spoil(reply):
        vectors = ArrayRecord({str(i): Array(np.array([float(i)])) for i in range(arrays)})
        return Message(metadata=reply.metadata, content=RecordDict({**full_reply(), "vectors": vectors}))

    return spoil


def test_twenty_thousand_arrays_are_refused_before_one_of_them_is_pulled(tmp_path):
    run, link = federation(tmp_path, {"spoil": flood(20_000)})
    (event,) = run.history[1]["events"]
    assert event == "client 1: reply dropped, it has more than 7 objects"
    assert len(link.pulled) < 100  # at most 8 objects of each of 11 good replies
    assert len(link.store) == 0
    assert torch.equal(run.state["x"], without_client_1(tmp_path))


def test_a_few_more_objects_than_asked_for_are_refused_before_they_are_pulled(tmp_path):
    run, link = federation(tmp_path, {"spoil": flood(12)})
    assert run.history[1]["events"] == ["client 1: reply dropped, it has more than 7 objects"]
    assert len(link.pulled) < 100
    assert len(link.store) == 0


def lacks_a_chunk(contents):
    """The last chunk of a reply is never uploaded: the node died before."""
    return [next(name for name, content in contents.items() if content.startswith(b"ArrayChunk"))]


def test_an_upload_that_stops_ends_after_upload_seconds(tmp_path):
    begun = time.monotonic()
    run, link = federation(tmp_path, {"missing": lacks_a_chunk}, upload_seconds=0.3)
    (event,) = run.history[1]["events"]
    assert re.fullmatch(r"client 1: reply dropped, its upload lacks \d objects after upload_seconds = 0.3", event)
    assert torch.equal(run.state["x"], without_client_1(tmp_path))
    assert time.monotonic() - begun < 15
    assert len(link.store) == 0


def test_round_seconds_ends_a_round_whose_uploads_do_not_end(tmp_path):
    """A larger upload_seconds does not extend the round; the reply is dropped in the next one."""
    run, link = federation(tmp_path, {"missing": lacks_a_chunk}, round_seconds=1.5)
    assert run.history[1]["events"] == ["client 1: no reply to train.steps within 1.5 s"]
    assert run.history[2]["events"] == ["client 1: late reply of round 2, dropped"]
    assert run.history[1]["wall_time"] - run.history[0]["wall_time"] < 6
    assert torch.equal(run.state["x"], without_client_1(tmp_path))
    assert len(link.store) == 0


def bomb(chunk, times):
    """Replace an array by one that names one chunk of zeros many times."""

    def change(kind, content, contents):
        if kind != "Array":
            return content
        zeros = f"ArrayChunk  {chunk}".encode() + b"\0" + bytes(chunk)
        contents[name_of(zeros)] = zeros
        metadata = {"dtype": "float64", "shape": [650], "stype": "numpy.ndarray", "arraychunk_ids": [0] * times}
        body = json.dumps(metadata, separators=(",", ":")).encode()
        return with_body(content, body, children=[name_of(zeros)])

    return change


def test_a_small_reply_that_would_inflate_to_a_large_one_is_refused_before(tmp_path):
    """A chunk of 5,000 zeros that is named 20,000 times stands for 100 MB."""
    link = SuperLink(config(tmp_path), change=bomb(5000, 20_000), rounds=(1,))
    link.app = lambda message, context: Message(full_reply(), reply_to=message)
    mailbox = Uploads(link.grid, 60.0)
    ask = Message(RecordDict(), BAD, "train.steps", group_id="1", ttl=60.0)
    (number,) = link.grid.push_messages([ask])
    tracemalloc.start()
    (arrival,) = mailbox.collect({number: Expected({"model": 5200})}, time.monotonic() + 60)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert arrival.fault == "one of its arrays has 100000000 bytes, expected at most 6224"
    assert peak < 5e6
    (number,) = link.grid.push_messages([Message(RecordDict(), BAD, "train.steps", group_id="1", ttl=60.0)])
    (message,) = link.grid.pull_messages([number])  # Flower's own way
    assert len(message.content["vectors"]["model"].data) == 100_000_000


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (bomb(30_000_000, 1), r"it has more than \d+ bytes"),
        (bomb(5000, 40_000), r"an object of type 'Array' has \d+ bytes, expected at most \d+"),
        (bomb(6000, 2), "one of its arrays has 12000 bytes, expected at most 6224"),
        (
            change_body("ConfigRecord", lambda body: body * 2000),
            r"an object of type 'ConfigRecord' has \d+ bytes.*",
        ),
    ],
    ids=["one chunk", "many names", "two chunks", "facts"],
)
def test_more_bytes_than_were_asked_for_are_refused(change, fault, tmp_path):
    run, _ = federation(tmp_path, {"change": change})
    (event,) = run.history[1]["events"]
    assert re.fullmatch(f"client 1: reply dropped, {fault}", event)
    assert torch.equal(run.state["x"], without_client_1(tmp_path))


def more_facts(**facts):
    def spoil(reply):
        reply.content["facts"].update(facts)
        return reply

    return spoil


def more_vectors(**vectors):
    def spoil(reply):
        for name, values in vectors.items():
            reply.content["vectors"][name] = Array(values)
        return reply

    return spoil


def instead(reply):
    reply.content["vectors"]["total"] = reply.content["vectors"].pop("model")
    return reply


def another_record(reply):
    reply.content["metrics"] = MetricRecord({"a": 1})
    del reply.content["vectors"]
    return reply


@pytest.mark.parametrize(
    ("spoil", "fault"),
    [
        (more_vectors(total=np.ones(650)), "it has more than 7 objects"),
        (instead, "'total' among its vectors was not asked for"),
        (more_facts(**{f"fact{i}": i for i in range(20)}), "it has 24 facts, expected at most 16"),
        (more_facts(note="a" * 300), "the fact 'note' is longer than 256 characters"),
        (more_facts(note=[1, 2]), "the fact 'note' is a list, expected a number or text"),
        (more_facts(note=b"a"), "the fact 'note' is a bytes, expected a number or text"),
        (another_record, "'metrics' among its records was not asked for"),
    ],
)
def test_what_was_not_asked_for_is_refused(spoil, fault, tmp_path):
    run, _ = federation(tmp_path, {"spoil": spoil})
    (event,) = run.history[1]["events"]
    assert re.fullmatch(f"client 1: reply dropped, ({fault})", event)
    assert torch.equal(run.state["x"], without_client_1(tmp_path))


def array_of_arrays(times):
    """Let the second array name the first, which stands for many bytes, in place of chunks."""

    def change(kind, content, contents):
        first = [name for name, one in contents.items() if one.startswith(b"Array ")]
        if kind != "Array" or not first:
            return content
        told = {"dtype": "float64", "shape": [650], "stype": "numpy.ndarray", "arraychunk_ids": [0] * times}
        return with_body(content, json.dumps(told, separators=(",", ":")).encode(), children=first)

    return change


def test_an_array_in_place_of_a_chunk_is_refused_before_it_is_inflated(tmp_path):
    """Flower takes the data of any object for those of a chunk. The text of an array is shorter than its data."""
    link = SuperLink(config(tmp_path), change=array_of_arrays(50), rounds=(1,))
    two = {"model": Array(np.arange(650.0)), "first": Array(np.ones(650))}
    reply = RecordDict({**full_reply(), "vectors": ArrayRecord(two)})
    link.app = lambda message, context: Message(reply, reply_to=message)
    number, other = link.grid.push_messages(
        [
            Message(RecordDict({"n": MetricRecord({"i": i})}), BAD, "train.steps", group_id="1", ttl=60.0)
            for i in range(2)
        ]
    )
    expected = Expected({"model": 5200, "first": 5200})
    (arrival,) = Uploads(link.grid, 60.0).collect({number: expected}, time.monotonic() + 60)
    assert arrival.fault == "one of its arrays consists of other objects than chunks"
    (message,) = link.grid.pull_messages([other])  # Flower's own way
    assert max(len(array.data) for array in message.content["vectors"].values()) == 50 * (5200 + 128)


def test_the_reason_of_a_client_reaches_the_history_without_what_a_terminal_obeys(tmp_path):
    def fail(reply):
        return Message(metadata=reply.metadata, error=Error(code=2, reason="\x1b]0;mine\x07\n\u202eend"))

    run, _ = federation(tmp_path, {"spoil": fail})
    assert run.history[1]["events"] == ["client 1: \\x1b]0;mine\\x07 \\u202eend"]


def test_mutated_replies_are_dropped_or_mean_what_an_honest_one_might():
    """`make attack` receives 100,000 of them. Every batch holds an honest reply, which must arrive unchanged."""
    tally = mutated_replies.Trial(seed=0).run(700)
    assert tally.faults == []
    assert tally.tried >= 700
    assert 10 < tally.accepted < 250
    assert tally.longest_event < 500
    assert tally.largest_array <= 5200 + 1024  # of those that were asked for, 5200 bytes and a header
    assert tally.slowest < 1
    assert mutated_replies.peak_memory() - tally.memory < 64 * 2**20


HOSTILE = """
import json

import numpy as np
from fedagrac.flower import client_app
from flwr.app import Array, ArrayRecord
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

from federation import task


def hostile(message, context, call_next):
    reply, round = call_next(message, context), int(message.metadata.group_id)
    if message.metadata.message_type != "train.steps" or context.node_config["partition-id"] != 1:
        return reply
    if round == 1:
        Array.deflate = lambda self: add_header_to_object_body(b"{", self)
    if round == 2:
        reply.content["vectors"] = ArrayRecord({str(i): Array(np.array([float(i)])) for i in range(2000)})
    if round == 3:
        told = {"dtype": "float32", "shape": [650], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 10_000}
        Array.deflate = lambda self: add_header_to_object_body(json.dumps(told).encode(), self)
    return reply


app = client_app(task.model, task.data, mods=[hostile])
"""


class AllBut1(fg.Participation):
    """Clients 0 and 2 take part."""

    def number(self, clients):
        return 2

    def draw(self, round, weights, seed):
        return np.array([0, 2]), np.ones(2, np.int64)


def test_processes_that_attack_are_dropped_and_the_others_have_the_numbers_of_a_simulation(tmp_path, monkeypatch):
    """In each of three rounds a node attacks in another way. Every round ends long before its time is over."""
    monkeypatch.setattr(flower_processes, "CLIENT", HOSTILE)
    with flower_processes.Loopback(tmp_path / "loopback", nodes=3) as loopback:
        for i in range(3):
            samples = FED.samples_of(i)
            stored = {"inputs": FED.inputs[samples].numpy(), "targets": FED.targets[samples].numpy()}
            np.savez(loopback.folder / f"{i}.npz", **stored)
        loopback.start_link()
        for i in range(3):
            loopback.start_node(i)
        steps = {"kind": "explicit", "table": json.dumps([K])}
        options = {"rounds": 3, "min_clients": 2, "round_seconds": 600.0, "upload_seconds": 120.0}
        loopback.run("attacked", algorithm={"name": "fedavg", "lr": 0.1}, steps=steps, **options)
        loopback.wait("attacked")
        history = loopback.history("attacked")
        final = load_file(loopback.folder / "attacked" / "model.safetensors")
    assert [record["dropped"] for record in history] == [[1], [1], [1]]
    first, second, third = (record["events"] for record in history)
    assert first[0].startswith("client 1: reply dropped, it cannot be read (JSONDecodeError")
    assert second == ["client 1: reply dropped, it has more than 7 objects"]
    assert re.fullmatch(
        r"client 1: reply dropped, one of its arrays has \d+ bytes, expected at most 3624", third[0]
    )
    assert history[-1]["wall_time"] < 600
    net = model(None)
    options = {"steps": fg.Explicit([K]), "batch_size": 10, "engine": "serial", "participation": AllBut1(2)}
    expected = fg.simulate(net, FED, fg.FedAvg(lr=0.1), 3, **options)
    for key, value in final.items():
        torch.testing.assert_close(value, expected.params[key], atol=1e-6, rtol=0)
