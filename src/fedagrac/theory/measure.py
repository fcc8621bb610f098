"""The constants of a problem that the theorems speak of: L, mu, sigma^2, B, x* and F_i(x*)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.errors import FedagracError, InputError
from fedagrac.theory.bounds import Bound, theorem3
from fedagrac.theory.problem import Apply, Problem, as_array

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["Constants", "constants", "extreme_eigenvalues", "minimise"]


class NotSolvedError(FedagracError):
    """An iteration did not come to its end."""


@dataclass(frozen=True, eq=False)
class Constants:
    """What the theorems need to know about a problem, measured.

    Attributes:
        L: the largest curvature of any client at any of the points (Assumption 1, along that path).
        mu: the smallest (Assumption 2); None where the problem is not known to be convex.
        sigma2: the largest variance of a stochastic gradient of any client at any point (Assumption 3).
        B: the largest ratio of a client's gradient to the global one at the points where that is not 0
            (Assumption 4); it grows without bound towards x*, where clients pull and F does not.
        optimum: x*; None where the problem is not known to be convex.
        gap: F(x_1) - F(x*), or F(x_1) - 0 where x* is not known.
        distance2: |x_1 - x*|^2.
        value: F(x*).
        local_values: F_i(x*), [M].
        points: how many points the largest and smallest values are taken over.
    """

    L: float
    mu: float | None
    sigma2: float
    B: float
    gap: float
    points: int
    optimum: npt.NDArray[np.float64] | None = None
    distance2: float | None = None
    value: float | None = None
    local_values: npt.NDArray[np.float64] | None = None

    def theorem3(self, weights: npt.ArrayLike, steps: npt.ArrayLike, rounds: npt.ArrayLike) -> Bound:
        """Return Theorem 3's bound with these constants; an error where the problem is not known to be convex."""
        if self.mu is None or self.distance2 is None:
            raise InputError("constants", "mu = None", "a convex problem: Theorem 3 speaks of no other")
        return theorem3(
            weights, steps, L=self.L, mu=self.mu, sigma2=self.sigma2, distance2=self.distance2, rounds=rounds
        )


def constants(
    problem: Problem, points: Sequence[Tensor] | None = None, convex: bool | None = None, tolerance: float = 1e-10
) -> Constants:
    """Measure a problem's constants.

    Args:
        problem: the clients, the model and the loss.
        points: where curvature, noise and dissimilarity are measured; by default five points from x_1 to x*
            where the problem is convex, and x_1 alone elsewhere. The iterates of a run are a good choice.
        convex: whether F is convex; None to find out: yes for models linear in x with cross-entropy.
        tolerance: the norm of the gradient at which x* counts as solved.

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.from_arrays([([[1.0], [3.0]], [0, 1]), ([[2.0]], [1])])
        >>> problem = Problem(fg.models.build("logistic", features=1, classes=2), fed, weight_decay=0.1)
        >>> found = constants(problem)
        >>> round(found.mu, 6), found.L > 1, found.gap > 0
        (0.1, True, True)
    """
    convex = problem.is_convex() if convex is None else convex
    optimum = minimise(problem, tolerance) if convex else None
    if points is None:
        points = [problem.x1]
        if optimum is not None:
            points = [problem.x1 + part * (optimum - problem.x1) for part in (0.0, 0.25, 0.5, 0.75, 1.0)]
    for x in points:
        if x.shape != problem.x1.shape:
            raise InputError("points", tuple(x.shape), f"vectors of {problem.size} numbers")
    clients = range(problem.federation.num_clients)
    L, mu, sigma2, B = 0.0, float("inf"), 0.0, 1.0
    for x in points:
        for i in clients:
            low, high = extreme_eigenvalues(problem.hessian_at(x, i), problem.size)
            L, mu = max(L, high, -low), min(mu, low)
            sigma2 = max(sigma2, problem.noise(i, x))
        gradients = problem.gradients(x)
        whole = float((problem.weights @ gradients).norm())
        largest = float(gradients.norm(dim=1).max())
        if whole > 1e-8 * largest:
            B = max(B, largest / whole)
    start = problem.total(problem.x1)
    if optimum is None:
        return Constants(L, None, sigma2, B, start, len(points))
    local = problem.values(optimum)
    value = float(problem.weights @ local)
    distance2 = float((problem.x1 - optimum) @ (problem.x1 - optimum))
    return Constants(
        L, mu, sigma2, B, start - value, len(points), as_array(optimum), distance2, value, as_array(local)
    )


def extreme_eigenvalues(matrix: Apply, size: int, tolerance: float = 1e-12) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric matrix, by Lanczos.

    Every vector is made orthogonal to all before it. It ends when neither Ritz value has moved by more than the
    tolerance, relative to the larger, in ten steps, or when the Krylov space is exhausted. Weight decay makes many
    eigenvalues equal, and clients of few classes make the largest two nearly so (power iteration did not tell them
    apart in 5000 steps): what is asked for are the values, which converge where their vectors do not.

    Examples:
        >>> low, high = extreme_eigenvalues(lambda v: torch.tensor([3.0, -5.0, 0.5], dtype=torch.float64) * v, 3)
        >>> round(low, 9), round(high, 9)
        (-5.0, 3.0)
    """
    from scipy.linalg import eigvalsh_tridiagonal

    v = torch.from_numpy(np.random.default_rng(0).normal(size=size))
    basis = (v / v.norm())[None]
    diagonal: list[float] = []
    beside: list[float] = []
    ends = np.full(2, np.inf)
    for k in range(size):
        w = matrix(basis[k])
        diagonal.append(float(basis[k] @ w))
        for _ in range(2):  # once leaves rounding behind
            w = w - basis.T @ (basis @ w)
        length, scale = float(w.norm()), float(np.abs(diagonal).max())
        last = length <= 1e-13 * scale or k + 1 == size
        if last or k % 10 == 9:
            before, ends = ends, eigvalsh_tridiagonal(diagonal, beside)[[0, -1]]
            if last or np.abs(ends - before).max() <= tolerance * np.abs(ends).max():
                break
        beside.append(length)
        basis = torch.cat([basis, (w / length)[None]])
    return float(ends[0]), float(ends[1])


def minimise(problem: Problem, tolerance: float = 1e-10) -> Tensor:
    """Return x* of a convex problem: Newton's steps, each by conjugate gradients, until |gradient| <= tolerance.

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.from_arrays([([[1.0], [3.0]], [0, 1]), ([[2.0]], [1])])
        >>> problem = Problem(fg.models.build("logistic", features=1, classes=2), fed, weight_decay=0.1)
        >>> x = minimise(problem)
        >>> float((problem.weights @ problem.gradients(x)).norm()) < 1e-10
        True
    """
    x = problem.x1
    for _ in range(100):
        g = problem.total_gradient(x)
        if float(g.norm()) <= tolerance:
            return x
        step = _solve(problem.hessian_at(x), g)
        if not bool(torch.isfinite(step).all()):
            break
        value, slope, length = problem.total(x), float(g @ step), 1.0
        # near x* the values differ by rounding alone: there the full step is taken
        while problem.total(x - length * step) > value - 1e-4 * length * slope + 1e-13 * abs(value):
            length /= 2
            if length < 1e-10:
                break
        x = x - length * step
    raise NotSolvedError(
        f"the minimiser was not found: |gradient| is {float(g.norm()):.2g} after Newton's steps, above "
        f"{tolerance:g}; is the problem convex, and does weight_decay make it strongly so?"
    )


def _solve(matrix: Apply, right: Tensor) -> Tensor:
    """Return the solution of a positive definite system, by conjugate gradients."""
    from scipy.sparse.linalg import LinearOperator, cg

    def apply(v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return as_array(matrix(torch.from_numpy(np.ascontiguousarray(v.reshape(-1)))))

    size = len(right)
    operator = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    with np.errstate(all="ignore"):  # a singular system is seen by its solution
        found, _ = cg(operator, as_array(right), rtol=1e-8, maxiter=10 * size)
    return torch.from_numpy(found)
