"""Run a federation of real processes on loopback: one SuperLink and its SuperNodes."""

import contextlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
from pathlib import Path

import psutil
import tomli_w

import processes
from fedagrac.flower.app import write_app

BIN = Path(sys.executable).parent
PATIENCE = 3600.0
"""Seconds that the server waits for replies: no reply is late, however busy the machine is."""

TASK = """
import numpy as np
import fedagrac as fg


def model(context):
    return fg.models.build("logistic", features=64, classes=10)


def data(context):
    stored = np.load(f"{context.run_config['app.data']}/{context.node_config['partition-id']}.npz")
    return stored["inputs"], stored["targets"]


test = None
"""

CLIENT = '''
import time
from pathlib import Path

import numpy as np
from fedagrac.flower import client_app
from flwr.app import Array

from federation import task


def faults(message, context, call_next):
    """Spoil replies if the run config asks for faults: some are nonsense, one never comes."""
    fault, client = context.run_config["app.faults"], context.node_config["partition-id"]
    place = client, int(message.metadata.group_id)
    training = message.metadata.message_type == "train.steps"
    if fault and training and place == (1, 2):
        Path(context.run_config["app.data"], "hanging").touch()
        time.sleep(3600)
    reply = call_next(message, context)
    if fault and training:
        vectors = reply.content["vectors"]
        model = vectors["model"].numpy()
        if place == (0, 1):
            vectors["model"] = Array(model * np.nan)
        if place == (1, 1):
            vectors["model"] = Array(model[:-1].copy())
        if place == (2, 2):
            reply.content["facts"]["steps"] = 10**9
    return reply


app = client_app(task.model, task.data, mods=[faults])
'''


SERVER = """
import json

from fedagrac import Callback, TensorBoard
from fedagrac.flower import server_app

from federation import task


class Rounds(Callback):
    def __init__(self, path):
        self.path = path

    def on_round(self, run, record):
        with open(self.path, "a") as file:
            seen = [record["round"], run.cohort.clients.tolist(), [reply.steps for reply in run.replies]]
            file.write(json.dumps(seen) + "\\n")


def callbacks(context):
    out = context.run_config["out"]
    return [Rounds(out + "-rounds.jsonl"), TensorBoard(out + "-board")]


app = server_app(task.model, callbacks=callbacks)
"""


def free_ports(number):
    """Return port numbers that nobody uses."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def runs_command(process, command):
    """Return whether a process runs a command of that name, whatever the path to it."""
    try:
        return any(Path(argument).name == command for argument in process.cmdline())
    except psutil.NoSuchProcess:
        return False


class Loopback:
    """The processes of one federation.

    Attributes:
        folder: the folder that holds the apps, the log of every process and the results of every run.
        nodes: the number of SuperNodes.
        keys: the folder with keys and certificates, or None for connections without TLS. With keys, nodes reach
            the SuperLink through the gate.
        processes: the running processes by name, each the leader of its own process group.
    """

    def __init__(self, folder, nodes, keys=None):
        self.folder, self.nodes, self.keys = Path(folder), nodes, keys
        *self.ports, self.gate = free_ports(nodes + 3)
        self.processes = {}
        self.killed_runs = []
        self.home = self.folder / "home"
        self.home.mkdir(parents=True)
        connection = {"address": f"127.0.0.1:{self.ports[0]}"}
        connection |= {"insecure": True} if keys is None else {"root-certificates": str(keys / "ca.crt")}
        config = {"superlink": {"default": "loopback", "loopback": connection}}
        (self.home / "config.toml").write_text(tomli_w.dumps(config))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for name in list(self.processes):
            self.stop(name)

    @property
    def environment(self):
        """The environment of every process; Flower finds the commands that it starts on PATH."""
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(self.home)}

    def start(self, name, *command):
        """Start a command of Flower, with its output in a log."""
        with (self.folder / f"{name}.log").open("a") as log:
            self.processes[name] = subprocess.Popen(
                [str(BIN / command[0]), *map(str, command[1:])],
                stdout=log,
                stderr=log,
                stdin=subprocess.DEVNULL,
                cwd=self.folder,
                env=self.environment,
                start_new_session=True,
            )

    def stop(self, name, first_signal=signal.SIGTERM):
        """Stop a process and its descendants; the SuperLink's leave its process group."""
        process = self.processes.pop(name)
        started = processes.descendants(process.pid)
        for number in (first_signal, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        process.wait()
        processes.kill_all(started)

    def wait_for(self, condition):
        """Wait until a condition holds; fail when the SuperLink ends or neither logs nor results change."""

        def checked():
            assert self.processes["link"].poll() is None, self.logs()
            return condition()

        observe = processes.contents_of(self.folder, "*.log", "*/history.jsonl", "*/status.json")
        processes.wait_until(checked, observe, self.logs, pause=0.1)

    def start_link(self):
        """Start the SuperLink and wait until it accepts connections."""
        safety = ["--insecure"]
        if self.keys is not None:
            safety = ["--enable-supernode-auth"]
            files = {"ca-certfile": "ca.crt", "certfile": "server.crt", "keyfile": "server.key"}
            for option, file in files.items():
                safety += [f"--ssl-{option}", self.keys / file]
        port = self.ports[0]
        self.start(
            "link", "flower-superlink", *safety, "--port", port, "--disable-runtime-dependency-installation"
        )

        def accepts():
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return True
            return False

        self.wait_for(accepts)
        if self.keys is not None:
            self.start_gate()

    def start_gate(self):
        """Start the gate and wait until it passes requests of nodes on: the SuperLink misses their signature."""
        options = ["--host", "127.0.0.1", "--port", self.gate, "--superlink", f"127.0.0.1:{self.ports[0]}"]
        self.start("gate", "python", "-m", "fedagrac", "flower", "gate", self.keys, *options)
        self.wait_for(lambda: self.knock("/v1/fleet/pull-messages") == 401)

    def knock(self, path):
        """Send an empty request to the gate, as anybody can who has ca.crt. Return the status or None."""
        trust = ssl.create_default_context(cafile=self.keys / "ca.crt")
        connection = http.client.HTTPSConnection("127.0.0.1", self.gate, timeout=60, context=trust)
        with contextlib.closing(connection), contextlib.suppress(OSError):
            connection.request("POST", path, b"", {"content-type": "application/protobuf"})
            return connection.getresponse().status

    def start_node(self, i, config="", key=None, partition=None, second=False):
        """Start SuperNode i, which has partition i unless another is given, or a second one beside it."""
        safety, address = ["--insecure"], f"127.0.0.1:{self.ports[0]}"
        if self.keys is not None:
            safety, address = ["--root-certificates", self.keys / "ca.crt"], f"127.0.0.1:{self.gate}"
            safety += [] if key is None else ["--auth-supernode-private-key", key]
            config += "" if key is None else f' key="{key}"'
        command = ["flower-supernode", *safety, "--superlink", address]
        name, port = (f"second{i}", self.ports[-1]) if second else (f"node{i}", self.ports[1 + i])
        chosen = i if partition is None else partition
        self.start(name, *command, "--port", port, "--node-config", f"partition-id={chosen} {config}")

    def flwr(self, *arguments):
        """Run a command of `flwr` and return its output."""
        _, printed, errors = processes.run([BIN / "flwr", *arguments], env=self.environment, cwd=self.folder)
        return printed + errors

    def run(self, name, **settings):
        """Submit a run whose results go to folder/name."""
        app = write_app(self.folder / "apps" / name / "federation")
        (app / "federation" / "task.py").write_text(TASK)
        (app / "federation" / "client_app.py").write_text(CLIENT)
        (app / "federation" / "server_app.py").write_text(SERVER)
        project = (app / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[0]
        common = {
            "clients": self.nodes,
            "batch_size": 10,
            "round_seconds": PATIENCE,
            "wait_seconds": PATIENCE,
            "poll_seconds": 0.2,
            "out": str(self.folder / name),
            "app": {"data": str(self.folder), "faults": settings.pop("faults", False)},
        }
        config = {"tool": {"flwr": {"app": {"config": {**common, **settings}}}}}
        (app / "pyproject.toml").write_text(project + tomli_w.dumps(config))
        self.submit(name)

    def submit(self, name):
        """Submit a run again."""
        output = self.flwr("run", self.folder / "apps" / name / "federation", "loopback")
        assert "Successfully started run" in output, output + self.logs()

    def listed_runs(self):
        """Return what `flwr list` says of every run."""
        return json.loads(self.flwr("list", "--format", "json"))["runs"]

    def wait(self, *names):
        """Wait until runs have written their results and `flwr list` shows that all runs have completed."""
        self.wait_for(lambda: all((self.folder / name / "status.json").exists() for name in names))
        statuses = {}

        def completed():
            statuses.update({run["run-id"]: run["status"] for run in self.listed_runs()})
            current = {statuses[run] for run in statuses if run not in self.killed_runs}
            assert not {"finished:failed", "finished:stopped"} & current, self.logs()
            return current == {"finished:completed"}

        processes.wait_until(completed, lambda: dict(statuses), self.logs)

    def history(self, name):
        """Return the rounds of a run so far."""
        file = self.folder / name / "history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def saved_rounds(self, name):
        """Return the rounds of the last checkpoint of a run, which follows their lines in the history."""
        checkpoints = (self.folder / name / "checkpoint").glob("round-*.safetensors")
        return max((int(path.stem.removeprefix("round-")) for path in checkpoints), default=0)

    def kill_server(self, name, rounds):
        """Kill the ServerApp of the only run once it has done and saved some rounds."""
        self.wait_for(lambda: self.saved_rounds(name) >= rounds)
        started = processes.descendants(self.processes["link"].pid)
        servers = [process for process in started if runs_command(process, "flwr-serverapp")]
        assert servers, self.logs()
        processes.kill_all(servers)
        self.killed_runs += [run["run-id"] for run in self.listed_runs()]

    def logs(self):
        """Return the end of every log."""
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))
