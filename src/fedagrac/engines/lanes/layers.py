"""Layers that run for many lanes at once.

A vmapped convolution becomes a grouped convolution, and cuDNN runs its groups one after another. On a GPU a
convolution can instead take another route, such as one batched matrix product of weights and patches over all
lanes (`convolutions.py`). On a CPU grouped convolutions are fast if the channels of all lanes lie side by side in
memory; pools must keep that layout.

A mode sees the calls of the user's module and routes them to functions with their own vmap rule. The gradient is
taken outside the vmap, so torch differentiates what those functions call.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedagrac.engines.lanes.convolutions import GROUPED, ROUTES
from fedagrac.engines.lanes.kernels.patches import Convolution
from fedagrac.engines.lanes.kernels.products import LaneProduct, fast, faster_products
from fedagrac.engines.lanes.modes import CallMode
from fedagrac.engines.lanes.norms import LaneGroupNorm
from fedagrac.engines.lanes.pools import Maxima, tiling_window
from fedagrac.engines.lanes.positions import UsedPositions
from fedagrac.engines.lanes.recurrent import recurrent_routes

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["RoutedLayers", "convolutions_of"]

_OPTIONS = ("bias", "stride", "padding", "dilation", "groups")
_AVERAGES = (functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_avg_pool3d)
_BAG_OPTIONS = (
    "offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights",
    "include_last_offset", "padding_idx",
)  # fmt: skip


_Normed = tuple["Tensor", Callable[[], "Tensor"]]
"""What a norm returned, and the same norm with ReLU."""


class RoutedLayers(CallMode):
    """Runs layers as functions of many lanes while the mode is active.

    Attributes:
        routes: the names of the routes that convolutions take; all others take torch's own vmap rule.
        side_by_side: whether the channels of all lanes lie side by side in memory, for CPUs.
        fused: whether pools and dropout consist of operations that a compiler can fuse; slower uncompiled.
        positions: the positions of sequences that a forward pass uses; None for all of them.
        used: whether any call was routed so far. A mode that routes nothing only costs time.
        times: how many times as many samples as in the present calls a step has; more than 1 in a trial.
    """

    def __init__(
        self, routes: Mapping[Convolution, str] | None = None, side_by_side: bool = False, fused: bool = False
    ) -> None:
        super().__init__()
        self.routes = dict(routes or {})
        self.side_by_side = side_by_side
        self.fused = fused
        self.positions: UsedPositions | None = None
        self.used = False
        self.times = 1.0
        self._number: int | None = None
        self._normed: _Normed | None = None  # of this call
        self._before: _Normed | None = None  # of the call before
        self._routes: dict[Callable[..., Any], Callable[..., Any]] = {
            torch.conv2d: self._convolution,
            functional.max_pool2d: self._max_pool,
            **{pool: partial(_average_pool, pool, dims) for dims, pool in enumerate(_AVERAGES, 1)},
            functional.embedding: _embedding,
            functional.scaled_dot_product_attention: _attention,
            functional.multi_head_attention_forward: _multi_head_attention,
            functional.embedding_bag: _embedding_bag,
            functional.bilinear: _bilinear,
            torch._weight_norm: _weight_norm,
        }
        self._routes |= recurrent_routes(fused)
        if side_by_side or fused:
            self._routes[functional.dropout] = self._dropout
            self._routes[functional.group_norm] = _group_norm
        if not side_by_side:
            self._routes[functional.linear] = _linear
            self._routes[functional.group_norm] = self._fused_norm if fused else _group_norm_in_two_sums
            if fused:
                self._routes |= dict.fromkeys((functional.relu, torch.relu, torch.Tensor.relu), self._relu)
            self._routes[functional.batch_norm] = _batch_norm_in_two_sums
        elif fused or faster_products():
            self._routes[functional.linear] = _linear_of_lanes

    @contextlib.contextmanager
    def forward_pass(self) -> Iterator[None]:
        """Cut what the module computes to the positions that it uses, in a forward pass of the module."""
        self._number = 0
        try:
            yield
        finally:
            self._number = self._normed = self._before = None

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Route layers that have a better way for many lanes; run every other function as it is."""
        self._before, self._normed = self._normed, None
        if self.positions is not None and self._number is not None:
            args = self.positions.arguments(self._number, function, args)
            self._number += 1
            self.used = True
        route = self._routes.get(function)
        if route is None:
            return function(*args, **options)
        if "input" in options:  # the first parameter of most of these functions
            args, options = (options["input"], *args), {k: v for k, v in options.items() if k != "input"}
        if route is _linear_of_lanes and not (self.fused or _large(1.0, *args, **options)):
            self.used = self.used or _large(self.times, *args, **options)
            return function(*args, **options)
        self.used = True
        return route(*args, **options)

    def _convolution(self, *args: Any, **options: Any) -> Tensor:
        inputs, weight, bias, convolution = _parse(args, options)
        name = GROUPED
        if convolution is not None:
            name = "channels last" if self.side_by_side else self.routes.get(convolution, GROUPED)
        if convolution is None or (name == GROUPED and self.side_by_side):
            return torch.conv2d(*args, **options)
        if name == GROUPED:
            output = torch.conv2d(inputs, weight, None, convolution.stride, convolution.padding)
        else:
            output = _Convolution.apply(inputs, weight, convolution, name)  # type: ignore[no-untyped-call]
        if bias is None:
            return output
        return output + (bias[:, None, None] if self.side_by_side else _by_sample(bias, output))

    def _max_pool(self, inputs: Tensor, *args: Any, **options: Any) -> Any:
        if options.get("return_indices", False) or len(args) > 5:
            return functional.max_pool2d(inputs, *args, **options)
        window = tiling_window(args, options) if self.fused else None
        return _Pool.apply(inputs, self.side_by_side, window, args, options)  # type: ignore[no-untyped-call]

    def _fused_norm(
        self,
        input: Tensor,
        num_groups: int,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        eps: float = 1e-05,
    ) -> Tensor:
        """Return a group norm that a compiler for GPUs fuses into two passes forward and two back."""
        if input.shape[1] % num_groups or (weight is None) != (bias is None):
            return _group_norm_in_two_sums(input, num_groups, weight, bias, eps)  # torch says what is wrong
        norm: Callable[[bool], Tensor] = partial(_GroupNorm.apply, input, weight, bias, num_groups, eps)
        output = norm(False)
        self._normed = output, partial(norm, True)
        return output

    def _relu(self, input: Tensor, inplace: bool = False) -> Tensor:
        """Return ReLU. Directly after a norm it is one function with it, and the norm's output is not needed."""
        if self._before is None or input is not self._before[0]:
            return functional.relu(input, inplace)
        output = self._before[1]()
        return input.copy_(output) if inplace else output

    def _dropout(self, *args: Any, **options: Any) -> Tensor:
        return _dropout(self.fused, self.side_by_side, *args, **options)


def _group_norm(inputs: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return a group norm; its vmap rule needs contiguous channels, and fails for pictures of one pixel."""
    pixels = inputs.contiguous().flatten(2) if inputs.ndim > 3 else inputs
    return functional.group_norm(pixels, *args, **options).reshape(inputs.shape)


def _by_sample(values: Tensor, inputs: Tensor) -> Tensor:
    """Return the values of channels, [C], shaped like inputs [n, C, ...].

    They are expanded to each sample first, so that their gradient is summed in each of them and then over them. A
    GPU has too little to do side by side in one sum over both.
    """
    return values.expand(len(inputs), -1)[(...,) + (None,) * (inputs.ndim - 2)]


def _scaled(normed: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    if weight is not None:
        normed = normed * _by_sample(weight, normed)
    return normed if bias is None else normed + _by_sample(bias, normed)


def _group_norm_in_two_sums(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-05
) -> Tensor:
    """Return a group norm, the gradients of whose weight and bias are summed in two steps."""
    return _scaled(_group_norm(input, num_groups, None, None, eps), weight, bias)


def _batch_norm_in_two_sums(
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    *args: Any,
    **options: Any,
) -> Tensor:
    """Return a batch norm, the gradients of whose weight and bias are summed in two steps."""
    normed = functional.batch_norm(input, running_mean, running_var, None, None, *args, **options)
    return _scaled(normed, weight, bias)


def _average_pool(pool: Callable[..., Tensor], dims: int, inputs: Tensor, output_size: Any) -> Tensor:
    """Return an average pool; torch's own over a whole picture has no vmap rule for some layouts (torch 2.13)."""
    if output_size in (1, (1,) * dims, [1] * dims):
        return inputs.mean(tuple(range(-dims, 0)), keepdim=True)
    return pool(inputs, output_size)


def _attention(*args: Any, **options: Any) -> Tensor:
    """Return attention without fused kernels, which have no rule for many lanes."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.scaled_dot_product_attention(*args, **options)


def _multi_head_attention(*args: Any, **options: Any) -> tuple[Tensor, Tensor | None]:
    """Return attention of several heads without fused kernels."""
    with sdpa_kernel(SDPBackend.MATH):
        return functional.multi_head_attention_forward(*args, **options)


def _embedding(ids: Tensor, weight: Tensor, padding_idx: int | None = None, *args: Any, **options: Any) -> Tensor:
    """Return an embedding whose padding gets no gradient; torch's vmap rule forgets that (torch 2.13)."""
    rows = functional.embedding(ids, weight, None, *args, **options)
    if padding_idx is None:
        return rows
    return torch.where((ids == padding_idx % weight.shape[0])[..., None], rows.detach(), rows)


def _embedding_bag(ids: Tensor, weight: Tensor, *args: Any, **options: Any) -> Tensor:
    """Return bags of embeddings; torch has no vmap rule for them (torch 2.13)."""
    chosen = dict(zip(_BAG_OPTIONS, args, strict=False)) | options
    mode, weights = chosen.get("mode", "mean"), chosen.get("per_sample_weights")
    others = ("offsets", "max_norm", "scale_grad_by_freq", "sparse", "include_last_offset", "padding_idx")
    if ids.ndim != 2 or any(chosen.get(name) is not None and chosen[name] is not False for name in others):
        theirs: Tensor = functional.embedding_bag(ids, weight, *args, **options)
        return theirs
    rows: Tensor = functional.embedding(ids, weight)
    if weights is not None:
        rows = rows * weights[..., None]
    return rows.max(1).values if mode == "max" else rows.sum(1) if mode == "sum" else rows.mean(1)


def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x^T W_k z for every k; torch has no vmap rule for it (torch 2.13)."""
    output = torch.einsum("...i,kij,...j->...k", input1, weight, input2)
    return output if bias is None else output + bias


def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / |v|, norms over all dimensions but one; torch has no vmap rule for it (torch 2.13)."""
    over = None if dim == -1 else [d for d in range(v.ndim) if d != dim % v.ndim]
    norms: Tensor = torch.linalg.vector_norm(v, dim=over, keepdim=over is not None)
    return v * (g / norms)


def _dropout(
    fused: bool, stored: bool, inputs: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Tensor:
    """Return dropout with masks from uniform numbers, which a CPU draws many times faster than Bernoulli ones.

    In compiled steps torch would draw its numbers one by one, so there the numbers are scrambled counters. A CPU
    keeps them for the backward pass; a GPU computes them again, which takes less time than reading them.
    """
    if not training or p in (0.0, 1.0):
        return functional.dropout(inputs, p, training)
    fine = torch.promote_types(inputs.dtype, torch.float32)  # bf16 would round p and 1 / (1 - p) to 8 bits
    if not fused:
        return torch.where(torch.rand_like(inputs, dtype=fine) >= p, inputs / (1 - p), 0.0)
    seeds = torch.randint(-(2**31), 2**31, (2,), dtype=torch.int32, device=inputs.device)
    kept = _scrambled(inputs.numel(), seeds) >= round(p * 2**32) - 2**31
    if not stored:
        return torch.where(kept.reshape(inputs.shape), inputs / (1 - p), 0.0)
    factor = torch.where(kept, torch.tensor(1 / (1 - p), dtype=fine, device=inputs.device), 0.0)
    factor = factor.as_strided(factor.shape, factor.stride())  # in memory: not computed again at every read
    return (inputs * factor.reshape(inputs.shape)).to(inputs.dtype)


def _scrambled(count: int, seeds: Tensor) -> Tensor:
    """Return `count` 32-bit integers, spread evenly over their range, by mixing counters with two seeds.

    Each mixing is a bijection in which every bit affects all others. Shifts and factors are those of C. Wellons'
    "lowbias32".
    """
    numbers = torch.arange(count, dtype=torch.int32, device=seeds.device)
    for seed in seeds.unbind():
        numbers = numbers ^ seed
        for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B - 2**32)):
            numbers = (numbers ^ (numbers >> shift & 2 ** (32 - shift) - 1)) * factor
        numbers = numbers ^ (numbers >> 16 & 0xFFFF)
    return numbers


def _linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer whose weights' gradient lies in memory as they do, so that their update needs no copy.

    Weights times inputs are as good as inputs times weights, except in bf16: products with as many columns as
    samples are slow there if those are odd.
    """
    if inputs.ndim != 2 or inputs.dtype == torch.bfloat16:
        return _linear_of_lanes(inputs, weight, bias)
    output = weight @ inputs.T
    return (output if bias is None else output + bias[:, None]).T


def _large(times: float, inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether oneDNN should multiply what a linear layer gets, if it has so many times as many samples."""
    return inputs.ndim > 1 and fast(inputs.flatten(0, -2), weight.mT, times)


def _linear_of_lanes(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return a linear layer whose products are in the layout, and on a CPU by the library, that are fast.

    On a CPU the layout alone is not worth the calls of Python in uncompiled steps.
    """
    output: Tensor = _Linear.apply(inputs, weight)  # type: ignore[no-untyped-call]
    return output if bias is None else output + bias


def _lanes_first(value: Tensor, at: int | None, lanes: int) -> Tensor:
    """Return a tensor with the lanes as first dimension; expand one that all lanes share."""
    return value.expand(lanes, *value.shape) if at is None else value.movedim(at, 0)


class _Routed(torch.autograd.Function):
    """A function that runs only under vmap, where it handles all lanes together.

    It needs no backward pass, because torch differentiates what its vmap rule calls.
    """

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Keep nothing: torch differentiates what the vmap rule calls."""


class _Convolution(_Routed):
    """A convolution without bias, on one of the routes."""

    @staticmethod
    def forward(x: Tensor, w: Tensor, c: Convolution, name: str) -> Tensor:
        return functional.conv2d(x, w, None, c.stride, c.padding)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor, c: Convolution, name: str) -> tuple[Tensor, int]:
        """Take the route."""
        lanes = info.batch_size
        return ROUTES[name].run(_lanes_first(x, in_dims[0], lanes), _lanes_first(w, in_dims[1], lanes), c), 0


class _Linear(_Routed):
    """A linear layer without bias."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return functional.linear(x, w)

    @staticmethod
    def vmap(info: Any, in_dims: Any, x: Tensor, w: Tensor) -> tuple[Tensor, int]:
        """Multiply the matrices of one lane after another."""
        x, w = _lanes_first(x, in_dims[0], info.batch_size), _lanes_first(w, in_dims[1], info.batch_size)
        rows = x.reshape(len(x), -1, x.shape[-1])
        output: Tensor = LaneProduct.apply(rows, w)  # type: ignore[no-untyped-call]
        return output.reshape(*x.shape[:-1], w.shape[1]), 0


class _GroupNorm(_Routed):
    """A group norm, in compiled steps on a GPU."""

    @staticmethod
    def forward(
        x: Tensor, weight: Tensor | None, bias: Tensor | None, groups: int, eps: float, relu: bool
    ) -> Tensor:
        output = functional.group_norm(x, groups, weight, bias, eps)
        return torch.relu(output) if relu else output

    @staticmethod
    def vmap(
        info: Any,
        in_dims: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        groups: int,
        eps: float,
        relu: bool,
    ) -> tuple[Tensor, int]:
        """Normalise all lanes in one call."""
        x = _lanes_first(x, in_dims[0], info.batch_size)
        weight, bias = (
            None if value is None else _lanes_first(value, at, info.batch_size)
            for value, at in zip((weight, bias), in_dims[1:3], strict=True)
        )
        output: Tensor = LaneGroupNorm.apply(x, weight, bias, groups, eps, relu)  # type: ignore[no-untyped-call]
        return output, 0


class _Pool(_Routed):
    """A max pool. Pictures and channels are independent, so lanes can join either of them."""

    @staticmethod
    def forward(x: Tensor, side_by_side: bool, window: int | None, args: Any, options: Any) -> Tensor:
        output: Tensor = functional.max_pool2d(x, *args, **options)
        return output

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, side_by_side: bool, window: int | None, args: Any, options: Any
    ) -> tuple[Tensor, int]:
        """Join lanes with channels, or with the dimension beside them in memory.

        With a window given, the places of the maxima are not stored.
        """
        x = x.movedim(in_dims[0], 0)
        if x.ndim == 5 and side_by_side:
            joined = x.movedim(0, 1).flatten(1, 2)
            if window is None:
                pooled = functional.max_pool2d(joined, *args, **options)
            else:
                pooled = Maxima.apply(joined, window, True)  # type: ignore[no-untyped-call]
            return torch.unflatten(pooled, 1, (info.batch_size, -1)), 1
        swapped = x.ndim == 5 and not x.is_contiguous() and x.transpose(1, 2).is_contiguous()
        if swapped:
            x = x.transpose(1, 2)
        if window is None:
            pooled = functional.max_pool2d(x.flatten(0, 1), *args, **options)
        else:
            pooled = Maxima.apply(x.flatten(0, 1), window)  # type: ignore[no-untyped-call]
        output = torch.unflatten(pooled, 0, x.shape[:2])
        return output.transpose(1, 2) if swapped else output, 0


def _pair(value: Any) -> tuple[int, int]:
    return (value, value) if isinstance(value, int) else (int(value[0]), int(value[-1]))


def _parse(
    args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor | None, Convolution | None]:
    """Return input, weight, bias and the convolution; None instead of a convolution that stays with conv2d."""
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


class _Collect(CallMode):
    """Collects the convolutions of a forward pass, and whether the gradient of their pictures is needed."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions: dict[Convolution, bool] = {}

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        if function is torch.conv2d:
            inputs, _, _, convolution = _parse(args, options)
            if convolution is not None:
                needed = self.convolutions.get(convolution, False)
                self.convolutions[convolution] = needed or inputs.requires_grad
        return function(*args, **options)


def convolutions_of(forward: Callable[[], Any]) -> dict[Convolution, bool]:
    """Return the different convolutions of one forward pass, in order.

    Each is mapped to whether a backward pass needs the gradient of its pictures, which the first layer does not.
    """
    seen = _Collect()
    with torch.enable_grad(), seen:
        forward()
    return seen.convolutions
