"""Triton kernels of `direct`. Import this module only if Triton is installed."""
# ruff: noqa: E741
# mypy: ignore-errors

import triton
import triton.language as tl

__all__ = ["convolve", "spread", "turn", "weigh", "weigh_as_is"]


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
def turn(w, out, O: tl.constexpr, C: tl.constexpr, TAPS: tl.constexpr, BO: tl.constexpr, BC: tl.constexpr):
    """Compute out[TAPS - 1 - tap, c, o] = w[o, c, tap]; each program has all taps of a tile."""
    lane = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (C + BC - 1) // BC
    o = tl.program_id(0) // across * BO + tl.arange(0, BO)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    w += lane * (O * C * TAPS)
    out += lane * (O * C * TAPS)
    inside = (o < O)[:, None] & (c < C)[None, :]
    for tap in tl.static_range(TAPS):
        values = tl.load(w + (o * (C * TAPS))[:, None] + (c * TAPS)[None, :] + tap, mask=inside, other=0.0)
        at = out + (TAPS - 1 - tap) * (C * O) + (c * O)[None, :] + o[:, None]
        tl.store(at, values, mask=inside)


@triton.jit
def spread(
    x, out, n: tl.constexpr, C: tl.constexpr, H: tl.constexpr, W: tl.constexpr, KW: tl.constexpr, Q: tl.constexpr,
    ACROSS: tl.constexpr, PAD_W: tl.constexpr, BM: tl.constexpr, BC: tl.constexpr,
):  # fmt: skip
    """Compute out[c, b, place] = x[place + b, c] for the places (i, h, q) of rows; each program has one tile."""
    lane = tl.program_id(1).to(tl.int64)
    across: tl.constexpr = (C + BC - 1) // BC
    P: tl.constexpr = n * H * Q
    m = tl.program_id(0) // across * BM + tl.arange(0, BM)
    c = tl.program_id(0) % across * BC + tl.arange(0, BC)
    first = m % Q * ACROSS - PAD_W
    x += lane * (n * C * H * W)
    out += lane * (C * KW * P)
    for b in tl.static_range(KW):
        v = first + b
        inside = (m < P) & (v >= 0) & (v < W)
        at = ((m // Q * W + v) * C)[:, None] + c[None, :]
        values = tl.load(x + at, mask=inside[:, None] & (c < C)[None, :], other=0.0)
        tl.store(out + ((c * KW + b) * P)[None, :] + m[:, None], values, mask=(m < P)[:, None] & (c < C)[None, :])


@triton.jit
def weigh(
    x, g, out, M: tl.constexpr, PART: tl.constexpr, n: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr, DOWN: tl.constexpr,
    PAD_H: tl.constexpr, BO: tl.constexpr, BN: tl.constexpr, BP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Compute out[part, a, o, (c, b)] = sum over a part of the pixels of g[o, pixel] x[(c, b), pixel + a].

    x and g have been spread: their pixels are neighbours in memory. Each program has one tile.
    """
    lane = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    N: tl.constexpr = C * KW
    across: tl.constexpr = (N + BN - 1) // BN
    down: tl.constexpr = (O + BO - 1) // BO
    tile = tl.program_id(0)
    j = tile % across * BN + tl.arange(0, BN)
    o = tile // across % down * BO + tl.arange(0, BO)
    a = tile // (across * down)
    x += lane * (N * n * H * Q)
    g += lane * (M * O)
    total = tl.zeros((BO, BN), dtype=tl.float32)
    for start in range(0, PART, BP):
        m = part * PART + start + tl.arange(0, BP)
        q, r, i = m % Q, m // Q % R, m // (Q * R)
        h = r * DOWN - PAD_H + a
        inside = (m < M) & (h >= 0) & (h < H)
        at = ((i * H + h) * Q + q)[:, None] + (j * (n * H * Q))[None, :]
        pixels = tl.load(x + at, mask=inside[:, None] & (j < N)[None, :], other=0.0)
        of = m[None, :] + (o * M)[:, None]
        gradients = tl.load(g + of, mask=(m < M)[None, :] & (o < O)[:, None], other=0.0)
        total = tl.dot(gradients, pixels, total, input_precision=PRECISION)
    block = (part * tl.num_programs(1) + lane) * KH + a
    where = out + block * (O * N) + (o * N)[:, None] + j[None, :]
    tl.store(where, total, mask=(o < O)[:, None] & (j < N)[None, :])


@triton.jit
def weigh_as_is(
    x, g, out, M: tl.constexpr, PART: tl.constexpr, n: tl.constexpr, C: tl.constexpr, H: tl.constexpr,
    W: tl.constexpr, O: tl.constexpr, KH: tl.constexpr, KW: tl.constexpr, R: tl.constexpr, Q: tl.constexpr,
    DOWN: tl.constexpr, ACROSS: tl.constexpr, PAD_H: tl.constexpr, PAD_W: tl.constexpr, BO: tl.constexpr,
    BC: tl.constexpr, BP: tl.constexpr,
):  # fmt: skip
    """Compute the same as `weigh` from pictures that have not been spread: channels are neighbours in memory.

    Each program has one tap. Those of a row of taps follow each other, because they write between each other's
    numbers.
    """
    lane = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    across: tl.constexpr = (C + BC - 1) // BC
    down: tl.constexpr = (O + BO - 1) // BO
    b, tile = tl.program_id(0) % KW, tl.program_id(0) // KW
    c = tile % across * BC + tl.arange(0, BC)
    o = tile // across % down * BO + tl.arange(0, BO)
    a = tile // (across * down)
    x += lane * (n * C * H * W)
    g += lane * (M * O)
    total = tl.zeros((BO, BC), dtype=tl.float32)
    for start in range(0, PART, BP):
        m = part * PART + start + tl.arange(0, BP)
        q, r, i = m % Q, m // Q % R, m // (Q * R)
        h, v = r * DOWN - PAD_H + a, q * ACROSS - PAD_W + b
        inside = (m < M) & (h >= 0) & (h < H) & (v >= 0) & (v < W)
        at = (((i * H + h) * W + v) * C)[:, None] + c[None, :]
        pixels = tl.load(x + at, mask=inside[:, None] & (c < C)[None, :], other=0.0)
        of = (m * O)[:, None] + o[None, :]
        gradients = tl.load(g + of, mask=(m < M)[:, None] & (o < O)[None, :], other=0.0)
        total = tl.dot(tl.trans(gradients), pixels, total, input_precision="ieee")
    block = (part * tl.num_programs(1) + lane) * KH + a
    where = out + block * (O * C * KW) + (o * (C * KW))[:, None] + (c * KW + b)[None, :]
    tl.store(where, total, mask=(o < O)[:, None] & (c < C)[None, :])
