"""The built-in data sets: where their samples come from.

Each source returns a training set and a test set; the libraries it needs are imported when it is used.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.data.images import Images
from fedagrac.errors import InputError, count, non_negative

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = tuple[npt.NDArray[np.float32] | npt.NDArray[np.uint8], npt.NDArray[np.int64]]

__all__ = ["Samples", "a9a", "cifar10", "digits", "fashion_mnist", "synthetic"]

MOST_SYNTHETIC = 10_000
"""Clients of Synthetic, whose samples are all drawn at once: about 200 kB each."""


@dataclass(frozen=True, eq=False)
class Samples:
    """A labelled data set.

    Attributes:
        natural: who holds which training samples, where the data say so themselves.
        images: how stored bytes become inputs, where the samples are pictures.
    """

    train: Arrays
    test: Arrays
    natural: list[npt.NDArray[np.int64]] | None = None
    images: Images | None = None


def a9a(folder: Path) -> Samples:
    """Read a9a (LIBSVM text): 123 binary features of people, label 1 for an income above 50,000.

    The test file never mentions feature 123, so the number of features is given, not guessed.
    """
    return Samples(_libsvm(folder / "a9a", 32_561, 123), _libsvm(folder / "a9a.t", 16_281, 123))


def fashion_mnist(folder: Path) -> Samples:
    """Read Fashion-MNIST (gzipped idx): 60,000 and 10,000 grey pictures of 28 x 28 in ten classes.

    Normalised with mean 0.1307 and standard deviation 0.3081, the constants of the authors' code (MNIST's own).
    """
    parts = []
    for name, samples in (("train", 60_000), ("t10k", 10_000)):
        X = _idx(folder / f"{name}-images-idx3-ubyte.gz", (samples, 28, 28))
        labels = folder / f"{name}-labels-idx1-ubyte.gz"
        parts.append((X[:, None], _ten_classes(labels, _idx(labels, (samples,)))))
    return Samples(parts[0], parts[1], images=Images(mean=(0.1307,), std=(0.3081,)))


def cifar10(folder: Path) -> Samples:
    """Read CIFAR-10 (the binary release): 50,000 and 10,000 colour pictures of 32 x 32 in ten classes.

    Normalised per channel and, in training, cropped out of a frame of 4 and flipped, as in the authors' code.
    """
    files = [f"data_batch_{i}.bin" for i in range(1, 6)]
    train = [_cifar(folder / "cifar-10-batches-bin" / name) for name in files]
    X, y = (np.concatenate([part[k] for part in train]) for k in (0, 1))
    images = Images(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), padding=4)
    return Samples((X, y), _cifar(folder / "cifar-10-batches-bin" / "test_batch.bin"), images=images)


def _libsvm(path: Path, samples: int, features: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Read LIBSVM text with so many lines: a line of two bytes becomes a row of `features` numbers."""
    from sklearn.datasets import load_svmlight_file

    try:
        X, y = load_svmlight_file(str(path), n_features=features, dtype=np.float32)
    except (ValueError, OverflowError, TypeError) as error:
        raise InputError(str(path), "another content", f"LIBSVM text with {features} features ({error})") from None
    if len(y) != samples:
        raise InputError(str(path), f"{len(y)} samples", f"{samples} samples")
    if not np.isfinite(X.data).all() or not np.isfinite(y).all():
        raise InputError(str(path), "NaN or infinity", "finite numbers")
    return np.asarray(X.todense(), np.float32), (y > 0).astype(np.int64)


def _idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Read bytes in the idx format, whose header must say what is expected: nothing is allocated on its word."""
    expected = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = int(np.prod(shape))
    try:
        with gzip.open(path, "rb") as file:
            header = file.read(len(expected))
            content = file.read(size + 1) if header == expected else b""
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise InputError(str(path), "damaged gzip data", f"an idx file ({error})") from None
    if header != expected:
        raise InputError(str(path), header.hex(), f"an idx file of {' x '.join(map(str, shape))} bytes")
    if len(content) != size:
        raise InputError(str(path), f"{len(content)} bytes after the header", f"{size} bytes")
    return np.frombuffer(bytearray(content), np.uint8).reshape(shape)


def _cifar(path: Path, pictures: int = 10_000) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read one batch of CIFAR-10: per picture one label byte and 3 x 32 x 32 bytes."""
    size = path.stat().st_size
    if size != pictures * 3073:
        raise InputError(str(path), f"{size} bytes", f"{pictures:,} records of 3,073 bytes")
    records = np.fromfile(path, np.uint8, pictures * 3073).reshape(pictures, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), _ten_classes(path, records[:, 0])


def _ten_classes(path: Path, labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    if labels.max() > 9:
        raise InputError(str(path), f"a label {labels.max()}", "labels from 0 to 9")
    return labels.astype(np.int64)


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
    count("clients", clients, most=MOST_SYNTHETIC)
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
