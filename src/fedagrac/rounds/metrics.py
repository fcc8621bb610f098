"""Metrics to pass to `simulate(metrics={...})`: functions (output, target) -> scalar over the whole test set.

`mse`, `mae`, `rmse` and `r2` are metrics themselves. `accuracy`, `top_k` and `perplexity` return one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from fedagrac.data.trees import map_leaves
from fedagrac.errors import InputError, count

__all__ = [
    "Metric",
    "accuracy",
    "class_dimension",
    "hits",
    "joined_outputs",
    "mae",
    "mse",
    "perplexity",
    "r2",
    "rmse",
    "top_k",
]

Metric = Callable[[Any, Any], "Tensor | float"]
"""A function (output, target) -> scalar over the whole test set; output and target may be trees of tensors."""

NO_LABEL = -(2**31)
"""An index that no label has, for a loss that must have an index to ignore."""


def accuracy(ignore_index: int | None = -100, top: int = 1, dim: int | None = None) -> Metric:
    """Return the metric: the share of positions whose label is among the `top` largest scores.

    Args:
        ignore_index: positions with this target do not count; None if all count.
        top: how many of the largest scores may hold the label.
        dim: the dimension of the classes; None for torch's, dimension 1 of [n, C, ...], or for the last one if
            only that fits.

    Examples:
        >>> scores = torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0], [3.0, 2.0, 1.0]])
        >>> accuracy()(scores, torch.tensor([0, 1, -100])), accuracy(top=2)(scores, torch.tensor([0, 1, -100]))
        (0.5, 1.0)
    """
    count("top", top)

    def measure(output: Tensor, target: Tensor) -> float:
        right, counted = hits(output, target, ignore_index, top, _classes(output, target, dim))
        return _ratio(right.sum(), counted.sum())

    return measure


def top_k(k: int, ignore_index: int | None = -100, dim: int | None = None) -> Metric:
    """Return the metric: the share of positions whose label is among the k largest scores.

    Examples:
        >>> top_k(2)(torch.tensor([[3.0, 2.0, 1.0], [3.0, 2.0, 1.0]]), torch.tensor([1, 2]))
        0.5
    """
    return accuracy(ignore_index, count("k", k), dim)


def perplexity(ignore_index: int | None = -100, dim: int | None = None) -> Metric:
    """Return the metric: exp of the mean cross-entropy over the positions that count.

    Examples:
        >>> round(float(perplexity()(torch.zeros(2, 5), torch.tensor([0, -100]))), 6)  # five equal scores
        5.0
    """

    def measure(output: Tensor, target: Tensor) -> Tensor:
        scores = output.movedim(_classes(output, target, dim), 1)
        ignored = NO_LABEL if ignore_index is None else ignore_index
        return cross_entropy(scores.double(), target, ignore_index=ignored).exp()

    return measure


def mse(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean squared error over all entries.

    Examples:
        >>> float(mse(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0])))
        4.5
    """
    return _errors(output, target).square().mean()


def mae(output: Tensor, target: Tensor) -> Tensor:
    """Return the mean absolute error over all entries.

    Examples:
        >>> float(mae(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 5.0])))
        1.5
    """
    return _errors(output, target).abs().mean()


def rmse(output: Tensor, target: Tensor) -> Tensor:
    """Return the square root of the mean squared error.

    Examples:
        >>> float(rmse(torch.tensor([1.0, 2.0]), torch.tensor([4.0, 5.0])))
        3.0
    """
    return mse(output, target).sqrt()


def r2(output: Tensor, target: Tensor) -> float:
    """Return the share of the targets' variance that the outputs explain, 1 - sum (y - f)^2 / sum (y - mean y)^2.

    The sums go over all entries; the mean is that of each column. Constant targets give 1 if every output is
    right, otherwise 0.

    Examples:
        >>> r2(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1.0, 2.0, 3.0]))
        0.5
    """
    missed = float(_errors(output, target).square().sum())
    spread = float((target.double() - target.double().mean(0)).square().sum())
    return 1 - missed / spread if spread else float(missed == 0)


def hits(output: Tensor, target: Tensor, ignore_index: int | None, top: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return which positions are right and which count, both of the target's shape; a right one counts.

    Examples:
        >>> right, counted = hits(torch.eye(3), torch.tensor([0, 0, -100]), -100, 1, 1)
        >>> right.tolist(), counted.tolist()
        ([True, False, False], [True, True, False])
    """
    if top == 1:
        right = output.argmax(dim) == target
    else:
        best = output.topk(min(top, output.shape[dim]), dim).indices
        right = (best == target.unsqueeze(dim)).any(dim)
    counted = torch.ones_like(right) if ignore_index is None else target != ignore_index
    return right & counted, counted


def class_dimension(output: Any, target: Any, torch_convention: bool) -> int | None:
    """Return the dimension of the classes in the output, or None if output and target are not classification.

    It is dimension 1, as in torch's losses, or the last one, if the other dimensions are those of the target. If
    both fit, only the loss could tell, and the answer is None unless that is known to follow torch's convention.

    Examples:
        >>> class_dimension(torch.zeros(5, 9, 4), torch.zeros(5, 4, dtype=torch.int64), torch_convention=False)
        1
        >>> class_dimension(torch.zeros(5, 4, 9), torch.zeros(5, 4, dtype=torch.int64), torch_convention=False)
        2
        >>> class_dimension(torch.zeros(5, 1), torch.zeros(5), torch_convention=False)
    """
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return None
    if target.is_floating_point() or output.ndim != target.ndim + 1 or output.ndim < 2:
        return None
    fitting = [
        dim
        for dim in dict.fromkeys((1, output.ndim - 1))
        if (*output.shape[:dim], *output.shape[dim + 1 :]) == tuple(target.shape)
    ]
    if len(fitting) == 2:
        return 1 if torch_convention else None
    return fitting[0] if fitting else None


def _classes(output: Tensor, target: Tensor, dim: int | None) -> int:
    """Return the dimension of the classes; raise InputError if the shapes do not fit."""
    if dim is None:
        dim = class_dimension(output, target, torch_convention=True)
    if dim is None:
        shapes = f"output {_shape(output)}, target {_shape(target)}"
        raise InputError("classes", shapes, "scores [n, C, ...] and integer labels [n, ...]")
    return dim


def _errors(output: Tensor, target: Tensor) -> Tensor:
    """Return output - target in double precision; refuse shapes that torch would broadcast."""
    if not isinstance(output, Tensor) or not isinstance(target, Tensor) or output.shape != target.shape:
        shapes = f"output {_shape(output)}, target {_shape(target)}"
        raise InputError("shapes", shapes, "one shape for both; torch would broadcast one against the other")
    return output.double() - target.double()


def _shape(value: Any) -> str:
    """Return the shape of a tensor as text, or the type of another value."""
    return str(tuple(value.shape)) if isinstance(value, Tensor) else type(value).__name__


def _ratio(part: Tensor, whole: Tensor) -> float:
    """Return part / whole, NaN if there is nothing to count."""
    return int(part) / int(whole) if int(whole) else float("nan")


def joined_outputs(chunks: Sequence[tuple[Any, Any]]) -> tuple[Any, Any]:
    """Return the output and the target of all chunks, each leaf concatenated along dimension 0.

    Examples:
        >>> joined_outputs([(torch.tensor([1]), torch.tensor([2])), (torch.tensor([3]), torch.tensor([4]))])
        (tensor([1, 3]), tensor([2, 4]))
    """
    joined: tuple[Any, Any] = map_leaves(lambda *parts: torch.cat(parts), *chunks)
    return joined
