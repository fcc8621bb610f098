"""Every algorithm under step asynchronism, each at its best of a small grid: rounds, bytes and simulated time.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/rivals.py a9a --out runs/rivals.jsonl --workers 2
    PYTHONPATH=src python benchmarks/rivals.py --show runs/rivals.jsonl                # the tables in Markdown

The fleet has devices of speed 1, 1/4 and 1/16 in equal numbers. In a round a device makes as many steps as fit
into the time of K steps of the fastest, K, K / 4 and K / 16. HeteroFL spends the same time in another way: all
devices make K steps, in sub-networks of width 1, 1/2 and 1/4. The grid is chosen on seed 100; results are those of
the seeds 0, 1 and 2. FedLin's step size is multiplied by the mean number of steps, because it is divided among
them. Records that exist are not computed again. Needs torch and numpy alone.
"""

import argparse
import itertools
import json
import multiprocessing
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

import fedagrac as fg
from fedagrac.paper.intervals import Interval

CHOOSING, SEEDS = 100, (0, 1, 2)
SPEEDS, WIDTHS = (1.0, 1 / 4, 1 / 16), (1.0, 0.5, 0.25)
TOGETHER = {"a9a": 24, "fashion": 24, "cifar10": 6}
"""How many runs step side by side."""
FEW = ("fedavg", "fednova", "scaffold", "fedagrac", "fedavgm", "fedcm", "fedacg", "heterofl")
"""The algorithms for which there was time with ResNet-18, each with the first of its settings."""


@dataclass(frozen=True)
class Problem:
    """A data set, a model and a target.

    Attributes:
        data, clients, participation: the federation.
        model: the name and the sizes of the model.
        batch: samples per step.
        K: the steps of the fastest device.
        rounds, eval_every: the rounds, and how often the model is evaluated.
        lrs: the grid of step sizes.
        metric, target: the settings that reach this accuracy, or test loss, first are chosen; if none does, those
            with the best value.
        shown: the accuracy or test loss in the table.
        step_time: seconds of a step on the fastest device.
    """

    data: str
    clients: int
    participation: int | None
    model: tuple
    batch: int
    K: int
    rounds: int
    eval_every: int
    lrs: tuple
    metric: str
    target: float
    shown: float
    step_time: float

    @property
    def counts(self):
        """K_i by speed."""
        return [max(1, round(self.K * speed)) for speed in SPEEDS]

    def setting(self, name, seed):
        """Return the module, the federation and the options of a run."""
        fed = fg.Federation.load(self.data, clients=self.clients, partition=fg.Dirichlet(0.3), seed=seed)
        torch.manual_seed(seed)
        module = fg.models.build(self.model[0], **self.model[1])
        speeds = [SPEEDS[i % 3] for i in range(self.clients)]
        devices = [
            fg.DeviceProfile("1", step_time=self.step_time / s, bandwidth_up=1e6, bandwidth_down=4e6)
            for s in speeds
        ]
        steps = fg.Constant(self.K)
        if name != "heterofl":
            steps = fg.Explicit([[self.counts[i % 3] for i in range(self.clients)]])
        options = {"steps": steps, "batch_size": self.batch, "clock": fg.Clock(devices), "seed": seed}
        options |= {"participation": self.participation, "eval_every": self.eval_every, "precision": "float32"}
        if torch.cuda.is_available():
            options |= {"precision": "tf32"}
        return module, fed, options


PROBLEMS = {
    "a9a": Problem(
        "a9a", 20, None, ("logistic", {"features": 123, "classes": 2}), 20, 80, 80, 1,
        (0.01, 0.03, 0.1, 0.3), "test_loss", 0.327, 0.327, 0.002,
    ),
    "fashion": Problem(
        "fashion-mnist", 20, None, ("cnn", {}), 25, 80, 40, 1, (0.01, 0.03, 0.1), "test_accuracy", 0.85, 0.8, 0.01,
    ),
    "cifar10": Problem(
        "cifar10", 100, 10, ("resnet18", {"groups": 8}), 25, 32, 80, 4,
        (0.03, 0.1), "test_accuracy", 0.5, 0.2, 0.05,
    ),
}  # fmt: skip

ADAM = (0.0003, 0.001, 0.003)
GRIDS = {
    "fedavg": [{}],
    "fedprox": [{"mu": 0.01}, {"mu": 0.1}],
    "fednova": [{}],
    "scaffold": [{"init": "zeros"}, {"init": "full"}],
    "fedlin": [{}],
    "fedagrac": [{"calibration": 1.0}, {"calibration": 0.3}],
    "fedagrac-avg": [{"calibration": 1.0}, {"calibration": 0.3}],
    "fedagrac-first": [{"calibration": 1.0}, {"calibration": 0.3}],
    "fedagrac-reverse": [{"calibration": 1.0}, {"calibration": 0.3}],
    "fedavgm": [{"momentum": 0.5}, {"momentum": 0.9, "server_lr": 0.3}],
    "fedadam": [{"server_lr": 0.01}, {"server_lr": 0.03}],
    "fedyogi": [{"server_lr": 0.01}, {"server_lr": 0.03}],
    "fedadagrad": [{"server_lr": 0.03}, {"server_lr": 0.1}],
    "feddyn": [{"alpha": 0.01}, {"alpha": 0.1}],
    "fedcm": [{"alpha": 0.1}, {"alpha": 0.5}],
    "fedacg": [{"momentum": 0.85}, {"momentum": 0.5}],
    "mimelite": [{"momentum": 0.9}, {"momentum": 0.5}],
    "mime": [{"momentum": 0.9}, {"momentum": 0.5}],
    "fedvarp": [{}],
    "mifa": [{}],
    "fedexp": [{}],
    "scaffnew": [{}],
    "fedsam": [{"rho": 0.05}],
    "fedlesam": [{"rho": 0.05}],
    "heterofl": [{"levels": WIDTHS}],
    "diloco": [{"merge": merge} for merge in ("weight", "work", "calibrated")],
}
ONE_LAYER = ("heterofl",)
"""Algorithms that need hidden layers."""


def grid(problem, names):
    """Yield the name and the settings of every run of the grid."""
    for name in names:
        if name in ONE_LAYER and problem.model[0] == "logistic":
            continue
        lrs = ADAM if name == "diloco" else problem.lrs
        few = problem.model[0] == "resnet18"
        for lr, options in itertools.product(lrs, GRIDS[name][:1] if few else GRIDS[name]):
            more = {"p": 1 / np.mean(problem.counts)} if name == "scaffnew" else {}
            yield name, {"lr": lr, **options, **more}


def built(problem, name, options):
    """Return the algorithm. FedLin's step size is that of a round."""
    lr = options["lr"] * (float(np.mean(problem.counts)) if name == "fedlin" else 1.0)
    return fg.algorithm(name, **{**options, "lr": lr})


def key(record):
    """Return what names a run."""
    return record["problem"], record["name"], json.dumps(record["options"], sort_keys=True), record["seed"]


def together(runs):
    """Run several runs of one problem and seed side by side. Return their records."""
    torch.set_num_threads(1)
    problem_name, name, _, seed = runs[0]
    problem = PROBLEMS[problem_name]
    module, fed, options = problem.setting(name, seed)
    begun = time.perf_counter()
    algorithms = [built(problem, name, settings) for _, name, settings, _ in runs]
    try:
        results = fg.simulate_many(module, fed, algorithms, problem.rounds, **options)
    except Exception as error:
        print(f"{', '.join(name for _, name, _, _ in runs)}: {error}", flush=True)
        return [] if len(runs) == 1 else [record for run in runs for record in together([run])]
    seconds = (time.perf_counter() - begun) / len(runs)
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    records = []
    for (_, name, settings, _), result in zip(runs, results, strict=True):
        rounds = [r for r in result.history if r.test_loss is not None]
        columns = {
            c: [r[c] for r in rounds] for c in ("round", "test_accuracy", "test_loss", "bytes_total", "sim_time")
        }
        facts = {"problem": problem_name, "name": name, "options": settings, "seed": seed, "status": result.status}
        records.append({**facts, "seconds": round(seconds, 2), "device": device, **columns})
    return records


def reached(record, metric, target):
    """Return the first evaluation at the target, or None."""
    values = record[metric]
    hits = [i for i, v in enumerate(values) if (v <= target if metric == "test_loss" else v >= target)]
    return hits[0] if hits else None


def rank(record, problem):
    """Return how good a run is: evaluations to the target, then the best value."""
    first = reached(record, problem.metric, problem.target)
    sign = 1 if problem.metric == "test_loss" else -1
    values = [sign * v for v in record[problem.metric] if np.isfinite(v)]
    return (np.inf if first is None else first, min(values, default=np.inf))


def chosen(records, problem_name):
    """Return the best settings of every algorithm on the choosing seed."""
    problem, best = PROBLEMS[problem_name], {}
    for record in records:
        if record["problem"] == problem_name and record["seed"] == CHOOSING:
            name = record["name"]
            if name not in best or rank(record, problem) < rank(best[name], problem):
                best[name] = record
    return {name: record["options"] for name, record in best.items()}


def batches(todo):
    """Return runs in groups that step side by side: of one seed, and of one step schedule."""
    groups = {}
    for run in todo:
        groups.setdefault((run[3], run[1] == "heterofl"), []).append(run)
    width = TOGETHER[todo[0][0]] if todo else 1
    return [some[i : i + width] for some in groups.values() for i in range(0, len(some), width)]


def measure(args):
    """Run the grid on the choosing seed, then the best settings on the other seeds."""
    end, problem = time.monotonic() + args.seconds, PROBLEMS[args.problem]
    out = Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    records = read(out)
    for stage in ("grid", "seeds"):
        names = args.only or (FEW if args.problem == "cifar10" else tuple(GRIDS))
        wanted = [(n, o, CHOOSING) for n, o in grid(problem, names)]
        if stage == "seeds":
            wanted = [(n, o, s) for s in SEEDS for n, o in chosen(records, args.problem).items() if n in names]
        have = {key(r) for r in records}
        todo = [
            (args.problem, n, o, s)
            for n, o, s in wanted
            if (args.problem, n, json.dumps(o, sort_keys=True), s) not in have
        ]
        with multiprocessing.get_context("spawn").Pool(args.workers) if args.workers > 1 else Here() as pool:
            for found in pool.imap_unordered(together, batches(todo)):
                records += found
                with out.open("a") as file:
                    file.writelines(json.dumps(record) + "\n" for record in found)
                print(f"{stage}: {len(found)} runs, {sum(r['seconds'] for r in found):.1f} s", flush=True)
                if time.monotonic() > end:
                    print("time is over", flush=True)
                    pool.terminate()
                    return


class Here:
    """A pool of this process alone, which a GPU needs."""

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None

    def imap_unordered(self, function, items):
        return map(function, items)

    def terminate(self):
        """End nothing."""


def read(path):
    """Return the records of a file."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def tables(records):
    """Return a table in Markdown for every problem: of the three seeds, or else of the grid."""
    texts = {}
    for problem_name, problem in PROBLEMS.items():
        own = [r for r in records if r["problem"] == problem_name]
        rows = []
        for name, options in chosen(own, problem_name).items():
            same = json.loads(json.dumps(options))
            runs = [r for r in own if r["name"] == name and r["seed"] in SEEDS and r["options"] == same]
            if runs:
                rows.append(row(problem, name, options, runs))
        last = problem.metric.replace("_", " ")
        goal = f"{last} {problem.shown:g}"
        head = ["algorithm", "setting", f"rounds to {goal}", "MB", "simulated s", f"last {last}"]
        if not rows:
            head = ["algorithm", "setting", f"last {last} of one seed"]
            rows = [
                (r["name"], [f"`{r['name']}`", setting(r["options"]), spread([last_value(problem, r)])])
                for r in own
            ]
        lines = [cells for _, cells in sorted(rows, key=lambda pair: pair[0])]
        texts[problem_name] = "\n".join(
            f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines)
        )
    return texts


def row(problem, name, options, runs):
    """Return how to sort an algorithm, and its cells."""
    firsts = [reached(r, problem.metric, problem.shown) for r in runs]
    hits = [(r, i) for r, i in zip(runs, firsts, strict=True) if i is not None]
    missed = len(runs) - len(hits)
    cells = []
    for column, scale in (("round", 1), ("bytes_total", 1e6), ("sim_time", 1)):
        values = [r[column][i] / scale for r, i in hits]
        cells.append(f"{len(hits)} of {len(runs)} seeds" if missed else spread(values))
    last = [last_value(problem, r) for r in runs]
    sign = 1 if problem.metric == "test_loss" else -1
    order = sign * np.mean(last) if missed else np.mean([r["sim_time"][i] for r, i in hits])
    return (missed, order), [f"`{name}`", setting(options), *cells, spread(last)]


def last_value(problem, record):
    """Return the mean of the last three evaluations; accuracies in percent."""
    return float(np.mean(record[problem.metric][-3:])) * (1 if problem.metric == "test_loss" else 100)


def setting(options):
    """Return the settings of a run as text."""
    shown = {key: value for key, value in options.items() if key != "levels"}
    return ", ".join(
        f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}" for key, value in shown.items()
    )


def spread(values):
    """Return a mean with its 95 % interval."""
    interval = Interval.of(values) if len(values) > 1 else None
    digits = 3 if abs(np.mean(values)) < 10 else 1
    if interval is None:
        return f"{np.mean(values):.{digits}f}"
    return f"{np.mean(values):.{digits}f} ± {(interval.high - interval.low) / 2:.{digits}f}"


def main():
    """Measure one problem, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", choices=list(PROBLEMS))
    parser.add_argument("--out", default="runs/rivals.jsonl")
    parser.add_argument("--only", nargs="*", choices=list(GRIDS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--show", nargs="*")
    args = parser.parse_args()
    if args.show:
        for name, table in tables([record for path in args.show for record in read(Path(path))]).items():
            print(f"{name}\n\n{table}\n")
    else:
        measure(args)


if __name__ == "__main__":
    main()
