"""Waves: the lanes that run together, and the samples they use."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.local import Plan
    from fedagrac.engines.workload import Batches, Workload

__all__ = ["Wave", "draw_wave", "lane_groups"]


@dataclass(frozen=True, eq=False)
class Wave:
    """Lanes that run together, sorted by K, largest first; every table has that order.

    Attributes:
        rows: the lanes' rows in the cohort, [m].
        running: how many lanes still run at each step, [K_max].
        samples: sample numbers of the lanes of step 0, then of step 1, and so on, [sum K, batch].
        shifts: the shifts of those pictures, [sum K, batch, 3], or None.
        generators: one for each lane, for the transform of its inputs, or None.
        lengths: how many of the samples count in each entry of `samples`, [sum K]; None if all do.
    """

    rows: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    samples: Tensor
    shifts: Tensor | None
    generators: Sequence[torch.Generator] | None = None
    lengths: npt.NDArray[np.int64] | None = None

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield, for each step, the samples and the shifts of the lanes that run."""
        start = 0
        for m in self.running.tolist():
            stop = start + m
            yield self.samples[start:stop], None if self.shifts is None else self.shifts[start:stop]
            start = stop

    @property
    def offsets(self) -> npt.NDArray[np.int64]:
        """Where each step begins in `samples`, [K_max]."""
        return _offsets(self.running)

    def part(self, lanes: slice) -> Wave:
        """Return some neighbouring lanes as a wave of their own."""
        chosen = np.arange(len(self.rows))[lanes]
        running = np.clip(self.running - chosen[0], 0, len(chosen))
        running = running[running > 0]
        kept = np.concatenate(
            [start + chosen[0] + np.arange(m) for start, m in zip(self.offsets, running, strict=False)]
        )
        entries = torch.from_numpy(kept).to(self.samples.device)
        shifts = None if self.shifts is None else self.shifts[entries]
        generators = None if self.generators is None else self.generators[lanes]
        lengths = None if self.lengths is None else self.lengths[kept]
        return Wave(self.rows[lanes], running, self.samples[entries], shifts, generators, lengths)

    def step_lengths(self) -> Iterator[npt.NDArray[np.int64] | None]:
        """Yield, for each step, how many samples count in each lane that runs, [m]; None if all do."""
        if self.lengths is None:
            return itertools.repeat(None, len(self.running))
        return iter(np.split(self.lengths, self.offsets[1:]))


def _offsets(running: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    return np.concatenate([[0], np.cumsum(running)[:-1]])


def lane_groups(
    steps: npt.NDArray[np.int64], batch_sizes: npt.NDArray[np.int64]
) -> Iterator[tuple[int, npt.NDArray[np.int64]]]:
    """Yield each batch size with the rows that have it, largest K first: only those can run together.

    Examples:
        >>> steps, batch_sizes = np.array([3, 9, 5, 9]), np.array([8, 8, 4, 8])
        >>> [(size, rows.tolist()) for size, rows in lane_groups(steps, batch_sizes)]
        [(4, [2]), (8, [1, 3, 0])]
    """
    order = np.lexsort((np.arange(len(steps)), -steps))
    for size in np.unique(batch_sizes):
        yield int(size), order[batch_sizes[order] == size]


def draw_wave(
    workload: Workload,
    rows: npt.NDArray[np.int64],
    plan: Plan,
    clients: npt.NDArray[np.int64],
    round: int,
) -> Wave:
    """Draw the batches of some rows, which are sorted by K, and return them step by step, without padding."""
    steps = plan.steps[rows]
    running = len(steps) - np.searchsorted(steps[::-1], np.arange(steps[0]), side="right")
    offsets = _offsets(running)
    samples, shifts = None, None
    lengths: npt.NDArray[np.int64] | None = None
    drawn: dict[tuple[int, int], Batches] = {}  # lanes of several runs share their batches
    for lane, row in enumerate(rows):
        key = int(clients[row]), int(steps[lane])
        if key not in drawn:
            drawn[key] = workload.draw(*key, round)
        batches = drawn[key]
        if samples is None:
            samples = np.empty((running.sum(), batches.samples.shape[1]), np.int64)
            shifts = None if batches.shifts is None else np.empty((*samples.shape, 3), np.int64)
        entries = offsets[: steps[lane]] + lane
        samples[entries] = batches.samples
        if shifts is not None and batches.shifts is not None:
            shifts[entries] = batches.shifts
        if batches.lengths is not None:
            lengths = np.full(len(samples), samples.shape[1]) if lengths is None else lengths
            lengths[entries] = batches.lengths
    assert samples is not None
    on_device = None if shifts is None else workload.on_device(shifts)
    generators = workload.generators(clients[rows], round)
    return Wave(rows, running, workload.on_device(samples), on_device, generators, lengths)
