"""The files to deploy an app with: pinned, without privileges, and with options that exist."""

import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

pytest.importorskip("flwr", reason="the extra fedagrac[flower] is not installed")

import fedagrac as fg
import processes
from fedagrac.flower.app import write_app

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
UNITS = ["flower-superlink.service", "flower-gate.service", "flower-supernode@.service"]


@pytest.fixture(scope="module")
def deploy(tmp_path_factory):
    return write_app(tmp_path_factory.mktemp("new") / "my-app") / "deploy"


@pytest.fixture(scope="module")
def services(deploy):
    return yaml.safe_load((deploy / "compose.yaml").read_text())["services"]


def pins(file):
    lines = [line for line in file.read_text().splitlines() if "==" in line and not line.startswith("#")]
    return {canonicalize_name(line.split("==")[0]): line.split("==")[1] for line in lines}


def needed():
    """Return the names of everything that fedagrac[flower] installs here, with what those packages need."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    waiting = [Requirement(line) for line in project["dependencies"] + project["optional-dependencies"]["flower"]]
    names = set()
    while waiting:
        one = waiting.pop()
        if (one.name, *sorted(one.extras)) in names:
            continue
        names.add((one.name, *sorted(one.extras)))
        for line in metadata.requires(one.name) or []:
            further = Requirement(line)
            if further.marker is None or any(further.marker.evaluate({"extra": e}) for e in one.extras or {""}):
                waiting.append(further)
    return {canonicalize_name(name) for name, *_ in names}


def test_the_image_installs_the_versions_of_this_repository(deploy):
    chosen, constraints = pins(deploy / "requirements.txt"), pins(ROOT / "constraints.txt")
    assert chosen.pop("fedagrac[flower]") == fg.__version__
    assert {name: constraints.get(name, version) for name, version in chosen.items()} == chosen
    assert needed() <= set(chosen)


def test_the_image_holds_no_secrets_and_no_root(deploy, services):
    lines = (deploy / "Dockerfile").read_text().splitlines()
    assert [line for line in lines if line.startswith(("COPY", "ADD"))] == [
        "COPY requirements.txt /opt/requirements.txt"
    ]
    assert [line for line in lines if line.startswith("USER")] == ["USER 10001"]
    (base,) = [line.split()[1] for line in lines if line.startswith("FROM")]
    for image in [base, *(service["image"] for service in services.values())]:
        assert re.search(r":v?\d+\.\d+\.\d+", image), image
    assert services["superlink"]["image"] == f"my-app:{fg.__version__}"


def test_no_placeholder_is_left(deploy):
    for path in [*deploy.iterdir(), deploy.parent / "README.md"]:
        assert not re.search("@[A-Z]+@", path.read_text()), path


def test_containers_have_no_privileges_and_see_only_their_own_key(services):
    for name, service in services.items():
        assert service["read_only"], name
        assert service["cap_drop"] == ["ALL"]
        assert service["security_opt"] == ["no-new-privileges:true"]
    for i in range(3):
        assert services[f"supernode-{i}"]["secrets"] == ["ca.crt", f"node-{i}"]
    assert not any("ca.key" in service.get("secrets", []) for service in services.values())


def test_nodes_reach_the_gate_and_not_the_superlink(services):
    assert services["superlink"]["networks"] == ["server"]
    assert all(services[f"supernode-{i}"]["networks"] == ["nodes"] for i in range(3))
    published = {name: service.get("ports", []) for name, service in services.items()}
    outside = [
        name for name, ports in published.items() if any(not port.startswith("127.0.0.1:") for port in ports)
    ]
    assert outside == ["gate"]


def test_units_run_without_privileges(deploy):
    for name in UNITS:
        text = (deploy / name).read_text()
        for line in ("DynamicUser=yes", "NoNewPrivileges=yes", "ProtectSystem=strict", "CapabilityBoundingSet="):
            assert line in text.splitlines(), (name, line)
    assert "--host 127.0.0.1 " in (deploy / "flower-superlink.service").read_text()


def test_every_option_exists(deploy, services):
    commands = [service["command"] for service in services.values() if "command" in service]
    for name in UNITS:
        (line,) = [line for line in (deploy / name).read_text().splitlines() if line.startswith("ExecStart=")]
        program, *rest = shlex.split(line.removeprefix("ExecStart="))
        commands.append([Path(program).name, *rest])
    used = {}
    for command in commands:
        subcommand = [word for word in command[1:3] if word in ("flower", "gate")]
        options = {word.partition("=")[0] for word in command if word.startswith("--")}
        used.setdefault((command[0], *subcommand), set()).update(options)
    assert set(used) == {("flower-superlink",), ("flower-supernode",), ("fedagrac", "flower", "gate")}
    for (program, *subcommand), options in used.items():
        start = [sys.executable, "-m", "fedagrac"] if program == "fedagrac" else [BIN / program]
        code, printed, _ = processes.run([*start, *subcommand, "--help"])
        assert code == 0
        assert options <= set(re.findall(r"--[a-z-]+", printed)), program


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd is not installed")
def test_systemd_accepts_the_units(deploy, tmp_path):
    for name in UNITS:
        made = tmp_path / name.replace("@", "@0")
        text = (deploy / name).read_text()
        made.write_text(re.sub(r"/opt/flower/bin/\S+", sys.executable, text))  # its command must exist
        done = subprocess.run(
            ["systemd-analyze", "verify", made], capture_output=True, text=True, timeout=60, check=False
        )
        assert (done.returncode, done.stdout + done.stderr) == (0, "")
