"""A partition belongs to the node that holds its key."""

import base64
import hashlib
import tomllib
from types import SimpleNamespace

import pytest

import fedagrac as fg

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from cryptography.hazmat.primitives.asymmetric import ed25519, rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import Context, Error, Message, RecordDict

from fedagrac.flower import client_app
from fedagrac.flower.identity import Greeting, KeyHolders, key_fingerprint, sign
from fedagrac.flower.keys import write_keys
from fedagrac.flower.link import Link
from fedagrac.flower.server import initial_model
from fedagrac.flower.settings import Settings
from fedagrac.flower.wire import BadReplyError, Parcel

NONCE = "0123456789abcdef" * 4


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    return write_keys(tmp_path_factory.mktemp("made") / "keys", nodes=3)


@pytest.fixture(autouse=True)
def _a_task(monkeypatch):
    """Enter a Flower task, inside which messages must be made."""
    from flwr.supercore.task_identity import TaskIdentity

    for name, value in (("_run_id", 1), ("_node_id", 1), ("_task_id", 1)):
        monkeypatch.setattr(TaskIdentity, name, value)


def config_of(keys, partitions=2):
    table = tomllib.loads((keys / "keys.toml").read_text())["tool"]["flwr"]["app"]["config"]["keys"]
    bound = {f"keys.{i}": table[str(i)] for i in range(partitions)}
    return {"clients": partitions, "algorithm.name": "fedavg", "algorithm.lr": 0.1, "poll_seconds": 0.01, **bound}


def model(context):
    return fg.models.build("logistic", features=64, classes=10)


def data(context):
    digits = fg.Federation.load("digits", clients=2)
    samples = digits.samples_of(context.node_config["partition-id"])
    return digits.inputs[samples], digits.targets[samples]


class Grid:
    """Flower's Grid in memory, with real ClientApps. `nodes` holds the run, the partition and the key of each."""

    def __init__(self, config, nodes, mods=(), tamper=lambda node, reply: reply):
        self.run, self.nodes, self.tamper = SimpleNamespace(run_id=1), nodes, tamper
        self.app, self.config, self.waiting = client_app(model, data, mods=mods), config, {}

    def get_node_ids(self):
        return list(self.nodes)

    def push_messages(self, messages):
        for message in messages:
            number = f"m{len(self.waiting)}"
            message.metadata.__dict__["_message_id"] = number
            self.waiting[number] = message
            yield number

    def pull_messages(self, numbers):
        for number in numbers:
            message = self.waiting[number]
            node = message.metadata.dst_node_id
            run, partition, key = self.nodes[node]
            node_config = {"partition-id": partition, **({} if key is None else {"key": str(key)})}
            try:
                reply = self.app(message, Context(run, node, node_config, RecordDict(), self.config))
                yield self.tamper(node, reply)
            except Exception as error:
                yield Message(Error(code=2, reason=f"{type(error)}:<'{error}'>"), reply_to=message)


def greeted(config, grid):
    """Return the link of a server after one greeting of every node."""
    settings = Settings.of(config)
    link = Link(grid, initial_model(settings, model, None), settings)
    link.roll_call(0)
    return link


def test_each_partition_goes_to_the_node_that_holds_its_key(keys):
    config = config_of(keys)
    strangers = {8: (1, 0, keys / "node-1"), 9: (1, 1, keys / "node-2"), 10: (1, 1, None)}
    honest = {11: (1, 0, keys / "node-0"), 12: (1, 1, keys / "node-1")}
    link = greeted(config, Grid(config, {**strangers, **honest}))
    assert link.nodes == {0: 11, 1: 12}
    of = config["keys.1"], config["keys.0"]
    assert f"node 8: refused, its key is {of[0]}, partition 0 belongs to {of[1]}" in link.events
    assert any(event.startswith("node 9: refused, its key is") for event in link.events)
    assert any(event.startswith("node 10:") and "node config key = None" in event for event in link.events)


def test_without_keys_in_the_settings_any_node_may_claim_a_partition(keys):
    config = {name: value for name, value in config_of(keys).items() if not name.startswith("keys.")}
    assert greeted(config, Grid(config, {8: (1, 0, None)})).nodes == {0: 8}


def test_a_signature_of_another_run_or_another_node_or_an_earlier_greeting_is_refused(keys):
    config = config_of(keys)
    seen = {}

    def keep(node, reply):
        seen[node] = {name: reply.content["facts"][name] for name in ("key", "signature")}
        return reply

    def replay(node, reply):
        reply.content["facts"].update(seen[11])
        return reply

    key = keys / "node-0"
    assert greeted(config, Grid(config, {11: (1, 0, key)}, tamper=keep)).nodes == {0: 11}
    for nodes in ({11: (1, 0, key)}, {12: (1, 0, keys / "node-2")}):
        link = greeted(config, Grid(config, nodes, tamper=replay))
        assert link.nodes == {}
        assert "its signature is not one of this greeting" in link.events[0]
    assert greeted(config, Grid(config, {11: (2, 0, key)})).nodes == {}


def test_a_signature_counts_once(keys):
    holders = KeyHolders({"0": config_of(keys)["keys.0"]}, run=1)
    facts = sign(str(keys / "node-0"), Greeting(1, 11, 0, holders.challenge(11)["nonce"]))
    holders.check(11, 0, Parcel(facts))
    with pytest.raises(BadReplyError, match="it answers no greeting"):
        holders.check(11, 0, Parcel(facts))


def test_greetings_never_repeat():
    holders = KeyHolders({}, run=1)
    nonces = {holders.challenge(11)["nonce"] for _ in range(1000)}
    assert len(nonces) == 1000
    assert {len(nonce) for nonce in nonces} == {64}


def malformed(keys):
    other_kinds = [
        kind.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()
        for kind in (ed25519.Ed25519PrivateKey.generate(), rsa.generate_private_key(65537, 2048))
    ]
    public = (keys / "node-0.pub").read_text()
    return [
        {}, {"key": 1}, {"signature": 2.5}, {"key": ""}, {"key": "\0" * 100}, {"key": public[:80]},
        {"key": "é" * 50}, {"signature": ""}, {"signature": "é"}, {"signature": "!" * 64},
        {"signature": base64.b64encode(b"0" * 104).decode()}, *({"key": key} for key in other_kinds),
    ]  # fmt: skip


def test_malformed_proofs_are_bad_replies_and_nothing_else(keys):
    for change in malformed(keys):
        holders = KeyHolders({"0": config_of(keys)["keys.0"]}, run=1)
        facts = sign(str(keys / "node-0"), Greeting(1, 11, 0, holders.challenge(11)["nonce"]))
        with pytest.raises(BadReplyError):
            holders.check(11, 0, Parcel({**facts, **change} if change else {}))


def test_fingerprints_are_those_of_ssh_keygen(keys):
    blob = base64.b64decode((keys / "node-1.pub").read_text().split()[1])  # the key as it is sent over SSH
    expected = "SHA256:" + base64.b64encode(hashlib.sha256(blob).digest()).decode().rstrip("=")
    assert key_fingerprint((keys / "node-1.pub").read_bytes()) == expected
    assert config_of(keys)["keys.1"] == expected


def test_a_node_names_a_key_that_it_cannot_use(keys, tmp_path):
    greeting = Greeting(1, 11, 0, NONCE)
    (tmp_path / "broken").write_bytes(b"-----BEGIN OPENSSH PRIVATE KEY-----\n")
    for path in (tmp_path / "none", tmp_path / "broken", keys / "ca.crt"):
        with pytest.raises(fg.InputError, match=r"node config key = .*--auth-supernode-private-key"):
            sign(str(path), greeting)
    with pytest.raises(fg.InputError, match="64 hexadecimal digits"):
        sign(str(keys / "node-0"), Greeting(1, 11, 0, NONCE + "\nnode=12"))


def test_every_partition_needs_a_key_of_its_own(keys):
    config = config_of(keys)
    for change, message in (
        ({"clients": 3}, "one fingerprint for each partition, 0 to 2"),
        ({"keys.0": config["keys.1"]}, "a key that no other partition has"),
        ({"keys.0": "SHA256:short"}, "as ssh-keygen -lf NODE.pub prints it"),
    ):
        with pytest.raises(fg.InputError, match=message):
            Settings.of({**config, **change})


def test_keys_may_change_when_a_run_resumes(keys):
    config = config_of(keys)
    rotated = {**config, "keys.0": key_fingerprint((keys / "node-2.pub").read_bytes())}
    assert Settings.of(config).identity() == Settings.of(rotated).identity()


def test_a_run_whose_clients_have_a_refused_modifier_ends_with_its_name(keys):
    from flwr.client.mod import secaggplus_mod

    config = {**config_of(keys), "wait_seconds": 0.1, "attempts": 1}
    grid = Grid(config, {11: (1, 0, keys / "node-0"), 12: (1, 1, keys / "node-1")}, mods=[secaggplus_mod])
    with pytest.raises(fg.errors.FedagracError, match=r"0 of clients = 2 connected .*mods = 'secaggplus_mod'"):
        greeted(config, grid).wait_for([0, 1], 2, 0)
