"""The local rule: what a client does in one round.

Client i starts from the server's model x~ and runs K_i steps of

    x <- x - eta_i * ( g_i(x; batch) + c_i + mu_i * (x - x~) )

or, with all its parts, from x = s_i

    x <- x - eta_i * m_i o U( clip(g_i(x + p_i; batch)) + c_i + mu_i * (x - x~) )

with weight decay, if any, added after clip and before c_i, as `torch.nn.utils.clip_grad_norm_` and `torch.optim`
do it. Here U is a local optimizer (`fedagrac.core.optimizers`), m_i a mask of 0 and 1, and p_i a point beside x. A
`Plan` holds what is on the right; a `Result` holds the replies. Every algorithm is written in terms of these two,
and every engine implements them. Batches, devices, processes and names of algorithms do not belong here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.core.optimizers import PLAIN, LocalOptimizer
from fedagrac.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from torch import Tensor

    from fedagrac.core.cohort import Cohort

    Numbers = float | Sequence[float] | npt.NDArray[np.float64]
    Counts = int | Sequence[int] | npt.NDArray[np.int64]

__all__ = ["EXACT_BELOW", "Plan", "Result", "Second", "check_plan", "mean_gradient"]

EXACT_BELOW = 0.01
"""Below this eta_i * K_i the mean gradient is accumulated rather than reconstructed. In float32 the relative error
of the reconstruction is 1e-6 at eta K = 15, 3.5e-5 at 0.005 and 3e-4 at 0.0005."""


@dataclass(frozen=True, eq=False)
class Second:
    """A second model that each member trains in the same round, with as many steps and the same batches.

    From v = start it runs v <- v - lr * U( clip(g_i(v; batch)) + mu * (v - x~) ).

    Attributes:
        start: where each member's second model starts, [m, d].
        lr: its step size, [m].
        mu: its proximal coefficient, [m].
    """

    start: Tensor
    lr: npt.NDArray[np.float64]
    mu: npt.NDArray[np.float64]

    def part(self, rows: npt.NDArray[np.int64]) -> Second:
        """Return the second models of some members."""
        return Second(self.start[torch.from_numpy(rows)], self.lr[rows], self.mu[rows])


@dataclass(frozen=True, eq=False)
class Plan:
    """What the m members of a cohort are asked to do in one round.

    Attributes:
        steps: K_i, the number of local steps of each member, [m].
        lr: eta_i, the step size of each member, [m].
        correction: c_i, added to every gradient, [m, d]; None for no correction.
        mu: the proximal coefficient, [m]; its term is the gradient of mu/2 |x - x~|^2.
        first_steps: how many of the first steps the "first gradient" averages, [m], at most K_i; 0 for members
            that do not send one.
        mean: whether the server needs the mean gradient of the round.
        exact: whether to accumulate the mean gradient step by step in any case. By default it is accumulated only
            if the reconstruction is inaccurate or impossible (see `accumulate`).
        buffers: the module's moving buffers from which each member starts, [m, q]; None if every step begins with
            the buffers of the user's module and leaves them as they are.
        at_start: gradients at x~ that the algorithm asked for and needs again when it aggregates, [m, d], or None.
        gradient: whether members send their gradient at x~ over all their data together with their model. The
            fleet puts it into `at_start`, so it is known when the algorithm aggregates, but not to the local rule.
        local: U and its clipping, the same for all members.
        broadcast: the vector that all members receive in place of the server's model, [d]: x~ in the rule. None
            for the server's model.
        start: s_i, where each member starts, [m, d]; None for x~.
        mask: m_i, 1 for the coordinates that a member trains and 0 for the others, [m, d]; None if all train. The
            gradient of the others counts as 0.
        beside: p_i, from x to the point at which the gradient is taken, [m, d]; None for x itself.
        ascent: rho_i; the gradient is taken at x + rho_i g / |g|, where g is that at x over the same batch, [m].
            It costs a second gradient in every step.
        scale: the network is that of scale o (x + p_i), and the gradient is that with respect to x, [m, d]; None
            for the network of x + p_i.
        anchored: whether the gradient at x~ over the same batch is subtracted from every gradient. It costs a
            second gradient in every step.
        second: another model that each member trains; None for none.
        slots: the state of U with which each member begins, one [m, d] for each of `local.slots`; members then
            report the state with which they end. None for a state that begins at zero and is forgotten.
        before: how many steps each member made before, in which its slots came about, [m]; None without slots.
    """

    steps: npt.NDArray[np.int64]
    lr: npt.NDArray[np.float64]
    correction: Tensor | None
    mu: npt.NDArray[np.float64]
    first_steps: npt.NDArray[np.int64]
    mean: bool
    exact: bool = False
    buffers: Tensor | None = None
    at_start: Tensor | None = None
    local: LocalOptimizer = PLAIN
    broadcast: Tensor | None = None
    start: Tensor | None = None
    mask: Tensor | None = None
    beside: Tensor | None = None
    ascent: npt.NDArray[np.float64] | None = None
    scale: Tensor | None = None
    anchored: bool = False
    second: Second | None = None
    slots: tuple[Tensor, ...] | None = None
    before: npt.NDArray[np.int64] | None = None
    gradient: bool = False

    @classmethod
    def of(
        cls,
        steps: Counts,
        lr: Numbers,
        correction: Tensor | None = None,
        mu: Numbers = 0.0,
        first_steps: Counts = 0,
        mean: bool = False,
        local: LocalOptimizer = PLAIN,
    ) -> Plan:
        """Make a plan. A single number holds for every member."""
        K = np.atleast_1d(np.asarray(steps, dtype=np.int64))
        return cls(
            steps=K,
            lr=_for_each("lr", lr, K).astype(np.float64),
            correction=correction,
            mu=_for_each("mu", mu, K).astype(np.float64),
            first_steps=np.minimum(_for_each("first_steps", first_steps, K).astype(np.int64), K),
            mean=mean,
            local=local,
        )

    @classmethod
    def join(cls, plans: Sequence[Plan]) -> Plan:
        """Join plans with one local optimizer into one for an engine, with the rows of the first plan first.

        Plans with starts, masks, scales or points beside x are not joined, nor one with slots and one without.
        """
        corrections = [plan.correction for plan in plans]
        like = next((rows for rows in corrections if rows is not None), None)
        correction = None
        if like is not None:
            correction = torch.cat(
                [
                    like.new_zeros((len(plan), like.shape[1])) if rows is None else rows
                    for plan, rows in zip(plans, corrections, strict=True)
                ]
            )
        accumulate = any(plan.accumulate for plan in plans)
        slots = [plan.slots for plan in plans if plan.slots is not None]
        before = [plan.before for plan in plans if plan.before is not None]
        return cls(
            steps=np.concatenate([plan.steps for plan in plans]),
            lr=np.concatenate([plan.lr for plan in plans]),
            correction=correction,
            mu=np.concatenate([plan.mu for plan in plans]),
            first_steps=np.concatenate([plan.first_steps for plan in plans]),
            mean=accumulate,
            exact=accumulate,
            buffers=_joined([plan.buffers for plan in plans]),
            local=plans[0].local,
            slots=tuple(torch.cat(rows) for rows in zip(*slots, strict=True)) if slots else None,
            before=np.concatenate(before) if before else None,
        )

    def __len__(self) -> int:
        return len(self.steps)

    def part(self, rows: npt.NDArray[np.int64]) -> Plan:
        """Return the plan of some members.

        Examples:
            >>> Plan.of(steps=[1, 2, 9], lr=0.5).part(np.array([0, 2])).steps.tolist()
            [1, 9]
        """
        index = torch.from_numpy(rows)
        return replace(
            self,
            steps=self.steps[rows],
            lr=self.lr[rows],
            correction=None if self.correction is None else self.correction[index],
            mu=self.mu[rows],
            first_steps=self.first_steps[rows],
            buffers=None if self.buffers is None else self.buffers[index],
            at_start=None if self.at_start is None else self.at_start[index],
            start=None if self.start is None else self.start[index],
            mask=None if self.mask is None else self.mask[index],
            beside=None if self.beside is None else self.beside[index],
            ascent=None if self.ascent is None else self.ascent[rows],
            scale=None if self.scale is None else self.scale[index],
            second=None if self.second is None else self.second.part(rows),
            slots=None if self.slots is None else tuple(slot[index] for slot in self.slots),
            before=None if self.before is None else self.before[rows],
        )

    def of_second(self) -> Plan:
        """Return the plan of the second models."""
        assert self.second is not None
        own = Plan.of(self.steps, self.second.lr, mu=self.second.mu, local=self.local)
        return replace(own, start=self.second.start, buffers=self.buffers, broadcast=self.broadcast)

    def origin(self, x: Tensor) -> Tensor:
        """Return x~ of the rule, given the server's model: what members receive."""
        return x if self.broadcast is None else self.broadcast

    @property
    def simple(self) -> bool:
        """Whether the rule has no start, mask, scale or point beside x."""
        parts = self.start, self.mask, self.beside, self.ascent, self.scale
        return all(part is None for part in parts) and not self.anchored

    @property
    def linear(self) -> bool:
        """Whether x~ - x_i is a sum of gradients and corrections, apart from the proximal term."""
        return self.local.plain and self.mask is None and self.start is None

    @property
    def at_x(self) -> bool:
        """Whether gradients are those of the network of x itself, and no others are computed."""
        return self.beside is None and self.ascent is None and self.scale is None and not self.anchored

    def inexact(self, row: int, steps: int) -> bool:
        """Return whether a member's mean gradient cannot be reconstructed well if it makes this many steps.

        The reconstruction (x~ - x_i) / (eta_i K_i) - c_i loses accuracy as eta_i K_i shrinks. It is impossible if
        U is not the identity, with clipping, masks, starts of the members' own, or a proximal term.
        """
        return not self.linear or float(self.lr[row]) * steps < EXACT_BELOW or float(self.mu[row]) > 0

    @property
    def accumulate(self) -> bool:
        """Whether engines must add up the gradients of the round (`Result.total`).

        The reconstruction costs nothing; see `inexact` for when it is not good enough.
        """
        inaccurate = (self.lr * self.steps < EXACT_BELOW) | (self.mu > 0)
        return self.mean and (self.exact or not self.linear or bool(inaccurate.any()))


@dataclass(frozen=True, eq=False)
class Result:
    """What the m members of a cohort reply.

    Attributes:
        models: x_i after K_i steps, [m, d].
        loss: the mean training loss over the member's K_i steps, [m].
        first: the mean of the first `plan.first_steps` gradients, [m, d], zero in rows that were not asked for it;
            None if no member was. These gradients, and those of `total`, are clipped and have weight decay.
        total: the sum of the K_i gradients, [m, d], if `plan.accumulate` asked for it; otherwise None.
        buffers: the moving buffers with which each member ends, [m, q]; None if the plan has none.
        second: the second models, [m, d]; None if the plan has none.
        slots: the state of U with which each member ends, each [m, d]; None if the plan has none.
    """

    models: Tensor
    loss: Tensor
    first: Tensor | None = None
    total: Tensor | None = None
    buffers: Tensor | None = None
    second: Tensor | None = None
    slots: tuple[Tensor, ...] | None = None

    def part(self, rows: npt.NDArray[np.int64]) -> Result:
        """Return the replies of some members."""
        index = torch.from_numpy(rows)
        optional = self.first, self.total, self.buffers, self.second
        first, total, buffers, second = (None if rows is None else rows[index] for rows in optional)
        slots = None if self.slots is None else tuple(slot[index] for slot in self.slots)
        return Result(self.models[index], self.loss[index], first, total, buffers, second, slots)

    def finite(self) -> npt.NDArray[np.bool_]:
        """Return which replies hold neither NaN nor infinity, [m].

        Examples:
            >>> models, loss = torch.tensor([[1.0], [torch.inf], [2.0]]), torch.tensor([0.0, 0.0, torch.nan])
            >>> Result(models, loss).finite().tolist()
            [True, False, False]
        """
        finite_rows = torch.isfinite(self.loss)
        for rows in (self.models, self.first, self.total, self.buffers, self.second, *(self.slots or ())):
            if rows is not None:
                finite_rows = finite_rows & torch.isfinite(rows).all(1)
        finite: npt.NDArray[np.bool_] = finite_rows.cpu().numpy()
        return finite

    def split(self, plans: Sequence[Plan]) -> list[Result]:
        """Return one result for each of the plans that were joined, with only what that plan asked for."""
        parts, start = [], 0
        for plan in plans:
            rows = slice(start, start + len(plan))
            parts.append(
                Result(
                    models=self.models[rows],
                    loss=self.loss[rows],
                    first=None if self.first is None or not plan.first_steps.any() else self.first[rows],
                    total=None if self.total is None or not plan.accumulate else self.total[rows],
                    buffers=None if self.buffers is None else self.buffers[rows],
                    slots=None if self.slots is None else tuple(slot[rows] for slot in self.slots),
                )
            )
            start = rows.stop
        return parts


def _for_each(name: str, values: Any, steps: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
    """Return one value for each member, [m], from such values or from a single one."""
    if callable(values):
        raise InputError(f"Plan.of {name}", values, "numbers: self.lr_in(cohort) is a schedule's value in a round")
    array = np.asarray(values)
    if array.shape not in ((), steps.shape):
        accepted = f"one value, or one for each of {len(steps)} clients"
        raise InputError(f"Plan.of {name}", f"shape {array.shape}", accepted)
    return np.broadcast_to(array, steps.shape)


def _joined(parts: Sequence[Tensor | None]) -> Tensor | None:
    """Return rows joined into one matrix; None if there are none."""
    rows = [part for part in parts if part is not None]
    return torch.cat(rows) if rows else None


def check_plan(source: str, plan: Plan, cohort: Cohort, d: int) -> None:
    """Refuse a plan of the user's own whose shapes or counts do not fit the cohort.

    `source` names where the plan comes from, such as "Mine.plan".
    """
    m = len(cohort)
    if not isinstance(plan, Plan):
        raise InputError(source, plan, "a Plan, such as Plan.of(cohort.steps, self.lr)")
    for name in ("steps", "lr", "mu", "first_steps"):
        values = getattr(plan, name)
        if np.shape(values) != (m,):
            raise InputError(f"{source} {name}", f"shape {np.shape(values)}", f"one value for each of {m} clients")
        kinds = "iu" if "steps" in name else "iuf"
        if not isinstance(values, np.ndarray) or values.dtype.kind not in kinds:
            given = values.dtype if isinstance(values, np.ndarray) else type(values).__name__
            accepted = f"a NumPy array of {'integers' if kinds == 'iu' else 'numbers'}, as Plan.of makes it"
            raise InputError(f"{source} {name}", str(given), accepted)
    if not np.array_equal(plan.steps, cohort.steps):
        row = int(np.flatnonzero(plan.steps != cohort.steps)[0])
        accepted = (
            f"cohort.steps, {cohort.steps[row]} for client {cohort.clients[row]}: the step schedule decides K"
        )
        raise InputError(f"{source} steps", int(plan.steps[row]), accepted)
    for name, values, least in (("lr", plan.lr, 0.0), ("mu", plan.mu, 0.0), ("first_steps", plan.first_steps, 0)):
        if not (np.isfinite(values).all() and (values >= least).all()):
            raise InputError(f"{source} {name}", values.tolist(), f"finite numbers of at least {least}")
    if (plan.first_steps > plan.steps).any():
        raise InputError(f"{source} first_steps", plan.first_steps.tolist(), "at most the steps of each client")
    _check_local(source, plan, m)
    _check_slots(source, plan, m, d)
    names = "correction", "at_start", "start", "mask", "beside", "scale"
    given = {name: getattr(plan, name) for name in names}
    if plan.second is not None:
        given["second start"] = plan.second.start
    for name, rows in given.items():
        if rows is None or (isinstance(rows, torch.Tensor) and rows.shape == (m, d) and rows.is_floating_point()):
            continue
        shape = f"shape {list(np.shape(rows))} of {getattr(rows, 'dtype', type(rows).__name__)}"
        raise InputError(f"{source} {name}", shape, f"a tensor [{m}, {d}]: one row for each client")


def _check_local(source: str, plan: Plan, m: int) -> None:
    """Check a plan's local optimizer, its broadcast and its ascent."""
    if not isinstance(plan.local, LocalOptimizer):
        raise InputError(f"{source} local", plan.local, "a local optimizer, such as fedagrac.SGD(momentum=0.9)")
    if plan.ascent is not None and (np.shape(plan.ascent) != (m,) or not (np.asarray(plan.ascent) >= 0).all()):
        raise InputError(f"{source} ascent", plan.ascent, f"a number of at least 0 for each of {m} clients")
    if sum((plan.ascent is not None, plan.anchored, plan.beside is not None or plan.scale is not None)) > 1:
        raise InputError(f"{source} ascent", plan.ascent, "one of ascent, anchored, and points beside x or scales")


def _check_slots(source: str, plan: Plan, m: int, d: int) -> None:
    """Check the state of the local optimizer with which members begin."""
    if plan.slots is None and plan.before is None:
        return
    counts = plan.before
    if (
        not isinstance(counts, np.ndarray)
        or counts.shape != (m,)
        or counts.dtype.kind != "i"
        or (counts < 0).any()
    ):
        accepted = f"a NumPy array of {m} integers of at least 0: the steps that each client made with its slots"
        raise InputError(f"{source} before", counts, accepted)
    shapes = [list(np.shape(slot)) for slot in plan.slots] if isinstance(plan.slots, tuple) else plan.slots
    if shapes != [[m, d]] * plan.local.slots:
        accepted = f"a tuple of {plan.local.slots} tensors [{m}, {d}], as many as {plan.local} has"
        raise InputError(f"{source} slots", f"shapes {shapes}", accepted)


def mean_gradient(plan: Plan, x: Tensor, result: Result) -> Tensor:
    """Return each member's mean gradient of the round, (1/K_i) sum_k g_i(x_k), as rows [m, d].

    It needs neither an accumulator nor an upload, because it follows from the displacement of the model,

        (x~ - x_i) / (eta_i K_i) - c_i                                            (mu = 0),

    unless `Plan.accumulate` says that this is inaccurate or impossible. `x` is the server's model.

    Examples:
        >>> plan = Plan.of(steps=[2], lr=0.5, mean=True)     # two steps of 0.5 from x~ = 3 with gradients 1 and 3
        >>> reply = Result(models=torch.tensor([[1.0]]), loss=torch.zeros(1))
        >>> mean_gradient(plan, torch.tensor([3.0]), reply)
        tensor([[2.]])
    """
    models = result.models
    if result.total is not None:
        return result.total / torch.as_tensor(plan.steps, dtype=models.dtype, device=models.device)[:, None]
    eta_K = torch.as_tensor(plan.lr * plan.steps, dtype=models.dtype, device=models.device)[:, None]
    mean = (plan.origin(x) - models) / eta_K
    return mean if plan.correction is None else mean - plan.correction
