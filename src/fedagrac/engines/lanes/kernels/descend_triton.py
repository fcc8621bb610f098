"""The fused update of `descend` as a Triton kernel. Import this module only if Triton is installed."""

import triton
import triton.language as tl


@triton.jit
def kernel(x, g, c, eta, size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute x <- x - eta (g + c). Each program handles one block of one lane."""
    lane = tl.program_id(1)
    offsets = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = offsets < size
    at = lane.to(tl.int64) * size + offsets
    step = tl.load(eta + lane)
    direction = tl.load(g + at, mask=inside) + tl.load(c + at, mask=inside)
    tl.store(x + at, tl.load(x + at, mask=inside) - step * direction, mask=inside)
