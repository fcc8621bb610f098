"""Times of the engines and of a plain loop, in microseconds per client-step."""

from __future__ import annotations

import copy
import itertools
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from fedagrac.callbacks import Callback
from fedagrac.engines import choose_threads, keep_freed_memory, restored_threads, use_threads
from fedagrac.engines.choice import CANDIDATES, EngineRecord, processor
from fedagrac.engines.threads import set_by_user
from fedagrac.experiments.bench.cases import CASES, SWEEPS, Case
from fedagrac.rounds.api import run_on
from fedagrac.rounds.fleet import Simulated
from fedagrac.rounds.setup import Setup

if TYPE_CHECKING:
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord

__all__ = ["Bench", "cases_for", "compare", "engines_for", "fleet_of", "machine", "planned", "sweep", "taken"]

ROUNDS = 100
"""The rounds of a run for which "auto" chooses; timing ends earlier."""

PLAIN_SECONDS = 0.5
"""About how long the plain loop is timed at a time."""


@dataclass(frozen=True)
class Bench:
    """How cases are timed.

    Attributes:
        device: "cpu" or a GPU.
        precision: the arithmetic of the engines, as in `simulate`.
        budget: the seconds of a row, without start-up.
    """

    device: str
    precision: str = "float32"
    budget: float = 10.0


def engines_for(device: str) -> list[str]:
    """Return the engines that are compared on a device by default: the candidates, then what "auto" takes.

    Examples:
        >>> engines_for("cuda")
        ['serial', 'lanes', 'compiled lanes', 'auto']
    """
    return [*(["serial", "lanes", "compiled lanes"] if device.startswith("cuda") else CANDIDATES), "auto"]


def cases_for(device: str) -> list[str]:
    """Return the cases that are timed on a device by default.

    Examples:
        >>> "alexnet-equal" in cases_for("cpu"), "alexnet-equal" in cases_for("cuda")
        (False, True)
    """
    return [name for name, case in CASES.items() if not (case.only_gpu and device == "cpu")]


def planned(names: Sequence[str], engines: Sequence[str], device: str) -> list[tuple[str, str]]:
    """Return the cases and engines that `compare` times, one pair per row.

    Examples:
        >>> planned(["vgg19"], ["serial", "compiled lanes"], "cpu")
        [('vgg19', 'serial')]
    """
    return [
        (name, engine)
        for name in names
        for engine in engines
        # compiling many lanes of a large model takes minutes, more than it saves
        if not (engine == "compiled lanes" and CASES[name].large and device == "cpu")
    ]


def plain_steps(case: Case, device: str, per_client: int) -> Iterator[None]:
    """Run an ordinary loop with a copy of the module and an optimiser per client; yield after each step."""
    fed = case.federation() if case.clients <= 100 else replace(case, clients=20).federation()
    X, y = fed.inputs.to(device), fed.targets.to(device)
    model = case.model().to(device).train()
    for i in itertools.count():
        samples = torch.from_numpy(fed.samples_of(i % fed.num_clients)).to(device)
        local = copy.deepcopy(model)
        optimiser = torch.optim.SGD(local.parameters(), lr=case.lr, weight_decay=case.weight_decay)
        for _ in range(per_client):
            batch = samples[torch.randint(len(samples), (case.batch,), device=device)]
            inputs = X[batch] if fed.images is None else fed.images(X[batch], torch.float32)
            optimiser.zero_grad()
            nn.functional.cross_entropy(local(inputs), y[batch]).backward()  # type: ignore[no-untyped-call]
            if case.clip is not None:
                nn.utils.clip_grad_norm_(local.parameters(), case.clip)
            optimiser.step()
            yield


def plain_loop(case: Case, device: str, seconds: float = PLAIN_SECONDS) -> float:
    """Return microseconds per step of the plain loop. A client runs as many steps as in a round, at most 50."""
    timed = case.on(device)
    per_client = int(min(50, max(1, timed.steps.counts(0, timed.clients, 0).mean())))
    at_once = per_client if device.startswith("cuda") else 1  # a GPU works on while the loop goes ahead
    steps = plain_steps(timed, device, per_client)
    for _ in range(at_once):  # warm up
        next(steps)
    wait(device)
    begun, done = time.perf_counter(), 0
    while not done or time.perf_counter() - begun < seconds:
        for _ in range(at_once):
            next(steps)
        wait(device)
        done += at_once
    return (time.perf_counter() - begun) / done * 1e6


def plain_threads(case: Case, device: str) -> int:
    """Return the threads with which the plain loop is faster: one, or torch's own number."""
    threads = torch.get_num_threads()
    if threads == 1 or device.startswith("cuda") or set_by_user(threads):
        return threads
    us = {}
    with restored_threads():
        for number in (1, threads):
            use_threads(number)
            us[number] = plain_loop(case, device)
    return min(us, key=us.__getitem__)


def fleet_of(case: Case, engine: str, bench: Bench) -> Simulated:
    """Return the clients of a case on a device. An engine by name is built as it is, without a choice.

    The run is as long as 100 rounds of the case, though its rounds may be shorter: "auto" looks at the length.
    """
    timed = case.on(bench.device)
    return Simulated.of(
        timed.model(),
        timed.federation(),
        Setup.of(
            rounds=max(1, round(ROUNDS * case.client_steps() / timed.client_steps())),
            steps=timed.steps,
            batch_size=timed.batch,
            participation=timed.cohort,
            weight_decay=timed.weight_decay,
            engine="auto" if engine == "auto" else CANDIDATES[engine],
            device=bench.device,
            precision=bench.precision,
            eval_every=10**9,
        ),
    )


def run_threads(case: Case, bench: Bench) -> int:
    """Return the threads that a run with `engine="auto"` takes."""
    fleet, timed = fleet_of(case, "auto", bench), case.on(bench.device)
    steps = fleet.setup.rounds * timed.client_steps()
    corrected = case.make_algorithm().traits.corrects
    return choose_threads(fleet.workload, "auto", "auto", timed.lanes(), steps, corrected)[0]


def taken(fleet: Simulated) -> str:
    """Return the name of the candidate that a fleet uses."""
    record = EngineRecord.of(fleet.engine, fleet.workload)
    name = "client" if record.width == 1 and record.compiled else record.name
    return f"compiled {name}" if record.compiled else name


def engine_times(case: Case, engine: str, threads: int, bench: Bench) -> dict[str, Any]:
    """Return microseconds per client-step of the median and the best round, and the seconds of the first round.

    "auto" starts from torch's own threads and takes its own number. The others run with `threads`.
    """
    ends: list[float] = []

    class Budget(Callback):
        def on_round(self, run: Run, record: RoundRecord) -> None:
            wait(bench.device)
            ends.append(time.perf_counter())
            enough = 4 if ends[-1] - begun < 3 * bench.budget else 3  # the first one is not timed
            if len(ends) >= enough and ends[-1] - ends[0] > bench.budget:
                run.stop("enough")

    begun = time.perf_counter()
    with restored_threads(), torch.random.fork_rng([]):
        if engine != "auto":
            use_threads(threads)
        fleet = fleet_of(case, engine, bench)
        with fleet.ready(corrected=case.make_algorithm().traits.corrects):
            row = {"takes": taken(fleet), "threads": torch.get_num_threads(), "why": fleet.engine_reason}
        run_on(fleet, [case.make_algorithm()], [[Budget()]], [None])
    rounds = np.diff(ends) / case.on(bench.device).client_steps() * 1e6
    return {
        "us": float(np.median(rounds)),
        "us_best": float(rounds.min()),
        "start_s": ends[0] - begun,
        "rounds": len(ends),
        **row,
    }


def compare(names: Sequence[str], engines: Sequence[str], bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield one row per case and engine; the plain loop is timed before and after each engine.

    The row of "auto" has `behind`, how much longer it takes than the faster of serial and the plain loop: 0.1 for
    10 %.
    """
    keep_memory(bench.device)
    for name, rows in itertools.groupby(planned(names, engines, bench.device), key=lambda pair: pair[0]):
        case = CASES[name]
        threads, plain = run_threads(case, bench), plain_threads(case, bench.device)
        before, us = with_threads(plain, plain_loop, case, bench.device), {}
        for _, engine in rows:
            row = engine_times(case, engine, threads, bench)
            after = with_threads(plain, plain_loop, case, bench.device)
            us[engine], plain_us = row["us"], (before + after) / 2
            row.update(plain_us=plain_us, plain_threads=plain)
            if engine == "auto":
                row["behind"] = row["us"] / min(plain_us, us.get("serial", plain_us)) - 1
            yield {"workload": name, "about": case.about, "engine": engine, **row}
            before = after


def with_threads(threads: int, function: Callable[..., float], *arguments: Any) -> float:
    """Return what a function returns with so many threads."""
    with restored_threads():
        use_threads(threads)
        return function(*arguments)


def sweep(name: str, engines: Sequence[str], bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield one row per point of a sweep and engine, the plain loop first."""
    keep_memory(bench.device)
    for label, case in SWEEPS[name][1].items():
        threads, plain = run_threads(case, bench), plain_threads(case, bench.device)
        us = with_threads(plain, plain_loop, case, bench.device)
        yield {"sweep": name, "point": label, "engine": "plain loop", "us": us, "threads": plain}
        for engine in engines:
            if engine == "serial" and case.client_steps() > 20_000:
                continue  # its cost per client-step does not depend on their number
            yield {"sweep": name, "point": label, "engine": engine, **engine_times(case, engine, threads, bench)}


def machine(device: str) -> dict[str, Any]:
    """Return a description of the machine and its software."""
    from fedagrac.storage.environment import environment

    return {**environment(torch.device(device)), "processor": processor()}


def keep_memory(device: str) -> None:
    """Let the process keep freed memory if it runs on a CPU."""
    if not device.startswith("cuda"):
        keep_freed_memory()


def wait(device: str) -> None:
    """Wait until a GPU has done its work."""
    if device.startswith("cuda"):
        torch.cuda.synchronize()
