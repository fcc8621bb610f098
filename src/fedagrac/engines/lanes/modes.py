"""Modes that see the torch functions a module calls, so that some calls run in another way.

The user's module stays as it is.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

__all__ = ["CallMode", "CannotBatchError", "as_if_compiled"]


class CannotBatchError(Exception):
    """A call that can never run for many lanes at once. The message gives the reason in one line."""


@contextlib.contextmanager
def as_if_compiled() -> Iterator[None]:
    """Let `torch.compiler.is_compiling()` be true in a block.

    Modules ask it before they look at the numbers of a tensor, which neither a compiler nor many lanes allow.
    """
    compiler: Any = torch.compiler
    before = compiler._is_compiling_flag
    compiler._is_compiling_flag = True
    try:
        yield
    finally:
        compiler._is_compiling_flag = before


class CallMode(TorchFunctionMode):
    """Passes every call of a torch function to `call` while the mode is active."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Call `call` with the keyword arguments as a dictionary."""
        return self.call(func, args, kwargs or {})

    def call(self, function: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Run the function; subclasses replace it for the calls they know."""
        return function(*args, **options)
