"""One round of up to 10,000 clients of logistic regression: cost per client-step, and memory beyond one wave.

    python benchmarks/ten_thousand.py [--width 1000]

Every number of clients runs in a process of its own. All clients draw from one pool of 50,000 rows, so the data do
not grow with them; what must grow is the server's copy of every client's reply, stated beside the memory.
"""

import argparse
import json
import resource
import subprocess
import sys
import time

import numpy as np
import torch

import fedagrac as fg
from fedagrac.data.federation import Federation
from fedagrac.engines import LanesEngine, keep_freed_memory


def one(clients, width, steps):
    """Run three rounds; return seconds per round and the peak memory in MB."""
    keep_freed_memory()
    rng = np.random.default_rng(0)
    X, y = rng.random((50_000, 123), np.float32), rng.integers(0, 2, 50_000)
    shares = fg.Resample(100).split(y, clients, seed=0)
    fed = Federation(torch.from_numpy(X), torch.from_numpy(y), shares, None, None, "random", ())
    model = fg.models.build("logistic", features=123, classes=2)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    ends = [time.perf_counter()]

    class Times(fg.Callback):
        def on_round(self, run, record):
            ends.append(time.perf_counter())

    fg.simulate(
        model, fed, fg.FedAvg(lr=0.01), rounds=3, steps=fg.Constant(steps), batch_size=20, device="cpu",
        engine=lambda workload: LanesEngine(workload, width=width), callbacks=[Times()],
    )  # fmt: skip
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = float(np.median(np.diff(ends)))
    return {
        "clients": clients,
        "seconds": seconds,
        "us": seconds / (clients * steps) * 1e6,
        "mb": peak - before,
        "replies_mb": clients * 248 * 4 / 2**20,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=1000)
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--clients", type=int)
    o = parser.parse_args()
    if o.clients:
        print(json.dumps(one(o.clients, o.width, o.steps)))
        return
    for clients in (250, 500, 1000, 2000, 5000, 10_000):
        options = ["--clients", str(clients), "--width", str(o.width), "--steps", str(o.steps)]
        done = subprocess.run([sys.executable, __file__, *options], capture_output=True, text=True, check=True)
        row = json.loads(done.stdout)
        print(
            f"{clients:6d} clients: {row['seconds']:.2f} s a round, {row['us']:.1f} us per client-step, "
            f"{row['mb']:.0f} MB more than before (replies: {row['replies_mb']:.1f} MB)",
            flush=True,
        )


if __name__ == "__main__":
    main()
