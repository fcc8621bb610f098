"""Run `fedagrac run` in its own process and watch it from outside.

Rounds and seconds come from history.jsonl, memory and CPU time from the system.
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
    """The measurements of a finished run.

    Attributes:
        folder: the run folder.
        samples: rounds done, resident bytes and CPU seconds, [n, 3]; taken between the first and the last round.
        ends: seconds from the start to the end of each round, [rounds].
        peak: the peak of resident bytes, including the report.
        seconds: from the start of the process to its end.
    """

    folder: Path
    samples: np.ndarray
    ends: np.ndarray
    peak: int
    seconds: float

    @property
    def seconds_per_round(self) -> np.ndarray:
        """The seconds of each round after the first; a checkpoint counts for the round after it."""
        return np.diff(self.ends)

    def checkpoint(self, every: int) -> dict[str, float]:
        """Return the size of the last checkpoint and the times to write it and to read it (mean of three)."""
        files = sorted((self.folder / "checkpoint").iterdir())
        took = self.seconds_per_round
        after = np.arange(every, len(self.ends), every)[-5:]  # rounds that follow one of the last five checkpoints
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
    """Run an experiment of one algorithm into the folder `out` and return its measurements."""
    out.parent.mkdir(parents=True, exist_ok=True)
    file = out.with_suffix(".toml")
    file.write_text(tomli_w.dumps(experiment), encoding="utf-8")
    folder = out / experiment["algorithm"][0]["name"]
    command = [sys.executable, "-m", "fedagrac", "run", str(file), "--out", str(out), "--json"]
    begun = time.perf_counter()
    with out.with_suffix(".log").open("wb") as log:
        # One thread: these models are too small for two.
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        samples, peak = [], 0
        history = _Lines(folder / "history.jsonl")
        while os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            resident, most = _memory(process.pid)
            used = _processor(process.pid)
            done = history.count()  # after the memory, so that a sample never includes the report
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
    """Counts the lines of a growing file and reads each byte once."""

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
    """Return the resident bytes of a process now and at their peak; zeros once it has ended."""
    status = Path(f"/proc/{pid}/status").read_text()
    fields = dict(line.split(":", 1) for line in status.splitlines())
    resident, most = (int(fields.get(name, "0 kB").split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return resident, most


def _processor(pid: int) -> float:
    """Return the CPU seconds that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
