"""What the precision of products does to accuracy and time: the same runs in float32, TF32 and bf16.

PYTHONPATH=src python benchmarks/precision.py alexnet --device cuda --seeds 3 --budget 1700 --out precision.jsonl
PYTHONPATH=src python benchmarks/precision.py logistic --device cpu --seeds 8

It needs torch and numpy only. Every run ends with one line of JSON, on the screen and in the file; a second call
with the same file skips what is there. Seeds come one after another, each in all precisions, so a budget that ends
early leaves whole comparisons. The last lines compare each precision with float32, seed by seed.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import fedagrac as fg
from fedagrac.core.streams import first_weights
from fedagrac.engines import keep_freed_memory
from fedagrac.paper.intervals import Interval

PIXELS = {"features": 784, "classes": 10}
CASES = {  # data, clients, partition, model, steps, batch, lr, rounds, target
    "logistic": ("fashion-mnist", 10, fg.Dirichlet(0.3), PIXELS, 10, 25, 0.005, 60, 0.75),
    "cnn": ("fashion-mnist", 10, fg.Dirichlet(0.3), {}, fg.Gaussian(20, 100), 25, 0.03, 15, 0.60),
    "alexnet": ("cifar10", 20, fg.Shards(5), {}, fg.Gaussian(500, 10_000), 25, 0.03, 110, 0.70),
}
SHARED = ("case", "seed", "precision")


class Budget(fg.Callback):
    """Ends a run when the time is over."""

    def __init__(self, until):
        self.until = until

    def on_round(self, run, record):
        if time.monotonic() > self.until:
            run.stop("the budget is spent")


def one(case, seed, precision, chosen, until):
    """Run FedaGrac once, AlexNet to its target; return the line of the run."""
    data, clients, partition, sizes, steps, batch, lr, rounds, target = CASES[case]
    fed = fg.Federation.load(data, clients=clients, partition=partition, seed=seed, data_dir=chosen.data_dir)
    with first_weights(seed):
        module = fg.models.build(case, **sizes)
    begun, spent = time.monotonic(), time.process_time()
    result = fg.simulate(
        module, fed, fg.FedaGrac(lr=lr), rounds=chosen.rounds or rounds, steps=steps, batch_size=batch, seed=seed,
        device=chosen.device, precision=precision, engine="lanes", compile=chosen.device != "cpu",
        stop=fg.Stop(accuracy=target) if case == "alexnet" else None, callbacks=[Budget(until)],
    )  # fmt: skip
    last = [record["test_accuracy"] for record in result.history[-5:]]
    walls = result.history.column("wall_time")
    return {
        "case": case, "seed": seed, "precision": precision, "status": result.status, "rounds": len(result.history),
        "rounds_to": result.rounds_to(accuracy=target), "target": target, "accuracy": sum(last) / len(last),
        "test_loss": result.history[-1]["test_loss"], "seconds": round(time.monotonic() - begun, 1),
        "cpu_seconds": round(time.process_time() - spent, 1),
        "seconds_a_round": round((walls[-1] - walls[0]) / max(1, len(walls) - 1), 4),
        "device": torch.cuda.get_device_name() if chosen.device.startswith("cuda") else "cpu",
        "torch": torch.__version__,
    }  # fmt: skip


def compared(lines, case):
    """Print each precision's difference to float32 over the seeds that have both."""
    runs = {(line["seed"], line["precision"]): line for line in lines if line["case"] == case}
    for precision in dict.fromkeys(p for _, p in runs if p != "float32"):
        pairs = [
            (runs[seed, p], runs[seed, "float32"])
            for seed, p in runs
            if p == precision and (seed, "float32") in runs
        ]
        for name in ("accuracy", "rounds_to", "seconds_a_round", "cpu_seconds"):
            known = [(a[name], b[name]) for a, b in pairs if None not in (a[name], b[name])]
            if known:
                difference = Interval.of([a - b for a, b in known])
                print(f"{case} {name}: {precision} - float32 = {difference}, {len(known)} seeds", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("case", choices=CASES)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precisions", help="separated by commas; default: all that the device has")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--budget", type=float, default=1e9, help="seconds in all")
    parser.add_argument("--data-dir")
    parser.add_argument("--out", type=Path)
    chosen = parser.parse_args()
    until = time.monotonic() + chosen.budget
    if chosen.device == "cpu":
        keep_freed_memory()
    names = (chosen.precisions or ("float32,bf16" if chosen.device == "cpu" else "float32,tf32,bf16")).split(",")
    lines = []
    if chosen.out and chosen.out.exists():
        lines = [json.loads(line) for line in chosen.out.read_text().splitlines()]
    for seed in range(chosen.seeds):
        for precision in names:
            if any([line[key] for key in SHARED] == [chosen.case, seed, precision] for line in lines):
                continue
            if time.monotonic() > until:
                continue
            line = one(chosen.case, seed, precision, chosen, until)
            print(json.dumps(line), flush=True)
            if time.monotonic() > until:
                continue  # it may have been cut short
            lines.append(line)
            if chosen.out:
                with chosen.out.open("a") as file:
                    file.write(json.dumps(line) + "\n")
    compared(lines, chosen.case)


if __name__ == "__main__":
    main()
