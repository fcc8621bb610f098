"""Patches of pictures as columns of a matrix, and the reverse.

With its patches as columns a convolution is a matrix product. On a GPU with Triton each direction is one kernel
that reads and writes every number once. Elsewhere a few torch operations do the same. Pictures have the shape
[lanes, n, channels, height, width] and any memory layout.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Convolution", "columns_of", "pictures_of"]

BLOCK = 1024


class Convolution(NamedTuple):
    """The shapes, strides and paddings of a convolution, which decide how fast it runs.

    Examples:
        >>> Convolution((2, 3, 9, 8), (5, 3, 3, 3), stride=(2, 1), padding=(1, 0)).places
        (5, 6)
    """

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]

    @property
    def places(self) -> tuple[int, int]:
        """Rows and columns of the output."""
        rows, columns = (
            (self.inputs[2 + i] + 2 * self.padding[i] - self.weight[2 + i]) // self.stride[i] + 1 for i in (0, 1)
        )
        return rows, columns


def columns_of(x: Tensor, c: Convolution) -> Tensor:
    """Return the patches as [lanes, channels * kernel, n * places], one column per output place.

    Examples:
        >>> import torch
        >>> c = Convolution((1, 1, 2, 3), (1, 1, 2, 2), stride=(1, 1), padding=(0, 0))
        >>> columns_of(torch.arange(6.0).reshape(1, 1, 1, 2, 3), c)
        tensor([[[0., 1.],
                 [1., 2.],
                 [3., 4.],
                 [4., 5.]]])
    """
    lanes, n, channels = x.shape[:3]
    (high, wide), (rows, columns) = c.weight[2:], c.places
    kernel = _kernels() if x.is_cuda else None
    if kernel is not None:
        out = x.new_empty((lanes, channels * high * wide, n * rows * columns))
        _launch(kernel.columns, out, x, c)
        return out
    down, right = c.padding
    padded = functional.pad(x, [right, right, down, down]) if down or right else x
    patches = padded.unfold(3, high, c.stride[0]).unfold(
        4, wide, c.stride[1]
    )  # [lanes, n, channels, R, C, kh, kw]
    return patches.permute(0, 2, 5, 6, 1, 3, 4).reshape(lanes, channels * high * wide, n * rows * columns)


def pictures_of(columns: Tensor, c: Convolution) -> Tensor:
    """Return pictures [lanes, n, channels, height, width], the transpose of `columns_of`; overlaps are summed.

    In memory the order is lanes, channels, n, as in the output of a product with columns.

    Examples:
        >>> import torch
        >>> c = Convolution((1, 1, 2, 3), (1, 1, 2, 2), stride=(1, 1), padding=(0, 0))
        >>> pictures_of(torch.ones(1, 4, 2), c)
        tensor([[[[[1., 2., 1.],
                   [1., 2., 1.]]]]])
    """
    lanes, (n, channels, height, width) = len(columns), c.inputs
    (high, wide), (rows, places) = c.weight[2:], c.places
    kernel = _kernels() if columns.is_cuda else None
    fine = torch.promote_types(columns.dtype, torch.float32)  # sums of bf16 numbers are rounded once
    if kernel is not None:
        out = columns.new_empty((lanes, channels, n, height, width), dtype=fine).transpose(1, 2)
        _launch(kernel.pictures, columns.contiguous(), out, c)
        return out.to(columns.dtype)
    (down, right), (by, across) = c.padding, c.stride
    framed = columns.new_zeros((lanes, channels, n, height + 2 * down, width + 2 * right), dtype=fine)
    pieces = columns.reshape(lanes, channels, high, wide, n, rows, places)
    for a in range(high):
        for b in range(wide):
            part = framed[..., a : a + by * (rows - 1) + 1 : by, b : b + across * (places - 1) + 1 : across]
            part += pieces[:, :, a, b]
    return framed[..., down : down + height, right : right + width].transpose(1, 2).to(columns.dtype)


def _launch(kernel: Any, columns: Tensor, pictures: Tensor, c: Convolution) -> None:
    """Run a kernel over every entry of its output."""
    n, channels, height, width = c.inputs
    lanes, entries = len(columns), columns.shape[2]
    if pictures.shape[1:] != c.inputs:
        raise ValueError(f"{tuple(pictures.shape[1:])} is not {c.inputs}")
    per_lane = columns.shape[1] * entries
    work = per_lane if kernel is _kernels().columns else n * channels * height * width
    kernel[(-(-work // BLOCK), lanes)](
        columns, pictures, per_lane, n, channels, height, width, *c.weight[2:], *c.places, *c.stride, *c.padding,
        *pictures.stride(), BLOCK=BLOCK,
    )  # fmt: skip


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton kernels, or None if Triton is not installed."""
    try:
        from fedagrac.engines.lanes.kernels import patches_triton
    except ImportError:
        return None
    return patches_triton
