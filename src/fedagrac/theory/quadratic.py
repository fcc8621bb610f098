"""Quadratic problems: where every algorithm ends, how fast, and up to which eta.

Client i has F_i(x) = x' H_i x / 2 - r_i' x and takes full gradients, H_i x - r_i. Its K steps of the local rule

    x <- x - eta_i (H_i x - r_i + c_i + mu (x - x~))

from the server's x~ then have a closed form. With S_i = I - eta_i (H_i + mu I) and the mean power
P_i(n) = (I + S_i + ... + S_i^(n-1)) / n,

    x_i = x~ - eta_i K_i P_i(K_i) (H_i x~ - r_i + c_i),
    mean of the first n gradients = P_i(n) (H_i x~ - r_i + c_i) - c_i                        (mu = 0),

so a round with all clients is an affine map z -> A z + b of the server's whole state z: the model x and, where the
algorithm has them, nu and nu_1 ... nu_M. Its fixed point is the algorithm's limit; the spectral radius of A is
the factor by which the distance to it shrinks every round in the long run. Nothing here runs a simulation or calls
the algorithms' own rules; the tests compare the two.

Where FedaGrac ends, as a function of lambda. With lambda = 1 its fixed point is the minimiser of
F = sum_i omega_i F_i for every eta, every K and every form of `transmit` and `local_reference`:
nu_i = P_i (g_i + c_i) - c_i with c_i = nu - nu_i says that P_i (g_i + c_i) = nu for all i; x is at rest only if
nu = 0, hence g_i = nu_i and sum_i omega_i g_i = nu = 0. With any other lambda it is not, but for coincidences,
unless all clients share one minimiser. As eta -> 0 the limit tends to the minimiser of

    sum_i omega_i ((1 - lambda) K_i + lambda Kbar) F_i,

which is FedAvg's at lambda = 0 (clients count by their steps) and the true one at lambda = 1. So a smaller lambda
is biased as soon as K differ, by an amount that no eta repairs; with equal K the bias is of the order of eta.
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

from fedagrac.algorithms import FedaGrac, FedAvg, FedLin, FedNova, FedProx, Scaffold
from fedagrac.core.cohort import fast_clients
from fedagrac.errors import FedagracError, InputError, count, non_negative, positive

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.algorithms import Algorithm

    Array = npt.NDArray[np.float64]
    Counts = int | Sequence[int] | npt.NDArray[np.int64]

__all__ = ["Quadratic", "Recommendation", "RoundMap", "largest_stable_lr", "recommend", "round_map"]

DENSE = 300
"""States up to this size are solved as one dense matrix, larger ones client by client."""


@dataclass(frozen=True, eq=False)
class Quadratic:
    """M clients with F_i(x) = x' H_i x / 2 - r_i' x, and F = sum_i omega_i F_i.

    Attributes:
        hessians: H_i, symmetric, [M, d, d].
        linear: r_i, [M, d]; client i's gradient at x is H_i x - r_i.
        weights: omega_i, above 0 and summing to 1, [M].
        masses: the weights before normalisation, exact, which decide who is fast: sample counts or fractions. By
            default the weights themselves, as fractions.

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

        Without weights a client weighs what it holds.

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
        """Where F is smallest; where several points are, the one of the smallest norm."""
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
        """The eigenvalues of every H_i, [M, d], and its eigenvectors, as columns, [M, d, d]."""
        values, vectors = np.linalg.eigh(self.hessians)
        return values, vectors

    @property
    def curvature(self) -> float:
        """The largest |eigenvalue| of any client."""
        return float(np.abs(self.eigen[0]).max())


def _solve(A: Array, b: Array) -> Array | None:
    """Return the x of the smallest norm with A x = b, or None where there is none."""
    least, _, rank, _ = np.linalg.lstsq(A, b, rcond=None)
    # elimination is the more accurate where x and nu differ in scale: 5e-13 against 5e-9 with 10 clients
    x: Array = np.asarray(np.linalg.solve(A, b) if rank == len(b) else least, dtype=np.float64)
    scale = np.abs(A) @ np.abs(x) + np.abs(b)
    return x if (np.abs(A @ x - b) <= 1e-8 * scale.max()).all() else None


@dataclass(frozen=True, eq=False)
class RoundMap:
    """One round with all clients as an affine map z -> A z + b of the server's whole state z.

    z is the core and, behind it, a row nu_i for every client. The core is x, or (x, nu). Clients meet only in the
    core: row i of the next state depends on the core and on row i alone, so A has the shape of an arrowhead.

    Attributes:
        dimension: d.
        core: how the core acts on itself, [p, p] with p = d or 2 d.
        into: how each row acts on the core, [M, p, d]; M = 0 where the algorithm keeps no rows.
        out: how the core acts on each row, [M, d, p].
        own: how each row acts on itself, symmetric, [M, d, d].
        offset: b.
        first_rows: nu_i before round 1 as an affine function of x_1: matrices [M, d, d] and vectors [M, d].
        first_weights: omega_i, nu before round 1 = sum_i omega_i nu_i.

    Examples:
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> one = round_map(FedAvg(lr=0.1), q, steps=1)
        >>> one(one.start([1.0])).round(6).tolist(), round(one.spectral_radius, 6)
        ([0.8], 0.85)
        >>> one.fixed_point.round(6).tolist()
        [-0.333333]
    """

    dimension: int
    core: Array
    into: Array
    out: Array
    own: Array
    offset: Array
    first_rows: tuple[Array, Array]
    first_weights: Array

    @property
    def size(self) -> int:
        """How many numbers the state has."""
        return len(self.offset)

    def __call__(self, z: Any) -> Array:
        """Return the state after one round from state z."""
        return self._times(np.asarray(z, dtype=np.float64)) + self.offset

    def model(self, z: Array) -> Array:
        """Return x out of a state."""
        return z[: self.dimension]

    def start(self, x1: Any) -> Array:
        """Return the state before round 1, as the algorithm's `init` says."""
        x = np.asarray(x1, dtype=np.float64)
        if x.shape != (self.dimension,):
            raise InputError("x1", x.shape, f"a vector of {self.dimension} numbers")
        if not len(self.own):
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
        for i in range(len(self.own)):
            row = slice(p + i * d, p + (i + 1) * d)
            A[:p, row], A[row, :p], A[row, row] = self.into[i], self.out[i], self.own[i]
        return A

    @cached_property
    def fixed_point(self) -> Array:
        """The x at which the algorithm rests: its limit, where the spectral radius is below 1.

        Where a round leaves some direction alone (no client's data say anything about it), a run stays there
        wherever it began and fixed points are many: this is the one whose state has the smallest norm, found by
        least squares.
        """
        if self.size <= DENSE:
            z = _solve(np.eye(self.size) - self.matrix, self.offset)
        else:
            z = self._resolvent(1.0)(self.offset)
            moved = np.abs(self(z) - z)
            z = z if (moved <= 1e-8 * (1 + np.abs(z).max())).all() else None
        if z is None:
            raise FedagracError("the round map has no fixed point: every run drifts away")
        return self.model(z)

    @cached_property
    def spectral_radius(self) -> float:
        """The largest |eigenvalue| of A: below 1 every run converges, and by this factor a round in the end."""
        parts = self.core, self.into, self.out, self.own
        if not all(np.isfinite(part).all() for part in parts):
            return math.inf
        if self.size <= DENSE:
            return float(np.abs(np.linalg.eigvals(self.matrix)).max())
        # ARPACK finds outliers quickly (modes that swing) but not eigenvalues that crowd at 1 (slow modes): those
        # are outliers of the inverse of 1 - A, taken a little beyond 1 because 1 itself may be an eigenvalue
        shift = 1 + 1e-6
        slow = shift - 1 / _outliers(self._resolvent(shift), self.size)
        return float(np.abs([*_outliers(self._times, self.size), *slow]).max())

    def _times(self, z: Array) -> Array:
        """Return A z."""
        p = len(self.core)
        head, rows = z[:p], z[p:].reshape(-1, self.dimension, 1)
        new_head = self.core @ head + (self.into @ rows).sum(0)[:, 0]
        new_rows = self.out @ head + (self.own @ rows)[..., 0]
        return np.concatenate([new_head, new_rows.ravel()])

    def _resolvent(self, shift: float) -> Any:
        """Return the function f -> z with (shift - A) z = f, the rows eliminated client by client."""
        p, d = len(self.core), self.dimension
        inverse = np.linalg.pinv(shift * np.eye(d) - self.own, hermitian=True)
        reach = self.into @ inverse
        head = np.linalg.pinv(shift * np.eye(p) - self.core - (reach @ self.out).sum(0))

        def solve(f: Array) -> Array:
            rows = f[p:].reshape(-1, d, 1)
            z = head @ (f[:p] + (reach @ rows).sum(0)[:, 0])
            return np.concatenate([z, (inverse @ (rows + (self.out @ z)[..., None])).ravel()])

        return solve


def _outliers(times: Any, size: int) -> npt.NDArray[np.complex128]:
    """Return the largest eigenvalues of a linear map that is given as a function."""
    from scipy.sparse.linalg import ArpackNoConvergence, LinearOperator, eigs

    operator = LinearOperator((size, size), matvec=times, dtype=np.float64)
    start = np.random.default_rng(0).normal(size=size)
    try:
        values = eigs(operator, k=4, ncv=60, v0=start, maxiter=100, tol=1e-10, return_eigenvectors=False)
    except ArpackNoConvergence as error:
        values = error.eigenvalues
    return np.asarray(values, dtype=np.complex128)


def _counts(field: str, value: Any, clients: int) -> npt.NDArray[np.int64]:
    """Check for one count of at least 1 per client, or one for all."""
    values = [value] * clients if np.ndim(value) == 0 else list(value)
    if len(values) != clients:
        raise InputError(field, value, f"one number, or one for each of {clients} clients")
    return np.array([count(f"{field}[{i}]", k) for i, k in enumerate(values)], dtype=np.int64)


def _mean_powers(quadratic: Quadratic, lr: Array, mu: float, n: npt.NDArray[np.int64]) -> Array:
    """Return P_i(n_i) = (I + S_i + ... + S_i^(n_i - 1)) / n_i of every client, [M, d, d]."""
    values, vectors = quadratic.eigen
    u, n = lr[:, None] * (values + mu), n[:, None]  # S has the eigenvalues 1 - u
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        # 1 - (1 - u)^n without cancellation where u is small
        lost = np.where(u < 0.5, -np.expm1(n * np.log1p(-np.minimum(u, 0.5))), 1 - (1 - u) ** n)
        mean = np.where(u == 0, 1.0, lost / (n * u))
        powers: Array = (vectors * mean[:, None, :]) @ vectors.transpose(0, 2, 1)
    return powers


def round_map(
    algorithm: Algorithm, quadratic: Quadratic, steps: Counts, first_steps: Counts | None = None
) -> RoundMap:
    """Return one round of an algorithm, all clients taking part, as an affine map.

    Args:
        algorithm: one of the nine; FedaGrac's calibration must be a number.
        quadratic: the problem.
        steps: K_i, one number for all clients or one each.
        first_steps: over how many steps FedaGrac's "first gradient" is averaged, instead of what the algorithm
            says. Its "epoch" is 1 step here, because batches are full.

    Examples:
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> round_map(FedAvg(lr=0.1), q, steps=[1, 3]).fixed_point.round(6).tolist()    # not the minimiser, -1/3
        [-0.659864]
        >>> round_map(FedaGrac(lr=0.1), q, steps=[1, 3]).fixed_point.round(6).tolist()
        [-0.333333]
    """
    if not isinstance(algorithm, FedAvg | FedProx | FedNova | Scaffold | FedLin | FedaGrac):
        raise InputError("algorithm", algorithm, "FedAvg, FedProx, FedNova, Scaffold, FedLin or FedaGrac")
    q, M, d = quadratic, quadratic.num_clients, quadratic.dimension
    K = _counts("steps", steps, M)
    w, H, r, eye = q.weights, q.hessians, q.linear, np.eye(d)
    lr = algorithm.lr / K if isinstance(algorithm, FedLin) else np.full(M, algorithm.lr)
    mean = _mean_powers(q, lr, algorithm.mu if isinstance(algorithm, FedProx) else 0.0, K)
    coefficients = w * float(w @ K) / K if isinstance(algorithm, FedNova) else w
    with np.errstate(over="ignore", invalid="ignore"):
        move = (coefficients * lr * K)[:, None, None] * mean  # x = x~ - sum_i move_i (g_i + c_i)
        pushed = np.einsum("iab,ib->a", move, r)
        if isinstance(algorithm, FedLin):  # g_i + c_i = gbar
            return _without_rows(eye - move.sum(0) @ q.hessian, move.sum(0) @ (w @ r))
        if not isinstance(algorithm, Scaffold | FedaGrac):
            return _without_rows(eye - (move @ H).sum(0), pushed)
        lam, sent, kept = _orientations(algorithm, q, K, mean, first_steps)
        weighted = w[:, None, None] * sent
        core = np.block(
            [
                [eye - (move @ H).sum(0), -lam * move.sum(0)],
                [(weighted @ H).sum(0), lam * (weighted.sum(0) - eye)],
            ]
        )
        own = lam * (eye - kept)
        into = lam * np.concatenate([move, w[:, None, None] * eye - weighted], axis=1)
        out = np.concatenate([kept @ H, -own], axis=2)
        offset = [pushed, -np.einsum("iab,ib->a", weighted, r), -np.einsum("iab,ib->ia", kept, r).ravel()]
    full = algorithm.init == "full"
    return RoundMap(d, core, into, out, own, np.concatenate(offset), (H * full, -r * full), w)


def _without_rows(matrix: Array, offset: Array) -> RoundMap:
    d = len(offset)
    into, out, own = np.zeros((0, d, d)), np.zeros((0, d, d)), np.zeros((0, d, d))
    return RoundMap(d, matrix, into, out, own, offset, (own, np.zeros((0, d))), np.zeros(0))


def _orientations(
    algorithm: Scaffold | FedaGrac,
    quadratic: Quadratic,
    K: npt.NDArray[np.int64],
    mean: Array,
    first_steps: Counts | None,
) -> tuple[float, Array, Array]:
    """Return lambda and, per client, the mean powers of what is sent for nu and of what is kept as nu_i."""
    if isinstance(algorithm, Scaffold):
        return 1.0, mean, mean
    if callable(algorithm.calibration):
        raise InputError("calibration", algorithm.calibration, "a number: with a schedule rounds are not one map")
    asked: Counts = 1 if algorithm.first_steps == "epoch" else algorithm.first_steps
    n = np.minimum(_counts("first_steps", asked if first_steps is None else first_steps, len(K)), K)
    fast = fast_clients(K, quadratic.masses)
    sends_first = {"hybrid": fast, "average": fast & False, "first": fast | True, "reverse": ~fast}
    first = _mean_powers(quadratic, np.full(len(K), algorithm.lr), 0.0, n)
    sent = np.where(sends_first[algorithm.transmit][:, None, None], first, mean)
    return algorithm.calibration, sent, mean if algorithm.local_reference == "mean" else sent


def _smallest_lr(algorithm: Algorithm, quadratic: Quadratic, steps: Counts) -> float:
    """Return an eta at which the longest local run hardly bends: eta K (h + mu) max(1, lambda) = 0.05."""
    steepest = quadratic.curvature + (algorithm.mu if isinstance(algorithm, FedProx) else 0.0)
    if steepest == 0:
        raise InputError("hessians", "all zero", "at least one client with curvature")
    if isinstance(algorithm, FedaGrac) and not callable(algorithm.calibration):
        steepest *= max(1.0, algorithm.calibration)
    return 0.05 / (steepest * int(_counts("steps", steps, quadratic.num_clients).max()))


def largest_stable_lr(
    algorithm: Algorithm, quadratic: Quadratic, steps: Counts, first_steps: Counts | None = None
) -> float:
    """Return the first eta at which the spectral radius of a round reaches 1, to a relative 1e-6 from below.

    The algorithm's own lr is ignored. The radius is scanned upwards from well below (eta K times the
    largest curvature = 0.05) in steps of 20 %: an unstable window narrower than a step is not seen.

    Examples:
        >>> q = Quadratic([[[1.0]], [[2.0]]], [[1.0], [-2.0]], [0.5, 0.5])
        >>> round(largest_stable_lr(FedAvg(lr=1.0), q, steps=1), 5)                         # 2 / (mean of 1 and 2)
        1.33333
    """

    def growth(lr: float) -> float:
        radius = round_map(dataclasses.replace(algorithm, lr=lr), quadratic, steps, first_steps).spectral_radius
        return math.log(min(max(radius, 0.1), 10.0))  # bounded: 0 and infinity occur

    from scipy.optimize import brentq

    low = _smallest_lr(algorithm, quadratic, steps)
    if growth(low) >= 0:
        found = f"a round map that does not contract at lr = {low:.3g}"
        raise InputError("quadratic", found, "a positive definite sum_i omega_i H_i")
    while growth(high := 1.2 * low) < 0:
        low = high
    return float(brentq(growth, low, high, xtol=1e-7 * low)) * (1 - 1e-7)


@dataclass(frozen=True)
class Recommendation:
    """A choice of eta, and of lambda where the algorithm has one.

    Attributes:
        lr: eta.
        calibration: lambda; None where the algorithm has none.
        spectral_radius: of the round map there.
        largest_stable_lr: the eta from which on the round map, with this lambda, is unstable.
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
    """Return the (eta, lambda) with the smallest spectral radius among those that end at the minimiser.

    Of FedaGrac only lambda = 1 ends there when clients differ (see the head of this module). FedAvg and FedProx do
    by coincidence only when K differ, FedNova as eta -> 0: they need a larger tolerance.
    Where the problem is badly conditioned the fastest eta lies close below the largest stable one.

    Args:
        quadratic: the problem.
        steps: K_i, one number for all clients or one each.
        algorithm: its lr, and FedaGrac's calibration, are ignored.
        calibrations: the lambda to choose from.
        tolerance: how far the limit may be from the minimiser x*, in units of max(|x*|, 1).

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
    searched = [_fastest(option, quadratic, steps, allowed) for option in options]
    unbiased = [found for found in searched if found.bias <= allowed]
    if not unbiased:
        least = min(found.bias for found in searched) / allowed * tolerance
        raise InputError("tolerance", tolerance, f"at least {least:.3g}: no setting ends closer to the minimiser")
    return min(unbiased, key=lambda found: found.spectral_radius)


def _fastest(algorithm: Algorithm, quadratic: Quadratic, steps: Counts, allowed: float) -> Recommendation:
    """Return the eta with the smallest radius among those with an allowed bias, or else with the smallest bias."""
    largest = largest_stable_lr(algorithm, quadratic, steps)
    lam = algorithm.calibration if isinstance(algorithm, FedaGrac) else None
    assert not callable(lam)

    def found(lr: float) -> Recommendation:
        one = round_map(dataclasses.replace(algorithm, lr=lr), quadratic, steps)
        bias = float(np.linalg.norm(one.fixed_point - quadratic.minimiser))
        return Recommendation(lr, lam, one.spectral_radius if bias <= allowed else math.inf, largest, bias)

    def rank(candidate: Recommendation) -> tuple[float, float]:
        return candidate.spectral_radius, candidate.bias if candidate.bias > allowed else 0.0

    low, high, points = _smallest_lr(algorithm, quadratic, steps), largest, 17
    for _ in range(4):
        grid = np.geomspace(low, high, points)
        candidates = [found(float(lr)) for lr in grid]
        best = min(range(points), key=lambda i: rank(candidates[i]))
        low, high = grid[max(best - 1, 0)], grid[min(best + 1, points - 1)]
        chosen, points = candidates[best], 9
    return chosen
