"""The contract of an algorithm: a plan for the local rule, and one server rule.

An algorithm is a frozen dataclass of numbers. It sees vectors and a `Cohort`; batches, devices, processes and
files do not belong here. All state is passed in and returned as values: the server's vectors (`State`, with the
model under "x") and the rows that it keeps for the clients of a cohort (`Rows`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
import torch

from fedagrac.core.optimizers import PLAIN, LocalOptimizer
from fedagrac.core.schedule import check_rounds, check_value, value_at
from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population
    from fedagrac.core.layout import Layout
    from fedagrac.core.local import Plan, Result
    from fedagrac.core.robust import Aggregation

__all__ = [
    "Algorithm",
    "Cost",
    "Rows",
    "State",
    "Stateless",
    "Traits",
    "average",
    "known_layout",
    "orientation_traits",
    "reference_orientation",
    "start_orientation",
    "starting_rows",
    "zero_rows",
]

State = Mapping[str, "Tensor"]
"""The server's vectors by name, each [d]; "x" is the global model."""

Rows = Mapping[str, "Tensor"]
"""Client state of a cohort by name, each [m, d]; counts are [m, 1]."""


@dataclass(frozen=True)
class Traits:
    """What an algorithm declares about itself.

    Attributes:
        vectors: the server's vectors in the model's precision; "x" is the model.
        sums: the server's vectors that are updated by adding to them; they may be kept in float64.
        rows: the vectors that the server keeps for each client.
        counts: those of the rows that hold one number in float64 instead of a vector, such as a count.
        start: what every client sends before round 1: "nothing", or its full local "gradients" at x_1.
        exchanges: the number of exchanges in one round. With 2, clients first send a gradient at x~.
        needs_steps: whether the local rule depends on K_i, so that K_i must be known before clients begin.
        lr: whether eta is the size of one local "step" or is divided among the steps of a client's "round".
        first_steps: how many steps a first gradient averages, at most an epoch's for "pass"; None if clients are
            never asked for one.
        personal: whether clients use models of their own (`Algorithm.own_models`) instead of the server's.
        own_buffers: whether every client must keep moving buffers of its own.
        labels: whether plans depend on the classes that clients hold.
    """

    vectors: tuple[str, ...] = ("x",)
    sums: tuple[str, ...] = ()
    rows: tuple[str, ...] = ()
    counts: tuple[str, ...] = ()
    start: Literal["nothing", "gradients"] = "nothing"
    exchanges: Literal[1, 2] = 1
    needs_steps: bool = False
    lr: Literal["step", "round"] = "step"
    first_steps: int | Literal["epoch", "pass"] | None = None
    personal: bool = False
    own_buffers: bool = False
    labels: bool = False

    @property
    def state(self) -> frozenset[str]:
        """The names of all vectors of the server."""
        return frozenset(self.vectors + self.sums)

    @property
    def corrects(self) -> bool:
        """Whether steps may have a correction, which comes from what the server keeps or from a first exchange.

        Examples:
            >>> Traits().corrects, Traits(rows=("h",)).corrects
            (False, True)
        """
        return bool(self.rows) or self.exchanges > 1 or self.state != {"x"}


@dataclass(frozen=True, eq=False)
class Cost:
    """What one round costs each member of a cohort besides its K_i steps.

    Attributes:
        down: the number of d-vectors that the member receives, [m].
        up: the number of d-vectors that it sends, [m].
        extra_steps: other gradient computations, counted in steps, [m].
        down_bytes: the bytes that it receives besides these vectors, such as a part of one, [m].
        up_bytes: the bytes that it sends besides these vectors, such as a compressed one, [m].
        step_work: the work of one of its steps, [m]: 1 for a step of the whole model; a sub-network of half the
            width takes about 0.25.

    Examples:
        >>> cost = Cost(down=np.array([1, 1]), up=np.array([0, 1]), extra_steps=np.array([0, 3]), up_bytes=10)
        >>> [moved.tolist() for moved in cost.bytes(vector=400)], cost.work(np.array([5, 5])).tolist()
        ([[400, 400], [10, 410]], [5, 8])
    """

    down: npt.NDArray[np.int64]
    up: npt.NDArray[np.int64]
    extra_steps: npt.NDArray[np.int64]
    down_bytes: npt.NDArray[np.int64] | int = 0
    up_bytes: npt.NDArray[np.int64] | int = 0
    step_work: npt.NDArray[np.float64] | float = 1

    @classmethod
    def of(
        cls,
        cohort: Cohort,
        down: int | npt.NDArray[np.int64] = 0,
        up: int | npt.NDArray[np.int64] = 0,
        extra_steps: int | npt.NDArray[np.int64] = 0,
        *,
        down_bytes: int | npt.NDArray[np.int64] = 0,
        up_bytes: int | npt.NDArray[np.int64] = 0,
        step_work: float | npt.NDArray[np.float64] = 1.0,
    ) -> Cost:
        """Make a cost. A single number holds for every member."""
        counts = {
            "down": down,
            "up": up,
            "extra_steps": extra_steps,
            "down_bytes": down_bytes,
            "up_bytes": up_bytes,
        }
        return cls(
            **{name: _of_each(name, value, cohort, "iu") for name, value in counts.items()},
            step_work=_of_each("step_work", step_work, cohort, "iuf"),
        )

    def bytes(self, vector: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the bytes that each member receives and sends, [m] each, where a d-vector has `vector` bytes."""
        return self.down * vector + self.down_bytes, self.up * vector + self.up_bytes

    def work(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        """Return the work of each member with K_i steps, counted in steps of the whole model, [m]."""
        return (steps + self.extra_steps) * self.step_work


def _of_each(name: str, value: Any, cohort: Cohort, kinds: str) -> npt.NDArray[Any]:
    """Return a number for each member; refuse other numbers of them, other kinds, and negative ones."""
    values = np.asarray(value)
    if values.shape not in ((), (1,), (len(cohort),)):
        accepted = f"one number, or one for each of {len(cohort)} members"
        raise InputError(f"Cost.{name}", f"shape {values.shape}", accepted)
    if values.dtype.kind not in kinds or not (values >= 0).all() or not np.isfinite(values).all():
        accepted = "integers of at least 0" if "f" not in kinds else "finite numbers of at least 0"
        raise InputError(f"Cost.{name}", value, accepted)
    return np.broadcast_to(values, (len(cohort),))


@dataclass(frozen=True)
class Algorithm(ABC):
    """The base class of algorithms: coefficients of the local rule, and one server rule.

    Attributes:
        lr: eta, the local step size: a number, or a schedule over rounds such as `schedule.Exponential`.
        local: the local optimizer, such as `SGD(momentum=0.9)`.
    """

    lr: float | Callable[[int], float]
    local: LocalOptimizer = field(default=PLAIN, kw_only=True)

    cites: ClassVar[tuple[str, ...]] = ()
    """The keys in `fedagrac.citations` of the papers that introduced the algorithm."""

    def __post_init__(self) -> None:
        check_value("lr", self.lr)
        if not isinstance(self.local, LocalOptimizer):
            raise InputError("local", self.local, "a local optimizer, such as fedagrac.SGD(momentum=0.9)")
        self.check()

    @property
    def papers(self) -> tuple[str, ...]:
        """The keys of its papers, and of those of an algorithm inside it."""
        values = [getattr(self, setting.name) for setting in fields(self)]
        inside = [value for value in values if isinstance(value, Algorithm)]
        return self.cites + tuple(key for one in inside for key in one.papers)

    def check_rounds(self, rounds: int) -> None:
        """Refuse a schedule of lr that is not above 0 in one of a run's rounds.

        A step size of 0 is refused, too: mean gradients and other rules divide by it.
        """
        check_rounds(f"lr of {self.name}", self.lr, rounds)

    def lr_in(self, cohort: Cohort) -> float:
        """Return eta in the round of a cohort."""
        return value_at("lr", self.lr, cohort.round)

    def with_lr(self, lr: float | Callable[[int], float]) -> Self:
        """Return the same algorithm with another step size.

        Examples:
            >>> from fedagrac import FedAvg
            >>> FedAvg(lr=0.1).with_lr(0.2)
            FedAvg(lr=0.2, local=SGD())
        """
        return replace(self, lr=lr)

    def check(self) -> None:  # noqa: B027  # an algorithm may have no settings to check
        """Check the settings of the algorithm."""

    @property
    @abstractmethod
    def name(self) -> str:
        """The registered name."""

    @property
    @abstractmethod
    def traits(self) -> Traits:
        """What the algorithm declares about itself."""

    @abstractmethod
    def start(self, x: Tensor, population: Population) -> State:
        """Return the server's state before the first round."""

    @abstractmethod
    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return the rows of clients that take part for the first time."""

    @abstractmethod
    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return what every member of the cohort does in this round."""

    @abstractmethod
    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return the server's next state and the members' next rows."""

    def check_model(self, layout: Layout, aggregate: Aggregation | None) -> None:  # noqa: B027
        """Refuse a model, or a robust rule, with which the algorithm cannot work. By default none is refused."""

    def own_models(self, state: State, rows: Rows, layout: Layout) -> Tensor:
        """Return the models that clients with these rows use, [m, d]. Only personal algorithms have them."""
        raise NotImplementedError(f"{type(self).__name__} has personal traits but no own_models")

    @abstractmethod
    def cost(self, cohort: Cohort) -> Cost:
        """Return what each member receives, sends and computes besides its steps."""


class Stateless(Algorithm):
    """An algorithm whose only state is the model x."""

    @property
    def traits(self) -> Traits:
        """The defaults: the server keeps x alone, and clients send nothing before round 1."""
        return Traits()

    def start(self, x: Tensor, population: Population) -> State:
        """Return the model alone."""
        return {"x": x}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return no rows, because the server keeps nothing for clients."""
        return {}


def average(cohort: Cohort, result: Result) -> Tensor:
    """Return the weighted mean of the clients' models, sum_i omega_i x_i."""
    return cohort.sum(cohort.weights, result.models)


def orientation_traits(init: str, rows: tuple[str, ...]) -> Traits:
    """Return the traits of an algorithm that keeps nu and, with init="full", x_1."""
    if init == "full":
        return Traits(vectors=("x", "x1"), sums=("nu",), rows=rows, start="gradients")
    return Traits(sums=("nu",), rows=rows)


def start_orientation(x: Tensor, population: Population, init: str) -> State:
    """Return the state before round 1: x, nu and, with init="full", x_1.

    nu is the global gradient at x_1 with init="full", otherwise zero.
    """
    if init == "full":
        return {"x": x, "nu": population.gradient(x), "x1": x}
    return {"x": x, "nu": torch.zeros_like(x)}


def starting_rows(state: State, cohort: Cohort) -> Tensor:
    """Return nu_i of clients that take part for the first time: their gradient at x_1, or zeros, [m, d]."""
    if "x1" in state:
        return cohort.starting_gradients(state["x1"])
    return zero_rows(state, cohort)


def known_layout(layout: Layout | None, x: Tensor) -> Layout:
    """Return the layout of a module whose parameters are x; refuse another one, or none."""
    if layout is None or layout.size != len(x):
        raise InputError("layout", layout, f"the layout of a module with {len(x)} parameters")
    return layout


def zero_rows(state: State, cohort: Cohort) -> Tensor:
    """Return a row of zeros like x for each member, [m, d]."""
    return state["x"].new_zeros((len(cohort), len(state["x"])))


def reference_orientation(nu: Tensor, sent_before: Tensor, sent: Tensor, cohort: Cohort) -> Tensor:
    """Return nu = sum over all M clients of omega_i v_i; absent clients count with the v_i they sent last.

    If all clients take part, this is the plain sum. Otherwise nu is updated by the change of the cohort's v_i.
    """
    omega = cohort.population_weights
    if cohort.everyone:
        return cohort.sum(omega, sent)
    return cohort.update(nu, omega, sent_before, sent)
