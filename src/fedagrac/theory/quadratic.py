"""Quadratic problems: the limit of every algorithm, its rate of convergence, and its largest stable eta.

Client i has F_i(x) = x' H_i x / 2 - r_i' x and takes full gradients, H_i x - r_i. Its K_i steps of the local rule

    x <- x - eta_i (H_i x - r_i + c_i + mu (x - x~))

from the server's x~ then have a closed form. With S_i = I - eta_i (H_i + mu I) and the mean power
P_i(n) = (I + S_i + ... + S_i^(n-1)) / n,

    x_i = x~ - eta_i K_i P_i(K_i) (H_i x~ - r_i + c_i),
    mean of the first n gradients = P_i(n) (H_i x~ - r_i + c_i) - c_i                        (mu = 0),

so a round with all clients is an affine map z -> A z + b of the server's state z: the model x and, for algorithms
that keep them, nu and nu_1 ... nu_M. Its fixed point is the algorithm's limit. The spectral radius of A is the
factor by which the distance to the limit shrinks per round in the long run. This module does not run simulations
or call the algorithms' own rules; the tests compare the two.

FedaGrac's limit depends on lambda. With lambda = 1 the fixed point is the minimiser of F = sum_i omega_i F_i for
every eta, every K and every choice of `transmit` and `local_reference`: nu_i = P_i (g_i + c_i) - c_i with
c_i = nu - nu_i means that P_i (g_i + c_i) = nu for all i; x rests only if nu = 0, hence g_i = nu_i and
sum_i omega_i g_i = nu = 0. With any other lambda the fixed point differs from the minimiser, except by coincidence
or if all clients share one minimiser. As eta -> 0 the limit tends to the minimiser of

    sum_i omega_i ((1 - lambda) K_i + lambda Kbar) F_i,

which is FedAvg's limit at lambda = 0 (clients count by their steps) and the minimiser of F at lambda = 1. So a
smaller lambda is biased if the K_i differ, whatever the eta; with equal K_i the bias is of the order of eta.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.algorithms import PAPER, FedaGrac, FedNova, FedProx, Scaffold
from fedagrac.core.cohort import fast_clients
from fedagrac.errors import FedagracError, InputError, count, non_negative, positive

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.algorithms import Algorithm

    Array = npt.NDArray[np.float64]
    Counts = int | Sequence[int] | npt.NDArray[np.int64]

__all__ = ["Quadratic", "Recommendation", "RoundMap", "largest_stable_lr", "recommend", "round_map"]

DENSE = 300
"""The largest state that is solved as one dense matrix; larger ones are solved client by client."""


@dataclass(frozen=True, eq=False)
class Quadratic:
    """M clients with F_i(x) = x' H_i x / 2 - r_i' x, and F = sum_i omega_i F_i.

    Attributes:
        hessians: H_i, symmetric, [M, d, d].
        linear: r_i, [M, d]; client i's gradient at x is H_i x - r_i.
        weights: omega_i, above 0 with sum 1, [M].
        masses: the exact weights before normalisation, sample counts or fractions, which decide which clients are
            fast. By default these are the weights as fractions.

    Examples:
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])    # (x - 1)^2 / 2 and (x + 1)^2
        >>> q.minimiser.round(6).tolist()
        [-0.333333]
    """

    hessians: Array
    linear: Array
    weights: Array
    masses: Sequence[int | Fraction] = ()

    def __post_init__(self) -> None:
        """Check the arrays and store them as float64, with weights computed from the masses."""
        H, r, w = (np.asarray(v, dtype=np.float64) for v in (self.hessians, self.linear, self.weights))
        if H.ndim != 3 or H.shape[1] != H.shape[2] or not H.size:
            raise InputError("hessians", H.shape, "M square matrices, an array of shape [M, d, d]")
        for field, value, shape in (("linear", r, H.shape[:2]), ("weights", w, H.shape[:1])):
            if value.shape != shape:
                raise InputError(field, value.shape, f"an array of shape {list(shape)}")
        for field, value in (("hessians", H), ("linear", r), ("weights", w)):
            if not np.isfinite(value).all():
                raise InputError(field, "NaN or infinity", "finite numbers")
        if not np.allclose(H, H.transpose(0, 2, 1), rtol=0, atol=1e-10 * np.abs(H).max()):
            raise InputError("hessians", "matrices that are not symmetric", "symmetric matrices")
        if (w <= 0).any():
            raise InputError("weights", w.tolist(), "weights above 0")
        masses = tuple(self.masses) or tuple(Fraction(float(v)) for v in w)
        if len(masses) != len(w) or min(masses) <= 0:
            raise InputError("masses", self.masses, f"one mass above 0 for each of {len(w)} clients")
        exact = np.array([float(Fraction(n) / sum(masses)) for n in masses])
        if abs(w.sum() - 1) > 1e-6:
            raise InputError("weights", f"a sum of {w.sum():.6g}", "a sum of 1 (divide the weights by their sum)")
        if not np.allclose(exact, w, rtol=1e-6, atol=0):
            raise InputError("masses", self.masses, f"masses in proportion to the weights {w.tolist()}")
        for field, checked in (("hessians", H), ("linear", r), ("weights", exact), ("masses", masses)):
            object.__setattr__(self, field, checked)

    @classmethod
    def least_squares(
        cls,
        arrays: Sequence[tuple[Any, Any]],
        weight_decay: float = 0.0,
        weights: Sequence[float] | Array | None = None,
    ) -> Quadratic:
        """Make F_i(x) = |X_i x - y_i|^2 / (2 n_i) + weight_decay/2 |x|^2 from each client's (X_i, y_i).

        By default a client's weight is its share of the samples.

        Examples:
            >>> q = Quadratic.least_squares([([[1.0], [1.0]], [2.0, 4.0]), ([[1.0]], [0.0])])
            >>> q.minimiser.round(6).tolist(), q.masses
            ([2.0], (2, 1))
        """
        non_negative("weight_decay", weight_decay)
        if not len(arrays):
            raise InputError("arrays", arrays, "at least one (X, y) pair")
        pairs = [(np.asarray(X, dtype=np.float64), np.asarray(y, dtype=np.float64)) for X, y in arrays]
        for i, (X, y) in enumerate(pairs):
            if X.ndim != 2 or not len(X) or y.shape != X.shape[:1] or X.shape[1] != pairs[0][0].shape[1]:
                shapes = f"X of shape {X.shape}, y of shape {y.shape}"
                raise InputError(f"client {i}", shapes, "X [n_i, d] with client 0's d, y [n_i], n_i at least 1")
        d, sizes = pairs[0][0].shape[1], [len(y) for _, y in pairs]
        H = np.stack([X.T @ X / len(y) + weight_decay * np.eye(d) for X, y in pairs])
        r = np.stack([X.T @ y / len(y) for X, y in pairs])
        if weights is not None:
            return cls(H, r, np.asarray(weights))
        return cls(H, r, np.array(sizes) / sum(sizes), sizes)

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.weights)

    @property
    def dimension(self) -> int:
        """d."""
        return int(self.linear.shape[1])

    @property
    def hessian(self) -> Array:
        """sum_i omega_i H_i."""
        mean: Array = np.tensordot(self.weights, self.hessians, 1)
        return mean

    @cached_property
    def minimiser(self) -> Array:
        """The minimiser of F; the one of smallest norm if there are several."""
        x = _solve(self.hessian, self.weights @ self.linear)
        if x is None or np.linalg.eigvalsh(self.hessian)[0] < -1e-12 * self.curvature:
            raise InputError("hessians", "an F without a minimum", "a positive definite sum_i omega_i H_i")
        return x

    def gradient(self, client: int, x: Array) -> Array:
        """Return H_i x - r_i."""
        gradient: Array = self.hessians[client] @ x - self.linear[client]
        return gradient

    @cached_property
    def eigen(self) -> tuple[Array, Array]:
        """The eigenvalues of every H_i, [M, d], and the eigenvectors as columns, [M, d, d]."""
        values, vectors = np.linalg.eigh(self.hessians)
        return values, vectors

    @property
    def curvature(self) -> float:
        """The largest |eigenvalue| of any client."""
        return float(np.abs(self.eigen[0]).max())


def _solve(A: Array, b: Array) -> Array | None:
    """Return the x of smallest norm with A x = b, or None if there is no solution."""
    least, _, rank, _ = np.linalg.lstsq(A, b, rcond=None)
    # elimination is more accurate when x and nu differ in scale: 5e-13 against 5e-9 with 10 clients
    x: Array = np.asarray(np.linalg.solve(A, b) if rank == len(b) else least, dtype=np.float64)
    scale = np.abs(A) @ np.abs(x) + np.abs(b)
    return x if (np.abs(A @ x - b) <= 1e-8 * scale.max()).all() else None


@dataclass(frozen=True, eq=False)
class RoundMap:
    """One round with all clients as an affine map z -> A z + b of the server's state z.

    z consists of the core, which is x or (x, nu), and a row nu_i for every client. Row i of the next state depends
    only on the core and on row i, so A is an arrowhead matrix. The four blocks of A are attributes.

    Attributes:
        dimension: d.
        core: the block from the core to the core, [p, p] with p = d or 2 d.
        rows_to_core: the block from each row to the core, [M, p, d]; M = 0 if the algorithm keeps no rows.
        core_to_rows: the block from the core to each row, [M, d, p].
        rows: the block from each row to itself, symmetric, [M, d, d].
        offset: b.
        first_rows: nu_i before round 1 as an affine function of x_1: matrices [M, d, d] and vectors [M, d].
        first_weights: omega_i; before round 1, nu = sum_i omega_i nu_i.

    Examples:
        >>> from fedagrac import FedAvg
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> one = round_map(FedAvg(lr=0.1), q, steps=1)
        >>> one(one.start([1.0])).round(6).tolist(), round(one.spectral_radius, 6)
        ([0.8], 0.85)
        >>> one.fixed_point.round(6).tolist()
        [-0.333333]
    """

    dimension: int
    core: Array
    rows_to_core: Array
    core_to_rows: Array
    rows: Array
    offset: Array
    first_rows: tuple[Array, Array]
    first_weights: Array

    @property
    def size(self) -> int:
        """The length of the state."""
        return len(self.offset)

    def __call__(self, z: Any) -> Array:
        """Return the state after one round from state z."""
        return self._times(np.asarray(z, dtype=np.float64)) + self.offset

    def model(self, z: Array) -> Array:
        """Return the model x of a state."""
        return z[: self.dimension]

    def start(self, x1: Any) -> Array:
        """Return the state before round 1, according to the algorithm's `init`."""
        x = np.asarray(x1, dtype=np.float64)
        if x.shape != (self.dimension,):
            raise InputError("x1", x.shape, f"a vector of {self.dimension} numbers")
        if not len(self.rows):
            return x
        matrices, vectors = self.first_rows
        rows = matrices @ x + vectors
        return np.concatenate([x, self.first_weights @ rows, rows.ravel()])

    @property
    def matrix(self) -> Array:
        """A as one dense matrix."""
        p, d = len(self.core), self.dimension
        A = np.zeros((self.size, self.size))
        A[:p, :p] = self.core
        for i in range(len(self.rows)):
            row = slice(p + i * d, p + (i + 1) * d)
            A[:p, row], A[row, :p], A[row, row] = self.rows_to_core[i], self.core_to_rows[i], self.rows[i]
        return A

    @cached_property
    def fixed_point(self) -> Array:
        """The model x of the fixed point: the algorithm's limit if the spectral radius is below 1.

        If a round leaves some direction unchanged, because no client's data depend on it, there are many fixed
        points. This is the one whose state has the smallest norm, computed by least squares.
        """
        if self.size <= DENSE:
            z = _solve(np.eye(self.size) - self.matrix, self.offset)
        else:
            z = self._resolvent(1.0)(self.offset)
            moved = np.abs(self(z) - z)
            z = z if (moved <= 1e-8 * (1 + np.abs(z).max())).all() else None
        if z is None:
            raise FedagracError("the round map has no fixed point: every run diverges")
        return self.model(z)

    @cached_property
    def spectral_radius(self) -> float:
        """The largest |eigenvalue| of A; below 1 every run converges, in the long run by this factor per round."""
        blocks = self.core, self.rows_to_core, self.core_to_rows, self.rows
        if not all(np.isfinite(block).all() for block in blocks):
            return math.inf
        if self.size <= DENSE:
            return float(np.abs(np.linalg.eigvals(self.matrix)).max())
        # ARPACK finds outliers quickly (oscillating modes) but not eigenvalues that cluster at 1 (slow modes).
        # Those are outliers of the inverse of shift - A; the shift is above 1 because 1 may be an eigenvalue
        shift = 1 + 1e-6
        slow = shift - 1 / _outliers(self._resolvent(shift), self.size)
        return float(np.abs([*_outliers(self._times, self.size), *slow]).max())

    def _times(self, z: Array) -> Array:
        """Return A z."""
        p = len(self.core)
        head, rows = z[:p], z[p:].reshape(-1, self.dimension, 1)
        new_head = self.core @ head + (self.rows_to_core @ rows).sum(0)[:, 0]
        new_rows = self.core_to_rows @ head + (self.rows @ rows)[..., 0]
        return np.concatenate([new_head, new_rows.ravel()])

    def _resolvent(self, shift: float) -> Any:
        """Return the function f -> z with (shift - A) z = f, which eliminates the rows client by client."""
        p, d = len(self.core), self.dimension
        inverse = np.linalg.pinv(shift * np.eye(d) - self.rows, hermitian=True)
        reach = self.rows_to_core @ inverse
        head = np.linalg.pinv(shift * np.eye(p) - self.core - (reach @ self.core_to_rows).sum(0))

        def solve(f: Array) -> Array:
            rows = f[p:].reshape(-1, d, 1)
            z = head @ (f[:p] + (reach @ rows).sum(0)[:, 0])
            return np.concatenate([z, (inverse @ (rows + (self.core_to_rows @ z)[..., None])).ravel()])

        return solve


def _outliers(times: Any, size: int) -> npt.NDArray[np.complex128]:
    """Return the eigenvalues of largest absolute value of a linear map given as a function."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    operator = LinearOperator((size, size), matvec=times, dtype=np.float64)
    start = np.random.default_rng(0).normal(size=size)
    try:
        values = eigs(operator, k=4, ncv=60, v0=start, maxiter=100, tol=1e-10, return_eigenvectors=False)
    except ArpackNoConvergence as error:
        values = error.eigenvalues
    return np.asarray(values, dtype=np.complex128)


def _counts(field: str, value: Any, clients: int) -> npt.NDArray[np.int64]:
    """Check for a count of at least 1 per client, or a single one for all; return one per client."""
    values = [value] * clients if np.ndim(value) == 0 else list(value)
    if len(values) != clients:
        raise InputError(field, value, f"one number, or one for each of {clients} clients")
    return np.array([count(f"{field}[{i}]", k) for i, k in enumerate(values)], dtype=np.int64)


def _mean_powers(quadratic: Quadratic, lr: Array, mu: float, n: npt.NDArray[np.int64]) -> Array:
    """Return P_i(n_i) = (I + S_i + ... + S_i^(n_i - 1)) / n_i of every client, [M, d, d]."""
    values, vectors = quadratic.eigen
    u, n = lr[:, None] * (values + mu), n[:, None]  # the eigenvalues of S are 1 - u
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # 1 - (1 - u)^n without cancellation for small u
        lost = np.where(u < 0.5, -np.expm1(n * np.log1p(-np.minimum(u, 0.5))), 1 - (1 - u) ** n)
        mean = np.where(u == 0, 1.0, lost / (n * u))
        powers: Array = (vectors * mean[:, None, :]) @ vectors.transpose(0, 2, 1)
    return powers


def round_map(
    algorithm: Algorithm, quadratic: Quadratic, steps: Counts, first_steps: Counts | None = None
) -> RoundMap:
    """Return one round of an algorithm with all clients as an affine map.

    Args:
        algorithm: one of those of the paper; FedaGrac's calibration must be a number.
        quadratic: the problem.
        steps: K_i, one number for all clients or one for each.
        first_steps: the number of steps over which FedaGrac's "first gradient" is averaged, in place of the
            algorithm's setting. Its "epoch" and "pass" are 1 step here, because batches are full.

    Examples:
        >>> from fedagrac import FedAvg
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> round_map(FedAvg(lr=0.1), q, steps=[1, 3]).fixed_point.round(6).tolist()    # not the minimiser, -1/3
        [-0.659864]
        >>> round_map(FedaGrac(lr=0.1), q, steps=[1, 3]).fixed_point.round(6).tolist()
        [-0.333333]
    """
    if not isinstance(algorithm, PAPER):
        raise InputError("algorithm", algorithm, f"one of {', '.join(kind.__name__ for kind in PAPER)}")
    lr_of_round = _constant_lr(algorithm)
    q, M, d = quadratic, quadratic.num_clients, quadratic.dimension
    K = _counts("steps", steps, M)
    w, H, r, eye = q.weights, q.hessians, q.linear, np.eye(d)
    lr = lr_of_round / K if algorithm.traits.lr == "round" else np.full(M, lr_of_round)
    mean = _mean_powers(q, lr, algorithm.mu if isinstance(algorithm, FedProx) else 0.0, K)
    coefficients = w * float(w @ K) / K if isinstance(algorithm, FedNova) else w
    if isinstance(algorithm, Scaffold):
        coefficients = w * algorithm.server_lr
    with np.errstate(over="ignore", invalid="ignore"):
        move = (coefficients * lr * K)[:, None, None] * mean  # x = x~ - sum_i move_i (g_i + c_i)
        pushed = np.einsum("iab,ib->a", move, r)
        if not isinstance(algorithm, Scaffold | FedaGrac):
            if algorithm.traits.exchanges == 2:  # clients sent their gradients at x~, so g_i + c_i = gbar
                return _without_rows(eye - move.sum(0) @ q.hessian, move.sum(0) @ (w @ r))
            return _without_rows(eye - (move @ H).sum(0), pushed)
        lam, sent, kept = _orientations(algorithm, q, K, mean, first_steps)
        weighted = w[:, None, None] * sent
        core = np.block(
            [
                [eye - (move @ H).sum(0), -lam * move.sum(0)],
                [(weighted @ H).sum(0), lam * (weighted.sum(0) - eye)],
            ]
        )
        rows = lam * (eye - kept)
        rows_to_core = lam * np.concatenate([move, w[:, None, None] * eye - weighted], axis=1)
        core_to_rows = np.concatenate([kept @ H, -rows], axis=2)
        offset = [pushed, -np.einsum("iab,ib->a", weighted, r), -np.einsum("iab,ib->ia", kept, r).ravel()]
    full = algorithm.init == "full"
    return RoundMap(
        dimension=d,
        core=core,
        rows_to_core=rows_to_core,
        core_to_rows=core_to_rows,
        rows=rows,
        offset=np.concatenate(offset),
        first_rows=(H * full, -r * full),
        first_weights=w,
    )


def _without_rows(matrix: Array, offset: Array) -> RoundMap:
    """Return the round map of an algorithm that keeps x alone."""
    d = len(offset)
    none = np.zeros((0, d, d))
    return RoundMap(
        dimension=d,
        core=matrix,
        rows_to_core=none,
        core_to_rows=none,
        rows=none,
        offset=offset,
        first_rows=(none, np.zeros((0, d))),
        first_weights=np.zeros(0),
    )


def _orientations(
    algorithm: Scaffold | FedaGrac,
    quadratic: Quadratic,
    K: npt.NDArray[np.int64],
    mean: Array,
    first_steps: Counts | None,
) -> tuple[float, Array, Array]:
    """Return lambda, and for each client the mean powers of the gradients that it sends and that it keeps."""
    if isinstance(algorithm, Scaffold):
        if algorithm.option == "I":  # the gradient at x~, P_i(1) (g_i + c_i) - c_i
            mean = np.broadcast_to(np.eye(mean.shape[1]), mean.shape)
        return 1.0, mean, mean
    if callable(algorithm.calibration):
        raise InputError("calibration", algorithm.calibration, "a number: a schedule changes the map")
    if first_steps is None:
        first_steps = algorithm.first_steps if isinstance(algorithm.first_steps, int) else 1
    n = np.minimum(_counts("first_steps", first_steps, len(K)), K)
    fast = fast_clients(K, quadratic.masses)
    sends_first = {"hybrid": fast, "average": fast & False, "first": fast | True, "reverse": ~fast}
    first = _mean_powers(quadratic, np.full(len(K), _constant_lr(algorithm)), 0.0, n)
    sent = np.where(sends_first[algorithm.transmit][:, None, None], first, mean)
    return algorithm.calibration, sent, mean if algorithm.local_reference == "mean" else sent


def _constant_lr(algorithm: Algorithm) -> float:
    """Return eta; raise InputError if it changes over the rounds, or if local steps are not plain."""
    if callable(algorithm.lr):
        raise InputError("lr", algorithm.lr, "a number: a schedule changes the map")
    if not algorithm.local.plain:
        raise InputError("local", algorithm.local, "SGD() without momentum and clipping: the map must be affine")
    return algorithm.lr


def _smallest_lr(algorithm: Algorithm, quadratic: Quadratic, steps: Counts) -> float:
    """Return an eta well below the stable ones, with eta Kmax (h + mu) max(1, lambda) = 0.05."""
    steepest = quadratic.curvature + (algorithm.mu if isinstance(algorithm, FedProx) else 0.0)
    if steepest == 0:
        raise InputError("hessians", "all zero", "at least one client with curvature")
    if isinstance(algorithm, FedaGrac) and not callable(algorithm.calibration):
        steepest *= max(1.0, algorithm.calibration)
    return 0.05 / (steepest * int(_counts("steps", steps, quadratic.num_clients).max()))


def largest_stable_lr(
    algorithm: Algorithm, quadratic: Quadratic, steps: Counts, first_steps: Counts | None = None
) -> float:
    """Return the smallest eta at which the spectral radius of a round reaches 1, to a relative 1e-6 from below.

    The algorithm's own lr is ignored. The search begins well below the result, at eta Kmax times the largest
    curvature = 0.05, and increases eta by 20 % at a time; it misses an unstable interval narrower than that.

    Examples:
        >>> from fedagrac import FedAvg
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> round(largest_stable_lr(FedAvg(lr=1.0), q, steps=1), 5)                         # 2 / (mean of 1 and 2)
        1.33333
    """

    def growth(lr: float) -> float:
        radius = round_map(dataclasses.replace(algorithm, lr=lr), quadratic, steps, first_steps).spectral_radius
        return math.log(min(max(radius, 0.1), 10.0))  # bounded, because the radius may be 0 or infinite

    from scipy.optimize import brentq

    low = _smallest_lr(algorithm, quadratic, steps)
    if growth(low) >= 0:
        value = f"a round map that does not contract at lr = {low:.3g}"
        raise InputError("quadratic", value, "a positive definite sum_i omega_i H_i")
    while growth(high := 1.2 * low) < 0:
        low = high
    return float(brentq(growth, low, high, xtol=1e-7 * low)) * (1 - 1e-7)


@dataclass(frozen=True)
class Recommendation:
    """A recommended eta, and lambda if the algorithm has one.

    Attributes:
        lr: eta.
        calibration: lambda; None if the algorithm has none.
        spectral_radius: the spectral radius of the round map at this setting.
        largest_stable_lr: the smallest eta at which the round map with this lambda is unstable.
        bias: |limit - minimiser|.
    """

    lr: float
    calibration: float | None
    spectral_radius: float
    largest_stable_lr: float
    bias: float


DEFAULT_ALGORITHM = FedaGrac(lr=1.0)


def recommend(
    quadratic: Quadratic,
    steps: Counts,
    algorithm: Algorithm = DEFAULT_ALGORITHM,
    calibrations: Sequence[float] = (0.25, 0.5, 0.75, 1.0),
    tolerance: float = 1e-6,
) -> Recommendation:
    """Return the (eta, lambda) with the smallest spectral radius among those whose limit is the minimiser.

    If clients differ, FedaGrac's limit is the minimiser only with lambda = 1 (see the docstring of this module).
    If the K_i differ, FedAvg and FedProx reach it only by coincidence and FedNova only as eta -> 0: these need a
    larger tolerance. For a badly conditioned problem the fastest eta is just below the largest stable one.

    Args:
        quadratic: the problem.
        steps: K_i, one number for all clients or one for each.
        algorithm: the algorithm; its lr, and FedaGrac's calibration, are ignored.
        calibrations: the values of lambda to choose from.
        tolerance: the largest distance of the limit from the minimiser x*, in units of max(|x*|, 1).

    Examples:
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> best = recommend(q, steps=[1, 3])
        >>> best.calibration, best.bias < 1e-12, best.lr < best.largest_stable_lr
        (1.0, True, True)
    """
    positive("tolerance", tolerance)
    options: list[Algorithm] = [algorithm]
    if isinstance(algorithm, FedaGrac):
        if not len(calibrations):
            raise InputError("calibrations", calibrations, "at least one number")
        options = [dataclasses.replace(algorithm, calibration=lam) for lam in calibrations]
    allowed = tolerance * max(float(np.linalg.norm(quadratic.minimiser)), 1.0)
    candidates = [_fastest(option, quadratic, steps, allowed) for option in options]
    unbiased = [candidate for candidate in candidates if candidate.bias <= allowed]
    if not unbiased:
        least = min(candidate.bias for candidate in candidates) / allowed * tolerance
        raise InputError("tolerance", tolerance, f"at least {least:.3g}: no setting ends closer to the minimiser")
    return min(unbiased, key=lambda candidate: candidate.spectral_radius)


def _fastest(algorithm: Algorithm, quadratic: Quadratic, steps: Counts, allowed: float) -> Recommendation:
    """Return the eta with the smallest radius among those with an allowed bias, or with the smallest bias."""
    largest = largest_stable_lr(algorithm, quadratic, steps)
    lam = algorithm.calibration if isinstance(algorithm, FedaGrac) else None
    assert not callable(lam)

    def evaluate(lr: float) -> Recommendation:
        affine = round_map(dataclasses.replace(algorithm, lr=lr), quadratic, steps)
        bias = float(np.linalg.norm(affine.fixed_point - quadratic.minimiser))
        return Recommendation(lr, lam, affine.spectral_radius if bias <= allowed else math.inf, largest, bias)

    def rank(candidate: Recommendation) -> tuple[float, float]:
        return candidate.spectral_radius, candidate.bias if candidate.bias > allowed else 0.0

    low, high, points = _smallest_lr(algorithm, quadratic, steps), largest, 17
    for _ in range(4):
        grid = np.geomspace(low, high, points)
        candidates = [evaluate(float(lr)) for lr in grid]
        best = min(range(points), key=lambda i: rank(candidates[i]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
        chosen, points = candidates[best], 9
    return chosen
