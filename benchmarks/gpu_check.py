"""Check that CUDA gives the numbers of the CPU, and lanes those of serial; needs torch, numpy and scikit-learn.

    PYTHONPATH=src python benchmarks/gpu_check.py            # everything but resumed runs
    PYTHONPATH=src python benchmarks/gpu_check.py resume     # resumed runs; needs safetensors, too

Every algorithm on digits with partial participation, and AlexNet on augmented random pictures (dropout off),
compared by how far the model moved; runs side by side as well as alone. Exits with 1 if float64 differs by more
than 1e-10 of the way.
"""

import contextlib
import gc
import signal
import sys
import tempfile
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.callbacks import Checkpoints
from fedagrac.data.pictures import Images
from fedagrac.storage.checkpoints import read_checkpoint


def distance(a, b):
    """Relative distance of two vectors."""
    return float((a.double() - b.double()).norm() / b.double().norm())


def pictures():
    """Six clients with random colour pictures, prepared as CIFAR-10 is."""
    rng = np.random.default_rng(0)
    X = torch.from_numpy(rng.integers(0, 256, (2000, 3, 32, 32), dtype=np.uint8))
    y = torch.from_numpy(rng.integers(0, 10, 2000))
    images = Images((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010), padding=4)
    shares = fg.Dirichlet(0.3).split(y.numpy(), 6, seed=0)
    return fg.Federation(X, y, shares, (X[:200], y[:200]), None, "random", (), images)


def network(name, dropout):
    """A network from one start, with or without dropout."""
    torch.manual_seed(0)
    model = fg.models.build(name)
    for layer in model:
        if isinstance(layer, torch.nn.Dropout) and not dropout:
            layer.p = 0.0
    return model


def little_memory(fed):
    """Lanes that do not fit run in halves: VGG-19 with a part of the memory, against serial with all of it."""

    def run(engine):
        model = network("vgg19", dropout=False)
        start = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double()
        return fg.simulate(
            model, fed, fg.FedAvg(lr=1.0), rounds=2, steps=fg.Constant(2), batch_size=25, device="cuda",
            engine=engine, dtype=torch.float64,
        ).vector - start  # fmt: skip

    serial = run("serial")
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(0.05)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        lanes = run("lanes")
    torch.cuda.set_per_process_memory_fraction(1.0)
    halved = [str(w.message) for w in said if "out of memory" in str(w.message)]
    apart = distance(lanes, serial)
    print(f"vgg19 with 5 % of the memory: {halved or 'nothing was halved'}; float64 {apart:.1e}", flush=True)
    return apart if halved else 1.0


def resumed(fed):
    """Runs that are interrupted and resumed, against uninterrupted ones: the worst distance in float64."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
    from interrupted_runs import InterruptAfter, Problem, Rounds, combinations

    problem, worst = Problem(), 0.0
    signal.signal(signal.SIGINT, signal.default_int_handler)  # background jobs ignore it
    with tempfile.TemporaryDirectory() as temporary:
        for engine in ("serial", "lanes"):
            apart = {}
            for number, combination in enumerate(combinations(engines=["any"])[::17]):
                options = {"engine": engine, "device": "cuda", "dtype": torch.float64}
                whole = problem.run(*combination, **options).vector
                parts = problem.run_in_two(Path(temporary, engine, str(number)), *combination, **options).vector
                apart[combination] = distance(parts, whole)
            equal = sum(each == 0 for each in apart.values())
            worst = max(worst, *apart.values())
            print(f"resumed, {engine}: {len(apart)} runs, {equal} bit for bit, worst {max(apart.values()):.1e}")
        for name in ("scaffold", "fedagrac"):
            for dtype in (torch.float64, torch.float32):
                options = {
                    "rounds": 4, "steps": fg.Linear(1, 2), "batch_size": 25, "device": "cuda", "dtype": dtype,
                }  # fmt: skip
                run = partial(fg.simulate, network("alexnet", dropout=True), fed, fg.algorithm(name, lr=0.1))
                whole, rounds = run(**options).vector, Rounds()
                folder = Path(temporary, name, str(dtype))
                with contextlib.suppress(KeyboardInterrupt):
                    run(**options, callbacks=[rounds, Checkpoints(folder), InterruptAfter(2)])
                stored = replace(read_checkpoint(folder), history=rounds.history)
                apart = distance(run(**options, resume=stored).vector, whole)
                worst = max(worst, apart if dtype == torch.float64 else 0.0)
                print(f"resumed, alexnet with dropout, {name}, {dtype}: {apart:.1e}", flush=True)
    return worst


def every_algorithm():
    """Every algorithm on digits, partial participation, CUDA against the CPU: the worst distance in float64."""
    digits, worst = fg.Federation.load("digits", clients=8, partition=fg.Dirichlet(0.3)), 0.0
    for name in REGISTRY:
        apart = {}
        for dtype in (torch.float64, torch.float32):
            cpu, gpu = (
                fg.simulate(
                    fg.models.build("logistic", features=64, classes=10), digits, fg.algorithm(name, lr=0.1),
                    rounds=3, steps=fg.Linear(1, 3), participation=5, device=device, dtype=dtype,
                ).vector
                for device in ("cpu", "cuda")
            )  # fmt: skip
            apart[dtype] = distance(gpu, cpu)
        worst = max(worst, apart[torch.float64])
        print(f"{name:17s} float64 {apart[torch.float64]:.1e}  float32 {apart[torch.float32]:.1e}", flush=True)
    return worst


def alexnet_start():
    """Return the weights of AlexNet before the first round."""
    return torch.cat([p.detach().reshape(-1) for p in network("alexnet", dropout=False).parameters()]).double()


def alexnet(fed):
    """AlexNet, CUDA against the CPU, as a part of how far it moved."""
    cpu, gpu = (
        fg.simulate(
            network("alexnet", dropout=False), fed, fg.FedaGrac(lr=1.0), rounds=2,
            steps=fg.Linear(1, 1), batch_size=25,
            device=device, dtype=torch.float64,
        ).vector
        for device in ("cpu", "cuda")
    )  # fmt: skip
    start = alexnet_start()
    apart = distance(gpu - start, cpu - start)
    print(f"alexnet           float64 {apart:.1e}", flush=True)
    return apart


def recorded_lanes(fed):
    """AlexNet in recorded lanes, alone and beside other runs, against serial: the worst distance."""
    algorithms = [
        fg.FedaGrac(lr=0.3),
        fg.FedaGrac(lr=0.3, transmit="first", first_steps=3),
        fg.FedProx(lr=0.3),
    ]
    options = {
        "rounds": 2, "steps": fg.Explicit([[1, 30, 4, 4, 9, 2]]), "batch_size": 25, "device": "cuda",
        "dtype": torch.float64,
    }  # fmt: skip
    start, worst = alexnet_start(), 0.0
    model = network("alexnet", dropout=False)
    together = fg.simulate_many(model, fed, algorithms, engine="lanes", **options)
    for algorithm, beside in zip(algorithms, together, strict=True):
        serial, lanes = (
            fg.simulate(model, fed, algorithm, engine=engine, **options).vector for engine in ("serial", "lanes")
        )
        apart = [distance(vector - start, serial - start) for vector in (lanes, beside.vector)]
        worst = max(worst, *apart)
        print(
            f"alexnet, recorded lanes against serial, {algorithm.name}: float64 {apart[0]:.1e}, beside two others "
            f"{apart[1]:.1e}",
            flush=True,
        )
    return worst


def main():
    if sys.argv[1:] == ["resume"]:
        sys.exit(resumed(pictures()) > 1e-10)
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    fed = pictures()
    worst = max(little_memory(fed), every_algorithm(), alexnet(fed), recorded_lanes(fed))
    result = fg.simulate(
        fg.models.build("vgg19"),
        fed,
        fg.FedaGrac(lr=0.01),
        rounds=1,
        steps=fg.Constant(5),
        batch_size=25,
        device="cuda",
    )
    print(f"vgg19: {result.status}, loss {result.history[-1]['train_loss']:.3f}", flush=True)
    sys.exit(worst > 1e-10)


if __name__ == "__main__":
    main()
