"""Measure what a round of a Flower federation costs, and where it goes.

    PYTHONPATH=src python benchmarks/flower_round.py [--rounds 5] [--json FILE]

It starts a SuperLink and three SuperNodes on loopback, with the generated app and with an app that does nothing:
Flower's floor. Flower starts a process for every message to a client. CPU seconds of these processes hardly depend
on what else the machine does; seconds of a round do. The second table has the CPU seconds of the parts of one such
process, from the start of the interpreter to the reply.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tomli_w

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from fedagrac.flower.app import write_app  # noqa: E402
from flower_processes import Loopback  # noqa: E402

NODES, TASK_POLL = 3, "FLWR_SUPEREXEC_TASK_POLL_INTERVAL"

AT_EXIT = """
import atexit, json, os, sys, time

begun = time.time()

def note():
    used = os.times()
    line = {"command": os.path.basename(sys.argv[0]), "cpu": used.user + used.system,
            "seconds": time.time() - begun, "torch": "torch" in sys.modules, "modules": len(sys.modules)}
    with open(os.environ["FLOWER_ROUND_NOTES"], "a") as file:
        file.write(json.dumps(line) + "\\n")

if os.path.basename(sys.argv[0]) == "flwr-clientapp":
    atexit.register(note)
"""
"""A `sitecustomize` module: every process of a client notes what it has used when it ends."""

EMPTY_CLIENT = '''
"""A client that answers every message with an empty one."""
from flwr.app import Message, RecordDict
from flwr.clientapp import ClientApp

app = ClientApp()


@app.query()
def answer(message, context):
    return Message(RecordDict(), reply_to=message)
'''

EMPTY_SERVER = '''
"""A server that sends every node an empty message in each round, and notes when all have answered."""
import time

from flwr.app import Message, RecordDict
from flwr.serverapp import ServerApp

app = ServerApp()


@app.main()
def main(grid, context):
    config = context.run_config
    while len(list(grid.get_node_ids())) < config["nodes"]:
        time.sleep(0.2)
    for _ in range(config["rounds"]):
        begun = time.monotonic()
        asks = [Message(RecordDict(), dst_node_id=node, message_type="query") for node in grid.get_node_ids()]
        waiting = set(grid.push_messages(asks))
        while waiting:
            waiting -= {reply.metadata.reply_to_message_id for reply in grid.pull_messages(list(waiting))}
            time.sleep(config["poll_seconds"] if waiting else 0)
        with open(config["out"], "a") as file:
            file.write(f"{time.monotonic() - begun}\\n")
'''

STAGES = """
import json, os, sys, tomllib
from pathlib import Path

app, kind = Path(sys.argv[1]), sys.argv[2]
stages = {}
before = 0.0

def stage(name):
    global before
    used = os.times()
    stages[name] = used.user + used.system - before
    before = used.user + used.system

stage("interpreter")
import flwr.supernode.cli
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
stage("Flower's imports")
for name in ("_run_id", "_node_id", "_task_id"):
    setattr(TaskIdentity, name, 1)
sys.path.insert(0, str(app))
import my_app.client_app, my_app.task
stage("the app's imports")
config = {}
for key, value in tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["config"].items():
    config |= {f"{key}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {key: value}
context = Context(1, 5, {"partition-id": 0}, RecordDict(), config)
import numpy as np
zeros = Array(np.zeros(650, np.float32))
if kind == "train.first":
    context.state["fedagrac-first"] = ConfigRecord({"run": "1", "round": 0, "client": 0})
    context.state["fedagrac-first-vector"] = ArrayRecord({"first": zeros})
    facts, vectors = {"round": 0}, {}
else:
    import torch
    stage("torch")
    import fedagrac.engines, fedagrac.flower.settings, fedagrac.data.federation
    stage("this package's imports")
    my_app.task.data(context)
    stage("data hook")
    my_app.task.model(context)
    stage("model hook")
    facts = {"round": 0, "steps": 5, "lr": 0.1, "mu": 0.0, "first": 1, "mean": False}
    vectors = {"x": zeros, "c": zeros}
content = RecordDict({"facts": ConfigRecord(facts), "vectors": ArrayRecord(vectors)})
message = Message(content, 5, kind, group_id="1", ttl=60.0)
message.metadata.__dict__["_message_id"] = "0" * 64
reply = my_app.client_app.app(message, context)
assert reply.has_content(), reply.error
stage("the exchange")
print(json.dumps({"stages": stages, "torch": "torch" in sys.modules}))
"""


class Federation(Loopback):
    """A federation whose clients' processes note what they use."""

    def __init__(self, folder: Path, task_poll: str | None) -> None:
        super().__init__(folder, NODES)
        (self.folder / "site").mkdir()
        (self.folder / "site" / "sitecustomize.py").write_text(AT_EXIT)
        self.notes, self.task_poll = self.folder / "notes.jsonl", task_poll

    @property
    def environment(self) -> dict[str, str]:
        """The environment of every process."""
        paths = [str(self.folder / "site"), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
        more = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "FLOWER_ROUND_NOTES": str(self.notes)}
        return {**super().environment, **more, **({TASK_POLL: self.task_poll} if self.task_poll else {})}

    def used(self) -> list[dict[str, Any]]:
        """Return what each client process of the last run used, and forget it."""
        if not self.notes.exists():
            return []
        lines = [json.loads(line) for line in self.notes.read_text().splitlines()]
        self.notes.unlink()
        return lines

    def write(self, name: str, config: dict[str, Any]) -> Path:
        """Write the generated app with other settings, and return its folder."""
        app = write_app(self.folder / "apps" / name / "federation")
        project = (app / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[0]
        settings = {"tool": {"flwr": {"app": {"config": config}}}}
        (app / "pyproject.toml").write_text(project + tomli_w.dumps(settings))
        return app

    def generated(self, name: str, rounds: int, steps: dict[str, Any]) -> dict[str, Any]:
        """Run the generated app and return its figures."""
        algorithm = {"name": "fedagrac", "lr": 0.1}
        config = {"clients": NODES, "rounds": rounds, "algorithm": algorithm, "steps": steps}
        self.write(name, {**config, "out": str(self.folder / name)})
        self.submit(name)
        self.wait(name)
        ends = [record["wall_time"] for record in self.history(name)]
        return figures([end - begun for begun, end in itertools.pairwise(ends)], self.used())

    def floor(self, rounds: int) -> dict[str, Any]:
        """Run an app that does nothing and return its figures."""
        out = self.folder / "floor.txt"
        app = self.write("floor", {"nodes": NODES, "rounds": rounds, "poll_seconds": 0.5, "out": str(out)})
        (app / "federation" / "client_app.py").write_text(EMPTY_CLIENT)
        (app / "federation" / "server_app.py").write_text(EMPTY_SERVER)
        self.submit("floor")
        self.wait_for(lambda: out.exists() and len(out.read_text().splitlines()) == rounds)
        self.wait()
        return figures([float(line) for line in out.read_text().splitlines()[1:]], self.used())


def figures(rounds: list[float], processes: list[dict[str, Any]]) -> dict[str, Any]:
    """Return seconds a round without the first, and CPU seconds a message, with torch and without."""
    result: dict[str, Any] = {"rounds": len(rounds), "seconds a round": statistics.median(rounds)}
    for name, torch in (("with torch", True), ("without torch", False)):
        used = [process["cpu"] for process in processes if process["torch"] is torch]
        if used:
            result[name] = {"messages": len(used), "CPU seconds": statistics.median(used)}
    return result


def stages(folder: Path, times: int = 3) -> dict[str, dict[str, float]]:
    """Return the CPU seconds of each part of one message's process, for two kinds of messages."""
    app = write_app(folder / "my-app")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = {}
    for kind in ("train.steps", "train.first"):
        runs = []
        for _ in range(times):
            words = [sys.executable, "-c", STAGES, str(app), kind]
            done = subprocess.run(words, capture_output=True, text=True, check=False, env=environment)
            if done.returncode:
                raise RuntimeError(done.stderr)
            runs.append(json.loads(done.stdout)["stages"])
        result[kind] = {name: statistics.median(run[name] for run in runs) for name in runs[0]}
        result[kind]["in all"] = statistics.median(sum(run.values()) for run in runs)
    return result


def main() -> int:
    """Measure, print two tables and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--task-poll", help=f"{TASK_POLL}: seconds between two looks of a node for tasks")
    parser.add_argument("--only", choices=["rounds", "stages"])
    options = parser.parse_args()
    found: dict[str, Any] = {"load": os.getloadavg()}
    with tempfile.TemporaryDirectory(prefix="flower-round-") as folder:
        if options.only != "rounds":
            found["stages"] = stages(Path(folder))
            for kind, parts in found["stages"].items():
                print(
                    kind, *(f"\n  {name:<24}{seconds:6.2f} CPU s" for name, seconds in parts.items()), flush=True
                )
        if options.only != "stages":
            with Federation(Path(folder) / "loopback", options.task_poll) as federation:
                federation.start_link()
                for i in range(NODES):
                    federation.start_node(i, "steps=20" if i == 0 else "steps=5")
                planned = {"kind": "linear", "first": 5, "increment": 10}
                found["generated"] = federation.generated("generated", options.rounds, planned)
                found["clients choose"] = federation.generated("chosen", options.rounds, {"kind": "client"})
                found["floor"] = federation.floor(options.rounds)
            for name in ("generated", "clients choose", "floor"):
                print(name, json.dumps(found[name]), flush=True)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
