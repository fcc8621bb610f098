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

from fedagrac.engines.lanes.kernels.patches import (
    Convolution,
    flat_of,
    power_of_two,
    rounded_up,
    shape_of,
)

__all__ = ["channels_beside", "convolve", "turned", "weigh"]

PROGRAMS = 1024
"""How many tiles of the weights' gradients are computed side by side, if there is enough to do."""


FEW_BYTES = 4 * 2**20
"""The most bytes of all lanes' weights, in float32, whose gradients in bf16 are taken from pictures as they are.

Larger ones leave the cache while programs write between each other's numbers.
"""


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
    on_tensor_cores = x.dtype == torch.bfloat16 or _precision(x) == "tf32"
    block_m, block_n, warps, stages = _tiles(shape, len(x), _multiprocessors(x.device), on_tensor_cores)
    tiles = -(-shape.outputs // block_m) * -(-outputs // block_n)
    kernels.convolve[(tiles, len(x))](
        x, w, out, shape.outputs, n, channels, *size, outputs, *shape.weight[2:], rows, columns, *shape.stride,
        *shape.padding, BM=block_m, BN=block_n, BK=_block(channels, 128 // x.element_size()),
        PRECISION=_precision(x), num_warps=warps, num_stages=stages,
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
    if x.dtype == torch.bfloat16 and 4 * len(x) * outputs * channels * high * wide <= FEW_BYTES:
        return _weighed_as_is(kernels, x, g, shape)
    block_o, block_n, block_p = _block(outputs, 128), 128 if outputs > 64 else 64, 32 if outputs > 32 else 64
    warps = 4
    if x.dtype == torch.bfloat16 and shape.outputs >= 256:
        block_p, warps = 64, 8
    tiles = -(-outputs // block_o) * -(-channels * wide // block_n) * high
    part, out = _parts(x, shape, tiles, block_p)
    pictures = _spread(kernels, x, wide, shape.places[1], shape.stride[1], shape.padding[1])
    gradients = _spread(kernels, g, 1, shape.places[1], 1, 0)
    kernels.weigh[(tiles, len(x), len(out))](
        pictures, gradients, out, shape.outputs, part, *shape.inputs[:3], outputs, high, wide, *shape.places,
        shape.stride[0], shape.padding[0], BO=block_o, BN=block_n, BP=block_p, PRECISION=_precision(x),
        num_warps=warps, num_stages=3,
    )  # fmt: skip
    return _total(out, x)


def _weighed_as_is(kernels: Any, x: Tensor, g: Tensor, shape: Convolution) -> Tensor:
    """Return what `_weigh` returns, from pictures that are not laid out anew first.

    Tensor cores take numbers of 16 bits in either order; those of 32 bits must have their pixels side by side.
    """
    outputs, channels, high, wide = shape.weight
    block_o, block_c, block_p = _block(outputs, 128), _block(channels, 128), 64
    tiles = -(-outputs // block_o) * -(-channels // block_c) * high * wide
    part, out = _parts(x, shape, tiles, block_p)
    kernels.weigh_as_is[(tiles, len(x), len(out))](
        x, g, out, shape.outputs, part, *shape.inputs, outputs, high, wide, *shape.places, *shape.stride,
        *shape.padding, BO=block_o, BC=block_c, BP=block_p, num_warps=4, num_stages=3,
    )  # fmt: skip
    return _total(out, x)


def _parts(x: Tensor, shape: Convolution, tiles: int, block: int) -> tuple[int, Tensor]:
    """Return how many pixels are summed at a time, and memory for the sums: few tiles would leave a GPU idle."""
    parts = max(1, min(PROGRAMS // (tiles * len(x)), shape.outputs // (8 * block)))
    part = rounded_up(-(-shape.outputs // parts), block)
    outputs, channels, high, wide = shape.weight
    sums = (-(-shape.outputs // part), len(x), high, outputs, channels, wide)
    return part, torch.empty(sums, device=x.device)


def _total(sums: Tensor, x: Tensor) -> Tensor:
    """Return the sum of the parts that `_parts` has made memory for, in the type of the pictures."""
    return (sums[0] if len(sums) == 1 else sums.sum(0)).to(x.dtype)


def _turned(w: Tensor) -> Tensor:
    """Return weights [lanes, O, C, h, w] turned by half a circle, as [lanes, h, w, C, O]."""
    lanes, outputs, channels, high, wide = w.shape
    kernels = _kernels() if _takes(w) else None
    if kernels is None:
        return w.flip(3, 4).permute(0, 3, 4, 2, 1).contiguous()
    out = w.new_empty((lanes, high, wide, channels, outputs))
    beside = 64 // w.element_size()  # all taps of a tile stay in the cache while it is read
    tiles = -(-outputs // 32) * -(-channels // beside)
    kernels.turn[(tiles, lanes)](w.contiguous(), out, outputs, channels, high * wide, BO=32, BC=beside)
    return out


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


def _tiles(
    c: Convolution, lanes: int, multiprocessors: int, on_tensor_cores: bool = True
) -> tuple[int, int, int, int]:
    """Return the sides of a tile of the outputs, pixels and channels, and its warps and stages.

    Of these the fastest was taken for the shapes of ResNet-18, VGG-19 and AlexNet on an H200. Each multiprocessor
    has two tiles of 128 x 128 at a time. Smaller ones are better where those would leave some without work, or
    need a second turn for a few.

    Examples:
        >>> c = Convolution((25, 256, 8, 8), (256, 256, 3, 3), (1, 1), (1, 1))
        >>> _tiles(c, 20, 132)
        (128, 256, 8, 3)
        >>> small = Convolution((25, 512, 2, 2), (512, 512, 3, 3), (1, 1), (1, 1))
        >>> _tiles(small, 20, 132)
        (64, 128, 4, 4)
    """
    outputs = c.weight[0]
    beside = _block(outputs, 128)
    if c.outputs >= 1024:
        return (128, 256, 8, 3) if on_tensor_cores and outputs % 256 == 0 else (128, beside, 4, 3)
    columns = -(-outputs // beside) * lanes
    if multiprocessors <= -(-c.outputs // 128) * columns <= 2 * multiprocessors:
        return 128, beside, 4, 3
    return 64, beside, 4, 4 if -(-c.outputs // 64) * columns <= 2 * multiprocessors else 3


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    """Return how many multiprocessors a GPU has."""
    return int(torch.cuda.get_device_properties(device).multi_processor_count) if device.type == "cuda" else 1


def _takes(x: Tensor) -> bool:
    """Return whether the kernels of Triton take these numbers."""
    return x.is_cuda and x.dtype in (torch.float32, torch.bfloat16)


def _precision(x: Tensor) -> str:
    return "tf32" if x.dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32 else "ieee"


def _block(size: int, most: int) -> int:
    """Return the side of a tile: a power of two from 16 to `most`."""
    return max(16, min(most, power_of_two(size)))


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
_turned_op = custom_op("fedagrac::turned", _turned, mutates_args=())


@_convolve_op.register_fake
def _(x: Tensor, w: Tensor, c: list[int]) -> Tensor:
    shape = shape_of(c)
    return x.new_empty((len(x), shape.inputs[0], *shape.places, shape.weight[0])).permute(0, 1, 4, 2, 3)


@_weigh_op.register_fake
def _(x: Tensor, g: Tensor, c: list[int]) -> Tensor:
    outputs, channels, high, wide = shape_of(c).weight
    return x.new_empty((len(x), high, outputs, channels, wide))


@_turned_op.register_fake
def _(w: Tensor) -> Tensor:
    lanes, outputs, channels, high, wide = w.shape
    return w.new_empty((lanes, high, wide, channels, outputs))


def convolve(x: Tensor, w: Tensor, c: Convolution) -> Tensor:
    """Return the convolution of pictures, whose channels are neighbours, with weights [lanes, h, w, O, C]."""
    outputs: Tensor = _convolve_op(x, w, flat_of(c))
    return outputs


def weigh(x: Tensor, g: Tensor, c: Convolution) -> Tensor:
    """Return the gradient of the weights, [lanes, h, O, C, w]; channels are neighbours in both arguments."""
    weights: Tensor = _weigh_op(x, g, flat_of(c))
    return weights


def turned(w: Tensor) -> Tensor:
    """Return weights [lanes, O, C, h, w] turned by half a circle, as [lanes, h, w, C, O].

    A convolution of the outputs' gradient with them is the gradient of the pictures.

    Examples:
        >>> turned(torch.arange(4.0).reshape(1, 1, 1, 2, 2)).flatten()
        tensor([3., 2., 1., 0.])
    """
    weights: Tensor = _turned_op(w)
    return weights
