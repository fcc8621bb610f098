"""Why Table 1's figures differ: logistic regression on raw bytes, in [0, 1], normalised; and stricter splits.

python benchmarks/table1_inputs.py        (Fashion-MNIST; FedAvg, eta 0.001, 10 clients, batch 25)
"""

import argparse

import numpy as np

import fedagrac as fg
from fedagrac.data.partitions import IID

INPUTS = {
    "normalised": lambda a: ((a / 255 - 0.286) / 0.353).astype(np.float32),
    "in [0, 1]": lambda a: (a / 255).astype(np.float32),
    "raw bytes": lambda a: a.astype(np.float32),
}
SPLITS = {
    "iid": IID(),
    "Dirichlet(0.3)": fg.Dirichlet(0.3),
    "5 classes": fg.Shards(5),
    "2 classes": fg.Shards(2),
    "1 class": fg.Shards(1),
}
STEPS = {"K = 100": (fg.Constant(100), 120), "K_i = 100 + 150 i": (fg.Linear(100, 150), 25)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", default=",".join(INPUTS))
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--data-dir")
    o = parser.parse_args()
    pool = fg.Federation.load("fashion-mnist", clients=10, data_dir=o.data_dir)
    X, y = pool.inputs.flatten(1).numpy(), pool.targets.numpy()
    X_test, y_test = pool.test[0].flatten(1).numpy(), pool.test[1].numpy()
    for kind in o.inputs.split(","):
        for split in o.splits.split(","):
            shares = SPLITS[split].split(y, 10, seed=0)
            clients = [(INPUTS[kind](X[own]), y[own]) for own in shares]
            fed = fg.Federation.from_arrays(clients, test=(INPUTS[kind](X_test), y_test))
            for name, (steps, rounds) in STEPS.items():
                result = fg.simulate(
                    fg.models.build("logistic", features=784, classes=10), fed, fg.FedAvg(lr=0.001), rounds=rounds,
                    steps=steps, batch_size=25, stop=fg.Stop(accuracy=0.8), engine="lanes",
                )  # fmt: skip
                reached = (
                    result.rounds_to(0.8) or f"not in {rounds}, best {result.history.best('test_accuracy'):.3f}"
                )
                print(f"{kind}, {split}, {name}: 80 % in round {reached}", flush=True)


if __name__ == "__main__":
    main()
