"""Install the peers, each into its own virtual environment, and time them on the public pfl-research workload.

    python benchmarks/peers/run.py [--only pfl-research,flower] [--json FILE]

Prints one line of JSON per peer; the file holds them as a list. A peer that cannot be installed, fails or takes
too long gets a line with the end of its error, and the exit code is 1. Standard library only; Python 3.11 or 3.12.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
PEERS = {  # script, requirements
    "pfl-research": (HERE / "pfl_research.py", HERE / "requirements-pfl.txt"),
    "flower": (HERE / "flower.py", HERE / "requirements-flower.txt"),
}
LAST = 15  # lines of an error that are reported


class PeerError(Exception):
    """A command that did not succeed; the text says which and how its output ended."""


def call(command, timeout):
    """The command's stdout. On a timeout its whole process group ends, workers included."""
    process = subprocess.Popen(
        [str(part) for part in command],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        start_new_session=True,
    )
    try:
        out, error = process.communicate(timeout=timeout)
        how = f"exit code {process.returncode}"
    except BaseException as problem:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        out, error = process.communicate()
        if not isinstance(problem, subprocess.TimeoutExpired):
            raise
        how = f"stopped after {timeout:g} s"
    if process.returncode:
        end = "\n".join((error.strip() or out.strip()).splitlines()[-LAST:])
        raise PeerError(f"{' '.join(str(part) for part in command)}: {how}\n{end}")
    return out


def install(peer, folder, timeout):
    """The Python of the peer's virtual environment, made and filled unless it holds these requirements already."""
    _, requirements = PEERS[peer]
    environment = folder / peer
    python, marker = environment / "bin" / "python", environment / "installed.txt"
    wanted = requirements.read_text()
    if marker.exists() and marker.read_text() == wanted:
        return python
    print(f"installing {peer} into {environment} (some minutes the first time)", file=sys.stderr, flush=True)
    torch = next(line for line in wanted.splitlines() if line.startswith("torch=="))
    pip = [python, "-m", "pip", "install", "--disable-pip-version-check", "--quiet"]
    call([sys.executable, "-m", "venv", "--clear", environment], timeout)
    call([*pip, "-c", requirements, torch], timeout)  # alone and first: a range of torch may pull in CUDA
    call([*pip, "-r", requirements], timeout)
    marker.write_text(wanted)
    return python


def measure(peer, options):
    """The peer's line."""
    script, _ = PEERS[peer]
    try:
        python = install(peer, options.folder.resolve(), options.install_timeout)
        if options.install_only:
            return {"peer": peer, "installed": str(python)}
        print(f"running {peer}", file=sys.stderr, flush=True)
        settings = [f"--{name}={getattr(options, name)}" for name in ("rounds", "users", "cohort", "cores")]
        settings += ["--channels-last"] if options.channels_last else []
        settings += [f"--cpus-per-client={options.cpus_per_client}"] if peer == "flower" else []
        return json.loads(call([python, script, *settings], options.timeout))
    except PeerError as problem:
        return {"peer": peer, "error": str(problem).splitlines()}
    except (OSError, ValueError) as problem:
        return {"peer": peer, "error": [f"{type(problem).__name__}: {problem}"]}


def main():
    parser = argparse.ArgumentParser(description="Time other frameworks on the public pfl-research workload.")
    parser.add_argument("--only", default=",".join(PEERS), help="peers, separated by commas (default: all)")
    parser.add_argument(
        "--folder", type=Path, default=HERE.parents[1] / ".bench-peers", help="of the environments"
    )
    parser.add_argument("--json", type=Path, help="write the lines to this file as well, as a list")
    parser.add_argument("--rounds", type=int, default=4, help="the first is not timed (default: 4)")
    parser.add_argument("--users", type=int, default=1000)
    parser.add_argument("--cohort", type=int, default=50)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--channels-last", action="store_true", help="images in memory as height, width, channel")
    parser.add_argument("--cpus-per-client", type=int, default=1, help="Flower: threads of an actor (default: 1)")
    parser.add_argument("--timeout", type=float, default=600, help="seconds a peer may run (default: 600)")
    parser.add_argument("--install-timeout", type=float, default=1800, help="seconds one installation may take")
    parser.add_argument("--install-only", action="store_true")
    options = parser.parse_args()
    peers = options.only.split(",")
    if unknown := [peer for peer in peers if peer not in PEERS]:
        parser.error(f"--only: no peer {unknown[0]!r}; there are {', '.join(PEERS)}")
    lines = []
    for peer in peers:
        lines.append(measure(peer, options))
        print(json.dumps(lines[-1]), flush=True)
        if options.json:
            options.json.write_text(json.dumps(lines, indent=1) + "\n")
    return int(any("error" in line for line in lines))


if __name__ == "__main__":
    sys.exit(main())
