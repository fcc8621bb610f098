"""One round with 100,000 clients of 100 samples on Fashion-MNIST, a cohort of 50: memory and time to first step.

python benchmarks/many_clients.py [CLIENTS]
"""

import resource
import sys
import time

import torch

import fedagrac as fg


def memory():
    """Return the peak resident memory of this process, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


class FirstStep(torch.nn.Module):
    """Logistic regression that notes when the first training step of a run begins."""

    def __init__(self):
        super().__init__()
        self.inner = fg.models.build("logistic", features=784, classes=10)
        self.times = []

    def __deepcopy__(self, memo):
        return self  # the run must write into this object's list

    def forward(self, x):
        self.times.append(time.perf_counter())
        return self.inner(x)


def main():
    clients = int(sys.argv[1]) if len(sys.argv) > 1 else 100_000
    print(f"import: {memory():.0f} MB; torch {torch.__version__}, {torch.get_num_threads()} threads")
    begun = time.perf_counter()
    fed = fg.Federation.load("fashion-mnist", clients=clients, partition=fg.Resample(100), seed=0)
    print(f"load {clients} clients: {time.perf_counter() - begun:.2f} s, {memory():.0f} MB")
    for algorithm in (fg.FedAvg(lr=0.01), fg.FedaGrac(lr=0.01, init="zeros"), fg.FedaGrac(lr=0.01)):
        model = FirstStep()
        begun = time.perf_counter()
        result = fg.simulate(model, fed, algorithm, rounds=1, steps=fg.Gaussian(20, 100), participation=50)
        total = time.perf_counter() - begun
        # the first call of the module is the trial on two samples; the second is the first gradient of the run
        first = model.times[1] - begun
        init = getattr(algorithm, "init", "none")
        print(
            f"{algorithm.name} (init {init}): first gradient after {first:.2f} s, round done after {total:.2f} s, "
            f"{memory():.0f} MB, {result.history[0]['clients']} clients took part"
        )


if __name__ == "__main__":
    main()
