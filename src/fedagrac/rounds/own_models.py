"""The evaluation of clients that do not use the server's model, but models or moving buffers of their own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.rounds.measurement import Measurement, Samples, bound, joined, measure
from fedagrac.rounds.metrics import joined_outputs

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.engines.workload import Workload
    from fedagrac.rounds.metrics import Metric

__all__ = ["OwnModels", "measure_tests", "measure_with_own"]


@dataclass(frozen=True, eq=False)
class OwnModels:
    """The models that the clients of a run use.

    Attributes:
        weights: omega_i, [M].
        of: returns a client's model [d] and its moving buffers [q], or None. Processes that share a simulation
            call it together, for all clients in order.
        personal: whether models differ. Otherwise only the buffers do.
    """

    weights: npt.NDArray[np.float64]
    of: Callable[[int], tuple[Tensor, Tensor | None]]
    personal: bool

    def pass_on(self) -> None:
        """Take part in passing on the models to a process that measures them."""
        for client in range(len(self.weights)):
            self.of(client)


def measure_tests(workload: Workload, own: OwnModels, tests: Samples) -> Measurement:
    """Measure each client's test set with the client's own model and buffers."""
    parts = []
    for client in range(len(own.weights)):
        with bound(workload, *own.of(client)):
            parts.append(measure(workload, tests.group(client)))
    return joined(parts)


def measure_with_own(
    workload: Workload,
    own: OwnModels,
    metrics: Mapping[str, Metric],
    common: Samples | None,
    tests: Samples | None,
    held_out: Callable[[int], Samples | None],
) -> tuple[dict[str, float | None], Measurement | None, Measurement | None]:
    """Measure every client's own model. Return the values of test data, and the results on two kinds of own data.

    A value of the common test data is the mean over clients, weighted by omega. Without common test data it is
    that over all test samples, each with the model of its client.

    Args:
        workload: the problem.
        own: the models.
        metrics: other measures of the test data.
        common: the test data that all clients share, or None.
        tests: the test sets of the clients, one group per client, or None.
        held_out: returns the training samples that a client holds out, or None.
    """
    on_common: list[dict[str, float | None]] = []
    on_tests, on_held_out = [], []
    for client in range(len(own.weights)):
        with bound(workload, *own.of(client)):
            if common is not None:
                on_common.append(_values(measure(workload, common, keep=bool(metrics)), metrics))
            if tests is not None:
                on_tests.append(measure(workload, tests.group(client), keep=bool(metrics) and common is None))
            if (samples := held_out(client)) is not None:
                on_held_out.append(measure(workload, samples))
    by_client = joined(on_tests) if on_tests else None
    values: dict[str, float | None] = {}
    if on_common:
        values = {name: _mean([one[name] for one in on_common], own.weights) for name in on_common[0]}
    elif by_client is not None:
        outputs = [chunk for part in on_tests for chunk in part.outputs]
        values = _values(by_client, metrics, outputs)
    return values, by_client, joined(on_held_out) if on_held_out else None


def _values(
    measured: Measurement, metrics: Mapping[str, Metric], outputs: list[tuple[object, object]] | None = None
) -> dict[str, float | None]:
    """Return the values of test data by name."""
    values: dict[str, float | None] = {"test_accuracy": measured.accuracy, "test_loss": measured.loss}
    if metrics:
        output, target = joined_outputs(measured.outputs if outputs is None else outputs)
        values |= {name: float(metric(output, target)) for name, metric in metrics.items()}
    return values


def _mean(values: list[float | None], weights: npt.NDArray[np.float64]) -> float | None:
    """Return a weighted mean over clients; None if a value is missing."""
    known = [value for value in values if value is not None]
    return float(np.dot(weights, known)) if len(known) == len(values) else None
