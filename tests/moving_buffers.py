"""Modules whose forward pass changes buffers, data for a few clients, and plain PyTorch training of them.

Run in each process of a sharded test, rank 0 writes the results.
"""

import copy
import json
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import fedagrac as fg
from fedagrac.data.batches import batch_positions
from fedagrac.engines.ranks import leave_ranks, start_ranks

ENGINES = {"serial": {"engine": "serial"}, "lanes": {"engine": "lanes", "compile": False}}
FEATURES, CLASSES, LR = 5, 3, 0.2
SIZES, STEPS = (8, 15, 11, 6), (3, 7, 1, 4)


class Running(nn.Module):
    """Subtracts a running mean, its own buffer, which it replaces in every forward pass."""

    def __init__(self):
        super().__init__()
        self.out = nn.Linear(FEATURES, CLASSES)
        self.register_buffer("mean", torch.full((FEATURES,), 0.5))

    def forward(self, x):
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return self.out(x - self.mean)


def norm():
    return nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, CLASSES))


def module(kind):
    torch.manual_seed(1)
    return {"norm": norm, "running": Running}[kind]().double()


def clients(sizes=SIZES):
    """Return the inputs and labels of each client; their means differ by client."""
    rng = np.random.default_rng(0)
    return [
        (torch.from_numpy(rng.normal(i, 1 + i, (n, FEATURES))), torch.from_numpy(rng.integers(0, CLASSES, n)))
        for i, n in enumerate(sizes)
    ]


def federation(pairs=None):
    pairs = clients() if pairs is None else pairs
    return fg.Federation.from_arrays(pairs, test=tuple(torch.cat(part) for part in zip(*pairs, strict=True)))


def simulated(kind, pairs=None, algorithm=None, steps=STEPS, engine="serial", **options):
    """Train with fedagrac, by default on full batches."""
    return fg.simulate(
        module(kind), federation(pairs), algorithm or fg.FedAvg(lr=LR), steps=fg.Explicit([list(steps)]),
        **{"rounds": 3, "batch_size": None, "device": "cpu", **ENGINES.get(engine, {"engine": engine}), **options},
    )  # fmt: skip


def train(net, inputs, targets, steps, batch_size=None, round=0, client=0, frozen=False):
    """Train a module with ordinary PyTorch; `frozen` gives it back its buffers before every step."""
    given = {name: buffer.clone() for name, buffer in net.named_buffers()}
    optimizer = torch.optim.SGD(net.parameters(), lr=LR)
    net.train()
    for rows in batch_positions(len(targets), steps, batch_size, "replacement", 0, round, client).copy():
        if frozen:
            net.load_state_dict(given, strict=False)
        optimizer.zero_grad()
        functional.cross_entropy(net(inputs[rows]), targets[rows]).backward()
        optimizer.step()
    if frozen:
        net.load_state_dict(given, strict=False)


def mean_of(states, weights):
    """Return the weighted mean of the tensors of several states; counters are rounded."""
    mean = {
        key: sum(w * state[key].double() for w, state in zip(weights, states, strict=True)) for key in states[0]
    }
    return {
        key: value if states[0][key].is_floating_point() else value.round().to(states[0][key].dtype)
        for key, value in mean.items()
    }


def by_hand(kind, buffers, rounds=3):
    """Train by FedAvg on full batches with deep copies, and return the final state and each round's test loss."""
    server, pairs = module(kind), clients()
    names = {name for name, _ in server.named_buffers()}
    weights = np.array(SIZES) / sum(SIZES)
    own = [{key: value.clone() for key, value in server.state_dict().items() if key in names} for _ in pairs]
    losses = []
    for _ in range(rounds):
        ends = []
        for i, (inputs, targets) in enumerate(pairs):
            local = copy.deepcopy(server)
            if buffers == "local":
                local.load_state_dict(own[i], strict=False)
            train(local, inputs, targets, STEPS[i], frozen=buffers == "frozen")
            ends.append(copy.deepcopy(local.state_dict()))
            own[i] = {key: value for key, value in ends[-1].items() if key in names}
        state = mean_of(ends, weights)
        server.load_state_dict(state)
        tested = copy.deepcopy(server).eval()
        inputs, targets = (torch.cat(part) for part in zip(*pairs, strict=True))
        losses.append(functional.cross_entropy(tested(inputs), targets).item())
    return state, losses


def far(one, other):
    """Return the largest difference of two states, relative to the largest number of each tensor."""
    assert one.keys() == other.keys()
    return max(
        float((one[key].double() - other[key].double()).abs().max() / other[key].double().abs().max().clamp(min=1))
        for key in one
    )


def outcomes():
    """Return the final state and the history of runs with partial participation."""
    table = {}
    for buffers in ("average", "local"):
        options = {"buffers": buffers, "participation": 2, "rounds": 4, "engine": "lanes"}
        result = simulated("norm", algorithm=fg.FedaGrac(lr=LR), **options)
        state = {key: value.tolist() for key, value in result.model().state_dict().items()}
        table[buffers] = state, result.history.column("test_loss"), result.history.column("bytes_total")
    return table


if __name__ == "__main__":
    torch.set_num_threads(1)
    ranks = start_ranks()
    results = outcomes()
    if ranks.rank == 0:
        Path(sys.argv[1]).write_text(json.dumps({"size": ranks.size, "outcomes": results}))
    leave_ranks()
