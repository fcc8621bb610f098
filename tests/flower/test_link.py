"""Who gets a partition: wrong nodes, second nodes, restarted nodes, busy nodes."""

import time

import pytest
import torch

from fedagrac.errors import FedagracError

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from flwr.app import Error, Message

from fedagrac.flower import link
from flower_grid import Node, StandIn, config, federation, flower


class Appearing(StandIn):
    """A grid in which nodes appear after some looks at it."""

    def __init__(self, nodes, appear, spoil=None):
        super().__init__(nodes, spoil)
        self.appear, self.looks = appear, 0

    def get_node_ids(self):
        self.looks += 1
        return [node for node in self.nodes if self.looks > self.appear.get(node, 0)]


@pytest.fixture
def clean(tmp_path):
    """Return the model of a run of the three right nodes alone."""
    settings = config(tmp_path / "clean")
    return flower(settings, federation(settings)).state["x"]


def events_of(run):
    return [event for record in run.history for event in record["events"]]


def test_wrong_nodes_do_not_fail_the_start(tmp_path, clean):
    settings = config(tmp_path, wait_seconds=20.0)
    nodes = {10 + i: Node(settings, i) for i in range(3)}
    nodes[1] = Node(settings, 1, model=lambda _: torch.nn.Linear(64, 12))
    nodes[2] = Node(settings, 7)
    nodes[3] = Node(settings, 1)
    nodes[4] = Node(settings, 1)
    nodes[5] = Node(settings, 1)

    def spoil(node, kind, round, reply):
        if node == 3:
            reply.content["facts"]["samples"] = -1
        if node == 4:
            del reply.content["facts"]
        if node == 5:
            return Message(metadata=reply.metadata, error=Error(code=2, reason="no \x1b]0;mine\x07 data"))
        return reply

    grid = Appearing(nodes, {11: 4}, spoil)
    run = flower(settings, grid)
    assert torch.equal(run.state["x"], clean)
    events = run.history[0]["events"]
    assert len(events) == 5  # each fault is said once, although nodes are greeted again
    for node, fault in {
        1: "refused, model of client 1 = '780 parameters, torch.float64'",
        2: "partition-id = 7",
        3: "refused, samples = -1, expected an integer from 1",
        4: "refused, its content cannot be read",
        5: r"no \x1b]0;mine\x07 data",
    }.items():
        assert sum(event.startswith(f"node {node}: ") and fault in event for event in events) == 1
        assert 1 <= grid.sent.count((node, "query.hello")) <= settings.get("attempts", 3)
    assert {node for node, kind in grid.sent if kind == "train.steps"} == {10, 11, 12}


def test_a_start_that_waits_in_vain_lists_who_was_refused_and_why(tmp_path):
    settings = config(tmp_path)
    nodes = {
        10: Node(settings, 0),
        11: Node(settings, 0),
        12: Node(settings, 2, model=lambda _: torch.nn.Linear(64, 12)),
    }
    with pytest.raises(FedagracError) as ended:
        flower(settings, StandIn(nodes))
    text = str(ended.value)
    assert "1 of clients = 3 connected" in text
    assert "missing partition-id 1, 2" in text
    assert "node 11: refused, node config partition-id = 0 belongs to node 10, which is connected" in text
    assert "node 12: refused, model of client 2 = '780 parameters" in text


def test_a_second_node_cannot_take_the_partition_of_a_live_one_before_the_start(tmp_path, clean):
    settings = config(tmp_path, wait_seconds=5.0)
    nodes = {10: Node(settings, 0), 11: Node(settings, 1), 20: Node(settings, 1), 12: Node(settings, 2)}
    grid = Appearing(nodes, {12: 4})
    run = flower(settings, grid)
    assert torch.equal(run.state["x"], clean)
    assert "node 20: claims client 1; node 11, which has it, is greeted again" in run.history[0]["events"]
    refused = "node 20: refused, node config partition-id = 1 belongs to node 11, which is connected"
    assert refused in run.history[0]["events"]
    assert {node for node, kind in grid.sent if kind == "train.steps"} == {10, 11, 12}


def test_a_second_node_cannot_take_the_partition_of_a_live_one_after_the_start(tmp_path, clean, monkeypatch):
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.0)
    settings = config(tmp_path, round_seconds=20.0, wait_seconds=5.0)
    polled = {}

    def spoil(node, kind, round, reply):
        if round == 2:
            grid.nodes.setdefault(20, Node(settings, 1))
        polled[node, kind, round] = polled.get((node, kind, round), 0) + 1
        slow = (node, kind, round) == (12, "train.steps", 2)
        return None if slow and polled[node, kind, round] < 20 else reply

    grid = federation(settings, spoil)
    run = flower(settings, grid)
    assert torch.equal(run.state["x"], clean)
    refused = "node 20: refused, node config partition-id = 1 belongs to node 11, which is connected"
    assert refused in run.history[1]["events"]
    assert "node 20" not in str(run.history[0]["events"])
    assert {node for node, kind in grid.sent if kind == "train.steps"} == {10, 11, 12}


def test_a_restarted_node_gets_its_partition_back_although_the_old_one_is_still_listed(tmp_path):
    """Node 11 dies after round 1; Flower lists it for a while. The time to answer is wait_seconds here."""
    settings = config(tmp_path, rounds=6, min_clients=2, round_seconds=0.2, wait_seconds=0.3)

    def spoil(node, kind, round, reply):
        if round >= 2:
            grid.nodes.setdefault(20, Node(settings, 1))
        if round == 3 and kind == "train.steps" and node != 11:
            time.sleep(0.3)
        return None if node == 11 and round >= 2 else reply

    grid = federation(settings, spoil)
    run = flower(settings, grid)
    moved = "client 1: moved to another node, because node 11 did not answer"
    assert moved in events_of(run)
    assert run.history[0]["clients"] == run.history[-1]["clients"] == 3
    assert (20, "train.steps") in grid.sent
    assert 11 in grid.get_node_ids()


def test_a_busy_node_is_not_taken_for_a_dead_one(tmp_path, clean, monkeypatch):
    """Node 11 computes far longer than a node has for an answer. Its node does one thing after another."""
    monkeypatch.setattr(link, "LOOK_SECONDS", 0.0)
    monkeypatch.setattr(link, "CHALLENGE_SECONDS", 1.0)
    settings = config(tmp_path, round_seconds=30.0, wait_seconds=30.0)
    begun = []

    def spoil(node, kind, round, reply):
        if round == 2:
            grid.nodes.setdefault(20, Node(settings, 1))
        if node == 11 and round == 2 and "claims client 1" in str(said):
            begun.append(time.monotonic())
            return reply if begun[-1] - begun[0] > 2.0 else None
        return None if node == 11 and round == 2 else reply

    said = []
    monkeypatch.setattr(link.log, "warning", lambda text, *values: said.append(text % values))
    grid = federation(settings, spoil)
    run = flower(settings, grid)
    assert torch.equal(run.state["x"], clean)
    assert (20, "train.steps") not in grid.sent
    assert any("belongs to node 11, which is connected" in event for event in run.history[1]["events"])


def test_a_node_that_was_refused_takes_over_when_the_other_one_leaves(tmp_path):
    settings = config(tmp_path, rounds=4, min_clients=2)
    grid = federation(settings)
    grid.nodes[20] = Node(settings, 1)

    def spoil(node, kind, round, reply):
        if round == 2:
            grid.nodes.pop(11, None)
        return reply

    grid.spoil = spoil
    run = flower(settings, grid)
    assert run.history[0]["steps"].keys() == run.history[-1]["steps"].keys() == {"0", "1", "2"}
    events = events_of(run)
    assert events.index("client 1: its node left") < events.index("client 1: connected again")
    assert (20, "train.steps") in grid.sent


def test_text_of_clients_has_no_control_characters_in_the_history(tmp_path):
    def fail(node, kind, round, reply):
        if node == 11 and round == 2:
            return Message(metadata=reply.metadata, error=Error(code=2, reason="\x1b[2J\u202egone"))
        return reply

    settings = config(tmp_path, min_clients=2)
    run = flower(settings, federation(settings, fail))
    assert run.history[1]["events"] == [r"client 1: \x1b[2J\u202egone"]
