"""Benchmarks: the time per client-step of every engine beside that of an ordinary PyTorch loop.

    fedagrac bench
    python -m fedagrac.experiments.bench --device cuda --precision tf32  # needs only torch and numpy

Data are random, with the shape, type and size of the real ones. Times include gathering, augmentation, dropout,
calibration and aggregation. The plain loop, with a module and an SGD optimiser per client, is timed before and
after each engine, which shows a drift of the machine's speed. On a CPU the process keeps the memory it frees,
for the engines and for the loop.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedagrac import models
from fedagrac.algorithms import FedaGrac, FedAvg
from fedagrac.callbacks import Callback
from fedagrac.data.federation import Federation
from fedagrac.data.partitions import IID
from fedagrac.data.pictures import Images
from fedagrac.engines import keep_freed_memory
from fedagrac.engines.choice import CANDIDATES, processor
from fedagrac.files import opener
from fedagrac.heterogeneity import Constant, Extreme, Gaussian, StepSchedule
from fedagrac.rounds.api import simulate

if TYPE_CHECKING:
    from fedagrac.algorithms import Algorithm
    from fedagrac.engines.precision import Precision
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

__all__ = ["CASES", "SWEEPS", "Case", "compare", "engines_for", "sweep"]


CIFAR = Images((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), padding=4)
GREY = Images((0.5,), (0.25,))


def pfl_cnn() -> nn.Module:
    """Return the CNN of the public pfl-research CIFAR-10 workload.

    Examples:
        >>> sum(p.numel() for p in pfl_cnn().parameters())
        1626442
    """
    return nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.ReLU(), nn.Conv2d(32, 64, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.25),
        nn.Flatten(), nn.Linear(64 * 14 * 14, 128), nn.ReLU(), nn.Dropout(0.5), nn.Linear(128, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Case:
    """One problem whose steps are timed.

    Attributes:
        about: a description for tables.
        model: a function that makes the module.
        shape: the shape of a sample.
        classes: the number of classes.
        images: how bytes become inputs; None for samples that are not pictures.
        clients: the number of clients.
        samples: the samples of each client.
        batch: the samples of a step.
        steps: K_i.
        cohort: the clients that take part in a round; None for all.
        algorithm: a function that makes the algorithm, given lr.
        lr: the step size.
        large: whether only a few steps of a few clients are timed on a CPU.
    """

    about: str
    model: Callable[[], nn.Module]
    shape: tuple[int, ...]
    classes: int
    images: Images | None
    clients: int
    samples: int
    batch: int
    steps: StepSchedule
    cohort: int | None = None
    algorithm: Callable[..., Algorithm] = FedaGrac
    lr: float = 0.01
    large: bool = False

    def federation(self) -> Federation:
        """Return a federation with random data."""
        rng = np.random.default_rng(0)
        size = (self.clients * self.samples, *self.shape)
        X = rng.integers(0, 256, size, dtype=np.uint8) if self.images else rng.random(size, np.float32)
        y = torch.from_numpy(rng.integers(0, self.classes, len(X)))
        shares = IID().split(y.numpy(), self.clients, seed=0)
        pool = torch.from_numpy(X), y
        return Federation(*pool, shares, (pool[0][:100], y[:100]), None, "random", (), self.images)

    def client_steps(self) -> int:
        """Return the local steps of one round, on average if the cohort varies."""
        K = self.steps.counts(0, self.clients, 0)
        return round(float(K.mean()) * (self.cohort or self.clients))


def _logistic() -> nn.Module:
    return models.build("logistic", features=123, classes=2)


CASES = {
    "lr-a9a": Case("LR, a9a, 100 x K = 50", _logistic, (123,), 2, None, 100, 300, 20, Constant(50)),
    "lr-a9a-paper": Case(
        "LR, a9a, 20 x N(500, 10000)", _logistic, (123,), 2, None, 20, 1600, 20, Gaussian(500, 10_000), lr=0.005
    ),
    "cnn": Case(
        "2-layer CNN, Fashion-MNIST", lambda: models.build("cnn"), (1, 28, 28), 10, GREY, 20, 500, 25, Constant(50)
    ),
    "pfl": Case(
        "pfl-research CNN, CIFAR-10", pfl_cnn, (3, 32, 32), 10, Images(CIFAR.mean, CIFAR.std), 1000, 50, 10,
        Constant(5), cohort=50, algorithm=FedAvg, lr=0.1,
    ),
    "alexnet": Case(
        "AlexNet, CIFAR-10", lambda: models.build("alexnet"), (3, 32, 32), 10, CIFAR, 20, 500, 25, Constant(100),
        large=True,
    ),
    "alexnet-unequal": Case(
        "AlexNet, K ~ N(500, 10000)", lambda: models.build("alexnet"), (3, 32, 32), 10, CIFAR, 20, 500, 25,
        Gaussian(500, 10_000), large=True,
    ),
    "alexnet-equal": Case(
        "AlexNet, K = 500", lambda: models.build("alexnet"), (3, 32, 32), 10, CIFAR, 20, 500, 25, Constant(500),
        large=True,
    ),
    "vgg19": Case(
        "VGG-19, CIFAR-10", lambda: models.build("vgg19"), (3, 32, 32), 10, CIFAR, 20, 500, 25, Constant(20),
        large=True,
    ),
}  # fmt: skip
"""All cases by name."""


def engines_for(device: str) -> list[str]:
    """Return the candidates that are compared on a device by default."""
    return ["serial", "lanes"] if device.startswith("cuda") else list(CANDIDATES)


def plain_loop(case: Case, device: str, budget: float = 0.5) -> float:
    """Return microseconds per step of an ordinary loop with a copy of the module and an optimiser per client."""
    fed = case.federation() if case.clients <= 100 else replace(case, clients=20).federation()
    X, y = fed.inputs.to(device), fed.targets.to(device)
    model = case.model().to(device).train()
    per_client = int(min(50, max(1, case.steps.counts(0, case.clients, 0).mean())))
    done, begun = 0, 0.0
    for i in range(1000):
        samples = torch.from_numpy(fed.samples_of(i % fed.num_clients)).to(device)
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(local.parameters(), lr=case.lr)
        for _ in range(per_client):
            batch = samples[torch.randint(len(samples), (case.batch,), device=device)]
            inputs = X[batch] if fed.images is None else fed.images(X[batch], torch.float32)
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(inputs), y[batch]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
        _wait(device)
        if i == 0:  # the first client warms up
            begun = time.perf_counter()
        else:
            done += per_client
            if time.perf_counter() - begun > budget:
                break
    return (time.perf_counter() - begun) / done * 1e6


def engine_times(case: Case, name: str, device: str, precision: Precision, budget: float) -> dict[str, Any]:
    """Return microseconds per client-step of the median and the best round, and the seconds of the first round."""
    fed, ends = case.federation(), []

    class Budget(Callback):
        def on_round(self, run: Run, record: RoundRecord) -> None:
            _wait(device)
            ends.append(time.perf_counter())
            if len(ends) >= 4 and ends[-1] - begun > budget:
                run.stop("enough")

    begun = time.perf_counter()
    with torch.random.fork_rng([]):
        simulate(
            case.model(), fed, case.algorithm(lr=case.lr), rounds=40, steps=case.steps, batch_size=case.batch,
            participation=case.cohort, engine=CANDIDATES[name], device=device, precision=precision, eval_every=100,
            callbacks=[Budget()],
        )  # fmt: skip
    rounds = np.diff(ends)
    return {
        "us": float(np.median(rounds)) / case.client_steps() * 1e6,
        "us_best": float(rounds.min()) / case.client_steps() * 1e6,
        "start_s": ends[0] - begun,
        "rounds": len(ends),
    }


def compare(
    names: list[str], engines: list[str], device: str, precision: Precision = "float32", budget: float = 10.0
) -> Iterator[dict[str, Any]]:
    """Yield one row per case and engine; the plain loop is timed before and after each engine."""
    _keep_freed_memory(device)
    for name in names:
        case = CASES[name]
        if case.large and device == "cpu":
            case = replace(case, clients=4, steps=Constant(2))
        before = plain_loop(case, device)
        for engine in engines:
            if case.large and device == "cpu" and engine == "compiled lanes":
                continue  # compiling takes minutes, more than it saves here
            row = engine_times(case, engine, device, precision, budget)
            after = plain_loop(case, device)
            yield {
                "workload": name,
                "about": case.about,
                "engine": engine,
                **row,
                "plain_us": (before + after) / 2,
            }
            before = after


def _clients(count: int) -> Case:
    """Return a case with this many clients."""
    return replace(CASES["lr-a9a"], clients=count, samples=100)


def _spread(steps: StepSchedule) -> Case:
    """Return a case with this step schedule."""
    return replace(CASES["lr-a9a-paper"], steps=steps, samples=300)


def _width(hidden: int) -> Case:
    """Return a case whose model has this many hidden units."""

    def perceptron() -> nn.Module:
        return nn.Sequential(nn.Linear(123, hidden), nn.ReLU(), nn.Linear(hidden, 2))

    return replace(CASES["lr-a9a"], model=perceptron, clients=20, steps=Constant(10))


SWEEPS: dict[str, tuple[str, dict[str, Case]]] = {
    "clients": ("clients in one round", {str(n): _clients(n) for n in (10, 30, 100, 300, 1000, 3000, 10_000)}),
    "spread": (
        "how unequal K is",
        {
            "K = 500": _spread(Gaussian(500, 0)),
            "variance 100": _spread(Gaussian(500, 100)),
            "variance 10000": _spread(Gaussian(500, 10_000)),
            "one 100 x faster": _spread(Extreme(slow=50, fast=5000)),
        },
    ),
    "size": ("parameters", {str(126 * h + 2): _width(h) for h in (8, 32, 128, 512, 2048, 8192)}),
}
"""Sweeps over the number of clients, the spread of K and the model size: a label, and a case for each point."""


def sweep(
    name: str, engines: list[str], device: str, precision: Precision, budget: float
) -> Iterator[dict[str, Any]]:
    """Yield one row per point of a sweep and engine, the plain loop first."""
    _keep_freed_memory(device)
    for label, case in SWEEPS[name][1].items():
        yield {"sweep": name, "point": label, "engine": "plain loop", "us": plain_loop(case, device)}
        for engine in engines:
            if engine == "serial" and case.client_steps() > 20_000:
                continue  # its cost per client-step does not depend on their number
            row = engine_times(case, engine, device, precision, budget)
            yield {"sweep": name, "point": label, "engine": engine, **row}


def machine(device: str) -> dict[str, Any]:
    """Return a description of the machine and its software."""
    from fedagrac.storage.environment import environment

    return {**environment(torch.device(device)), "processor": processor()}


def _keep_freed_memory(device: str) -> None:
    """Let the process keep freed memory if it runs on a CPU."""
    if not device.startswith("cuda"):
        keep_freed_memory()


def _wait(device: str) -> None:
    """Wait until a GPU has done its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> None:
    """Run benchmarks without the libraries of the command line. Print one JSON line per row, and write a file."""
    parser = argparse.ArgumentParser(prog="python -m fedagrac.experiments.bench")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", default=",".join(CASES), help="cases, separated by commas")
    parser.add_argument("--sweeps", default="", help=f"any of {','.join(SWEEPS)}")
    parser.add_argument("--engines")
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--json")
    o = parser.parse_args(arguments)
    engines = o.engines.split(",") if o.engines else engines_for(o.device)
    rows = []
    benchmarks = [compare(o.only.split(",") if o.only else [], engines, o.device, o.precision, o.budget)]
    benchmarks += [sweep(name, engines, o.device, o.precision, o.budget) for name in o.sweeps.split(",") if name]
    for row in itertools.chain.from_iterable(benchmarks):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if o.json:
            with open(o.json, "w", encoding="utf-8", opener=opener) as file:
                json.dump({"machine": machine(o.device), "precision": o.precision, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
