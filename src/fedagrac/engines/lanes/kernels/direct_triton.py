"""Triton kernels of `direct`. Import this module only if Triton is installed."""
# ruff: noqa: E741
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["convolve", "weigh"]


@triton.jit
def convolve(
    x, w, out, M: tl.constexpr, n: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    BK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out[pixel, o] = sum over taps and c of x[pixel + tap, c] w[tap, o, c]; each program has one tile."""
    lane = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (O + BN - 1) // BN
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    o = tl.program_id(0) % across * BN + tl.arange(0, BN)
    q, r, i = m % Q, m // Q % R, m // (Q * R)
    top, left = r * DOWN - PAD_H, q * ACROSS - PAD_W
    x += lane * (n * C * H * W)
    w += lane * (KH * KW * O * C)
    corner = ((i * H + top) * W + left) * C
    some = tl.arange(0, BK)
    pieces: tl.constexpr = (C + BK - 1) // BK
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for k in range(KH * KW * pieces):
        tap, c = k // pieces, k % pieces * BK + some
        a, b = tap // KW, tap % KW
        inside = (m < M) & (top + a >= 0) & (top + a < H) & (left + b >= 0) & (left + b < W)
        at = (corner + (a * W + b) * C)[:, None] + c[None, :]
        of = (o * C)[None, :] + (tap * O * C + c)[:, None]
        pixels = tl.load(x + at, mask=inside[:, None] & (c < C)[None, :], other=0.0)
        weights = tl.load(w + of, mask=(o < O)[None, :] & (c < C)[:, None], other=0.0)
        total = tl.dot(pixels, weights, total, input_precision=PRECISION)
    where = out + lane * (M * O) + (m * O)[:, None] + o[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(m < M)[:, None] & (o < O)[None, :])


@triton.jit
def weigh(
    x, g, out, M: tl.constexpr, n: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr,
    O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, DOWN: tl.constexpr,
    ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr,
    BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out[tap, o, c] = sum over pixels of g[pixel, o] x[pixel + tap, c]; each program has one tile."""
    lane = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (C + BC - 1) // BC
    down: tl.constexpr = (O + BO - 1) // BO
    tile = tl.program_id(0)
    c = tile % across * BC + tl.arange(0, BC)
    o = tile // across % down * BO + tl.arange(0, BO)
    tap = tile // (across * down)
    a, b = tap // KW, tap % KW
    x += lane * (n * C * H * W)
    g += lane * (M * O)
    total = tl.zeros((BO, BC), dtype=tl.float32)
    for start in range(0, M, BP):
        m = start + tl.arange(0, BP)
        q, r, i = m % Q, m // Q % R, m // (Q * R)
        h, v = r * DOWN - PAD_H + a, q * ACROSS - PAD_W + b
        inside = (m < M) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        at = (((i * H + h) * W + v) * C)[:, None] + c[None, :]
        pixels = tl.load(x + at, mask=inside[:, None] & (c < C)[None, :], other=0.0)
        gradients = tl.load(g + (m * O)[:, None] + o[None, :], mask=(m < M)[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(gradients), pixels, total, input_precision=PRECISION)
    where = out + (lane * KH * KW + tap) * (O * C) + (o * C)[:, None] + c[None, :]
    tl.store(where, total.to(out.dtype.element_ty), mask=(o < O)[:, None] & (c < C)[None, :])
