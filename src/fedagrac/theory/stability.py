"""A quick estimate of the largest stable step size of a problem, for the message of a diverged run."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import nn

from fedagrac.algorithms import Algorithm, FedaGrac
from fedagrac.errors import FedagracError
from fedagrac.theory.problem import Problem, as_array
from fedagrac.theory.quadratic import Quadratic, largest_stable_lr

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.engines import Workload

__all__ = ["first_steps_of", "stable_lr"]

STIFFEST = 4
"""The number of directions in which the step size is computed. More directions make it slightly smaller: on a9a
with 20 clients and about 50 steps, FedAvg's limit is 0.501 on 4 directions and 0.491 on 12."""

FLAT = 1e-6
"""The fraction of the largest curvature below which a direction counts as flat; no step contracts along it."""

MOST_CLIENTS = 30
"""The largest number of clients for which the round map is computed; its state may hold a vector per client."""


class OutOfTimeError(FedagracError):
    """Raised when the computation exceeds its time limit."""


def first_steps_of(
    algorithm: Algorithm, steps: npt.NDArray[np.int64], epochs: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64] | None:
    """Return the number of steps over which each client's first gradient is averaged; None for other algorithms.

    Examples:
        >>> first_steps_of(FedaGrac(lr=0.1), np.array([2, 9]), epochs=np.array([4, 4])).tolist()
        [2, 4]
    """
    if not isinstance(algorithm, FedaGrac):
        return None
    if algorithm.first_steps == "pass":  # of a round that begins with a new pass
        return np.where(epochs < steps, epochs, 1)
    return np.minimum(epochs if algorithm.first_steps == "epoch" else algorithm.first_steps, steps)


def stable_lr(
    workload: Workload,
    algorithm: Algorithm,
    steps: npt.NDArray[np.int64],
    epochs: npt.NDArray[np.int64],
    seconds: float,
) -> float | None:
    """Return the largest stable eta with exact gradients for softmax regression or least squares, or None.

    It is that of the quadratic model at x = 0 on the stiffest directions of F. The result is None for models other
    than one linear layer, for other losses, for a schedule of lambda, and for many clients.

    Args:
        workload: the problem.
        algorithm: the algorithm; its lr is ignored.
        steps: K_i, [M].
        epochs: the number of steps in a local epoch, [M].
        seconds: the time after which the computation ends with an OutOfTimeError.
    """
    scheduled = isinstance(algorithm, FedaGrac) and callable(algorithm.calibration)
    if len(steps) > MOST_CLIENTS or scheduled or not _is_one_layer(workload.model.module):
        return None
    loss = None if workload.loss is nn.functional.cross_entropy else workload.loss
    problem = Problem(workload.model.module, workload.federation, loss, workload.weight_decay, workload.batch_size)
    if not (problem.is_convex() if loss is None else problem.is_quadratic()):
        return None
    stiffest = _stiffest(problem, time.perf_counter() + seconds)
    return largest_stable_lr(algorithm, stiffest, steps, first_steps_of(algorithm, steps, epochs))


def _is_one_layer(module: nn.Module) -> bool:
    """Return whether the module is a single linear layer; the curvature of deep networks takes too long."""
    layers = [layer for layer in module.modules() if not list(layer.children())]
    kinds = [type(layer) for layer in layers if not isinstance(layer, nn.Flatten)]
    return kinds == [nn.Linear]


def _stiffest(problem: Problem, until: float) -> Quadratic:
    """Return the quadratic model at 0 on the stiffest directions of F, without computing a Hessian."""
    from scipy.sparse.linalg import LinearOperator, eigsh

    d, fed = problem.size, problem.federation
    x = torch.zeros(d, dtype=torch.float64)

    def products(v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        """Return H_i v of every client, [M, d]."""
        if time.perf_counter() > until:
            raise OutOfTimeError("computing the curvature of the problem takes too long")
        along = torch.from_numpy(np.ascontiguousarray(v.reshape(-1)))
        return np.stack([as_array(problem.curvature(i, x, along)) for i in range(fed.num_clients)])

    if d <= STIFFEST:
        values, vectors = np.linalg.eigh(np.stack([fed.weights @ products(e) for e in np.eye(d)]))
    else:
        total = LinearOperator((d, d), matvec=lambda v: fed.weights @ products(v), dtype=np.float64)
        start = np.random.default_rng(0).normal(size=d)
        values, vectors = eigsh(total, k=min(STIFFEST, d - 1), tol=1e-3, v0=start)
    U = vectors[:, values > FLAT * values.max()]
    hessians = np.stack([products(u) @ U for u in U.T], axis=1)
    hessians = (hessians + hessians.transpose(0, 2, 1)) / 2  # symmetric up to rounding
    return Quadratic(hessians, np.zeros(hessians.shape[:2]), fed.weights, fed.masses)
