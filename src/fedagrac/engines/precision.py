"""The precision of matrix products and convolutions: float32, TF32 or bf16.

With "bf16" the module computes as under torch's autocast: matrix products and convolutions take numbers rounded to
bfloat16, add in float32 and round their results; normalisations, softmax and other sums are float32, apart from
the softmax inside attention, which takes and returns rounded numbers. Parameters,
gradients, losses and everything that algorithms compute stay float32. Torch's vmap takes some functions apart
before autocast sees them, and the lists of autocast differ between CPUs and GPUs. Therefore a mode casts the
arguments of those functions first, so that one rule holds for every engine and device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from fedagrac.data.trees import map_leaves
from fedagrac.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

__all__ = [
    "PRECISIONS",
    "Precision",
    "check_precision",
    "in_bf16",
    "product_dtype",
    "product_precision",
    "products",
    "rounded",
]

Precision = Literal["float32", "tf32", "bf16"]

PRECISIONS: tuple[Precision, ...] = get_args(Precision)

_ROUNDED = (
    "linear", "bilinear", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d",
    "scaled_dot_product_attention",
)  # fmt: skip
"""Functions whose arguments are rounded; autocast rounds those of plain products, which vmap leaves whole."""

_EXACT = (
    "batch_norm", "group_norm", "instance_norm", "layer_norm", "local_response_norm", "rms_norm", "normalize",
    "softmax", "log_softmax", "softmin", "gumbel_softmax", "logsumexp", "softplus", "cosine_similarity", "cdist",
    "pairwise_distance", "exp", "expm1", "log", "log10", "log1p", "log2", "pow", "__pow__", "__rpow__", "rsqrt",
    "reciprocal", "sum", "mean", "var", "std", "prod", "cumsum", "cumprod", "norm", "dist", "dot", "vdot",
)  # fmt: skip
"""Functions whose arguments are float32, as on the lists of autocast; and means and inner products like sums."""

_ATTENTION = (functional.scaled_dot_product_attention, functional.multi_head_attention_forward)

_RECURRENT = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)


def _functions(names: tuple[str, ...]) -> frozenset[Callable[..., Any]]:
    """Return the functions and methods of torch with these names."""
    places = (torch, functional, torch.Tensor, torch.special, torch.linalg)
    return frozenset(getattr(place, name) for place in places for name in names if hasattr(place, name))


def check_precision(precision: Precision, device: torch.device) -> None:
    """Raise InputError if a device has no products of this precision.

    Examples:
        >>> check_precision("bf16", torch.device("cpu"))
        >>> check_precision("tf32", torch.device("cpu"))
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: precision = 'tf32': expected "float32": TF32 needs a GPU, the run is on cpu
    """
    if precision == "tf32" and device.type != "cuda":
        raise InputError("precision", precision, f'"float32": TF32 needs a GPU, the run is on {device.type}')
    if precision == "bf16" and device.type == "cuda" and torch.cuda.get_device_capability(device) < (8, 0):
        name = torch.cuda.get_device_name(device)
        raise InputError("precision", precision, f'"float32": {name} has no bf16 products')


def product_dtype(precision: Precision, dtype: torch.dtype) -> torch.dtype:
    """Return the type of the numbers that are multiplied, given the type of the model.

    Examples:
        >>> product_dtype("bf16", torch.float32)
        torch.bfloat16
        >>> product_dtype("tf32", torch.float32)
        torch.float32
    """
    return torch.bfloat16 if precision == "bf16" else dtype


@contextlib.contextmanager
def products(precision: Precision) -> Iterator[None]:
    """Run a block whose float32 products are TF32 or not, and whose bf16 products add in float32.

    By default cuDNN would use TF32 for convolutions, and cuBLAS would add partial sums in bf16.

    Examples:
        >>> with products("tf32"):
        ...     torch.backends.cudnn.allow_tf32
        True
    """
    matmul, cudnn = torch.backends.cuda.matmul, torch.backends.cudnn
    before = matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction
    matmul.allow_tf32 = cudnn.allow_tf32 = precision == "tf32"
    matmul.allow_bf16_reduced_precision_reduction = False
    try:
        yield
    finally:
        matmul.allow_tf32, cudnn.allow_tf32, matmul.allow_bf16_reduced_precision_reduction = before


def rounded(forward: Callable[[], Any], precision: Precision, device: torch.device) -> Any:
    """Run a forward pass in a precision; return its output, in which bfloat16 has become float32.

    Examples:
        >>> third = torch.full((1, 1), 1 / 3)
        >>> rounded(lambda: third @ torch.ones(1, 1), "bf16", torch.device("cpu"))  # 1/3 to 8 bits
        tensor([[0.3340]])
    """
    if precision != "bf16":
        return forward()
    # a cache of rounded weights would outlive the step that a graph records
    with torch.autocast(device.type, torch.bfloat16, cache_enabled=False), _math_attention(), _Bf16():
        output = forward()
    return map_leaves(lambda leaf: _cast(leaf, torch.bfloat16, torch.float32), output)


def in_bf16(tensor: Tensor) -> bool:
    """Return whether a forward pass in bf16 is under way on the tensor's device.

    Examples:
        >>> in_bf16(torch.zeros(1))
        False
    """
    return torch.is_autocast_enabled(tensor.device.type)


class _Bf16(TorchFunctionMode):
    """Casts the arguments of functions that autocast does not see, or not on every device."""

    _rounded, _exact = _functions(_ROUNDED), _functions(_EXACT)

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        attends = func in _ATTENTION and not _wants_weights(func, args, kwargs)
        if attends or func in self._rounded:
            args, kwargs = _all_cast((args, kwargs), torch.float32, torch.bfloat16)
        elif func in self._exact:
            args, kwargs = _all_cast((args, kwargs), torch.bfloat16, torch.float32)
        without = _without_autocast() if attends else _without_onednn() if func in _RECURRENT else None
        with without or contextlib.nullcontext():
            return func(*args, **kwargs)


def _wants_weights(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether attention is to return its weights, too; torch then multiplies matrices one by one."""
    if function is not functional.multi_head_attention_forward:
        return False
    return bool(kwargs.get("need_weights", args[15] if len(args) > 15 else True))


def _all_cast(tree: Any, known: torch.dtype, wanted: torch.dtype) -> Any:
    """Return a tree whose tensors of a known type have the wanted one.

    One tensor in several places stays one: self-attention multiplies it once.
    """
    seen: dict[int, Any] = {}

    def cast(leaf: Any) -> Any:
        if id(leaf) not in seen:
            seen[id(leaf)] = _cast(leaf, known, wanted)
        return seen[id(leaf)]

    return map_leaves(cast, tree)


def _cast(leaf: Any, known: torch.dtype, wanted: torch.dtype) -> Any:
    """Return a tensor of a known type as the wanted type, and anything else as it is."""
    return leaf.to(wanted) if isinstance(leaf, torch.Tensor) and leaf.dtype == known else leaf


@contextlib.contextmanager
def _without_autocast() -> Iterator[None]:
    """Run attention on rounded numbers alone.

    Autocast would take the softmax inside it in float32, and a GPU refuses to go back from float32 to numbers that
    were bf16 (torch 2.11 and 2.13).
    """
    with contextlib.ExitStack() as stack:
        for device in ("cpu", "cuda"):
            if torch.is_autocast_enabled(device):
                stack.enter_context(torch.autocast(device, enabled=False))
        yield


@contextlib.contextmanager
def _without_onednn() -> Iterator[None]:
    """Run a recurrent layer without oneDNN, whose LSTM keeps its state in bf16, and only on some CPUs."""
    onednn: Any = torch.backends.mkldnn
    before, onednn.enabled = onednn.enabled, False
    try:
        yield
    finally:
        onednn.enabled = before


@contextlib.contextmanager
def _math_attention() -> Iterator[None]:
    """Let attention without fused kernels multiply bf16 numbers; by default it casts them to float32 and back."""
    backend = torch.backends.cuda
    before = backend.fp16_bf16_reduction_math_sdp_allowed()  # type: ignore[no-untyped-call]
    backend.allow_fp16_bf16_reduction_math_sdp(True)
    try:
        yield
    finally:
        backend.allow_fp16_bf16_reduction_math_sdp(before)


def product_precision(dtype: torch.dtype) -> str:
    """Return the name of the precision in which products of this type are computed now.

    Examples:
        >>> with products("tf32"):
        ...     product_precision(torch.float32), product_precision(torch.bfloat16)
        ('tf32', 'bfloat16')
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(dtype).removeprefix("torch.")
