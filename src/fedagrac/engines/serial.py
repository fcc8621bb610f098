"""The serial engine: one client after another, one step after another.

It is the reference: every other engine must give its numbers. Use it to read and to debug.
"""

from __future__ import annotations

import contextlib
import itertools
import warnings
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedagrac.core.local import Plan, Result
from fedagrac.core.optimizers import ascent_factors, clip_factors
from fedagrac.core.streams import Purpose, torch_seed
from fedagrac.engines.base import starts_of
from fedagrac.engines.workload import SMALL

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.optimizers import LocalOptimizer
    from fedagrac.engines.workload import Workload

__all__ = ["SerialEngine", "seed_dropout", "training"]

FULL_GRADIENT_CHUNK = 4096
"""Samples per piece of a full local gradient."""


class SerialEngine:
    """Runs the local rule of one client at a time."""

    name = "serial"
    width: int | None = 1
    compiled = False

    def __init__(self, workload: Workload) -> None:
        self.workload = workload

    def run(self, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int) -> Result:
        """Run the local rule of every client from x and return what they reply."""
        return self.run_until(plan, x, clients, round, over=None)[0]

    def run_until(
        self,
        plan: Plan,
        x: Tensor,
        clients: npt.NDArray[np.int64],
        round: int,
        over: Callable[[int], bool] | None,
    ) -> tuple[Result, npt.NDArray[np.int64]]:
        """Run the local rules; return the replies and how many steps each client made.

        A client stops as soon as over(steps made) is true. It makes at least one step and at most those of the
        plan. Without `over` it makes all of them.
        """
        w = self.workload
        rows = torch.arange(len(clients), device=x.device)
        models = starts_of(x if plan.start is None else plan.start, rows).clone()
        loss = torch.zeros(len(clients), dtype=torch.float64, device=x.device)
        first = torch.zeros_like(models) if plan.first_steps.any() else None
        total = torch.zeros_like(models) if plan.accumulate else None
        ends = None if plan.buffers is None else torch.zeros_like(plan.buffers)
        kept = None if plan.slots is None else tuple(slot.clone() for slot in plan.slots)
        done, by_parameter, decay = plan.steps.copy(), self._by_parameter(plan), w.decay_after_clipping(plan.local)
        with training(w):
            for i, client in enumerate(clients):
                seed_dropout(w, round, w.number_of(client))
                K, n_first = int(plan.steps[i]), int(plan.first_steps[i])
                x_i, center = models[i], x if x.ndim == 1 else x[i]
                slots = _slots(plan, kept, i, x_i)
                before = 0 if plan.before is None else int(plan.before[i])
                running = torch.zeros((), dtype=torch.float64, device=x.device)
                descent, point = Descent.of(plan, i, center, decay), Point.of(plan, i, x_i, center)
                w.model.bind(x_i if point is None else point.y)
                if plan.buffers is not None:
                    w.model.buffers.put(plan.buffers[i])
                generators = w.generators([client], round)
                for k, (samples, shifts) in enumerate(self._batches(client, K, round, over is not None)):
                    if plan.buffers is None:
                        w.model.buffers.put(None)
                    batch = w.load(samples, shifts, generators=generators)
                    if by_parameter and k >= n_first:
                        value = self._descend(descent, *batch)
                    else:
                        value, g, y = self._gradient_at(point, x_i, *batch, decayed=not decay)
                        g = descent.trained(g, y)
                        if k < n_first and first is not None:
                            first[i] += g / n_first
                        if total is not None:
                            total[i] += g
                        descent.step(x_i, g, slots, before + k)
                    running += value
                    if over is not None and over(k + 1):
                        done[i] = K = k + 1
                        break
                loss[i] = running / K
                if first is not None and n_first > K:
                    first[i] *= n_first / K
                if ends is not None:
                    ends[i] = w.model.buffers.take(ends.dtype)
        w.model.buffers.check_constant()
        return Result(models, loss, first, total, ends, slots=kept), done

    def _batches(
        self, client: int, steps: int, round: int, piecewise: bool
    ) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield a client's batches; draw them piecewise if it is unknown how many the client will use."""
        w, drawn = self.workload, 0
        while drawn < steps:
            ahead = min(steps, max(64, 2 * drawn)) if piecewise else steps
            batches = itertools.islice(w.draw(client, ahead, round).on(w.model.device), drawn, None)
            yield from read_ahead(w, batches)
            drawn = ahead

    def gradients(
        self,
        x: Tensor,
        clients: npt.NDArray[np.int64],
        round: int,
        batch: Literal["full", "first"] = "full",
        buffers: Tensor | None = None,
    ) -> Tensor:
        """Return every client's gradient at x, [m, d], over all its data or over its first batch of the round."""
        w = self.workload
        rows = torch.zeros((len(clients), len(x)), dtype=x.dtype, device=x.device)
        w.model.bind(x)
        with training(w):
            for i, client in enumerate(clients):
                seed_dropout(w, round, w.number_of(client))
                start = None if buffers is None else buffers[i]
                w.model.buffers.put(start)
                if batch == "first":
                    generators = w.generators([client], round)
                    for samples, shifts in w.draw(client, 1, round).on(x.device):
                        rows[i] = self._gradient(x, *w.load(samples, shifts, generators=generators))[1]
                    continue
                samples = torch.from_numpy(w.federation.samples_of(client)).to(x.device)
                for chunk in torch.split(samples, FULL_GRADIENT_CHUNK):
                    w.model.buffers.put(start)
                    _, g = self._gradient(x, *w.load(chunk))
                    rows[i] += g * (len(chunk) / len(samples))
        return rows

    def row_gradient(
        self,
        X: Tensor,
        samples: Tensor,
        shifts: Tensor | None,
        generators: Sequence[torch.Generator] | None,
        decayed: bool = True,
    ) -> tuple[Tensor, Tensor]:
        """Return the loss, [1], and the gradient, [1, d], at the first row of X, to which the module is bound."""
        batch = self.workload.load(samples, shifts, generators=generators)
        loss, g = self._gradient(X[0], *batch, decayed=decayed)
        return loss[None], g[None]

    def _gradient_at(
        self, point: Point | None, x: Tensor, inputs: Any, targets: Any, decayed: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return loss and gradient over a batch at x, or at a point beside it, to which the module is bound.

        The third vector is the one of which weight decay is a multiple; `decayed` says whether the gradient has
        its weight decay already. With an ascent or an anchor, both passes begin with the same buffers. The loss
        and the buffers afterwards are those of the first pass, at x.
        """
        if point is None:
            return *self._gradient(x, inputs, targets, decayed=decayed), x
        point.place(x)
        if not point.ascent and point.anchor is None:
            y = point.beside_x(x)
            return *self._gradient(y, inputs, targets, point.scale, decayed), y
        buffers = self.workload.model.buffers
        before = buffers.take(x.dtype) if buffers.names else None
        # the ascent goes along the gradient of the whole objective, in any case
        value, g = self._gradient(x, inputs, targets, decayed=decayed or point.anchor is None)
        after = buffers.take(x.dtype) if buffers.names else None
        buffers.put(before)
        if point.anchor is not None:
            point.y.copy_(point.anchor)
            g -= self._gradient(point.y, inputs, targets, decayed=decayed)[1]
            y = x - point.anchor
        else:
            point.y.copy_(x + g * ascent_factors(g.square().sum(), point.ascent))
            g = self._gradient(point.y, inputs, targets, decayed=decayed)[1]
            y = point.y
        buffers.put(after)
        return value, g, y

    def _by_parameter(self, plan: Plan) -> bool:
        """Return whether steps move one parameter after another.

        For large models, one vector of the whole gradient would take as long as the step itself.
        """
        plain = plan.linear and plan.at_x and not plan.mu.any() and not plan.accumulate
        return plain and self.workload.model.size > SMALL

    def _descend(self, descent: Descent, inputs: Any, targets: Any) -> Tensor:
        """Make a plain step of the model to which the module is bound, and return the loss before it."""
        w = self.workload
        with torch.enable_grad():
            loss = w.loss(w.call(inputs), targets)
            pieces = w.model.gradient_pieces(loss)
        corrections = None if descent.correction is None else list(w.model.views(descent.correction).values())
        for i, (parameter, g) in enumerate(zip(w.model.parameters, pieces, strict=True)):
            u = g + w.weight_decay * parameter.data if w.weight_decay else g
            if corrections is not None:
                u = u + corrections[i]  # not in place: two parameters may share one tensor as their gradient
            parameter.data.sub_(u, alpha=descent.eta)
        return loss.detach()

    def _gradient(
        self, x: Tensor, inputs: Any, targets: Any, scale: Tensor | None = None, decayed: bool = True
    ) -> tuple[Tensor, Tensor]:
        """Return loss and gradient over a batch at x, with or without weight decay.

        The module is bound to x, or to scale o x.
        """
        w = self.workload
        with torch.enable_grad():
            loss = w.loss(w.call(inputs), targets)
            g = w.model.gradient(loss)
        if scale is not None:
            g *= scale
        if w.weight_decay and decayed:
            g += w.weight_decay * x
        return loss.detach(), g


@dataclass(frozen=True, eq=False)
class Descent:
    """The part of the local rule that follows a gradient, for one member.

    Attributes:
        local: U and its clipping.
        eta: the step size.
        mu: the proximal coefficient.
        center: x~, the center of the proximal term.
        correction: c_i; None for no correction.
        mask: m_i; None if all coordinates train.
        decay: the weight decay that is added after clipping; 0 if gradients have it already.
    """

    local: LocalOptimizer
    eta: float
    mu: float
    center: Tensor
    correction: Tensor | None
    mask: Tensor | None
    decay: float

    @classmethod
    def of(cls, plan: Plan, row: int, center: Tensor, decay: float) -> Descent:
        """Return the descent of one member of a plan."""
        eta = min(float(plan.lr[row]), torch.finfo(center.dtype).max)  # torch refuses a factor beyond its type
        correction, mask = (None if rows is None else rows[row] for rows in (plan.correction, plan.mask))
        return cls(plan.local, eta, float(plan.mu[row]), center, correction, mask, decay)

    def trained(self, g: Tensor, y: Tensor) -> Tensor:
        """Return the gradient of the coordinates that the member trains, shortened to the largest norm.

        Weight decay that the gradient does not have yet is a multiple of y.
        """
        if self.mask is not None:
            g = g * self.mask
        if self.local.clip is not None:
            g = g * clip_factors(g.square().sum(), self.local.clip)
        if self.decay:
            g = g.add(y if self.mask is None else y * self.mask, alpha=self.decay)
        return g

    def step(self, x: Tensor, g: Tensor, slots: list[Tensor], k: int) -> None:
        """Make a step of x along the gradient g, which is changed, after k others with the same slots."""
        if self.correction is not None:
            g += self.correction
        if self.mu:
            g += self.mu * (x - self.center)
        u = self.local.direction(g, x, slots, self.local.numbers(k))
        x.sub_(u if self.mask is None else u * self.mask, alpha=self.eta)


@dataclass(frozen=True, eq=False)
class Point:
    """Where a client's gradients are taken if that is not x alone: scale o (x + p), x + rho g / |g|, or x and x~.

    Attributes:
        y: the vector to which the module is bound.
        beside: p; None for 0.
        scale: the scale; None for 1.
        ascent: rho.
        anchor: x~, whose gradient is subtracted; None for none.
    """

    y: Tensor
    beside: Tensor | None
    scale: Tensor | None
    ascent: float
    anchor: Tensor | None

    @classmethod
    def of(cls, plan: Plan, row: int, x: Tensor, center: Tensor) -> Point | None:
        """Return the point of one member; None if its gradients are those at x."""
        if plan.at_x:
            return None
        beside, scale = (None if rows is None else rows[row] for rows in (plan.beside, plan.scale))
        ascent = 0.0 if plan.ascent is None else float(plan.ascent[row])
        return cls(x.clone(), beside, scale, ascent, center if plan.anchored else None)

    def beside_x(self, x: Tensor) -> Tensor:
        """Return x + p."""
        return x if self.beside is None else x + self.beside

    def place(self, x: Tensor) -> None:
        """Move y to where the model x has its gradient."""
        y = self.beside_x(x)
        self.y.copy_(y if self.scale is None else self.scale * y)


def _slots(plan: Plan, kept: tuple[Tensor, ...] | None, row: int, x: Tensor) -> list[Tensor]:
    """Return the state of one member's local optimizer: zeros, or the rows that are kept."""
    if kept is None:
        return [torch.zeros_like(x) for _ in range(plan.local.slots)]
    return [slot[row] for slot in kept]


@contextlib.contextmanager
def training(workload: Workload) -> Iterator[None]:
    """Put the module into training mode, without autograd; restore the caller's random state at the end."""
    device = workload.model.device
    on_gpu = device.type == "cuda"
    workload.model.train()
    with (
        warnings.catch_warnings() if on_gpu else contextlib.nullcontext(),
        torch.random.fork_rng([device] if on_gpu else []),
        torch.no_grad(),
    ):
        if on_gpu:  # weights are views of one vector; cuDNN says at every call that it copies them
            warnings.filterwarnings("ignore", "RNN module weights are not part of single contiguous chunk")
        yield


def read_ahead(
    workload: Workload, steps: Iterable[tuple[Tensor, Tensor | None]]
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Yield samples and shifts of every step; samples on disk are read while the step before them runs."""
    steps = iter(steps)
    if not workload.on_host:
        yield from steps
        return
    upcoming = next(steps, None)
    while upcoming is not None:
        current, upcoming = upcoming, next(steps, None)
        if upcoming is not None:
            workload.load_ahead(upcoming[0])
        yield current


def seed_dropout(workload: Workload, round: int, place: int) -> None:
    """Seed the dropout masks that follow by the round and by the place: a client, or a wave of lanes."""
    # torch.manual_seed would queue a call, with its stack trace, for every kind of device without a GPU
    seed = torch_seed(workload.seed, Purpose.DROPOUT, round, place)
    torch.default_generator.manual_seed(seed)
    device = workload.model.device
    if device.type == "cuda":
        torch.cuda.default_generators[device.index or 0].manual_seed(seed)
