"""Lanes whose steps have a few fixed shapes, so that a step can be prepared once and repeated.

A CUDA graph replays a step without the cost of Python and of launching kernels. A compiled step runs without the
cost of calling operations, and in fewer kernels; on a GPU it is recorded, too. Both are bound to the shapes and
the memory they were made with. Therefore lanes live in permanent buffers, a step counter on the device looks up
everything a step needs in tables, and a step runs on the smallest of a few widths that covers the lanes still
running. Finished lanes stay, with step size 0, until the width shrinks.
"""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch

from fedagrac.core.optimizers import clip_factors, numbers_after
from fedagrac.engines.base import place_of
from fedagrac.engines.lanes.compiled import CannotCompileError, compile_step
from fedagrac.engines.lanes.kernels.descend import descend
from fedagrac.engines.lanes.points import Points, per_lane
from fedagrac.engines.precision import products

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.local import Plan, Result
    from fedagrac.engines.lanes.waves import Wave
    from fedagrac.engines.workload import Workload

__all__ = ["FixedLanes", "Kind", "one_more", "widths_for"]

TABLE_STEPS = 250
"""Steps whose batches and step sizes are in the tables at a time; a multiple of every entry of UNROLL."""

WIDTHS = 8
"""The most widths that are recorded; each costs a recording."""

COMPILED_WIDTHS = 4
"""The most widths that are compiled; each costs seconds."""

UNROLL = (5, 2, 1)
"""Steps of a small model per compiled call; the largest that the longest lane needs is taken."""

COMPILED_ERROR = {torch.float64: 1e-6, torch.float32: 0.02, torch.bfloat16: 0.2}
"""How far compiled steps may be from the same steps uncompiled, by the type of the numbers that are multiplied.

In a deep network rounding moves some ReLU to the other side of zero, and a gradient by a percent.
"""

ROUNDED_ALIKE = 3.0
"""How many times the error of TF32 products in a step the same products may have in the compiled step.

In a deep network TF32 moves a gradient by more than COMPILED_ERROR, in another direction for each order of sums.
"""

Pieces = Callable[..., Any]
"""`LaneModel.pieces`, which returns losses, gradients by parameter, and the buffers afterwards, among others."""


def widths_for(lanes: int, most: int = WIDTHS) -> list[int]:
    """Return evenly spaced widths for this many lanes, largest first.

    Examples:
        >>> widths_for(20)
        [20, 18, 15, 13, 10, 8, 5, 3]
        >>> widths_for(20, most=4)
        [20, 15, 10, 5]
        >>> widths_for(3)
        [3, 2, 1]
    """
    return sorted({-(-lanes * i // most) for i in range(1, most + 1)}, reverse=True)


class Kind(NamedTuple):
    """One kind of prepared call: its lanes, whether it collects first gradients, and its steps."""

    width: int
    collecting: bool
    unroll: int


class Buffers(NamedTuple):
    """Everything a step reads and writes. Each parameter has one contiguous block [W, ...].

    Attributes:
        X, C, first, total: models, corrections, first gradients and gradient sums, block by block.
        center: the start of each lane, the center of its proximal term.
        loss: the sum of losses, [W].
        mu: the proximal coefficients, [W].
        samples, shifts: those of each step, [steps, W, batch] and [steps, W, batch, 3].
        rates: for each step and lane the step size, 1 while the lane runs, and the weight in the first gradient.
        counter: the number of the next step.
        pool: all training inputs and targets.
        moving: the module's moving buffers by name, each [W, ...]; None if every step begins with the given ones.
        mask: the coordinates that lanes train, block by block.
        slots: the state of the local optimizer, block by block.
        points: where gradients are taken; None for the models.
        numbers: the numbers of the local optimizer for each step, [steps, n], or for each step and lane,
            [steps, W, n]; None if it has none.
    """

    X: list[Tensor]
    C: list[Tensor] | None
    first: list[Tensor] | None
    total: list[Tensor] | None
    center: list[Tensor] | None
    loss: Tensor
    mu: Tensor
    samples: Tensor
    shifts: Tensor | None
    rates: Tensor
    counter: Tensor
    pool: tuple[Any, Any]
    moving: dict[str, Tensor] | None
    mask: list[Tensor] | None
    slots: list[list[Tensor]]
    points: Points | None
    numbers: Tensor | None


def one_more(kinds: Sequence[Kind], prepared: Iterable[Kind]) -> list[Kind]:
    """Return the kinds of a wave's calls if only one more is prepared: the next wider one stands for the others.

    The kinds of a wave come in descending widths.

    Examples:
        >>> wide, narrow, narrowest = (Kind(width, True, 1) for width in (20, 15, 10))
        >>> [kind.width for kind in one_more([wide, narrow, narrowest], [])]
        [20, 20, 20]
        >>> [kind.width for kind in one_more([wide, narrow, narrowest], [wide])]
        [20, 15, 15]
    """
    ready = set(prepared)
    ready.update([kind for kind in kinds if kind not in ready][:1])
    taken: list[Kind] = []
    for kind in kinds:
        taken.append(kind if kind in ready else taken[-1])
    return taken


class FixedLanes:
    """Buffers and prepared steps for waves of one shape: lanes, batch size and the parts of a plan.

    Attributes:
        buffers: everything that steps read and write.
        compiled: whether steps are compiled.
        unroll: the steps of one call.
        widths: the widths that are prepared when they are needed, largest first.
        gradual: whether each wave prepares one kind of call at most. A GPU's first round then waits for one
            compilation; lanes that have ended stay a little longer until narrower steps are there, too.
    """

    def __init__(
        self, wave: Wave, plan: Plan, x: Tensor, workload: Workload, pieces: Pieces, compiled: bool = False
    ) -> None:
        self._pieces, self._model, self._local = pieces, workload.model, plan.local
        self._product_dtype = workload.product_dtype
        self._keeps = plan.slots is not None
        self._decay = workload.decay_after_clipping(plan.local)
        W, batch = len(wave.rows), wave.samples.shape[1]
        device, dtype = x.device, x.dtype
        shifts = None
        if wave.shifts is not None:
            shifts = torch.zeros((TABLE_STEPS, W, batch, 3), dtype=torch.int64, device=device)
        self.buffers = Buffers(
            X=self._blocks(W, x),
            C=None if plan.correction is None else self._blocks(W, x),
            first=self._blocks(W, x) if plan.first_steps.any() else None,
            total=self._blocks(W, x) if plan.accumulate else None,
            center=self._blocks(W, x) if plan.mu.any() else None,
            loss=torch.zeros(W, dtype=torch.float64, device=device),
            mu=torch.zeros(W, dtype=dtype, device=device),
            samples=torch.zeros((TABLE_STEPS, W, batch), dtype=torch.int64, device=device),
            shifts=shifts,
            rates=torch.zeros((TABLE_STEPS, W, 3), dtype=dtype, device=device),
            counter=torch.zeros(1, dtype=torch.int64, device=device),
            pool=workload.pool,
            moving=None if plan.buffers is None else self._model.buffers.rows(plan.buffers[:1].expand(W, -1)),
            mask=None if plan.mask is None else self._blocks(W, x),
            slots=[self._blocks(W, x) for _ in range(plan.local.slots)],
            points=self._points(plan, W, x),
            numbers=self._numbers(W, x),
        )
        self.compiled = compiled
        self.unroll = _unroll(wave, workload) if compiled else 1
        self.widths = widths_for(W, COMPILED_WIDTHS if compiled else WIDTHS)
        self._rounded: list[Tensor] = []  # models as compiled steps multiply them: rounded once, in the update
        if compiled and self._product_dtype != dtype:
            self._rounded = [torch.zeros_like(block, dtype=self._product_dtype) for block in self.buffers.X]
        self._prepared: dict[Kind, Callable[[], Any]] = {}
        self._on_gpu = device.type == "cuda"
        self.gradual = compiled and self._on_gpu
        self._pool: Any = None
        self._side: Any = None

    def _blocks(self, lanes: int, x: Tensor) -> list[Tensor]:
        """Return zeros in one block [lanes, ...] for each parameter."""
        views = self._model.views(x.reshape(-1, x.shape[-1])[0]).values()
        return [torch.zeros((lanes, *view.shape), dtype=x.dtype, device=x.device) for view in views]

    def _numbers(self, lanes: int, x: Tensor) -> Tensor | None:
        """Return a table of the optimizer's numbers, for each lane if slots are kept; None if it has none."""
        columns = len(self._local.numbers(0))
        shape = (TABLE_STEPS, lanes, columns) if self._keeps else (TABLE_STEPS, columns)
        return torch.ones(shape, dtype=x.dtype, device=x.device) if columns else None

    def _points(self, plan: Plan, lanes: int, x: Tensor) -> Points | None:
        """Return room for the points at which gradients are taken; None if they are taken at the models."""
        if plan.at_x:
            return None
        beside, scale = (None if rows is None else self._blocks(lanes, x) for rows in (plan.beside, plan.scale))
        ascent = None if plan.ascent is None else torch.zeros(lanes, dtype=x.dtype, device=x.device)
        return Points(beside, scale, ascent, self._blocks(lanes, x) if plan.anchored else None)

    def _fill(self, blocks: list[Tensor], rows: Tensor) -> None:
        """Copy rows [W, d] into blocks."""
        for block, view in zip(blocks, self._model.row_views(rows).values(), strict=True):
            block.copy_(view)

    @staticmethod
    def shape(wave: Wave, plan: Plan, workload: Workload, compiled: bool) -> tuple[object, ...]:
        """Return the key of the waves that can share prepared steps."""
        parts = plan.correction is not None, bool(plan.mu.any()), bool(plan.first_steps.any()), plan.accumulate
        unroll = _unroll(wave, workload) if compiled else 1
        moving = plan.buffers is not None
        others = [rows is not None for rows in (plan.mask, plan.beside, plan.scale, plan.ascent, plan.slots)]
        others.append(plan.anchored)
        sizes = len(wave.rows), wave.samples.shape[1]
        return *sizes, wave.shifts is not None, unroll, moving, *parts, *others, plan.local

    def run(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run a wave and write its rows into the result; compile or record missing steps first."""
        kinds = self._kinds(wave, plan)
        if self.gradual:
            kinds = one_more(kinds, self._prepared)
        missing = [kind for kind in dict.fromkeys(kinds) if kind not in self._prepared]
        if missing:
            with _no_garbage_collection() if self._on_gpu else contextlib.nullcontext():
                self._prepared |= {kind: self._prepare(kind) for kind in missing}
        b = self.buffers
        where = place_of(wave.rows, x.device)
        self._begin(wave, plan, x, where)
        offsets = wave.offsets
        # copied now, because a copy to a GPU waits for what it has to do; the next round is drawn meanwhile
        K = torch.as_tensor(plan.steps[wave.rows], dtype=torch.float64, device=x.device)
        for begin in range(0, len(wave.running), TABLE_STEPS):
            steps = slice(begin, min(begin + TABLE_STEPS, len(wave.running)))
            self._lay_out(wave, plan, offsets[steps], wave.running[steps], begin)
            for kind in missing if self.compiled and begin == 0 else ():
                self._check_compiled(kind)
            for kind in kinds[begin // self.unroll : -(-steps.stop // self.unroll)]:
                self._prepared[kind]()
        result.loss[where] = b.loss / K
        taken = (b.X, result.models), (b.first, result.first), (b.total, result.total)
        for blocks, into in (*taken, *zip(b.slots, result.slots or (), strict=False)):
            if blocks is not None and into is not None:
                for block, view in zip(blocks, self._model.row_views(into).values(), strict=True):
                    view[where] = block
        if b.moving is not None and result.buffers is not None:
            result.buffers[where] = self._model.buffers.join(b.moving, x.dtype)

    def _begin(self, wave: Wave, plan: Plan, x: Tensor, where: slice | Tensor) -> None:
        """Fill the buffers with the starts of a wave."""
        b = self.buffers
        centers = x.expand(len(wave.rows), -1) if x.ndim == 1 else x[where]
        self._fill(b.X, centers if plan.start is None else plan.start[where])
        for block, exact in zip(self._rounded, b.X, strict=False):
            block.copy_(exact)
        b.loss.zero_()
        if b.C is not None and plan.correction is not None:
            self._fill(b.C, plan.correction[where])
        if b.center is not None:
            self._fill(b.center, centers)
            b.mu.copy_(torch.as_tensor(plan.mu[wave.rows], dtype=x.dtype))
        if b.mask is not None and plan.mask is not None:
            self._fill(b.mask, plan.mask[where])
        if b.points is not None:
            self._fill_points(b.points, plan, wave.rows, where, centers)
        for collected in (b.first, b.total, *(() if self._keeps else b.slots)):
            for block in collected or ():
                block.zero_()
        for slot, start in zip(b.slots, plan.slots or (), strict=False):
            self._fill(slot, start[where])
        if b.moving is not None and plan.buffers is not None:
            for name, start in self._model.buffers.rows(plan.buffers[where]).items():
                b.moving[name].copy_(start)

    def _fill_points(
        self,
        points: Points,
        plan: Plan,
        rows: npt.NDArray[np.int64],
        where: slice | Tensor,
        centers: Tensor,
    ) -> None:
        """Copy the points of a wave."""
        if points.anchor is not None:
            self._fill(points.anchor, centers)
        for blocks, values in ((points.beside, plan.beside), (points.scale, plan.scale)):
            if blocks is not None and values is not None:
                self._fill(blocks, values[where])
        if points.ascent is not None and plan.ascent is not None:
            points.ascent.copy_(torch.as_tensor(plan.ascent[rows], dtype=points.ascent.dtype))

    def _lay_out(
        self, wave: Wave, plan: Plan, offsets: npt.NDArray[np.int64], running: npt.NDArray[np.int64], begin: int
    ) -> None:
        """Fill the tables for the next steps; finished lanes use the first lane's batch and step size 0."""
        b = self.buffers
        T, W = len(offsets), len(wave.rows)
        active = np.arange(W) < running[:, None]
        where = torch.from_numpy(offsets[:, None] + np.where(active, np.arange(W), 0)).to(b.loss.device)
        b.samples[:T] = wave.samples[where]
        if b.shifts is not None and wave.shifts is not None:
            b.shifts[:T] = wave.shifts[where]
        n_first = plan.first_steps[wave.rows]
        in_first = (begin + np.arange(T))[:, None] < n_first
        rates = np.stack([active * plan.lr[wave.rows], active, in_first / np.maximum(n_first, 1)], axis=-1)
        b.rates[:T] = torch.as_tensor(rates, dtype=b.rates.dtype)
        if b.numbers is not None:
            before = np.zeros(1, np.int64) if plan.before is None else plan.before[wave.rows]
            numbers = numbers_after(plan.local, before, begin, T)
            b.numbers[:T] = torch.as_tensor(numbers if self._keeps else numbers[:, 0], dtype=b.numbers.dtype)
        b.rates[T : T + self.unroll] = 0  # for the steps of a call after the last one
        b.counter.zero_()

    def _kinds(self, wave: Wave, plan: Plan) -> list[Kind]:
        """Return the kinds of a wave's calls; each is as wide as its first step needs."""
        collecting = int(plan.first_steps[wave.rows].max())
        widths = np.array(self.widths)
        return [
            Kind(
                int(widths[widths >= wave.running[k]].min()),
                self.buffers.first is not None and (self.compiled or k < collecting),
                self.unroll,
            )
            for k in range(0, len(wave.running), self.unroll)
        ]

    def _steps(self, kind: Kind, b: Buffers) -> None:
        """Make the local steps of one call."""
        for _ in range(kind.unroll):
            self._step(kind, b)

    def _step(self, kind: Kind, b: Buffers) -> None:
        """Make one local step of the first lanes; it reads and writes only the buffers."""
        width = kind.width
        samples = b.samples[:, :width].index_select(0, b.counter)[0]
        shifts = None if b.shifts is None else b.shifts[:, :width].index_select(0, b.counter)[0]
        eta, runs, in_first = b.rates[:, :width].index_select(0, b.counter)[0].unbind(1)
        before = None if b.moving is None else {name: rows[:width].clone() for name, rows in b.moving.items()}
        points = None if b.points is None else b.points.lanes(slice(width))
        losses, gradients, moved, Y = self._pieces(
            [block[:width] for block in b.X], samples, shifts, b.pool, before, None, points, not self._decay
        )
        b.loss[:width] += losses * runs
        for name, rows in (b.moving or {}).items():  # finished lanes keep the buffers with which they ended
            rows[:width] = torch.where(per_lane(runs, rows) > 0, moved[name], rows[:width])
        gradients = self._clipped(gradients, Y, b, width)
        numbers = () if b.numbers is None else b.numbers.index_select(0, b.counter)[0].unbind(-1)
        for i, g in enumerate(gradients):
            X = b.X[i][:width]
            if b.total is not None:
                b.total[i][:width].addcmul_(g, per_lane(runs, X))
            if b.first is not None and kind.collecting:
                b.first[i][:width].addcmul_(g, per_lane(in_first, X))
            if b.center is not None:
                g = g + per_lane(b.mu[:width], X) * (X - b.center[i][:width])  # noqa: PLW2901
            C = None if b.C is None else b.C[i][:width]
            if b.mask is not None or not self._local.identity:
                g = self._direction(g if C is None else g + C, X, i, b, numbers, runs)  # noqa: PLW2901
                C = None
                if b.mask is not None:
                    g = g * b.mask[i][:width]  # noqa: PLW2901
            descend(X, g, C, eta)
        b.counter.add_(1)

    def _direction(
        self, G: Tensor, X: Tensor, block: int, b: Buffers, numbers: Sequence[Tensor], runs: Tensor
    ) -> Tensor:
        """Return U(G) of one block. Where slots are kept, those of finished lanes stay as they ended."""
        slots = [blocks[block][: len(X)] for blocks in b.slots]
        if not self._keeps:
            return self._local.direction(G, X, slots, numbers)
        before = [slot.clone() for slot in slots]
        U = self._local.direction(G, X, slots, [per_lane(number[: len(X)], X) for number in numbers])
        for slot, ended in zip(slots, before, strict=True):
            slot.copy_(torch.where(per_lane(runs, X) > 0, slot, ended))
        return U

    def _clipped(
        self, gradients: Sequence[Tensor], Y: list[Tensor] | None, b: Buffers, width: int
    ) -> Sequence[Tensor]:
        """Return the gradients of the coordinates that lanes train, shortened to the largest norm.

        Weight decay that they do not have yet is a multiple of Y.
        """
        if b.mask is not None:
            gradients = [g * block[:width] for g, block in zip(gradients, b.mask, strict=True)]
        if self._local.clip is None:
            return gradients
        squares = torch.stack([g.square().flatten(1).sum(1) for g in gradients]).sum(0)
        factors = clip_factors(squares, self._local.clip)
        shortened = [g * per_lane(factors, g) for g in gradients]
        for i, y in enumerate(Y or ()):
            shortened[i].add_(y if b.mask is None else y * b.mask[i][:width], alpha=self._decay)
        return shortened

    def _prepare(self, kind: Kind) -> Callable[[], Any]:
        """Return a function that makes the steps of a kind: compiled or plain, and on a GPU recorded."""
        steps: Callable[[], Any] = lambda: self._steps(kind, self.buffers)  # noqa: E731
        self.buffers.counter.zero_()
        if self.compiled:
            rounded = list(zip(self.buffers.X, self._rounded, strict=False))
            steps = compile_step(lambda buffers: self._steps(kind, Buffers(*buffers)), self.buffers, rounded)
        return self._record(steps) if self._on_gpu else steps

    def _check_compiled(self, kind: Kind) -> None:
        """Raise CannotCompileError if a compiled call moves the lanes otherwise than the same steps uncompiled.

        The buffers keep their numbers. Steps that are random, because of dropout for example, are not compared.
        """
        b = self.buffers
        optional = (b.first, b.total, (b.moving or {}).values(), *b.slots, self._rounded)
        changing = [*b.X, b.loss, b.counter, *(block for blocks in optional for block in blocks or ())]
        before = [tensor.clone() for tensor in changing]

        def moved(steps: Callable[[], Any], seed: int) -> list[Tensor]:
            torch.manual_seed(seed)
            steps()
            ends = [block - start for block, start in zip(b.X, before, strict=False)]
            for tensor, start in zip(changing, before, strict=True):
                tensor.copy_(start)
            return ends

        uncompiled: Callable[[], Any] = lambda: self._steps(kind, b)  # noqa: E731
        with torch.random.fork_rng([b.loss.device] if self._on_gpu else []):
            expected = moved(uncompiled, seed=0)
            if all(map(torch.equal, expected, moved(uncompiled, seed=1))):
                got = moved(self._prepared[kind], seed=0)
                if _agree(got, expected, COMPILED_ERROR[self._product_dtype]):
                    return
                with products("float32"):
                    precise = moved(uncompiled, seed=0)
                if not _as_precise(got, expected, precise):
                    raise CannotCompileError("torch's compiler gives other numbers than the steps themselves")

    def _record(self, steps: Callable[[], Any]) -> Callable[[], Any]:
        """Record steps as a CUDA graph and return its replay."""
        if self._side is None:  # one for all recordings: libraries allocate memory for each stream
            self._side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._side.wait_stream(torch.cuda.current_stream())
        graph = torch.cuda.CUDAGraph()
        with torch.random.fork_rng([self.buffers.loss.device]):  # recording leaves the state of dropout unchanged
            with torch.cuda.stream(self._side):
                steps()  # before the recording, libraries choose their kernels and allocate
            torch.cuda.current_stream().wait_stream(self._side)
            with torch.cuda.graph(graph, pool=self._pool):
                steps()
        self._pool = graph.pool()
        return graph.replay


def _agree(moves: Sequence[Tensor], expected: Sequence[Tensor], tolerance: float) -> bool:
    """Return whether moves of all lanes agree in every block, up to a part of its norm and of the whole norm."""
    norms = torch.stack([block.norm() for block in expected])
    errors = torch.stack([(ours - theirs).norm() for ours, theirs in zip(moves, expected, strict=True)])
    return bool(((errors <= tolerance * (norms + 0.01 * norms.norm())) | ~norms.isfinite()).all())


def _as_precise(moves: Sequence[Tensor], others: Sequence[Tensor], precise: Sequence[Tensor]) -> bool:
    """Return whether moves are about as near to those with precise products as others are, in every block.

    Examples:
        >>> precise, others = [torch.zeros(4)], [torch.full((4,), 0.03)]
        >>> _as_precise([torch.full((4,), -0.03)], others, precise), _as_precise([torch.ones(4)], others, precise)
        (True, False)
    """
    errors, own = (
        torch.stack([(a - b).norm() for a, b in zip(some, precise, strict=True)]) for some in (moves, others)
    )
    return bool((errors <= ROUNDED_ALIKE * (own + 0.1 * own.norm())).all())


def _unroll(wave: Wave, workload: Workload) -> int:
    """Return the steps of one compiled call."""
    return next(n for n in UNROLL if n <= len(wave.running)) if workload.small else 1


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect garbage before, not during, recordings: freeing an earlier graph would break them."""
    gc.collect()
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
