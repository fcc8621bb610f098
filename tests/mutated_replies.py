"""Real replies of clients, damaged in many ways, through the server's real way of receiving them.

A node uploads objects: a head with the kind, the children and the length, a zero byte, and a body. `Damage` takes
the objects of a real reply apart, changes them, and puts them together with heads and names that fit, so that a
SuperLink would accept them; some are then broken again. `Trial` hands them to `Link` over Flower's HTTP client,
many beside one honest reply, and checks what comes out. `test_replies.py` and `benchmarks/attack` share it.
"""

import copy
import hashlib
import io
import json
import pickle
import random
import re
import resource
import time
from collections import Counter
from dataclasses import dataclass, field

import httpx
import numpy as np
import torch
from flwr.app import Array, ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import ConfirmMessageReceivedResponse, PullObjectRequest, PullObjectResponse
from flwr.proto.runtime_pb2 import PullAppMessagesRequest, PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid import HttpGrid

import fedagrac as fg
from fedagrac.core.cohort import Cohort
from fedagrac.core.local import Plan
from fedagrac.errors import FedagracError
from fedagrac.flower.fleet import FlowerFleet
from fedagrac.flower.link import Link
from fedagrac.flower.server import initial_model
from fedagrac.flower.settings import Settings
from fedagrac.flower.wire import Parcel, fingerprint, pack

D = 650
STEPS = 5
BATCH = 17
"""Nodes of one trial: an honest one and mutated ones."""

TREES = PullAppMessagesResponse.DESCRIPTOR.fields_by_name["message_object_trees"].number
"""The field of an announcement that holds the names of objects."""

OBEYED = re.compile("[\x00-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
"""Characters that a terminal obeys; no event may hold one."""

TEXTS = [
    "", "model", "x" * 300, "x" * 70_000, "\x1b]0;pwned\x07", "\u202egva\u2066", "\r\n[red]", "\x00", "a\x9b2J",
    "\U0001f600" * 40, "../../etc/passwd", "__class__", "nan", "0", "-1", "1e999", "[" * 300,
]  # fmt: skip
NUMBERS = [
    0, -1, 1, 2**31, 2**62, -(2**62), 2**63 - 1, -(2**63), 1e30, -1e300, float("nan"), float("inf"), float("-inf"),
    1e-320, 0.5, True, False,
]  # fmt: skip
DTYPES = ["<f4", "<f8", "<f2", ">f8", "<i8", "<u1", "|b1", "<c16", "<f16", "|O", "|S8", "<U4", "<M8[s]", "V8"]
KINDS = [
    "Message", "RecordDict", "ConfigRecord", "MetricRecord", "ArrayRecord", "Array", "ArrayChunk", "", "os",
]  # fmt: skip


def name_of(content):
    """Return the name under which the SuperLink stores an object."""
    return hashlib.sha256(content).hexdigest()


@dataclass
class Piece:
    """One object of a reply, taken apart."""

    kind: str
    body: bytes
    children: list = field(default_factory=list)
    old_name: str = ""

    @classmethod
    def of(cls, name, objects):
        """Take an object and its descendants apart."""
        head, _, body = objects[name].deflate().partition(b"\0")
        kind, children, _ = head.decode().split(" ")
        return cls(kind, body, [cls.of(child, objects) for child in children.split(",") if child], name)

    def every(self):
        """Return this object and all its descendants."""
        return [self, *(one for child in self.children for one in child.every())]

    def put_together(self, contents):
        """Write the object and its descendants to `contents`, under names that fit. Return the tree."""
        trees, body = [], self.body
        for child in self.children:
            trees.append(child.put_together(contents))
            body = body.replace(child.old_name.encode() or b"\0\0", trees[-1].name.encode())
        names = ",".join(tree.name for tree in trees)
        content = f"{self.kind} {names} {len(body)}".encode() + b"\0" + body
        contents[name_of(content)] = content
        return Tree(name_of(content), trees)


@dataclass
class Tree:
    """The names of an object and its descendants. Protobuf's own class refuses to write more than 100 levels."""

    name: str
    children: list

    def bytes(self):
        """Return the tree as an `ObjectTree` of Flower in protobuf."""
        inner = b"".join(framed(2, child.bytes()) for child in self.children)
        return framed(1, self.name.encode()) + inner


def framed(number, content):
    """Return a field of protobuf."""
    size, length = len(content), b""
    while size >= 128:
        length, size = length + bytes([size % 128 + 128]), size // 128
    return bytes([8 * number + 2]) + length + bytes([size]) + content


def announcement(messages, trees):
    """Return the bytes of a `PullAppMessagesResponse`."""
    head = PullAppMessagesResponse(messages_list=messages).SerializeToString()
    return head + b"".join(framed(TREES, tree.bytes()) for tree in trees)


def npy(array, dtype=None, shape=None, order=False):
    """Return an array as a .npy file whose header may say something else."""
    file = io.BytesIO()
    described = {"descr": dtype or array.dtype.str, "fortran_order": order, "shape": shape or array.shape}
    text = repr(described).encode() + b"\n"
    file.write(b"\x93NUMPY\x01\x00" + len(text).to_bytes(2, "little") + text + array.tobytes())
    return file.getvalue()


@dataclass
class Sent:
    """What the SuperLink hands to the server for one message.

    Attributes:
        tree: the objects of the reply.
        contents: their bytes by name.
        announced: the message without its content, in protobuf.
        missing: objects that are listed but not uploaded.
        gone: objects that the SuperLink no longer has.
        endless: an object that never ends.
        answer: bytes that replace the announcement.
    """

    tree: Tree
    contents: dict
    announced: object
    missing: set = field(default_factory=set)
    gone: set = field(default_factory=set)
    endless: str = ""
    answer: bytes | None = None


class Damage:
    """Changes replies at random; the same seed makes the same changes."""

    def __init__(self, seed):
        self.rng = random.Random(seed)

    def __call__(self, root, announced):
        """Return the bytes of a changed reply, and what was done to it."""
        root, told = copy.deepcopy(root), []
        for _ in range(self.rng.choice((1, 1, 1, 2, 3))):
            way = self.rng.choice(PIECE_WAYS)
            told.append(way.__name__)
            way(self, root)
        sent = assembled(root, announced)
        if self.rng.random() < 0.25:
            way = self.rng.choice(SENT_WAYS)
            told.append(way.__name__)
            way(self, sent)
        return sent, told

    def one(self, root, kind=None):
        """Return one of the objects, of a kind if there is one."""
        every = root.every()
        return self.rng.choice([piece for piece in every if piece.kind == kind] or every)

    def value(self):
        """Return a value that JSON can write and nobody expects."""
        rng = self.rng
        return rng.choice([
            rng.choice(TEXTS), rng.choice(NUMBERS), None, [], {}, [0] * rng.randrange(3000), [[[]]],
            {rng.choice(TEXTS)[:300]: rng.choice(NUMBERS)}, [-1], ["0"], [0.0], [10**30], 10**rng.randrange(400),
        ])  # fmt: skip

    # changes of objects whose heads and names fit afterwards

    def bytes_of_a_body(self, root):
        piece = self.one(root, self.rng.choice(KINDS))
        piece.body = self.spoiled(piece.body)

    def spoiled(self, body):
        """Flip, cut, insert and repeat bytes."""
        rng, body = self.rng, bytearray(body)
        for _ in range(rng.choice((1, 1, 2, 8))):
            at = rng.randrange(len(body) + 1)
            way = rng.randrange(6)
            if way == 0 and at < len(body):
                body[at] ^= 1 << rng.randrange(8)
            elif way == 1:
                del body[at:]
            elif way == 2:
                del body[at : at + rng.randint(1, 16)]
            elif way == 3:
                body[at:at] = rng.choice(
                    [b"\xff", b"9" * 30, b"[", b'"', b"\0", b"\xed\xa0\x80", rng.randbytes(8)]
                )
            elif way == 4:
                body[at:at] = bytes(body[: rng.randint(0, 2000)])
            else:
                body[at : at + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 4))
        return bytes(body)

    def table_of_an_object(self, root):
        piece = self.one(root, self.rng.choice(["RecordDict", "ArrayRecord", "Array"]))
        try:
            table = json.loads(piece.body)
        except (ValueError, RecursionError):
            return
        if not isinstance(table, dict):
            return
        key = self.rng.choice([*table, self.rng.choice(TEXTS)])
        way = self.rng.randrange(4)
        if way == 0:
            table.pop(key, None)
        elif way == 1 and table:
            table[self.rng.choice(TEXTS)] = table[self.rng.choice([*table])]
        elif way == 2 and table:
            values = list(table.values())
            self.rng.shuffle(values)
            table = dict(zip(table, values, strict=True))
        else:
            table[key] = self.value()
        piece.body = json.dumps(table).encode()

    def nested_table(self, root):
        piece = self.one(root, self.rng.choice(["RecordDict", "ArrayRecord", "Array"]))
        opening = self.rng.choice([b"[", b'{"a":', b'[{"shape":'])
        piece.body = opening * self.rng.choice((5, 900, 10_000, 20_000))

    def repeated_key(self, root):
        piece = self.one(root, self.rng.choice(["RecordDict", "ArrayRecord", "Array"]))
        piece.body = piece.body[:-1] + b"," + piece.body[1:]

    def facts(self, root):
        piece, rng = self.one(root, "ConfigRecord"), self.rng
        record = ConfigRecord({"client": 1, "round": 0, "steps": STEPS, "loss": 1.0, "samples": 100})
        name = rng.choice([*record, "model", "buffers", "parameters", "dtype", rng.choice(TEXTS)])
        value = rng.choice(
            [rng.choice(TEXTS), rng.choice(NUMBERS), [1, 2], [], [1.5], ["a"], b"\x80\x04.", [True]]
        )
        if rng.random() < 0.2:
            record.pop(name, None)
        elif rng.random() < 0.1:
            for i in range(rng.choice((13, 40, 900))):
                record[f"{i}"] = i
        else:
            record[name] = value
        piece.body = record.deflate().partition(b"\0")[2]

    def numbers(self, root):
        """Put other numbers into a vector, or other claims about them into its header."""
        rng, array = self.rng, np.arange(D, dtype=self.rng.choice(["<f4", "<f8"]))
        piece, way = self.one(root, "ArrayChunk"), rng.randrange(8)
        shapes = [(D,), (1, D), (D - 1,), (2**40,), (-1,), (-D, -1), (0,), (), (D, True), (10**400,), (1.5,)]
        if way < 3:
            array[rng.randrange(D)] = rng.choice([np.nan, np.inf, -np.inf, 1e30, 3e38, 1e-40])
            piece.body = npy(array)
        elif way == 3:
            piece.body = npy(array, dtype=rng.choice(DTYPES))
        elif way == 4:
            piece.body = npy(array, shape=rng.choice(shapes), order=rng.choice([True, False, 2, "x"]))
        elif way == 5:
            piece.body = npy(array[: rng.randrange(D)])
        elif way == 6:
            file = io.BytesIO()
            np.save(file, np.array([{"a": 1}] * D, object), allow_pickle=True)
            piece.body = rng.choice([file.getvalue(), pickle.dumps({"x": 1}), b"\x93NUMPY\x09\x00" + bytes(700)])
        else:
            piece.body = b"\x93NUMPY\x01\x00\xff\xff" + repr(rng.choice(shapes)).encode().ljust(65_535)

    def another_kind(self, root):
        self.one(root, self.rng.choice(KINDS)).kind = self.rng.choice(KINDS)

    def children(self, root):
        """Leave out, repeat, exchange or add children."""
        rng, piece = self.rng, self.one(root)
        way = rng.randrange(5)
        if way == 0 and piece.children:
            piece.children.pop(rng.randrange(len(piece.children)))
        elif way == 1 and piece.children:
            piece.children.append(rng.choice(piece.children))
        elif way == 2:
            piece.children.append(copy.deepcopy(self.one(root, rng.choice(KINDS))))
        elif way == 3 and len(piece.children) > 1:
            piece.children.reverse()
        else:
            stranger = Piece(rng.choice(KINDS), rng.randbytes(rng.choice((0, 10, 5000))))
            piece.children.insert(0, stranger)

    def repeated_chunk(self, root):
        """Name one chunk many times."""
        piece = self.one(root, "Array")
        times = self.rng.choice((2, 3, 100, 20_000, 60_000))
        told = {"dtype": "float64", "shape": [D], "stype": "numpy.ndarray", "arraychunk_ids": [0] * times}
        piece.body = json.dumps(told, separators=(",", ":")).encode()

    def array_of_arrays(self, root):
        """Let an array name another array, which inflates to many bytes, in place of chunks."""
        arrays = [piece for piece in root.every() if piece.kind == "Array"]
        if arrays:
            inner, piece = copy.deepcopy(arrays[0]), arrays[-1]
            piece.children, times = [inner], self.rng.choice((1, 2, 50, 30_000))
            told = {"dtype": "float64", "shape": [D], "stype": "numpy.ndarray", "arraychunk_ids": [0] * times}
            piece.body = json.dumps(told, separators=(",", ":")).encode()

    def many_objects(self, root):
        piece = self.one(root, self.rng.choice(["Array", "ArrayRecord", "RecordDict"]))
        for i in range(self.rng.choice((4, 30, 300))):
            piece.children.append(Piece(self.rng.choice(["ArrayChunk", "Array"]), b"%d" % i))

    def deep_tree(self, root):
        piece = self.one(root)
        for _ in range(self.rng.choice((3, 50, 150))):
            piece.children.append(Piece(piece.kind, b"{}"))
            piece = piece.children[-1]

    def large_object(self, root):
        piece = self.one(root, self.rng.choice(KINDS))
        piece.body += self.rng.choice([b" ", b"\0", b"9"]) * self.rng.choice((1000, 70_000, 300_000))

    def message_of_the_node(self, root):
        """Change what the reply says about itself."""
        error = self.rng.random() < 0.5
        answer = Message(RecordDict(), dst_node_id=1, message_type="train.steps")
        message = Message(
            Error(code=self.rng.choice((0, -1, 2**40)), reason=self.rng.choice(TEXTS)), reply_to=answer
        )
        proto = message_to_proto(message if error else answer)
        proto.metadata.ttl = self.rng.choice((-1.0, float("nan"), float("inf"), 1e300))
        proto.metadata.created_at = self.rng.choice((-1.0, float("nan"), 0.0, 1e300))
        root.body = proto.SerializeToString()

    # changes after that, which a SuperLink would not make

    def wrong_content(self, sent):
        """Put another object's bytes under a name."""
        name = self.rng.choice(list(sent.contents))
        sent.contents[name] = self.rng.choice(list(sent.contents.values()))

    def broken_head(self, sent):
        name = self.rng.choice(list(sent.contents))
        head, _, body = sent.contents[name].partition(b"\0")
        other = self.rng.choice([
            b"", b"Array", b"Array  ", b" " * 9, self.spoiled(head), head.replace(b" ", b"\0"), b"\xff " + head,
            head + b"9" * 40, b"Array " + b"," * 9 + b" 3", b"Array -1 -1", b"A" * 80_000,
        ])  # fmt: skip
        sent.contents[name] = other + self.rng.choice([b"\0", b""]) + body

    def circle(self, sent):
        """Let an object name itself, or the message, as its child."""
        name = self.rng.choice(list(sent.contents))
        kind, _, size = sent.contents[name].partition(b"\0")[0].split(b" ")[:3]
        child = self.rng.choice([name, sent.tree.name]).encode()
        sent.contents[name] = b" ".join([kind, child, size]) + b"\0" + sent.contents[name].partition(b"\0")[2]

    def not_uploaded(self, sent):
        sent.missing.add(self.rng.choice(list(sent.contents)))

    def deleted(self, sent):
        sent.gone.add(self.rng.choice(list(sent.contents)))

    def not_listed(self, sent):
        tree = sent.tree
        while tree.children and self.rng.random() < 0.7:
            tree = self.rng.choice(tree.children)
        del tree.children[:]

    def never_ends(self, sent):
        sent.endless = self.rng.choice(list(sent.contents))

    def error(self, sent):
        sent.announced.error.code = self.rng.choice((0, 2, -1))
        sent.announced.error.reason = self.rng.choice(TEXTS)

    def broken_announcement(self, sent):
        sent.answer = self.spoiled(announcement([sent.announced], [sent.tree]))

    def unequal_announcement(self, sent):
        lists = [[sent.announced], [sent.announced] * 2, []], [[sent.tree], [sent.tree] * 2, []]
        messages, trees = (self.rng.choice(one) for one in lists)
        sent.answer = announcement(messages, trees)


PIECE_WAYS = [
    Damage.bytes_of_a_body, Damage.bytes_of_a_body, Damage.table_of_an_object, Damage.table_of_an_object,
    Damage.nested_table, Damage.repeated_key, Damage.facts, Damage.facts, Damage.numbers, Damage.numbers,
    Damage.another_kind, Damage.children, Damage.repeated_chunk, Damage.array_of_arrays, Damage.many_objects,
    Damage.deep_tree, Damage.large_object, Damage.message_of_the_node,
]  # fmt: skip
SENT_WAYS = [
    Damage.wrong_content, Damage.broken_head, Damage.circle, Damage.not_uploaded, Damage.deleted,
    Damage.not_listed, Damage.never_ends, Damage.error, Damage.broken_announcement, Damage.unequal_announcement,
]  # fmt: skip


def assembled(root, announced):
    """Return a reply as the SuperLink would hand it over."""
    contents, message = {}, type(announced)()
    message.CopyFrom(announced)
    tree = root.put_together(contents)
    message.metadata.message_id = tree.name
    return Sent(tree, contents, message)


class Endless(httpx.SyncByteStream):
    """An object of 2 GB that is made while it is read."""

    def __iter__(self):
        size = 2**31
        yield b"\x1a" + bytes([0x80, 0x80, 0x80, 0x80, 0x08])  # field 3 of PullObjectResponse, 2^31 bytes
        for _ in range(size // 2**16):
            yield bytes(2**16)


class Wire(HttpGrid):
    """Flower's grid, whose SuperLink answers with prepared replies."""

    def __init__(self):
        super().__init__(token="t")
        self.set_run(Run.create_empty(1))
        client = RuntimeHttpClient("http://superlink")
        client._client.close()
        client._client = httpx.Client(transport=httpx.MockTransport(self.answer))
        self._client = client
        self.nodes, self.number = [10 + i for i in range(BATCH)], 0
        self.forget()

    def forget(self):
        """Begin without replies."""
        self.replies, self.prepared, self.announced = {}, {}, {}

    def push_messages(self, messages):
        """Note a prepared reply under the number of each message."""
        numbers = []
        for message in messages:
            self.number += 1
            numbers.append(f"{self.number:064x}")
            self.replies[numbers[-1]] = self.prepared[message.metadata.dst_node_id]
        return numbers

    def get_node_ids(self):
        """Return all nodes."""
        return list(self.nodes)

    def answer(self, request):
        """Answer a request of the server."""
        path, data = request.url.path.rsplit("/", 1)[1], request.read()
        if path == "pull-messages":
            (number,) = PullAppMessagesRequest.FromString(data).message_ids
            return self.bytes(self.announcement(number))
        if path == "pull-object":
            return self.pulled(PullObjectRequest.FromString(data).object_id)
        return self.bytes(ConfirmMessageReceivedResponse().SerializeToString())

    @staticmethod
    def bytes(content):
        return httpx.Response(200, stream=httpx.ByteStream(content))

    def announcement(self, number):
        sent = self.replies.pop(number, None)
        if sent is None:
            return b""
        self.announced |= dict.fromkeys(sent.contents, sent)
        if sent.answer is not None:
            return sent.answer
        sent.announced.metadata.reply_to_message_id = number
        return announcement([sent.announced], [sent.tree])

    def pulled(self, name):
        sent = self.announced.get(name)
        if sent is None or name in sent.gone:
            return self.bytes(PullObjectResponse(object_found=False).SerializeToString())
        if name == sent.endless:
            return httpx.Response(200, stream=Endless())
        there = name not in sent.missing
        content = sent.contents[name] if there else b""
        answer = PullObjectResponse(object_found=True, object_available=there, object_content=content)
        return self.bytes(answer.SerializeToString())


@dataclass
class Tally:
    """What came of the replies so far.

    Attributes:
        tried: mutated replies.
        accepted: those that the server used.
        ways: what was done to them, counted.
        faults: promises that were broken, in words.
        events: events that were noted.
        longest_event: characters of the longest of them.
        slowest: CPU seconds of the slowest batch, for each of its replies.
        largest_array: bytes of the largest array that was inflated.
        memory: the largest resident memory of this process, in bytes, after the first batches.
    """

    tried: int = 0
    accepted: int = 0
    ways: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)
    events: int = 0
    longest_event: int = 0
    slowest: float = 0.0
    largest_array: int = 0
    memory: int = 0


class Trial:
    """A server that receives mutated replies beside an honest one."""

    def __init__(self, seed):
        for name in ("_run_id", "_node_id", "_task_id"):  # messages are made inside a task
            setattr(TaskIdentity, name, 1)
        self.damage, self.tally, self.wire, self.made = Damage(seed), Tally(), Wire(), {}
        self.dtype = torch.float64
        settings = {
            "clients": BATCH, "min_clients": 1, "batch_size": 10, "dtype": "float64", "round_seconds": 0.05,
            "upload_seconds": 0.02, "poll_seconds": 0.002, "algorithm.name": "fedagrac", "algorithm.lr": 0.1,
        }  # fmt: skip
        self.settings = Settings.of(settings)
        net = fg.models.build("logistic", features=64, classes=10)
        self.model = initial_model(self.settings, lambda _: net, None)
        rows = np.arange(BATCH)
        self.cohort = Cohort(
            0, rows, STEPS + 0 * rows, [100] * BATCH, np.full(BATCH, 1 / BATCH), rows + 1, True, lambda *_: None
        )

    def link(self, started):
        """Return a server's link without a past."""
        link = Link(self.wire, self.model, self.settings, self.model.initial())
        link.started = started
        return link

    def honest(self, kind, client):
        """Return what a real client answers."""
        generator = torch.Generator().manual_seed(client)
        vectors = {"train.steps": ["model", "first"], "query.gradient": ["gradient"], "query.hello": ["gradient"]}
        facts = {"client": client, "round": 0}
        if kind == "train.steps":
            facts |= {"steps": STEPS, "loss": 1.0}
        if kind == "query.hello":
            facts = {
                "client": client, "samples": 100, "model": fingerprint(self.model), "parameters": D,
                "dtype": "torch.float64", "buffers": "",
            }  # fmt: skip
        made = {name: torch.randn(D, generator=generator, dtype=self.dtype) for name in vectors[kind]}
        return Parcel(facts, made)

    def as_objects(self, kind, client):
        """Return an honest reply taken apart, and its announcement; made once."""
        if (kind, client) not in self.made:
            ask = Message(RecordDict(), dst_node_id=10 + client, message_type=kind, group_id="1", ttl=60.0)
            ask.metadata.__dict__["_message_id"] = f"{client:064x}"
            message = Message(pack(self.honest(kind, client)), reply_to=ask)
            root = Piece.of(message.object_id, get_all_nested_objects(message))
            self.made[kind, client] = root, message_to_proto(remove_content_from_message(message))
        return self.made[kind, client]

    def prepare(self, kind):
        """Give every node a reply, the first an honest one. Return what was done to the others."""
        self.wire.forget()
        self.wire.prepared[10] = assembled(*self.as_objects(kind, 0))
        done = []
        for client in range(1, BATCH):
            self.wire.prepared[10 + client], told = self.damage(*self.as_objects(kind, client))
            done.append((client, told))
        return done

    def batch(self):
        """Receive one batch of replies, and note what is wrong with the outcome."""
        kind = self.damage.rng.choice(["train.steps", "train.steps", "query.gradient", "query.hello"])
        link = self.link(started=kind != "query.hello" or self.damage.rng.random() < 0.5)
        done = self.prepare(kind)
        begun = time.thread_time()
        try:
            used = getattr(self, kind.replace(".", "_"))(link)
        except Exception as error:
            self.tally.faults.append(f"{kind}: {type(error).__name__} escaped: {error!s:.300} after {done}")
            used = set()
        self.tally.slowest = max(self.tally.slowest, (time.thread_time() - begun) / BATCH)
        self.tally.tried += len(done)
        self.tally.accepted += len(used - {0})
        self.tally.ways.update(way for _, ways in done for way in ways)
        self.check_events(link.take_events())

    def check_events(self, events):
        """Check what the server says of the replies."""
        for event in events:
            self.tally.events += 1
            self.tally.longest_event = max(self.tally.longest_event, len(event))
            if OBEYED.search(event):
                self.tally.faults.append(f"an event that a terminal obeys: {event!r:.300}")

    def train_steps(self, link):
        """Ask for models; return the clients whose replies are used."""
        link.nodes = {i: 10 + i for i in range(BATCH)}
        fleet = FlowerFleet(self.settings, self.model, link)
        plan = Plan.of([STEPS] * BATCH, lr=0.1, first_steps=1)
        asks = {i: Parcel({"round": 0}) for i in range(BATCH)}
        vectors = {i: {"model": D, "first": D} for i in range(BATCH)}
        replies = link.exchange("train.steps", asks, 0, vectors)
        good = fleet.checked(replies, self.cohort, plan, lambda row: (STEPS, STEPS))
        for client, reply in good.items():
            self.check(client, reply.vectors, {"model", "first"}, dict(reply.facts))
        self.check_honest(good.get(0), "train.steps")
        return set(good)

    def query_gradient(self, link):
        """Ask for gradients; return the clients whose replies are used."""
        link.nodes = {i: 10 + i for i in range(BATCH)}
        asks = {i: Parcel({"round": 0}) for i in range(BATCH)}
        replies = link.exchange("query.gradient", asks, 0, {i: {"gradient": D} for i in range(BATCH)})
        used = set()
        for client, reply in replies.items():
            try:
                reply.integer("round", 0, 0)
                reply.integer("client", client, client)
                reply.vector("gradient", D, self.dtype)
            except FedagracError:
                continue
            self.check(client, reply.vectors, {"gradient"}, {**reply.facts, "steps": STEPS, "loss": 1.0})
            used.add(client)
        self.check_honest(replies.get(0), "query.gradient")
        return used

    def query_hello(self, link):
        """Greet nodes; return the clients that are connected afterwards."""
        try:
            link.roll_call(0)
            time.sleep(0.03)
            link.roll_call(0)
        except FedagracError:  # before round 1 a wrong node ends the start with a line that names it
            if link.started:
                raise
        for client, samples in link.sizes.items():
            if type(client) is not int or client not in range(BATCH) or not 1 <= samples <= 10**9:
                self.tally.faults.append(f"client {client} with {samples} samples")
        for client, gradient in link.gradients.items():
            self.check(client, {"gradient": gradient}, {"gradient"}, None)
        return set(link.nodes)

    def check(self, client, vectors, names, facts):
        """Check that a reply which is used is one that an honest client might have sent."""
        wrong = list(names ^ set(vectors))
        for name, vector in vectors.items():
            values = vector.numpy()
            if values.shape != (D,) or values.dtype != np.float64 or not np.isfinite(values).all():
                wrong.append(name)
        if facts is not None:
            known = {"client": client, "round": 0, "steps": STEPS}
            wrong += [
                name for name, value in known.items() if type(facts[name]) is not int or facts[name] != value
            ]
            if not np.isfinite(float(facts["loss"])):
                wrong.append("loss")
        if wrong:
            self.tally.faults.append(f"client {client} is used with wrong {wrong}: {facts}")

    def check_honest(self, reply, kind):
        """Check that the honest reply arrived as it was sent."""
        sent = self.honest(kind, 0)
        if reply is None or any(not torch.equal(reply.vectors[name], v) for name, v in sent.vectors.items()):
            self.tally.faults.append(f"the honest reply to {kind} was lost")

    def run(self, replies, progress=lambda tally: None):
        """Receive this many mutated replies. Return the tally."""
        inflate = Array.inflate.__func__

        def watched(cls, content, children=None):
            array = inflate(cls, content, children)
            self.tally.largest_array = max(self.tally.largest_array, len(array.data))
            return array

        Array.inflate = classmethod(watched)
        try:
            while self.tally.tried < replies:
                self.batch()
                if self.tally.tried <= 50 * BATCH:
                    self.tally.memory = peak_memory()
                progress(self.tally)
        finally:
            Array.inflate = classmethod(inflate)
        return self.tally


def peak_memory():
    """Return the largest resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
