"""Check that every kind of module gives the numbers of the CPU on a GPU, where lanes are recorded as graphs.

    PYTHONPATH=src:tests python benchmarks/gpu_modules.py

Prints, for each kind of tests/module_kinds.py and each way to treat buffers, how far lanes on the GPU are from
serial on the CPU in float64, and what falls back. Exits with 1 if a difference exceeds 1e-10.
"""

import sys
import warnings

import torch

import fedagrac as fg
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


if __name__ == "__main__":
    sys.exit(check() > 1e-10)
