"""What to measure in one session on a GPU: lanes, compiled steps, routes of convolutions, first rounds, profiles.

    PYTHONPATH=src python benchmarks/gpu_plan.py --seconds 540 --out plan.jsonl [--skip earlier.jsonl]

Needs torch and numpy. Every measurement runs in a process of its own, so that one failure is written down and the
next measurement goes on. Rows are appended to the file as they come. Measurements that an earlier file has are
left out. The first is a check of numbers; then come the models whose targets are missed. With `--tiny` the script
tries itself on a few steps of two clients, also on a CPU.
"""

import argparse
import cProfile
import json
import os
import pstats
import subprocess
import sys
import tempfile
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import fedagrac as fg
from fedagrac.callbacks import Callback
from fedagrac.engines import LanesEngine
from fedagrac.engines.choice import CANDIDATES
from fedagrac.engines.lanes.convolutions import ROUTES, routes_for
from fedagrac.engines.lanes.kernels.patches import Convolution
from fedagrac.engines.lanes.layers import RoutedLayers, convolutions_of
from fedagrac.engines.lanes.routes import measured_routes, route_seconds
from fedagrac.engines.precision import product_dtype, products
from fedagrac.engines.serial import training
from fedagrac.experiments.bench import CASES, Case, engine_times


@dataclass(frozen=True)
class Characters(Case):
    """A case whose samples are rows of characters."""

    def federation(self):
        rng = np.random.default_rng(0)
        X = rng.integers(0, self.classes, (self.clients * self.samples, *self.shape))
        y = rng.integers(0, self.classes, len(X))
        return fg.Federation.from_pool(X, y, self.clients, fg.IID())


def network(name, shape, classes, batch, kind=Case):
    """A network that is built by name: 20 clients, 60 steps a round."""
    steps = fg.Constant(60)
    build = fg.models.build
    return kind(name, lambda: build(name), shape, classes, None, 20, 40, batch, steps, algorithm=fg.FedAvg)


MODELS = {
    "gpt": network("char-gpt", (80,), 80, 16, Characters),
    "resnet18": network("resnet18", (3, 32, 32), 10, 25),
    "resnet20": network("resnet20", (3, 32, 32), 10, 25),
    "lstm": network("char-lstm", (80,), 80, 16, Characters),
    "vgg19": CASES["vgg19"],
    "pfl": CASES["pfl"],
    "cnn": CASES["cnn"],
    "alexnet": CASES["alexnet"],
}
"""Those whose targets are missed by the largest factor first."""

ON_GPU = torch.cuda.is_available()
DEVICE = "cuda" if ON_GPU else "cpu"

WITHOUT_CONVOLUTIONS = ("gpt", "lstm")


def plan():
    """Yield the measurements, each a model and what to measure, the most telling first."""
    yield "all", "check"
    for model in MODELS:
        yield model, "lanes, cold"  # with empty caches: kernels are compiled, routes are timed
        yield model, "compiled, cold"
    for model in MODELS:
        yield model, "lanes, warm"  # the caches of the disk are full
        yield model, "lanes, profile"
        yield model, "compiled, warm"
        yield model, "compiled, profile"
    yield "alexnet", "first round, by function"
    for model in MODELS:
        if model not in WITHOUT_CONVOLUTIONS:
            yield model, "routes"
    for model in MODELS:
        if model not in WITHOUT_CONVOLUTIONS:
            yield model, "forced routes"
    yield "alexnet-unequal", "lanes, cold"
    yield "alexnet-unequal", "lanes, warm"
    yield "alexnet-unequal", "compiled, cold"


def convolutions(engine):
    """The convolutions of an engine's workload, as `LaneModel.route` finds them."""
    w = engine.workload
    samples = torch.zeros(int(w.batch_sizes(np.arange(1)).max()), dtype=torch.int64, device=w.model.device)
    with training(w):
        inputs, _ = w.load(samples)
        return convolutions_of(lambda: w.call(inputs))


def forced(route, table):
    """An engine whose convolutions take one route; those that it does not fit take the fastest of the table."""

    def make(workload):
        engine = LanesEngine(workload)
        routes = {}
        for c in convolutions(engine):
            times = table.get(c, {"grouped": 0.0})
            routes[c] = route if route in routes_for(c) else min(times, key=times.get)
        engine.model.layers = RoutedLayers(routes)
        return engine

    return make


def on_disk():
    """The times of all routes by convolution, as far as they were measured."""
    return {
        Convolution(tuple(r["inputs"]), tuple(r["weight"]), tuple(r["stride"]), tuple(r["padding"])): r["us"]
        for r in measured_routes()
    }


def all_routes(case, precision):
    """Yield, for each convolution, the microseconds of every route for all lanes, forward and backward."""
    found = {}

    def make(workload):
        engine = LanesEngine(workload)
        found.update(convolutions(engine))
        return engine

    lanes, dtype = case.cohort or case.clients, product_dtype(precision, torch.float32)
    fg.simulate(
        case.model(), case.federation(), case.algorithm(lr=case.lr), rounds=1, steps=fg.Constant(1),
        batch_size=case.batch, participation=case.cohort, engine=make, device=DEVICE, precision=precision,
    )  # fmt: skip
    for c, to_pictures in found.items():
        with products(precision):
            times = {
                name: round(route_seconds(c, name, to_pictures, lanes, torch.device(DEVICE), dtype) * 1e6, 1)
                for name in routes_for(c)
            }
        yield {"convolution": [*map(list, c)], "to_pictures": to_pictures, "us": times}


def kernels(case, candidate, precision):
    """The microseconds per client-step of the 15 longest kernels of a round, and of all kernels."""
    recorder = profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU])
    rounds = []

    class Third(Callback):
        def on_round(self, run, record):
            if ON_GPU:
                torch.cuda.synchronize()
            rounds.append(time.perf_counter())
            if len(rounds) == 3:
                recorder.start()
            if len(rounds) == 4:
                recorder.stop()
                run.stop("enough")

    fg.simulate(
        case.model(), case.federation(), case.algorithm(lr=case.lr), rounds=5, steps=case.steps,
        batch_size=case.batch, participation=case.cohort, engine=CANDIDATES[candidate], device=DEVICE,
        precision=precision, eval_every=100, callbacks=[Third()],
    )  # fmt: skip
    seen = [k for k in recorder.key_averages() if time_of(k) > 0]
    steps = case.client_steps()
    longest = sorted(seen, key=lambda k: -time_of(k))[:15]
    return {
        "us_of_kernels": round(sum(time_of(k) for k in seen) / steps, 2),
        "us_of_a_round_before": round((rounds[2] - rounds[1]) / steps * 1e6, 2),
        "launches_per_step": round(sum(k.count for k in seen) / steps * (case.cohort or case.clients), 1),
        "kernels": [[round(time_of(k) / steps, 2), k.count, k.key[:110]] for k in longest],
    }


def time_of(kernel):
    """The microseconds that a kernel took."""
    return kernel.self_device_time_total if ON_GPU else kernel.self_cpu_time_total


def by_function(case, precision):
    """The functions in which the first round spends its time on the host."""
    profiler = cProfile.Profile()
    with profiler:
        row = engine_times(replace(case, steps=fg.Constant(5)), "lanes", DEVICE, precision, 0.0)
    stats = pstats.Stats(profiler).stats
    rows = [
        [round(own, 2), round(all_of_it, 2), calls, f"{Path(file).name}:{line} {function}"]
        for (file, line, function), (calls, _, own, all_of_it, _) in stats.items()
    ]
    where = {"by own seconds": 0, "by all seconds": 1}
    return row | {title: sorted(rows, key=lambda r: -r[column])[:40] for title, column in where.items()}


def check():
    """Yield how far every route, and compiled steps, are from the reference on this GPU."""
    torch.manual_seed(0)
    for c in (
        Convolution((5, 3, 32, 32), (8, 3, 11, 11), (4, 4), (5, 5)),
        Convolution((5, 6, 9, 8), (7, 6, 3, 3), (1, 1), (1, 1)),
        Convolution((5, 6, 9, 8), (7, 6, 3, 3), (2, 2), (1, 1)),
        Convolution((5, 6, 9, 8), (7, 6, 1, 1), (2, 2), (0, 0)),
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


def measure(model, what, precision, tiny):
    """Yield the rows of one measurement."""
    case = MODELS.get(model) or CASES.get(model)
    if tiny and case is not None:
        case = replace(case, clients=2, samples=10, batch=2, steps=fg.Constant(2), cohort=None)
    engine = "compiled lanes" if what.startswith("compiled") else "lanes"
    if what == "check":
        yield from check()
    elif what.endswith(("cold", "warm")):
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            row = engine_times(case, engine, DEVICE, precision, 6.0)
        yield {
            **row,
            "gib": torch.cuda.max_memory_allocated() / 2**30 if ON_GPU else None,
            "said": [str(w.message)[:300] for w in said],
        }
    elif what.endswith("profile"):
        yield kernels(case, engine, precision)
    elif what == "first round, by function":
        yield by_function(case, precision)
    elif what == "routes":
        yield from all_routes(case, precision)
    elif what == "forced routes":
        for name in dict.fromkeys(name for times in on_disk().values() for name in times) or ROUTES:
            CANDIDATES["forced"] = forced(name, on_disk())
            try:
                yield {"route": name, **engine_times(case, "forced", DEVICE, precision, 2.0)}
            except Exception as error:
                yield {"route": name, "error": f"{type(error).__name__}: {error}"[:500]}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=540.0, help="stop before this time")
    parser.add_argument("--most", type=float, default=200.0, help="the most seconds of one measurement")
    parser.add_argument("--out", default="plan.jsonl")
    parser.add_argument("--skip", default="", help="files with rows of earlier runs, separated by commas")
    parser.add_argument("--only", default="", help="models, separated by commas")
    parser.add_argument("--caches", default=str(Path(tempfile.gettempdir(), "gpu_plan")))
    parser.add_argument("--precision", default="tf32" if ON_GPU else "float32")
    parser.add_argument("--tiny", action="store_true", help="try the script on two clients")
    parser.add_argument("--one", nargs=2, help="measure this model and this alone, and print its rows")
    o = parser.parse_args()
    if o.one:
        for row in measure(*o.one, o.precision, o.tiny):
            print("ROW " + json.dumps(row), flush=True)
        return
    begun = time.monotonic()
    files = [Path(name) for name in [*o.skip.split(","), o.out] if name and Path(name).exists()]
    rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
    done = {(r["model"], r["what"], r["precision"]) for r in rows if "left_out" not in r}
    for model, what in plan():
        left = o.seconds - (time.monotonic() - begun)
        if (model, what, o.precision) in done or (o.only and model not in o.only.split(",")):
            continue
        if left < 20:
            write(o, model, what, {"left_out": "no time left"})
            continue
        for row in alone(o, model, what, min(left - 5, o.most)):
            write(o, model, what, row)


def write(o, model, what, row):
    """Append a row to the file and print it."""
    line = json.dumps({"model": model, "what": what, "precision": o.precision, **row})
    with open(o.out, "a", encoding="utf-8") as file:
        print(line, file=file, flush=True)
    print(line[:600], flush=True)


def alone(o, model, what, seconds):
    """Run a measurement in a process of its own and return its rows; an error is a row, too."""
    caches = Path(o.caches, model)
    environment = os.environ | {
        "XDG_CACHE_HOME": str(caches), "TRITON_CACHE_DIR": str(caches / "triton"), "PYTHONUNBUFFERED": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--precision", o.precision, "--one", model, what, *["--tiny"] * o.tiny]
    begun = time.monotonic()
    errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
    try:
        child = subprocess.run(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            timeout=seconds,
            check=False,
        )
        output, status = child.stdout, child.returncode
    except subprocess.TimeoutExpired as expired:
        said = expired.stdout or b""
        output, status = said.decode() if isinstance(said, bytes) else said, "out of time"
    took = {"process_s": round(time.monotonic() - begun, 1)}
    rows = [json.loads(line[4:]) | took for line in output.splitlines() if line.startswith("ROW ")]
    if status != 0:
        errors.seek(0)
        rows.append({"error": errors.read()[-1500:], "status": status, **took})
    errors.close()
    return rows


if __name__ == "__main__":
    main()
