"""Every algorithm under step asynchronism, each at its best of a grid: rounds, bytes and simulated time.

    PYTHONPATH=src OMP_NUM_THREADS=1 python benchmarks/rivals.py a9a --out runs/rivals.jsonl --workers 2
    PYTHONPATH=src python benchmarks/rivals.py --show runs/rivals.jsonl                # the tables in Markdown
    PYTHONPATH=src python benchmarks/rivals.py --show runs/rivals.jsonl --against mime # other paired differences

The fleet has devices of speed 1, 1/4 and 1/16 in equal numbers. In a round a device makes as many steps as fit
into the time of K steps of the fastest, K, K / 4 and K / 16. HeteroFL spends the same time in another way: all
devices make K steps, in sub-networks of width 1, 1/2 and 1/4. FedLin's step size is multiplied by the mean number
of steps, because it is divided among them.

A run reaches the target at the first round where the mean over 5 rounds is at or beyond it, if the mean over the
last 10 rounds of the run is, too. Settings that reach it on all choosing seeds are ranked by the mean number of
rounds; the others come after them, by the mean over the last 10 rounds. Where the chosen step size is the smallest
or the largest that was tried, the grid grows by a factor of about 3 and the choice is made again. What is
chosen is measured on other seeds. Records that exist are not computed again. Needs torch and numpy alone.
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

SPEEDS, WIDTHS = (1.0, 1 / 4, 1 / 16), (1.0, 0.5, 0.25)
WINDOW, TAIL = 5, 10
"""Rounds whose mean must be at the target, and the rounds at the end of a run whose mean is its final value."""
LADDER = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)
"""Step sizes that a grid can grow to."""
FEW = ("fedavg", "fednova", "scaffold", "fedagrac", "fedavgm", "fedcm", "fedacg", "heterofl")
"""The algorithms for which there was time with ResNet-18, each with the first of its settings."""
APART = ("init", "gradient")
"""Options that change the time before or in a round: each value has a row of its own."""
LIMITS = {"calibration": 1.0}
"""Values that end a scale, so that a choice there is no edge of the grid."""


@dataclass(frozen=True)
class Problem:
    """A data set, a model and a target.

    Attributes:
        data, clients, participation: the federation.
        model: the name and the sizes of the model.
        batch: samples per step.
        K: the steps of the fastest device.
        rounds, eval_every: the rounds, and how often the model is evaluated.
        lrs: the grid of step sizes, before it grows.
        metric, target: the accuracy, or test loss, to reach.
        step_time: seconds of a step on the fastest device.
        choosing, seeds: the seeds on which settings are chosen, and those on which they are measured.
        wide: whether runs are cheap: more settings of the algorithms' own, and all of them where step sizes grow.
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
    step_time: float
    choosing: tuple
    seeds: tuple
    wide: bool = False

    @property
    def sign(self):
        """1 if less is better, -1 if more is."""
        return 1 if self.metric == "test_loss" else -1

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
        (0.01, 0.03, 0.1, 0.3), "test_loss", 0.327, 0.002, (100, 101), (0, 1, 2, 3, 4), True,
    ),
    "fashion": Problem(
        "fashion-mnist", 20, None, ("cnn", {}), 25, 80, 40, 1,
        (0.01, 0.03, 0.1), "test_accuracy", 0.8, 0.01, (100,), (0, 1, 2),
    ),
    "cifar10": Problem(
        "cifar10", 100, 10, ("resnet18", {"groups": 8}), 25, 32, 80, 4,
        (0.03, 0.1), "test_accuracy", 0.5, 0.05, (100,), (0, 1, 2),
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


def combined(**values):
    """Return all combinations of the values of several options."""
    return [dict(zip(values, some, strict=True)) for some in itertools.product(*values.values())]


SCALE = (1.0, 0.3, 0.1)
WIDE = {
    "fedprox": combined(mu=(0.001, 0.01, 0.1, 1.0)),
    "fedlin": combined(gradient=("full", "first")),
    "fedagrac": combined(calibration=SCALE, init=("full", "zeros")),
    "fedagrac-avg": combined(calibration=SCALE),
    "fedagrac-first": combined(calibration=SCALE),
    "fedagrac-reverse": combined(calibration=SCALE),
    "fedavgm": combined(momentum=(0.3, 0.5, 0.8, 0.9, 0.95), server_lr=(0.3, 1.0, 3.0, 10.0)),
    "fedadam": combined(server_lr=(0.003, 0.01, 0.03, 0.1, 0.3)),
    "fedyogi": combined(server_lr=(0.003, 0.01, 0.03, 0.1, 0.3)),
    "fedadagrad": combined(server_lr=(0.01, 0.03, 0.1, 0.3, 1.0)),
    "feddyn": combined(alpha=(0.003, 0.01, 0.03, 0.1, 0.3, 1.0)),
    "fedcm": combined(alpha=(0.03, 0.1, 0.3, 0.5, 0.8)),
    "fedacg": combined(momentum=(0.3, 0.5, 0.7, 0.85, 0.95)),
    "mimelite": combined(momentum=(0.1, 0.3, 0.5, 0.7, 0.9)),
    "mime": combined(momentum=(0.0, 0.1, 0.3, 0.5, 0.7, 0.9)),
    "fedsam": combined(rho=(0.01, 0.05, 0.2)),
    "fedlesam": combined(rho=(0.01, 0.05, 0.2)),
    "diloco": [*GRIDS["diloco"], {"merge": "calibrated", "init": "zeros"}],
}
"""Larger grids, where runs are cheap."""
ONE_LAYER = ("heterofl",)
"""Algorithms that need hidden layers."""


def own_settings(problem, name):
    """Return an algorithm's own settings, without step sizes."""
    settings = (GRIDS | WIDE if problem.wide else GRIDS)[name]
    if name == "scaffnew":
        settings = [{"p": p} for p in (1 / float(np.mean(problem.counts)), 1 / problem.K, 1 / (4 * problem.K))]
    return settings[:1] if problem.model[0] == "resnet18" else settings


def grid(problem, names):
    """Yield the name and the settings of every run of the grid, before it grows."""
    for name in names:
        if name in ONE_LAYER and problem.model[0] == "logistic":
            continue
        lrs = ADAM if name == "diloco" else problem.lrs
        for lr, options in itertools.product(lrs, own_settings(problem, name)):
            yield name, {"lr": lr, **options}


def grown(problem, records, names):
    """Return the runs of grids that grew, where the chosen step size is the smallest or the largest tried."""
    wanted = []
    for row, options in chosen(records, problem).items():
        tried = [r["options"] for r in records if entry(r) == row and r["seed"] == problem.choosing[0]]
        lrs = sorted({o["lr"] for o in tried})
        place = LADDER.index(options["lr"])
        step = (options["lr"] == lrs[-1]) - (options["lr"] == lrs[0])
        new = LADDER[max(0, place + step)] if place + step < len(LADDER) else options["lr"]
        if row[0] not in names:
            continue
        if problem.wide:
            wanted += [(row[0], {**o, "lr": lr}, s) for o in tried for lr in {*lrs, new} for s in problem.choosing]
        else:
            wanted += [(row[0], {**options, "lr": new}, s) for s in problem.choosing]
    return wanted


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
        names = ["round", problem.metric] + ["bytes_total", "sim_time"] * (seed in problem.seeds)
        columns = {c: [r[c] if isinstance(r[c], int) else float(f"{r[c]:.6g}") for r in rounds] for c in names}
        facts = {"problem": problem_name, "name": name, "options": settings, "seed": seed, "status": result.status}
        records.append({**facts, "seconds": round(seconds, 2), "device": device, **columns})
    return records


def mean_before(record, problem, end, length):
    """Return the mean of the metric over the evaluated rounds in (end - length, end]."""
    pairs = zip(record["round"], record[problem.metric], strict=True)
    return float(np.mean([value for t, value in pairs if end - length < t <= end]))


def final(record, problem):
    """Return the mean over the last rounds, or None if the run diverged."""
    return mean_before(record, problem, problem.rounds, TAIL) if record["status"] == "finished" else None


def reached(record, problem):
    """Return the evaluation at which a run reaches the target to stay there, or None."""

    def beyond(value):
        return problem.sign * value <= problem.sign * problem.target

    last = final(record, problem)
    if last is None or not beyond(last):
        return None
    places = (i for i, t in enumerate(record["round"]) if t >= WINDOW)
    return next((i for i in places if beyond(mean_before(record, problem, record["round"][i], WINDOW))), None)


def rank(runs, problem):
    """Return how good a setting is: rounds to the target where all runs reach it, then the final value."""
    hits, ends = [reached(r, problem) for r in runs], [final(r, problem) for r in runs]
    last = np.inf if None in ends else problem.sign * float(np.mean(ends))
    if None in hits:
        return 1, 0.0, last
    return 0, float(np.mean([r["round"][i] for r, i in zip(runs, hits, strict=True)])), last


def entry(record):
    """Return what has a row of its own: the algorithm, with the options that change its times."""
    return record["name"], *(record["options"].get(option) for option in APART)


def chosen(records, problem):
    """Return the best settings of every entry on the choosing seeds, of those that ran with all of them."""
    settings, best = {}, {}
    for record in records:
        if record["seed"] in problem.choosing:
            settings.setdefault((entry(record), json.dumps(record["options"], sort_keys=True)), []).append(record)
    for (row, _), runs in settings.items():
        if len(runs) == len(problem.choosing):
            place = rank(runs, problem)
            if row not in best or place < best[row][0]:
                best[row] = place, runs[0]["options"]
    return {row: options for row, (_, options) in best.items()}


def batches(todo, width):
    """Return runs in groups that step side by side: of one seed, and of one step schedule."""
    groups = {}
    for run in todo:
        groups.setdefault((run[3], run[1] == "heterofl"), []).append(run)
    return [some[i : i + width] for some in groups.values() for i in range(0, len(some), width)]


def measure(args):
    """Run the grid on the choosing seeds until it grows no more, then the best settings on the other seeds."""
    end, problem, out = time.monotonic() + args.seconds, PROBLEMS[args.problem], Path(args.out)
    out.parent.mkdir(parents=True, exist_ok=True)
    records = [r for r in read(out) if r["problem"] == args.problem]
    names = args.only or (FEW if args.problem == "cifar10" else tuple(GRIDS))
    wanted = [(n, o, s) for s in problem.choosing for n, o in grid(problem, names)]
    for _ in LADDER:
        if not carry_out(args, records, wanted, end):
            return
        wanted = grown(problem, records, names)
    best = chosen(records, problem).items()
    carry_out(args, records, [(row[0], o, s) for s in problem.seeds for row, o in best if row[0] in names], end)


def carry_out(args, records, wanted, end):
    """Run what is wanted and not recorded yet. Return whether there was time for all of it."""
    have, todo = {key(r) for r in records}, []
    for name, options, seed in wanted:
        place = args.problem, name, json.dumps(options, sort_keys=True), seed
        if place not in have:
            have.add(place)
            todo.append((args.problem, name, options, seed))
    with multiprocessing.get_context("spawn").Pool(args.workers) if args.workers > 1 else Here() as pool:
        for found in pool.imap_unordered(together, batches(todo, args.together)):
            records += found
            with Path(args.out).open("a") as file:
                file.writelines(json.dumps(record) + "\n" for record in found)
            print(f"{len(found)} of {len(todo)} runs, {sum(r['seconds'] for r in found):.1f} s", flush=True)
            if time.monotonic() > end:
                print("time is over", flush=True)
                pool.terminate()
                return False
    return True


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


def tables(records, against=("fedavg", "scaffold")):
    """Return tables in Markdown by problem: of the measured seeds and of paired differences, or of the grid."""
    texts = {}
    for problem_name, problem in PROBLEMS.items():
        own = [r for r in records if r["problem"] == problem_name]
        measured = []
        for row, options in chosen(own, problem).items():
            runs = [r for r in own if r["seed"] in problem.seeds and r["options"] == options and entry(r) == row]
            if len(runs) == len(problem.seeds):
                measured.append((row, options, sorted(runs, key=lambda r: r["seed"])))
        if measured:
            measured.sort(key=lambda one: order(one[2], problem))
            texts[problem_name] = results(problem, own, measured)
            texts[f"{problem_name}, paired"] = paired(problem, measured, against)
        else:
            lines = [[f"`{r['name']}`", setting(r["options"]), number(final(r, problem), problem)] for r in own]
            head = ["algorithm", "setting", f"final {problem.metric.replace('_', ' ')} of one seed"]
            texts[problem_name] = markdown(head, sorted(lines))
    return texts


def markdown(head, lines):
    """Return a table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *lines))


def order(runs, problem):
    """Return how to sort an algorithm: by how many seeds reach the target, then as in the choice."""
    missed = sum(reached(r, problem) is None for r in runs)
    return missed, *rank(runs, problem)


def results(problem, records, measured):
    """Return the table of the measured seeds: a line for every algorithm."""
    name, lines = problem.metric.replace("_", " "), []
    for row, options, runs in measured:
        hits = [(r, reached(r, problem)) for r in runs]
        cells = []
        for column, scale in (("round", 1), ("bytes_total", 1e6), ("sim_time", 1)):
            values = [r[column][i] / scale for r, i in hits if i is not None]
            missed = f"{len(values)} of {len(runs)} seeds" if column == "round" else "-"
            cells.append(spread(values) if len(values) == len(runs) else missed)
        ends = [final(r, problem) for r in runs]
        lost = f"{ends.count(None)} of {len(runs)} seeds diverged"
        cells.append(lost if None in ends else spread([shown(v, problem) for v in ends], digits(problem)))
        lines.append([f"`{row[0]}`", setting(options, edges(problem, records, row, options)), *cells])
    head = ["algorithm", "setting", f"rounds to {name} {problem.target:g}", "MB", "simulated s", f"final {name}"]
    return markdown(head, lines)


def paired(problem, measured, against):
    """Return the paired differences from some algorithms, in bold where the interval leaves out 0."""
    runs_of = {row: runs for row, _, runs in measured}
    usual = {row[0]: row for row in runs_of if row[1] in (None, "zeros")}
    bases = [(usual[name], name) for name in against if name in usual]
    columns = [(row, base, "final") for row, base in bases]
    for row, base in bases:
        if all(reached(r, problem) is not None for r in runs_of[row]):
            columns += [(row, base, column) for column in ("round", "bytes_total", "sim_time")]
    titles = {"round": "rounds", "bytes_total": "MB", "sim_time": "simulated s"}
    titles["final"] = "final " + problem.metric.removeprefix("test_")
    head = ["algorithm", "setting", *(f"{titles[column]} - `{base}`" for _, base, column in columns)]
    lines = []
    for row, options, runs in measured:
        cells = [
            "-" if row == other else difference(problem, column, runs, runs_of[other])
            for other, _, column in columns
        ]
        lines.append([f"`{row[0]}`", setting(options), *cells])
    return markdown(head, lines)


def difference(problem, column, runs, others):
    """Return the mean of the paired differences with its 95 % interval."""
    pairs = [[quantity(problem, column, r) for r in pair] for pair in zip(runs, others, strict=True)]
    if any(None in pair for pair in pairs):
        return "-"
    interval = Interval.of([a - b for a, b in pairs])
    places = digits(problem) if column == "final" else 2 if column == "bytes_total" and problem.wide else 1
    mean, low, high = (round(v, places) + 0.0 for v in (interval.mean, interval.low, interval.high))  # no -0.0
    text = f"{mean:.{places}f} [{low:.{places}f}, {high:.{places}f}]"
    return f"**{text}**" if low > 0 or high < 0 else text


def quantity(problem, column, record):
    """Return the final value of a run, or its rounds, MB or seconds to the target; None where it has none."""
    if column == "final":
        last = final(record, problem)
        return None if last is None else shown(last, problem)
    place = reached(record, problem)
    return None if place is None else record[column][place] / (1e6 if column == "bytes_total" else 1)


def edges(problem, records, row, options):
    """Return the options whose chosen value is the smallest or the largest that was tried."""
    grids = [r["options"] for r in records if entry(r) == row and r["seed"] in problem.choosing]
    found = {}
    for option, value in options.items():
        if not isinstance(value, float) or value == LIMITS.get(option):
            continue
        tried = {settings[option] for settings in grids if option in settings}
        if len(tried) > 1 and value in (min(tried), max(tried)):
            found[option] = "smallest" if value == min(tried) else "largest"
    return found


def shown(value, problem):
    """Return a loss as it is, an accuracy in percent."""
    return value if problem.metric == "test_loss" else 100 * value


def digits(problem):
    """Return the decimals of a final value."""
    return 4 if problem.metric == "test_loss" else 1


def number(value, problem):
    """Return a final value as text."""
    return "diverged" if value is None else f"{shown(value, problem):.{digits(problem)}f}"


def setting(options, marks=None):
    """Return the settings of a run as text."""
    texts = []
    for option, value in options.items():
        text = f"{option} {value:.3g}" if isinstance(value, float) else f"{option} {value}"
        mark = (marks or {}).get(option)
        texts.append(f"{text} ({mark})" if mark else text)
    return ", ".join(text for text in texts if not text.startswith("levels"))


def spread(values, places=None):
    """Return a mean with its 95 % interval."""
    places = places if places is not None else 2 if np.mean(values) < 10 else 1
    return f"{np.mean(values):.{places}f} ± {Interval.of(values).half:.{places}f}"


def main():
    """Measure one problem, or print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problem", nargs="?", choices=list(PROBLEMS))
    parser.add_argument("--out", default="runs/rivals.jsonl")
    parser.add_argument("--only", nargs="*", choices=list(GRIDS))
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--together", type=int, default=24, help="how many runs step side by side")
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--show", nargs="*")
    parser.add_argument("--against", nargs="*", choices=list(GRIDS), default=["fedavg", "scaffold"])
    args = parser.parse_args()
    if args.show:
        records = [record for path in args.show for record in read(Path(path))]
        for name, table in tables(records, args.against).items():
            print(f"{name}\n\n{table}\n")
    else:
        measure(args)


if __name__ == "__main__":
    main()
