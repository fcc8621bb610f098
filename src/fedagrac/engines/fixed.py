"""Lanes whose steps have a few fixed shapes, so that a step can be recorded once and replayed.

A CUDA graph replays a step without the cost of Python and of launching kernels, but only with the shapes and the
memory it was recorded with. So the lanes live in buffers that stay, everything a step needs is looked up in tables
by a step counter on the device, and a step runs on the smallest of a few widths that covers the lanes still
running. Lanes that are done are carried along with step size 0 until the width shrinks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.lanes import Wave
    from fedagrac.local import Plan, Result

__all__ = ["FixedLanes", "widths_for"]

TABLE_STEPS = 256
"""Steps whose batches and step sizes are laid out at a time."""

WIDTHS = 8
"""At most so many widths: each costs a recording."""

Gradient = Callable[["Tensor", "Tensor", "Tensor | None"], "tuple[Tensor, Tensor]"]


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

    def __init__(self, wave: Wave, plan: Plan, x: Tensor, gradient: Gradient) -> None:
        self._gradient = gradient
        W, batch = len(wave.rows), wave.samples.shape[1]
        device, dtype = x.device, x.dtype
        self.X = torch.zeros((W, len(x)), dtype=dtype, device=device)
        self.center = torch.zeros_like(x) if plan.mu.any() else None
        self.C = None if plan.correction is None else torch.zeros_like(self.X)
        self.first = torch.zeros_like(self.X) if plan.first_steps.any() else None
        self.total = torch.zeros_like(self.X) if plan.accumulate else None
        self.loss = torch.zeros(W, dtype=torch.float64, device=device)
        self.mu = torch.zeros((W, 1), dtype=dtype, device=device)
        self.samples = torch.zeros((TABLE_STEPS, W, batch), dtype=torch.int64, device=device)
        self.shifts = None
        if wave.shifts is not None:
            self.shifts = torch.zeros((TABLE_STEPS, W, batch, 3), dtype=torch.int64, device=device)
        # per step and lane: the step size, and 1 while the lane runs, and the weight in the first gradient
        self.rates = torch.zeros((TABLE_STEPS, W, 3), dtype=dtype, device=device)
        self.counter = torch.zeros(1, dtype=torch.int64, device=device)
        self.widths = widths_for(W)
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._pool: Any = None

    @staticmethod
    def shape(wave: Wave, plan: Plan) -> tuple[object, ...]:
        """Return what must agree for a recorded step to be replayed."""
        parts = plan.correction is not None, bool(plan.mu.any()), bool(plan.first_steps.any()), plan.accumulate
        return len(wave.rows), wave.samples.shape[1], wave.shifts is not None, *parts

    def run(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run a wave and write its rows into the result."""
        self._record_all()
        rows = torch.from_numpy(wave.rows).to(x.device)
        self.X.copy_(x.expand_as(self.X))
        self.loss.zero_()
        if self.C is not None and plan.correction is not None:
            self.C.copy_(plan.correction[rows])
        if self.center is not None:
            self.center.copy_(x)
            self.mu.copy_(torch.as_tensor(plan.mu[wave.rows], dtype=x.dtype)[:, None])
        for collected in (self.first, self.total):
            if collected is not None:
                collected.zero_()
        starts = np.concatenate([[0], np.cumsum(wave.running)[:-1]])
        for begin in range(0, len(wave.running), TABLE_STEPS):
            steps = slice(begin, min(begin + TABLE_STEPS, len(wave.running)))
            self._lay_out(wave, plan, starts[steps], wave.running[steps], begin)
            for m in wave.running[steps].tolist():
                self._replay(min(width for width in self.widths if width >= m))
        result.models[rows] = self.X
        K = torch.as_tensor(plan.steps[wave.rows], dtype=torch.float64, device=x.device)
        result.loss[rows] = self.loss / K
        for collected, into in ((self.first, result.first), (self.total, result.total)):
            if collected is not None and into is not None:
                into[rows] = collected

    def _lay_out(
        self, wave: Wave, plan: Plan, starts: npt.NDArray[np.int64], running: npt.NDArray[np.int64], begin: int
    ) -> None:
        """Fill the tables for the steps that follow; idle lanes look at the first lane's batch and stand still."""
        T, W = len(starts), len(wave.rows)
        active = np.arange(W) < running[:, None]
        where = torch.from_numpy(starts[:, None] + np.where(active, np.arange(W), 0)).to(self.X.device)
        self.samples[:T] = wave.samples[where]
        if self.shifts is not None and wave.shifts is not None:
            self.shifts[:T] = wave.shifts[where]
        n_first = plan.first_steps[wave.rows]
        in_first = (begin + np.arange(T))[:, None] < n_first
        rates = np.stack([active * plan.lr[wave.rows], active, in_first / np.maximum(n_first, 1)], axis=-1)
        self.rates[:T] = torch.as_tensor(rates, dtype=self.X.dtype)
        self.counter.zero_()

    def _step(self, width: int) -> None:
        """One local step of the first lanes; everything is read from and written to the buffers."""
        X = self.X[:width]
        samples = self.samples[:, :width].index_select(0, self.counter)[0]
        shifts = None if self.shifts is None else self.shifts[:, :width].index_select(0, self.counter)[0]
        eta, runs, in_first = self.rates[:, :width].index_select(0, self.counter)[0].unbind(1)
        values, G = self._gradient(X, samples, shifts)
        self.loss[:width] += values * runs
        if self.total is not None:
            self.total[:width].addcmul_(G, runs[:, None])
        if self.first is not None:
            self.first[:width].addcmul_(G, in_first[:, None])
        if self.C is not None:
            G += self.C[:width]
        if self.center is not None:
            G += self.mu[:width] * (X - self.center)
        X.addcmul_(G, eta[:, None], value=-1)
        self.counter += 1

    def _replay(self, width: int) -> None:
        if width in self._graphs:
            self._graphs[width].replay()
        else:
            self._step(width)

    def _record_all(self) -> None:
        """Record a step of every width, once; without a GPU steps are simply run."""
        if self._graphs or self.X.device.type != "cuda":
            return
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        for width in self.widths:
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                for _ in range(3):  # libraries choose their kernels and allocate before anything is recorded
                    self._step(width)
            torch.cuda.current_stream().wait_stream(side)
            self.counter.zero_()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=self._pool):
                self._step(width)
            self._pool = graph.pool()
            self._graphs[width] = graph
