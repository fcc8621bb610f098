"""Convolutions of many lanes without patches in memory; the channels of a pixel lie side by side.

Pictures are [lanes, n, channels, height, width] in any layout. What is returned has the channels of one pixel as
neighbours in memory. On a GPU with Triton one kernel convolves all lanes, and one computes the gradient of all
weights; elsewhere torch convolves one lane after another. To a compiler each is one operation.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op
from torch.nn import functional
from torch.nn.grad import conv2d_weight

from fedagrac.engines.lanes.kernels.patches import Convolution, flat_of, rounded_up, shape_of

__all__ = ["channels_beside", "convolve", "weigh"]

PROGRAMS = 1024
"""How many tiles of the weights' gradients are computed side by side, if there is enough to do."""


def channels_beside(x: Tensor) -> Tensor:
    """Return pictures whose channels are neighbours in memory.

    Examples:
        >>> import torch
        >>> channels_beside(torch.zeros(1, 1, 2, 3, 3)).stride()
        (18, 18, 1, 6, 2)
    """
    return x.permute(0, 1, 3, 4, 2).contiguous().permute(0, 1, 4, 2, 3)


def _convolve(x: Tensor, w: Tensor, c: list[int]) -> Tensor:
    """Return the convolution of pictures, whose channels are neighbours, with weights [lanes, h, w, O, C]."""
    shape, x, w = shape_of(c), channels_beside(x), w.contiguous()  # a compiler may pass other layouts
    kernels = _kernels() if _takes(x) else None
    if kernels is None:
        return _joined(
            [functional.conv2d(a, b.permute(2, 3, 0, 1), None, *shape[2:]) for a, b in zip(x, w, strict=True)]
        )
    (n, channels, *size), outputs, (rows, columns) = shape.inputs, shape.weight[0], shape.places
    out = x.new_empty((len(x), n, rows, columns, outputs))
    block_m, block_n = 128 if shape.outputs >= 1024 else 64, _block(outputs, 128)
    tiles = -(-shape.outputs // block_m) * -(-outputs // block_n)
    kernels.convolve[(tiles, len(x))](
        x, w, out, shape.outputs, n, channels, *size, outputs, *shape.weight[2:], rows, columns, *shape.stride,
        *shape.padding, BM=block_m, BN=block_n, BK=_block(channels, 128 // x.element_size()),
        PRECISION=_precision(x), num_warps=4, num_stages=3,
    )  # fmt: skip
    return out.permute(0, 1, 4, 2, 3)


def _weigh(x: Tensor, g: Tensor, c: list[int]) -> Tensor:
    """Return the gradient of the weights, [lanes, h, O, C, w], from pictures and the outputs' gradient."""
    shape, x, g = shape_of(c), channels_beside(x), channels_beside(g)
    outputs, channels, high, wide = shape.weight
    kernels = _kernels() if _takes(x) else None
    if kernels is None:
        each: list[Tensor] = [
            conv2d_weight(a, shape.weight, b, *shape[2:])  # type: ignore[no-untyped-call]
            for a, b in zip(x, g, strict=True)
        ]
        return torch.stack(each).permute(0, 3, 1, 2, 4).contiguous()
    block_o, block_n, block_p = _block(outputs, 128), 128 if outputs > 64 else 64, 32 if outputs > 32 else 64
    tiles = -(-outputs // block_o) * -(-channels * wide // block_n) * high
    # few tiles leave a GPU idle, so sums over pixels are cut in parts
    parts = max(1, min(PROGRAMS // (tiles * len(x)), shape.outputs // (8 * block_p)))
    part = rounded_up(-(-shape.outputs // parts), block_p)
    parts = -(-shape.outputs // part)
    out = torch.empty((parts, len(x), high, outputs, channels, wide), device=x.device)
    pictures = _spread(kernels, x, wide, shape.places[1], shape.stride[1], shape.padding[1])
    gradients = _spread(kernels, g, 1, shape.places[1], 1, 0)
    kernels.weigh[(tiles, len(x), parts)](
        pictures, gradients, out, shape.outputs, part, *shape.inputs[:3], outputs, high, wide, *shape.places,
        shape.stride[0], shape.padding[0], BO=block_o, BN=block_n, BP=block_p, PRECISION=_precision(x),
        num_warps=4, num_stages=3,
    )  # fmt: skip
    return (out[0] if parts == 1 else out.sum(0)).to(x.dtype)


def _spread(kernels: Any, x: Tensor, wide: int, places: int, across: int, padding: int) -> Tensor:
    """Return each row of pixels as `wide` rows, shifted by one pixel each: [lanes, C, wide, n * H * places]."""
    lanes, n, channels, height, width = x.shape
    out = x.new_empty((lanes, channels, wide, n * height * places))
    tiles = -(-n * height * places // 64) * -(-channels // 32)
    kernels.spread[(tiles, lanes)](
        x, out, n, channels, height, width, wide, places, across, padding, BM=64, BC=32
    )  # fmt: skip
    return out


def _joined(pictures: Sequence[Tensor]) -> Tensor:
    """Return pictures of all lanes, the channels of a pixel side by side."""
    return torch.stack([p.permute(0, 2, 3, 1) for p in pictures]).permute(0, 1, 4, 2, 3)


def _takes(x: Tensor) -> bool:
    """Return whether the kernels of Triton take these numbers."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _block(size: int, most: int) -> int:
    """Return the side of a tile: a power of two from 16 to `most`."""
    return max(16, min(most, 1 << (size - 1).bit_length()))


@functools.cache
def _kernels() -> Any:
    """Return the module of Triton kernels, or None if Triton is not installed."""
    try:
        from fedagrac.engines.lanes.kernels import direct_triton
    except ImportError:
        return None
    return direct_triton


_convolve_op = custom_op("fedagrac::convolve", _convolve, mutates_args=())
_weigh_op = custom_op("fedagrac::weigh", _weigh, mutates_args=())


@_convolve_op.register_fake
def _(x: Tensor, w: Tensor, c: list[int]) -> Tensor:
    shape = shape_of(c)
    return x.new_empty((len(x), shape.inputs[0], *shape.places, shape.weight[0])).permute(0, 1, 4, 2, 3)


@_weigh_op.register_fake
def _(x: Tensor, g: Tensor, c: list[int]) -> Tensor:
    outputs, channels, high, wide = shape_of(c).weight
    return x.new_empty((len(x), high, outputs, channels, wide))


def convolve(x: Tensor, w: Tensor, c: Convolution) -> Tensor:
    """Return the convolution of pictures, whose channels are neighbours, with weights [lanes, h, w, O, C]."""
    outputs: Tensor = _convolve_op(x, w, flat_of(c))
    return outputs


def weigh(x: Tensor, g: Tensor, c: Convolution) -> Tensor:
    """Return the gradient of the weights, [lanes, h, O, C, w]; channels are neighbours in both arguments."""
    weights: Tensor = _weigh_op(x, g, flat_of(c))
    return weights
