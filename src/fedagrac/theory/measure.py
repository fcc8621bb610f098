"""Measuring the constants that the theorems use: L, mu, sigma^2, B, x* and F_i(x*)."""

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
    """Raised when an iteration does not converge."""


@dataclass(frozen=True, eq=False)
class Constants:
    """The measured constants of a problem.

    Attributes:
        L: the largest curvature of any client at any measured point (Assumption 1).
        mu: the smallest curvature (Assumption 2); None if the problem is not known to be convex.
        sigma2: the largest variance of a stochastic gradient of any client at any point (Assumption 3).
        B: the largest ratio of a client's gradient to the global one, at points where the latter is not 0
            (Assumption 4). It grows without bound towards x*, where the global gradient vanishes.
        gap: F(x_1) - F(x*), or F(x_1) if x* is unknown.
        points: the number of points that were measured.
        optimum: x*; None if the problem is not known to be convex.
        distance2: |x_1 - x*|^2, or None.
        value: F(x*), or None.
        local_values: F_i(x*), [M], or None.
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
        """Return Theorem 3's bound with these constants; raise an InputError if mu is unknown."""
        if self.mu is None or self.distance2 is None:
            raise InputError("constants", "mu = None", "a convex problem, which Theorem 3 requires")
        return theorem3(
            weights, steps, L=self.L, mu=self.mu, sigma2=self.sigma2, distance2=self.distance2, rounds=rounds
        )


def constants(
    problem: Problem, points: Sequence[Tensor] | None = None, convex: bool | None = None, tolerance: float = 1e-10
) -> Constants:
    """Measure the constants of a problem.

    Args:
        problem: the clients, the model and the loss.
        points: the points at which curvature, noise and dissimilarity are measured, such as the iterates of a run.
            By default these are five points from x_1 to x* for a convex problem, and x_1 for any other.
        convex: whether F is convex; None to test it, which recognises models linear in x with cross-entropy.
        tolerance: the norm of the gradient below which x* counts as found.

    Examples:
        >>> import fedagrac as fg
        >>> fed = fg.Federation.from_arrays([([[1.0], [3.0]], [0, 1]), ([[2.0]], [1])])
        >>> problem = Problem(fg.models.build("logistic", features=1, classes=2), fed, weight_decay=0.1)
        >>> measured = constants(problem)
        >>> round(measured.mu, 6), measured.L > 1, measured.gap > 0
        (0.1, True, True)
    """
    convex = problem.is_convex() if convex is None else convex
    optimum = minimise(problem, tolerance) if convex else None
    if points is None:
        points = [problem.x1]
        if optimum is not None:
            points = [problem.x1 + fraction * (optimum - problem.x1) for fraction in (0.0, 0.25, 0.5, 0.75, 1.0)]
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
        total = float((problem.weights @ gradients).norm())
        largest = float(gradients.norm(dim=1).max())
        if total > 1e-8 * largest:
            B = max(B, largest / total)
    start = problem.total(problem.x1)
    if optimum is None:
        return Constants(L=L, mu=None, sigma2=sigma2, B=B, gap=start, points=len(points))
    local = problem.values(optimum)
    value = float(problem.weights @ local)
    return Constants(
        L=L,
        mu=mu,
        sigma2=sigma2,
        B=B,
        gap=start - value,
        points=len(points),
        optimum=as_array(optimum),
        distance2=float((problem.x1 - optimum) @ (problem.x1 - optimum)),
        value=value,
        local_values=as_array(local),
    )


def extreme_eigenvalues(matrix: Apply, size: int, tolerance: float = 1e-12) -> tuple[float, float]:
    """Return the smallest and the largest eigenvalue of a symmetric matrix, by the Lanczos method.

    Every vector is orthogonalised against all earlier ones. The iteration ends when ten steps have moved neither
    Ritz value by more than the tolerance, relative to the larger one, or when the Krylov space is exhausted.

    Power iteration is no alternative: weight decay makes many eigenvalues equal, clients with few classes make the
    largest two nearly equal, and 5000 steps did not separate them. The Ritz values converge even so.

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
        for _ in range(2):  # one pass leaves rounding errors
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
    """Minimise a convex problem by Newton's method until |gradient| <= tolerance; return x*.

    Each step is solved by conjugate gradients.

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
        # near x* values differ only by rounding; the last summand lets the full step pass there
        while problem.total(x - length * step) > value - 1e-4 * length * slope + 1e-13 * abs(value):
            length /= 2
            if length < 1e-10:
                break
        x = x - length * step
    raise NotSolvedError(
        f"Newton's method did not find the minimiser: |gradient| is {float(g.norm()):.2g}, above {tolerance:g}. "
        "The problem must be convex, and weight_decay above 0 makes it strongly convex."
    )


def _solve(matrix: Apply, right: Tensor) -> Tensor:
    """Solve a positive definite system by conjugate gradients; return the solution."""
    from scipy.sparse.linalg import LinearOperator, cg

    def apply(v: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
        return as_array(matrix(torch.from_numpy(np.ascontiguousarray(v.reshape(-1)))))

    size = len(right)
    operator = LinearOperator((size, size), matvec=apply, dtype=np.float64)
    with np.errstate(all="ignore"):  # the caller checks the solution, which is not finite for a singular system
        solution, _ = cg(operator, as_array(right), rtol=1e-8, maxiter=10 * size)
    return torch.from_numpy(solution)
