"""Check that every kind of module gives the numbers of the CPU on a GPU, where lanes are recorded as graphs.

    PYTHONPATH=src:tests python benchmarks/gpu_modules.py

Prints, for each kind of tests/module_kinds.py and each way to treat buffers, how far lanes on the GPU are from
serial on the CPU in float64, and what falls back; then the time of a client-step of 20 lanes in TF32 for the
networks that are built by name. Exits with 1 if a difference exceeds 1e-10.
"""

import sys
import time
import warnings

import numpy as np
import torch

import fedagrac as fg
from fedagrac.core.local import Plan
from fedagrac.engines import LanesEngine, Workload
from fedagrac.engines.precision import products
from fedagrac.models import VectorModel
from module_kinds import BATCH, KINDS, LR, ROUNDS, make


def run(name, device, engine, buffers):
    """Return the model, its buffers and the warnings of a short run."""
    kind, module, clients = make(name)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        result = fg.simulate(
            module, fg.Federation.from_arrays(clients, test=clients[0]), fg.FedaGrac(lr=LR, first_steps=2),
            rounds=ROUNDS, steps=fg.Explicit([[2, 6]]), batch_size=BATCH, loss=kind.loss, device=device,
            engine=engine, compile=False, buffers=buffers,
        )  # fmt: skip
    moving = [value.double().reshape(-1) for value in result.buffers.values()]
    return torch.cat([result.vector.double(), *moving]).cpu(), [str(w.message) for w in caught]


def check():
    """Compare all kinds; return the largest difference."""
    worst = 0.0
    for name in KINDS:
        for buffers in ("average", "local", "frozen") if name in ("resnet-batch", "own-buffer") else ("average",):
            try:
                cpu, _ = run(name, "cpu", "serial", buffers)
            except ImportError as error:
                print(f"{name}: skipped, {error}", flush=True)
                break
            gpu, said = run(name, "cuda", "lanes", buffers)
            apart = float((gpu - cpu).abs().max() / cpu.abs().max())
            worst = max(worst, apart)
            print(f"{name}, {buffers}: {apart:.1e}", *(text[:160] for text in said), sep="; ", flush=True)
    return worst


SPEED = {
    "char-gpt": ((80,), 80, 16), "char-lstm": ((80,), 80, 16),
    "resnet18": ((3, 32, 32), 10, 25), "resnet20": ((3, 32, 32), 10, 25),
    "resnet18 batch": ((3, 32, 32), 10, 25), "resnet20 batch": ((3, 32, 32), 10, 25),
}  # fmt: skip
"""The inputs, classes and batch size of networks that are built by name."""


def speed(title, lanes=20, steps=60):
    """Print the microseconds of a client-step of 20 lanes."""
    shape, classes, batch = SPEED[title]
    name, _, norm = title.partition(" ")
    rng = np.random.default_rng(0)
    n = 40 * lanes
    X = (
        rng.integers(0, 80, (n, *shape))
        if name.startswith("char")
        else rng.normal(size=(n, *shape)).astype(np.float32)
    )
    fed = fg.Federation.from_pool(X, rng.integers(0, classes, n), lanes, fg.IID())
    model = VectorModel(fg.models.build(name, **({"norm": norm} if norm else {})), "cuda")
    workload = Workload.of(model, fed, None, batch, "replacement", 0.0, 0)
    x, clients = model.initial(), np.arange(lanes)
    with products("tf32"):
        engine = LanesEngine(workload)
        moving = model.buffers.given(model.dtype).expand(lanes, -1) if model.buffers.names else None
        plan = Plan(
            np.full(lanes, steps), np.full(lanes, 0.0), None, np.zeros(lanes), np.zeros(lanes, int), False,
            buffers=moving,
        )  # fmt: skip
        times = []
        for _ in range(4):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            engine.run(plan, x, clients, 0)
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
    print(
        f"{title}: {min(times[1:]) / steps / lanes * 1e6:.0f} us per client-step, first {times[0]:.1f} s",
        flush=True,
    )


if __name__ == "__main__":
    worst = check()
    for title in SPEED:
        speed(title)
    sys.exit(worst > 1e-10)
