"""Give the real command received folders and wrong environments: one line, soon, with little memory."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from benchmarks.soak.part import TESTS, Part, Promise

if TYPE_CHECKING:
    from collections.abc import Callable

__all__ = ["run"]

SECONDS, MEMORY = 300.0, 2**30
"""The longest time and the largest memory of a command. A busy machine makes one slow, a trap makes it hang."""

OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")
ESCAPES = "\x1b]0;mine\x07 [red]x[/red] \u202eevil\u2066 \x9b2J"
EXPERIMENT: dict[str, Any] = {
    "name": "small",
    "rounds": 1,
    "lr": 0.1,
    "data": {"name": "digits", "clients": 2},
    "steps": {"kind": "constant", "steps": 1},
    "algorithm": [{"name": "fedavg"}],
}


@dataclass(frozen=True)
class Attack:
    """A command in a folder that somebody else made.

    Attributes:
        words: the arguments of `fedagrac`.
        code: its exit code.
        says: what it must print.
        environment: variables that somebody else set.
        prepare: writes the folder.
        check: returns whether the folder is as it should be afterwards.
    """

    words: tuple[str, ...]
    code: int
    says: str
    environment: tuple[tuple[str, str], ...] = ()
    prepare: Callable[[Path], object] = lambda folder: None
    check: Callable[[Path], bool] = lambda folder: True


def run(out: Path) -> Part:
    """Run every attack as a process and measure it."""
    sys.path.insert(0, str(TESTS))
    part, attacks, begun = Part(), _attacks(), time.monotonic()
    for number, (name, attack) in enumerate(attacks.items()):
        left = (time.monotonic() - begun) / max(number, 1) * (len(attacks) - number)
        print(f"files: {number} of {len(attacks)}, about {left:.0f} s left", file=sys.stderr, flush=True)
        folder = out / "files" / re.sub(r"\W+", "-", name)
        folder.mkdir(parents=True)
        attack.prepare(folder)
        measured = _measured(attack, folder)
        text = measured.pop("text")
        good = measured["code"] == attack.code and bool(re.search(attack.says, text)) and attack.check(folder)
        clean = not OBEYED.search(text) and "Traceback" not in text
        part.figures[name] = measured
        part.promises += [
            Promise(f"{name}: ends as it should, with a clean text", good and clean, "==", 1),
            Promise(f"{name}: seconds", measured["seconds"], "<=", SECONDS),
            Promise(f"{name}: peak memory in MB", measured["mb"], "<=", MEMORY / 2**20),
        ]
        if not (good and clean):
            part.figures[name]["text"] = ascii(text[-500:])
    return part


def _measured(attack: Attack, folder: Path) -> dict[str, Any]:
    """Run a command and return its exit code, its output, its seconds and its peak memory."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200", **dict(attack.environment)}
    log, begun = folder / "output.log", time.monotonic()
    with log.open("wb") as file:
        words = [sys.executable, "-m", "fedagrac", *attack.words]
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=file, stderr=subprocess.STDOUT)
        peak, code, before = 0, None, os.times()
        while code is None and time.monotonic() - begun < SECONDS:
            peak = max(peak, peak_of(process.pid))
            code = process.poll()
            time.sleep(0.02)
        if code is None:
            process.kill()
            process.wait()
    used, after = {"seconds": time.monotonic() - begun, "mb": peak / 2**20}, os.times()
    used["CPU s"] = after.children_user + after.children_system - before.children_user - before.children_system
    return {"code": code, **used, "text": log.read_text(encoding="utf-8", errors="replace")}


def peak_of(pid: int) -> int:
    """Return the peak of a process's resident memory so far, in bytes; 0 once it has ended."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    match = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(match[1]) * 1024 if match else 0


def _attacks() -> dict[str, Attack]:
    """Return all attacks by name."""
    return {
        "escapes in a received run": Attack(("report", "run", "--out", "page"), 0, r"\\x1b\]0;mine", (), _escapes),
        "a history of 50 MB": Attack(("report", "run", "--out", "page"), 0, "page", (), _long_history),
        "a label of 20,000 characters": Attack(
            ("report", "run"), 2, "at most 200 characters", (), lambda folder: _run(folder, label="x" * 20_000)
        ),
        "a sparse history of 200 GB": Attack(("report", "run"), 2, "at most", (), _sparse_history),
        "a sparse data file of 200 GB": Attack(
            ("run", "mine.toml", "--data-dir", "data", "--out", "out"), 2, "214748364800 bytes", (), _sparse_data
        ),
        "an import path in a received folder": Attack(
            ("run", "--resume", "--out", "received"),
            2,
            "--trust-imports",
            (),
            _import_path,
            lambda folder: not (folder / "received" / "imported").exists(),
        ),
        **_environments(),
    }


def _environments() -> dict[str, Attack]:
    """Return the attacks by variables of launchers."""
    words = ("run", "mine.toml", "--out", "out")
    slurm = (("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0"))
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    taken.listen()
    port = str(taken.getsockname()[1])
    _OPEN.append(taken)
    ranks = (("WORLD_SIZE", "2"), ("RANK", "0"), ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", port))
    return {
        "SLURM_NTASKS=4 SLURM_PROCID=0": Attack(words, 0, "running alone", slurm, _mine),
        "WORLD_SIZE=2": Attack(words, 0, "running alone", (("WORLD_SIZE", "2"),), _mine),
        "WORLD_SIZE=abc": Attack(words, 2, "WORLD_SIZE = 'abc'", (("WORLD_SIZE", "abc"),), _mine),
        "a taken port": Attack(words, 2, port, (*ranks, ("FEDAGRAC_RANK_SECONDS", "5")), _mine),
    }


_OPEN: list[socket.socket] = []
"""Sockets that keep ports taken until the end."""


def _mine(folder: Path, **changes: Any) -> None:
    (folder / "mine.toml").write_text(tomli_w.dumps({**EXPERIMENT, **changes}), encoding="utf-8")


def _run(folder: Path, rounds: int = 1, **texts: str) -> Path:
    """Write a received run."""
    from run_folders import record, write_run

    return write_run(folder / "run", [record(n, 0.5, 1.0) for n in range(1, rounds + 1)], **texts)


def _escapes(folder: Path) -> None:
    written = _run(folder, label=ESCAPES, reason=ESCAPES, status="diverged", note=ESCAPES)
    (written / "environment.json").write_text(json.dumps({"device": ESCAPES}), encoding="utf-8")


def _long_history(folder: Path) -> None:
    """Write 181,704 rounds, 50 MB."""
    from run_folders import record

    written = _run(folder)
    text = json.dumps(record(1, 0.5, 1.0))
    with (written / "history.jsonl").open("w", encoding="utf-8") as file:
        size = number = 0
        while size < 50_000_000:
            number += 1
            size += file.write(text.replace('"round": 1,', f'"round": {number},', 1) + "\n")


def _sparse_history(folder: Path) -> None:
    os.truncate(_run(folder) / "history.jsonl", 200 * 2**30)


def _sparse_data(folder: Path) -> None:
    _mine(folder, data={"name": "a9a", "clients": 2})
    (folder / "data" / "a9a").mkdir(parents=True)
    for name in ("a9a", "a9a.t"):
        (folder / "data" / "a9a" / name).touch()
        os.truncate(folder / "data" / "a9a" / name, 200 * 2**30)


def _import_path(folder: Path) -> None:
    received = folder / "received"
    received.mkdir()
    table = {**EXPERIMENT, "model": {"name": "evil:make"}}
    (received / "experiment.toml").write_text(tomli_w.dumps(table), encoding="utf-8")
    mark = str((received / "imported").absolute())
    (received / "evil.py").write_text(f"open({mark!r}, 'w').close()\ndef make(**_): pass\n", encoding="utf-8")
