"""Triton kernels of `patches`. Import this module only if Triton is installed."""
# ruff: noqa: D103
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["columns", "pictures"]


@triton.jit
def columns(
    out, x, per_lane, n: tl.constexpr, channels: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, lane_s, n_s, channel_s,
    row_s, column_s, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < per_lane
    q, rest = at % Q, at // Q
    r, rest = rest % R, rest // R
    i, rest = rest % n, rest // n
    b, rest = rest % KW, rest // KW
    a, channel = rest % KH, rest // KH
    h, w = r * DOWN + a - PAD_H, q * ACROSS + b - PAD_W
    real = inside & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    values = tl.load(
        x + lane * lane_s + i * n_s + channel * channel_s + h * row_s + w * column_s, mask=real, other=0.0
    )
    tl.store(out + lane * per_lane + at, values, mask=inside)


@triton.jit
def pictures(
    columns, out, per_lane, n: tl.constexpr, channels: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr,
    Q: tl.constexpr, DOWN: tl.constexpr, ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, lane_s,
    n_s, channel_s, row_s, column_s, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n * channels * height * width
    w, rest = at % width, at // width
    h, rest = rest % height, rest // height
    i, channel = rest % n, rest // n
    total = tl.zeros((BLOCK,), dtype=out.dtype.element_ty)
    places = n * R * Q
    for a in tl.static_range(KH):
        for b in tl.static_range(KW):
            r, q = h + PAD_H - a, w + PAD_W - b
            hit = inside & (r >= 0) & (q >= 0) & (r % DOWN == 0) & (q % ACROSS == 0)
            r, q = r // DOWN, q // ACROSS
            hit = hit & (r < R) & (q < Q)
            row = (channel * KH + a) * KW + b
            place = (i * R + r) * Q + q
            total += tl.load(columns + lane * per_lane + row * places + place, mask=hit, other=0.0)
    tl.store(out + lane * lane_s + i * n_s + channel * channel_s + h * row_s + w * column_s, total, mask=inside)
