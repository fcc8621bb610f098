"""FedAvg, SCAFFOLD and FedaGrac on 100 roles of Shakespeare with unequal texts and unequal steps, role by role.

    PYTHONPATH=src python benchmarks/shakespeare_study.py --model char-gpt --out runs/shakespeare.json

Tries a few step sizes with FedAvg on a short run and takes the best for all algorithms. Writes the curves and the
accuracy of every role as JSON, and prints a summary. Needs torch and numpy alone.
"""

import argparse
import json
import time
from pathlib import Path

import torch

import fedagrac as fg

ALGORITHMS = {
    "FedAvg": lambda lr: fg.FedAvg(lr=lr),
    "SCAFFOLD": lambda lr: fg.Scaffold(lr=lr, init="full"),
    "FedaGrac": lambda lr: fg.FedaGrac(lr=lr, first_steps=5),
}


def options(args):
    """Return the options that all runs share."""
    return {
        "steps": fg.Gaussian(mean=args.steps, variance=args.steps**2 // 4, mode="fixed"),
        "batch_size": 16,
        "seed": args.seed,
        "device": args.device,
        "precision": "tf32" if torch.cuda.is_available() and args.device != "cpu" else "float32",
    }


def main():
    """Run the study."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", default="char-gpt")
    parser.add_argument("--roles", type=int, default=100)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--lrs", type=float, nargs="+", default=[0.1, 0.3, 1.0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--data-dir", default=None)
    parser.add_argument("--out", type=Path, default=Path("runs/shakespeare.json"))
    args = parser.parse_args()
    fed = fg.Federation.load(
        "shakespeare", clients=args.roles, seed=0, data_dir=args.data_dir, stride=2, test_stride=15
    )
    print(fed, flush=True)
    torch.manual_seed(args.seed)
    model = fg.models.build(args.model, vocabulary=80)
    losses = {}
    for lr in args.lrs:
        probe = fg.simulate(model, fed, fg.FedAvg(lr=lr), rounds=8, eval_every=8, **options(args))
        losses[lr] = probe.history.last("test_loss") if probe.status == "finished" else float("inf")
        print(f"lr {lr:g}: test loss {losses[lr]}", flush=True)
    lr = min(losses, key=lambda rate: losses[rate] if losses[rate] is not None else float("inf"))
    runs = {}
    for name, make in ALGORITHMS.items():
        begun = time.perf_counter()
        result = fg.simulate(model, fed, make(lr), rounds=args.rounds, eval_every=5, **options(args))
        seconds = time.perf_counter() - begun
        evaluated = [record for record in result.history if record["test_accuracy"] is not None]
        runs[name] = {
            "status": result.status,
            "seconds": round(seconds, 1),
            "rounds": [record["round"] for record in evaluated],
            "accuracy": [round(record["test_accuracy"], 4) for record in evaluated],
            "loss": [round(record["test_loss"], 4) for record in evaluated],
            "summary": None if result.per_client is None else result.per_client.summary(),
            "per_client": None if result.per_client is None else result.per_client.columns(),
        }
        print(name, seconds, runs[name]["accuracy"][-1:], runs[name]["summary"], flush=True)
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps({"lr": lr, "tried": losses, "roles": args.roles, "runs": runs}))


if __name__ == "__main__":
    main()
