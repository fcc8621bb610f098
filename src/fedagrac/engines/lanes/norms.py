"""Norms of many lanes, written for a compiler that makes one kernel of neighbouring operations.

A norm on a GPU takes the time of reading and writing its pictures. Torch's own, taken apart by vmap and autograd,
wants the pixels of a channel side by side, while convolutions want the channels of a pixel. What is written here
reads them in any layout: twice forward (the moments, the output) and twice backward (the sums over the pixels of
each channel, the gradient).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["LaneGroupNorm"]


class LaneGroupNorm(torch.autograd.Function):
    """A group norm of pictures [lanes, n, C, ...], with weights and biases [lanes, C] or without; ReLU may follow.

    With N numbers in a group, xhat = (x - mean) / sd, g = dy weight and means over the group,
    dx = (g - mean(g) - xhat mean(g xhat)) / sd. Both means, and the gradients of weights and biases, are made of
    the sums of dy and of dy xhat over the pixels of each channel.

    Only moments are looked at group by group: a compiler lays out a picture whose channels are split into groups
    with the pixels of a channel side by side.

    Where ReLU follows, the backward pass takes its signs from x, which it reads anyway, not from ReLU's output.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool
    ) -> Tensor:
        """Return the normalised pictures."""
        by_group = torch.unflatten(x, 2, (groups, -1))
        variance, mean = torch.var_mean(by_group, tuple(range(3, by_group.ndim)), correction=0)
        rsd = torch.rsqrt(variance + eps)
        ctx.save_for_backward(x, weight, bias, mean, rsd)
        ctx.relu = relu
        output = (x - _of_groups(mean, x)) * _of_groups(rsd, x)
        if weight is not None and bias is not None:
            output = output * _of_channels(weight, x) + _of_channels(bias, x)
        return torch.relu(output) if relu else output

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None, None]:
        """Return the gradients of pictures, weights and biases."""
        x, weight, bias, mean, rsd = ctx.saved_tensors
        groups = mean.shape[2]
        xhat = (x - _of_groups(mean, x)) * _of_groups(rsd, x)
        dys = _through_relu(dy, xhat, weight, bias) if ctx.relu else (dy, dy, dy)
        pixels = tuple(range(3, x.ndim))
        sums = dys[0], dys[1] * xhat
        if pixels:
            sums = sums[0].sum(pixels), sums[1].sum(pixels)
        to_bias, to_weight = (None, None) if weight is None else (total.sum(1) for total in sums)
        if not ctx.needs_input_grad[0]:
            return None, to_weight, to_bias, None, None, None
        numbers = x[0, 0].numel() // groups
        scaled = sums if weight is None else [total * weight[:, None] for total in sums]
        first, second = (
            _of_groups(torch.unflatten(total, 2, (groups, -1)).sum(3) / numbers, x) for total in scaled
        )
        g = dys[2] if weight is None else dys[2] * _of_channels(weight, x)
        return (g - first - xhat * second) * _of_groups(rsd, x), to_weight, to_bias, None, None, None


def _through_relu(dy: Tensor, xhat: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, ...]:
    """Return the gradient before ReLU three times, for three uses.

    What ReLU got is written in three ways, so that a compiler does not take them for one number, which it would
    write to memory because it is used again.
    """
    if weight is None or bias is None:
        sums: tuple[Tensor, ...] = xhat, 1 * xhat, xhat + 0
    else:
        w, b = _of_channels(weight, xhat), _of_channels(bias, xhat)
        sums = b + xhat * w, xhat * w - (-b), torch.addcmul(b, xhat, w)
    return tuple(torch.where(total <= 0, 0.0, dy) for total in sums)


def _of_groups(values: Tensor, x: Tensor) -> Tensor:
    """Return the values of groups, [lanes, n, groups], for each channel of pictures, [lanes, n, C, ...]."""
    channels = values[..., None].expand(-1, -1, -1, x.shape[2] // values.shape[2]).flatten(2)
    return channels[(...,) + (None,) * (x.ndim - 3)]


def _of_channels(values: Tensor, x: Tensor) -> Tensor:
    """Return the values of channels, [lanes, C], shaped like pictures [lanes, n, C, ...]."""
    return values.reshape(len(values), 1, -1, *[1] * (x.ndim - 3))
