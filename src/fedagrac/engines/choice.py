"""Which engine a run takes: `engine="auto"` and `compile="auto"`.

What is fastest depends on the model, the machine and how long the run is: many lanes at once win on GPUs and for
small models, one compiled client at a time for larger convolutions on a CPU, and compiling takes time that a
short run never gets back. So short runs follow a fixed rule, and longer ones a short measurement of the
candidates, kept on disk: the same run takes the same engine the next time.
"""

from __future__ import annotations

import hashlib
import json
import logging
import platform
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedagrac.core.local import Plan
from fedagrac.engines.lanes.engine import LanesEngine
from fedagrac.engines.serial import SerialEngine
from fedagrac.errors import InputError, non_negative, one_of, positive
from fedagrac.files import cache_folder, make_folder, write_atomically
from fedagrac.parsing import parse_json
from fedagrac.version import __version__

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.engines.workload import Engine, Workload

__all__ = ["CANDIDATES", "EngineRecord", "choose_engine", "measured_choices", "processor"]

log = logging.getLogger("fedagrac")

CANDIDATES: dict[str, Callable[[Workload], Engine]] = {
    "serial": SerialEngine,
    "lanes": LanesEngine,
    "compiled lanes": lambda workload: LanesEngine(workload, compiled=True),
    "compiled client": lambda workload: LanesEngine(workload, width=1, compiled=True),
}
"""Every way of running clients that is compared, by name."""

MEASURE_FROM = 20_000
"""Client-steps of a whole run from which on candidates are measured; shorter runs follow the rule."""

COMPILE_FROM = 180.0
"""Seconds that a run must take uncompiled before compiling is tried."""

SECONDS = 1.0
"""About how long one candidate is measured at most, compiling apart."""


def choose_engine(
    workload: Workload,
    engine: Literal["auto", "serial", "lanes"],
    compile: bool | Literal["auto"],
    lanes: int,
    client_steps: float,
    before: EngineRecord | None = None,
) -> tuple[Engine, str]:
    """Return the engine for a run of so many lanes at a time and so many client-steps in all, and why it.

    A run that goes on takes the engine that it had `before`.
    """
    kept = None if before is None else before.engine(workload, engine, compile)
    if kept is not None:
        return kept, "as before the run was interrupted"
    names = _candidates(workload, engine, compile)
    if len(names) == 1:
        return CANDIDATES[names[0]](workload), "as asked"
    if client_steps < MEASURE_FROM or lanes == 1:
        name = _rule(workload, names, lanes)
        return CANDIDATES[name](workload), f"by rule: {client_steps:.0f} client-steps are too few to measure"
    return _Measurements(workload, lanes).best(names, client_steps)


@dataclass(frozen=True)
class EngineRecord:
    """What a run that goes on must share with its beginning to get the same numbers, bit for bit."""

    name: str
    compiled: bool
    width: int | None
    threads: int
    device: str
    torch: str

    @classmethod
    def of(cls, engine: Engine, workload: Workload) -> EngineRecord:
        """Describe an engine in use."""
        compiled, width = getattr(engine, "compiled", False), getattr(engine, "width", None)
        device = workload.model.device.type
        return cls(engine.name, compiled, width, torch.get_num_threads(), device, str(torch.__version__))

    @classmethod
    def read(cls, table: Any) -> EngineRecord | None:
        """Read a description from a checkpoint; None where there is none that makes sense.

        Examples:
            >>> EngineRecord.read({"name": "lanes"}) is None
            True
        """
        kinds = {"name": str, "compiled": bool, "width": int | None, "threads": int, "device": str, "torch": str}
        if not isinstance(table, dict) or set(table) != set(kinds):
            return None
        if not all(isinstance(table[name], kind) for name, kind in kinds.items()):
            return None
        sound = 0 < table["threads"] <= 4096 and (table["width"] is None or table["width"] > 0)
        return cls(**table) if sound else None

    def engine(self, workload: Workload, asked: str, compile: bool | Literal["auto"]) -> Engine | None:
        """Make this engine again; None where something else is asked for, or the device is another one."""
        fits = asked in ("auto", self.name) and compile in ("auto", self.compiled)
        if not fits or self.name not in ("serial", "lanes") or self.device != workload.model.device.type:
            log.warning("the run goes on with another engine: not bit for bit what it would have been in one go")
            return None
        if self.torch != torch.__version__:
            log.warning("the run goes on with torch %s after %s: other rounding", torch.__version__, self.torch)
        if self.name == "serial":
            return SerialEngine(workload)
        return LanesEngine(workload, width=self.width, compiled=self.compiled)


def _candidates(workload: Workload, engine: str, compile: bool | Literal["auto"]) -> list[str]:
    """Return the names of what may run, given what was asked for."""
    on_gpu = workload.model.device.type == "cuda"  # steps are recorded there, not compiled
    if engine == "serial":
        if compile is True:
            raise InputError("compile", compile, 'engine "lanes" or "auto": serial is for reading and debugging')
        return ["serial"]
    compiled = ["compiled lanes"] if engine == "lanes" else ["compiled lanes", "compiled client"]
    plain = ["lanes"] if engine == "lanes" else ["serial", "lanes"]
    if on_gpu or compile is False:
        return plain
    return compiled if compile is True else plain + compiled


def _rule(workload: Workload, names: list[str], lanes: int) -> str:
    """Return the candidate for short runs: lanes on a GPU, and on a CPU for small models; it never varies.

    Only clients of one batch size can share a batch; with fewer than four of them at a time there is too little to
    share.
    """
    kinds = len(np.unique(workload.batch_sizes(np.arange(workload.federation.num_clients))))
    together = (workload.model.device.type == "cuda" or workload.small) and lanes >= 4 * kinds
    order = ["lanes", "compiled lanes", "serial"] if together else ["serial", "compiled client", "lanes"]
    return next(name for name in order if name in names)


class _Measurements:
    """Microseconds per client-step, and seconds of preparation, of each candidate that was measured here."""

    def __init__(self, workload: Workload, lanes: int) -> None:
        self.workload = workload
        self.lanes = lanes
        self.clients = np.arange(lanes) % workload.federation.num_clients
        self.about = self._about()
        key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:20]
        folder = _folder()
        self.path = None if folder is None else folder / f"{key}.json"
        self.found: dict[str, dict[str, float]] = {}
        if self.path is not None:
            self.found = (_read(self.path) or {}).get("candidates", {})
        self.engines: dict[str, Engine] = {}

    def _about(self) -> dict[str, Any]:
        w = self.workload
        device = w.model.device
        shapes = [tuple(p.shape) for p in w.model.parameters]
        module = hashlib.sha256(f"{w.model.module!r} {shapes}".encode()).hexdigest()[:20]
        return {
            "model": type(w.model.module).__name__,
            "parameters": w.model.size,
            "module": module,
            "inputs": list(w.inputs.shape[1:]),
            "lanes": self.lanes,
            "batch": sorted({int(size) for size in w.batch_sizes(self.clients)})[-5:],
            "dtype": str(w.model.dtype),
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "fedagrac": __version__,
        }

    def best(self, names: list[str], client_steps: float) -> tuple[Engine, str]:
        """Return the engine with which the whole run, preparation included, is estimated to end first."""

        def seconds(name: str) -> float:
            row = self.found[name]
            return row["start_s"] + row["us"] * client_steps / 1e6

        plain = [name for name in names if "compiled" not in name]
        for name in plain:
            self._measure(name)
        if not plain or min(map(seconds, plain)) > COMPILE_FROM:
            for name in names:
                self._measure(name)
        known = [name for name in names if name in self.found]
        if not known:
            return CANDIDATES["lanes"](self.workload), "steps cannot be compiled here"
        name = min(known, key=seconds)
        compared = ", ".join(f"{n} {self.found[n]['us']:.3g} us" for n in sorted(known, key=seconds))
        log.info("engine: %s (per client-step: %s)", name, compared)
        return self.engines.get(name) or CANDIDATES[name](self.workload), f"by measurement: {compared}"

    def _measure(self, name: str) -> None:
        """Time a candidate, unless that was done before."""
        if name in self.found:
            return
        reference = self.found.get("serial", {}).get("us", 0.0) / 1e6
        m, steps = self.lanes, 5
        if name in ("serial", "compiled client"):
            m = min(2, self.lanes)
        elif 4 * reference > SECONDS:
            return  # a step takes so long that there is nothing to be saved by sharing it
        elif reference:
            m = max(4, min(m, int(SECONDS / reference)))
        if reference * m * steps > 2 * SECONDS:
            steps = 1
        begun = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a candidate that falls back to another one is none
            try:
                engine = CANDIDATES[name](self.workload)
                self._run(engine, m, steps)
                started = time.perf_counter() - begun
                times = [self._run(engine, m, steps)]
                while len(times) < 3 and sum(times) < SECONDS:
                    times.append(self._run(engine, m, steps))
            except UserWarning as reason:
                log.info("engine: %s is out of the question: %s", name, reason)
                return
        prepares = "compiled" in name
        self.found[name] = {"us": min(times) / (steps * m) * 1e6, "start_s": started if prepares else 0.0}
        self.engines[name] = engine
        if self.path is not None:
            make_folder(self.path.parent)
            write_atomically(self.path, json.dumps({**self.about, "candidates": self.found}, indent=1).encode())

    def _run(self, engine: Engine, m: int, steps: int) -> float:
        """Return the seconds of a few steps of some clients, with a correction as calibrated algorithms have."""
        x = self.workload.model.initial()
        clients = self.clients[:m]
        plan = Plan.of(steps=np.full(len(clients), steps), lr=0.0, correction=x.new_zeros((len(clients), len(x))))
        begun = time.perf_counter()
        float(engine.run(plan, x, clients, 0).loss.sum())  # waits for the device
        return time.perf_counter() - begun


def measured_choices() -> list[dict[str, Any]]:
    """Return what was measured on this machine so far: a description and the candidates' times, each."""
    folder = _folder()
    found = [_read(path) for path in sorted(folder.glob("*.json"))] if folder is not None else []
    return [one for one in found if one is not None]


def _folder() -> Path | None:
    cache = cache_folder()
    return None if cache is None else cache / "engines"


def _read(path: Path) -> dict[str, Any] | None:
    """Return a measurement; None for what is not one."""
    try:
        table = parse_json(path.read_bytes())
        for name, row in table["candidates"].items():
            one_of("candidate", name, CANDIDATES)
            positive("us", row["us"])
            non_negative("start_s", row["start_s"])
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return dict(table)


def processor() -> str:
    """Return what the CPU calls itself."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
