"""Nobody gets in who does not belong: real processes, and a stranger with ca.crt and the address of the server."""

import json
import tomllib

import numpy as np
import pytest
import tomli_w

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

from fedagrac.flower.keys import write_keys
from flower_processes import Loopback

FORBIDDEN = 403


def store_data(folder):
    draw = np.random.default_rng(0)
    for i in range(2):
        np.savez(folder / f"{i}.npz", inputs=draw.random((20, 64), np.float32), targets=np.arange(20) % 10)


def add_stranger(loopback):
    """Give a stranger's address book to `flwr`: the gate and ca.crt are all that nodes are told."""
    file = loopback.home / "config.toml"
    config = tomllib.loads(file.read_text())
    config["superlink"]["stranger"] = {
        "address": f"127.0.0.1:{loopback.gate}",
        "root-certificates": str(loopback.keys / "ca.crt"),
    }
    file.write_text(tomli_w.dumps(config))


def listed_nodes(loopback):
    return json.loads(loopback.flwr("supernode", "list", "loopback", "--format", "json"))["nodes"]


def test_a_stranger_with_the_certificate_is_refused_at_both_doors(tmp_path):
    keys = write_keys(tmp_path / "keys", nodes=4)
    table = tomllib.loads((keys / "keys.toml").read_text())["tool"]["flwr"]["app"]["config"]["keys"]
    with Loopback(tmp_path / "secure", nodes=4, keys=keys) as loopback:
        store_data(loopback.folder)
        loopback.start_link()
        add_stranger(loopback)
        # the door for users: no runs, no keys, no tasks
        for path in ("control/start-run", "control/stop-run", "control/list-runs", "runtime/acquire-task"):
            assert loopback.knock(f"/v1/{path}") == FORBIDDEN
        output = loopback.flwr("supernode", "register", keys / "node-3.pub", "stranger")
        assert "registered successfully" not in output
        assert listed_nodes(loopback) == []
        # the door for nodes: a key that the operator did not register
        loopback.start_node(3, key=keys / "node-3", partition=1)
        for i in (0, 1, 2):
            output = loopback.flwr("supernode", "register", keys / f"node-{i}.pub", "loopback")
            assert "registered successfully" in output, output + loopback.logs()
        loopback.start_node(
            2, key=keys / "node-2", partition=0
        )  # a registered node that claims another's partition
        settings = {"algorithm": {"name": "fedavg", "lr": 0.1}, "steps": {"kind": "constant", "steps": 3}}
        loopback.run("run", clients=2, rounds=1, keys={i: table[i] for i in ("0", "1")}, **settings)
        loopback.wait_for(lambda: "Sent successfully" in (loopback.folder / "node2.log").read_text())
        app = loopback.folder / "apps" / "run" / "federation"
        assert "Successfully started run" not in loopback.flwr("run", app, "stranger")
        (listed,) = loopback.listed_runs()  # the stranger's run does not exist
        loopback.flwr("stop", listed["run-id"], "stranger")
        for i in (0, 1):
            loopback.start_node(i, key=keys / f"node-{i}")
        loopback.wait("run")  # completed, not stopped
        (record,) = loopback.history("run")
        assert record["clients"] == 2
        assert any(f"partition 0 belongs to {table['0']}" in event for event in record["events"])
        loopback.wait_for(lambda: loopback.processes["node3"].poll() is not None)
        assert "Failed to activate SuperNode" in (loopback.folder / "node3.log").read_text()
        assert len(listed_nodes(loopback)) == 3
