"""What a grid costs side by side, against one run after another: FedaGrac at 21 settings.

python benchmarks/grid.py [--device cuda]        (random data with the shapes of a9a and Fashion-MNIST)
"""

import argparse
import time

import fedagrac as fg
from fedagrac.engines import keep_freed_memory
from fedagrac.experiments.bench import CASES


def seconds(make):
    """Return how long the second of two calls takes: the first one prepares."""
    make()
    begun = time.perf_counter()
    make()
    return time.perf_counter() - begun


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cpu")
    o = parser.parse_args()
    if o.device == "cpu":
        keep_freed_memory()
    grid = [
        fg.FedaGrac(lr=lr, calibration=c) for lr in (0.01, 0.005, 0.001) for c in (0, 0.1, 0.3, 0.5, 0.7, 0.9, 1)
    ]
    for name, steps in (("lr-a9a-paper", fg.Gaussian(50, 100)), ("cnn", fg.Constant(5))):
        case = CASES[name]
        model, fed = case.model(), case.federation()
        options = {
            "rounds": 2, "steps": steps, "batch_size": case.batch, "device": o.device, "engine": "lanes",
            "compile": False, "eval_every": 2,
        }  # fmt: skip
        together = seconds(lambda: fg.simulate_many(model, fed, grid, **options))  # noqa: B023
        alone = seconds(lambda: [fg.simulate(model, fed, a, **options) for a in grid])  # noqa: B023
        client_steps = 2 * len(grid) * fed.num_clients * steps.counts(0, fed.num_clients, 0).mean()
        each = [f"{t:.2f} s ({t / client_steps * 1e6:.1f} us per client-step)" for t in (together, alone)]
        print(
            f"{case.about}, {len(grid)} settings: side by side {each[0]}, one after another {each[1]}", flush=True
        )


if __name__ == "__main__":
    main()
