"""The lanes engine: many clients in one batch of local steps.

A client's local run is a lane: a row of an [m, d] matrix of models with its own data, step size, correction and
number of steps. All lanes step together, the module's forward vmapped over the rows. Lanes are sorted by K,
largest first, so the lanes that still run at step k are the first m_k rows, a view. No lane waits for another.

The engine obeys the same local rule as `serial` and gives its numbers, apart from rounding and from which units
dropout drops.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch

from fedagrac.core.local import Plan, Result
from fedagrac.engines.lanes.compiled import CannotCompileError
from fedagrac.engines.lanes.fixed import FixedLanes
from fedagrac.engines.lanes.memory import LaneMemory
from fedagrac.engines.lanes.model import LaneModel
from fedagrac.engines.lanes.peeled import PeeledLanes
from fedagrac.engines.lanes.waves import Wave, draw_wave, lane_groups
from fedagrac.engines.serial import FULL_GRADIENT_CHUNK, SerialEngine, seed_dropout, training

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.workload import Workload

__all__ = ["LanesEngine"]


class LanesEngine:
    """Runs the local rules of many clients as one batch.

    Attributes:
        width: the most lanes in one wave; None as long as all fit into memory.
        fixed: whether steps have a few fixed shapes instead of exact peeling. On a GPU, where this is the default,
            such steps are recorded as CUDA graphs.
        compiled: whether those steps are compiled.
        model: the module as a function of many lanes.
        memory: estimates how many lanes fit.
        prepared: the buffers and prepared steps of every wave shape so far.
    """

    name = "lanes"

    def __init__(
        self, workload: Workload, width: int | None = None, fixed: bool | None = None, compiled: bool = False
    ) -> None:
        on_gpu = workload.model.device.type == "cuda"
        self.workload = workload
        self.width = width
        self.compiled = compiled
        self.fixed = ((on_gpu or self.compiled) if fixed is None else fixed) and not workload.on_host
        if self.compiled and workload.on_host:
            self.compiled = False
            warnings.warn(
                "steps run uncompiled: samples on disk and transforms of your own need Python in every step",
                stacklevel=2,
            )
        self.model = LaneModel(workload, fused=self.compiled)
        self.memory = LaneMemory(workload)
        self.prepared: dict[tuple[object, ...], FixedLanes] = {}
        self._serial = SerialEngine(workload)
        self._supported = self.model.check()

    def run(self, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int) -> Result:
        """Run the local rule of every client from x and return what they reply."""
        if not self._supported:
            return self._serial.run(plan, x, clients, round)

        def rows() -> Tensor:  # every row is written by its wave
            return torch.empty((len(clients), x.shape[-1]), dtype=x.dtype, device=x.device)

        result = Result(
            models=rows(),
            loss=torch.zeros(len(clients), dtype=torch.float64, device=x.device),
            first=rows() if plan.first_steps.any() else None,
            total=rows() if plan.accumulate else None,
            buffers=None if plan.buffers is None else torch.empty_like(plan.buffers),
            slots=None if plan.slots is None else tuple(rows() for _ in plan.slots),
        )
        with training(self.workload), self.model.quiet():
            self.model.route(min(len(clients), self.width or len(clients)))
            for number, members in enumerate(self.packing(plan, clients)):
                seed_dropout(self.workload, round, number)
                self.run_wave(draw_wave(self.workload, members, plan, clients, round), plan, x, result)
        self.workload.model.buffers.check_constant()
        return result

    def gradients(
        self,
        x: Tensor,
        clients: npt.NDArray[np.int64],
        round: int,
        batch: Literal["full", "first"] = "full",
        buffers: Tensor | None = None,
    ) -> Tensor:
        """Return every client's gradient at x, [m, d], over all its data or over its first batch of the round.

        Clients of one size share a batch. Clients whose size is unique or large run one after another.
        """
        w = self.workload
        sizes = w.federation.sizes[clients] if batch == "full" else self._first_sizes(clients, round)
        rows = torch.zeros((len(clients), len(x)), dtype=x.dtype, device=x.device)
        for size in np.unique(sizes):
            members = np.flatnonzero(sizes == size)
            if not self._supported or len(members) == 1 or size > FULL_GRADIENT_CHUNK or w.model.has_dropout:
                starts = None if buffers is None else buffers[torch.from_numpy(members)]
                rows[members] = self._serial.gradients(x, clients[members], round, batch, starts)
                continue
            fitting = self.memory.fitting_width(4, int(size), 1)
            width = max(1, min(len(members), FULL_GRADIENT_CHUNK // int(size), fitting))
            with training(w), self.model.quiet():
                self.model.route(min(len(clients), self.width or len(clients)))  # as many as step together
                for start in range(0, len(members), width):
                    some = members[start : start + width]
                    samples, shifts = self._one_batch(clients[some], round, batch)
                    X = x.expand(len(some), -1).contiguous()
                    begun = None if buffers is None else w.model.buffers.rows(buffers[torch.from_numpy(some)])
                    generators = w.generators(clients[some], round) if batch == "first" else None
                    rows[some] = self.model.gradient(X, samples, shifts, begun, generators)[1]
        return rows

    def _first_sizes(self, clients: npt.NDArray[np.int64], round: int) -> npt.NDArray[np.int64]:
        """Return the samples of each client's first batch of a round, [m]."""
        w = self.workload
        if w.sampling != "cyclic":
            return w.batch_sizes(clients)
        drawn = [w.draw(int(client), 1, round) for client in clients]
        return np.array([b.samples.shape[1] if b.lengths is None else b.lengths[0] for b in drawn], np.int64)

    def _one_batch(
        self, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"]
    ) -> tuple[Tensor, Tensor | None]:
        """Return samples and shifts of clients of one size: all their samples, or their first batch."""
        w = self.workload
        if batch == "full":
            return w.on_device(np.stack([w.federation.samples_of(client) for client in clients])), None
        drawn = [w.draw(int(client), 1, round) for client in clients]
        n = None if drawn[0].lengths is None else int(drawn[0].lengths[0])  # all are of one size
        samples = np.concatenate([batches.samples[:, :n] for batches in drawn])
        shifts = [batches.shifts[:, :n] for batches in drawn if batches.shifts is not None]
        return w.on_device(samples), w.on_device(np.concatenate(shifts)) if shifts else None

    def packing(self, plan: Plan, clients: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the rows of each wave: lanes of one batch size, neighbours in K together, largest K first."""
        parts = plan.correction is not None, plan.mu.any(), plan.first_steps.any(), plan.accumulate
        others = plan.mask, plan.beside, plan.scale, plan.ascent
        vectors = 5 + sum(map(bool, parts)) + sum(part is not None for part in others) + plan.local.slots
        vectors += self.compiled and self.workload.precision == "bf16"  # the models rounded
        vectors += (0 if plan.local.plain and plan.at_x else 1) + 2 * plan.anchored + len(plan.slots or ())
        for batch, group in lane_groups(plan.steps, self.workload.batch_sizes(clients)):
            width = self.width or self.memory.fitting_width(vectors, batch, int(plan.steps[group].max()))
            if width < len(group):
                self.width = width  # from now on: rounding must not depend on what else the machine does
            for start in range(0, len(group), width):
                yield group[start : start + width]

    def run_wave(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run one wave and write its rows into the result; run two halves if it does not fit into memory."""
        try:
            self.step_wave(wave, plan, x, result)
            return
        except torch.OutOfMemoryError:
            if len(wave.rows) == 1:
                raise
        # outside the except block, where the error no longer holds the memory of the step that failed
        self.width = (len(wave.rows) + 1) // 2
        self.prepared.clear()
        gc.collect()
        if x.is_cuda:
            torch.cuda.empty_cache()
        warnings.warn(f"out of memory with {len(wave.rows)} lanes; continuing with {self.width}", stacklevel=2)
        for half in (slice(0, self.width), slice(self.width, None)):
            self.run_wave(wave.part(half), plan, x, result)

    def step_wave(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run one wave, in fixed shapes or with exact peeling, and write its rows into the result.

        Batches of several lengths have no fixed shape.
        """
        if not (self.fixed and wave.lengths is None and self._run_fixed(wave, plan, x, result)):
            PeeledLanes(wave, plan, x, self.model, self._serial).run(result)

    def _run_fixed(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> bool:
        """Run one wave in steps of fixed shapes; return False if steps cannot be compiled here."""
        shape = FixedLanes.shape(wave, plan, self.workload, self.compiled)
        if shape not in self.prepared:
            self.prepared[shape] = FixedLanes(wave, plan, x, self.workload, self.model.pieces, self.compiled)
        try:
            self.prepared[shape].run(wave, plan, x, result)
        except CannotCompileError as error:  # raised before anything was written
            self.compiled = False
            self.fixed = self.model.uncompile()
            self.prepared.clear()
            warnings.warn(f"steps run uncompiled, which is slower: {error}", stacklevel=2)
            return self.fixed and self._run_fixed(wave, plan, x, result)
        return True
