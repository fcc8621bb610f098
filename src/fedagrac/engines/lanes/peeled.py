"""Lanes that are peeled off exactly: every step covers the lanes that still run, and no others."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.optimizers import clip_factors, numbers_after
from fedagrac.engines.base import starts_of
from fedagrac.engines.lanes.points import Points
from fedagrac.engines.lanes.ragged import ragged_gradient
from fedagrac.engines.serial import read_ahead

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.local import Plan, Result
    from fedagrac.engines.lanes.model import LaneModel
    from fedagrac.engines.lanes.waves import Wave
    from fedagrac.engines.serial import SerialEngine

__all__ = ["PeeledLanes"]


class PeeledLanes:
    """The models of one wave, and everything that its steps read and write.

    Attributes:
        X: the models, [m, d].
        centers: x~ of every lane, [m, d].
        loss, first, total: the sums of losses, first gradients and gradients so far; None if not asked for.
        slots: the state of the local optimizer.
        moving: the module's moving buffers by name, each [m, ...].
    """

    def __init__(self, wave: Wave, plan: Plan, x: Tensor, model: LaneModel, serial: SerialEngine) -> None:
        self._wave, self._plan, self._model, self._serial = wave, plan, model, serial
        vector_model = model.workload.model
        self._decay = model.workload.decay_after_clipping(plan.local)
        self.where = torch.from_numpy(wave.rows).to(x.device)
        self.centers = starts_of(x, self.where)
        self.X = self.centers.clone() if plan.start is None else plan.start[self.where]
        self._eta, self._mu = self._column(plan.lr), self._column(plan.mu)
        self._n_first = self._column(plan.first_steps.astype(np.float64))
        self._steps_with_first = int(plan.first_steps[wave.rows].max())
        self._proximal = bool(plan.mu[wave.rows].any())
        self._C = None if plan.correction is None else plan.correction[self.where]
        self._mask = None if plan.mask is None else plan.mask[self.where]
        self._points = Points.of(plan, self.where, vector_model, self.centers)
        if plan.slots is None:
            self.slots = [torch.zeros_like(self.X) for _ in range(plan.local.slots)]
        else:
            self.slots = [slot[self.where] for slot in plan.slots]
        self.loss = torch.zeros(len(wave.rows), dtype=torch.float64, device=x.device)
        self.first = torch.zeros_like(self.X) if plan.first_steps.any() else None
        self.total = torch.zeros_like(self.X) if plan.accumulate else None
        self.moving = {} if plan.buffers is None else vector_model.buffers.rows(plan.buffers[self.where])
        # from this step on one lane runs, for which a vmap only costs time
        self._alone = int((wave.running > 1).sum())
        if vector_model.buffers.names or not plan.at_x:
            self._alone = len(wave.running)

    def _column(self, values: npt.NDArray[np.float64]) -> Tensor:
        """Return one number per lane, [m, 1]."""
        return torch.as_tensor(values[self._wave.rows], dtype=self.X.dtype, device=self.X.device)[:, None]

    def run(self, result: Result) -> None:
        """Make all steps, and write the rows of the wave into the result."""
        workload = self._model.workload
        steps = zip(self._wave.running, read_ahead(workload, self._wave), self._wave.step_lengths(), strict=True)
        for k, (m, (samples, shifts), lengths) in enumerate(steps):
            if k == self._alone:
                workload.model.bind(self.X[0])
            generators = None if self._wave.generators is None else self._wave.generators[:m]
            if k < self._alone:
                before = {name: values[:m].clone() for name, values in self.moving.items()} or None
                points = None if self._points is None else self._points.lanes(slice(m))
                values, G, after, Y = ragged_gradient(
                    self._model, self.X[:m], samples, shifts, before, generators, lengths, points, not self._decay
                )
                for name, rows_of_buffer in self.moving.items():
                    rows_of_buffer[:m] = after[name]
            else:
                n = None if lengths is None else int(lengths[0])
                frames = None if shifts is None else shifts[0, :n]
                values, G = self._serial.row_gradient(
                    self.X, samples[0, :n], frames, generators, decayed=not self._decay
                )
                Y = self.X[:1]
            self.loss[:m] += values
            self._step(k, int(m), G, Y)
        K = self._column(self._plan.steps.astype(np.float64))
        result.models[self.where] = self.X
        result.loss[self.where] = self.loss / K[:, 0]
        ends = workload.model.buffers.join(self.moving, self.X.dtype) if self.moving else None
        for collected, into in ((self.first, result.first), (self.total, result.total), (ends, result.buffers)):
            if collected is not None and into is not None:
                into[self.where] = collected
        for slot, into in zip(self.slots, result.slots or (), strict=False):
            into[self.where] = slot

    def _step(self, k: int, m: int, G: Tensor, Y: Tensor | None) -> None:
        """Move the first m lanes along their gradients. Weight decay that these do not have is a multiple of Y."""
        local, X = self._plan.local, self.X[:m]
        if self._mask is not None:
            G *= self._mask[:m]
        if local.clip is not None:
            G *= clip_factors(G.square().sum(1), local.clip)[:, None]
        if self._decay and Y is not None:
            G.add_(Y if self._mask is None else Y * self._mask[:m], alpha=self._decay)
        if self.total is not None:
            self.total[:m] += G
        if self.first is not None and k < self._steps_with_first:
            n_first = self._n_first[:m]
            self.first[:m] += G * torch.where(n_first > k, 1 / n_first.clamp(min=1), 0)
        if self._C is not None:
            G += self._C[:m]
        if self._proximal:
            G += self._mu[:m] * (X - self.centers[:m])
        U = local.direction(G, X, [slot[:m] for slot in self.slots], self._numbers(k, m))
        X.addcmul_(U if self._mask is None else U * self._mask[:m], self._eta[:m], value=-1)

    def _numbers(self, k: int, m: int) -> Sequence[Any]:
        """Return the local optimizer's numbers in step k: for all lanes, or [m, 1] if they made steps before."""
        if self._plan.before is None:
            return self._plan.local.numbers(k)
        table = numbers_after(self._plan.local, self._plan.before[self._wave.rows[:m]], k, 1)[0]
        return torch.as_tensor(table, dtype=self.X.dtype, device=self.X.device)[:, :, None].unbind(1)
