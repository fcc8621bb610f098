"""The round loop: plan -> execute -> aggregate -> evaluate -> callbacks."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch

from fedagrac.algorithms import Algorithm
from fedagrac.algorithms.base import Cost, State
from fedagrac.callbacks.base import Callback
from fedagrac.clients import ClientTable
from fedagrac.cohort import Cohort, Population
from fedagrac.data.batches import Sampling, epoch_steps
from fedagrac.data.federation import Federation
from fedagrac.engines import ENGINES, Engine, Loss, Workload, choose_engine
from fedagrac.errors import InputError, count, fraction, non_negative, one_of, positive
from fedagrac.evaluation import Metric, evaluate
from fedagrac.heterogeneity import Clock, Constant, Devices, Participation, StepSchedule
from fedagrac.models.vector import VectorModel
from fedagrac.results import History, Record, SimulationResult, Status

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import nn

__all__ = ["Run", "Stop", "simulate"]

DEFAULT_STEPS = Constant(10)


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


@dataclass(eq=False)
class Run:
    """A run in progress: what callbacks see.

    Attributes:
        state: the server's vectors; `state["x"]` is the global model.
        table: what the server remembers of each client.
        history: the rounds so far.
        stopped: why a callback or a stop rule ended the run, or None.
    """

    algorithm: Algorithm
    federation: Federation
    workload: Workload
    engine: Engine
    engine_reason: str
    steps: StepSchedule
    participation: Participation | None
    clock: Clock
    rounds: int
    seed: int
    state: State
    table: ClientTable
    started: float
    history: History = field(default_factory=History)
    sim_time: float = 0.0
    bytes_total: int = 0
    stopped: str | None = None

    def stop(self, reason: str) -> None:
        """End the run after this round."""
        self.stopped = reason

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
            service=self.engine.gradients,
        )

    def admit(self, cohort: Cohort) -> None:
        """Give rows to members that take part for the first time."""
        new = self.table.unseen(cohort.clients)
        if len(new):
            keep = np.isin(cohort.clients, new)
            masses = [mass for mass, k in zip(cohort.masses, keep, strict=True) if k]
            newcomers = self.cohort_of(new, cohort.steps[keep], masses)
            self.table.put(new, self.algorithm.enter(self.state, newcomers))

    def step(self) -> tuple[Cohort, float]:
        """Do one round; return who took part and the training loss."""
        cohort = self.draw_cohort()
        self.admit(cohort)
        rows = self.table.rows(cohort.clients)
        plan = self.algorithm.plan(self.state, rows, cohort)
        result = self.engine.run(plan, self.state["x"], cohort.clients, cohort.round)
        self.state, next_rows = self.algorithm.aggregate(self.state, rows, cohort, plan, result)
        self.table.put(cohort.clients, next_rows)
        return cohort, float(np.dot(cohort.weights, result.loss.cpu().numpy()))

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
        callbacks: objects with on_start(run), on_round(run, record) and on_end(run, result).

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3))
        >>> result = fg.simulate(fg.models.build("logistic", features=64, classes=10), fed,
        ...                      fg.FedaGrac(lr=0.1), rounds=3, steps=fg.Linear(5, 10))
        >>> len(result.history), result.status
        (3, 'finished')
    """
    count("rounds", rounds)
    count("eval_every", eval_every)
    measures = dict(metrics or {})
    for name, (kind, value) in {
        "federation": (Federation, federation),
        "algorithm": (Algorithm, algorithm),
        "steps": (StepSchedule, steps),
    }.items():
        if not isinstance(value, kind):
            raise InputError(name, value, f"a fedagrac {kind.__name__}{_EXAMPLE[name]}")
    steps.check(federation.num_clients, rounds)
    _check_callbacks(callbacks)
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
    cohort_size = M if participation is None else participation.number(M)
    vector_model = VectorModel(model, chosen, dtype)
    workload = Workload.of(vector_model, federation, loss, batch_size, sampling, weight_decay, seed)
    if isinstance(steps, Devices) and steps.needs_flops:
        steps = steps.with_flops(workload.step_flops())
    if clock is None:
        clock = Clock.of(steps) if isinstance(steps, Devices) else Clock()
    clock.check(federation.num_clients)

    with _precision(precision, chosen):
        started = time.perf_counter()
        # round 0 speaks for all: who takes part and how much they do changes little on average
        work = rounds * cohort_size * float(steps.counts(0, M, seed).mean())
        if callable(engine):
            runner, why = engine(workload), "as given"
        else:
            runner, why = choose_engine(workload, engine, compile, cohort_size, work)
        x = vector_model.initial()
        run = Run(
            algorithm=algorithm,
            federation=federation,
            workload=workload,
            engine=runner,
            engine_reason=why,
            steps=steps,
            participation=participation,
            clock=clock,
            rounds=rounds,
            seed=seed,
            state=algorithm.start(x, Population(federation.weights, runner.gradients)),
            table=ClientTable(federation.num_clients),
            started=started,
        )
        if algorithm.starts_with_gradients:
            run.charge_start()
        status, reason = _loop(run, eval_every, measures, stop or Stop(), callbacks)
        result = SimulationResult(
            algorithm, federation, run.state["x"].cpu(), run.history, status, reason, vector_model
        )
        for callback in callbacks:
            callback.on_end(run, result)
    return result


def _loop(
    run: Run, eval_every: int, metrics: Mapping[str, Metric], stop: Stop, callbacks: Sequence[Callback]
) -> tuple[Status, str]:
    for callback in callbacks:
        callback.on_start(run)
    nothing = dict.fromkeys(["test_accuracy", "test_loss", *metrics])
    for number in range(1, run.rounds + 1):
        cohort, train_loss = run.step()
        diverged = not (math.isfinite(train_loss) and bool(torch.isfinite(run.state["x"]).all()))
        due = (number % eval_every == 0 or number == run.rounds) and not diverged
        measured = evaluate(run.workload, run.state["x"], metrics) if due else nothing
        record = run.record(cohort, train_loss, measured)
        reached = stop.reached(record)
        if reached is not None and not due and not diverged:  # the last round is always evaluated
            record.update(evaluate(run.workload, run.state["x"], metrics))
        for callback in callbacks:
            callback.on_round(run, record)
        if diverged:
            return "diverged", (
                f"round {number}: the loss or the model is no longer finite; try a smaller lr than "
                f"{run.algorithm.lr:g}"
            )
        reason = run.stopped or reached
        if reason is not None:
            return "stopped", f"round {number}: {reason}"
    return "finished", f"all {run.rounds} rounds done"


_EXAMPLE = {
    "federation": ", from Federation.load or Federation.from_arrays",
    "algorithm": " such as FedaGrac(lr=0.01)",
    "steps": " such as Constant(10) or Gaussian(500, 10000)",
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
        if name in (*fields.split(), "sim_time", "wall_time"):
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
    if device.type == "cuda":
        usable = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= usable:
            raise InputError("device", str(name), f'"cpu" or "auto": {usable} CUDA devices are usable here')
    return device


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
