"""Convolutions of many lanes: several routes to the same numbers, of which the fastest depends on the shape.

Every route takes pictures [lanes, n, C, H, W] and weights [lanes, O, C, h, w] and returns outputs
[lanes, n, O, R, Q]; they differ in the order of operations and in the memory layout of their outputs. Which route
a convolution takes on a GPU is measured (`routes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.nn import functional

from fedagrac.engines.lanes.kernels.direct import channels_beside, convolve, turned, weigh
from fedagrac.engines.lanes.kernels.patches import (
    Convolution,
    columns_of,
    pictures_of,
    pictures_of_rows,
    pixels_of,
    rounded_up,
    rows_of,
)

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["GROUPED", "MULTIPLE", "ROUTES", "Route", "routes_for"]

GROUPED = "grouped"
"""The route of torch's own vmap rule: a grouped convolution, one group per lane."""

MULTIPLE = 8
"""The padded routes round the sides of matrices up to a multiple of this; tensor cores need such sides."""


class Route(NamedTuple):
    """One way to compute a convolution of many lanes.

    Attributes:
        run: takes pictures, weights and the convolution; returns the outputs.
        fits: whether the route can compute a convolution and has something to do for it.
    """

    run: Callable[[Tensor, Tensor, Convolution], Tensor]
    fits: Callable[[Convolution], bool]


def routes_for(c: Convolution) -> list[str]:
    """Return the names of the routes that a convolution can take.

    Examples:
        >>> routes_for(Convolution((8, 16, 4, 4), (8, 16, 1, 1), stride=(1, 1), padding=(0, 0)))
        ['grouped', 'patches', 'rows', 'channels last', 'pointwise', 'direct']
        >>> "patches, padded" in routes_for(Convolution((8, 3, 32, 32), (8, 3, 11, 11), (4, 4), (5, 5)))
        True
    """
    return [name for name, route in ROUTES.items() if route.fits(c)]


def _grouped(x: Tensor, w: Tensor, c: Convolution) -> Tensor:
    """Convolve with one group per lane."""
    return _by_channels(x, w, c, torch.contiguous_format)


def _channels_last(x: Tensor, w: Tensor, c: Convolution) -> Tensor:
    """Convolve with one group per lane; the channels of all lanes lie side by side in memory."""
    return _by_channels(x, w, c, torch.channels_last)


def _by_channels(x: Tensor, w: Tensor, c: Convolution, order: torch.memory_format) -> Tensor:
    lanes = len(x)
    output = functional.conv2d(
        x.movedim(0, 1).flatten(1, 2).contiguous(memory_format=order),
        w.flatten(0, 1).contiguous(memory_format=order),
        None, c.stride, c.padding, groups=lanes,
    )  # fmt: skip
    return output.reshape(len(output), lanes, -1, *c.places).movedim(1, 0)


def _pointwise(x: Tensor, w: Tensor, c: Convolution) -> Tensor:
    """Multiply weights and pixels: a kernel of one pixel needs no patches."""
    pixels = x[..., :: c.stride[0], :: c.stride[1]].transpose(1, 2).reshape(len(x), c.inputs[1], -1)
    product = w.reshape(len(w), c.weight[0], -1) @ pixels
    return torch.unflatten(product, 2, (c.inputs[0], *c.places)).transpose(1, 2)


class _Patches(torch.autograd.Function):
    """A convolution as a product of weights and columns of patches.

    In memory the outputs have the order of the product, [lanes, O, n, R, Q].
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, c: Convolution, multiple: int) -> Tensor:
        columns = columns_of(x, c, multiple)
        ctx.save_for_backward(columns, w)
        ctx.convolution, ctx.multiple = c, multiple
        product = _enlarged(w.reshape(len(w), c.weight[0], -1), multiple) @ columns
        outputs = product[:, : c.weight[0], : c.outputs]
        return torch.unflatten(outputs, 2, (c.inputs[0], *c.places)).transpose(1, 2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        columns, w = ctx.saved_tensors
        c, multiple = ctx.convolution, ctx.multiple
        flat = _enlarged(gradient.transpose(1, 2).reshape(len(w), c.weight[0], -1), multiple)
        to_weights = (flat @ columns.transpose(1, 2))[:, : c.weight[0], : c.patch].reshape(w.shape)
        if not ctx.needs_input_grad[0]:
            return None, to_weights, None, None
        weights = _enlarged(w.reshape(len(w), c.weight[0], -1), multiple)
        return pictures_of(weights.transpose(1, 2) @ flat, c), to_weights, None, None


def _back(c: Convolution) -> Convolution:
    """Return the convolution of the outputs' gradient with flipped weights, which gives that of the pictures."""
    (n, channels, *_), (outputs, _, high, wide) = c.inputs, c.weight
    padding = high - 1 - c.padding[0], wide - 1 - c.padding[1]
    return Convolution((n, outputs, *c.places), (channels, outputs, high, wide), (1, 1), padding)


class _Direct(torch.autograd.Function):
    """A convolution by one kernel for all lanes, without patches in memory."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, c: Convolution) -> Tensor:
        x = channels_beside(x)
        ctx.save_for_backward(x, w)
        ctx.convolution = c
        return convolve(x, w.permute(0, 3, 4, 1, 2).contiguous(), c)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None]:
        x, w = ctx.saved_tensors
        c, g = ctx.convolution, channels_beside(gradient)
        to_weights = weigh(x, g, c).permute(0, 2, 3, 1, 4)
        if not ctx.needs_input_grad[0]:
            return None, to_weights, None
        if _flips(c):
            return convolve(g, turned(w), _back(c)), to_weights, None
        return pictures_of_rows(pixels_of(g) @ w.flatten(2), c), to_weights, None


class _Rows(torch.autograd.Function):
    """A convolution as a product of rows of patches and weights.

    In memory the channels of one pixel are neighbours, in the outputs as in the gradient of the pictures.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, c: Convolution, multiple: int) -> Tensor:
        rows, weights = rows_of(x, c, multiple), _enlarged(w.flatten(2), multiple)
        ctx.save_for_backward(rows, weights)
        ctx.convolution, ctx.multiple = c, multiple
        outputs = (rows @ weights.transpose(1, 2))[:, : c.outputs, : c.weight[0]]
        return torch.unflatten(outputs, 1, (c.inputs[0], *c.places)).permute(0, 1, 4, 2, 3)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor, None, None]:
        rows, weights = ctx.saved_tensors
        c = ctx.convolution
        flat = _enlarged(pixels_of(gradient), ctx.multiple)
        to_weights = (flat.transpose(1, 2) @ rows)[:, : c.weight[0], : c.patch].reshape(len(rows), *c.weight)
        if not ctx.needs_input_grad[0]:
            return None, to_weights, None, None
        return pictures_of_rows(flat @ weights, c), to_weights, None, None


def _enlarged(matrices: Tensor, multiple: int) -> Tensor:
    """Return matrices with both sides rounded up to a multiple, with zeros."""
    below, beside = (rounded_up(size, multiple) - size for size in matrices.shape[1:])
    return functional.pad(matrices, [0, beside, 0, below]) if below or beside else matrices


def _patches(x: Tensor, w: Tensor, c: Convolution, multiple: int) -> Tensor:
    output: Tensor = _Patches.apply(x, w, c, multiple)  # type: ignore[no-untyped-call]
    return output


def _direct(x: Tensor, w: Tensor, c: Convolution) -> Tensor:
    output: Tensor = _Direct.apply(x, w, c)  # type: ignore[no-untyped-call]
    return output


def _rows(x: Tensor, w: Tensor, c: Convolution, multiple: int) -> Tensor:
    output: Tensor = _Rows.apply(x, w, c, multiple)  # type: ignore[no-untyped-call]
    return output


def _odd(c: Convolution) -> bool:
    """Return whether any side of the product is not a multiple."""
    return any(size % MULTIPLE for size in (c.patch, c.outputs, c.weight[0]))


def _one_pixel(c: Convolution) -> bool:
    return c.weight[2:] == (1, 1) and c.padding == (0, 0)


def _flips(c: Convolution) -> bool:
    """Return whether the backward pass is a convolution without gaps."""
    return c.stride == (1, 1) and all(c.padding[i] < c.weight[2 + i] for i in (0, 1))


def _fills_tiles(c: Convolution) -> bool:
    """Return whether channels fill a good part of a tile, and 32 bits count the numbers of a lane."""
    spread = math.prod(c.inputs) * c.weight[3]
    return c.inputs[1] >= 8 and max(spread, c.outputs * c.weight[0]) < 2**31


ROUTES: dict[str, Route] = {
    GROUPED: Route(_grouped, lambda c: True),
    "patches": Route(lambda x, w, c: _patches(x, w, c, 1), lambda c: True),
    "patches, padded": Route(lambda x, w, c: _patches(x, w, c, MULTIPLE), _odd),
    "rows": Route(lambda x, w, c: _rows(x, w, c, 1), lambda c: True),
    "rows, padded": Route(lambda x, w, c: _rows(x, w, c, MULTIPLE), _odd),
    "channels last": Route(_channels_last, lambda c: True),
    "pointwise": Route(_pointwise, _one_pixel),
    "direct": Route(_direct, _fills_tiles),
}
"""All routes by name."""
