"""Models of one client: the global model after local fine-tuning, and the Local-only baseline without exchange."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.local import Plan
from fedagrac.data.federation import Federation
from fedagrac.errors import InputError, positive
from fedagrac.heterogeneity.steps import checked_counts
from fedagrac.rounds.evaluation import client_samples, table_of
from fedagrac.rounds.fleet import Simulated, first_buffers
from fedagrac.rounds.measurement import Measurement, bound, measure
from fedagrac.rounds.setup import Setup, check_kind
from fedagrac.storage.run_folder import RunFolder

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor, nn

    from fedagrac.heterogeneity.steps import Steps
    from fedagrac.rounds.per_client import PerClient
    from fedagrac.rounds.record import SimulationResult

__all__ = ["fine_tune", "local_only"]

MODELS_BYTES = 2**28
"""The most memory for the models of clients that train together."""


def fine_tune(
    result: SimulationResult,
    lr: float,
    steps: Steps = 10,
    *,
    folder: str | Path | None = None,
    **options: Any,
) -> PerClient:
    """Let each client train the final model on its own data. Return the results on its own test set.

    Every client starts from the final model of a run and makes `steps` plain SGD steps. The results before are in
    `result.per_client`. The batches are those of the round after the last one.

    Args:
        result: the result of a run whose clients have test sets.
        lr: the step size.
        steps: the number of steps of each client; a schedule gives those of its first round.
        folder: the run folder in which to store the results for its report; None to store nothing.
        options: loss, batch_size, sampling, weight_decay, seed, engine, device, ... as in `simulate`.

    Examples:
        >>> import numpy as np, torch, fedagrac as fg
        >>> data = [(np.ones((4, 1)), np.full((4, 1), target)) for target in (1.0, 3.0)]
        >>> fed = fg.Federation.from_arrays(data, tests=data)
        >>> mse = torch.nn.functional.mse_loss
        >>> result = fg.simulate(torch.nn.Linear(1, 1), fed, fg.FedAvg(lr=0.1), loss=mse)
        >>> tuned = fg.fine_tune(result, lr=0.1, steps=50, loss=mse)
        >>> bool((tuned.loss < result.per_client.loss).all())
        True
    """
    if result.federation is None:
        raise InputError("result", "a run on other machines", "a simulation, whose clients are on this one")
    setup = Setup.of(rounds=1, steps=steps, **options)
    stored = None if folder is None else RunFolder(Path(folder))
    if stored is not None:
        stored.read_per_client()  # refuses another folder before any work starts
    fleet = Simulated.of(result.model(), result.federation, setup)
    steps_before = None if result.per_client is None else result.per_client.steps
    table = _trained_alone(fleet, positive("lr", lr), len(result.history), steps_before)
    if stored is not None and fleet.ranks.rank == 0:
        stored.add_tuned(table.columns())
    return table


def local_only(
    model: nn.Module,
    federation: Federation,
    lr: float,
    rounds: int = Setup.rounds,
    *,
    steps: Steps = Setup.steps,
    **options: Any,
) -> PerClient:
    """Let each client train alone from x_1, without any exchange. Return the results on its own test set.

    Every client makes the steps, on the batches, that it would make in `simulate` with the same options: K_i plain
    SGD steps in every round in which it takes part.

    Args:
        model: any nn.Module; its weights are x_1 of every client.
        federation: the clients, with a test set each.
        lr: the step size.
        rounds: the number of rounds.
        steps: how many steps each client makes in each round.
        options: loss, batch_size, participation, seed, engine, device, ... as in `simulate`.

    Examples:
        >>> import numpy as np, torch, fedagrac as fg
        >>> data = [(np.ones((4, 1)), np.full((4, 1), target)) for target in (1.0, 3.0)]
        >>> fed = fg.Federation.from_arrays(data, tests=data)
        >>> alone = fg.local_only(torch.nn.Linear(1, 1), fed, lr=0.1, loss=torch.nn.functional.mse_loss)
        >>> bool((alone.loss < 1e-6).all())
        True
    """
    check_kind("federation", federation, Federation)
    setup = Setup.of(rounds=rounds, steps=steps, **options)
    return _trained_alone(Simulated.of(model, federation, setup), positive("lr", lr), 0, None)


def _trained_alone(
    fleet: Simulated, lr: float, first_round: int, steps: npt.NDArray[np.float64] | None
) -> PerClient:
    """Train every client alone from the fleet's x, and measure its model on its own test set.

    Args:
        fleet: the clients.
        lr: the step size.
        first_round: the number of the first round, which names the batches.
        steps: the mean K_i to show for each client; None for those of the fleet.
    """
    samples = client_samples(fleet.workload)
    measured = []
    with fleet.ready():
        everyone = np.arange(fleet.federation.num_clients)
        local = everyone[fleet.ranks.own(everyone)]
        for clients in _packs(local, fleet.x):
            models, buffers = _models(fleet, lr, first_round, clients)
            for row, client in enumerate(clients.tolist()):
                group = samples.group(client)
                if not group.sizes.sum():
                    continue
                with bound(fleet.workload, models[row], None if buffers is None else buffers[row]):
                    measured.append((client, measure(fleet.workload, group)))
        results = _by_client(measured, samples.sizes, fleet)
    return table_of(results, fleet.federation, fleet.mean_steps if steps is None else steps)


def _packs(clients: npt.NDArray[np.int64], x: Tensor) -> Iterator[npt.NDArray[np.int64]]:
    """Yield clients whose models fit into memory together."""
    most = max(1, MODELS_BYTES // (len(x) * x.element_size()))
    for start in range(0, len(clients), most):
        yield clients[start : start + most]


def _models(
    fleet: Simulated, lr: float, first_round: int, clients: npt.NDArray[np.int64]
) -> tuple[Tensor, Tensor | None]:
    """Return the models and moving buffers of clients that train alone for all rounds, [m, d] and [m, q]."""
    setup, M = fleet.setup, fleet.federation.num_clients
    models = fleet.x.expand(len(clients), -1).clone()
    first = first_buffers(fleet.model, setup.buffers)
    buffers = None if first is None else first.expand(len(clients), -1).clone()
    for round in range(setup.rounds):
        present = np.arange(M) if setup.cohorts is None else fleet.draw(round).clients
        rows = np.flatnonzero(np.isin(clients, present))
        if not len(rows):
            continue
        index = torch.from_numpy(rows).to(models.device)
        plan = Plan.of(checked_counts(fleet.steps, round, M, setup.seed)[clients[rows]], lr)
        if buffers is not None:
            plan = replace(plan, buffers=buffers[index])
        result = fleet.engine.run(plan, models[index], clients[rows], first_round + round)
        models[index] = result.models
        if buffers is not None and result.buffers is not None:
            buffers[index] = result.buffers
    return models, buffers


def _by_client(
    measured: list[tuple[int, Measurement]], sizes: npt.NDArray[np.int64], fleet: Simulated
) -> Measurement:
    """Return the measurements of single clients as one, with a group per client, on all processes."""
    columns = torch.zeros(5, len(sizes), dtype=torch.float64)
    for client, one in measured:
        columns[:2, client] = torch.tensor([one.losses[0], one.masses[0]])
        if one.right is not None and one.counted is not None:
            columns[2:, client] = torch.tensor([one.right[0], one.counted[0], 1])
    losses, masses, right, counted, classified = fleet.ranks.total(columns).numpy()
    return Measurement(
        samples=sizes,
        losses=losses,
        masses=masses,
        right=right.astype(np.int64) if classified.any() else None,
        counted=counted.astype(np.int64) if classified.any() else None,
        outputs=[],
    )
