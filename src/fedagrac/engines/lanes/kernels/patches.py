"""Patches of pictures as columns or rows of a matrix, and the reverse.

With its patches as columns, or as rows, a convolution is a matrix product. On a GPU with Triton each direction is
one kernel that reads and writes every number once. Elsewhere a few torch operations do the same. Pictures have the
shape [lanes, n, channels, height, width] and any memory layout.

Both sides of a matrix can be rounded up to a multiple of a number; the added rows and columns are zeros. To a
compiler each direction is one operation.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional

from fedagrac.engines.lanes.kernels.tracing import traced

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "Convolution",
    "columns_of",
    "flat_of",
    "pictures_of",
    "pictures_of_rows",
    "pixels_of",
    "power_of_two",
    "rounded_up",
    "rows_of",
    "shape_of",
]

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

    @property
    def patch(self) -> int:
        """The numbers of one patch: channels times kernel."""
        return self.weight[1] * self.weight[2] * self.weight[3]

    @property
    def outputs(self) -> int:
        """The places of all outputs of a batch."""
        return self.inputs[0] * self.places[0] * self.places[1]


def rounded_up(number: int, multiple: int) -> int:
    """Return the smallest multiple that is not smaller than the number.

    Examples:
        >>> rounded_up(363, 8)
        368
    """
    return -(-number // multiple) * multiple


def power_of_two(number: int) -> int:
    """Return the smallest power of two that is not smaller than the number.

    Examples:
        >>> power_of_two(9), power_of_two(16)
        (16, 16)
    """
    return 1 << (number - 1).bit_length()


def columns_of(x: Tensor, c: Convolution, multiple: int = 1) -> Tensor:
    """Return the patches as [lanes, channels * kernel, n * places], one column per output place.

    Args:
        x: the pictures.
        c: the convolution.
        multiple: both sides of the matrix are rounded up to a multiple of this, with zeros.

    Examples:
        >>> import torch
        >>> c = Convolution((1, 1, 2, 3), (1, 1, 2, 2), stride=(1, 1), padding=(0, 0))
        >>> columns_of(torch.arange(6.0).reshape(1, 1, 1, 2, 3), c)
        tensor([[[0., 1.],
                 [1., 2.],
                 [3., 4.],
                 [4., 5.]]])
    """
    if traced():
        opaque: Tensor = _columns_op(x, flat_of(c), multiple)
        return opaque
    kernel = _kernels() if x.is_cuda else None
    if kernel is not None:
        shape = rounded_up(c.patch, multiple), rounded_up(c.outputs, multiple)
        out = x.new_empty((len(x), *shape))
        _launch(kernel.columns, out, x, c)
        return out
    columns = _patches(x, c).permute(0, 2, 5, 6, 1, 3, 4).reshape(len(x), c.patch, c.outputs)
    return _padded(columns, multiple)


def rows_of(x: Tensor, c: Convolution, multiple: int = 1) -> Tensor:
    """Return the patches as [lanes, n * places, channels * kernel], one row per output place.

    They are the columns of `columns_of`, transposed; both sides are rounded up in the same way.

    Examples:
        >>> import torch
        >>> c = Convolution((1, 2, 1, 2), (1, 2, 1, 1), stride=(1, 1), padding=(0, 0))
        >>> rows_of(torch.arange(4.0).reshape(1, 1, 2, 1, 2), c)
        tensor([[[0., 2.],
                 [1., 3.]]])
    """
    if traced():
        opaque: Tensor = _rows_op(x, flat_of(c), multiple)
        return opaque
    kernel = _kernels() if x.is_cuda else None
    if kernel is not None:
        shape = rounded_up(c.outputs, multiple), rounded_up(c.patch, multiple)
        out = x.new_empty((len(x), *shape))
        _launch(kernel.rows, out, x, c)
        return out
    rows = _patches(x, c).permute(0, 1, 3, 4, 2, 5, 6).reshape(len(x), c.outputs, c.patch)
    return _padded(rows, multiple)


def pictures_of(columns: Tensor, c: Convolution) -> Tensor:
    """Return pictures [lanes, n, channels, height, width], the transpose of `columns_of`; overlaps are summed.

    Zeros by which columns were rounded up are left out. In memory the order is lanes, channels, n, as in the
    output of a product with columns.

    Examples:
        >>> import torch
        >>> c = Convolution((1, 1, 2, 3), (1, 1, 2, 2), stride=(1, 1), padding=(0, 0))
        >>> pictures_of(torch.ones(1, 4, 2), c)
        tensor([[[[[1., 2., 1.],
                   [1., 2., 1.]]]]])
    """
    if traced():
        opaque: Tensor = _pictures_op(columns, flat_of(c))
        return opaque
    kernel = _kernels() if columns.is_cuda else None
    if kernel is not None:
        out = _new_pictures(columns, c)
        _launch(kernel.pictures, columns.contiguous(), out, c)
        return out
    n, channels = c.inputs[:2]
    pieces = columns[:, : c.patch, : c.outputs].reshape(len(columns), channels, *c.weight[2:], n, *c.places)
    return _summed(pieces.permute(2, 3, 0, 1, 4, 5, 6), c).transpose(1, 2)


def pictures_of_rows(rows: Tensor, c: Convolution) -> Tensor:
    """Return pictures [lanes, n, channels, height, width], the transpose of `rows_of`; overlaps are summed.

    In memory the channels of one pixel are neighbours.

    Examples:
        >>> import torch
        >>> c = Convolution((1, 1, 2, 3), (1, 1, 2, 2), stride=(1, 1), padding=(0, 0))
        >>> pictures_of_rows(torch.ones(1, 2, 4), c)
        tensor([[[[[1., 2., 1.],
                   [1., 2., 1.]]]]])
    """
    if traced():
        opaque: Tensor = _pictures_of_rows_op(rows, flat_of(c))
        return opaque
    kernel = _kernels() if rows.is_cuda else None
    if kernel is not None:
        out = _new_pictures_of_rows(rows, c)
        _launch(kernel.pictures_of_rows, rows.contiguous(), out, c)
        return out
    n, channels = c.inputs[:2]
    pieces = rows[:, : c.outputs, : c.patch].reshape(len(rows), n, *c.places, channels, *c.weight[2:])
    summed = _summed(pieces.permute(5, 6, 0, 1, 4, 2, 3), c)
    return summed.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def pixels_of(pictures: Tensor) -> Tensor:
    """Return pictures [lanes, n, C, R, Q] as one row of channels per pixel, [lanes, n * R * Q, C].

    Examples:
        >>> pixels_of(torch.arange(4.0).reshape(1, 1, 2, 1, 2))
        tensor([[[0., 2.],
                 [1., 3.]]])
    """
    if traced():
        opaque: Tensor = _pixels_op(pictures)
        return opaque
    return pictures.permute(0, 1, 3, 4, 2).flatten(1, 3)


def _patches(x: Tensor, c: Convolution) -> Tensor:
    """Return the patches as a view [lanes, n, channels, R, Q, high, wide]."""
    down, right = c.padding
    padded = functional.pad(x, [right, right, down, down]) if down or right else x
    return padded.unfold(3, c.weight[2], c.stride[0]).unfold(4, c.weight[3], c.stride[1])


def _padded(matrices: Tensor, multiple: int) -> Tensor:
    """Return matrices with both sides rounded up."""
    below, beside = (rounded_up(size, multiple) - size for size in matrices.shape[1:])
    return functional.pad(matrices, [0, beside, 0, below]) if below or beside else matrices


def _summed(pieces: Tensor, c: Convolution) -> Tensor:
    """Return the sums of pieces [high, wide, a, b, c, R, Q], each at its place of pictures [a, b, c, H, W]."""
    (height, width), (rows, places) = c.inputs[2:], c.places
    (down, right), (by, across) = c.padding, c.stride
    framed = pieces.new_zeros((*pieces.shape[2:5], height + 2 * down, width + 2 * right), dtype=_fine(pieces))
    for a in range(c.weight[2]):
        for b in range(c.weight[3]):
            part = framed[..., a : a + by * (rows - 1) + 1 : by, b : b + across * (places - 1) + 1 : across]
            part += pieces[a, b]
    return framed[..., down : down + height, right : right + width].to(pieces.dtype)


def _fine(numbers: Tensor) -> torch.dtype:
    """Return the type in which numbers are summed: those of bf16 are summed in float32 and rounded once."""
    return torch.promote_types(numbers.dtype, torch.float32)


def _new_pictures(columns: Tensor, c: Convolution) -> Tensor:
    n, channels, height, width = c.inputs
    return columns.new_empty((len(columns), channels, n, height, width)).transpose(1, 2)


def _new_pictures_of_rows(rows: Tensor, c: Convolution) -> Tensor:
    n, channels, height, width = c.inputs
    return rows.new_empty((len(rows), n, height, width, channels)).permute(0, 1, 4, 2, 3)


def _launch(kernel: Any, matrices: Tensor, pictures: Tensor, c: Convolution) -> None:
    """Run a kernel over every entry of its output."""
    n, channels, height, width = c.inputs
    if pictures.shape[1:] != c.inputs:
        raise ValueError(f"{tuple(pictures.shape[1:])} is not {c.inputs}")
    per_lane, length = matrices.shape[1] * matrices.shape[2], matrices.shape[2]
    kernels, strides = _kernels(), pictures.stride()
    if kernel is kernels.pictures_of_rows:
        beside = min(64, power_of_two(channels))
        options, strides = {"BP": BLOCK // 2 // beside, "BC": beside}, ()
        tiles = -(-n * height * width // options["BP"]) * -(-channels // beside)
    elif kernel is kernels.rows:
        taps = c.weight[2] * c.weight[3]
        entries = -(-length // taps)  # the channels, and those of which an enlarged matrix has zeros
        options = _tile_of_rows(taps, entries)
        tiles = -(-matrices.shape[1] // options["BP"]) * -(-entries // options["BC"])
    else:
        options = {"BLOCK": BLOCK}
        tiles = -(-(n * channels * height * width if kernel is kernels.pictures else per_lane) // BLOCK)
    kernel[(tiles, len(matrices))](
        matrices, pictures, per_lane, length, n, channels, height, width, *c.weight[2:], *c.places, *c.stride,
        *c.padding, *strides, **options,
    )  # fmt: skip


def _tile_of_rows(taps: int, channels: int) -> dict[str, int]:
    """Return the places, channels and taps of a tile of rows, powers of two.

    Examples:
        >>> _tile_of_rows(9, 256)
        {'BP': 2, 'BC': 64, 'BT': 16}
        >>> _tile_of_rows(121, 3)
        {'BP': 4, 'BC': 4, 'BT': 128}
    """
    deep = power_of_two(taps)
    beside = min(64, power_of_two(channels), max(1, 2 * BLOCK // deep))
    return {"BP": max(1, 2 * BLOCK // (beside * deep)), "BC": beside, "BT": deep}


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton kernels, or None if Triton is not installed."""
    try:
        from fedagrac.engines.lanes.kernels import patches_triton
    except ImportError:
        return None
    return patches_triton


def flat_of(c: Convolution) -> list[int]:
    """Return a convolution as numbers, which an operation of a compiler takes.

    Examples:
        >>> c = Convolution((2, 3, 9, 8), (5, 3, 3, 3), stride=(2, 1), padding=(1, 0))
        >>> shape_of(flat_of(c)) == c
        True
    """
    return [*c.inputs, *c.weight, *c.stride, *c.padding]


def shape_of(c: Sequence[int]) -> Convolution:
    """Return the convolution of `flat_of`."""
    return Convolution(tuple(c[:4]), tuple(c[4:8]), (c[8], c[9]), (c[10], c[11]))


def _columns(x: Tensor, c: list[int], multiple: int) -> Tensor:
    return _fresh(columns_of(x, shape_of(c), multiple), x)


def _rows(x: Tensor, c: list[int], multiple: int) -> Tensor:
    return _fresh(rows_of(x, shape_of(c), multiple), x)


def _pictures(columns: Tensor, c: list[int]) -> Tensor:
    return pictures_of(columns, shape_of(c)).transpose(1, 2).contiguous().transpose(1, 2)


def _pictures_of_rows(rows: Tensor, c: list[int]) -> Tensor:
    return pictures_of_rows(rows, shape_of(c))


def _pixels(pictures: Tensor) -> Tensor:
    return _fresh(pixels_of(pictures), pictures)


def _fresh(matrices: Tensor, x: Tensor) -> Tensor:
    """Return matrices with memory of their own: an operation may not return its input."""
    if matrices.data_ptr() == x.data_ptr():
        return matrices.clone(memory_format=torch.contiguous_format)
    return matrices.contiguous()


_columns_op = custom_op("fedagrac::columns", _columns, mutates_args=())
_rows_op = custom_op("fedagrac::rows", _rows, mutates_args=())
_pictures_op = custom_op("fedagrac::pictures", _pictures, mutates_args=())
_pixels_op = custom_op("fedagrac::pixels", _pixels, mutates_args=())
_pictures_of_rows_op = custom_op("fedagrac::pictures_of_rows", _pictures_of_rows, mutates_args=())


@_columns_op.register_fake
def _(x: Tensor, c: list[int], multiple: int) -> Tensor:
    convolution = shape_of(c)
    sides = (rounded_up(size, multiple) for size in (convolution.patch, convolution.outputs))
    return x.new_empty((len(x), *sides))


@_rows_op.register_fake
def _(x: Tensor, c: list[int], multiple: int) -> Tensor:
    convolution = shape_of(c)
    sides = (rounded_up(size, multiple) for size in (convolution.outputs, convolution.patch))
    return x.new_empty((len(x), *sides))


@_pixels_op.register_fake
def _(pictures: Tensor) -> Tensor:
    lanes, n, channels, height, width = pictures.shape
    return pictures.new_empty((lanes, n * height * width, channels))


@_pictures_op.register_fake
def _(columns: Tensor, c: list[int]) -> Tensor:
    return _new_pictures(columns, shape_of(c))


@_pictures_of_rows_op.register_fake
def _(rows: Tensor, c: list[int]) -> Tensor:
    return _new_pictures_of_rows(rows, shape_of(c))
