"""Convolutions of many lanes as one batched matrix product.

A vmapped convolution becomes a grouped one, which cuDNN runs one group after another. Laying the patches out as
rows (im2col) makes it one batched matrix product over all lanes instead. Which is faster depends on the shape, so
it is measured once per shape. The user's module is not touched: a mode sees its calls of conv2d and routes them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.func import vmap
from torch.nn import functional
from torch.overrides import TorchFunctionMode

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["Convolution", "RoutedConvolutions", "convolutions_of", "faster_as_products", "patch_convolution"]

_OPTIONS = ("bias", "stride", "padding", "dilation", "groups")


class Convolution(NamedTuple):
    """What decides how fast a convolution is: shapes, strides and paddings."""

    inputs: tuple[int, ...]
    weight: tuple[int, ...]
    stride: tuple[int, int]
    padding: tuple[int, int]


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _parse(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, Convolution | None]:
    """Return input, weight, bias and the convolution, or None for one that is left to conv2d."""
    inputs, weight, *rest = args
    options = dict(zip(_OPTIONS, rest, strict=False)) | kwargs
    plain = (
        inputs.ndim == 4
        and options.get("groups", 1) == 1
        and _pair(options.get("dilation", 1)) == (1, 1)
        and not isinstance(options.get("padding", 0), str)
    )
    convolution = None
    if plain:
        stride, padding = _pair(options.get("stride", 1)), _pair(options.get("padding", 0))
        convolution = Convolution(tuple(inputs.shape), tuple(weight.shape), stride, padding)
    return inputs, weight, options.get("bias"), convolution


def patch_convolution(inputs: Tensor, weight: Tensor, bias: Tensor | None, convolution: Convolution) -> Tensor:
    """Return the convolution as a product of patches and weights; vmapped, one batched product over lanes.

    Examples:
        >>> x, w = torch.randn(2, 3, 9, 8), torch.randn(5, 3, 3, 3)
        >>> spec = Convolution((2, 3, 9, 8), (5, 3, 3, 3), stride=(2, 1), padding=(1, 0))
        >>> direct = functional.conv2d(x, w, stride=(2, 1), padding=(1, 0))
        >>> torch.allclose(patch_convolution(x, w, None, spec), direct, atol=1e-5)
        True
    """
    (high, wide), (down, right) = convolution.weight[2:], convolution.padding
    if down or right:
        inputs = functional.pad(inputs, [right, right, down, down])
    # views, not unfold's copy: functional.unfold launches one kernel per sample on CUDA
    patches = inputs.unfold(2, high, convolution.stride[0]).unfold(3, wide, convolution.stride[1])
    n, _, rows, columns = patches.shape[:4]
    # one column per place, neighbours side by side, so that reading and writing run along the rows of pictures
    flat = patches.permute(1, 4, 5, 0, 2, 3).reshape(-1, n * rows * columns)
    # weights first: their gradient then comes out in the weights' own layout, and needs no copy
    output = weight.reshape(len(weight), -1) @ flat
    if bias is not None:
        output = output + bias[:, None]
    return output.reshape(len(weight), n, rows, columns).transpose(0, 1)


class RoutedConvolutions(TorchFunctionMode):
    """While active, the chosen convolutions are products of patches, linear layers have weights first."""

    def __init__(self, chosen: Iterable[Convolution]) -> None:
        super().__init__()
        self.chosen = frozenset(chosen)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Route conv2d; leave everything else alone."""
        if func is torch.conv2d and self.chosen:
            inputs, weight, bias, convolution = _parse(args, kwargs or {})
            if convolution in self.chosen and convolution is not None:
                return patch_convolution(inputs, weight, bias, convolution)
        if func is functional.linear and not kwargs and args[0].ndim == 2:
            return _linear(*args)
        return func(*args, **(kwargs or {}))


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return inputs times weights, weights first, for the same reason as in `patch_convolution`."""
    output = weight @ inputs.T
    return (output if bias is None else output + bias[:, None]).T


class _Collect(TorchFunctionMode):
    """Notes the convolutions it sees."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Convolution] = []

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if func is torch.conv2d:
            convolution = _parse(args, kwargs or {})[3]
            if convolution is not None:
                self.found.append(convolution)
        return func(*args, **(kwargs or {}))


def convolutions_of(module: torch.nn.Module, inputs: Tensor) -> list[Convolution]:
    """Return the different convolutions of one forward pass, in order."""
    with torch.no_grad(), _Collect() as seen:
        module(inputs)
    return list(dict.fromkeys(seen.found))


def faster_as_products(
    convolutions: Iterable[Convolution], lanes: int, device: torch.device, dtype: torch.dtype
) -> list[Convolution]:
    """Measure each convolution both ways, forward and backward over so many lanes; return those to route."""
    return [
        c
        for c in convolutions
        if _seconds(c, lanes, device, dtype, True) < _seconds(c, lanes, device, dtype, False)
    ]


def _seconds(c: Convolution, lanes: int, device: torch.device, dtype: torch.dtype, patches: bool) -> float:
    try:
        inputs = torch.zeros((lanes, *c.inputs), dtype=dtype, device=device, requires_grad=True)
        weights = torch.zeros((lanes, *c.weight), dtype=dtype, device=device, requires_grad=True)

        def one(x: Tensor, w: Tensor) -> Tensor:
            if patches:
                return patch_convolution(x, w, None, c)
            return functional.conv2d(x, w, None, c.stride, c.padding)

        best = float("inf")
        with torch.enable_grad():
            for _ in range(4):  # the first includes the libraries' own choices
                _wait(device)
                begun = time.perf_counter()
                torch.autograd.grad(vmap(one)(inputs, weights).sum(), (inputs, weights))
                _wait(device)
                best = min(best, time.perf_counter() - begun)
    except torch.OutOfMemoryError:
        return float("inf")
    return best


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
