"""The options of a run as one value, checked once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from fedagrac.core.robust import Aggregation
from fedagrac.data.batches import SAMPLINGS, Sampling
from fedagrac.engines import ENGINES, Engine, Loss, Workload
from fedagrac.engines.precision import PRECISIONS, Precision, check_precision
from fedagrac.errors import InputError, count, non_negative, one_of
from fedagrac.heterogeneity import Clock, Constant, Participation, StepSchedule
from fedagrac.heterogeneity.steps import step_schedule
from fedagrac.rounds.evaluation import Metric
from fedagrac.rounds.guard import Guard
from fedagrac.rounds.record import RESERVED
from fedagrac.rounds.stop import Stop

if TYPE_CHECKING:
    from fedagrac.heterogeneity.steps import Steps
    from fedagrac.models.vector import VectorModel

__all__ = ["Setup"]

DEFAULT_STEPS = Constant(10)


@dataclass(frozen=True, kw_only=True, eq=False)
class Setup:
    """The options of `simulate`.

    Attributes:
        rounds: the largest number of rounds.
        steps: how many local steps each client runs: a schedule such as `Gaussian(500, 10_000)`, an integer for
            all, a list with those of each client or one list per round, a function (round, num_clients) -> counts,
            or a trace: a pandas DataFrame, or the path of a CSV file, with a column for each client and a row for
            each round, or with the columns round, client and steps.
        batch_size: samples per step; None for the client's full data.
        loss: (output, target) -> scalar mean over the batch; None for cross-entropy.
        sampling: "replacement" draws every batch anew, "shuffle" walks reshuffled epochs, "cyclic" walks the
            client's samples in one fixed order and continues where its last round ended.
        participation: None for all clients, a number or a fraction of clients each round, or a `Participation`.
        weight_decay: the coefficient of l2 regularisation: weight_decay * x is added to every gradient, after
            clipping.
        buffers: what becomes of buffers that a forward pass changes, such as BatchNorm's running statistics.
            "average": clients start from the weighted mean of what the last cohort ended with. "local": each
            client goes on with its own; the mean is used for evaluation only. "frozen": every step begins with
            the buffers of the given module.
        seed: the key of every random draw of the run.
        engine: "serial" runs one client after another, "lanes" many at once. "auto" takes the faster one: by a
            rule in a short run, by a measurement that is kept on disk in a longer one. A function that makes an
            engine is accepted, too.
        compile: whether steps are compiled to machine code; "auto" compiles on a CPU if the run is long enough to
            repay it. On a GPU steps are recorded anyway, and compiled before only if this is True.
        device: "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1", ...
        dtype: torch.float32 or torch.float64; None for the model's.
        precision: "tf32" allows reduced-precision matrix products on GPUs. "bf16" rounds the numbers that the
            module multiplies to bfloat16, in training and evaluation; models, losses and updates stay float32.
        eval_every: the number of rounds between evaluations. The last round is evaluated, too, unless a callback
            ended the run.
        metrics: other measures of the test data: {name: (output, target) -> scalar}.
        stop: when to end the run early.
        clock: simulated time; by default that of the devices in `steps`, or 1 ms per step.
        guard: drops updates that are not finite or far too long, such as `Guard(factor=10.0)`; None for no guard.
        aggregate: a robust rule in place of sums over clients: `Median()`, `TrimmedMean(share=0.1)` or
            `NormBounded(factor=1.0)`; None for the sums.
        state_dir: a folder in which to keep the clients' state if it does not fit into memory.

    Examples:
        >>> Setup(rounds=5).batch_size
        20
        >>> Setup(rounds=0)
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: rounds = 0: expected an integer of at least 1
    """

    rounds: int = 100
    steps: Steps = DEFAULT_STEPS
    batch_size: int | None = 20
    loss: Loss | None = None
    sampling: Sampling = "replacement"
    participation: int | float | Participation | None = None
    weight_decay: float = 0.0
    buffers: Literal["average", "local", "frozen"] = "average"
    seed: int = 0
    engine: Literal["auto", "serial", "lanes"] | Callable[[Workload], Engine] = "auto"
    compile: bool | Literal["auto"] = "auto"
    device: str = "auto"
    dtype: torch.dtype | None = None
    precision: Precision = "float32"
    eval_every: int = 1
    metrics: Mapping[str, Metric] | None = None
    stop: Stop | None = None
    clock: Clock | None = None
    guard: Guard | None = None
    aggregate: Aggregation | None = None
    state_dir: str | Path | None = None

    @classmethod
    def of(cls, rounds: int, **options: Any) -> Setup:
        """Make a setup from options by name; raise InputError for an unknown name."""
        names = [field.name for field in dataclasses.fields(cls) if field.name != "rounds"]
        for name in options:
            one_of("option", name, names)
        return cls(rounds=rounds, **options)

    def __post_init__(self) -> None:
        count("rounds", self.rounds)
        count("eval_every", self.eval_every)
        object.__setattr__(self, "steps", step_schedule(self.steps))
        if self.guard is not None:
            check_kind("guard", self.guard, Guard)
        if self.aggregate is not None:
            check_kind("aggregate", self.aggregate, Aggregation)
        _check_metrics(self.metrics or {})
        if self.batch_size is not None:
            count("batch_size", self.batch_size)
        one_of("sampling", self.sampling, SAMPLINGS)
        non_negative("weight_decay", self.weight_decay)
        one_of("buffers", self.buffers, ["average", "local", "frozen"])
        count("seed", self.seed, least=0)
        if not callable(self.engine):
            one_of("engine", self.engine, ["auto", *ENGINES])
        if self.compile != "auto" and not isinstance(self.compile, bool):
            raise InputError("compile", self.compile, '"auto", True or False')
        one_of("precision", self.precision, PRECISIONS)
        if self.participation is not None and not isinstance(self.participation, Participation):
            object.__setattr__(self, "participation", Participation(self.participation))

    @property
    def schedule(self) -> StepSchedule:
        """How many local steps each client runs in each round."""
        assert isinstance(self.steps, StepSchedule)
        return self.steps

    @property
    def cohorts(self) -> Participation | None:
        """The rule by which clients take part in a round; None if all do."""
        assert self.participation is None or isinstance(self.participation, Participation)
        return self.participation

    def torch_device(self) -> torch.device:
        """Return the device; raise InputError if it is not usable or does not support the precision."""
        device = _device(self.device)
        check_precision(self.precision, device)
        return device

    def workload(self, model: VectorModel, federation: Any) -> Workload:
        """Return the problem as an engine sees it."""
        return Workload.of(
            model, federation, self.loss, self.batch_size, self.sampling, self.weight_decay, self.seed,
            precision=self.precision,
        )  # fmt: skip


EXAMPLES = {
    "federation": ", from Federation.load or Federation.from_arrays",
    "algorithm": " such as FedaGrac(lr=0.01)",
    "guard": " such as Guard(factor=10.0), or None",
    "aggregate": " such as Median() or TrimmedMean(share=0.1), or None",
}


def check_kind(field: str, value: Any, kind: type) -> None:
    """Check that a value is an object of a class of this package."""
    if not isinstance(value, kind):
        raise InputError(field, value, f"a fedagrac {kind.__name__}{EXAMPLES[field]}")


def _check_metrics(metrics: Mapping[str, Metric]) -> None:
    """Check that metrics are functions whose names are free."""
    for name, metric in metrics.items():
        if name in RESERVED:
            raise InputError("metrics", name, "a name that no field of the history has")
        if not callable(metric):
            raise InputError(f"metrics.{name}", metric, "a function (output, target) -> scalar")


def _device(name: str | torch.device) -> torch.device:
    """Return a device by its name; raise InputError if it is not usable."""
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
