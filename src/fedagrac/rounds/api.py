"""The round loop: plan -> execute -> aggregate -> evaluate -> callbacks."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedagrac.algorithms import Algorithm
from fedagrac.algorithms.base import Cost, Rows, State
from fedagrac.callbacks.base import Callback
from fedagrac.core.cohort import Cohort, GradientService, Population
from fedagrac.core.local import Plan, Result
from fedagrac.data.batches import Sampling, epoch_steps
from fedagrac.data.federation import Federation
from fedagrac.engines import (
    ENGINES,
    Engine,
    EngineRecord,
    Loss,
    Ranks,
    Workload,
    choose_engine,
    current_ranks,
)
from fedagrac.errors import InputError, count, fraction, non_negative, one_of, positive
from fedagrac.heterogeneity import Clock, Constant, Devices, Participation, StepSchedule
from fedagrac.models.vector import VectorModel
from fedagrac.rounds.divergence import Divergence, diagnose
from fedagrac.rounds.evaluation import Metric, evaluate
from fedagrac.rounds.guard import Guard, step_lengths
from fedagrac.rounds.interrupts import INTERRUPTIONS, Held
from fedagrac.rounds.record import History, Record, SimulationResult, Status
from fedagrac.storage.checkpoints import Checkpoint, CheckpointError, check_fits
from fedagrac.storage.clients import ClientTable

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor, nn

__all__ = ["Run", "Stop", "simulate", "simulate_many"]

DEFAULT_STEPS = Constant(10)

log = logging.getLogger("fedagrac")


@dataclass(frozen=True)
class Stop:
    """End a run early, at the first round that reaches any of these.

    Attributes:
        accuracy: test accuracy, in [0, 1].
        sim_time: simulated seconds.
        bytes: bytes moved, up and down together, since the start.

    Examples:
        >>> Stop(accuracy=0.8).reached({"test_accuracy": 0.81, "sim_time": 1.0, "bytes_total": 10})
        'test accuracy 0.8100 reached the target 0.8'
    """

    accuracy: float | None = None
    sim_time: float | None = None
    bytes: int | None = None

    def __post_init__(self) -> None:
        if self.accuracy is not None:
            fraction("stop.accuracy", self.accuracy)
        if self.sim_time is not None:
            positive("stop.sim_time", self.sim_time)
        if self.bytes is not None:
            count("stop.bytes", self.bytes)

    def reached(self, record: Record) -> str | None:
        """Return why the run stops after this round, or None."""
        accuracy = record["test_accuracy"]
        if self.accuracy is not None and accuracy is not None and accuracy >= self.accuracy:
            return f"test accuracy {accuracy:.4f} reached the target {self.accuracy}"
        if self.sim_time is not None and record["sim_time"] >= self.sim_time:
            return f"simulated time {record['sim_time']:.6g} s reached {self.sim_time} s"
        if self.bytes is not None and record["bytes_total"] >= self.bytes:
            return f"{record['bytes_total']} bytes moved reached {self.bytes}"
        return None


@dataclass(frozen=True, eq=False)
class Begun:
    """A round between its plan and its aggregation: the whole cohort, and the members that this process runs."""

    whole: Cohort
    cohort: Cohort
    rows: Rows
    plan: Plan


@dataclass(eq=False)
class Run:
    """A run in progress: what callbacks see.

    Attributes:
        state: the server's vectors; `state["x"]` is the global model.
        ranks: the processes that share the simulation.
        table: what the server remembers of each client, or of those that this process runs.
        history: the rounds so far.
        stopped: why a callback ended the run, or None.
        divergence: where the run left the finite numbers, or None.
        result: what came out, once the run has ended.
    """

    algorithm: Algorithm
    federation: Federation
    workload: Workload
    engine: Engine
    engine_reason: str
    gradients: GradientService
    steps: StepSchedule
    participation: Participation | None
    clock: Clock
    rounds: int
    seed: int
    ranks: Ranks
    state: State
    table: ClientTable
    started: float
    guard: Guard | None = None
    callbacks: Sequence[Callback] = ()
    history: History = field(default_factory=History)
    sim_time: float = 0.0
    bytes_total: int = 0
    stopped: str | None = None
    divergence: Divergence | None = None
    result: SimulationResult | None = None

    def stop(self, reason: str) -> None:
        """End the run after this round."""
        self.stopped = reason

    def checkpoint(self) -> Checkpoint:
        """Return where the run stands."""
        engine = EngineRecord.of(self.engine, self.workload)
        facts = {"sim_time": self.sim_time, "bytes_total": self.bytes_total, "engine": asdict(engine)}
        return Checkpoint(len(self.history), self.state, self.table, facts)

    def open(self, population: Population, resume: Checkpoint | None) -> None:
        """Start at x_1, or go on from a checkpoint."""
        if resume is not None:
            self._restore(resume)
            return
        self.state = self.algorithm.start(self.state["x"], population)
        if self.algorithm.starts_with_gradients:
            self.charge_start()

    def _restore(self, checkpoint: Checkpoint) -> None:
        everyone, device = np.arange(self.federation.num_clients), self.state["x"].device
        if checkpoint.round >= self.rounds:
            raise InputError("resume", f"round {checkpoint.round}", f"a checkpoint before round {self.rounds}")
        if checkpoint.table.num_clients != len(everyone) or len(checkpoint.history) != checkpoint.round:
            raise CheckpointError("the checkpoint is of another experiment, or comes without its history")
        check_fits(checkpoint, self.algorithm, self.state["x"])
        past = [checkpoint.facts.get("sim_time"), checkpoint.facts.get("bytes_total")]
        past += [record.get("wall_time") for record in checkpoint.history[-1:]]
        if not all(isinstance(value, int | float) and math.isfinite(value) for value in past):
            raise CheckpointError("the checkpoint or its history does not say how far the run had come")
        self.state = {name: vector.to(device) for name, vector in checkpoint.state.items()}
        self.table = checkpoint.table.of(self.ranks.own(everyone), self.table.folder, device)
        self.history = History(checkpoint.history)
        self.sim_time, self.bytes_total = checkpoint.facts["sim_time"], checkpoint.facts["bytes_total"]
        self.started -= self.history[-1]["wall_time"] if self.history else 0.0

    def draw_cohort(self) -> Cohort:
        """Return who takes part in the next round, and with how many steps."""
        fed, t = self.federation, len(self.history)
        clients = np.arange(fed.num_clients)
        masses: Sequence[int | Fraction] = fed.masses
        if self.participation is not None:
            clients, times = self.participation.draw(t, fed.weights, self.seed)
            by_weight = self.participation.by == "weight"
            masses = times.tolist() if by_weight else [fed.masses[int(i)] for i in clients]
        K = self.steps.counts(t, fed.num_clients, self.seed)
        return self.cohort_of(clients, K[clients], masses)

    def cohort_of(
        self, clients: npt.NDArray[np.int64], steps: npt.NDArray[np.int64], masses: Sequence[int | Fraction]
    ) -> Cohort:
        """Return a cohort of these clients in the next round."""
        return Cohort(
            round=len(self.history),
            clients=clients,
            steps=steps,
            masses=masses,
            population_weights=self.federation.weights[clients],
            epoch_steps=epoch_steps(self.federation.sizes[clients], self.workload.batch_size),
            everyone=len(clients) == self.federation.num_clients,
            service=self.gradients,
        )

    def admit(self, cohort: Cohort) -> None:
        """Give rows to members that take part for the first time."""
        new = self.table.unseen(cohort.clients)
        if len(new) or self.table.empty:
            newcomers = cohort.part(np.isin(cohort.clients, new), cohort.total)
            rows = self.algorithm.enter(self.state, newcomers)
            with Held():
                self.table.put(newcomers.clients, rows)

    def begin(self) -> Begun:
        """Draw the next round's cohort and plan what it does."""
        whole = self.draw_cohort()
        cohort = self.own(whole)
        self.admit(cohort)
        rows = self.table.rows(cohort.clients)
        return Begun(whole, cohort, rows, self.algorithm.plan(self.state, rows, cohort))

    def own(self, cohort: Cohort) -> Cohort:
        """Return the members that this process runs."""
        return cohort if self.ranks.size == 1 else cohort.part(self.ranks.own(cohort.clients), self.ranks.total)

    def guarded(self, begun: Begun, result: Result) -> tuple[Begun, Result, list[int]]:
        """Return what the guard lets in and the clients that it drops; all that came where it would drop everyone.

        The plan stays what it was: a first gradient counts where it was asked for, whoever is fast among the rest.
        """
        if self.guard is None:
            return begun, result, []
        whole, own = begun.whole, self.ranks.own(begun.whole.clients)
        lengths = torch.zeros(len(whole), dtype=torch.float64)
        lengths[torch.from_numpy(own)] = torch.from_numpy(step_lengths(begun.plan, self.state["x"], result))
        found = self.guard.dropped(self.ranks.total(lengths).numpy())
        dropped = [int(whole.clients[row]) for row in found]
        for client, what in zip(dropped, found.values(), strict=True):
            if self.ranks.rank == 0:
                number = len(self.history) + 1
                log.warning("round %d: client %d dropped: its update is %s", number, client, what)
        if not 0 < len(dropped) < len(whole):
            return begun, result, dropped
        kept = np.array([row not in found for row in range(len(whole))])
        rest, rows = whole.alone(np.flatnonzero(kept)), np.flatnonzero(kept[own])
        theirs = {name: values[torch.from_numpy(rows)] for name, values in begun.rows.items()}
        return Begun(rest, self.own(rest), theirs, begun.plan.part(rows)), result.part(rows), dropped

    def aggregate(self, begun: Begun, result: Result) -> float:
        """Take in what the cohort replied; return the training loss."""
        cohort = begun.cohort
        self.state, rows = self.algorithm.aggregate(self.state, begun.rows, cohort, begun.plan, result)
        self.table.put(cohort.clients, rows)
        own = np.dot(cohort.weights, result.loss.cpu().numpy())
        return float(self.ranks.total(torch.tensor(own, dtype=torch.float64)))

    def charge(self, clients: npt.NDArray[np.int64], cost: Cost, steps: npt.NDArray[np.int64]) -> tuple[int, int]:
        """Put vectors moved and steps computed on the wire and the clock; return bytes down and up."""
        size = len(self.state["x"]) * self.state["x"].element_size()
        down, up = cost.down * size, cost.up * size
        done = steps + cost.extra_steps
        self.sim_time += self.clock.round_time(len(self.history), clients, done, down, up, self.seed)
        self.bytes_total += int(down.sum() + up.sum())
        return int(down.sum()), int(up.sum())

    def charge_start(self) -> None:
        """Charge what happens before round 1: every client receives x_1 and sends its full local gradient."""
        M = self.federation.num_clients
        epochs = epoch_steps(self.federation.sizes, self.workload.batch_size)
        once = np.ones(M, np.int64)
        self.charge(np.arange(M), Cost(down=once, up=once, extra_steps=epochs), np.zeros(M, np.int64))

    def evaluate(self, metrics: Mapping[str, Metric]) -> dict[str, float | None]:
        """Measure the model on the test data; of several processes the first does so for all."""
        found = evaluate(self.workload, self.state["x"], metrics) if self.ranks.rank == 0 else {}
        return self.ranks.agree(found)

    def record(self, cohort: Cohort, train_loss: float, measured: Mapping[str, float | None]) -> Record:
        """Write the round into the history."""
        down, up = self.charge(cohort.clients, self.algorithm.cost(cohort), cohort.steps)
        self.history.append(
            {
                "round": len(self.history) + 1,
                **measured,
                "train_loss": train_loss,
                "clients": len(cohort),
                "fast": int(cohort.fast.sum()),
                "steps_mean": float(cohort.steps.mean()),
                "bytes_up": up,
                "bytes_down": down,
                "bytes_total": self.bytes_total,
                "sim_time": self.sim_time,
                "wall_time": time.perf_counter() - self.started,
            }
        )
        return self.history[-1]


def simulate(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    rounds: int = 100,
    *,
    steps: StepSchedule = DEFAULT_STEPS,
    batch_size: int | None = 20,
    loss: Loss | None = None,
    sampling: Sampling = "replacement",
    participation: int | float | Participation | None = None,
    weight_decay: float = 0.0,
    seed: int = 0,
    engine: Literal["auto", "serial", "lanes"] | Callable[[Workload], Engine] = "auto",
    compile: bool | Literal["auto"] = "auto",
    device: str = "auto",
    dtype: torch.dtype | None = None,
    precision: Literal["float32", "tf32"] = "float32",
    eval_every: int = 1,
    metrics: Mapping[str, Metric] | None = None,
    stop: Stop | None = None,
    clock: Clock | None = None,
    guard: Guard | None = None,
    state_dir: str | Path | None = None,
    resume: Checkpoint | None = None,
    callbacks: Sequence[Any] = (),
) -> SimulationResult:
    """Run a federated optimization and return its history and final model.

    Args:
        model: any nn.Module; its weights as given are x_1. It is not changed.
        federation: the clients and their data.
        algorithm: such as `FedaGrac(lr=0.01)`.
        rounds: how many rounds at most.
        steps: how many local steps each client runs, such as `Gaussian(500, 10_000)`.
        batch_size: samples per step; None for the client's full data.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
        sampling: "replacement" draws every batch anew, "shuffle" walks reshuffled epochs.
        participation: None for everyone, a number or a fraction of clients each round, or a `Participation`.
        weight_decay: l2: adds weight_decay * x to every gradient.
        seed: names every random draw of the run.
        engine: "serial" runs one client after another, "lanes" many at once; "auto" takes the faster: by rule in a
            short run, by a measurement that is kept on disk in a longer one. Or a function that makes an engine.
        compile: whether steps on a CPU are compiled to machine code; "auto": where the run is long enough to
            repay it.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
        dtype: torch.float32 or torch.float64; None for the model's.
        precision: "tf32" allows reduced-precision matrix products on GPUs.
        eval_every: evaluate every so many rounds, and after the last (unless a callback ended the run).
        metrics: more measures of the test data: {name: (output, target) -> scalar}.
        stop: end early.
        clock: simulated time; by default that of the devices which decide the steps, or 1 ms per step.
        guard: drop updates that are not finite or far too long, such as `Guard(factor=10.0)`; None for no guard.
        state_dir: keep the clients' state in files there, where it does not fit into memory.
        resume: go on from here, as if the run had never stopped.
        callbacks: objects with on_start(run), on_round(run, record) and on_end(run, result).

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3))
        >>> result = fg.simulate(fg.models.build("logistic", features=64, classes=10), fed,
        ...                      fg.FedaGrac(lr=0.1), rounds=3, steps=fg.Linear(5, 10))
        >>> len(result.history), result.status
        (3, 'finished')
    """
    return _simulate(
        model, federation, [algorithm], [callbacks], rounds, steps=steps, batch_size=batch_size, loss=loss,
        sampling=sampling, participation=participation, weight_decay=weight_decay, seed=seed, engine=engine,
        compile=compile, device=device, dtype=dtype, precision=precision, eval_every=eval_every, metrics=metrics,
        stop=stop, clock=clock, guard=guard, state_dir=state_dir, resume=[resume],
    )[0]  # fmt: skip


def simulate_many(
    model: nn.Module,
    federation: Federation,
    algorithms: Sequence[Algorithm],
    rounds: int = 100,
    *,
    callbacks: Sequence[Sequence[Any]] | None = None,
    resume: Sequence[Checkpoint | None] | None = None,
    **options: Any,
) -> list[SimulationResult]:
    """Run several algorithms, or one with several settings, side by side; return a result for each.

    The clients of all runs step together as one wider batch of lanes, which pays for small models. Every run has
    the numbers that `simulate` gives it alone, apart from rounding and from where dropout falls; its `wall_time`
    is that of all of them.

    Args:
        model: any nn.Module; its weights as given are x_1 of every run.
        federation: the clients and their data.
        algorithms: one per run.
        rounds: how many rounds at most. A run that stops or diverges leaves the others alone.
        callbacks: for each run its own.
        resume: for each run where it goes on from, all after the same round.
        options: as in `simulate`.

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3))
        >>> model = fg.models.build("logistic", features=64, classes=10)
        >>> grid = [fg.FedAvg(lr=lr) for lr in (0.01, 0.1)]
        >>> slow, fast = fg.simulate_many(model, fed, grid, rounds=3, steps=fg.Linear(5, 10))
        >>> slow.history[-1]["test_loss"] > fast.history[-1]["test_loss"]
        True
    """
    if not algorithms:
        raise InputError("algorithms", algorithms, "at least one algorithm")
    each = [()] * len(algorithms) if callbacks is None else callbacks
    if len(each) != len(algorithms):
        raise InputError(
            "callbacks", len(each), f"one sequence of callbacks for each of {len(algorithms)} algorithms"
        )
    before = [None] * len(algorithms) if resume is None else list(resume)
    at = [0 if checkpoint is None else checkpoint.round for checkpoint in before]
    if len(before) != len(algorithms) or len(set(at)) > 1:
        raise InputError("resume", f"rounds {at}", f"{len(algorithms)} checkpoints after the same round")
    own = ("callbacks", "resume")
    defaults = {name: value for name, value in (simulate.__kwdefaults__ or {}).items() if name not in own}
    for name in options:
        one_of("option", name, list(defaults))
    return _simulate(model, federation, list(algorithms), each, rounds, resume=before, **{**defaults, **options})


def _simulate(
    model: nn.Module,
    federation: Federation,
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Sequence[Any]],
    rounds: int,
    *,
    steps: StepSchedule,
    batch_size: int | None,
    loss: Loss | None,
    sampling: Sampling,
    participation: int | float | Participation | None,
    weight_decay: float,
    seed: int,
    engine: Literal["auto", "serial", "lanes"] | Callable[[Workload], Engine],
    compile: bool | Literal["auto"],
    device: str,
    dtype: torch.dtype | None,
    precision: Literal["float32", "tf32"],
    eval_every: int,
    metrics: Mapping[str, Metric] | None,
    stop: Stop | None,
    clock: Clock | None,
    guard: Guard | None,
    state_dir: str | Path | None,
    resume: Sequence[Checkpoint | None],
) -> list[SimulationResult]:
    """Check everything, then run the algorithms side by side."""
    count("rounds", rounds)
    count("eval_every", eval_every)
    measures = dict(metrics or {})
    for name, kind, value in (
        ("federation", Federation, federation),
        *[("algorithm", Algorithm, algorithm) for algorithm in algorithms],
        ("steps", StepSchedule, steps),
        *([] if guard is None else [("guard", Guard, guard)]),
    ):
        if not isinstance(value, kind):
            raise InputError(name, value, f"a fedagrac {kind.__name__}{_EXAMPLE[name]}")
    steps.check(federation.num_clients, rounds)
    _check_callbacks([callback for own in callbacks for callback in own])
    _check_metrics(measures)
    if batch_size is not None:
        count("batch_size", batch_size)
    one_of("sampling", sampling, ["replacement", "shuffle"])
    non_negative("weight_decay", weight_decay)
    count("seed", seed, least=0)
    if not callable(engine):
        one_of("engine", engine, ["auto", *ENGINES])
    if compile != "auto" and not isinstance(compile, bool):
        raise InputError("compile", compile, '"auto", True or False')
    chosen = _device(device)
    if participation is not None and not isinstance(participation, Participation):
        participation = Participation(participation)
    M = federation.num_clients
    vector_model = VectorModel(model, chosen, dtype)
    workload = Workload.of(vector_model, federation, loss, batch_size, sampling, weight_decay, seed)
    if isinstance(steps, Devices) and steps.needs_flops:
        steps = steps.with_flops(workload.step_flops())
    if clock is None:
        clock = Clock.of(steps) if isinstance(steps, Devices) else Clock()
    clock.check(federation.num_clients)
    ranks = current_ranks().share(steps.counts(0, M, seed))
    lanes = -(-len(algorithms) * (M if participation is None else participation.number(M)) // ranks.size)

    before = None if resume[0] is None else EngineRecord.read(resume[0].facts.get("engine"))
    with _precision(precision, chosen), _threads(before):
        started = time.perf_counter()
        # round 0 speaks for all: who takes part and how much they do changes little on average
        work = rounds * lanes * float(steps.counts(0, M, seed).mean())
        if callable(engine):
            runner, why = engine(workload), "as given"
        else:
            runner, why = choose_engine(workload, engine, compile, lanes, work, before)
        x, gradients = vector_model.initial(), LastGradients(runner.gradients)
        everyone = np.arange(M)
        population = Population(federation.weights, gradients, everyone[ranks.own(everyone)], ranks.total)
        runs = [
            Run(
                algorithm=algorithm,
                federation=federation,
                workload=workload,
                engine=runner,
                engine_reason=why,
                gradients=gradients,
                steps=steps,
                participation=participation,
                clock=clock,
                rounds=rounds,
                seed=seed,
                ranks=ranks,
                state={"x": x},
                table=ClientTable(federation.num_clients, None if state_dir is None else Path(state_dir)),
                started=started,
                guard=guard,
                callbacks=own,
            )
            for algorithm, own in zip(algorithms, callbacks, strict=True)
        ]
        for run, stored in zip(runs, resume, strict=True):
            run.open(population, stored)
        return _loop(runs, runner, eval_every, measures, stop or Stop())


def _loop(
    runs: Sequence[Run], engine: Engine, eval_every: int, metrics: Mapping[str, Metric], stop: Stop
) -> list[SimulationResult]:
    for run in runs:
        for callback in run.callbacks:
            callback.on_start(run)
    going = list(runs)
    ranks = runs[0].ranks
    try:
        with Held(ranks.size > 1) as signals:  # no process leaves the others in the middle of a round
            while going:
                begun = [run.begin() for run in going]
                results = _execute(engine, going, begun)
                with Held():  # a round is taken in whole or not at all
                    for run, its, result in zip(going, begun, results, strict=True):
                        ended = _complete(run, its, result, eval_every, metrics, stop)
                        if ended is not None:
                            run.result = _end(run, *ended)
                    going = [run for run in going if run.result is None]
                told = ranks.first_given(signals.pending)
                if told is not None:
                    signals.pending = told
                    break
    except INTERRUPTIONS:
        with Held():
            for run in going:
                for callback in run.callbacks:
                    if isinstance(callback, Callback):
                        callback.on_interrupt(run)
        raise
    return [run.result for run in runs if run.result is not None]


def _execute(engine: Engine, runs: Sequence[Run], begun: Sequence[Begun]) -> list[Result]:
    """Let the cohorts of all runs, which are in the same round, do what was planned; as one batch."""
    plans, clients = [its.plan for its in begun], [its.cohort.clients for its in begun]
    if not any(map(len, plans)):  # none of the clients that this process runs takes part
        nothing = [run.state["x"].new_empty((0, len(run.state["x"]))) for run in runs]
        return [Result(models, models.new_zeros(0, dtype=torch.float64)) for models in nothing]
    if len(runs) == 1:
        return [engine.run(plans[0], runs[0].state["x"], clients[0], begun[0].cohort.round)]
    starts = [run.state["x"].expand(len(plan), -1) for run, plan in zip(runs, plans, strict=True)]
    joined = Plan.join(plans)
    return engine.run(joined, torch.cat(starts), np.concatenate(clients), begun[0].cohort.round).split(plans)


def _complete(
    run: Run, begun: Begun, result: Result, eval_every: int, metrics: Mapping[str, Metric], stop: Stop
) -> tuple[Status, str] | None:
    """Aggregate, evaluate, record and tell the callbacks; return how the run ended, or None if it goes on."""
    before, number = run.state["x"], len(run.history) + 1
    kept, replies, dropped = run.guarded(begun, result)
    train_loss = math.nan if len(dropped) == len(begun.whole) else run.aggregate(kept, replies)
    diverged = not (math.isfinite(train_loss) and bool(torch.isfinite(run.state["x"]).all()))
    due = (number % eval_every == 0 or number == run.rounds) and not diverged
    nothing = dict.fromkeys(["test_accuracy", "test_loss", *metrics])
    measured = run.evaluate(metrics) if due else nothing
    record = run.record(begun.whole, train_loss, measured)
    if run.guard is not None:
        record["dropped"] = dropped
    reached = stop.reached(record)
    if reached is not None and not due and not diverged:  # the last round is always evaluated
        record.update(run.evaluate(metrics))
    for callback in run.callbacks:
        callback.on_round(run, record)
    run.stopped = run.ranks.agree(run.stopped)
    if diverged:
        asked = kept.whole, kept.plan, before, replies
        run.divergence = diagnose(run.workload, run.ranks, run.algorithm, *asked)
        return "diverged", str(run.divergence)
    reason = run.stopped or reached
    if reason is not None:
        return "stopped", f"round {number}: {reason}"
    return ("finished", f"all {run.rounds} rounds done") if number == run.rounds else None


def _end(run: Run, status: Status, reason: str) -> SimulationResult:
    """Make the result and hand it to the callbacks."""
    vector, model = run.state["x"].cpu(), run.workload.model
    told = vector, run.history, status, reason, model, run.divergence
    result = SimulationResult(run.algorithm, run.federation, *told)
    for callback in run.callbacks:
        callback.on_end(run, result)
    return result


class LastGradients:
    """The engine's service of gradients, with its last answer.

    Before and in round 1 the same question is asked several times: for nu, for every nu_i, and by every run.
    """

    def __init__(self, service: GradientService) -> None:
        self._service = service
        self._asked: tuple[Tensor, npt.NDArray[np.int64], int, str] | None = None
        self._answer: Tensor | None = None

    def __call__(
        self, x: Tensor, clients: npt.NDArray[np.int64], round: int, batch: Literal["full", "first"] = "full"
    ) -> Tensor:
        """Return the gradients at x, [m, d]."""
        if self._answer is not None and self._asked is not None:
            last = self._asked
            if last[0] is x and last[2:] == (round, batch) and np.array_equal(last[1], clients):
                return self._answer
        self._answer = None  # before the next one is made: two need not fit
        answer = self._service(x, clients, round, batch)
        if round == 0:
            self._asked, self._answer = (x, clients.copy(), round, batch), answer
        return answer


_EXAMPLE = {
    "federation": ", from Federation.load or Federation.from_arrays",
    "algorithm": " such as FedaGrac(lr=0.01)",
    "steps": " such as Constant(10) or Gaussian(500, 10000)",
    "guard": " such as Guard(factor=10.0), or None",
}


def _check_callbacks(callbacks: Sequence[Any]) -> None:
    for callback in callbacks:
        for name in ("on_start", "on_round", "on_end"):
            method: Callable[..., None] | None = getattr(callback, name, None)
            if not callable(method):
                raise InputError("callbacks", callback, f"a method {name}; inherit from fedagrac.Callback")


def _check_metrics(metrics: Mapping[str, Metric]) -> None:
    fields = "round test_accuracy test_loss train_loss clients fast steps_mean bytes_up bytes_down bytes_total"
    for name, metric in metrics.items():
        if name in (*fields.split(), "sim_time", "wall_time", "dropped"):
            raise InputError("metrics", name, "a name that no field of the history has")
        if not callable(metric):
            raise InputError(f"metrics.{name}", metric, "a function (output, target) -> scalar")


def _device(name: str | torch.device) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError) as error:
        raise InputError("device", name, 'a device such as "auto", "cpu" or "cuda"') from error
    if device.type not in ("cpu", "cuda"):
        raise InputError("device", str(name), '"auto", "cpu" or "cuda"')
    if device.type == "cuda":
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= usable:
            raise InputError("device", str(name), f'"cpu" or "auto": {usable} CUDA devices are usable here')
    return device


@contextlib.contextmanager
def _threads(before: EngineRecord | None) -> Iterator[None]:
    """Use as many threads as before the run was interrupted: sums are rounded by how they are shared out."""
    own = torch.get_num_threads()
    if before is not None and before.threads != own:
        torch.set_num_threads(before.threads)
    try:
        yield
    finally:
        if torch.get_num_threads() != own:
            torch.set_num_threads(own)


@contextlib.contextmanager
def _precision(precision: str, device: torch.device) -> Iterator[None]:
    """Full float32 products unless TF32 was asked for (cuDNN would otherwise use TF32 for convolutions)."""
    one_of("precision", precision, ["float32", "tf32"])
    if device.type != "cuda":
        if precision == "tf32":
            raise InputError("precision", precision, f'"float32": TF32 needs a GPU, the run is on {device.type}')
        yield
        return
    before = torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before
