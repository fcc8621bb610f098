"""Attack a federation of real processes: one SuperLink, three honest SuperNodes, two that attack.

Every round has another attack. The run must finish, and its model must be that of the same federation, in memory,
without the replies that were dropped.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import sys
import threading
import time
from pathlib import Path
from typing import Any

from benchmarks.soak.part import TESTS, Part, Promise

__all__ = ["run"]

HONEST, ATTACKER, FLOODER = (0, 1, 2), 3, 4
K = [3, 5, 12, 12, 4]
"""Local steps of each client. The attacker is among the fast ones, so that it sends its first gradient."""

ATTACKS = {
    1: "broken JSON",
    2: "2 GB of zeros in one chunk",
    3: "a vector that was not asked for",
    4: "first gradient of 1e30",
    5: "NaN",
    6: "death in an upload, 20,000 arrays",
}
"""The attack of each round. Before the first, the attacker claims 2^62 samples."""

ROUND_SECONDS, UPLOAD_SECONDS, SLACK = 240.0, 20.0, 30.0
SERVER_MEMORY = 600 * 2**20
"""The largest resident memory of the server's process in bytes, torch included."""

CLIENT = '''
import json
from pathlib import Path

import numpy as np
from fedagrac.flower import client_app
from flwr.app import Array, ArrayRecord
from flwr.app.message import array as arrays
from flwr.supercore.inflatable.inflatable_object import add_header_to_object_body

from federation import task


def claim(reply, context):
    """Claim 2^62 samples in the first greeting."""
    mark = Path(context.run_config["app.data"], "claimed")
    if not mark.exists():
        mark.touch()
        reply.content["facts"]["samples"] = 2**62
    return reply


def attack(reply, round, context):
    """Attack in another way in every round."""
    vectors = reply.content["vectors"]
    if round == 1:
        Array.deflate = lambda self: add_header_to_object_body(b"{", self)
    if round == 2:
        zeros = Array(np.zeros(1_300_000, np.float32))  # Flower sends it in one chunk of 5 MiB
        told = {"dtype": "float32", "shape": [650], "stype": "numpy.ndarray", "arraychunk_ids": [0] * 400}
        Array.deflate = lambda self: add_header_to_object_body(json.dumps(told).encode(), self)
        vectors["model"] = zeros
    if round == 3:
        vectors["total"] = Array(vectors["model"].numpy())
    if round == 4:
        vectors["first"] = Array(np.full_like(vectors["first"].numpy(), 1e30))
    if round == 5:
        vectors["model"] = Array(vectors["model"].numpy() * np.nan)
    if round == 6:
        Path(context.run_config["app.data"], "die").touch()
    return reply


def hostile(message, context, call_next):
    reply, kind = call_next(message, context), message.metadata.message_type
    who, round = context.node_config["partition-id"], int(message.metadata.group_id)
    if context.node_config.get("rival"):  # a second node with the partition of an honest one
        if kind == "train.steps":
            reply.content["vectors"]["model"] = Array(np.full(650, 7.0, np.float32))
    elif who == 3 and kind == "query.hello":
        reply = claim(reply, context)
    elif who == 3 and kind == "train.steps":
        reply = attack(reply, round, context)
    elif who == 4 and kind == "train.steps" and round == 6:
        many = {str(i): Array(np.array([float(i)])) for i in range(20_000)}
        reply.content["vectors"] = ArrayRecord(many)
    return reply


app = client_app(task.model, task.data, mods=[hostile])
'''


def run(out: Path) -> Part:
    """Attack a federation, and compare it with one in memory that has no attacker."""
    sys.path[:0] = [str(TESTS), str(TESTS / "flower")]
    import flower_processes

    flower_processes.CLIENT = CLIENT
    part, folder = Part(), (out / "processes").absolute()
    with flower_processes.Loopback(folder, nodes=6) as loopback:
        _write_data(loopback.folder)
        loopback.start_link()
        _start_nodes(loopback)
        with _Watch(loopback) as watch:
            settings = {**_settings(), "clients": 5, "out": str(folder / "attacked")}
            nested = {**settings, "algorithm": {"name": "fedagrac", "lr": 0.1}, "guard": {"factor": 10.0}}
            steps = {"kind": "explicit", "table": json.dumps([K])}
            loopback.run("attacked", **{**nested, "steps": steps})
            loopback.wait_for(lambda: loopback.history("attacked"))
            _start(loopback, 5, "partition-id=0 rival=true")
            loopback.wait("attacked")
        history = loopback.history("attacked")
        status = json.loads((folder / "attacked" / "status.json").read_text())
    _judge(part, folder, history, status, watch)
    return part


def _settings() -> dict[str, Any]:
    """Return the settings that the federation of processes and the one in memory share."""
    return {
        "rounds": len(ATTACKS),
        "min_clients": 3,
        "batch_size": 10,
        "round_seconds": ROUND_SECONDS,
        "upload_seconds": UPLOAD_SECONDS,
    }


def _judge(part: Part, folder: Path, history: list[dict[str, Any]], status: dict[str, Any], watch: _Watch) -> None:
    """Note figures and promises."""
    ends = [0.0, *(record["wall_time"] for record in history)]
    seconds = [end - begun for begun, end in itertools.pairwise(ends)]
    for record, took in zip(history, seconds, strict=True):
        told = {"seconds": took, "dropped": record["dropped"], "events": record["events"]}
        part.figures[f"round {record['round']}: {ATTACKS[record['round']]}"] = told
    part.figures["MB of the server at its peak"] = watch.server / 2**20
    part.figures["MB of the SuperLink at its peak"] = watch.link / 2**20
    events = [event for record in history for event in record["events"]]
    dropped = {record["round"]: set(record["dropped"]) for record in history}
    expected = {t: {ATTACKER} if t < 6 else {ATTACKER, FLOODER} for t in ATTACKS}
    part.promises += [
        Promise("rounds done", len(history), "==", len(ATTACKS)),
        Promise("the run finished", status["status"] == "finished", "==", 1),
        Promise("rounds in which others than attackers were dropped", _differ(dropped, expected), "==", 0),
        Promise("the claim of 2^62 samples was dropped", any(str(2**62) in event for event in events), "==", 1),
        Promise("seconds of the longest round after the first", max(seconds[1:]), "<=", ROUND_SECONDS + SLACK),
        Promise("MB of the server at its peak", watch.server / 2**20, "<=", SERVER_MEMORY / 2**20),
        Promise("numbers that differ from a run without the attackers", _differences(folder), "==", 0),
    ]
    refused = any(re.search("refused, node config partition-id = 0 belongs to", event) for event in events)
    part.promises.append(Promise("the second node with partition 0 was refused", refused, "==", 1))


def _differ(found: dict[int, set[int]], expected: dict[int, set[int]]) -> int:
    return sum(found.get(t) != clients for t, clients in expected.items())


def _write_data(folder: Path) -> None:
    """Write the data of each client to a file."""
    import numpy as np

    federation = _federation()
    for i in range(len(K)):
        samples = federation.samples_of(i)
        stored = {"inputs": federation.inputs[samples].numpy(), "targets": federation.targets[samples].numpy()}
        np.savez(folder / f"{i}.npz", **stored)


def _federation() -> Any:
    import fedagrac as fg

    return fg.Federation.load("digits", clients=len(K), partition=fg.Dirichlet(0.5), seed=0)


def _start_nodes(loopback: Any) -> None:
    """Start the honest nodes, the attacker and the flooder."""
    os.environ["ATTACK_MARK"] = str(loopback.folder / "die")
    for i in range(len(K)):
        _start(loopback, i, f"partition-id={i}", dying=i == ATTACKER)


def _start(loopback: Any, i: int, config: str, dying: bool = False) -> None:
    """Start a SuperNode; one that dies is a program of its own."""
    command = ["python", str(Path(__file__).with_name("dying_node.py"))] if dying else ["flower-supernode"]
    connection = ["--insecure", "--superlink", f"127.0.0.1:{loopback.ports[0]}"]
    loopback.start(f"node{i}", *command, *connection, "--port", loopback.ports[1 + i], "--node-config", config)


class _Watch:
    """Keeps the peaks of the memory of the server and of the SuperLink, and prints progress."""

    def __init__(self, loopback: Any) -> None:
        self.loopback, self.server, self.link, self.ended = loopback, 0, 0, threading.Event()
        self.thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> _Watch:
        self.thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.ended.set()
        self.thread.join()

    def _look(self) -> None:
        from benchmarks.attack.files import peak_of
        from flower_processes import runs_command
        from processes import descendants

        begun, said = time.monotonic(), -1
        while not self.ended.wait(0.5):
            pid = self.loopback.processes["link"].pid
            self.link = max(self.link, peak_of(pid))
            for process in descendants(pid):
                if runs_command(process, "flwr-serverapp"):
                    self.server = max(self.server, peak_of(process.pid))
            done, took = len(self.loopback.history("attacked")), time.monotonic() - begun
            if done != said:
                said = done
                left = f", about {took / done * (len(ATTACKS) - done):.0f} s left" if done else ""
                text = f"processes: {done} of {len(ATTACKS)} rounds after {took:.0f} s{left}"
                print(text, file=sys.stderr, flush=True)


def _differences(folder: Path) -> int:
    """Return how many numbers of the model differ from those of a federation in memory without the attackers."""
    import torch
    from flwr.app import Error, Message
    from flwr.supercore.task_identity import TaskIdentity
    from safetensors.torch import load_file
    from test_flower import Node, StandIn

    import fedagrac as fg
    from fedagrac.flower.server import initial_model, run_federation
    from fedagrac.flower.settings import Settings

    for name in ("_run_id", "_node_id", "_task_id"):
        setattr(TaskIdentity, name, 1)
    federation = _federation()

    def model(context: Any) -> Any:
        return fg.models.build("logistic", features=64, classes=10)

    def data(context: Any) -> Any:
        samples = federation.samples_of(context.node_config["partition-id"])
        return federation.inputs[samples], federation.targets[samples]

    def spoil(node: int, kind: str, round: int, reply: Any) -> Any:
        absent = node == 10 + ATTACKER or (node == 10 + FLOODER and round == len(ATTACKS))
        if absent and kind == "train.steps":
            return Message(metadata=reply.metadata, error=Error(code=2, reason="absent"))
        return reply

    flat = {
        **_settings(), "clients": len(K), "poll_seconds": 0.01, "out": str(folder / "honest"),
        "algorithm.name": "fedagrac", "algorithm.lr": 0.1, "guard.factor": 10.0,
        "steps.kind": "explicit", "steps.table": json.dumps([K]),
    }  # fmt: skip
    torch.set_num_threads(1)  # as in the processes
    nodes = {10 + i: Node(flat, i, model, data) for i in range(len(K))}
    settings = Settings.of(flat)
    run_federation(StandIn(nodes, spoil), settings, initial_model(settings, model, None))
    attacked, honest = (load_file(folder / name / "model.safetensors") for name in ("attacked", "honest"))
    return sum(int((attacked[key] != honest[key]).sum()) for key in honest)
