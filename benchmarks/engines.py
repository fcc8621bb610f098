"""Time per client-step of the engines on the workloads that matter, in one run; start-up and recording apart.

    python benchmarks/engines.py [--device cuda] [--precision tf32] [--only cnn,alexnet] [--json FILE]

Data are random with the shape, type and size of the real ones (time does not depend on what the pictures show);
gathering, augmentation, dropout, calibration and aggregation are all in. "plain" is an ordinary PyTorch loop: a
module and an SGD optimiser per client, batches taken from tensors on the device.
"""

import argparse
import copy
import json
import time

import numpy as np
import torch
from torch import nn

import fedagrac as fg
from fedagrac.data.images import Images

CIFAR = Images((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), padding=4)
PLAIN_PIXELS = Images((0.5,), (0.25,))


def pfl_cnn():
    """The CNN of the public pfl-research CIFAR-10 workload, 1,626,442 parameters."""
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


def pool(samples, shape, classes, images):
    """Random samples of a shape: bytes for pictures, numbers otherwise."""
    rng = np.random.default_rng(0)
    X = (
        rng.integers(0, 256, (samples, *shape), dtype=np.uint8)
        if images
        else rng.random((samples, *shape), np.float32)
    )
    return torch.from_numpy(X), torch.from_numpy(rng.integers(0, classes, samples))


WORKLOADS = {  # model, sample shape, classes, pictures, clients, samples each, batch, lr, mean K, variance
    "lr-a9a": (lambda: fg.models.build("logistic"), (123,), 2, None, 100, 300, 20, 0.01, 50, 0),
    "lr-a9a-paper": (lambda: fg.models.build("logistic"), (123,), 2, None, 20, 1600, 20, 0.005, 500, 10_000),
    "cnn": (lambda: fg.models.build("cnn"), (1, 28, 28), 10, PLAIN_PIXELS, 20, 500, 25, 0.03, 50, 0),
    "pfl": (pfl_cnn, (3, 32, 32), 10, Images(CIFAR.mean, CIFAR.std), 50, 50, 10, 0.1, 5, 0),
    "alexnet": (lambda: fg.models.build("alexnet"), (3, 32, 32), 10, CIFAR, 20, 500, 25, 0.03, 100, 0),
    "alexnet-peeling": (
        lambda: fg.models.build("alexnet"),
        (3, 32, 32),
        10,
        CIFAR,
        20,
        500,
        25,
        0.03,
        500,
        10_000,
    ),
    "alexnet-constant": (lambda: fg.models.build("alexnet"), (3, 32, 32), 10, CIFAR, 20, 500, 25, 0.03, 500, 0),
    "vgg19": (lambda: fg.models.build("vgg19"), (3, 32, 32), 10, CIFAR, 20, 500, 25, 0.01, 20, 0),
}


ALGORITHMS = {"pfl": fg.FedAvg}  # as in the public workload; all others run FedaGrac, calibration on


def federation(shape, classes, images, clients, each):
    X, y = pool(clients * each, shape, classes, images)
    shares = fg.IID().split(y.numpy(), clients, seed=0)
    return fg.Federation(X, y, shares, (X[:100], y[:100]), None, "random", (), images)


def plain(model, fed, batch, lr, steps, device):
    """Seconds of an ordinary loop: per client a copy of the module and an optimiser."""
    X, y = fed.inputs.to(device), fed.targets.to(device)
    model = model.to(device).train()
    begun = None
    for i, k in enumerate([3, *steps]):  # the first client warms up
        if i == 1:
            if device == "cuda":
                torch.cuda.synchronize()
            begun = time.perf_counter()
        own = torch.from_numpy(fed.samples_of(max(0, i - 1))).to(device)
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(local.parameters(), lr=lr)
        for _ in range(k):
            some = own[torch.randint(len(own), (batch,), device=device)]
            inputs = X[some] if fed.images is None else fed.images(X[some], torch.float32)
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(inputs), y[some]).backward()
            optimiser.step()
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - begun


def engine_times(name, engine, device, precision, budget):
    make, shape, classes, images, clients, each, batch, lr, mean, variance = WORKLOADS[name]
    fed = federation(shape, classes, images, clients, each)
    steps = fg.Gaussian(mean, variance)
    begun = time.perf_counter()
    torch.manual_seed(0)

    class Budget(fg.Callback):
        def on_round(self, run, record):
            if record["wall_time"] > budget and record["round"] >= 2:
                run.stop("enough")

    result = fg.simulate(
        make(), fed, ALGORITHMS.get(name, fg.FedaGrac)(lr=lr), rounds=4, steps=steps, batch_size=batch,
        engine=engine, device=device, precision=precision, eval_every=100, callbacks=[Budget()],
    )  # fmt: skip
    times = result.history.column("wall_time")
    rounds = np.diff(times)
    total = int(steps.counts(0, clients, 0).sum())
    return {
        "first_round_s": times[0],
        "us": float(min(rounds)) / total * 1e6,
        "all_s": time.perf_counter() - begun,
    }


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", default=",".join(WORKLOADS))
    parser.add_argument("--engines", default="plain,serial,lanes")
    parser.add_argument("--budget", type=float, default=20.0)
    parser.add_argument("--json")
    options = parser.parse_args()
    machine = (
        torch.cuda.get_device_name() if options.device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    )
    print(f"torch {torch.__version__}, {machine}, {options.precision}", flush=True)
    found = {}
    for name in options.only.split(","):
        make, shape, classes, images, clients, each, batch, lr, mean, _ = WORKLOADS[name]
        for engine in options.engines.split(","):
            if engine == "plain":
                some = min(clients, 4)
                fed = federation(shape, classes, images, clients, each)
                K = [min(mean, 50)] * some
                row = {"us": plain(make(), fed, batch, lr, K, options.device) / sum(K) * 1e6}
            else:
                precision = options.precision if options.device == "cuda" else "float32"
                row = engine_times(name, engine, options.device, precision, options.budget)
            found[f"{name}/{engine}"] = row
            extra = f", first round {row['first_round_s']:.2f} s" if "first_round_s" in row else ""
            print(f"{name:17s} {engine:7s} {row['us']:9.1f} us per client-step{extra}", flush=True)
            if options.json:
                with open(options.json, "w") as file:
                    json.dump({"machine": machine, "torch": torch.__version__, "rows": found}, file, indent=1)


if __name__ == "__main__":
    main()
