"""Compare readings of Table 1: how logistic regression depends on the scale of the inputs and on the split.

python benchmarks/table1_inputs.py        (Fashion-MNIST; FedAvg, 10 clients, batch 25)
"""

import argparse

import numpy as np

import fedagrac as fg

INPUTS = {
    "normalised": lambda a: ((a / 255 - 0.286) / 0.353).astype(np.float32),
    "in [0, 1]": lambda a: (a / 255).astype(np.float32),
    "raw bytes": lambda a: a.astype(np.float32),
}
SPLITS = {
    "iid": fg.IID(),
    "Dirichlet(0.1)": fg.Dirichlet(0.1, balance=True, least=10),
    "Dirichlet(0.3)": fg.Dirichlet(0.3),
    "5 classes": fg.Shards(5),
    "2 classes": fg.Shards(2),
    "1 class": fg.Shards(1),
}
STEPS = {"K = 100": (fg.Constant(100), 120), "K_i = 250 to 1600": (fg.Linear(250, 150), 25)}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--inputs", default=",".join(INPUTS))
    parser.add_argument("--splits", default=",".join(SPLITS))
    parser.add_argument("--lr", type=float, default=0.001)
    parser.add_argument("--seed", type=int, default=1234, help="of the partition")
    parser.add_argument("--data-dir")
    options = parser.parse_args()
    pool = fg.Federation.load("fashion-mnist", clients=10, data_dir=options.data_dir)
    X, y = pool.inputs.flatten(1).numpy(), pool.targets.numpy()
    X_test, y_test = pool.test[0].flatten(1).numpy(), pool.test[1].numpy()
    for scaling in options.inputs.split(","):
        for split in options.splits.split(","):
            shares = SPLITS[split].split(y, 10, seed=options.seed)
            clients = [(INPUTS[scaling](X[shares[i]]), y[shares[i]]) for i in range(10)]
            fed = fg.Federation.from_arrays(clients, test=(INPUTS[scaling](X_test), y_test))
            for name, (steps, rounds) in STEPS.items():
                result = fg.simulate(
                    fg.models.build("logistic", features=784, classes=10), fed, fg.FedAvg(lr=options.lr),
                    rounds=rounds, steps=steps, batch_size=25, stop=fg.Stop(accuracy=0.8), engine="lanes",
                )  # fmt: skip
                best = result.history.best("test_accuracy")
                reached = result.rounds_to(0.8) or f"not in {rounds}, best {best:.3f}"
                print(f"{scaling}, {split}, {name}: 80 % in round {reached}", flush=True)


if __name__ == "__main__":
    main()
