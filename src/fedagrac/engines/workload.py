"""The problem that an engine works on: a model, a loss, data, and how batches are drawn.

Algorithm names may not enter here.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from fedagrac.core.streams import Purpose, torch_seed
from fedagrac.data.batches import Sampling, batch_lengths, batch_positions
from fedagrac.data.disk import DiskArray
from fedagrac.data.pictures import crop_and_flip, draw_shifts
from fedagrac.data.trees import leaves, map_leaves, num_samples
from fedagrac.engines.precision import Precision, product_dtype, rounded
from fedagrac.engines.trial import try_step
from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.optimizers import LocalOptimizer
    from fedagrac.data.federation import Federation
    from fedagrac.models.vector import VectorModel

__all__ = ["SMALL", "Batches", "Loss", "Workload", "on_disk"]

Loss = Callable[[Any, Any], "Tensor"]
"""(output, target) -> scalar mean over the samples. Both are tensors, or tuples or dicts of tensors."""

SMALL = 100_000
"""The most parameters of a small model; models with convolutions are never small."""

SMALL_FLOPS = 20e6
"""The most floating-point operations of a small model's step."""

AHEAD = 2_000_000
"""The most sample numbers that are drawn ahead; with the shifts of pictures they take 64 MB."""


@dataclass(frozen=True, eq=False)
class Batches:
    """A client's batches.

    Attributes:
        samples: sample numbers, [steps, batch].
        shifts: the shifts of those pictures, [steps, batch, 3], or None.
        lengths: how many of the samples count in each step, the first ones, [steps]; None if all do.
    """

    samples: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64] | None
    lengths: npt.NDArray[np.int64] | None = None

    def on(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield samples and shifts of every step, on a device."""
        samples = torch.from_numpy(self.samples).to(device)
        shifts = None if self.shifts is None else torch.from_numpy(self.shifts).to(device)
        for k, row in enumerate(samples):
            n = len(row) if self.lengths is None else int(self.lengths[k])
            yield row[:n], None if shifts is None else shifts[k, :n]


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, a loss, data on the device, and how batches are drawn.

    Attributes:
        model: the module as a function of x.
        loss: a scalar mean over the samples of a batch.
        inputs, targets: the pooled training samples: tensors on the device, or arrays on disk; tuples or dicts of
            these if the module has several inputs. Pictures are bytes.
        test: the test inputs and targets, on the device, or None.
        batch_size: samples per step; None for all samples of a client.
        sampling: how batches are drawn.
        weight_decay: adds weight_decay * x to every gradient, after clipping.
        seed: names the random streams.
        numbers: the number that names each client's streams, [M]; None for the client's own number. A machine that
            holds the data of one client alone calls it client 0, but must draw that client's batches.
        floats: the places among the inputs of integers that the module takes only as floating-point numbers.
        steps_before: the steps of each client before a round, [M], after which "cyclic" sampling continues; None
            if every round begins with a new pass.
        precision: the precision of the module's products; models, losses and gradients have the model's type.
        drawn: batches that were drawn ahead, by client, steps and round; `draw` takes them out.
    """

    model: VectorModel
    loss: Loss
    federation: Federation
    inputs: Any
    targets: Any
    test: tuple[Any, Any] | None
    batch_size: int | None
    sampling: Sampling
    weight_decay: float
    seed: int
    numbers: npt.NDArray[np.int64] | None = None
    floats: frozenset[int] = frozenset()
    steps_before: Callable[[int], npt.NDArray[np.int64]] | None = None
    precision: Precision = "float32"
    drawn: dict[tuple[int, int, int], Batches] = field(init=False, repr=False, default_factory=dict)

    @classmethod
    def of(
        cls,
        model: VectorModel,
        federation: Federation,
        loss: Loss | None,
        batch_size: int | None,
        sampling: Sampling,
        weight_decay: float,
        seed: int,
        numbers: npt.NDArray[np.int64] | None = None,
        precision: Precision = "float32",
    ) -> Workload:
        """Put the data on the device, try one step on a few samples, and return the workload."""
        if precision == "bf16" and model.dtype != torch.float32:
            accepted = f'"float32", or a model of torch.float32: this one is of {model.dtype}'
            raise InputError("precision", precision, accepted)

        def place(tree: Any) -> Any:
            return map_leaves(lambda leaf: leaf if on_disk(leaf) else _placed(leaf, model), tree)

        workload = cls(
            model=model,
            loss=loss or nn.functional.cross_entropy,
            federation=federation,
            inputs=place(federation.inputs),
            targets=place(federation.targets),
            test=None if federation.test is None else (place(federation.test[0]), place(federation.test[1])),
            batch_size=batch_size,
            sampling=sampling,
            weight_decay=weight_decay,
            seed=seed,
            numbers=numbers,
            precision=precision,
        )
        return dataclasses.replace(workload, floats=try_step(workload, default_loss=loss is None))

    def decay_after_clipping(self, local: LocalOptimizer) -> float:
        """Return the weight decay that is added to clipped gradients; 0 if nothing is clipped.

        Without clipping, gradients are computed with their weight decay.
        """
        return 0.0 if local.clip is None else self.weight_decay

    def batch_sizes(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples per step of each client, [m]; a pass of "cyclic" sampling may end with fewer."""
        sizes = self.federation.sizes[clients]
        if self.batch_size is None:
            return sizes
        if self.sampling != "replacement":
            return np.minimum(sizes, self.batch_size)
        return np.full_like(sizes, self.batch_size)

    def smallest_batch(self) -> int:
        """Return the fewest samples of any step; the last batch of a pass of "cyclic" sampling may be short."""
        sizes = self.federation.sizes
        smallest = int(self.batch_sizes(np.arange(len(sizes))).min())
        if self.sampling != "cyclic" or self.batch_size is None:
            return smallest
        rest = sizes % self.batch_size
        return min(smallest, int(rest[rest > 0].min(initial=smallest)))

    def number_of(self, client: int) -> int:
        """Return the number that names the client's random streams."""
        return int(client if self.numbers is None else self.numbers[client])

    def draw_ahead(self, clients: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], round: int) -> None:
        """Draw the batches of a coming round, while a GPU works on the present one. Those drawn before go."""
        self.drawn.clear()
        if int(steps.sum()) * int(self.batch_sizes(clients).max(initial=0)) <= AHEAD:
            keys = zip(clients.tolist(), steps.tolist(), strict=True)
            self.drawn.update({(i, k, round): self.draw(i, k, round) for i, k in keys})

    def draw(self, client: int, steps: int, round: int) -> Batches:
        """Return the client's samples in each step of the round, and the shifts of its pictures."""
        ahead = self.drawn.pop((client, steps, round), None)
        if ahead is not None:
            return ahead
        samples, number = self.federation.samples_of(client), self.number_of(client)
        before = 0 if self.steps_before is None else int(self.steps_before(round)[client])
        how = len(samples), steps, self.batch_size, self.sampling
        positions = batch_positions(*how, self.seed, round, number, before)
        lengths = batch_lengths(*how, before)
        images = self.federation.images
        if images is None or not images.padding:
            return Batches(samples[positions], None, lengths)
        shifts = draw_shifts(steps, positions.shape[1], images.padding, self.seed, round, number)
        return Batches(samples[positions], shifts, lengths)

    def on_device(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Return an array of integers as a tensor on the device."""
        return torch.from_numpy(numbers).to(self.model.device)

    @property
    def pool(self) -> tuple[Any, Any]:
        """All training inputs and targets."""
        return self.inputs, self.targets

    @property
    def on_host(self) -> bool:
        """Whether a step needs the host: its samples are on disk, or the user's function transforms them."""
        return self.federation.transform is not None or any(map(on_disk, leaves(self.pool)))

    def generators(
        self, clients: Sequence[int] | npt.NDArray[np.int64], round: int
    ) -> list[torch.Generator] | None:
        """Return a generator for the transform of each client's batches in a round; None without a transform."""
        if self.federation.transform is None:
            return None
        seeds = [torch_seed(self.seed, Purpose.TRANSFORM, round, self.number_of(int(i))) for i in clients]
        return [torch.Generator().manual_seed(seed) for seed in seeds]

    def load(
        self,
        samples: Tensor,
        shifts: Tensor | None = None,
        pool: tuple[Any, Any] | None = None,
        generators: Sequence[torch.Generator] | None = None,
    ) -> tuple[Any, Any]:
        """Return inputs and targets of some training samples, ready for the module.

        Args:
            samples: the sample numbers, [n].
            shifts: how to cut out each picture, [n, 3].
            pool: all samples; a traced step passes them, so that they become arguments of the trace.
            generators: for the transform; each belongs to one client, whose samples are neighbours.
        """
        all_inputs, all_targets = pool or self.pool
        inputs, targets = self._rows(all_inputs, samples), self._rows(all_targets, samples)
        if shifts is not None:
            assert self.federation.images is not None
            padding = self.federation.images.padding
            inputs = map_leaves(
                lambda leaf: crop_and_flip(leaf, shifts, padding) if leaf.dtype == torch.uint8 else leaf, inputs
            )
        if generators is not None:
            inputs = self._transformed(inputs, generators)
        return self.prepare(inputs), targets

    def load_ahead(self, samples: Tensor) -> None:
        """Begin to read samples that are on disk."""
        for leaf in filter(on_disk, leaves(self.pool)):
            leaf.ahead(samples.reshape(-1).cpu().numpy())

    def _rows(self, tree: Any, samples: Tensor) -> Any:
        def rows(leaf: Any) -> Tensor:
            if on_disk(leaf):
                return _placed(leaf.gather(samples.cpu().numpy()), self.model)
            taken: Tensor = leaf[samples]
            return taken

        return map_leaves(rows, tree)

    def _transformed(self, inputs: Any, generators: Sequence[torch.Generator]) -> Any:
        """Return inputs after the user's transform, which sees the batch of one client at a time."""
        transform = self.federation.transform
        assert transform is not None
        batch = num_samples(inputs) // len(generators)
        parts = []
        for lane, generator in enumerate(generators):
            rows = slice(lane * batch, (lane + 1) * batch)
            parts.append(transform(map_leaves(lambda leaf, rows=rows: leaf[rows], inputs), generator))
        return map_leaves(lambda *leaves: torch.cat(leaves), *parts)

    def prepare(self, inputs: Any) -> Any:
        """Return inputs for the module: pictures normalised, and integers as floats if it needs them so."""
        images, dtype = self.federation.images, self.model.dtype
        if images is None and not self.floats:
            return inputs
        number = itertools.count()

        def prepared(leaf: Tensor) -> Tensor:
            place = next(number)
            if images is not None and leaf.dtype == torch.uint8:
                return images(leaf, dtype)
            return leaf.to(dtype) if place in self.floats else leaf

        return map_leaves(prepared, inputs)

    def in_double(self, samples: Tensor) -> Workload:
        """Return the same problem in float64 with these training samples alone, in this order."""
        inputs, targets = (
            map_leaves(lambda leaf: leaf.double() if leaf.is_floating_point() else leaf, self._rows(tree, samples))
            for tree in self.pool
        )
        return dataclasses.replace(self, model=self.model.in_double(), inputs=inputs, targets=targets, test=None)

    @functools.cached_property
    def spread(self) -> Literal["whole", "positional", "keywords"]:
        """How the module receives its inputs: a tuple as arguments, a dict as keywords, or whole."""
        inputs = self.inputs
        try:
            signature = inspect.signature(self.model.module.forward)
            if isinstance(inputs, dict):
                signature.bind(**inputs)
                return "keywords"
            if isinstance(inputs, tuple | list):
                signature.bind(*inputs)
                return "positional"
        except (TypeError, ValueError):
            return "whole"
        return "whole"

    def arguments(self, inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the positional and keyword arguments with which the module is called."""
        if self.spread == "keywords":
            return (), dict(inputs)
        return (tuple(inputs), {}) if self.spread == "positional" else ((inputs,), {})

    def call(self, inputs: Any) -> Any:
        """Return the module's output, computed in the precision of the run."""
        args, options = self.arguments(inputs)
        return self.computed(lambda: self.model.module(*args, **options))

    def computed(self, forward: Callable[[], Any]) -> Any:
        """Return what a forward pass returns in the precision of the run; numbers have the model's type."""
        return rounded(forward, self.precision, self.model.device)

    @property
    def product_dtype(self) -> torch.dtype:
        """The type of the numbers that the module multiplies."""
        return product_dtype(self.precision, self.model.dtype)

    @functools.cached_property
    def small(self) -> bool:
        """Whether calling the operations of a step costs more than the operations themselves."""
        convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self.model.module.modules())
        return self.model.size <= SMALL and not convolves and self.step_flops() <= SMALL_FLOPS

    def step_flops(self) -> float:
        """Return the floating-point operations of one local step, forward and backward.

        Torch counts the multiplications and additions of matrix products and convolutions only. It counts them on
        its meta device, which computes nothing. There, recurrent layers and attention consist of products; on a
        CPU they are single operators that torch cannot count. A module that cannot run there is counted on its own
        device; infinity stands for one whose operations torch cannot count at all.
        """
        from torch.utils.flop_counter import FlopCounterMode

        for device in (torch.device("meta"), self.model.device):
            counter = FlopCounterMode(display=False)
            with contextlib.suppress(Exception):  # for example a loss that reads numbers
                self._step_under(counter, device)
                return float(counter.get_total_flops())
        return math.inf

    def step_calls(self) -> int:
        """Return how many of torch's operations one local step calls, forward and backward."""
        counter = _Calls()
        self._step_under(counter, self.model.device)
        return counter.calls

    def _step_under(self, mode: Any, device: torch.device) -> None:
        """Take one gradient on a device while a mode of torch is active."""
        module, samples = self.model.module, int(self.batch_size or self.federation.sizes.mean())
        numbers = torch.arange(samples, device=self.model.device) % num_samples(self.inputs)
        inputs, targets = (
            map_leaves(lambda leaf: leaf.to(device), part)
            for part in self.load(numbers, generators=self.generators([0], 0))
        )
        tensors = dict(module.named_parameters()) | dict(module.named_buffers())
        state = {name: tensor.detach().to(device) for name, tensor in tensors.items()}
        for name in self.model.names:
            state[name].requires_grad_()
        args, options = self.arguments(inputs)
        with torch.random.fork_rng(), torch.enable_grad(), mode:
            loss = self.loss(torch.func.functional_call(module, state, args, options), targets)
            torch.autograd.backward(loss)  # autograd.grad through parametrisations fails in torch's counter (2.13)
        self.model.buffers.put(None)


class _Calls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the calls of torch's operations while the mode is active."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def on_disk(leaf: Any) -> bool:
    """Return whether samples are read from a file, batch by batch."""
    return isinstance(leaf, DiskArray)


def _placed(tensor: Tensor, model: VectorModel) -> Tensor:
    """Return a tensor on the model's device; numbers have the model's precision, integers stay integers."""
    return tensor.to(model.device, model.dtype if tensor.is_floating_point() else None)
