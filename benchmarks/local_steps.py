"""Time local optimizers against plain steps, and check every part of the local rule on the device.

    PYTHONPATH=src python benchmarks/local_steps.py [--device cpu] [--models cnn alexnet] [--lanes 20] [--steps 50]

First compares lanes on the device (recorded as graphs on a GPU) with serial on the CPU in float64, for every part
of the rule. Then prints the time of a client-step of each local optimizer and its ratio to plain steps, measured
in turn in the same process, as the table "Local optimizers" of docs/performance.md. On a CPU a run has 5 steps
unless --steps says otherwise. Exits with 1 if a difference exceeds 1e-10.
"""

import argparse
import dataclasses
import sys
import time

import numpy as np
import torch

import fedagrac as fg
from fedagrac.core.local import Plan
from fedagrac.engines import LanesEngine, SerialEngine
from fedagrac.engines.precision import products
from fedagrac.models import VectorModel
from fedagrac.rounds.setup import Setup

OPTIMIZERS = {
    "plain SGD": fg.SGD(),
    "SGD, clipped": fg.SGD(clip=10.0),
    "SGD, momentum 0.9": fg.SGD(momentum=0.9),
    "Adam": fg.Adam(),
    "AdamW": fg.AdamW(),
}
STEPS = np.array([3, 7, 5])


def small(device):
    """Return a small problem in float64."""
    generator = torch.Generator().manual_seed(3)
    clients = [
        (torch.randn(9 + i, 4, generator=generator, dtype=torch.float64), torch.arange(9 + i) % 3)
        for i in range(3)
    ]
    torch.manual_seed(5)
    module = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Tanh(), torch.nn.Linear(6, 3)).double()
    setup = Setup.of(rounds=1, batch_size=None, weight_decay=0.1, steps=fg.Constant(1))
    return setup.workload(VectorModel(module, device), fg.Federation.from_arrays(clients))


def plans(d):
    """Yield plans with every part of the rule, by name."""
    generator = torch.Generator().manual_seed(0)

    def rows():
        return 0.3 * torch.randn(3, d, generator=generator, dtype=torch.float64)

    base = Plan.of(STEPS, 0.05, correction=rows(), mu=0.4, first_steps=[2, 0, 5], mean=True)
    mask = (torch.rand(3, d, generator=generator) < 0.7).double()
    shortened = fg.SGD(clip=0.2)  # which clips most of these gradients
    for name, local in OPTIMIZERS.items():
        used = local if local.clip is None else shortened
        parts = dataclasses.replace(base, local=used, start=rows(), mask=mask, beside=rows(), scale=1 + rows())
        yield f"{name}, start, mask, beside, scale", parts
    for clipped, local in (("", fg.SGD()), (", clipped", shortened)):
        yield f"ascent{clipped}", dataclasses.replace(base, local=local, ascent=np.array([0.0, 0.1, 0.5]))
        yield f"anchored{clipped}", dataclasses.replace(base, local=local, anchored=True)


def on(plan, device):
    """Return a plan whose vectors are on a device."""
    names = ("correction", "start", "mask", "beside", "scale")
    moved = {n: getattr(plan, n).to(device) for n in names if getattr(plan, n) is not None}
    return dataclasses.replace(plan, **moved)


def check(device):
    """Compare lanes on the device with serial on the CPU; return the largest difference."""
    cpu, gpu = small("cpu"), small(device)
    x = cpu.model.initial()
    worst = 0.0
    for name, plan in plans(len(x)):
        theirs = SerialEngine(cpu).run(plan, x, np.arange(3), 0)
        ours = LanesEngine(gpu, fixed=True).run(on(plan, device), x.to(device), np.arange(3), 0)
        pairs = ((ours.models, theirs.models), (ours.first, theirs.first), (ours.total, theirs.total))
        apart = max(float((a.cpu() - b).abs().max()) for a, b in pairs)
        worst = max(worst, apart)
        print(f"{name}: {apart:.1e}", flush=True)
    return worst


SHAPES = {"cnn": (1, 28, 28), "alexnet": (3, 32, 32)}
BATCHES = {"cnn": 25, "alexnet": 20}
TITLES = {"cnn": "2-layer CNN, batch 25", "alexnet": "AlexNet, batch 20"}


def speed(name, device, lanes, steps):
    """Return the microseconds per client-step of each optimizer, the best of three runs measured in turn."""
    generator = torch.Generator().manual_seed(0)
    clients = [(torch.randn(50, *SHAPES[name], generator=generator), torch.arange(50) % 10) for _ in range(lanes)]
    setup = Setup.of(rounds=1, batch_size=BATCHES[name], steps=fg.Constant(1))
    workload = setup.workload(VectorModel(fg.models.build(name), device), fg.Federation.from_arrays(clients))
    engines = {kind: LanesEngine(workload) for kind in OPTIMIZERS}
    x, best = workload.model.initial(), dict.fromkeys(OPTIMIZERS, float("inf"))
    correction = torch.zeros((lanes, len(x)), device=x.device)
    for repeat in range(4):
        for kind, local in OPTIMIZERS.items():
            plan = Plan.of(np.full(lanes, steps), 1e-4, correction=correction, local=local)
            begun = time.perf_counter()
            engines[kind].run(plan, x, np.arange(lanes), 0)
            if x.is_cuda:
                torch.cuda.synchronize()
            if repeat:
                best[kind] = min(best[kind], time.perf_counter() - begun)
    return {kind: 1e6 * seconds / (lanes * steps) for kind, seconds in best.items()}


def table(times):
    """Return the table of docs/performance.md: the time of a client-step and its ratio to plain steps."""
    head = "".join(f" {TITLES[name]} | |" for name in times)
    lines = [f"| local step |{head}", "|---|" + "---:|---:|" * len(times)]
    for kind in OPTIMIZERS:
        cells = [f"{of[kind]:.1f} us | {of[kind] / of['plain SGD']:.2f}" for of in times.values()]
        lines.append(f"| {kind} | {' | '.join(cells)} |")
    return "\n".join(lines)


def main():
    """Check and time."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--models", nargs="*", default=list(SHAPES), choices=list(SHAPES))
    parser.add_argument("--lanes", type=int, default=20)
    parser.add_argument("--steps", type=int)
    chosen = parser.parse_args()
    on_gpu = chosen.device.startswith("cuda")
    steps = chosen.steps or (50 if on_gpu else 5)
    worst = check(chosen.device)
    with products("tf32" if on_gpu else "float32"):
        times = {name: speed(name, chosen.device, chosen.lanes, steps) for name in chosen.models}
    threads = "" if on_gpu else f", {torch.get_num_threads()} threads"
    print(f"\n{chosen.device}{threads}, {chosen.lanes} lanes, the fastest of three runs of {steps} steps\n")
    print(table(times))
    return 1 if worst > 1e-10 else 0


if __name__ == "__main__":
    sys.exit(main())
