"""What an engine is given, and what it must do. Algorithm names may not enter here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import torch
from torch import nn

from fedagrac.data.batches import Sampling, batch_positions
from fedagrac.data.images import crop_and_flip, draw_shifts
from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.local import Plan, Result
    from fedagrac.data.federation import Federation
    from fedagrac.models.vector import VectorModel

__all__ = ["Batches", "Engine", "Loss", "Workload", "starts_of"]

Loss = Callable[["Tensor", "Tensor"], "Tensor"]
"""(output, target) -> scalar mean over the samples."""


SMALL = 100_000
"""Parameters up to which a model without convolutions counts as small."""


class Engine(Protocol):
    """How a cohort's local rules are executed."""

    name: str

    def run(self, plan: Plan, x: Tensor, clients: npt.NDArray[np.int64], round: int) -> Result:
        """Run the local rule of every client from x, as the plan says.

        x is one start for all, [d], or one for each row, [m, d]: lanes may belong to several runs.
        """

    def gradients(
        self, x: Tensor, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"] = "full"
    ) -> Tensor:
        """Return every client's gradient at x over all its data, or over its first batch of the round."""


def starts_of(x: Tensor, rows: Tensor) -> Tensor:
    """Return where some rows start, [m, d], of one start for all [d] or one for each row.

    Examples:
        >>> starts_of(torch.tensor([1.0, 2.0]), torch.tensor([0, 3])).tolist()
        [[1.0, 2.0], [1.0, 2.0]]
        >>> starts_of(torch.eye(2), torch.tensor([1])).tolist()
        [[0.0, 1.0]]
    """
    return x.expand(len(rows), -1) if x.ndim == 1 else x[rows]


@dataclass(frozen=True, eq=False)
class Batches:
    """What a client uses in its steps: sample numbers [steps, batch], and shifts [steps, batch, 3] or None."""

    samples: npt.NDArray[np.int64]
    shifts: npt.NDArray[np.int64] | None

    def on(self, device: torch.device) -> Iterator[tuple[Tensor, Tensor | None]]:
        """Yield the steps' samples and shifts on a device."""
        samples = torch.from_numpy(self.samples).to(device)
        if self.shifts is None:
            yield from zip(samples, itertools.repeat(None), strict=False)
        else:
            yield from zip(samples, torch.from_numpy(self.shifts).to(device), strict=True)


@dataclass(frozen=True, eq=False)
class Workload:
    """The problem as an engine sees it: a model, a loss, data on the device, and how batches are drawn.

    Attributes:
        model: the module as a function of x.
        loss: a scalar mean over the samples of a batch.
        inputs, targets: the pooled training samples, resident on the device; pictures as bytes.
        weight_decay: adds weight_decay * x to every gradient.
        numbers: under which number each client draws its batches, [M]; None for its own. A machine that holds one
            client's data alone calls it client 0, yet draws what that client draws in a simulation of all.
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
        """Put the data on the device and try the model and the loss on two samples."""
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
        """Return how many samples each client uses in a step, [m]."""
        own = self.federation.sizes[clients]
        if self.batch_size is None:
            return own
        return (
            np.minimum(own, self.batch_size) if self.sampling == "shuffle" else np.full_like(own, self.batch_size)
        )

    def number_of(self, client: int) -> int:
        """Return the number that names the client's random streams."""
        return int(client if self.numbers is None else self.numbers[client])

    def draw(self, client: int, steps: int, round: int) -> Batches:
        """Return which samples the client uses in each step of the round, and how its pictures are shifted."""
        own, number = self.federation.samples_of(client), self.number_of(client)
        positions = batch_positions(len(own), steps, self.batch_size, self.sampling, self.seed, round, number)
        images = self.federation.images
        if images is None or not images.padding:
            return Batches(own[positions], None)
        batch = positions.shape[1]
        return Batches(own[positions], draw_shifts(steps, batch, images.padding, self.seed, round, number))

    @property
    def pool(self) -> tuple[Tensor, Tensor]:
        """All training inputs and targets."""
        return self.inputs, self.targets

    def load(
        self, samples: Tensor, shifts: Tensor | None = None, pool: tuple[Tensor, Tensor] | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return inputs and targets of some training samples, ready for the module.

        A traced step names the pool itself, so that it becomes an argument of the trace.
        """
        all_inputs, targets = pool or self.pool
        inputs = all_inputs[samples]
        if shifts is not None:
            assert self.federation.images is not None
            inputs = crop_and_flip(inputs, shifts, self.federation.images.padding)
        return self.prepare(inputs), targets[samples]

    def prepare(self, inputs: Tensor) -> Tensor:
        """Return inputs as the module wants them: stored pictures become normalised numbers."""
        images = self.federation.images
        return inputs if images is None or inputs.dtype != torch.uint8 else images(inputs, self.model.dtype)

    @property
    def small(self) -> bool:
        """Whether a step is so small that calling its operations costs more than they do."""
        convolves = any(isinstance(layer, nn.modules.conv._ConvNd) for layer in self.model.module.modules())
        return self.model.size <= SMALL and not convolves

    def step_flops(self) -> float:
        """Return the floating-point operations of one local step (forward and backward), as torch counts them.

        Multiplications and additions of matrix products and convolutions; everything else is neglected.
        """
        from torch.utils.flop_counter import FlopCounterMode

        samples = int(self.batch_size or self.federation.sizes.mean())
        inputs, targets = self.load(torch.arange(samples, device=self.model.device) % len(self.inputs))
        with torch.random.fork_rng(), FlopCounterMode(display=False) as counter:
            self.model.gradient(self.loss(self.model.module(inputs), targets))
        return float(counter.get_total_flops())

    def _try(self, default_loss: bool) -> None:
        """Run two samples through model and loss, so that what does not fit is said before any work starts."""
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
        if self.targets.is_floating_point():
            if output.shape[1:] == self.targets.shape[1:]:
                return  # class probabilities
            raise InputError(
                "loss",
                None,
                "a loss for floating-point targets, such as torch.nn.functional.mse_loss "
                "(without one, cross-entropy on integer class labels is meant)",
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
