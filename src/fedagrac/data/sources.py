"""The built-in data sets: where their samples come from.

Each source returns a training set and a test set; the libraries it needs are imported when it is used.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.errors import count, non_negative
from fedagrac.streams import Purpose, stream

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]

__all__ = ["Samples", "digits", "synthetic"]


@dataclass(frozen=True, eq=False)
class Samples:
    """A labelled data set, and who holds which training samples where the data say so themselves."""

    train: Arrays
    test: Arrays
    natural: list[npt.NDArray[np.int64]] | None = None


def digits() -> Samples:
    """Load the 1797 real 8x8 handwritten digits that ship with scikit-learn: 1437 to train, 360 to test.

    The split is stratified by class and always the same. Pixels are scaled to [0, 1].
    """
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bunch = load_digits()
    X = (bunch.data / 16.0).astype(np.float32)
    y = bunch.target.astype(np.int64)
    X_train, X_test, y_train, y_test = train_test_split(X, y, test_size=360, stratify=y, random_state=0)
    return Samples((X_train, y_train), (X_test, y_test))


def synthetic(clients: int, alpha: float = 1.0, beta: float = 1.0, seed: int = 0) -> Samples:
    """Draw the Synthetic(alpha, beta) logistic problem of the FedProx paper (Li et al., MLSys 2020, Section 5.1).

    Client k labels x by argmax(softmax(W_k x + b_k)) with W_k, b_k ~ Normal(u_k, 1), u_k ~ Normal(0, alpha),
    and draws x ~ Normal(v_k, Sigma), Sigma diagonal with j^-1.2, v_k ~ Normal(B_k, 1), B_k ~ Normal(0, beta);
    60 features, 10 classes, lognormal(4, 2) + 50 samples. beta moves the clients' inputs apart (alpha and
    beta are standard deviations, as in the authors' code). A tenth of every client's samples is the test set.

    One u_k shifts every weight of a client, hence all its logits alike, and argmax ignores a common shift: alpha
    changes no label. The recipe is kept as published; clients differ because each draws its own W_k.
    """
    count("clients", clients)
    non_negative("alpha", alpha)
    non_negative("beta", beta)
    features, classes = 60, 10
    scale = np.sqrt(np.arange(1, features + 1) ** -1.2)
    parts: dict[str, list[npt.NDArray[np.float64]]] = {"X": [], "y": [], "Xt": [], "yt": []}
    natural, first = [], 0
    for k in range(clients):
        generator = stream(seed, Purpose.DATA, client=k)
        size = int(generator.lognormal(4, 2)) + 50
        u, B = generator.normal(0, alpha), generator.normal(0, beta)
        W, b = generator.normal(u, 1, (classes, features)), generator.normal(u, 1, classes)
        X = generator.normal(generator.normal(B, 1, features), scale, (size, features))
        y = np.argmax(X @ W.T + b, axis=1)
        held_out = size // 10
        for name, piece in (
            ("X", X[held_out:]),
            ("y", y[held_out:]),
            ("Xt", X[:held_out]),
            ("yt", y[:held_out]),
        ):
            parts[name].append(piece)
        natural.append(np.arange(first, first + size - held_out))
        first += size - held_out
    joined = {name: np.concatenate(pieces) for name, pieces in parts.items()}
    return Samples(
        (joined["X"].astype(np.float32), joined["y"].astype(np.int64)),
        (joined["Xt"].astype(np.float32), joined["yt"].astype(np.int64)),
        natural,
    )
