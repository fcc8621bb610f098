"""Triton kernels of `patches`. Import this module only if Triton is installed."""
# ruff: noqa: D103
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["columns", "pictures", "pictures_of_rows", "rows"]


@triton.jit
def columns(
    out, x, per_lane, length: tl.constexpr, n: tl.constexpr, channels: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, lane_s, n_s, channel_s,
    row_s, column_s, BLOCK: tl.constexpr,
):  # fmt: skip
    lane = tl.program_id(1).to(tl.int64)
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = at < per_lane
    place, row = at % length, at // length
    q, rest = place % Q, place // Q
    r, i = rest % R, rest // R
    b, rest = row % KW, row // KW
    a, channel = rest % KH, rest // KH
    h, w = r * DOWN + a - PAD_H, q * ACROSS + b - PAD_W
    real = inside & (channel < channels) & (i < n) & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    values = tl.load(
        x + lane * lane_s + i * n_s + channel * channel_s + h * row_s + w * column_s, mask=real, other=0.0
    )
    tl.store(out + lane * per_lane + at, values, mask=inside)


@triton.jit
def rows(
    out, x, per_lane, length: tl.constexpr, n: tl.constexpr, channels: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, lane_s, n_s, channel_s,
    row_s, column_s, BP: tl.constexpr, BC: tl.constexpr, BT: tl.constexpr,
):  # fmt: skip
    """Each program has a tile of few places and channels with all taps of the kernel.

    It reads channels side by side, as most pictures have them in memory, and writes taps side by side, as rows do.
    """
    lane = tl.program_id(1).to(tl.int64)
    taps: tl.constexpr = KH * KW
    across: tl.constexpr = (length + BC * taps - 1) // (BC * taps)
    place = tl.program_id(0) // across * BP + tl.arange(0, BP)
    first = tl.program_id(0) % across * BC
    channel = first + tl.arange(0, BC)
    tap = tl.arange(0, BT)
    q, r, i = place % Q, place // Q % R, place // (Q * R)
    h = (r * DOWN - PAD_H)[:, None] + (tap // KW)[None, :]
    w = (q * ACROSS - PAD_W)[:, None] + (tap % KW)[None, :]
    real = (tap < taps)[None, :] & (i < n)[:, None] & (h >= 0) & (h < height) & (w >= 0) & (w < width)
    pixel = (i * n_s)[:, None] + h * row_s + w * column_s
    x += lane * lane_s
    values = tl.load(
        x + (channel * channel_s)[None, :, None] + pixel[:, None, :],
        mask=real[:, None, :] & (channel < channels)[None, :, None], other=0.0,
    )  # fmt: skip
    at = tl.arange(0, BC * BT)
    entry = (first + at // BT) * taps + at % BT
    out += lane * per_lane
    tl.store(
        out + (place * length)[:, None] + entry[None, :], tl.reshape(values, (BP, BC * BT)),
        mask=(place * length < per_lane)[:, None] & ((at % BT < taps) & (entry < length))[None, :],
    )  # fmt: skip


@triton.jit
def pictures(
    columns, out, per_lane, length: tl.constexpr, n: tl.constexpr, channels: tl.constexpr, height: tl.constexpr,
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
    fine: tl.constexpr = tl.float64 if columns.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BLOCK,), dtype=fine)
    last_r, last_q = (h + PAD_H) // DOWN, (w + PAD_W) // ACROSS  # of the outputs whose patches hold this pixel
    for back in tl.static_range((KH + DOWN - 1) // DOWN):
        for left in tl.static_range((KW + ACROSS - 1) // ACROSS):
            r, q = last_r - back, last_q - left
            a, b = h + PAD_H - r * DOWN, w + PAD_W - q * ACROSS
            hit = inside & (r >= 0) & (q >= 0) & (r < R) & (q < Q) & (a < KH) & (b < KW)
            row = (channel * KH + a) * KW + b
            place = (i * R + r) * Q + q
            total += tl.load(columns + lane * per_lane + row * length + place, mask=hit, other=0.0).to(fine)
    at = lane * lane_s + i * n_s + channel * channel_s + h * row_s + w * column_s
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def pictures_of_rows(
    rows, out, per_lane, length: tl.constexpr, n: tl.constexpr, channels: tl.constexpr, height: tl.constexpr,
    width: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BP: tl.constexpr,
    BC: tl.constexpr,
):  # fmt: skip
    """Each program has a tile of few pixels and their channels, which are neighbours in `out`."""
    lane = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (channels + BC - 1) // BC
    pixels: tl.constexpr = n * height * width
    p = tl.program_id(0) // across * BP + tl.arange(0, BP)
    channel = tl.program_id(0) % across * BC + tl.arange(0, BC)
    w, h, i = p % width, p // width % height, p // (width * height)
    inside = (p < pixels)[:, None] & (channel < channels)[None, :]
    fine: tl.constexpr = tl.float64 if rows.dtype.element_ty == tl.float64 else tl.float32
    total = tl.zeros((BP, BC), dtype=fine)
    last_r, last_q = (h + PAD_H) // DOWN, (w + PAD_W) // ACROSS
    rows += lane * per_lane
    for back in tl.static_range((KH + DOWN - 1) // DOWN):
        for left in tl.static_range((KW + ACROSS - 1) // ACROSS):
            r, q = last_r - back, last_q - left
            a, b = h + PAD_H - r * DOWN, w + PAD_W - q * ACROSS
            hit = (r >= 0) & (q >= 0) & (r < R) & (q < Q) & (a < KH) & (b < KW)
            at = ((i * R + r) * Q + q) * length + a * KW + b
            total += tl.load(
                rows + at[:, None] + (channel * (KH * KW))[None, :], mask=hit[:, None] & inside, other=0.0
            ).to(fine)
    out += lane * (pixels * channels)
    tl.store(out + (p * channels)[:, None] + channel[None, :], total.to(out.dtype.element_ty), mask=inside)
