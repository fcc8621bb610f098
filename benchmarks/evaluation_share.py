"""How much of a round is evaluation, in the paper's settings on real data.

python benchmarks/evaluation_share.py [--device cuda] [--precision tf32] [--only lr,cnn,alexnet]
"""

import argparse
import time

import torch

import fedagrac as fg
from fedagrac.engines import keep_freed_memory
from fedagrac.rounds import api as simulation

SETTINGS = {  # data, clients, model, steps, batch
    "lr, a9a, 20 x N(500, 10000)": ("a9a", 20, "logistic", fg.Gaussian(500, 10_000), 20),
    "cnn, Fashion-MNIST, 10 x K = 100": ("fashion-mnist", 10, "cnn", fg.Constant(100), 25),
    "cnn, Fashion-MNIST, K_i = 100 + 150 i": ("fashion-mnist", 10, "cnn", fg.Linear(100, 150), 25),
    "alexnet, CIFAR-10, 20 x N(500, 10000)": ("cifar10", 20, "alexnet", fg.Gaussian(500, 10_000), 25),
}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", default="lr,cnn")
    parser.add_argument("--data-dir")
    o = parser.parse_args()
    if o.device == "cpu":
        keep_freed_memory()
    spent = []
    real = simulation.evaluate

    def timed(*arguments):
        if o.device == "cuda":
            torch.cuda.synchronize()
        begun = time.perf_counter()
        found = real(*arguments)  # its last operation reads a number from the device
        spent.append(time.perf_counter() - begun)
        return found

    simulation.evaluate = timed
    for name, (data, clients, model, steps, batch) in SETTINGS.items():
        if name.split(",", maxsplit=1)[0] not in o.only.split(","):
            continue
        fed = fg.Federation.load(data, clients=clients, partition=fg.Dirichlet(0.3), data_dir=o.data_dir)
        spent.clear()
        result = fg.simulate(
            fg.models.build(model), fed, fg.FedaGrac(lr=0.01, calibration=0.05), rounds=4, steps=steps,
            batch_size=batch,
            engine="lanes", device=o.device, precision=o.precision,
        )  # fmt: skip
        times = result.history.column("wall_time")
        whole = (times[-1] - times[0]) / 3
        share = sum(spent[1:]) / 3 / whole
        print(f"{name}: {whole:.3f} s a round, evaluation {sum(spent[1:]) / 3:.3f} s, {share:.1%}", flush=True)


if __name__ == "__main__":
    main()
