"""Personal models beside one model for all, on a fleet of unequal devices: accuracy on each client's own test set.

    PYTHONPATH=src python benchmarks/personal.py --out benchmarks/records/personal.jsonl

Fashion-MNIST, a CNN with BatchNorm, 20 clients with Dirichlet(0.3) labels, of whose samples every fifth is for
testing. A third of the clients makes K = 80 steps a round, a third 20 and a third 5, as in rivals.py. Settings are
chosen on seed 100, by the mean over clients of the last accuracy, and measured on other seeds. Runs in the file
are not run again.
"""

import argparse
import itertools
import json
from pathlib import Path

import torch
from norms import network

import fedagrac as fg
from fedagrac.paper.intervals import Interval

GRIDS = {
    "fedavg": {"lr": [0.03, 0.1]},
    "fedper": {"lr": [0.03, 0.1], "personal": [["7"]]},
    "fedbn": {"lr": [0.03, 0.1]},
    "ditto": {"lr": [0.03, 0.1], "mu": [0.1, 1.0]},
}
CHOOSING, MEASURED, ROUNDS = 100, (0, 1, 2), 20
STEPS = [[80, 20, 5][i % 3] for i in range(20)]


def federation(seed):
    """Return the clients with their test sets."""
    fed = fg.Federation.load("fashion-mnist", clients=20, partition=fg.Dirichlet(0.3), seed=seed)
    clients, tests = [], []
    for client in range(20):
        samples = torch.from_numpy(fed.samples_of(client))
        X, y = fed.inputs[samples].float() / 127.5 - 1, fed.targets[samples]
        X = X.reshape(len(X), 1, 28, 28)
        test = torch.arange(len(X)) % 5 == 0
        clients.append((X[~test], y[~test]))
        tests.append((X[test], y[test]))
    return fg.Federation.from_arrays(clients, tests=tests)


def run(name, setting, seed):
    """Return the accuracies of one run: the mean over clients, the worst tenth, and the mean after fine-tuning."""
    torch.manual_seed(seed)
    algorithm = fg.algorithm(name, **setting)
    result = fg.simulate(
        network("batch"), federation(seed), algorithm, rounds=ROUNDS, steps=fg.Explicit([STEPS]), batch_size=25,
        seed=seed, eval_every=ROUNDS, buffers="local" if name == "fedbn" else "average",
    )  # fmt: skip
    accuracies = result.history.last("client_accuracy_mean"), result.history.last("client_accuracy_worst_decile")
    tuned = fg.fine_tune(result, lr=0.01, steps=100).accuracy.mean() if name == "fedavg" else None
    return {"mean": accuracies[0], "worst": accuracies[1], "tuned": None if tuned is None else float(tuned)}


def main():
    """Choose, measure and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    path = parser.parse_args().out
    lines = path.read_text().splitlines() if path.exists() else []
    known = {(r["name"], json.dumps(r["setting"]), r["seed"]): r for r in map(json.loads, lines)}

    def get(name, setting, seed):
        key = name, json.dumps(setting), seed
        if key not in known:
            known[key] = {"name": name, "setting": setting, "seed": seed, **run(name, setting, seed)}
            with path.open("a") as file:
                print(json.dumps(known[key]), file=file, flush=True)
        return known[key]

    print("| algorithm | setting | mean over clients | worst tenth |\n|---|---|---:|---:|")
    for name, grid in GRIDS.items():
        settings = [dict(zip(grid, values, strict=True)) for values in itertools.product(*grid.values())]
        chosen = max(settings, key=lambda setting: get(name, setting, CHOOSING)["mean"] or 0.0)
        rows = [get(name, chosen, seed) for seed in MEASURED]
        text = ", ".join(f"{key} {value}" for key, value in chosen.items())
        for title, field in ((name, "mean"), (f"{name}, fine-tuned", "tuned")):
            if rows[0][field] is not None:
                worst = percent(rows, "worst") if field == "mean" else ""
                print(f"| {title} | {text} | {percent(rows, field)} | {worst} |", flush=True)


def percent(rows, field):
    """Return the mean over seeds and half its 95 % interval."""
    interval = Interval.of([100 * row[field] for row in rows])
    return f"{interval.mean:.1f} ± {interval.half:.1f}"


if __name__ == "__main__":
    main()
