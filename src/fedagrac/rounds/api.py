"""Functions that run simulations: `simulate` and `simulate_many`."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.algorithms import Algorithm
from fedagrac.data.federation import Federation
from fedagrac.errors import InputError
from fedagrac.rounds.callback import checked_callbacks
from fedagrac.rounds.fleet import Simulated
from fedagrac.rounds.loop import Run, run_rounds
from fedagrac.rounds.setup import Setup, check_kind

if TYPE_CHECKING:
    import torch
    from torch import nn

    from fedagrac.core.robust import Aggregation
    from fedagrac.data.batches import Sampling
    from fedagrac.engines import Engine, Loss, Workload
    from fedagrac.engines.precision import Precision
    from fedagrac.heterogeneity import Clock, Participation
    from fedagrac.heterogeneity.steps import Steps
    from fedagrac.rounds.evaluation import Metric
    from fedagrac.rounds.guard import Guard
    from fedagrac.rounds.record import SimulationResult
    from fedagrac.rounds.stop import Stop
    from fedagrac.storage.checkpoints import Checkpoint

__all__ = ["run_on", "simulate", "simulate_many"]


def simulate(
    model: nn.Module,
    federation: Federation,
    algorithm: Algorithm,
    rounds: int = Setup.rounds,
    *,
    steps: Steps = Setup.steps,
    batch_size: int | None = Setup.batch_size,
    loss: Loss | None = None,
    sampling: Sampling = Setup.sampling,
    participation: int | float | Participation | None = None,
    weight_decay: float = Setup.weight_decay,
    buffers: Literal["average", "local", "frozen"] = Setup.buffers,
    seed: int = Setup.seed,
    engine: Literal["auto", "serial", "lanes"] | Callable[[Workload], Engine] = Setup.engine,
    compile: bool | Literal["auto"] = Setup.compile,
    device: str = Setup.device,
    dtype: torch.dtype | None = None,
    precision: Precision = Setup.precision,
    eval_every: int = Setup.eval_every,
    metrics: Mapping[str, Metric] | None = None,
    stop: Stop | None = None,
    clock: Clock | None = None,
    guard: Guard | None = None,
    aggregate: Aggregation | None = None,
    state_dir: str | Path | None = None,
    resume: Checkpoint | None = None,
    callbacks: Sequence[Any] = (),
) -> SimulationResult:
    """Run a federated optimization and return its history and final model.

    `model` is any nn.Module. Its weights are x_1, and it is not changed. `resume` is a checkpoint to resume from;
    the results are those of an uninterrupted run. `callbacks` watch the run and may end it. `Setup` describes all
    other options.

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.load("digits", clients=4, partition=fg.Dirichlet(0.3))
        >>> result = fg.simulate(fg.models.build("logistic", features=64, classes=10), fed,
        ...                      fg.FedaGrac(lr=0.1), rounds=3, steps=fg.Linear(5, 10))
        >>> len(result.history), result.status
        (3, 'finished')
    """
    setup = Setup(
        rounds=rounds, steps=steps, batch_size=batch_size, loss=loss, sampling=sampling,
        participation=participation, weight_decay=weight_decay, buffers=buffers, seed=seed, engine=engine,
        compile=compile, device=device, dtype=dtype, precision=precision, eval_every=eval_every, metrics=metrics,
        stop=stop, clock=clock, guard=guard, aggregate=aggregate, state_dir=state_dir,
    )  # fmt: skip
    return _simulate(model, federation, [algorithm], setup, [callbacks], [resume])[0]


def simulate_many(
    model: nn.Module,
    federation: Federation,
    algorithms: Sequence[Algorithm],
    rounds: int = Setup.rounds,
    *,
    callbacks: Sequence[Sequence[Any]] | None = None,
    resume: Sequence[Checkpoint | None] | None = None,
    **options: Any,
) -> list[SimulationResult]:
    """Run several algorithms, or one with several settings, side by side. Return a result for each.

    The clients of all runs step together as one wider batch of lanes, which is faster for small models. Every run
    has the same numbers as with `simulate`, apart from rounding and from dropout. Its `wall_time` is the time of
    all runs together.

    Args:
        model: any nn.Module; its weights are x_1 of every run.
        federation: the clients and their data.
        algorithms: one per run.
        rounds: the largest number of rounds. A run that stops or diverges does not end the others.
        callbacks: one sequence per run.
        resume: one checkpoint per run to resume from, all after the same round.
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
    callbacks_of_runs = [()] * len(algorithms) if callbacks is None else callbacks
    if len(callbacks_of_runs) != len(algorithms):
        accepted = f"one sequence of callbacks for each of {len(algorithms)} algorithms"
        raise InputError("callbacks", len(callbacks_of_runs), accepted)
    checkpoints = [None] * len(algorithms) if resume is None else list(resume)
    setup = Setup.of(rounds=rounds, **options)
    return _simulate(model, federation, list(algorithms), setup, callbacks_of_runs, checkpoints)


def _simulate(
    model: nn.Module,
    federation: Federation,
    algorithms: Sequence[Algorithm],
    setup: Setup,
    callbacks: Sequence[Sequence[Any]],
    resume: Sequence[Checkpoint | None],
) -> list[SimulationResult]:
    """Check what a simulation is made of and run it. Return a result for each algorithm."""
    check_kind("federation", federation, Federation)
    for algorithm in algorithms:
        check_kind("algorithm", algorithm, Algorithm)
    checked = [checked_callbacks(callbacks_of_run) for callbacks_of_run in callbacks]
    return run_on(Simulated.of(model, federation, setup), algorithms, checked, resume)


def run_on(
    fleet: Simulated,
    algorithms: Sequence[Algorithm],
    callbacks: Sequence[Sequence[Any]],
    resume: Sequence[Checkpoint | None],
) -> list[SimulationResult]:
    """Run algorithms side by side on a fleet. Return a result for each.

    Args:
        fleet: the clients. Earlier runs may have used the same fleet.
        algorithms: one per run.
        callbacks: one sequence per run.
        resume: one checkpoint per run to resume from, all after the same round; None for runs that start.
    """
    started = time.perf_counter()
    rounds_done = [0 if checkpoint is None else checkpoint.round for checkpoint in resume]
    if len(resume) != len(algorithms) or len(set(rounds_done)) > 1:
        raise InputError("resume", f"rounds {rounds_done}", f"{len(algorithms)} checkpoints after the same round")
    if resume[0] is not None and rounds_done[0] >= fleet.setup.rounds:
        raise InputError("resume", f"round {rounds_done[0]}", f"a checkpoint before round {fleet.setup.rounds}")
    for algorithm in algorithms:
        fleet.check(algorithm)
    corrected = any(algorithm.traits.corrects for algorithm in algorithms)
    with fleet.ready(len(algorithms), None if resume[0] is None else resume[0].facts, corrected):
        runs = []
        for algorithm, callbacks_of_run, checkpoint in zip(algorithms, callbacks, resume, strict=True):
            run = Run(fleet.server(algorithm), fleet, fleet.setup, callbacks_of_run, started=started)
            run.begin(checkpoint)
            runs.append(run)
        return run_rounds(runs)
