"""Local optimizers: what becomes of a gradient before a client's model moves along it.

In the local rule (`fedagrac.core.local`) an optimizer is U with its clipping,

    x <- x - eta_i * U( clip(g) + weight_decay * x + c_i + mu_i * (x - x~) )

where g is the gradient of the loss alone: weight decay is added after clipping, as with `torch.optim` after
`torch.nn.utils.clip_grad_norm_`. An optimizer is a frozen dataclass of numbers. Its state is a few vectors for
each client, which begin at zero in every round unless the algorithm keeps them (`Plan.slots`). With the same
gradients the steps are those of `torch.optim`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.errors import InputError, flag, non_negative, positive, share

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["PLAIN", "SGD", "Adam", "AdamW", "LocalOptimizer", "ascent_factors", "clip_factors", "numbers_after"]

CLIP_EPS = 1e-6
"""What `torch.nn.utils.clip_grad_norm_` adds to a norm before it divides by it."""

ASCENT_EPS = 1e-12
"""Added to a norm before rho is divided by it."""


@dataclass(frozen=True, kw_only=True, repr=False)
class LocalOptimizer(ABC):
    """The base class of local optimizers.

    Attributes:
        clip: the largest norm of a gradient; None for no limit. A longer gradient is shortened to it, before
            weight decay and the correction are added.
    """

    clip: float | None = None

    def __repr__(self) -> str:
        changed = [(f.name, value) for f in fields(self) if (value := getattr(self, f.name)) != f.default]
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in changed)})"

    def __post_init__(self) -> None:
        if self.clip is not None:
            positive("clip", self.clip)
        self.check()

    @abstractmethod
    def check(self) -> None:
        """Check the settings of the optimizer."""

    @property
    @abstractmethod
    def slots(self) -> int:
        """The number of vectors that it keeps for each client during a round."""

    @property
    def identity(self) -> bool:
        """Whether U is the identity, so that engines need not call `direction`."""
        return False

    @property
    def plain(self) -> bool:
        """Whether U is the identity and nothing is clipped."""
        return self.identity and self.clip is None

    def numbers(self, k: int) -> tuple[float, ...]:
        """Return the numbers that depend on how many steps were made before this one."""
        return ()

    @abstractmethod
    def direction(self, G: Tensor, X: Tensor, slots: Sequence[Tensor], numbers: Sequence[Any]) -> Tensor:
        """Return U(G), which may be G itself, and change the slots in place.

        Args:
            G: the gradients with their corrections, of any shape; it may be changed.
            X: the models, like G.
            slots: the state, each like G.
            numbers: what `numbers` returns for this step, as numbers or as tensors that multiply G: one number,
                or one for each client if clients made different numbers of steps before this round.
        """

    def work(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return the sum of the coefficients with which a round's gradients enter x~ - x_i, divided by eta_i, [m].

        FedNova divides by it. Raise InputError if the displacement is not linear in the gradients.
        """
        raise InputError("local", self, "SGD: with this optimizer the displacement is not a sum of gradients")


@dataclass(frozen=True, kw_only=True, repr=False)
class SGD(LocalOptimizer):
    """Plain steps, or steps with momentum: b <- momentum b + g; U = b, or g + momentum b with Nesterov's.

    Attributes:
        momentum: the share of the last direction that is kept, below 1.
        nesterov: whether to use Nesterov's momentum.

    Examples:
        >>> SGD(momentum=0.5)
        SGD(momentum=0.5)
        >>> SGD(momentum=0.5).work(np.array([1, 2]))
        array([1. , 2.5])
    """

    momentum: float = 0.0
    nesterov: bool = False

    def check(self) -> None:
        """Check momentum and nesterov."""
        share("momentum", self.momentum)
        if flag("nesterov", self.nesterov) and not self.momentum:
            raise InputError("nesterov", self.nesterov, "false, or a momentum above 0")

    @property
    def slots(self) -> int:
        """One vector with momentum, otherwise none."""
        return 1 if self.momentum else 0

    @property
    def identity(self) -> bool:
        """Whether there is no momentum, and no subclass has a direction of its own."""
        return not self.momentum and type(self).direction is SGD.direction

    def direction(self, G: Tensor, X: Tensor, slots: Sequence[Tensor], numbers: Sequence[Any]) -> Tensor:
        """Return the gradient, or the momentum."""
        if not self.momentum:
            return G
        (b,) = slots
        b.mul_(self.momentum).add_(G)
        return G.add(b, alpha=self.momentum) if self.nesterov else b

    def work(self, steps: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Return |a_i|_1: a gradient with j steps after it enters with 1 + r + ... + r^j, r being the momentum.

        With Nesterov's momentum it enters with 1 + r (1 + r + ... + r^j). A subclass with a direction of its own
        needs a `work` of its own.
        """
        if type(self).direction is not SGD.direction and type(self).work is SGD.work:
            return super().work(steps)
        r, K = self.momentum, steps.astype(np.float64)
        if not r:
            return K
        heavy_ball = (K - r * (1 - r**K) / (1 - r)) / (1 - r)
        return K + r * heavy_ball if self.nesterov else heavy_ball


@dataclass(frozen=True, kw_only=True, repr=False)
class Adam(LocalOptimizer):
    """U = mhat / (sqrt(vhat) + eps) with running means m of g and v of g^2, corrected for their start at zero.

    Kingma, Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015. For L2 regularization use the option
    `weight_decay` of the simulation; for decoupled weight decay use `AdamW`.

    Attributes:
        betas: the share of m, and of v, that is kept in a step.
        eps: added to the root, so that nothing is divided by zero.

    Examples:
        >>> [round(number, 6) for number in Adam().numbers(0)]
        [0.1, 0.031623]
    """

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8

    def check(self) -> None:
        """Check betas and eps."""
        if not isinstance(self.betas, tuple | list) or len(self.betas) != 2:
            raise InputError("betas", self.betas, "two numbers from 0 to below 1, such as (0.9, 0.999)")
        for i, beta in enumerate(self.betas):
            share(f"betas[{i}]", beta)
        object.__setattr__(self, "betas", tuple(self.betas))
        positive("eps", self.eps)

    @property
    def slots(self) -> int:
        """The vectors m and v."""
        return 2

    def numbers(self, k: int) -> tuple[float, ...]:
        """Return 1 - beta_1^t and the root of 1 - beta_2^t, with t = k + 1."""
        first, second = self.betas
        return 1 - first ** (k + 1), (1 - second ** (k + 1)) ** 0.5

    def direction(self, G: Tensor, X: Tensor, slots: Sequence[Tensor], numbers: Sequence[Any]) -> Tensor:
        """Return mhat / (sqrt(vhat) + eps)."""
        (m, v), (first, second) = slots, numbers
        m.lerp_(G, 1 - self.betas[0])
        v.mul_(self.betas[1]).addcmul_(G, G, value=1 - self.betas[1])
        direction: Tensor = (m / first) / (v.sqrt() / second + self.eps)
        return direction


@dataclass(frozen=True, kw_only=True, repr=False)
class AdamW(Adam):
    """Adam with decoupled weight decay: U gains weight_decay x.

    Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019.

    Attributes:
        weight_decay: the coefficient of x.

    Examples:
        >>> AdamW(weight_decay=0.1).slots
        2
    """

    weight_decay: float = 0.01

    def check(self) -> None:
        """Check the settings of Adam, and weight_decay."""
        super().check()
        non_negative("weight_decay", self.weight_decay)

    def direction(self, G: Tensor, X: Tensor, slots: Sequence[Tensor], numbers: Sequence[Any]) -> Tensor:
        """Return Adam's direction plus weight_decay x."""
        return super().direction(G, X, slots, numbers).add(X, alpha=self.weight_decay)


PLAIN = SGD()
"""Plain steps, the default."""


def clip_factors(squares: Tensor, clip: float) -> Tensor:
    """Return by what to multiply gradients with these squared norms, so that none is longer than `clip`.

    Examples:
        >>> import torch
        >>> [round(factor, 6) for factor in clip_factors(torch.tensor([25.0, 0.25]), clip=1.0).tolist()]
        [0.2, 1.0]
    """
    return (clip / (squares.sqrt() + CLIP_EPS)).clamp(max=1.0)


def ascent_factors(squares: Tensor, rho: Any) -> Tensor:
    """Return by what to multiply gradients with these squared norms to go a distance rho along them.

    Examples:
        >>> import torch
        >>> round(ascent_factors(torch.tensor(4.0), rho=0.1).item(), 6)
        0.05
    """
    factors: Tensor = rho / (squares.sqrt() + ASCENT_EPS)
    return factors


def numbers_after(
    local: LocalOptimizer, before: npt.NDArray[np.int64], begin: int, steps: int
) -> npt.NDArray[np.float64]:
    """Return the numbers of an optimizer in some steps of a round, [steps, m, n].

    Args:
        local: the optimizer, which has n numbers.
        before: how many steps each client made before the round, [m].
        begin: the first of the steps.
        steps: how many steps.

    Examples:
        >>> numbers_after(Adam(betas=(0.5, 0.0)), np.array([0, 1]), begin=1, steps=1).tolist()
        [[[0.75, 1.0], [0.875, 1.0]]]
    """
    after = before + np.arange(begin, begin + steps)[:, None]
    distinct, where = np.unique(after, return_inverse=True)
    table = np.array([local.numbers(int(k)) for k in distinct], np.float64)
    numbers: npt.NDArray[np.float64] = table[where.reshape(after.shape)]
    return numbers
