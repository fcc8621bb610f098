"""The local rule: what a client does between two meetings with the server.

Client i starts from the server's model x~ and runs K_i steps of

    x <- x - eta_i * ( g_i(x; batch) + c_i + mu_i * (x - x~) )

`Plan` says which K_i, eta_i, c_i and mu_i; `Result` is what comes back. Every algorithm is written in terms of
these two, and every engine obeys them. Batches, devices, processes and algorithm names may not enter here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    Numbers = float | Sequence[float] | npt.NDArray[np.float64]
    Counts = int | Sequence[int] | npt.NDArray[np.int64]

__all__ = ["EXACT_BELOW", "Plan", "Result", "mean_gradient"]

EXACT_BELOW = 0.01
"""Below this eta_i * K_i the mean gradient is accumulated rather than reconstructed: in float32 the
reconstruction's relative error is 1e-6 at eta K = 15, 3.5e-5 at 0.005 and 3e-4 at 0.0005."""


@dataclass(frozen=True, eq=False)
class Plan:
    """What the m members of a cohort are asked to do in one round.

    Attributes:
        steps: K_i, the number of local steps of each member, [m].
        lr: eta_i, the step size of each member, [m].
        correction: c_i, added to every gradient, [m, d]; None for no correction.
        mu: the proximal coefficient, [m]: its term is the gradient of mu/2 |x - x~|^2.
        first_steps: over how many of the first steps the "first gradient" is averaged, [m]; 0 where it is
            not asked for. Never more than K_i.
        mean: whether the server will ask for the mean gradient of the round.
        exact: accumulate the mean gradient step by step in any case. Otherwise it is accumulated only where
            the reconstruction is inaccurate or impossible (see `accumulate`).
    """

    steps: npt.NDArray[np.int64]
    lr: npt.NDArray[np.float64]
    correction: Tensor | None
    mu: npt.NDArray[np.float64]
    first_steps: npt.NDArray[np.int64]
    mean: bool
    exact: bool = False

    @classmethod
    def of(
        cls,
        steps: Counts,
        lr: Numbers,
        correction: Tensor | None = None,
        mu: Numbers = 0.0,
        first_steps: Counts = 0,
        mean: bool = False,
    ) -> Plan:
        """Make a plan, giving every member the numbers that are not given per member."""
        K = np.atleast_1d(np.asarray(steps, dtype=np.int64))
        return cls(
            steps=K,
            lr=np.broadcast_to(np.asarray(lr, dtype=np.float64), K.shape),
            correction=correction,
            mu=np.broadcast_to(np.asarray(mu, dtype=np.float64), K.shape),
            first_steps=np.minimum(np.asarray(first_steps, dtype=np.int64), K),
            mean=mean,
        )

    @classmethod
    def join(cls, plans: Sequence[Plan]) -> Plan:
        """Make one plan out of several, row after row."""
        corrections = [plan.correction for plan in plans]
        some = next((rows for rows in corrections if rows is not None), None)
        correction = None
        if some is not None:
            correction = torch.cat(
                [
                    some.new_zeros((len(plan), some.shape[1])) if rows is None else rows
                    for plan, rows in zip(plans, corrections, strict=True)
                ]
            )
        accumulate = any(plan.accumulate for plan in plans)
        return cls(
            steps=np.concatenate([plan.steps for plan in plans]),
            lr=np.concatenate([plan.lr for plan in plans]),
            correction=correction,
            mu=np.concatenate([plan.mu for plan in plans]),
            first_steps=np.concatenate([plan.first_steps for plan in plans]),
            mean=accumulate,
            exact=accumulate,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, rows: npt.NDArray[np.int64]) -> Plan:
        """Return the plan of some members alone.

        Examples:
            >>> Plan.of(steps=[1, 2, 9], lr=0.5).part(np.array([0, 2])).steps.tolist()
            [1, 9]
        """
        return replace(
            self,
            steps=self.steps[rows],
            lr=self.lr[rows],
            correction=None if self.correction is None else self.correction[torch.from_numpy(rows)],
            mu=self.mu[rows],
            first_steps=self.first_steps[rows],
        )

    @property
    def accumulate(self) -> bool:
        """Whether engines must add up the gradients of the round (`Result.total`).

        The reconstruction (x~ - x_i) / (eta_i K_i) - c_i is free, but loses accuracy as eta_i K_i shrinks and
        does not exist with a proximal term.
        """
        inaccurate = (self.lr * self.steps < EXACT_BELOW) | (self.mu > 0)
        return self.mean and (self.exact or bool(inaccurate.any()))


@dataclass(frozen=True, eq=False)
class Result:
    """What the m members of a cohort reply.

    Attributes:
        models: x_i after K_i steps, [m, d].
        loss: mean training loss over the member's K_i steps, [m].
        first: the mean of the first `plan.first_steps` gradients, [m, d], zero in rows that were not asked;
            None where nobody was.
        total: the sum of the K_i gradients, [m, d], where `plan.accumulate` asked for it.
    """

    models: Tensor
    loss: Tensor
    first: Tensor | None = None
    total: Tensor | None = None

    def part(self, rows: npt.NDArray[np.int64]) -> Result:
        """Return what some members replied."""
        some = torch.from_numpy(rows)
        first, total = (None if each is None else each[some] for each in (self.first, self.total))
        return Result(self.models[some], self.loss[some], first, total)

    def finite(self) -> npt.NDArray[np.bool_]:
        """Say whose reply holds neither NaN nor infinity, [m].

        Examples:
            >>> models, loss = torch.tensor([[1.0], [torch.inf], [2.0]]), torch.tensor([0.0, 0.0, torch.nan])
            >>> Result(models, loss).finite().tolist()
            [True, False, False]
        """
        found = torch.isfinite(self.loss)
        for rows in (self.models, self.first, self.total):
            if rows is not None:
                found = found & torch.isfinite(rows).all(1)
        finite: npt.NDArray[np.bool_] = found.cpu().numpy()
        return finite

    def split(self, plans: Sequence[Plan]) -> list[Result]:
        """Return what belongs to each of the plans that were joined: only what it asked for."""
        parts, start = [], 0
        for plan in plans:
            rows = slice(start, start + len(plan))
            parts.append(
                Result(
                    models=self.models[rows],
                    loss=self.loss[rows],
                    first=None if self.first is None or not plan.first_steps.any() else self.first[rows],
                    total=None if self.total is None or not plan.accumulate else self.total[rows],
                )
            )
            start = rows.stop
        return parts


def mean_gradient(plan: Plan, x: Tensor, result: Result) -> Tensor:
    """Return each member's mean gradient of the round, (1/K_i) sum_k g_i(x_k), as rows [m, d].

    It needs no accumulator and no upload: the model's own displacement gives it,

        (x~ - x_i) / (eta_i K_i) - c_i                                            (mu = 0),

    except where `Plan.accumulate` says that this would be inaccurate.

    Examples:
        >>> plan = Plan.of(steps=[2], lr=0.5, mean=True)     # two steps of 0.5 from x~ = 3 with gradients 1 and 3
        >>> reply = Result(models=torch.tensor([[1.0]]), loss=torch.zeros(1))
        >>> mean_gradient(plan, torch.tensor([3.0]), reply)
        tensor([[2.]])
    """
    like = result.models
    if result.total is not None:
        return result.total / torch.as_tensor(plan.steps, dtype=like.dtype, device=like.device)[:, None]
    reach = torch.as_tensor(plan.lr * plan.steps, dtype=like.dtype, device=like.device)[:, None]
    mean = (x - like) / reach
    return mean if plan.correction is None else mean - plan.correction
