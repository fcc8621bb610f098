"""One local step on a few samples before any work starts: what does not fit together is refused by name."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.data.trees import leaves, map_leaves, named_leaves, num_samples
from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.workload import Workload

__all__ = ["IGNORED", "try_step"]

SAMPLES = 7
"""Samples of the trial step; a number that few models have as their number of outputs."""

IGNORED = -100
"""The label of positions that torch's cross-entropy leaves out by default."""


def try_step(workload: Workload, default_loss: bool) -> frozenset[int]:
    """Try the module, the loss and the gradient on a few samples, and find the buffers that a step changes.

    Return which inputs are integers that the module takes only as floating-point numbers.
    """
    w = workload
    samples = torch.arange(SAMPLES, device=w.model.device) % num_samples(w.inputs)
    smallest = w.smallest_batch()
    with torch.random.fork_rng(), torch.enable_grad():
        inputs, targets = _load(w, samples)
        tried: list[tuple[Any, frozenset[int]]] = []
        w.model.buffers.find(lambda: tried.append(_forward(w, inputs)))
        output, floats = tried[0]
        if default_loss:
            _check_labels(w, output)
        _try_loss(w, output, targets, default_loss)
        if smallest < SAMPLES:  # BatchNorm, for example, needs two
            _forward(w, _load(w, samples[:smallest])[0])
    w.model.buffers.put(None)
    return floats


def _load(w: Workload, samples: Tensor) -> tuple[Any, Any]:
    """Return inputs and targets of some samples; refuse a transform that fails or changes their number."""
    if w.federation.transform is None:
        return w.load(samples)
    name = getattr(w.federation.transform, "__name__", type(w.federation.transform).__name__)
    try:
        inputs, targets = w.load(samples, generators=w.generators([0], 0))
    except Exception as error:
        accepted = f"a function (inputs of a client's batch, torch.Generator) -> inputs; it said: {error}"
        raise InputError("transform", name, accepted) from error
    for leaf in leaves(inputs):
        if not isinstance(leaf, torch.Tensor) or leaf.shape[:1] != samples.shape:
            returned = tuple(leaf.shape) if isinstance(leaf, torch.Tensor) else type(leaf).__name__
            accepted = (
                f"a function that returns as many samples as it gets, {len(samples)}; it returned {returned}"
            )
            raise InputError("transform", name, accepted)
    return inputs, targets


def _forward(w: Workload, inputs: Any) -> tuple[Any, frozenset[int]]:
    """Run the module in training and in evaluation mode; return its output, and which inputs had to be floats.

    Integers stay integers if the module accepts them. Otherwise as few of them as possible become floats.
    """
    given = leaves(inputs)
    integers = [i for i, leaf in enumerate(given) if not leaf.is_floating_point()]
    subsets = itertools.chain.from_iterable(
        itertools.combinations(integers, r) for r in range(min(len(integers), 4) + 1)
    )
    failures: list[Exception] = []
    for floats in map(frozenset, subsets):
        places = itertools.count()

        def cast(leaf: Tensor, floats: frozenset[int] = floats, places: Iterator[int] = places) -> Tensor:
            return leaf.to(w.model.dtype) if next(places) in floats else leaf

        attempt = map_leaves(cast, inputs)
        try:
            w.model.train()
            output = w.call(attempt)
            w.model.eval()
            with torch.no_grad():
                w.call(attempt)
        except Exception as error:
            failures.append(error)
        else:
            w.model.train()
            w.model.example = w.arguments(attempt)
            return output, floats
    shapes = ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in given)
    said = f"it said: {failures[0]}"
    if len(failures) > 1:
        said += f"; with floating-point inputs: {failures[-1]}"
    raise InputError(
        "model", type(w.model.module).__name__, f"a module that accepts inputs of shape {shapes}; {said}"
    ) from failures[0]


def _try_loss(w: Workload, output: Any, targets: Any, default_loss: bool) -> None:
    """Refuse a loss that fails, is not a scalar, has no gradient, or compares every output with every target."""
    name = getattr(w.loss, "__name__", type(w.loss).__name__)
    shapes = [
        ", ".join(f"{tuple(leaf.shape)} {leaf.dtype}" for leaf in leaves(tree) if isinstance(leaf, torch.Tensor))
        for tree in (output, targets)
    ]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            loss = w.loss(output, targets)
        except Exception as error:
            accepted = f"a function of (output {shapes[0]}, target {shapes[1]}); it said: {error}"
            raise InputError("loss", name, accepted) from error
    if not isinstance(loss, torch.Tensor) or loss.ndim:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise InputError("loss", shape, "a scalar, the mean over the batch (reduction='mean')")
    for warning in caught:
        if "target size" in str(warning.message):
            raise _broadcast(name, shapes)
        warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if not default_loss and _compares_all_with_all(w, output, targets):
        raise _broadcast(name, shapes)
    try:
        w.model.gradient(loss)
    except RuntimeError as error:
        accepted = f"a loss that depends on the module's parameters; torch said: {error}"
        raise InputError("loss", name, accepted) from error


def _broadcast(name: str, shapes: list[str]) -> InputError:
    return InputError(
        "loss",
        f"{name} of output {shapes[0]} and target {shapes[1]}",
        "equal shapes, because torch would compare every output with every target; "
        "reshape the targets, or squeeze the output of the model",
    )


def _compares_all_with_all(w: Workload, output: Any, targets: Any) -> bool:
    """Return whether the loss broadcasts [n] against [n, 1].

    Then it stays the same when targets change places, but not when output and targets have equal shapes. Random
    outputs and targets are compared, because those of a fresh model may all be equal.
    """
    both = isinstance(output, torch.Tensor) and isinstance(targets, torch.Tensor)
    if not both or output.shape == targets.shape or output.numel() != targets.numel():
        return False
    numbers = torch.Generator().manual_seed(0)

    def random(like: Tensor) -> Tensor:
        if not like.is_floating_point():
            return (torch.arange(like.numel(), device=like.device) % 2).reshape(like.shape).to(like.dtype)
        return torch.rand(like.shape, generator=numbers, dtype=torch.float64).to(like.device, like.dtype)

    outputs, labels = random(output), random(targets)
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            given, moved = w.loss(outputs, labels), w.loss(outputs, labels.roll(1, 0))
            equal = w.loss(outputs.reshape(labels.shape), labels)
    except Exception:
        return False  # it does not take equal shapes, so it does not compare number with number
    return torch.allclose(given, moved) and not torch.allclose(given, equal)


def _check_labels(w: Workload, output: Any) -> None:
    """Refuse targets that cross-entropy cannot compare with the output."""
    if not isinstance(output, torch.Tensor):
        raise InputError("loss", None, f"a loss for outputs that are a {type(output).__name__}")
    if len(leaves(w.targets)) > 1:
        raise InputError("loss", None, f"a loss for targets that are a {type(w.targets).__name__}")
    first = w.load(torch.zeros(1, dtype=torch.int64, device=w.model.device))[1]
    if first.is_floating_point():
        if output.shape[1:] == first.shape[1:]:
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
    for field, labels in [("targets", w.targets), *([("test targets", w.test[1])] if w.test else [])]:
        for name, leaf in named_leaves(field, labels):
            low, high = _label_range(leaf)
            if low < 0 or high >= classes:
                accepted = f"labels from 0 to {classes - 1}, the model's {classes} outputs (or {IGNORED}: ignored)"
                raise InputError(name, f"labels from {low} to {high}", accepted)


def _label_range(labels: Any) -> tuple[int, int]:
    """Return the smallest and the largest label that counts."""
    low, high = 0, 0
    for part in _pieces(labels):
        counted = part[part != IGNORED]
        if counted.numel():
            low, high = min(low, int(counted.min())), max(high, int(counted.max()))
    return low, high


def _pieces(labels: Any, size: int = 1 << 20) -> Iterator[Tensor]:
    """Yield labels, which may be on disk, piece by piece."""
    if isinstance(labels, torch.Tensor):
        yield labels
        return
    for start in range(0, len(labels), size):
        numbers: npt.NDArray[np.int64] = np.arange(start, min(start + size, len(labels)))
        yield labels.gather(numbers)
