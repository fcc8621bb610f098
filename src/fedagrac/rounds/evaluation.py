"""The evaluation of a model: on the test data, on held-out training samples, and on each client's own test set.

Inputs, targets and outputs may be trees of tensors. The loss gets them whole for each chunk of samples, a metric
for all samples.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from fedagrac.data.trees import leaves, map_leaves, named_leaves, num_samples
from fedagrac.errors import InputError
from fedagrac.rounds.measurement import CHUNKS, Measurement, Samples, bound, measure
from fedagrac.rounds.metrics import Metric, joined_outputs
from fedagrac.rounds.own_models import OwnModels, measure_tests, measure_with_own
from fedagrac.rounds.per_client import CLIENT_MEASURES, PerClient, client_measures
from fedagrac.rounds.record import VALIDATION

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.data.federation import Federation
    from fedagrac.engines.workload import Workload

__all__ = [
    "CHUNKS",
    "Measures",
    "Metric",
    "client_samples",
    "evaluate",
    "has_client_tests",
    "measured_names",
    "table_of",
    "try_evaluation",
]

TRIED = 8
"""The test samples of the trial before round 1."""


class Measures(dict[str, "float | None"]):
    """The results of an evaluation by name; None for what was not measured.

    Attributes:
        per_client: the results of each client on its own test set; None without such sets.

    Examples:
        >>> Measures({"test_loss": 0.5})["test_loss"], Measures.of({"test_loss": 0.5}).per_client
        (0.5, None)
    """

    def __init__(self, values: Mapping[str, float | None], per_client: PerClient | None = None) -> None:
        super().__init__(values)
        self.per_client = per_client

    @classmethod
    def of(cls, values: Mapping[str, float | None]) -> Measures:
        """Return the results of a fleet, which may be a plain dict."""
        return values if isinstance(values, Measures) else cls(values)

    def plain(self) -> dict[str, Any]:
        """Return the results as values that JSON can hold."""
        return {"values": dict(self), "clients": None if self.per_client is None else self.per_client.columns()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Measures:
        """Return the results of which `plain` made JSON."""
        return cls(plain["values"], None if plain["clients"] is None else PerClient.of(plain["clients"]))


def evaluate(
    workload: Workload,
    x: Tensor,
    metrics: Mapping[str, Metric],
    buffers: Tensor | None = None,
    steps: npt.NDArray[np.float64] | None = None,
    own: OwnModels | None = None,
) -> Measures:
    """Return test_accuracy, test_loss and the metrics by name; without test data they are None.

    Accuracies are None if the task is not classification. If training samples are held out, val_accuracy and
    val_loss are measured on them. If clients have test sets, the results of each client are in `per_client`, and
    their summary is among the values.

    Args:
        workload: the problem.
        x: the model.
        metrics: other measures of the test data.
        buffers: the moving buffers of the module, [q]; None for those of the user's module.
        steps: the mean K_i of each client, [M]; None if they are not known.
        own: the models that clients use; None if all use x with `buffers`. If models differ, all values are those
            of the clients' models. If only buffers differ, the clients' test sets are measured with them.
    """
    names = ["test_accuracy", "test_loss", *metrics]
    if own is not None and own.personal:
        values, by_client, held_out = _of_own_models(workload, own, metrics)
    else:
        values, by_client, held_out = _of_one_model(workload, x, metrics, buffers, own)
    values = {**dict.fromkeys(names), **values}
    if held_out is not None:
        values |= dict(zip(VALIDATION, (held_out.accuracy, held_out.loss), strict=True))
    if by_client is None:
        return Measures(values)
    table = table_of(by_client, workload.federation, steps)
    return Measures({**values, **client_measures(table)}, table)


Values = tuple[dict[str, "float | None"], "Measurement | None", "Measurement | None"]
"""The values of test data, the results on the clients' test sets, and those on held-out training samples."""


def _of_one_model(
    workload: Workload, x: Tensor, metrics: Mapping[str, Metric], buffers: Tensor | None, own: OwnModels | None
) -> Values:
    """Measure the model that all clients share; on their test sets with their own buffers, if they have any."""
    values: dict[str, float | None] = {}
    test, validation = _test_samples(workload), _validation_samples(workload)
    by_client = held_out = None
    with bound(workload, x, buffers):
        if test is not None:
            measured = measure(workload, test, keep=bool(metrics))
            values |= {"test_accuracy": measured.accuracy, "test_loss": measured.loss}
            if metrics:
                output, target = joined_outputs(measured.outputs)
                values |= {name: float(metric(output, target)) for name, metric in metrics.items()}
            if _pools_tests(workload.federation) and own is None:
                by_client = measured
        if validation is not None:
            held_out = measure(workload, validation)
        if by_client is None and own is None and has_client_tests(workload.federation):
            by_client = measure(workload, client_samples(workload))
    if own is not None and has_client_tests(workload.federation):
        by_client = measure_tests(workload, own, client_samples(workload))
    return values, by_client, held_out


def _of_own_models(workload: Workload, own: OwnModels, metrics: Mapping[str, Metric]) -> Values:
    """Measure the clients' own models."""
    federation = workload.federation
    common = None if _pools_tests(federation) else _test_samples(workload)
    tests = client_samples(workload) if has_client_tests(federation) else None
    return measure_with_own(
        workload, own, metrics, common, tests, lambda client: _validation_samples(workload, client)
    )


def measured_names(federation: Federation | None, metrics: Mapping[str, Metric] | None) -> list[str]:
    """Return the names of what an evaluation measures besides test_accuracy and test_loss.

    Examples:
        >>> measured_names(None, {"top5": lambda output, target: 0.0})
        ['top5']
    """
    names = list(metrics or ())
    if federation is not None and federation.validation is not None:
        names += VALIDATION
    return [*names, *CLIENT_MEASURES] if has_client_tests(federation) else names


def has_client_tests(federation: Federation | None) -> bool:
    """Return whether the clients of a federation have test sets of their own."""
    return federation is not None and federation.tests is not None


def table_of(measured: Measurement, federation: Federation, steps: npt.NDArray[np.float64] | None) -> PerClient:
    """Return the results of each client, which is a group of the measurement."""
    M = len(measured.samples)
    return PerClient(
        client=np.arange(M),
        name=federation.names,
        samples=measured.samples,
        steps=np.full(M, np.nan) if steps is None else steps,
        accuracy=measured.group_accuracies,
        loss=measured.group_losses,
    )


def client_samples(workload: Workload) -> Samples:
    """Return the clients' test sets, one group per client."""
    federation = workload.federation
    tests = federation.tests
    if tests is None:
        raise InputError("federation", federation, "one test set per client: Federation.from_arrays(..., tests=)")
    pooled = workload.test if _pools_tests(federation) else None  # on the device already
    inputs, targets = pooled or (tests.inputs, tests.targets)
    return _samples(workload, inputs, targets, np.asarray(tests.shares.sizes, np.int64))


def _test_samples(workload: Workload) -> Samples | None:
    """Return the test data, in one group or, if they are the clients' test sets, in one per client."""
    if workload.test is None:
        return None
    if _pools_tests(workload.federation):
        return client_samples(workload)
    return _samples(workload, *workload.test, np.array([num_samples(workload.test[0])]))


def _samples(workload: Workload, inputs: Any, targets: Any, sizes: npt.NDArray[np.int64]) -> Samples:
    """Return samples that are brought to the device and prepared when they are needed."""
    model = workload.model

    def rows(tree: Any, pool: Any, start: int, stop: int) -> Any:
        def part(leaf: Any, like: Any) -> Tensor:
            numbers = leaf[start:stop] if isinstance(leaf, Tensor) else leaf.gather(np.arange(start, stop))
            floating = numbers.is_floating_point() or like.dtype.is_floating_point
            placed: Tensor = numbers.to(model.device, model.dtype if floating else None)
            return placed

        return map_leaves(part, tree, pool)  # as the training samples are

    def load(start: int, stop: int) -> tuple[Any, Any]:
        X = rows(inputs, workload.inputs, start, stop)
        return workload.prepare(X), rows(targets, workload.targets, start, stop)

    return Samples(load, sizes)


def _validation_samples(workload: Workload, client: int | None = None) -> Samples | None:
    """Return the training samples that are held out, of one client or of all, in one group; None without any."""
    shares = workload.federation.validation
    if shares is None:
        return None
    clients = range(len(shares.sizes)) if client is None else [client]
    held_out = np.concatenate([shares[i] for i in clients])
    if not len(held_out):
        return None
    samples = workload.on_device(held_out)
    return Samples(lambda start, stop: workload.load(samples[start:stop]), np.array([len(samples)]))


def _pools_tests(federation: Federation) -> bool:
    """Return whether the test data are the clients' test sets, one after another."""
    tests, test = federation.tests, federation.test
    if tests is None or test is None:
        return False
    pairs = zip(leaves(test), leaves((tests.inputs, tests.targets)), strict=False)
    return all(one is other for one, other in pairs)


def try_evaluation(workload: Workload, metrics: Mapping[str, Metric]) -> None:
    """Evaluate a few test samples before round 1; raise InputError for what would fail after it.

    A metric that fails on a few samples is tried on all of them, because it may need more, or every class.
    """
    test = _test_samples(workload)
    if test is None:
        return
    total = int(test.sizes.sum())
    some = Samples(test.load, np.array([min(TRIED, total)]))
    with torch.random.fork_rng(), bound(workload, workload.model.initial()):
        inputs, targets = some.load(0, min(TRIED, total))
        try:
            workload.call(inputs)
        except Exception as error:
            accepted = f"a module that takes the test data in eval mode; it said: {error}"
            raise InputError("model", type(workload.model.module).__name__, accepted) from error
        try:
            chunks = measure(workload, some, keep=True).outputs
        except Exception as error:
            accepted = f"a function of (output, target) of the test data; it said: {error}"
            raise InputError("loss", _called(workload.loss), accepted) from error
        if metrics:
            _check_rows(chunks[0][0], num_samples(targets))
        for name, metric in metrics.items():
            if _fault(metric, *joined_outputs(chunks)) is None:
                continue
            fault = _fault(metric, *joined_outputs(measure(workload, test, keep=True).outputs))
            if fault is not None:
                raise InputError(f"metrics.{name}", _called(metric), fault)


def _check_rows(output: Any, rows: int) -> None:
    """Refuse outputs that cannot be joined for metrics."""
    for name, leaf in named_leaves("output", output):
        if not isinstance(leaf, Tensor) or leaf.ndim == 0 or len(leaf) != rows:
            shape = tuple(leaf.shape) if isinstance(leaf, Tensor) else leaf
            raise InputError(f"model {name}", shape, "a tensor with one row per sample, as metrics need")


def _fault(metric: Metric, output: Any, target: Any) -> str | None:
    """Return what a metric should be if it fails on an output and a target, or None if it works."""
    shapes = ", ".join(
        f"{name} {tuple(leaf.shape)} {str(leaf.dtype).removeprefix('torch.')}"
        for name, leaf in (*named_leaves("output", output), *named_leaves("target", target))
    )
    try:
        value = metric(output, target)
    except Exception as error:
        return f"a function of ({shapes}); it said: {error}"
    if isinstance(value, Tensor) and value.numel() == 1:
        return None
    if isinstance(value, numbers.Real) or (isinstance(value, np.ndarray) and value.size == 1):
        return None
    returned = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    return f"a function (output, target) -> scalar; it returned {returned}"


def _called(function: Any) -> str:
    """Return the name of a function, or the type of another callable."""
    return str(getattr(function, "__name__", type(function).__name__))
