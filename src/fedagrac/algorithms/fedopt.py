"""Server optimizers: FedAvgM, FedAdam, FedYogi and FedAdagrad, around FedAvg or around another algorithm.

The change of the model in a round is a gradient for an optimizer on the server. With Delta = x~ - x', where x' is
the next model of the algorithm inside:

- FedAvgM: m <- beta m + Delta, x = x~ - eta_g m. Hsu, Qi, Brown, "Measuring the Effects of Non-Identical Data
  Distribution for Federated Visual Classification", 2019.
- FedAdam, FedYogi, FedAdagrad: m <- beta_1 m + (1 - beta_1) Delta, x = x~ - eta_g m / (sqrt(v) + tau), each with
  its own v, which begins at tau^2. Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2.

Under unequal steps Delta is that of the algorithm inside: with FedAvg the mean displacement, in which fast clients
weigh more; with FedNova the normalised one; with FedaGrac or SCAFFOLD that of corrected steps. With personal
algorithms Delta is 0 in the coordinates that clients keep, and the server moves the shared ones alone.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Self

import torch

from fedagrac.algorithms.base import Algorithm, Cost, Rows, State, Traits
from fedagrac.algorithms.fedavg import FedAvg
from fedagrac.core.optimizers import PLAIN
from fedagrac.errors import InputError, positive, share

if TYPE_CHECKING:
    from torch import Tensor

    from fedagrac.core.cohort import Cohort, Population
    from fedagrac.core.layout import Layout
    from fedagrac.core.local import Plan, Result
    from fedagrac.core.robust import Aggregation

__all__ = ["FedAdagrad", "FedAdam", "FedAvgM", "FedYogi", "ServerOptimizer"]

M, V = "server_m", "server_v"
"""The names of the optimizer's vectors among those of the server."""


@dataclass(frozen=True)
class ServerOptimizer(Algorithm):
    """An optimizer on the server, around an algorithm.

    Attributes:
        server_lr: eta_g, the server's step size.
        inner: the algorithm inside; None for FedAvg. Its lr must be that of the whole, and so must its local
            optimizer, if it has one. A local optimizer given to the whole alone holds inside, too.
    """

    server_lr: float = 1.0
    inner: Algorithm | None = None

    def check(self) -> None:
        """Check the server's step size and the algorithm inside."""
        positive("server_lr", self.server_lr)
        if self.inner is not None and (
            not isinstance(self.inner, Algorithm) or isinstance(self.inner, ServerOptimizer)
        ):
            raise InputError(
                "inner", self.inner, "an algorithm without a server optimizer, such as FedaGrac(lr=0.1)"
            )
        if self.inner is not None and self.inner.lr != self.lr:
            raise InputError("inner.lr", self.inner.lr, f"the lr of the whole, {self.lr}, which holds inside, too")
        if self.inner is not None and self.inner.local not in (PLAIN, self.local):
            accepted = f"the local optimizer of the whole, {self.local}, which holds inside, too"
            raise InputError("inner.local", self.inner.local, accepted)
        self.inside.check()  # with the local optimizer of the whole

    def check_rounds(self, rounds: int) -> None:
        """Refuse schedules without a usable value in one of a run's rounds, here or in the algorithm inside."""
        super().check_rounds(rounds)
        self.inside.check_rounds(rounds)

    @property
    def inside(self) -> Algorithm:
        """The algorithm inside, with the step size and the local optimizer of the whole."""
        if self.inner is None:
            return FedAvg(lr=self.lr, local=self.local)
        return replace(self.inner, local=self.local)

    def with_lr(self, lr: float | Callable[[int], float]) -> Self:
        """Return the same algorithm with another step size, also inside."""
        return replace(self, lr=lr, inner=None if self.inner is None else self.inner.with_lr(lr))

    @property
    def keeps(self) -> tuple[str, ...]:
        """The names of the optimizer's vectors."""
        return (M, V)

    @property
    def traits(self) -> Traits:
        """Those of the algorithm inside; the server keeps the optimizer's vectors, too."""
        inside = self.inside.traits
        return replace(inside, vectors=inside.vectors + self.keeps)

    @abstractmethod
    def first(self, x: Tensor) -> State:
        """Return the optimizer's vectors before the first round."""

    @abstractmethod
    def step(self, state: State, delta: Tensor) -> tuple[Tensor, State]:
        """Return what to subtract from x~, and the optimizer's next vectors."""

    def start(self, x: Tensor, population: Population) -> State:
        """Return the state of the algorithm inside, and the optimizer's vectors."""
        return {**self.inside.start(x, population), **self.first(x)}

    def enter(self, state: State, cohort: Cohort) -> Rows:
        """Return the rows of the algorithm inside."""
        return self.inside.enter(state, cohort)

    def plan(self, state: State, rows: Rows, cohort: Cohort) -> Plan:
        """Return the plan of the algorithm inside."""
        return self.inside.plan(state, rows, cohort)

    def aggregate(
        self, state: State, rows: Rows, cohort: Cohort, plan: Plan, result: Result
    ) -> tuple[State, Rows]:
        """Return x = x~ - step(Delta), where the algorithm inside would return x~ - Delta.

        It is computed from the inner model, so that a step of Delta gives exactly that model.
        """
        within = {name: vector for name, vector in state.items() if name not in self.keeps}
        after, rows = self.inside.aggregate(within, rows, cohort, plan, result)
        delta = state["x"] - after["x"]
        step, vectors = self.step(state, delta)
        return {**after, "x": after["x"] + (delta - step), **vectors}, rows

    def check_model(self, layout: Layout, aggregate: Aggregation | None) -> None:
        """Refuse what the algorithm inside refuses."""
        self.inside.check_model(layout, aggregate)

    def own_models(self, state: State, rows: Rows, layout: Layout) -> Tensor:
        """Return the models of clients as the algorithm inside does, [m, d]."""
        return self.inside.own_models(state, rows, layout)

    def cost(self, cohort: Cohort) -> Cost:
        """Return the cost of the algorithm inside."""
        return self.inside.cost(cohort)


@dataclass(frozen=True)
class FedAvgM(ServerOptimizer):
    """m <- beta m + Delta; x = x~ - eta_g m.

    Attributes:
        momentum: beta, the share of m that is kept; 0 with eta_g = 1 is the algorithm inside.
        nesterov: whether to subtract Delta + beta m instead of m.

    Examples:
        >>> FedAvgM(lr=0.01).momentum
        0.9
    """

    momentum: float = 0.9
    nesterov: bool = False

    cites: ClassVar[tuple[str, ...]] = ("fedavgm",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedavgm"

    @property
    def keeps(self) -> tuple[str, ...]:
        """The momentum."""
        return (M,)

    def check(self) -> None:
        """Check every setting."""
        super().check()
        share("momentum", self.momentum)

    def first(self, x: Tensor) -> State:
        """Return a momentum of zero."""
        return {M: torch.zeros_like(x)}

    def step(self, state: State, delta: Tensor) -> tuple[Tensor, State]:
        """Return eta_g m, and m."""
        m = self.momentum * state[M] + delta
        return self.server_lr * (delta + self.momentum * m if self.nesterov else m), {M: m}


@dataclass(frozen=True)
class FedAdam(ServerOptimizer):
    """m <- beta_1 m + (1 - beta_1) Delta; v <- beta_2 v + (1 - beta_2) Delta^2; x = x~ - eta_g m/(sqrt(v) + tau).

    Attributes:
        server_lr: eta_g. A coordinate moves at most about this far in a round.
        beta1: the share of m that is kept.
        beta2: the share of v that is kept.
        tau: the adaptivity; v begins at tau^2.

    Examples:
        >>> FedAdam(lr=0.01).tau
        0.001
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    cites: ClassVar[tuple[str, ...]] = ("fedopt",)

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedadam"

    def check(self) -> None:
        """Check every setting."""
        super().check()
        for setting in ("beta1", "beta2"):
            share(setting, getattr(self, setting))
        positive("tau", self.tau)

    def first(self, x: Tensor) -> State:
        """Return m = 0 and v = tau^2."""
        return {M: torch.zeros_like(x), V: torch.full_like(x, self.tau**2)}

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return v <- beta_2 v + (1 - beta_2) Delta^2."""
        return self.beta2 * v + (1 - self.beta2) * delta**2

    def step(self, state: State, delta: Tensor) -> tuple[Tensor, State]:
        """Return eta_g m / (sqrt(v) + tau), and m and v."""
        m = self.beta1 * state[M] + (1 - self.beta1) * delta
        v = self.squares(state[V], delta)
        return self.server_lr * m / (v.sqrt() + self.tau), {M: m, V: v}


@dataclass(frozen=True)
class FedYogi(FedAdam):
    """FedAdam with v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2).

    Examples:
        >>> FedYogi(lr=0.01).name
        'fedyogi'
    """

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedyogi"

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return v <- v - (1 - beta_2) Delta^2 sign(v - Delta^2)."""
        return v - (1 - self.beta2) * delta**2 * torch.sign(v - delta**2)


@dataclass(frozen=True)
class FedAdagrad(FedAdam):
    """FedAdam with v <- v + Delta^2; beta2 is not used.

    Attributes:
        beta1: the share of m that is kept; 0 as in the paper.

    Examples:
        >>> FedAdagrad(lr=0.01).beta1
        0.0
    """

    beta1: float = 0.0

    @property
    def name(self) -> str:
        """The registered name."""
        return "fedadagrad"

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        """Return v <- v + Delta^2."""
        return v + delta**2
