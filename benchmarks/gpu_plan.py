"""Time every workload on a GPU in one call: lanes, compiled lanes, bf16, the plain loop, and where the time goes.

    PYTHONPATH=src python benchmarks/gpu_plan.py --seconds 560 --out plan.jsonl [--skip earlier.jsonl] [--check]

Needs torch and numpy. Kernels are compiled first, for all workloads side by side, into a folder that all share.
Then every measurement runs in a process of its own, alone, so that one failure is written down and the next goes
on. Rows are appended to the file as they come; measurements that an earlier file has are left out. `--check`
compares numbers beside the compiling. `--tiny` tries the script on a few steps of two clients, also on a CPU.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

import fedagrac as fg
from fedagrac.engines.choice import CANDIDATES
from fedagrac.engines.lanes.convolutions import ROUTES, routes_for
from fedagrac.engines.lanes.kernels.patches import Convolution
from fedagrac.engines.lanes.routes import measured_routes
from fedagrac.engines.precision import products
from fedagrac.engines.serial import training
from fedagrac.experiments.bench import CASES, Bench, profile_rounds
from fedagrac.experiments.bench.timing import engine_times, fleet_of, plain_loop

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"
TARGETS = ("char-gpt", "char-lstm", "resnet18", "resnet20", "alexnet", "vgg19", "cnn", "pfl")
PUBLISHED = ("fl-simulator", "fl-simulator-scaffold", "blazefl-cnn", "blazefl-resnet18")
OTHERS = ("lr-a9a", "lr-a9a-paper", "alexnet-unequal")
IN_BF16 = ("alexnet", "vgg19", "resnet18", "char-gpt")
WITHOUT_PROFILE = ("char-lstm",)
"""Workloads with so many kernels a round that the profiler takes minutes."""

FIRST_ROUNDS = {"first round": "lanes", "first compiled round": "compiled lanes"}
"""What is timed without a second round, and the engine that it takes."""

CHECKS = ("check", "benchmarks/gpu_modules.py", "benchmarks/gpu_check.py")


def plan():
    """Yield the measurements: workload, engine, precision."""
    yield from ((name, engine, "tf32") for name in TARGETS for engine in ("lanes", "compiled lanes"))
    yield from ((name, "lanes", "bf16") for name in IN_BF16)
    yield from ((name, engine, "tf32") for name in PUBLISHED for engine in ("lanes", "compiled lanes"))
    yield from ((name, "lanes", "tf32") for name in OTHERS)
    yield from ((name, "compiled lanes", "bf16") for name in IN_BF16)
    yield from ((name, engine, "tf32") for name in TARGETS for engine in FIRST_ROUNDS)
    yield from ((name, "plain loop", "tf32") for name in TARGETS + PUBLISHED + OTHERS)


def measure(name, engine, precision, o):
    """Return one row."""
    case, precision = CASES[name], precision if ON_GPU else "float32"
    if o.tiny:
        case = replace(case, clients=2, samples=10, batch=2, steps=fg.Constant(2), cohort=None)
    if o.ahead:  # the shapes of kernels do not depend on the number of steps
        case = replace(case, steps=fg.Constant(5))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        if engine == "plain loop":
            with products(precision):
                row = {"us": plain_loop(case, DEVICE, 2.0)}
        elif engine in FIRST_ROUNDS or o.ahead or name in WITHOUT_PROFILE:
            budget = 0.0 if o.ahead or engine in FIRST_ROUNDS else o.budget
            row = engine_times(case, FIRST_ROUNDS.get(engine, engine), 1, Bench(DEVICE, precision, budget))
        else:
            row = profile_rounds(name, case, engine, Bench(DEVICE, precision, o.budget))
            entries = ((e["name"][:90], e["us"], e["count"] * case.lanes()) for e in row["entries"][:60])
            row["entries"] = [(title, round(us, 2), round(count, 1)) for title, us, count in entries]
            row["kinds"] = {kind["kind"]: round(kind["us"], 2) for kind in row["kinds"] if kind["us"] > 0.005}
    if ON_GPU:
        row["gib"] = torch.cuda.max_memory_allocated() / 2**30
    return row | {"said": [str(w.message)[:300] for w in said]}


def routes(names, precision):
    """Choose the routes of the convolutions of workloads, each alone; yield the times of every route."""
    for name in names.split(","):
        fleet = fleet_of(CASES[name], "lanes", Bench(DEVICE, precision if ON_GPU else "float32"))
        begun = time.perf_counter()
        with fleet.ready(), training(fleet.workload):
            fleet.engine.model.route(CASES[name].lanes())
        yield {"workload": name, "seconds": round(time.perf_counter() - begun, 1)}
    for row in measured_routes():
        about = (*row["inputs"], "to", *row["weight"], "by", row["stride"][0], row["lanes"], row["precision"])
        yield {"route": " ".join(map(str, about)), "us": {k: round(v, 1) for k, v in row["us"].items()}}


def check():
    """Yield how far every route, and compiled steps, are from the reference on this GPU."""
    torch.manual_seed(0)
    for c in (
        Convolution((5, 3, 32, 32), (8, 3, 11, 11), (4, 4), (5, 5)),
        Convolution((5, 6, 9, 8), (7, 6, 3, 3), (1, 1), (1, 1)),
        Convolution((5, 6, 9, 8), (7, 6, 3, 3), (2, 2), (1, 1)),
        Convolution((5, 6, 9, 8), (7, 6, 1, 1), (2, 2), (0, 0)),
        Convolution((5, 20, 9, 8), (24, 20, 3, 3), (1, 1), (1, 1)),
        Convolution((50, 64, 9, 8), (130, 64, 3, 3), (2, 2), (1, 1)),
    ):
        x = torch.randint(-3, 4, (4, *c.inputs), device=DEVICE).float().requires_grad_()
        w = torch.randint(-3, 4, (4, *c.weight), device=DEVICE).float().requires_grad_()
        outputs = {}
        with products("float32"):
            for name in routes_for(c):
                y = ROUTES[name].run(x, w, c)
                gradients = torch.autograd.grad(y, (x, w), torch.ones_like(y))
                outputs[name] = torch.cat([t.detach().reshape(-1).double() for t in (y, *gradients)])
        apart = {name: float((out - outputs["grouped"]).abs().max()) for name, out in outputs.items()}
        yield {"convolution": [*map(list, c)], "largest difference": apart}
    yield from check_compiled()


def check_compiled():
    """Yield how far lanes and compiled lanes are from serial in float64, and what they say."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 12, 5, stride=2, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.GroupNorm(2, 12),
        nn.Conv2d(12, 10, 3, padding=1), nn.GELU(), nn.Flatten(), nn.LayerNorm(640), nn.Linear(640, 10),
    )  # fmt: skip
    case = replace(CASES["alexnet"], clients=6, samples=50, batch=10)
    start, ends = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).double(), {}
    for name in ("serial", "lanes", "compiled lanes"):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            result = fg.simulate(
                model, case.federation(), fg.FedaGrac(lr=0.1), rounds=2, steps=fg.Explicit([[1, 7, 3, 3, 5, 2]]),
                batch_size=case.batch, engine=CANDIDATES[name], device=DEVICE, dtype=torch.float64,
            )  # fmt: skip
        ends[name] = result.vector.double().cpu() - start
        apart = float((ends[name] - ends["serial"]).norm() / ends["serial"].norm())
        yield {"engine": name, "from serial": apart, "said": [str(w.message)[:300] for w in said]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=560.0, help="stop before this time")
    parser.add_argument("--most", type=float, default=100.0, help="the most seconds of one measurement")
    parser.add_argument("--budget", type=float, default=1.5, help="the seconds of timed rounds")
    parser.add_argument("--out", default="plan.jsonl")
    parser.add_argument("--skip", default="", help="files with rows of earlier runs, separated by commas")
    parser.add_argument("--only", default="", help="workloads, separated by commas")
    parser.add_argument("--engines", default="", help="engines, separated by commas")
    parser.add_argument("--precisions", default="", help="precisions, separated by commas")
    parser.add_argument(
        "--check", default="", help="compare numbers beside compiling: some of " + ",".join(CHECKS)
    )
    parser.add_argument("--tiny", action="store_true", help="try the script on two clients")
    parser.add_argument("--ahead", action="store_true", help="compile kernels only (used by the script itself)")
    parser.add_argument("--one", nargs=3, help="make this measurement alone and print its row")
    o = parser.parse_args()
    if o.one:
        name, engine, precision = o.one
        if name == "check":
            rows = check()
        else:
            rows = routes(name, precision) if engine == "routes" else [measure(name, engine, precision, o)]
        for row in rows:
            print("ROW " + json.dumps(row), flush=True)
        return
    begun = time.monotonic()
    files = [Path(name) for name in [*o.skip.split(","), o.out] if name and Path(name).exists()]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    done = {tuple(r["what"]) for r in rows if "error" not in r and "left_out" not in r}
    only = o.only, o.engines, o.precisions
    wanted = [
        what
        for what in plan()
        if what not in done
        and all(not some or part in some.split(",") for part, some in zip(what, only, strict=True))
    ]
    for precision in ("tf32", "bf16"):  # before other work: which routes are taken depends on times
        names = [what[0] for what in wanted if what[2] == precision and "lanes" in what[1]]
        if names:
            what = (",".join(dict.fromkeys(names)), "routes", precision)
            for row in alone(o, what, 150.0):
                write(o, what, row)
    kernels = [what for what in wanted if what[1] == "compiled lanes"]
    first = [*((name, "", "") for name in o.check.split(",") if name), *kernels]
    with ThreadPoolExecutor(6) as pool:
        for what, rows in zip(first, pool.map(lambda what: alone(o, what, 170.0, ahead=True), first), strict=True):
            for row in rows:
                write(o, what, {"ahead": True} | row)
    print(f"compiled ahead: {time.monotonic() - begun:.0f} s", flush=True)
    for what in wanted:
        left = o.seconds - (time.monotonic() - begun)
        if left < 15:
            write(o, what, {"left_out": "no time left"})
            continue
        for row in alone(o, what, min(left - 5, o.most)):
            write(o, what, row)


def write(o, what, row):
    """Append a row to the file and print it; of compiling ahead only errors and warnings are written."""
    line = json.dumps({"what": what, **row})
    said = [text for text in row.get("said", ()) if "Profiler" not in text]
    if "ahead" not in row or what[0] in CHECKS or "error" in row or said:
        with open(o.out, "a", encoding="utf-8") as file:
            print(line, file=file, flush=True)
    print(line[:250], flush=True)


def alone(o, what, seconds, ahead=False):
    """Run a measurement in a process of its own and return its rows; an error is a row, too."""
    caches = Path(tempfile.gettempdir(), "gpu_plan")
    environment = os.environ | {
        "XDG_CACHE_HOME": str(caches / "measured"),
        "TRITON_CACHE_DIR": str(caches / "triton"), "TORCHINDUCTOR_CACHE_DIR": str(caches / "compiled"),
        "PYTHONUNBUFFERED": "1", "PYTHONPATH": os.pathsep.join(["src", "tests"]),
    }  # fmt: skip
    options = ["--budget", str(o.budget), *["--tiny"] * o.tiny, *["--ahead"] * ahead]
    command = [sys.executable, __file__, *options, "--one", *what]
    if what[0].endswith(".py"):
        command = [sys.executable, what[0]]
    begun = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors, tempfile.TemporaryFile("w+") as printed:
        try:
            status = subprocess.run(
                command, env=environment, stdout=printed, stderr=errors, timeout=seconds, check=False
            ).returncode
        except subprocess.TimeoutExpired:
            status = "out of time"
        printed.seek(0)
        errors.seek(0)
        output, told = printed.read(), errors.read()
    took = {"process_s": round(time.monotonic() - begun, 1)}
    rows = [json.loads(line[4:]) | took for line in output.splitlines() if line.startswith("ROW ")]
    if what[0].endswith(".py"):
        rows.append({"printed": output[-6000:], "status": status, **took})
    if status != 0:
        rows.append({"error": told[-1500:], "status": status, **took})
    return rows


if __name__ == "__main__":
    main()
