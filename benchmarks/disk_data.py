"""A federation larger than memory: pictures of 4 GB in a .npy file, time and memory against pictures in memory.

    python benchmarks/disk_data.py [--gigabytes 4] [--folder DIR]

Random pictures of 3 x 32 x 32 bytes are written to a temporary folder, which is removed at the end. Every run has
a process of its own. "cold" drops the file from the system's cache first; "memory" loads the first 300 MB, and
"the same on disk" reads the same part from the file, so that the two must give the same model to the bit.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from torch import nn

import fedagrac as fg

PICTURE = 3 * 32 * 32
IMAGES = fg.Images((0.5, 0.5, 0.5), (0.25, 0.25, 0.25))
MODELS = {
    "linear": lambda: nn.Sequential(nn.Flatten(), nn.Linear(PICTURE, 10)),
    "cnn": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 5, 2), nn.ReLU(), nn.Conv2d(16, 32, 5, 2), nn.ReLU(), nn.Flatten(), nn.Linear(800, 10)
    ),
}


def write(path, pictures):
    """Write random pictures and labels in chunks of about 30 MB."""
    rng = np.random.default_rng(0)
    with path.open("wb") as file:
        header = {"descr": "|u1", "fortran_order": False, "shape": (pictures, 3, 32, 32)}
        np.lib.format.write_array_header_1_0(file, header)
        for first in range(0, pictures, 10_000):
            file.write(rng.bytes(min(10_000, pictures - first) * PICTURE))
        file.flush()
        os.fsync(file.fileno())


def memory(kind):
    """Return resident MB: now (VmRSS), or the most so far (VmHWM); getrusage would also count the parent's."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(kind))
    return int(line.split()[1]) / 1024


def forget(path):
    """Drop a file from the system's cache."""
    with path.open("rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def one(path, kind, model, engine):
    """Run some rounds; return the time of a client-step in the fastest, memory, and a digest of the model."""
    torch.manual_seed(0)
    pictures = np.load(path, mmap_mode="r")
    if kind in ("memory", "same"):
        pictures = pictures[: 300_000_000 // PICTURE]
    if kind == "memory":
        pictures = torch.from_numpy(np.array(pictures))
    if kind == "cold":
        forget(path)
    begin = time.perf_counter()
    labels = np.random.default_rng(1).integers(0, 10, len(pictures))
    fed = fg.Federation.from_pool(pictures, labels, clients=1000, partition=fg.IID(), images=IMAGES)
    built = time.perf_counter() - begin
    ends = []

    class Times(fg.Callback):
        def on_round(self, run, record):
            ends.append(time.perf_counter())

    result = fg.simulate(
        MODELS[model](), fed, fg.FedAvg(lr=0.01), rounds=11, steps=fg.Constant(20), batch_size=20,
        participation=20, device="cpu", engine=engine, compile=False, callbacks=[Times()],
    )  # fmt: skip
    return {
        "samples": len(pictures),
        "built": built,
        "ms": float(np.diff(ends).min()) / (20 * 20) * 1e3,
        "now": memory("VmRSS"),
        "peak": memory("VmHWM"),
        "digest": hashlib.sha256(result.vector.numpy().tobytes()).hexdigest()[:12],
    }


def gather_times(path):
    """Print what it costs to read batches of 400 pictures, as 20 clients need them, from disk and from memory."""
    array = fg.DiskArray.open(path)
    part = 300_000_000 // PICTURE
    loaded = torch.from_numpy(np.array(np.load(path, mmap_mode="r")[:part]))
    for name, size, read in (
        ("memory", part, lambda rows: loaded[torch.from_numpy(rows)]),
        ("disk, cached", part, array.gather),
        ("disk, cold", len(array), array.gather),
    ):
        batches = np.random.default_rng(2).integers(0, size, (50, 400))
        if name == "disk, cached":
            for batch in batches:
                read(batch)
        if name == "disk, cold":
            forget(path)
        begin = time.perf_counter()
        for batch in batches:
            read(batch)
        each = (time.perf_counter() - begin) / batches.size
        print(f"gather from {name:14} {each * 1e6:7.1f} us per picture, {PICTURE / each / 1e6:6.0f} MB/s")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--gigabytes", type=float, default=4)
    parser.add_argument("--folder")
    parser.add_argument("--one", nargs=4)
    o = parser.parse_args()
    if o.one:
        path, *rest = o.one
        print(json.dumps(one(Path(path), *rest)))
        return
    with tempfile.TemporaryDirectory(dir=o.folder) as folder:
        path = Path(folder) / "pictures.npy"
        begin = time.perf_counter()
        write(path, int(o.gigabytes * 1e9) // PICTURE)
        print(f"{path.stat().st_size / 1e9:.2f} GB written in {time.perf_counter() - begin:.0f} s")
        gather_times(path)
        columns = ("model", 8), ("engine", 8), ("data", 18), ("samples", 11), ("ms/client-step", 15)
        print("".join(f"{name:{width}}" for name, width in columns), " resident MB, peak MB")
        for model, engine in (("linear", "lanes"), ("cnn", "lanes"), ("cnn", "serial")):
            digests = {}
            for kind, label in (("cold", "disk, cold"), ("disk", "disk, cached"), ("same", "the same on disk"),
                                ("memory", "memory")):  # fmt: skip
                command = [sys.executable, __file__, "--one", str(path), kind, model, engine]
                out = subprocess.run(command, capture_output=True, text=True, check=False)
                if out.returncode:
                    sys.exit(out.stderr)
                r = json.loads(out.stdout)
                digests[kind] = r["digest"]
                figures = f"{r['samples']:<11,}{r['ms']:<15.2f}  {r['now']:.0f}, {r['peak']:.0f}"
                print(f"{model:8}{engine:8}{label:18}{figures}")
            print(f"{'':17} same model from disk and from memory: {digests['same'] == digests['memory']}")


if __name__ == "__main__":
    main()
