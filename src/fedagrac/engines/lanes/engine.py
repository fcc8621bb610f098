"""The lanes engine: many clients in one batch of local steps.

A client's local run is a lane: a row of an [m, d] matrix of models with its own data, step size, correction and
number of steps. All lanes step together, the module's forward vmapped over the rows. Lanes are sorted by K,
largest first, so that at step k the lanes still running are the first m_k rows, a view: nobody waits for anybody.

It obeys the same local rule as `serial` and gives its numbers, apart from rounding and from where dropout falls.
"""

from __future__ import annotations

import contextlib
import gc
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import numpy as np
import torch
from torch.func import functional_call, vmap

from fedagrac.core.local import Plan, Result
from fedagrac.engines.lanes.compiled import CannotCompileError
from fedagrac.engines.lanes.fixed import FixedLanes
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of, faster_as_products
from fedagrac.engines.lanes.memory import free_memory, keep_freed_memory
from fedagrac.engines.serial import FULL_GRADIENT_CHUNK, SerialEngine, seed_dropout, training
from fedagrac.engines.workload import starts_of

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.workload import Batches, Workload

__all__ = ["LanesEngine"]

MEMORY_SHARE = 0.4
"""Share of the free memory that one wave may plan to use."""


@dataclass(frozen=True, eq=False)
class Wave:
    """The lanes that run together, sorted by K, largest first; every table is in that order.

    Attributes:
        rows: which rows of the cohort they are, [m].
        running: how many lanes still run at each step, [K_max].
        samples: sample numbers of step 0's lanes, then of step 1's, and so on, [sum K, batch].
        shifts: how their pictures are shifted, [sum K, batch, 3], or None.
    """

    rows: npt.NDArray[np.int64]
    running: npt.NDArray[np.int64]
    samples: Tensor
    shifts: Tensor | None

    def __iter__(self) -> Iterator[tuple[int, Tensor, Tensor | None]]:
        """Yield, step by step, how many lanes run and what they use."""
        start = 0
        for m in self.running.tolist():
            stop = start + m
            yield m, self.samples[start:stop], None if self.shifts is None else self.shifts[start:stop]
            start = stop


class LanesEngine:
    """Runs the local rules of many clients as one batch.

    Attributes:
        width: the most lanes in one wave; None as long as all fit into memory.
        fixed: steps of a few fixed shapes, recorded as CUDA graphs on a GPU (the default there), instead of exact
            peeling.
        compiled: compile those steps, on a CPU.
    """

    name = "lanes"

    def __init__(
        self, workload: Workload, width: int | None = None, fixed: bool | None = None, compiled: bool = False
    ) -> None:
        on_gpu = workload.model.device.type == "cuda"
        if not on_gpu:
            keep_freed_memory()
        self.workload = workload
        self.width = width
        self.compiled = compiled and not on_gpu
        self.fixed = (on_gpu or self.compiled) if fixed is None else fixed
        self._prepared: dict[tuple[object, ...], FixedLanes] = {}
        self._activations: dict[int, int] = {}
        self._serial = SerialEngine(workload)
        self._losses = vmap(self._loss, in_dims=(0, 0, 0), randomness="different")
        self._routed = None if on_gpu else RoutedLayers(side_by_side=True, fused=self.compiled)
        self._supported = self._try()

    # the two services of an engine

    def run(self, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int) -> Result:
        """Run the local rule of every client from x, as the plan says."""
        if not self._supported:
            return self._serial.run(plan, x, clients, round)

        def rows() -> Tensor:  # every row is written by its wave
            return torch.empty((len(clients), x.shape[-1]), dtype=x.dtype, device=x.device)

        result = Result(
            models=rows(),
            loss=torch.zeros(len(clients), dtype=torch.float64, device=x.device),
            first=rows() if plan.first_steps.any() else None,
            total=rows() if plan.accumulate else None,
        )
        with training(self.workload):
            self._route(min(len(clients), self.width or len(clients)))
            for number, members in enumerate(self._packing(plan, clients)):
                seed_dropout(self.workload, round, number)
                self._run_wave(self._wave(members, plan, clients, round), plan, x, result)
        return result

    def gradients(
        self, x: Tensor, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"] = "full"
    ) -> Tensor:
        """Return every client's gradient at x over all its data, or over its first batch of the round.

        Clients of one size share a batch; the others, and large ones, run one after another.
        """
        w = self.workload
        sizes = w.federation.sizes[clients] if batch == "full" else w.batch_sizes(clients)
        rows = torch.zeros((len(clients), len(x)), dtype=x.dtype, device=x.device)
        for size in np.unique(sizes):
            members = np.flatnonzero(sizes == size)
            if not self._supported or len(members) == 1 or size > FULL_GRADIENT_CHUNK or w.model.has_dropout:
                rows[members] = self._serial.gradients(x, clients[members], round, batch)
                continue
            width = max(
                1, min(len(members), FULL_GRADIENT_CHUNK // int(size), self._fitting_width(4, int(size), 1))
            )
            with training(w):
                for start in range(0, len(members), width):
                    some = members[start : start + width]
                    samples, shifts = self._one_batch(clients[some], round, batch)
                    X = x.expand(len(some), -1).contiguous()
                    rows[some] = self._gradient(X, samples, shifts)[1]
        return rows

    def _one_batch(
        self, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"]
    ) -> tuple[Tensor, Tensor | None]:
        """Return what clients of one size use for a gradient: all their samples, or their first batch."""
        w = self.workload
        if batch == "full":
            own = np.stack([w.federation.samples_of(client) for client in clients])
            return torch.from_numpy(own).to(w.model.device), None
        drawn = [w.draw(int(client), 1, round) for client in clients]
        samples = np.concatenate([batches.samples for batches in drawn])
        shifts = [batches.shifts for batches in drawn if batches.shifts is not None]
        return self._place(samples), self._place(np.concatenate(shifts)) if shifts else None

    def _place(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(numbers).to(self.workload.model.device)

    # how lanes are packed

    def _packing(self, plan: Plan, clients: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.int64]]:
        """Yield the rows of each wave: lanes of one batch size, neighbours in K together, largest K first."""
        batch = self.workload.batch_sizes(clients)
        order = np.lexsort((np.arange(len(clients)), -plan.steps))
        parts = plan.correction is not None, plan.mu.any(), plan.first_steps.any(), plan.accumulate
        vectors = 5 + sum(map(bool, parts))
        for size in np.unique(batch):
            group = order[batch[order] == size]
            width = self.width or self._fitting_width(vectors, int(size), int(plan.steps[group].max()))
            if width < len(group):
                self.width = width  # from now on: rounding must not depend on what else the machine does
            for start in range(0, len(group), width):
                yield group[start : start + width]

    def _fitting_width(self, vectors: int, batch: int, steps: int) -> int:
        """Return how many lanes fit into the free memory if each needs so many d-vectors.

        What a backward pass keeps is measured on one batch, and what the libraries need beside it is not known: a
        wave that does not fit after all is run again in halves.
        """
        model = self.workload.model
        if batch not in self._activations:
            self._activations[batch] = self._kept_bytes(batch)
        tables = 8 * steps * batch * (1 if self.workload.federation.images is None else 4)
        per_lane = (
            vectors * model.size * torch.finfo(model.dtype).bits // 8 + 2 * self._activations[batch] + tables
        )
        return max(1, int(MEMORY_SHARE * free_memory(model.device) / per_lane))

    def _kept_bytes(self, batch: int) -> int:
        """Return the bytes that one lane keeps from a forward pass for its backward pass."""
        w = self.workload
        kept: dict[int, int] = {}

        def keep(tensor: Tensor) -> Tensor:
            kept[tensor.data_ptr()] = tensor.numel() * tensor.element_size()
            return tensor

        inputs, targets = w.load(torch.zeros(batch, dtype=torch.int64, device=w.model.device))
        with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            w.loss(w.model.module(inputs), targets)
        return sum(kept.values())

    def _wave(
        self, members: npt.NDArray[np.int64], plan: Plan, clients: npt.NDArray[np.int64], round: int
    ) -> Wave:
        """Draw the lanes' batches and lay them out step by step: exactly sum K rows, nothing is padded."""
        w = self.workload
        steps = plan.steps[members]
        running = len(steps) - np.searchsorted(steps[::-1], np.arange(steps[0]), side="right")
        offsets = np.concatenate([[0], np.cumsum(running)[:-1]])
        samples, shifts = None, None
        drawn: dict[tuple[int, int], Batches] = {}  # lanes of several runs use the same batches
        for lane, row in enumerate(members):
            asked = int(clients[row]), int(steps[lane])
            if asked not in drawn:
                drawn[asked] = w.draw(*asked, round)
            batches = drawn[asked]
            if samples is None:
                samples = np.empty((running.sum(), batches.samples.shape[1]), np.int64)
                shifts = None if batches.shifts is None else np.empty((*samples.shape, 3), np.int64)
            where = offsets[: steps[lane]] + lane
            samples[where] = batches.samples
            if shifts is not None and batches.shifts is not None:
                shifts[where] = batches.shifts
        assert samples is not None
        return Wave(members, running, self._place(samples), None if shifts is None else self._place(shifts))

    # how lanes step

    def _run_wave(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run one wave and write its rows into the result; in two halves if memory does not suffice."""
        try:
            self._step_wave(wave, plan, x, result)
            return
        except torch.OutOfMemoryError:
            if len(wave.rows) == 1:
                raise
        # only now, after the error is gone, nothing holds on to the memory of the step that failed
        self.width = (len(wave.rows) + 1) // 2
        self._prepared.clear()
        gc.collect()
        if x.is_cuda:
            torch.cuda.empty_cache()
        warnings.warn(f"out of memory with {len(wave.rows)} lanes; going on with {self.width}", stacklevel=2)
        for half in (slice(0, self.width), slice(self.width, None)):
            self._run_wave(_part(wave, half), plan, x, result)

    def _step_wave(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> None:
        """Run one wave and write its rows into the result."""
        if self.fixed and self._run_fixed(wave, plan, x, result):
            return
        rows = wave.rows

        def column(values: npt.NDArray[np.float64]) -> Tensor:
            return torch.as_tensor(values[rows], dtype=x.dtype, device=x.device)[:, None]

        K, eta, mu = column(plan.steps.astype(np.float64)), column(plan.lr), column(plan.mu)
        n_first = column(plan.first_steps.astype(np.float64))
        steps_with_first, proximal = int(plan.first_steps[rows].max()), bool(plan.mu[rows].any())
        where = torch.from_numpy(rows).to(x.device)
        C = None if plan.correction is None else plan.correction[where]
        starts = starts_of(x, where)
        X = starts.clone()
        loss = torch.zeros(len(rows), dtype=torch.float64, device=x.device)
        first = None if result.first is None else torch.zeros_like(X)
        total = None if result.total is None else torch.zeros_like(X)
        alone = int((wave.running > 1).sum())  # from this step on one lane runs, and a vmap over it only costs
        for k, (m, samples, shifts) in enumerate(wave):
            if k == alone:
                self.workload.model.bind(X[0])
            values, G = (
                self._gradient(X[:m], samples, shifts)
                if k < alone
                else self._serial.row_gradient(X, samples[0], None if shifts is None else shifts[0])
            )
            loss[:m] += values
            if total is not None:
                total[:m] += G
            if first is not None and k < steps_with_first:
                first[:m] += G * torch.where(n_first[:m] > k, 1 / n_first[:m].clamp(min=1), 0)
            if C is not None:
                G += C[:m]
            if proximal:
                G += mu[:m] * (X[:m] - starts[:m])
            X[:m].addcmul_(G, eta[:m], value=-1)
        result.models[where] = X
        result.loss[where] = loss / K[:, 0]
        for collected, into in ((first, result.first), (total, result.total)):
            if collected is not None and into is not None:
                into[where] = collected

    def _run_fixed(self, wave: Wave, plan: Plan, x: Tensor, result: Result) -> bool:
        """Run one wave in steps of fixed shapes; False where steps cannot be compiled here."""
        shape = FixedLanes.shape(wave, plan, self.workload, self.compiled)
        if shape not in self._prepared:
            self._prepared[shape] = FixedLanes(wave, plan, x, self.workload, self.pieces, self.compiled)
        try:
            self._prepared[shape].run(wave, plan, x, result)
        except CannotCompileError as error:  # before anything was written
            self.fixed = self.compiled = False
            self._routed = RoutedLayers(side_by_side=True)
            warnings.warn(f"steps run uncompiled, which is slower: {error}", stacklevel=2)
            return False
        return True

    def _gradient(self, X: Tensor, samples: Tensor, shifts: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return each lane's loss [m] and gradient [m, d] at its own model, over its own batch."""
        losses, pieces = self.pieces(list(self.workload.model.row_views(X).values()), samples, shifts)
        G = torch.cat([piece.reshape(len(X), -1) for piece in pieces], 1)
        if self.workload.weight_decay:
            G.add_(X, alpha=self.workload.weight_decay)
        return losses, G

    def pieces(
        self,
        blocks: list[Tensor],
        samples: Tensor,
        shifts: Tensor | None,
        pool: tuple[Tensor, Tensor] | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Return each lane's loss [m] and its gradient by parameter, each [m, ...], without weight decay."""
        w = self.workload
        m, batch = samples.shape
        inputs, targets = w.load(samples.reshape(-1), None if shifts is None else shifts.reshape(-1, 3), pool)
        leaves = [block.detach().requires_grad_() for block in blocks]
        with torch.enable_grad(), self._routed or contextlib.nullcontext():
            losses = self._losses(
                dict(zip(w.model.names, leaves, strict=True)),
                inputs.reshape(m, batch, *inputs.shape[1:]),
                targets.reshape(m, batch, *targets.shape[1:]),
            )
            # outside the vmap: the same numbers as vmap(grad), at less overhead
            gradients = torch.autograd.grad(losses.sum(), leaves, allow_unused=True, materialize_grads=True)
        return losses.detach(), gradients

    def _loss(self, parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        """One lane's loss as a function of its parameters."""
        output = functional_call(self.workload.model.module, parameters, (inputs,))
        return self.workload.loss(output, targets)

    def _route(self, lanes: int) -> None:
        """Choose, once and on a GPU, which convolutions run as products of patches."""
        w = self.workload
        if self._routed is not None or w.model.device.type != "cuda":
            return
        batch = int(w.batch_sizes(np.arange(w.federation.num_clients)).max())
        inputs, _ = w.load(torch.zeros(batch, dtype=torch.int64, device=w.model.device))
        found = convolutions_of(w.model.module, inputs)
        self._routed = RoutedLayers(faster_as_products(found, lanes, w.model.device, w.model.dtype))

    def _try(self) -> bool:
        """Step two lanes once; where that cannot be done, say which layer it is and leave the work to serial."""
        w = self.workload
        X = w.model.initial().repeat(2, 1)
        samples = torch.zeros((2, 2), dtype=torch.int64, device=w.model.device)
        for routed in dict.fromkeys([self._routed, None]):  # with our own layers, then with those of vmap
            self._routed = routed
            try:
                with training(w):
                    self._gradient(X, samples, None)
            except Exception as error:
                failure = error
            else:
                return True
        reason = str(failure).strip().splitlines()[0] if str(failure).strip() else type(failure).__name__
        layer = self._failing_layer(samples[0])
        warnings.warn(f"lanes cannot batch {layer}, so clients run one after another: {reason}", stacklevel=4)
        return False

    def _failing_layer(self, samples: Tensor) -> str:
        """Name the innermost layer whose vmapped forward fails, or the loss."""
        w = self.workload
        entered: list[str] = []
        left: list[str] = []
        hooks = []
        for name, layer in w.model.module.named_modules():
            title = f"{name or 'the module'} ({type(layer).__name__})"
            hooks.append(layer.register_forward_pre_hook(lambda *_, title=title: entered.append(title)))
            hooks.append(layer.register_forward_hook(lambda *_, title=title: left.append(title)))
        inputs, _ = w.load(samples)
        with contextlib.suppress(Exception), training(w):
            rows = w.model.row_views(w.model.initial().repeat(2, 1))
            vmap(lambda p, X: functional_call(w.model.module, p, (X,)), randomness="different")(
                rows, torch.stack([inputs, inputs])
            )
        for hook in hooks:
            hook.remove()
        open_ = [title for title in entered if title not in left]
        return f"layer {open_[-1]}" if open_ else "the loss"


def _part(wave: Wave, half: slice) -> Wave:
    """Return some neighbouring lanes of a wave as a wave of their own."""
    lanes = np.arange(len(wave.rows))[half]
    starts = np.concatenate([[0], np.cumsum(wave.running)[:-1]])
    running = np.clip(wave.running - lanes[0], 0, len(lanes))
    running = running[running > 0]
    keep = np.concatenate([starts[k] + lanes[0] + np.arange(m) for k, m in enumerate(running)])
    chosen = torch.from_numpy(keep).to(wave.samples.device)
    return Wave(
        wave.rows[half], running, wave.samples[chosen], None if wave.shifts is None else wave.shifts[chosen]
    )
