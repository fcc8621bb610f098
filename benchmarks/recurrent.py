"""Time recurrent networks on a CPU: a plain PyTorch loop, serial and lanes, in turns in one process.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/recurrent.py

Prints the milliseconds of CPU time per client-step, the best of three.
"""

import time

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedagrac as fg
from fedagrac.core.local import Plan
from fedagrac.engines import LanesEngine, SerialEngine, Workload, keep_freed_memory
from fedagrac.models import VectorModel

BATCH, LENGTH = 16, 80


class Net(nn.Module):
    """An embedding, two recurrent layers and a linear layer."""

    def __init__(self, layer, hidden):
        super().__init__()
        self.embed, self.layer = nn.Embedding(80, 8), layer(8, hidden, 2, batch_first=True)
        self.out = nn.Linear(hidden, 80)

    def forward(self, ids):
        return self.out(self.layer(self.embed(ids))[0][:, -1])


def plain(net, X, y, steps):
    """Train with an ordinary loop."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for _ in range(steps):
        rows = torch.randint(0, len(X), (BATCH,))
        optimizer.zero_grad()
        functional.cross_entropy(net(X[rows]), y[rows]).backward()
        optimizer.step()


def measure(layer, hidden, lanes, steps):
    """Print one line."""
    rng = np.random.default_rng(0)
    X, y = rng.integers(0, 80, (40 * lanes, LENGTH)), rng.integers(0, 80, 40 * lanes)
    fed = fg.Federation.from_pool(X, y, lanes, fg.IID())
    net = Net(layer, hidden)
    work = Workload.of(VectorModel(net, "cpu"), fed, None, BATCH, "replacement", 0.0, 0)
    x, clients = work.model.initial().clone(), np.arange(lanes)
    plan = Plan.of(steps=np.full(lanes, steps), lr=0.1)
    serial, together = SerialEngine(work), LanesEngine(work)
    ways = {
        "plain": lambda: plain(net, torch.from_numpy(X), torch.from_numpy(y), lanes * steps),
        "serial": lambda: serial.run(plan, x, clients, 0),
        "lanes": lambda: together.run(plan, x, clients, 0),
    }
    best = dict.fromkeys(ways, float("inf"))
    for turn in range(4):
        for name, run in ways.items():
            begun = time.process_time()
            run()
            if turn:
                best[name] = min(best[name], (time.process_time() - begun) / lanes / steps * 1e3)
    times = " | ".join(f"{best[name]:.2f}" for name in ways)
    ratio = best["plain"] / best["lanes"]
    print(f"| {layer.__name__} 2 x {hidden}, {lanes} lanes | {times} | {ratio:.2f} |", flush=True)


if __name__ == "__main__":
    keep_freed_memory()
    print("| network | plain loop | serial | lanes | plain / lanes |\n|---|---:|---:|---:|---:|")
    for layer in (nn.LSTM, nn.GRU, nn.RNN):
        for hidden, lanes, steps in ((256, 5, 1), (64, 10, 2), (16, 20, 3)):
            measure(layer, hidden, lanes, steps)
