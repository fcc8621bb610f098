"""Whether operations are traced: kernels of our own cannot be, so a trace needs torch's operations instead."""

from __future__ import annotations

__all__ = ["traced"]


def traced() -> bool:
    """Return whether a step is traced now, to be compiled.

    Examples:
        >>> traced()
        False
    """
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None
