"""The choice of an engine for a run: `engine="auto"` and `compile="auto"`.

The fastest engine depends on the model, the machine and the length of the run. Many lanes at once win on GPUs
and for small models. One compiled client at a time wins for larger convolutions on a CPU. Compiling takes time
that a short run never recovers. Therefore short runs follow a fixed rule, and longer runs follow a short
measurement of the candidates. The measurement stays on disk, so the same run takes the same engine the next
time.
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
from fedagrac.data.trees import leaves
from fedagrac.engines.code import code_version
from fedagrac.engines.lanes.engine import LanesEngine
from fedagrac.engines.lanes.fixed import COMPILED_WIDTHS, UNROLL, widths_for
from fedagrac.engines.serial import SerialEngine
from fedagrac.errors import InputError, non_negative, one_of, positive
from fedagrac.files import cache_folder, make_folder, write_atomically
from fedagrac.parsing import parse_json

if TYPE_CHECKING:
    from pathlib import Path

    from fedagrac.engines.base import Engine
    from fedagrac.engines.workload import Workload

__all__ = [
    "CANDIDATES",
    "EngineRecord",
    "Measurements",
    "candidates",
    "choose_engine",
    "compile_seconds",
    "measured_choices",
    "measurements_folder",
    "processor",
    "read_measurement",
]

log = logging.getLogger("fedagrac")

CANDIDATES: dict[str, Callable[[Workload], Engine]] = {
    "serial": SerialEngine,
    "lanes": LanesEngine,
    "compiled lanes": lambda workload: LanesEngine(workload, compiled=True),
    "compiled client": lambda workload: LanesEngine(workload, width=1, compiled=True),
}
"""Every candidate of a measurement, by name."""

MEASURE_FROM = 20_000
"""The fewest client-steps of a run for which candidates are measured; shorter runs follow the rule."""

COMPILE_FROM = 180.0
"""The fewest seconds of an uncompiled run for which compiling is tried."""

COMPILE_SHARE = 0.1
"""The largest share of an uncompiled run that trials of compiled steps may take, as far as it can be foreseen."""

FURTHER_WIDTH = 0.3
"""The share of the first preparation that each further width of compiled lanes takes, if K differs."""

CLOSE = 1.5
"""How many times slower than the fastest an uncompiled candidate may be, so that it is tried compiled."""

COMPILED_FROM = {"compiled lanes": "lanes", "compiled client": "serial"}
"""The uncompiled candidate of each compiled one."""

SECONDS = 1.0
"""About the most seconds that one candidate is measured, without compiling."""


def choose_engine(
    workload: Workload,
    engine: Literal["auto", "serial", "lanes"],
    compile: bool | Literal["auto"],
    lanes: int,
    client_steps: float,
    before: EngineRecord | None = None,
    corrected: bool = True,
) -> tuple[Engine, str]:
    """Return the engine for a run and the reason for the choice.

    Args:
        workload: the problem.
        engine: the requested engine.
        compile: whether to compile steps, as requested.
        lanes: clients that run at a time.
        client_steps: local steps of all clients in the whole run.
        before: the engine that a resumed run had; it is taken again if it fits.
        corrected: whether steps have a correction; then they are measured with one.
    """
    kept = None if before is None else before.engine(workload, engine, compile)
    if kept is not None:
        return kept, "as before the run was interrupted"
    names = candidates(workload, engine, compile)
    if len(names) == 1:
        return CANDIDATES[names[0]](workload), "as asked"
    if client_steps < MEASURE_FROM or lanes == 1:
        name = _rule(workload, names, lanes)
        return CANDIDATES[name](workload), f"by rule: {client_steps:.0f} client-steps are too few to measure"
    return Measurements(workload, lanes, corrected).best(names, client_steps)


@dataclass(frozen=True)
class EngineRecord:
    """What a resumed run must share with its beginning to give bit-identical results.

    Attributes:
        name: the engine's name.
        compiled: whether steps were compiled.
        width: the most lanes in one wave; None without a limit, and for serial, which has no lanes.
        threads: how many threads torch used.
        device: the type of the device.
        torch: the version of torch.
        precision: the precision of products; None if the record does not say.
    """

    name: str
    compiled: bool
    width: int | None
    threads: int
    device: str
    torch: str
    precision: str | None = None

    @classmethod
    def of(cls, engine: Engine, workload: Workload) -> EngineRecord:
        """Return the record of an engine in use."""
        width = None if isinstance(engine, SerialEngine) else engine.width
        threads, device = torch.get_num_threads(), workload.model.device.type
        version, precision = str(torch.__version__), workload.precision
        return cls(engine.name, engine.compiled, width, threads, device, version, precision)

    @classmethod
    def read(cls, table: Any) -> EngineRecord | None:
        """Read a record from a checkpoint, or None if the table is invalid.

        Examples:
            >>> EngineRecord.read({"name": "lanes"}) is None
            True
        """
        kinds = {"name": str, "compiled": bool, "width": int | None, "threads": int, "device": str, "torch": str}
        kinds["precision"] = str | None
        if isinstance(table, dict):
            table = {"precision": None, **table}  # earlier versions did not write it
        if not isinstance(table, dict) or set(table) != set(kinds):
            return None
        if not all(isinstance(table[name], kind) for name, kind in kinds.items()):
            return None
        sound = 0 < table["threads"] <= 4096 and (table["width"] is None or table["width"] > 0)
        return cls(**table) if sound else None

    def engine(self, workload: Workload, asked: str, compile: bool | Literal["auto"]) -> Engine | None:
        """Return a new engine of this record, or None if another engine or device was requested."""
        fits = asked in ("auto", self.name) and compile in ("auto", self.compiled)
        if not fits or self.name not in ("serial", "lanes") or self.device != workload.model.device.type:
            log.warning("the run resumes with another engine: results are not bit-identical")
            return None
        if self.precision not in (None, workload.precision):
            log.warning(
                "the run resumes in %s, not %s: results are not bit-identical", workload.precision, self.precision
            )
        if self.torch != torch.__version__:
            log.warning(
                "the run resumes with torch %s, not %s: rounding may differ", torch.__version__, self.torch
            )
        if self.name == "serial":
            return SerialEngine(workload)
        return LanesEngine(workload, width=self.width, compiled=self.compiled)


def candidates(workload: Workload, engine: str, compile: bool | Literal["auto"]) -> list[str]:
    """Return the names of the candidates that fit the request."""
    on_gpu = workload.model.device.type == "cuda"
    if engine == "serial":
        if compile is True:
            raise InputError("compile", compile, 'engine "lanes" or "auto": serial is for reading and debugging')
        return ["serial"]
    compiled = ["compiled lanes"] if engine == "lanes" or on_gpu else ["compiled lanes", "compiled client"]
    plain = ["lanes"] if engine == "lanes" else ["serial", "lanes"]
    if compile is False:
        return plain
    return compiled if compile is True else plain + compiled


def _rule(workload: Workload, names: list[str], lanes: int) -> str:
    """Return the candidate for short runs, without a measurement: lanes on a GPU, and on a CPU for small models.

    Only clients of one batch size can share a batch, and lanes pay from four clients at a time. What they share is
    the cost of calling operations, about that of a million floating-point operations for each client.
    """
    kinds = len(np.unique(workload.batch_sizes(np.arange(workload.federation.num_clients))))
    together = lanes >= 4 * kinds
    if workload.model.device.type != "cuda":
        together = together and workload.small and workload.step_flops() <= 1e6 * lanes / kinds
    order = ["lanes", "compiled lanes", "serial"] if together else ["serial", "compiled client", "lanes"]
    return next(name for name in order if name in names)


class Measurements:
    """Times of the candidates for one workload on this machine, kept on disk.

    Attributes:
        rows: for each measured candidate the microseconds per client-step, `us`, and the seconds of preparation,
            `start_s`.
        engines: the candidates that were built in this process.
        unfit: the candidates that cannot run this workload, with the reason.
    """

    def __init__(self, workload: Workload, lanes: int, corrected: bool = True) -> None:
        self.workload = workload
        self.lanes = lanes
        self.corrected = corrected
        self.clients = np.arange(lanes) % workload.federation.num_clients
        self.about = self._about()
        key = hashlib.sha256(json.dumps(self.about, sort_keys=True).encode()).hexdigest()[:20]
        folder = measurements_folder()
        self.path = None if folder is None else folder / f"{key}.json"
        self.rows: dict[str, dict[str, float]] = {}
        if self.path is not None:
            self.rows = (read_measurement(self.path) or {}).get("candidates", {})
        self.engines: dict[str, Engine] = {}
        self.unfit: dict[str, str] = {}

    def _about(self) -> dict[str, Any]:
        w = self.workload
        device = w.model.device
        shapes = [tuple(p.shape) for p in w.model.parameters]
        shapes_of_inputs = [list(leaf.shape[1:]) for leaf in leaves(w.inputs)]
        module = hashlib.sha256(f"{w.model.module!r} {shapes}".encode()).hexdigest()[:20]
        return {
            "model": type(w.model.module).__name__,
            "parameters": w.model.size,
            "module": module,
            "inputs": shapes_of_inputs[0] if len(shapes_of_inputs) == 1 else shapes_of_inputs,
            "lanes": self.lanes,
            "corrected": self.corrected,
            "batch": sorted({int(size) for size in w.batch_sizes(self.clients)})[-5:],
            "dtype": str(w.model.dtype),
            "precision": w.precision,
            "device": torch.cuda.get_device_name(device) if device.type == "cuda" else processor(),
            "threads": torch.get_num_threads(),
            "torch": torch.__version__,
            "fedagrac": code_version(),
        }

    def best(self, names: list[str], client_steps: float) -> tuple[Engine, str]:
        """Return the engine with the shortest estimate for the whole run, preparation included, and the reason."""

        def seconds(name: str) -> float:
            row = self.rows[name]
            further = len(widths_for(self.lanes, COMPILED_WIDTHS)) - 1 if name == "compiled lanes" else 0
            return row["start_s"] * (1 + FURTHER_WIDTH * further) + row["us"] * client_steps / 1e6

        for name in names:
            if name not in COMPILED_FROM:
                self._measure(name)
        uncompiled = [name for name in names if name in self.rows and name not in COMPILED_FROM]
        for name in self._worth_compiling(names, client_steps):
            if self._measure(name) and uncompiled:
                # compiling takes so long that other programs may have come or gone: the rival is timed beside it
                self._measure(min(uncompiled, key=lambda rival: self.rows[rival]["us"]), again=True)
        known = [name for name in names if name in self.rows]
        if not known:
            return CANDIDATES["lanes"](self.workload), "steps cannot be compiled here"
        name = min(known, key=seconds)
        compared = ", ".join(f"{n} {self.rows[n]['us']:.3g} us" for n in sorted(known, key=seconds))
        log.info("engine: %s (per client-step: %s)", name, compared)
        return self.engines.get(name) or CANDIDATES[name](self.workload), f"by measurement: {compared}"

    def _worth_compiling(self, names: list[str], client_steps: float) -> list[str]:
        """Return the compiled candidates to try: few enough that trying them in vain hardly delays the run.

        Compiled steps of small models are always faster, so a long run tries them in any case.
        """
        us = {name: self.rows[name]["us"] for name in names if name in self.rows and name not in COMPILED_FROM}
        compiled = [name for name in names if name in COMPILED_FROM]
        if not us:
            return compiled  # nothing else was asked for, or can run
        shortest = min(us.values()) * client_steps / 1e6
        if shortest <= COMPILE_FROM:
            return []
        near = [name for name in compiled if us.get(COMPILED_FROM[name], np.inf) <= CLOSE * min(us.values())]
        near.sort(key=lambda name: us[COMPILED_FROM[name]])
        affordable = int(COMPILE_SHARE * shortest / compile_seconds(self.workload))
        return near[: max(affordable, int(self.workload.small))]

    def fastest(self, names: list[str]) -> float:
        """Return the microseconds per client-step of the fastest candidate, or infinity if none can run."""
        for name in names:
            self._measure(name)
        return min((self.rows[name]["us"] for name in names if name in self.rows), default=float("inf"))

    def forget(self) -> None:
        """Remove the measurement from the disk."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def _measure(self, name: str, again: bool = False) -> bool:
        """Time a candidate that was not timed before, and return whether it was timed.

        One that falls back to another one is left out.
        """
        if name in self.unfit or (name in self.rows and not again):
            return False
        reference = self.rows.get("serial", {}).get("us", 0.0) / 1e6
        m, steps = self.lanes, 5
        if name in ("serial", "compiled client"):
            m = min(2, self.lanes)
        elif 4 * reference > SECONDS:
            return False  # steps are so long that sharing them saves nothing
        elif reference:
            m = min(m, max(4, int(SECONDS / reference)))
        if reference * m * steps > 2 * SECONDS:
            steps = 1
        begun = time.perf_counter()
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a candidate that falls back to another one does not count
            try:
                engine = self.engines.get(name) or CANDIDATES[name](self.workload)
                self.seconds(engine, m, steps)
                started = time.perf_counter() - begun
                times = [self.seconds(engine, m, steps)]
                while len(times) < 3 and sum(times) < SECONDS:
                    times.append(self.seconds(engine, m, steps))
            except UserWarning as reason:
                if str(reason) not in self.unfit.values():
                    log.info("engine: %s: %s", name, reason)
                self.unfit[name] = str(reason)
                return False
        prepares = "compiled" in name
        self.rows[name] = {"us": min(times) / (steps * m) * 1e6, "start_s": started if prepares else 0.0}
        self.engines[name] = engine
        if self.path is not None:
            make_folder(self.path.parent)
            write_atomically(self.path, json.dumps({**self.about, "candidates": self.rows}, indent=1).encode())
        return True

    def seconds(self, engine: Engine, m: int, steps: int) -> float:
        """Return the seconds of some steps of m clients."""
        x = self.workload.model.initial()
        clients = self.clients[:m]
        correction = x.new_zeros((len(clients), len(x))) if self.corrected else None
        plan = Plan.of(steps=np.full(len(clients), steps), lr=0.0, correction=correction)
        # the time of one thread counts without that of other programs; several threads also wait for one another
        alone = x.device.type == "cpu" and torch.get_num_threads() == 1
        clock = time.process_time if alone else time.perf_counter
        begun = clock()
        float(engine.run(plan, x, clients, 0).loss.sum())  # waits for the device
        return clock() - begun


def compile_seconds(workload: Workload) -> float:
    """Return about how many seconds it takes to compile a step for the first time, on two cores."""
    unroll = UNROLL[0] if workload.small else 1
    return 20 + 0.15 * unroll * workload.step_calls()


def measured_choices() -> list[dict[str, Any]]:
    """Return all measurements on this machine: each describes a workload and has the candidates' times."""
    folder = measurements_folder()
    if folder is None:
        return []
    measurements = [read_measurement(path) for path in sorted(folder.glob("*.json"))]
    return [measurement for measurement in measurements if measurement is not None]


def measurements_folder() -> Path | None:
    """Return the folder of the measurements, or None without a cache folder."""
    cache = cache_folder()
    return None if cache is None else cache / "engines"


def read_measurement(path: Path) -> dict[str, Any] | None:
    """Read a measurement, or None if the file is invalid."""
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
    """Return the name of the CPU."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()
