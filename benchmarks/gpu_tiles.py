"""Time the GPU kernels of convolutions with several tiles, each alone, and compare their numbers.

    PYTHONPATH=src python benchmarks/gpu_tiles.py --out tiles.jsonl [--only pictures] [--workers 12]
    TRITON_INTERPRET=1 PYTHONPATH=src python benchmarks/gpu_tiles.py --out tiles.jsonl --tiny      (on a CPU)

Needs torch, numpy and Triton. Workers compile first, side by side; then one process times everything. A row has
the kernel, shape, precision and tile, microseconds per lane, and the largest difference to the first tile's
numbers. `benchmarks/records/h200_tiles.jsonl` also has what was tried and not taken: "old" (kernels of flat
blocks), "rows r..." and "rows a..." (tiles of entries side by side), "rows ... 3d" (a store by three indices), and
"weigh near" (bf16, pictures that are not laid out anew).
"""

import argparse
import json
import os
import subprocess
import sys
from functools import partial

import torch

from fedagrac.engines.lanes.kernels import direct, patches
from fedagrac.engines.lanes.kernels.patches import Convolution, power_of_two, rounded_up

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
PRECISIONS = {"tf32": torch.float32, "bf16": torch.bfloat16}


def convolution(channels, side, outputs, stride=1, n=25):
    return Convolution((n, channels, side, side), (outputs, channels, 3, 3), (stride, stride), (1, 1))


SHAPES = (
    convolution(64, 32, 64), convolution(128, 16, 128), convolution(256, 8, 256), convolution(512, 4, 512),
    convolution(64, 32, 128, stride=2), convolution(512, 2, 512), convolution(192, 4, 384),
)  # fmt: skip


def numbers(*shape, dtype):
    """Small whole numbers, whose sums are exact in any order."""
    return torch.randint(-3, 4, shape, device=DEVICE).to(dtype)


def tiles_of_convolve(c, lanes, dtype):
    (n, channels, *size), outputs = c.inputs, c.weight[0]
    x, w = numbers(lanes, n, *size, channels, dtype=dtype), numbers(lanes, 3, 3, outputs, channels, dtype=dtype)
    out = x.new_empty((lanes, n, *c.places, outputs))
    k = direct._block(channels, 128 // x.element_size())
    for m, beside, warps, stages in (
        (128, 128, 4, 3), (64, 128, 4, 3), (128, 128, 8, 3), (128, 256, 8, 3), (64, 128, 4, 4), (128, 128, 8, 4),
    ):  # fmt: skip
        o = min(beside, direct._block(outputs, 256))

        def run(m=m, o=o, warps=warps, stages=stages):
            grid = (-(-c.outputs // m) * -(-outputs // o), lanes)
            direct._kernels().convolve[grid](
                x, w, out, c.outputs, n, channels, *size, outputs, *c.weight[2:], *c.places, *c.stride, *c.padding,
                BM=m, BN=o, BK=k, PRECISION="tf32", num_warps=warps, num_stages=stages,
            )  # fmt: skip
            return out

        yield f"{m}, {o}, {k}, {warps} warps, {stages} stages", run


def tiles_of_weigh(c, lanes, dtype):
    (n, channels, *size), (outputs, _, high, wide) = c.inputs, c.weight
    x = numbers(lanes, n, *size, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    g = numbers(lanes, n, *c.places, outputs, dtype=dtype).permute(0, 1, 4, 2, 3)
    pictures = direct._spread(direct._kernels(), x, wide, c.places[1], c.stride[1], c.padding[1])
    gradients = direct._spread(direct._kernels(), g, 1, c.places[1], 1, 0)
    for o, beside, p, warps, stages in (
        (128, 128, 32, 4, 3), (128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 256, 32, 8, 3),
        (64, 128, 32, 4, 3),
    ):  # fmt: skip
        block = min(o, direct._block(outputs, 128))

        def run(o=block, beside=beside, p=p, warps=warps, stages=stages):
            tiles = -(-outputs // o) * -(-channels * wide // beside) * high
            parts = max(1, min(direct.PROGRAMS // (tiles * lanes), c.outputs // (8 * p)))
            part = rounded_up(-(-c.outputs // parts), p)
            out = torch.empty((-(-c.outputs // part), lanes, high, outputs, channels, wide), device=DEVICE)
            direct._kernels().weigh[(tiles, lanes, len(out))](
                pictures, gradients, out, c.outputs, part, *c.inputs[:3], outputs, high, wide, *c.places,
                c.stride[0], c.padding[0], BO=o, BN=beside, BP=p, PRECISION="tf32", num_warps=warps,
                num_stages=stages,
            )  # fmt: skip
            return out.sum(0)

        yield f"{block}, {beside}, {p}, {warps} warps, {stages} stages", run


def tiles_of_weigh_as_is(c, lanes, dtype):
    (n, channels, *size), outputs = c.inputs, c.weight[0]
    x = numbers(lanes, n, *size, channels, dtype=dtype).permute(0, 1, 4, 2, 3)
    g = numbers(lanes, n, *c.places, outputs, dtype=dtype).permute(0, 1, 4, 2, 3)
    if dtype != torch.float32 or not ON_GPU:
        yield "as taken", lambda: direct._weighed_as_is(direct._kernels(), x, g, c)


def tiles_of_pictures(c, lanes, dtype):
    n, channels, height, width = c.inputs
    rows = numbers(lanes, c.outputs, channels * 9, dtype=dtype)
    out = rows.new_empty((lanes, n, height, width, channels))
    for beside, pixels in ((64, 8), (64, 4), (128, 4), (32, 16), (64, 16), (16, 64)):

        def run(beside=beside, pixels=pixels):
            grid = (-(-n * height * width // pixels) * -(-channels // beside), lanes)
            patches._kernels().pictures_of_rows[grid](
                rows, out, rows[0].numel(), rows.shape[2], *c.inputs, *c.weight[2:], *c.places, *c.stride,
                *c.padding, BP=pixels, BC=beside,
            )  # fmt: skip
            return out

        yield f"{pixels} pixels, {beside} channels", run


def tiles_of_rows(c, lanes, dtype):
    x = numbers(lanes, c.inputs[0], *c.inputs[2:], c.inputs[1], dtype=dtype).permute(0, 1, 4, 2, 3)
    out = x.new_empty((lanes, c.outputs, c.patch))
    for entries, most in ((2048, 64), (2048, 32), (1024, 64), (1024, 32), (4096, 64), (4096, 32)):
        beside = min(most, power_of_two(c.inputs[1]))
        places = entries // (16 * beside)

        def run(beside=beside, places=places):
            grid = (-(-c.outputs // places) * -(-c.inputs[1] // beside), lanes)
            patches._kernels().rows[grid](
                out, x, out[0].numel(), c.patch, *c.inputs, *c.weight[2:], *c.places, *c.stride, *c.padding,
                *x.stride(), BP=places, BC=beside, BT=16,
            )  # fmt: skip
            return out

        yield f"{places} places, {beside} channels", run


def tiles_of_turn(c, lanes, dtype):
    outputs, channels = c.weight[:2]
    w = numbers(lanes, *c.weight, dtype=dtype)
    out = w.new_empty((lanes, 3, 3, channels, outputs))
    yield "torch", lambda: w.flip(3, 4).permute(0, 3, 4, 2, 1).contiguous()
    for o, beside in ((32, 32), (32, 16), (32, 8), (16, 16), (64, 8)):

        def run(o=o, beside=beside):
            grid = (-(-outputs // o) * -(-channels // beside), lanes)
            direct._kernels().turn[grid](w, out, outputs, channels, 9, BO=o, BC=beside)
            return out

        yield f"{o} outputs, {beside} channels", run


KERNELS = {
    "convolve": tiles_of_convolve, "weigh": tiles_of_weigh, "pictures_of_rows": tiles_of_pictures,
    "rows": tiles_of_rows, "turn": tiles_of_turn, "weigh_as_is": tiles_of_weigh_as_is,
}  # fmt: skip


def everything(o):
    """Yield groups: their names, and the tiles with functions that run a kernel."""
    for c in (convolution(16, 4, 24, n=2), convolution(20, 5, 16, stride=2, n=2)) if o.tiny else SHAPES:
        for kernel, tiles in KERNELS.items():
            if o.only in kernel:
                for precision, dtype in PRECISIONS.items() if ON_GPU else [("tf32", torch.float32)]:
                    yield (
                        (kernel, [*c.inputs, c.weight[0], *c.stride], precision),
                        partial(tiles, c, o.lanes, dtype),
                    )


def microseconds(run):
    """Return the shortest of three means over four calls; None without a GPU."""
    if not ON_GPU:
        return None
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    best = float("inf")
    for _ in range(3):
        begin.record()
        for _ in range(4):
            run()
        end.record()
        end.synchronize()
        best = min(best, begin.elapsed_time(end) * 1e3 / 4)
    return best


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", default="tiles.jsonl")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--lanes", type=int, default=20)
    parser.add_argument("--workers", type=int, default=12, help="processes that compile")
    parser.add_argument("--tiny", action="store_true", help="two lanes of small pictures")
    parser.add_argument(
        "--compile", nargs=2, type=int, help="compile every n-th kernel (used by the script itself)"
    )
    o = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = True
    o.lanes = 2 if o.tiny else o.lanes
    if o.compile is None and ON_GPU:
        command = [sys.executable, __file__, *sys.argv[1:], "--compile", str(o.workers)]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        for process in [subprocess.Popen([*command, str(i)], env=environment) for i in range(o.workers)]:
            process.wait()
    number = 0
    for group, tiles in everything(o):
        first = None
        for tile, run in tiles():
            number += 1
            if o.compile is not None and number % o.compile[0] != o.compile[1]:
                continue
            row = {"kernel": group[0], "shape": group[1], "precision": group[2], "tile": tile}
            try:
                got = run().float().clone()
                first = got if first is None else first
                us = microseconds(run) if o.compile is None else None
                row |= {"us": us and round(us / o.lanes, 2), "apart": float((got - first).abs().max())}
            except Exception as error:  # a tile that needs more memory than a multiprocessor has
                row["error"] = str(error)[:200]
            if o.compile is None:
                with open(o.out, "a", encoding="utf-8") as file:
                    print(json.dumps(row), file=file, flush=True)
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
