"""The right-hand sides of the paper's Theorems 1 to 3, term by term, and of their corollaries.

The formulas are as printed and take plain numbers. Each holds up to the constant inside O(.), which the paper does
not give. Use them to compare settings and to see how a term scales; a measured curve may lie above them.
`docs/theory.md` lists where the printed formulas and their proofs disagree.

Symbols: omega_i weights, K_i steps a round, Kbar = sum_i omega_i K_i, M clients, T rounds, eta the step size,
L smoothness, mu strong convexity, sigma^2 variance of a stochastic gradient, lambda the calibration rate.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from fedagrac.errors import InputError, count, non_negative, positive

__all__ = [
    "NOTE",
    "Bound",
    "corollary_convex",
    "corollary_nonconvex",
    "extreme_steps",
    "fednova_condition",
    "fednova_rate",
    "theorem1",
    "theorem1_unpublished",
    "theorem2",
    "theorem3",
]

NOTE = "Holds up to the constant inside O(.): compare terms and slopes, not heights."

Array = npt.NDArray[np.float64]
Values = float | Array


@dataclass(frozen=True, eq=False)
class Bound:
    """The right-hand side of a theorem. Terms are numbers, or arrays if `rounds` was an array.

    Attributes:
        name: the name of the theorem.
        terms: the terms in the theorem's order.
        step_size: the eta that the statement prescribes, or the largest that it allows, up to the constant.
        step_limit: the largest eta that the proof allows explicitly.
        condition: the conditions on eta in the statement and in the proof.
        constants: the quantities in the terms, such as Kbar, H and P.
        note: a caveat to show next to every number or curve of this bound.
    """

    name: str
    terms: Mapping[str, Values]
    step_size: Values
    step_limit: float
    condition: str
    constants: Mapping[str, float]
    note: str = NOTE

    @property
    def total(self) -> Values:
        """The sum of the terms."""
        return _plain(np.sum(np.stack([np.asarray(term) for term in self.terms.values()]), axis=0))


def theorem1(weights: npt.ArrayLike, steps: npt.ArrayLike, local_losses: npt.ArrayLike, *, L: float) -> Bound:
    """Return Theorem 1's floor: the part of FedAvg's E F(x_T) - F(x*) that may remain as T -> infinity.

        sum_i omega_i (K_i / K_min - 1) F_i(x*)

    `local_losses` are the F_i(x*), at least 0. Subtracting min F_i from each F_i changes neither FedAvg nor the
    proof, so F_i(x*) - min F_i is also valid: it gives a lower floor, which is zero if all clients agree on x*.

    Examples:
        >>> bound = theorem1([0.5, 0.5], [2, 6], [0.1, 0.3], L=1.0)
        >>> round(bound.total, 6)                            # 0.5 * (6 / 2 - 1) * 0.3
        0.3
        >>> theorem1([0.5, 0.5], [4, 4], [0.1, 0.3], L=1.0).total
        0.0
    """
    w, K = _clients(weights, steps)
    Kbar = float(w @ K)
    L = positive("L", L)
    return Bound(
        name="Theorem 1 (FedAvg)",
        condition="statement: eta = O(1 / (mu L T Kbar)) <= 1 / (L Kbar); "
        "proof: eta <= 1 / (L sqrt(2 Kmax (Kmax - 1)))",
        terms={"floor": _floor(w, K, local_losses)},
        step_size=1 / (L * Kbar),
        step_limit=_limit1(K, L),
        constants=_counts(w, K),
    )


def theorem1_unpublished(
    weights: npt.ArrayLike,
    steps: npt.ArrayLike,
    local_losses: npt.ArrayLike,
    *,
    rounds: npt.ArrayLike,
    L: float,
    mu: float,
    sigma2: float,
    distance2: float,
) -> Bound:
    """Return the form of Theorem 1 for finite T, which the paper's source contains as a comment.

    It is not part of the published statement. Its last term is the published floor.

    Examples:
        >>> bound = theorem1_unpublished(
        ...     [0.5, 0.5], [1, 3], [0.0, 0.0], L=1.0, mu=1.0, sigma2=2.0, distance2=0.0, rounds=10
        ... )
        >>> {name: round(float(term), 6) for name, term in bound.terms.items()}
        {'exponential': 0.0, 'noise': 0.1, 'drift': 0.025, 'floor': 0.0}
    """
    w, K = _clients(weights, steps)
    L, mu, sigma2, distance2 = _convex(L, mu, sigma2, distance2)
    T = _rounds(rounds)
    published = theorem1(w, K, local_losses, L=L)
    Kbar, Kmin = float(w @ K), float(K.min())
    terms = {
        "exponential": mu * Kbar / Kmin * distance2 * np.exp(-mu * T / L),
        "noise": sigma2 / (mu * T * Kbar * Kmin) * (w**2 @ K),
        "drift": sigma2 * L / (mu**2 * T**2 * Kbar**2 * Kmin) * (w @ K**2),
        "floor": np.full_like(T, published.total),
    }
    return dataclasses.replace(
        published,
        name="Theorem 1 (FedAvg), longer form in the paper's source, not in the published statement",
        terms={name: _plain(term) for name, term in terms.items()},
        step_size=_stated_step(L, mu, Kbar, T),
    )


def theorem2(
    weights: npt.ArrayLike,
    steps: npt.ArrayLike,
    *,
    L: float,
    sigma2: float,
    gap: float,
    rounds: npt.ArrayLike,
    calibration: float = 1.0,
    lr: float | None = None,
) -> Bound:
    """Return Theorem 2's five terms: FedaGrac, non-convex, the mean of E |grad F|^2 over the rounds.

        gap / (eta lambda Kbar T)
        eta sigma^2 L / (lambda Kbar)    sum_i omega_i^2 K_i
        eta sigma^2 L lambda             sum_i omega_i^2 ((Kbar - K_i)^2 / (Kbar K_i) + 1)
        eta^2 L^2 sigma^2 / (lambda Kbar) sum_i omega_i K_i^4
        eta^2 L^2 sigma^2 lambda / Kbar  sum_i omega_i K_i^3 (K_i sum_j omega_j^2 / K_j + 1)

    with the theorem's eta = sqrt(M / (T Kbar)), which gives the terms as printed. `lr` replaces this eta. `gap` is
    F(x_1) - F(x*).

    Examples:
        >>> bound = theorem2([0.5, 0.5], [2, 2], L=1.0, sigma2=1.0, gap=3.0, rounds=100)
        >>> {name: round(term, 6) for name, term in bound.terms.items()}
        {'start': 0.15, 'noise': 0.05, 'calibration noise': 0.05, 'drift': 0.08, 'calibration drift': 0.06}
        >>> round(bound.step_size, 6)
        0.1
    """
    w, K = _clients(weights, steps)
    L, lam = positive("L", L), positive("calibration", calibration)
    sigma2, gap = non_negative("sigma2", sigma2), non_negative("gap", gap)
    T = _rounds(rounds)
    Kbar = float(w @ K)
    eta = np.sqrt(len(w) / (T * Kbar)) if lr is None else np.full_like(T, positive("lr", lr))
    terms = {
        "start": gap / (eta * lam * Kbar * T),
        "noise": eta * sigma2 * L / (lam * Kbar) * (w**2 @ K),
        "calibration noise": eta * sigma2 * L * lam * (w**2 @ ((Kbar - K) ** 2 / (Kbar * K) + 1)),
        "drift": eta**2 * L**2 * sigma2 / (lam * Kbar) * (w @ K**4),
        "calibration drift": eta**2 * L**2 * sigma2 * lam / Kbar * (w @ (K**3 * (K * (w**2 @ (1 / K)) + 1))),
    }
    return Bound(
        name="Theorem 2 (FedaGrac, non-convex)",
        terms={name: _plain(term) for name, term in terms.items()},
        step_size=_plain(eta),
        step_limit=_limit2(K, L),
        condition="statement: eta = O(sqrt(M / (T Kbar))); "
        "proof: eta <= 1 / (2 sqrt(2) L Kmax), and sufficiently small",
        constants=_counts(w, K),
    )


def theorem3(
    weights: npt.ArrayLike,
    steps: npt.ArrayLike,
    *,
    L: float,
    mu: float,
    sigma2: float,
    distance2: float,
    rounds: npt.ArrayLike,
) -> Bound:
    """Return Theorem 3's three terms: FedaGrac with lambda = 1, strongly convex, E F(x_T) - F(x*).

        mu |x_1 - x*|^2 exp(-mu T / L)  +  H / (mu T)  +  P / (mu^2 T^2)

        H = sigma^2 / Kbar^2   sum_i omega_i^2 (K_i + Kbar + (Kbar - K_i)^2 / K_i)
        P = L^2 sigma^2 / mu   (sum_i omega_i K_i^3) sum_j omega_j^2 / K_j

    `distance2` is |x_1 - x*|^2. H and P are in `constants`. The bound also hides logarithms of T (the tilde on O).

    Examples:
        >>> bound = theorem3([0.5, 0.5], [2, 2], L=2.0, mu=1.0, sigma2=1.0, distance2=0.0, rounds=[10, 100])
        >>> bound.constants["H"], bound.constants["P"]
        (0.5, 8.0)
        >>> bound.total
        array([0.13  , 0.0058])
    """
    w, K = _clients(weights, steps)
    L, mu, sigma2, distance2 = _convex(L, mu, sigma2, distance2)
    T = _rounds(rounds)
    Kbar = float(w @ K)
    H = float(sigma2 / Kbar**2 * (w**2 @ (K + Kbar + (Kbar - K) ** 2 / K)))
    P = float(L**2 * sigma2 / mu * (w @ K**3) * (w**2 @ (1 / K)))
    terms = {
        "exponential": mu * distance2 * np.exp(-mu * T / L),
        "H / (mu T)": H / (mu * T),
        "P / (mu^2 T^2)": P / (mu * T) ** 2,
    }
    return Bound(
        name="Theorem 3 (FedaGrac, strongly convex)",
        terms={name: _plain(term) for name, term in terms.items()},
        step_size=_stated_step(L, mu, Kbar, T),
        step_limit=_limit2(K, L),
        condition="statement: eta = O(1 / (mu L T Kbar)) <= 1 / (L Kbar), lambda = 1; "
        "proof: through Theorem 2's drift, eta <= 1 / (2 sqrt(2) L Kmax)",
        constants={**_counts(w, K), "H": H, "P": P},
    )


def corollary_nonconvex(clients: int, rounds: npt.ArrayLike, mean_steps: float) -> Values:
    """Return the rate of Theorem 2's corollary, 1 / sqrt(M T Kbar), for equal weights and lambda = O(1).

    The rate holds up to the constant inside O(.).

    Examples:
        >>> corollary_nonconvex(4, 100, 25)
        0.01
    """
    return _plain(1 / np.sqrt(count("clients", clients) * _rounds(rounds) * _mean_steps(mean_steps)))


def corollary_convex(
    clients: int, rounds: npt.ArrayLike, mean_steps: float, *, sigma2: float, mu: float
) -> Values:
    """Return the rate of Theorem 3's corollary, sigma^2 / (mu M T Kbar), for equal weights.

    The rate holds up to the constant and the logarithms of T inside O(.).

    Examples:
        >>> corollary_convex(4, 100, 25, sigma2=2.0, mu=0.5)
        0.0004
    """
    work = count("clients", clients) * _rounds(rounds) * _mean_steps(mean_steps)
    return _plain(non_negative("sigma2", sigma2) / (positive("mu", mu) * work))


def fednova_condition(steps: npt.ArrayLike) -> float:
    """Return sum_i Kbar / (M K_i) for equal weights.

    FedNova reaches the rate 1 / sqrt(M T Kbar) only if this number stays bounded. It is the arithmetic mean of the
    K_i over their harmonic mean: 1 if they are equal, otherwise more.

    Examples:
        >>> fednova_condition([5, 5, 5])
        1.0
        >>> round(fednova_condition(extreme_steps(4, 97)), 3)     # Kbar = 25
        18.814
    """
    K = _steps(steps)
    return float((K.mean() / K).mean())


def fednova_rate(steps: npt.ArrayLike, rounds: npt.ArrayLike) -> Values:
    """Return FedNova's rate in the paper's remark, `fednova_condition` / sqrt(M T Kbar), for equal weights.

    The rate holds up to the constant inside O(.).

    Examples:
        >>> fednova_rate([1, 4], 1000) / corollary_nonconvex(2, 1000, 2.5)
        1.5625
    """
    K = _steps(steps)
    return _plain(fednova_condition(K) * np.asarray(corollary_nonconvex(len(K), rounds, float(K.mean()))))


def extreme_steps(clients: int, fast: int) -> Array:
    """Return the step counts of the remark's extreme case: 1 for all clients except the last, which runs `fast`.

    For these `fednova_condition` is Kbar (1 - (1 - 1 / fast) / M), so it grows like Kbar.

    Examples:
        >>> extreme_steps(4, 97)
        array([ 1.,  1.,  1., 97.])
    """
    K = np.ones(count("clients", clients, least=2))
    K[-1] = count("fast", fast)
    return K


def _plain(values: Any) -> Values:
    """Return an array, or a float for an array of dimension 0."""
    array = np.asarray(values, dtype=np.float64)
    return array if array.ndim else float(array)


def _vector(field: str, values: Any, accepted: str) -> Array:
    """Check for a vector of finite numbers."""
    try:
        array = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(field, values, accepted) from None
    if array.ndim != 1 or not array.size or not np.isfinite(array).all():
        raise InputError(field, values, accepted)
    return array


def _steps(steps: npt.ArrayLike) -> Array:
    """Check the K_i."""
    accepted = "one finite number of steps, at least 1, for each client"
    K = _vector("steps", steps, accepted)
    if (K < 1).any():
        raise InputError("steps", steps, accepted)
    return K


def _clients(weights: npt.ArrayLike, steps: npt.ArrayLike) -> tuple[Array, Array]:
    """Check the omega_i and the K_i."""
    accepted = "one number above 0 for each client, with sum 1"
    w, K = _vector("weights", weights, accepted), _steps(steps)
    if (w <= 0).any() or abs(w.sum() - 1) > 1e-6:
        raise InputError("weights", weights, accepted)
    if len(K) != len(w):
        raise InputError("steps", steps, f"one number per weight ({len(w)})")
    return w, K


def _rounds(rounds: npt.ArrayLike) -> Array:
    """Check T, a number or an array."""
    accepted = "a finite number of rounds, at least 1, or an array of them"
    try:
        T = np.asarray(rounds, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError("rounds", rounds, accepted) from None
    if not T.size or not np.isfinite(T).all() or (T < 1).any():
        raise InputError("rounds", rounds, accepted)
    return T


def _mean_steps(mean_steps: float) -> float:
    if positive("mean_steps", mean_steps) < 1:
        raise InputError("mean_steps", mean_steps, "a number of at least 1")
    return float(mean_steps)


def _convex(L: float, mu: float, sigma2: float, distance2: float) -> tuple[float, float, float, float]:
    """Check the constants of a strongly convex problem; return them as floats."""
    if positive("mu", mu) > positive("L", L):
        raise InputError("mu", mu, f"at most L = {L}")
    return float(L), float(mu), non_negative("sigma2", sigma2), non_negative("distance2", distance2)


def _floor(w: Array, K: Array, local_losses: npt.ArrayLike) -> float:
    """Return sum_i omega_i (K_i / K_min - 1) F_i(x*)."""
    accepted = f"one finite number of at least 0 for each of the {len(w)} clients"
    losses = _vector("local_losses", local_losses, accepted)
    if len(losses) != len(w) or (losses < 0).any():
        raise InputError("local_losses", local_losses, accepted)
    return float(w @ ((K / K.min() - 1) * losses))


def _counts(w: Array, K: Array) -> dict[str, float]:
    """Return the mean, the smallest and the largest K_i by name."""
    return {"Kbar": float(w @ K), "Kmin": float(K.min()), "Kmax": float(K.max())}


def _stated_step(L: float, mu: float, Kbar: float, T: Array) -> Values:
    """Return the smaller of 1 / (mu L T Kbar) and 1 / (L Kbar), the step size of Theorems 1 and 3."""
    return _plain(np.minimum(1 / (mu * T), 1) / (L * Kbar))


def _limit1(K: Array, L: float) -> float:
    """Return 1 / (L sqrt(2 Kmax (Kmax - 1))), or infinity if no client takes a second step."""
    Kmax = float(K.max())
    return float(1 / (L * np.sqrt(2 * Kmax * (Kmax - 1)))) if Kmax > 1 else float("inf")


def _limit2(K: Array, L: float) -> float:
    """Return 1 / (2 sqrt(2) L Kmax), the limit in the proofs of Theorems 2 and 3."""
    return float(1 / (2 * np.sqrt(2) * L * K.max()))
