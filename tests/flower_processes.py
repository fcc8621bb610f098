"""A federation of real processes on loopback: one SuperLink and its SuperNodes, started here and stopped here."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import tomli_w

from fedagrac.flower.app import write_app

BIN = Path(sys.executable).parent

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
    """Spoil replies as the run config says: a node that errs, one that hangs."""
    fault, me = context.run_config["app.faults"], context.node_config["partition-id"]
    place = me, int(message.metadata.group_id)
    training = message.metadata.message_type == "train.steps"
    if fault and training and place == (1, 2):
        Path(context.run_config["app.data"], "hanging").touch()
        time.sleep(300)
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


def free_ports(number):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in sockets]


def descendants(pid):
    """Return the processes that a process started, directly or not."""
    listed = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True, check=True).stdout
    parents = [tuple(map(int, line.split())) for line in listed.splitlines()]
    found = [pid]
    for one in found:
        found += [child for child, parent in parents if parent == one]
    return found[1:]


def command_of(pid):
    done = subprocess.run(["ps", "-o", "args=", "-p", str(pid)], capture_output=True, text=True, check=False)
    return done.stdout


class Loopback:
    """The processes of one federation, each in a process group of its own, and where their output goes."""

    def __init__(self, folder, nodes, keys=None):
        self.folder, self.nodes, self.keys = Path(folder), nodes, keys
        self.ports = free_ports(nodes + 1)
        self.processes = {}
        self.killed = []
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
        quiet = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1", "OMP_NUM_THREADS": "1"}
        path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
        return {**os.environ, **quiet, "PATH": path, "FLWR_HOME": str(self.home)}

    def start(self, name, *command):
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

    def stop(self, name, how=signal.SIGTERM):
        """Stop a process and what it started, nothing else; the SuperLink's helpers leave its process group."""
        process = self.processes.pop(name)
        started = descendants(process.pid)
        for sign in (how, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, sign)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(5)
        assert process.poll() is not None
        for pid in started:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def start_link(self):
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
        end = time.monotonic() + 60
        while time.monotonic() < end:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                return
            time.sleep(0.2)
        raise AssertionError(self.logs())

    def start_node(self, i, config="", key=None):
        safety = ["--insecure"]
        if self.keys is not None:
            safety = ["--root-certificates", self.keys / "ca.crt"]
            safety += [] if key is None else ["--auth-supernode-private-key", key]
        command = ["flower-supernode", *safety, "--superlink", f"127.0.0.1:{self.ports[0]}"]
        self.start(
            f"node{i}", *command, "--port", self.ports[1 + i], "--node-config", f"partition-id={i} {config}"
        )

    def flwr(self, *arguments):
        command = [str(BIN / "flwr"), *map(str, arguments)]
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=90, env=self.environment, cwd=self.folder, check=False
        )
        return done.stdout + done.stderr

    def run(self, name, **settings):
        """Submit a run whose results go to folder/name."""
        app = write_app(self.folder / "apps" / name / "federation")
        (app / "federation" / "task.py").write_text(TASK)
        (app / "federation" / "client_app.py").write_text(CLIENT)
        project = (app / "pyproject.toml").read_text().partition("[tool.flwr.app.config]")[0]
        common = {
            "clients": self.nodes,
            "batch_size": 10,
            "round_seconds": 200.0,
            "wait_seconds": 200.0,
            "poll_seconds": 0.2,
            "out": str(self.folder / name),
            "app": {"data": str(self.folder), "faults": settings.pop("faults", False)},
        }
        config = {"tool": {"flwr": {"app": {"config": {**common, **settings}}}}}
        (app / "pyproject.toml").write_text(project + tomli_w.dumps(config))
        self.submit(name)

    def submit(self, name):
        said = self.flwr("run", self.folder / "apps" / name / "federation", "loopback")
        assert "Successfully started run" in said, said + self.logs()

    def wait(self, *names, seconds):
        """Wait for runs to end; their status in `flwr list` counts."""
        end = time.monotonic() + seconds
        while not all((self.folder / name / "status.json").exists() for name in names):
            assert time.monotonic() < end, self.flwr("list") + self.logs()
            time.sleep(0.5)
        while True:
            runs = json.loads(self.flwr("list", "--format", "json"))["runs"]
            if all(run["status"] == "finished:completed" for run in runs if run["run-id"] not in self.killed):
                return
            assert time.monotonic() < end, json.dumps(runs) + self.logs()

    def history(self, name):
        file = self.folder / name / "history.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []

    def kill_server(self, name, rounds, seconds):
        """Kill the ServerApp of the only run there is, once it has done so many rounds."""
        end = time.monotonic() + seconds
        while len(self.history(name)) < rounds:
            assert time.monotonic() < end, self.logs()
            time.sleep(0.05)
        servers = [pid for pid in descendants(self.processes["link"].pid) if "flwr-serverapp" in command_of(pid)]
        assert servers, self.logs()
        for pid in servers:
            os.kill(pid, signal.SIGKILL)
        self.killed += [run["run-id"] for run in json.loads(self.flwr("list", "--format", "json"))["runs"]]

    def logs(self):
        return "\n".join(f"--- {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def remove_apps(self):
        shutil.rmtree(self.folder / "apps", ignore_errors=True)
