"""Run the command as a user does, in a process of its own, and watch its memory from outside.

Rounds and seconds come from the run folder's history.jsonl, memory from the system: nothing is added to the run.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w

from fedagrac.storage.checkpoints import read_checkpoint

__all__ = ["Watched", "watch"]

PAUSE = 0.2


@dataclass(frozen=True, eq=False)
class Watched:
    """A run that ended, and what was seen of it.

    Attributes:
        folder: its run folder.
        samples: rounds done, resident bytes and CPU seconds, [n, 3]; only while rounds went on, not while the
            report was made.
        ends: when each round ended, in seconds since the start, [rounds].
        peak: the most resident memory of the whole process, in bytes, with the report.
        seconds: from the start of the process to its end.
    """

    folder: Path
    samples: np.ndarray
    ends: np.ndarray
    peak: int
    seconds: float

    @property
    def seconds_per_round(self) -> np.ndarray:
        """How long each round took after the first; a checkpoint counts for the round after it."""
        return np.diff(self.ends)

    def checkpoint(self, every: int) -> dict[str, float]:
        """Return size and times of the last checkpoint written; reading is tried three times."""
        files = sorted((self.folder / "checkpoint").iterdir())
        took = self.seconds_per_round
        after = np.arange(every, len(self.ends), every)[-5:]  # rounds that follow one of the last five
        plain = np.setdiff1d(np.arange(len(took)), after - 1)
        begun = time.perf_counter()
        for _ in range(3):
            read_checkpoint(self.folder / "checkpoint")
        return {
            "checkpoint_bytes": files[-1].stat().st_size,
            "checkpoint_write_s": float(np.median(took[after - 1]) - np.median(took[plain])),
            "checkpoint_read_s": (time.perf_counter() - begun) / 3,
        }


def watch(experiment: dict[str, Any], out: Path) -> Watched:
    """Run an experiment of one algorithm through `fedagrac run` into the folder `out`."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_suffix(".toml")
    file.write_text(tomli_w.dumps(experiment), encoding="utf-8")
    folder = out / experiment["algorithm"][0]["name"]
    command = [sys.executable, "-m", "fedagrac", "run", str(file), "--out", str(out), "--json"]
    begun = time.perf_counter()
    with out.with_suffix(".log").open("wb") as log:
        # one thread: these models are too small for two, which wait for each other when others need the cores
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        samples, peak = [], 0
        history = _Lines(folder / "history.jsonl")
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            resident, most = _memory(process.pid)
            used = _processor(process.pid)
            done = history.count()  # after the memory: what is seen before the last round is of a round
            if 0 < done < experiment["rounds"]:
                samples.append((done, resident, used))
            peak = max(peak, most)
            time.sleep(PAUSE)
        process.wait()
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} failed: {out.with_suffix('.log').read_text()[-2000:]}")
    records = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    ends = np.array([record["wall_time"] for record in records])
    return Watched(folder, np.array(samples), ends, peak, time.perf_counter() - begun)


class _Lines:
    """A file that grows: how many lines it has, each byte read once."""

    def __init__(self, path: Path) -> None:
        self.path, self.at, self.lines = path, 0, 0

    def count(self) -> int:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.at)
                new = file.read()
            self.at += len(new)
            self.lines += new.count(b"\n")
        return self.lines


def _memory(pid: int) -> tuple[int, int]:
    """Return what a process has in memory now, and the most it had, in bytes; zeros once it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = dict(line.split(":", 1) for line in status.splitlines())
    resident, most = (int(found.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, most


def _processor(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
