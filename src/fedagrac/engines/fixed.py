"""Lanes whose steps have a few fixed shapes, so that a step can be recorded once and replayed.

A CUDA graph replays a step without the cost of Python and of launching kernels, but only with the shapes and the
memory it was recorded with. So the lanes live in buffers that stay, everything a step needs is looked up in tables
by a step counter on the device, and a step runs on the smallest of a few widths that covers the lanes still
running. Lanes that are done are carried along with step size 0 until the width shrinks.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.engines.descend import descend

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.base import Workload
    from fedagrac.engines.lanes import Wave
    from fedagrac.local import Plan, Result

__all__ = ["FixedLanes", "widths_for"]

TABLE_STEPS = 256
"""Steps whose batches and step sizes are laid out at a time."""

WIDTHS = 8
"""At most so many widths: each costs a recording."""

Pieces = Callable[["list[Tensor]", "Tensor", "Tensor | None"], "tuple[Tensor, tuple[Tensor, ...]]"]
"""Losses and gradients, parameter by parameter, of lanes whose parameters are given in blocks."""


def widths_for(lanes: int) -> list[int]:
    """Return the widths for so many lanes, largest first, evenly spaced.

    Examples:
        >>> widths_for(20)
        [20, 18, 15, 13, 10, 8, 5, 3]
        >>> widths_for(3)
        [3, 2, 1]
    """
    return sorted({-(-lanes * i // WIDTHS) for i in range(1, WIDTHS + 1)}, reverse=True)


class FixedLanes:
    """Buffers and recorded steps for waves of one shape: lanes, batch size and the parts that a plan has."""

    def __init__(self, wave: Wave, plan: Plan, x: Tensor, workload: Workload, pieces: Pieces) -> None:
        self._pieces, self._model, self._weight_decay = pieces, workload.model, workload.weight_decay
        W, batch = len(wave.rows), wave.samples.shape[1]
        device, dtype = x.device, x.dtype
        # one contiguous block [W, ...] per parameter: kernels get aligned memory, and nothing is copied together
        self.X = self._blocks(W, x)
        self.center = [view.clone() for view in self._model.views(x).values()] if plan.mu.any() else None
        self.C = None if plan.correction is None else self._blocks(W, x)
        self.first = self._blocks(W, x) if plan.first_steps.any() else None
        self.total = self._blocks(W, x) if plan.accumulate else None
        self.loss = torch.zeros(W, dtype=torch.float64, device=device)
        self.mu = torch.zeros(W, dtype=dtype, device=device)
        self.samples = torch.zeros((TABLE_STEPS, W, batch), dtype=torch.int64, device=device)
        self.shifts = None
        if wave.shifts is not None:
            self.shifts = torch.zeros((TABLE_STEPS, W, batch, 3), dtype=torch.int64, device=device)
        # per step and lane: the step size, and 1 while the lane runs, and the weight in the first gradient
        self.rates = torch.zeros((TABLE_STEPS, W, 3), dtype=dtype, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.widths = widths_for(W)
        self._graphs: dict[tuple[int, bool], torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    def _blocks(self, lanes: int, x: Tensor) -> list[Tensor]:
        views = self._model.views(x).values()
        return [torch.zeros((lanes, *view.shape), dtype=x.dtype, device=x.device) for view in views]

    def _fill(self, blocks: list[Tensor], rows: Tensor) -> None:
        """Copy rows [W, d] into blocks."""
        for block, view in zip(blocks, self._model.row_views(rows).values(), strict=True):
            block.copy_(view)

    @staticmethod
    def shape(wave: Wave, plan: Plan) -> tuple[object, ...]:
        """Return what must agree for a recorded step to be replayed."""
        parts = plan.correction is not None, bool(plan.mu.any()), bool(plan.first_steps.any()), plan.accumulate
        return len(wave.rows), wave.samples.shape[1], wave.shifts is not None, *parts

    def run(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run a wave and write its rows into the result."""
        kinds = self._kinds(wave, plan)
        self._record(kinds)
        rows = torch.from_numpy(wave.rows).to(x.device)
        self._fill(self.X, x.expand(len(rows), -1))
        self.loss.zero_()
        if self.C is not None and plan.correction is not None:
            self._fill(self.C, plan.correction[rows])
        if self.center is not None:
            for held, view in zip(self.center, self._model.views(x).values(), strict=True):
                held.copy_(view)
            self.mu.copy_(torch.as_tensor(plan.mu[wave.rows], dtype=x.dtype))
        for collected in (self.first, self.total):
            for block in collected or ():
                block.zero_()
        starts = np.concatenate([[0], np.cumsum(wave.running)[:-1]])
        for begin in range(0, len(wave.running), TABLE_STEPS):
            steps = slice(begin, min(begin + TABLE_STEPS, len(wave.running)))
            self._lay_out(wave, plan, starts[steps], wave.running[steps], begin)
            for kind in kinds[steps]:
                self._replay(kind)
        K = torch.as_tensor(plan.steps[wave.rows], dtype=torch.float64, device=x.device)
        result.loss[rows] = self.loss / K
        for blocks, into in ((self.X, result.models), (self.first, result.first), (self.total, result.total)):
            if blocks is not None and into is not None:
                into[rows] = torch.cat([block.reshape(len(rows), -1) for block in blocks], 1)

    def _lay_out(
        self, wave: Wave, plan: Plan, starts: npt.NDArray[np.int64], running: npt.NDArray[np.int64], begin: int
    ) -> None:
        """Fill the tables for the steps that follow; idle lanes look at the first lane's batch and stand still."""
        T, W = len(starts), len(wave.rows)
        active = np.arange(W) < running[:, None]
        where = torch.from_numpy(starts[:, None] + np.where(active, np.arange(W), 0)).to(self.loss.device)
        self.samples[:T] = wave.samples[where]
        if self.shifts is not None and wave.shifts is not None:
            self.shifts[:T] = wave.shifts[where]
        n_first = plan.first_steps[wave.rows]
        in_first = (begin + np.arange(T))[:, None] < n_first
        rates = np.stack([active * plan.lr[wave.rows], active, in_first / np.maximum(n_first, 1)], axis=-1)
        self.rates[:T] = torch.as_tensor(rates, dtype=self.rates.dtype)
        self.counter.zero_()

    def _kinds(self, wave: Wave, plan: Plan) -> list[tuple[int, bool]]:
        """Return for every step its width, and whether first gradients are still collected."""
        collecting = int(plan.first_steps[wave.rows].max())
        widths = np.array(self.widths)
        return [(int(widths[widths >= m].min()), k < collecting) for k, m in enumerate(wave.running)]

    def _step(self, width: int, collecting: bool) -> None:
        """One local step of the first lanes; everything is read from and written to the buffers."""
        samples = self.samples[:, :width].index_select(0, self.counter)[0]
        shifts = None if self.shifts is None else self.shifts[:, :width].index_select(0, self.counter)[0]
        eta, runs, in_first = self.rates[:, :width].index_select(0, self.counter)[0].unbind(1)
        losses, gradients = self._pieces([block[:width] for block in self.X], samples, shifts)
        self.loss[:width] += losses * runs
        for i, g in enumerate(gradients):
            X = self.X[i][:width]

            def per_lane(values: Tensor, X: Tensor = X) -> Tensor:
                return values.reshape(-1, *[1] * (X.ndim - 1))

            if self._weight_decay:
                g = g.add(X, alpha=self._weight_decay)  # noqa: PLW2901
            if self.total is not None:
                self.total[i][:width].addcmul_(g, per_lane(runs))
            if self.first is not None and collecting:
                self.first[i][:width].addcmul_(g, per_lane(in_first))
            if self.center is not None:
                g = g + per_lane(self.mu[:width]) * (X - self.center[i])  # noqa: PLW2901
            descend(X, g, None if self.C is None else self.C[i][:width], eta)
        self.counter += 1

    def _replay(self, kind: tuple[int, bool]) -> None:
        if kind in self._graphs:
            self._graphs[kind].replay()
        else:
            self._step(*kind)

    def _record(self, kinds: list[tuple[int, bool]]) -> None:
        """Record a step of every kind that is needed and not there yet; without a GPU steps are simply run."""
        if self.loss.device.type != "cuda":
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for kind in dict.fromkeys(kinds):
            if kind in self._graphs:
                continue
            self.counter.zero_()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries choose their kernels and allocate before anything is recorded
                    self._step(*kind)
            torch.cuda.current_stream().wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with _no_garbage_collection(), torch.cuda.graph(graph, pool=self._pool):
                self._step(*kind)
            self._pool = graph.pool()
            self._graphs[kind] = graph


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage now, not while a step is recorded: freeing an earlier graph would spoil the recording."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
