"""A Flower grid in memory: nodes with real ClientApps in this process, whose replies may be spoilt or lost."""

import json

import torch
from flwr.app import Array, Context, Error, Message, RecordDict

import fedagrac as fg
from fedagrac.flower import client_app
from fedagrac.flower.server import initial_model, run_federation
from fedagrac.flower.settings import Settings

K = [3, 5, 12]
FED = fg.Federation.load("digits", clients=3, partition=fg.Dirichlet(0.5), seed=0)


def model(context):
    return fg.models.build("logistic", features=64, classes=10)


def data(context):
    samples = FED.samples_of(context.node_config["partition-id"])
    return FED.inputs[samples], FED.targets[samples]


def config(tmp_path, **changes):
    settings = {
        "clients": 3,
        "rounds": 3,
        "batch_size": 10,
        "dtype": "float64",
        "round_seconds": 0.3,
        "wait_seconds": 0.3,
        "poll_seconds": 0.01,
        "out": str(tmp_path / "run"),
        "algorithm.name": "fedagrac",
        "algorithm.lr": 0.1,
        "steps.kind": "explicit",
        "steps.table": json.dumps([K]),
    }
    given = {key.replace("__", "."): value for key, value in changes.items()}
    if given.get("steps.kind") == "client":
        del settings["steps.table"]
    return {**settings, **given}


class Node:
    """A node of the in-memory grid, with a real ClientApp in this process."""

    def __init__(self, run_config, partition, model=model, data=data, **node_config):
        self.app = client_app(model, data)
        self.context = Context(1, 0, {"partition-id": partition, **node_config}, RecordDict(), run_config)

    def __call__(self, message):
        try:
            return self.app(message, self.context)
        except Exception as error:
            return Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)


class StandIn:
    """Flower's Grid in memory. Replies of nodes may be spoilt, delayed or lost."""

    def __init__(self, nodes, spoil=None):
        self.nodes, self.spoil = dict(nodes), spoil or (lambda node, kind, round, reply: reply)
        self.waiting, self.sent = {}, []

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            number = f"m{len(self.sent)}"
            message.metadata.__dict__["_message_id"] = number
            self.sent.append((message.metadata.dst_node_id, message.metadata.message_type))
            self.waiting[number] = message
            yield number

    def pull_messages(self, numbers):
        for number in [n for n in numbers if n in self.waiting]:
            message = self.waiting[number]
            node = message.metadata.dst_node_id
            if node not in self.nodes:
                continue
            reply = self.nodes[node](message)
            if not reply.has_error():
                round = int(message.metadata.group_id)
                reply = self.spoil(node, message.metadata.message_type, round, reply)
            if reply is not None:
                del self.waiting[number]
                yield reply


def federation(settings, spoil=None, model=model, **node_configs):
    nodes = {10 + i: Node(settings, i, model, **{k: v[i] for k, v in node_configs.items()}) for i in range(3)}
    return StandIn(nodes, spoil)


def flower(settings, grid, test=None, model=model, **options):
    checked = Settings.of(settings)
    return run_federation(grid, checked, initial_model(checked, model, None), test, **options)


def simulated(algorithm, rounds=3, federation=FED, steps=K, dtype=torch.float64, model=model):
    return fg.simulate(
        model(None).to(dtype),
        federation,
        algorithm,
        rounds,
        steps=fg.Explicit([steps]),
        batch_size=10,
        engine="serial",
    )


def close(a, b, tolerance=1e-12):
    return float((a - b).abs().max()) <= tolerance * max(1.0, float(b.abs().max()))


def vector(record, name, change):
    record["vectors"][name] = Array(change(record["vectors"][name].numpy()))
