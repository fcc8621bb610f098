"""Attackers among the clients: what the mean, the guard and the robust rules make of them.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/attack_study.py --out runs/attack.json
    PYTHONPATH=src python benchmarks/attack_study.py --show runs/attack.json          # the tables again

Logistic regression on a fifth of Fashion-MNIST at 14 x 14 pixels, 20 clients with 3 to 22 local steps, IID and
Dirichlet(0.3). Some clients attack: they send the reverse of their update, five times as long ("flip"); ten times
their update ("scale"); or they train on wrong labels ("labels"). What they send besides the model changes
accordingly: first gradients, and the gradients at the start. Prints the test accuracy after the last round. Needs
torch and numpy alone.
"""

import argparse
import json
import logging
import time
from pathlib import Path

import numpy as np
import torch

import fedagrac as fg
from fedagrac.engines import LanesEngine

CLIENTS = 20
STRIDE = 5
FACTORS = {"none": 1.0, "flip": -5.0, "scale": 10.0, "labels": 1.0}
PARTITIONS = {"IID": fg.IID(), "Dirichlet(0.3)": fg.Dirichlet(0.3)}
ALGORITHMS = {
    "FedAvg": fg.FedAvg(lr=0.1),
    "FedaGrac": fg.FedaGrac(lr=0.1, first_steps=5),  # fewer than an epoch, which is longer than any K_i
}
DEFENCES = {
    "mean": {},
    "guard": {"guard": fg.Guard(factor=10.0)},
    "median": {"aggregate": fg.Median()},
    "trimmed": {"aggregate": fg.TrimmedMean(share=0.3)},
    "bounded": {"aggregate": fg.NormBounded(factor=1.0)},
}


def attacking(factor, attackers):
    """Return an engine in which some clients multiply all that they send by a factor."""

    class Attacking(LanesEngine):
        def run(self, plan, x, clients, round):
            result = super().run(plan, x, clients, round)
            assert result.total is None  # gradient sums would have to change, too
            rows = torch.from_numpy(np.flatnonzero(np.isin(clients, attackers)))
            start = x if x.ndim == 1 else x[rows]
            result.models[rows] = start + factor * (result.models[rows] - start)
            if result.first is not None:
                result.first[rows] *= factor
            return result

        def gradients(self, x, clients, round, batch="full", buffers=None):
            gradients = super().gradients(x, clients, round, batch, buffers)
            gradients[torch.from_numpy(np.flatnonzero(np.isin(clients, attackers)))] *= factor
            return gradients

    return Attacking


def federation(whole, wrong):
    """Return every fifth sample of each client; those of some clients have wrong labels, 9 - y."""
    arrays = []
    for client in range(CLIENTS):
        samples = whole.samples_of(client)[::STRIDE]
        inputs, targets = halved(whole.inputs[samples]), whole.targets[samples]
        arrays.append((inputs, 9 - targets if client in wrong else targets))
    inputs, targets = whole.test
    return fg.Federation.from_arrays(arrays, test=(halved(inputs), targets))


def halved(pictures):
    """Return pictures of half the width and height, with a mean of about 0 and a deviation of about 1."""
    return torch.nn.functional.avg_pool2d((torch.as_tensor(pictures) / 255 - 0.286) / 0.353, 2)


def settings(seeds):
    """Yield every combination of partition, attack, share of attackers and defence."""
    for seed in range(seeds):
        for partition in PARTITIONS:
            for attack in FACTORS:
                for share in (0.0,) if attack == "none" else (0.1, 0.2, 0.3):
                    for defence in DEFENCES:
                        yield seed, partition, attack, share, defence


def measure(args):
    """Run every combination that the output does not hold yet. Return one record for each run."""
    records, wholes = json.loads(args.out.read_text()) if args.out.exists() else [], {}
    done = {(r["seed"], r["partition"], r["attack"], r["share"], r["defence"]) for r in records}
    for seed, partition, attack, share, defence in settings(args.seeds):
        if (seed, partition, attack, share, defence) in done:
            continue
        if (partition, seed) not in wholes:
            wholes = {  # only the last one is kept
                (partition, seed): fg.Federation.load(
                    "fashion-mnist", clients=CLIENTS, partition=PARTITIONS[partition], seed=seed
                )
            }
        attackers = np.random.default_rng(seed).permutation(CLIENTS)[: round(share * CLIENTS)]
        fed = federation(wholes[partition, seed], attackers if attack == "labels" else ())
        torch.manual_seed(seed)
        model = fg.models.build("logistic", features=196, classes=10)
        begun = time.process_time()
        results = fg.simulate_many(
            model, fed, list(ALGORITHMS.values()), args.rounds, steps=fg.Linear(3, 1), batch_size=20, seed=seed,
            engine=attacking(FACTORS[attack], attackers), eval_every=args.rounds, device="cpu",
            **DEFENCES[defence],
        )  # fmt: skip
        for name, result in zip(ALGORITHMS, results, strict=True):
            accuracy = result.history[-1]["test_accuracy"] if result.status == "finished" else None
            dropped = sum(len(record.get("dropped") or []) for record in result.history)
            records.append(
                {
                    "seed": seed, "partition": partition, "attack": attack, "share": share, "defence": defence,
                    "algorithm": name, "accuracy": accuracy, "status": result.status, "dropped": dropped,
                    "weight": float(fed.weights[attackers].sum()), "cpu_s": round(time.process_time() - begun, 2),
                }
            )  # fmt: skip
        shown = [result.history[-1]["test_accuracy"] for result in results]
        print(seed, partition, attack, share, defence, *shown, records[-1]["cpu_s"], flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(records))
    return records


def cell(accuracies):
    """Return the mean and the standard deviation over seeds in percent; "diverged" if a run diverged."""
    if any(accuracy is None for accuracy in accuracies):
        return "diverged"
    values = 100 * np.array(accuracies)
    spread = f" ± {values.std(ddof=1):.1f}" if len(values) > 1 else ""
    return f"{values.mean():.1f}{spread}"


def show(records):
    """Print one table for each partition and algorithm."""
    for partition in PARTITIONS:
        for algorithm in ALGORITHMS:
            print(f"\n{partition}, {algorithm}\n\n| attack | " + " | ".join(DEFENCES) + " |")
            print("|---|" + "---:|" * len(DEFENCES))
            rows = {(r["attack"], r["share"]): None for r in records}
            for attack, share in rows:
                cells = [
                    cell([
                        r["accuracy"] for r in records
                        if (r["partition"], r["algorithm"], r["attack"], r["share"], r["defence"])
                        == (partition, algorithm, attack, share, defence)
                    ])
                    for defence in DEFENCES
                ]  # fmt: skip
                print(f"| {attack}{f' {share:.0%}' if share else ''} | " + " | ".join(cells) + " |")


def main():
    """Run the study, or show its tables."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("runs/attack.json"))
    parser.add_argument("--show", type=Path, default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("fedagrac").setLevel(logging.ERROR)  # the guard logs every drop
    records = measure(args) if args.show is None else json.loads(args.show.read_text())
    show(records)
    print(f"\n{sum(r['cpu_s'] for r in records if r['algorithm'] == 'FedaGrac'):.0f} s of CPU time")


if __name__ == "__main__":
    main()
