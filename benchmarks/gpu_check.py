"""CUDA gives the numbers of the CPU, and lanes those of serial; needs torch, numpy and scikit-learn only.

    PYTHONPATH=src python benchmarks/gpu_check.py

Every algorithm on digits with partial participation, and AlexNet on augmented random pictures (dropout off),
compared by how far the model moved; then the serial engine's time per step for AlexNet. Exits with 1 if float64
differs by more than 1e-10 of the way.
"""

import sys
import time

import numpy as np
import torch

import fedagrac as fg
from fedagrac.algorithms import REGISTRY
from fedagrac.data.images import Images


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


def alexnet(dropout):
    """AlexNet from one start, with or without dropout."""
    torch.manual_seed(0)
    model = fg.models.build("alexnet")
    for layer in model:
        if isinstance(layer, torch.nn.Dropout) and not dropout:
            layer.p = 0.0
    return model


def main():
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name()}", flush=True)
    worst = 0.0
    digits = fg.Federation.load("digits", clients=8, partition=fg.Dirichlet(0.3))
    for name in REGISTRY:
        found = {}
        for dtype in (torch.float64, torch.float32):
            cpu, gpu = (
                fg.simulate(
                    fg.models.build("logistic", features=64, classes=10), digits, fg.algorithm(name, lr=0.1),
                    rounds=3, steps=fg.Linear(1, 3), participation=5, device=device, dtype=dtype,
                ).vector
                for device in ("cpu", "cuda")
            )  # fmt: skip
            found[dtype] = distance(gpu, cpu)
        worst = max(worst, found[torch.float64])
        print(f"{name:17s} float64 {found[torch.float64]:.1e}  float32 {found[torch.float32]:.1e}", flush=True)
    fed = pictures()
    cpu, gpu = (
        fg.simulate(
            alexnet(dropout=False), fed, fg.FedaGrac(lr=1.0), rounds=2, steps=fg.Linear(1, 1), batch_size=25,
            device=device, dtype=torch.float64,
        ).vector
        for device in ("cpu", "cuda")
    )  # fmt: skip
    start = torch.cat([p.detach().reshape(-1) for p in alexnet(dropout=False).parameters()]).double()
    apart = distance(gpu - start, cpu - start)
    worst = max(worst, apart)
    print(f"alexnet           float64 {apart:.1e}", flush=True)
    for algorithm in (
        fg.FedaGrac(lr=0.3),
        fg.FedaGrac(lr=0.3, transmit="first", first_steps=3),
        fg.FedProx(lr=0.3),
    ):
        serial, lanes = (
            fg.simulate(
                alexnet(dropout=False), fed, algorithm, rounds=2, steps=fg.Explicit([[1, 30, 4, 4, 9, 2]]),
                batch_size=25, device="cuda", dtype=torch.float64, engine=engine,
            ).vector
            for engine in ("serial", "lanes")
        )  # fmt: skip
        apart = distance(lanes - start, serial - start)
        worst = max(worst, apart)
        print(f"alexnet, recorded lanes against serial, {algorithm.name}: float64 {apart:.1e}", flush=True)
    for precision in ("float32", "tf32"):
        begun = time.perf_counter()
        result = fg.simulate(
            alexnet(dropout=True), fed, fg.FedaGrac(lr=0.01), rounds=2, steps=fg.Constant(100), batch_size=25,
            device="cuda", precision=precision, eval_every=2,
        )  # fmt: skip
        first, second = result.history.column("wall_time")
        print(
            f"alexnet serial {precision}: {(second - first) / 600 * 1e6:.0f} us per client-step "
            f"({time.perf_counter() - begun:.1f} s in all), loss {result.history[-1]['train_loss']:.3f}"
        )
    result = fg.simulate(
        fg.models.build("vgg19"),
        fed,
        fg.FedaGrac(lr=0.01),
        rounds=1,
        steps=fg.Constant(5),
        batch_size=25,
        device="cuda",
    )
    print(f"vgg19: {result.status}, loss {result.history[-1]['train_loss']:.3f}")
    sys.exit(worst > 1e-10)


if __name__ == "__main__":
    main()
