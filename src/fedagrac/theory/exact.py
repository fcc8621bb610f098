"""Closed forms for least squares and softmax regression, both with weight decay."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["LeastSquares", "least_squares", "softmax_hessian", "softmax_smoothness"]


class LeastSquares(NamedTuple):
    """The constants of least squares, F_i(x) = |X_i x - y_i|^2 / (2 n_i) + weight_decay / 2 |x|^2.

    Attributes:
        L: the largest eigenvalue of any client's Hessian.
        mu: the smallest eigenvalue of any client's Hessian.
        minimiser: the minimiser of F = sum_i omega_i F_i.
        local_values: F_i at the minimiser, [M].
    """

    L: float
    mu: float
    minimiser: npt.NDArray[np.float64]
    local_values: npt.NDArray[np.float64]


def least_squares(
    data: Sequence[tuple[npt.ArrayLike, npt.ArrayLike]],
    weight_decay: float = 0.0,
    weights: npt.ArrayLike | None = None,
) -> LeastSquares:
    """Return the constants of least squares; by default a client's weight is its share of the samples.

    Examples:
        >>> exact = least_squares([([[1.0], [1.0]], [0.0, 2.0]), ([[2.0]], [2.0])], weights=[0.5, 0.5])
        >>> exact.L, exact.mu, exact.minimiser.tolist(), exact.local_values.tolist()
        (4.0, 1.0, [1.0], [0.5, 0.0])
    """
    arrays = [(np.asarray(X, np.float64), np.asarray(y, np.float64)) for X, y in data]
    sizes = np.array([len(y) for _, y in arrays], np.float64)
    omega = sizes / sizes.sum() if weights is None else np.asarray(weights, np.float64)
    decay = weight_decay * np.eye(arrays[0][0].shape[1])
    hessians = [X.T @ X / len(y) + decay for X, y in arrays]
    linear = [X.T @ y / len(y) for X, y in arrays]
    spectra = np.array([np.linalg.eigvalsh(H)[[0, -1]] for H in hessians])
    x = np.linalg.solve(
        sum(w * H for w, H in zip(omega, hessians, strict=True)),
        sum(w * r for w, r in zip(omega, linear, strict=True)),
    )
    values = [((X @ x - y) ** 2).mean() / 2 + weight_decay / 2 * (x @ x) for X, y in arrays]
    return LeastSquares(float(spectra[:, 1].max()), float(spectra[:, 0].min()), x, np.array(values))


def softmax_hessian(inputs: Tensor, x: Tensor, bias: bool = True) -> Tensor:
    """Return the Hessian of the mean cross-entropy of a linear layer with weights x, [d, d].

    It is the mean over samples of (diag(p) - p p^T) kron (z z^T), where p is the softmax output and z the input,
    extended by 1 for the bias. It does not depend on the targets.

    Examples:
        >>> softmax_hessian(torch.tensor([[2.0]]), torch.zeros(2), bias=False).tolist()
        [[1.0, -1.0], [-1.0, 1.0]]
    """
    n, features = inputs.shape
    classes = len(x) // (features + bias)
    scores = inputs @ x[: classes * features].reshape(classes, features).T
    if bias:
        scores = scores + x[classes * features :]
        inputs = torch.cat([inputs, torch.ones(n, 1, dtype=inputs.dtype)], 1)
    p = torch.softmax(scores, 1)
    width = inputs.shape[1]
    blocks = torch.empty(classes, width, classes, width, dtype=inputs.dtype)
    for a in range(classes):
        for b in range(a, classes):
            factor = p[:, a] * (float(a == b) - p[:, b])
            blocks[a, :, b] = blocks[b, :, a] = inputs.T @ (factor[:, None] * inputs) / n
    whole = blocks.reshape(classes * width, classes * width)
    if not bias:
        return whole
    numbers = torch.arange(classes * width).reshape(classes, width)
    order = torch.cat([numbers[:, :-1].reshape(-1), numbers[:, -1]])  # weights first, then biases
    return whole[order][:, order]


def softmax_smoothness(inputs: Tensor, weight_decay: float = 0.0, bias: bool = True) -> float:
    """Return a bound on the curvature at every x: half the largest eigenvalue of Z^T Z / n, plus the decay.

    The factor is 1/2 because no eigenvalue of diag(p) - p p^T is larger.

    Examples:
        >>> softmax_smoothness(torch.tensor([[2.0]]), 0.1, bias=False)
        2.1
    """
    Z = torch.cat([inputs, torch.ones(len(inputs), 1, dtype=inputs.dtype)], 1) if bias else inputs
    return float(torch.linalg.eigvalsh(Z.T @ Z / len(Z))[-1]) / 2 + weight_decay
