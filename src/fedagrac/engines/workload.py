"""The problem that an engine works on: a model, a loss, data, and how batches are drawn.

Algorithm names may not enter here.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedagrac.data.batches import Sampling, batch_positions
from fedagrac.data.pictures import crop_and_flip, draw_shifts
from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.data.federation import Federation
    from fedagrac.models.vector import VectorModel

__all__ = ["SMALL", "Batches", "Loss", "Workload"]

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""(output, target) -> scalar mean over the samples."""

SMALL = 100_000
"""The most parameters of a small model; models with convolutions are never small."""


@dataclass(frozen=True, eq=False)
class Batches:
    """A client's batches: sample numbers [steps, batch], and shifts of pictures [steps, batch, 3] or None."""

    samples: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64] | None

    def on(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield samples and shifts of every step, on a device."""
        samples = torch.from_numpy(self.samples).to(device)
        if self.shifts is None:
            yield from zip(samples, itertools.repeat(None), strict=False)
        else:
            yield from zip(samples, torch.from_numpy(self.shifts).to(device), strict=True)


@dataclass(frozen=True, eq=False)
class Workload:
    """A model, a loss, data on the device, and how batches are drawn.

    Attributes:
        model: the module as a function of x.
        loss: a scalar mean over the samples of a batch.
        inputs, targets: the pooled training samples, on the device; pictures as bytes.
        test: the test inputs and targets, on the device, or None.
        batch_size: samples per step; None for all samples of a client.
        sampling: how batches are drawn.
        weight_decay: adds weight_decay * x to every gradient.
        seed: names the random streams.
        numbers: the number that names each client's streams, [M]; None for the client's own number. A machine that
            holds the data of one client alone calls it client 0, but must draw that client's batches.
    """

    model: VectorModel
    loss: Loss
    federation: Federation
    inputs: Tensor
    targets: Tensor
    test: tuple[Tensor, Tensor] | None
    batch_size: int | None
    sampling: Sampling
    weight_decay: float
    seed: int
    numbers: npt.NDArray[np.int64] | None = None

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
    ) -> Workload:
        """Put the data on the device, try the model and the loss on two samples, and return the workload."""
        embeds = any(isinstance(layer, nn.Embedding | nn.EmbeddingBag) for layer in model.module.modules())

        def place(tensor: Tensor, label: bool) -> Tensor:
            pixels = not label and federation.images is not None and tensor.dtype == torch.uint8
            keep = pixels or (not tensor.is_floating_point() and (label or embeds))
            return tensor.to(model.device, None if keep else model.dtype)

        test = federation.test
        workload = cls(
            model=model,
            loss=loss or nn.functional.cross_entropy,
            federation=federation,
            inputs=place(federation.inputs, label=False),
            targets=place(federation.targets, label=True),
            test=None if test is None else (place(test[0], label=False), place(test[1], label=True)),
            batch_size=batch_size,
            sampling=sampling,
            weight_decay=weight_decay,
            seed=seed,
            numbers=numbers,
        )
        workload._try(default_loss=loss is None)
        return workload

    def batch_sizes(self, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Return the samples per step of each client, [m]."""
        sizes = self.federation.sizes[clients]
        if self.batch_size is None:
            return sizes
        if self.sampling == "shuffle":
            return np.minimum(sizes, self.batch_size)
        return np.full_like(sizes, self.batch_size)

    def number_of(self, client: int) -> int:
        """Return the number that names the client's random streams."""
        return int(client if self.numbers is None else self.numbers[client])

    def draw(self, client: int, steps: int, round: int) -> Batches:
        """Return the client's samples in each step of the round, and the shifts of its pictures."""
        samples, number = self.federation.samples_of(client), self.number_of(client)
        positions = batch_positions(len(samples), steps, self.batch_size, self.sampling, self.seed, round, number)
        images = self.federation.images
        if images is None or not images.padding:
            return Batches(samples[positions], None)
        batch = positions.shape[1]
        return Batches(samples[positions], draw_shifts(steps, batch, images.padding, self.seed, round, number))

    def on_device(self, numbers: npt.NDArray[np.int64]) -> Tensor:
        """Return an array of integers as a tensor on the device."""
        return torch.from_numpy(numbers).to(self.model.device)

    @property
    def pool(self) -> tuple[Tensor, Tensor]:
        """All training inputs and targets."""
        return self.inputs, self.targets

    def load(
        self, samples: Tensor, shifts: Tensor | None = None, pool: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some training samples, ready for the module.

        A traced step passes the pool, so that it becomes an argument of the trace.
        """
        all_inputs, targets = pool or self.pool
        inputs = all_inputs[samples]
        if shifts is not None:
            assert self.federation.images is not None
            inputs = crop_and_flip(inputs, shifts, self.federation.images.padding)
        return self.prepare(inputs), targets[samples]

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return inputs for the module; stored pictures become normalised numbers."""
        images = self.federation.images
        return inputs if images is None or inputs.dtype != torch.uint8 else images(inputs, self.model.dtype)

    @property
    def small(self) -> bool:
        """Whether calling the operations of a step costs more than the operations themselves."""
        convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self.model.module.modules())
        return self.model.size <= SMALL and not convolves

    def step_flops(self) -> float:
        """Return the floating-point operations of one local step, forward and backward.

        Torch counts the multiplications and additions of matrix products and convolutions only.
        """
        from torch.utils.flop_counter import FlopCounterMode

        samples = int(self.batch_size or self.federation.sizes.mean())
        inputs, targets = self.load(torch.arange(samples, device=self.model.device) % len(self.inputs))
        with torch.random.fork_rng(), FlopCounterMode(display=False) as counter:
            self.model.gradient(self.loss(self.model.module(inputs), targets))
        return float(counter.get_total_flops())

    def _try(self, default_loss: bool) -> None:
        """Run two samples through model and loss; refuse what does not fit before any work starts."""
        inputs, targets = self.load(torch.arange(min(2, len(self.inputs)), device=self.model.device))
        try:
            with torch.random.fork_rng(), torch.no_grad():
                output = self.model.module(inputs)
        except Exception as error:
            raise InputError(
                "model",
                type(self.model.module).__name__,
                f"a module that accepts inputs of shape {tuple(inputs.shape)}, {inputs.dtype}; it said: {error}",
            ) from error
        if default_loss:
            self._check_labels(output)
        try:
            with torch.no_grad():
                loss = self.loss(output, targets)
        except Exception as error:
            raise InputError(
                "loss",
                getattr(self.loss, "__name__", type(self.loss).__name__),
                f"a function of (output {tuple(output.shape)}, target {tuple(targets.shape)} {targets.dtype}); "
                f"it said: {error}",
            ) from error
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise InputError("loss", shape, "a scalar, the mean over the batch (reduction='mean')")

    def _check_labels(self, output: Tensor) -> None:
        """Refuse targets that cross-entropy cannot compare with the output."""
        if self.targets.is_floating_point():
            if output.shape[1:] == self.targets.shape[1:]:
                return  # class probabilities
            raise InputError(
                "loss",
                None,
                "a loss for floating-point targets, such as torch.nn.functional.mse_loss "
                "(the default is cross-entropy on integer class labels)",
            )
        if output.ndim < 2:
            raise InputError("model output", tuple(output.shape), "one column per class for cross-entropy")
        classes = output.shape[1]
        for field, labels in (
            ("targets", self.targets),
            *([("test targets", self.test[1])] if self.test else []),
        ):
            low, high = int(labels.min()), int(labels.max())
            if low < 0 or high >= classes:
                raise InputError(
                    field,
                    f"labels from {low} to {high}",
                    f"labels from 0 to {classes - 1}, the model's {classes} outputs",
                )
