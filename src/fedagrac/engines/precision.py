"""The precision of matrix products and convolutions on GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["product_precision", "tf32"]


@contextlib.contextmanager
def tf32(allowed: bool) -> Iterator[None]:
    """Run a block with TF32 products, or without; by default cuDNN would use TF32 for convolutions."""
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


def product_precision(dtype: torch.dtype) -> str:
    """Return the name of the precision in which products of this type are computed now.

    Examples:
        >>> with tf32(True):
        ...     product_precision(torch.float32), product_precision(torch.float64)
        ('tf32', 'float64')
    """
    if dtype == torch.float32 and torch.backends.cuda.matmul.allow_tf32:
        return "tf32"
    return str(dtype).removeprefix("torch.")
