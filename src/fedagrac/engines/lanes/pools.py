"""Max pooling over windows that tile a picture, for CPUs and compiled steps.

Torch's own pool stores the place of every maximum in eight bytes, and its backward pass scatters. Here a maximum
is taken over a few slices. The backward pass gathers: every place receives the gradient if it is the first
maximum of its window. The results equal torch's, also for ties.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional

from fedagrac.engines.lanes.modes import CallMode

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Maxima", "TilingPools", "maxima", "tiling_window"]


def tiling_window(args: tuple[Any, ...], options: dict[str, Any]) -> int | None:
    """Return the side of a pool's windows if they tile the picture, else None.

    Args:
        args: the positional arguments of `max_pool2d` after the input.
        options: its keyword arguments.
    """
    if len(args) != 1 or not isinstance(args[0], int):
        return None
    plain = not options.get("padding") and options.get("dilation", 1) == 1
    plain = plain and not options.get("ceil_mode") and not options.get("return_indices")
    return args[0] if plain and options.get("stride") in (None, args[0]) else None


def maxima(x: Tensor, window: int) -> Tensor:
    """Return the maxima over square windows of pictures [..., H, W]."""
    high, wide = (size - size % window for size in x.shape[-2:])
    rows = reduce(torch.maximum, [x[..., i:high:window, :wide] for i in range(window)])
    return reduce(torch.maximum, [rows[..., i::window] for i in range(window)])


class Maxima(torch.autograd.Function):
    """Maxima with a gradient. As in torch, it goes to the first maximum of each window."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, window: int, channels_last: bool = False) -> Tensor:
        """Return the maxima; `channels_last` says that x has that memory layout."""
        ctx.save_for_backward(x)
        ctx.window, ctx.channels_last = window, channels_last
        return maxima(x, window)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        """Return the gradient. Operations on whole pictures let a compiler fuse them into one loop."""
        (x,), k = ctx.saved_tensors, ctx.window
        (H, W), (R, Q) = x.shape[-2:], gradient.shape[-2:]
        pieces = [x[..., i : R * k : k, j : Q * k : k] for i, j in itertools.product(range(k), range(k))]
        y = reduce(torch.maximum, pieces)  # computed again: storing and reading it would cost more
        first = torch.full_like(y, k * k, dtype=torch.int32)  # the place of the first maximum in its window
        for number, piece in reversed(list(enumerate(pieces))):
            first = torch.where(piece == y, number, first)
        g = gradient
        if ctx.channels_last:
            g = g.contiguous(memory_format=torch.channels_last)
            g = g.as_strided(g.shape, g.stride())  # keeps it in memory, in the layout of x
        place = torch.arange(k * k, dtype=torch.int32, device=x.device).reshape(k, 1, k)
        spread = torch.where(first[..., :, None, :, None] == place, g[..., :, None, :, None], 0.0)
        into = spread.reshape(*x.shape[:-2], R * k, Q * k)
        beyond = (0, W - Q * k, 0, H - R * k)  # rows and columns after the last window
        return functional.pad(into, beyond) if any(beyond) else into, None, None


class TilingPools(CallMode):
    """Runs max pools whose windows tile the picture as `maxima` while the mode is active; for evaluation.

    Results equal torch's. On a CPU torch's own pool, which also finds the places of the maxima, takes ten times as
    long.
    """

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Replace max pools over tiling windows; run every other function as it is."""
        if function is functional.max_pool2d:
            window = tiling_window(args[1:], options)
            if window is not None:
                return maxima(args[0], window)
        return function(*args, **options)
