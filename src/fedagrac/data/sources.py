"""The samples of the built-in data sets.

Each source returns a training set and a test set. It imports the libraries it needs when it is called.
"""

from __future__ import annotations

import gzip
import zlib
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.data.catalogue import largest_file
from fedagrac.data.pictures import Images
from fedagrac.errors import InputError, count, non_negative

if TYPE_CHECKING:
    import numpy.typing as npt

    Arrays = tuple[npt.NDArray[np.float32] | npt.NDArray[np.uint8], npt.NDArray[np.int64]]

__all__ = [
    "Samples",
    "a9a",
    "cifar10",
    "class_labels",
    "digits",
    "fashion_mnist",
    "read_cifar",
    "read_idx",
    "read_libsvm",
    "synthetic",
]

MOST_SYNTHETIC = 10_000
"""The most clients of Synthetic, whose samples are drawn all at once and take about 200 kB each."""

LONGEST_VALUE = 64
"""The most bytes of a label, or of a feature with its number, in LIBSVM text."""


@dataclass(frozen=True, eq=False)
class Samples:
    """A labelled data set.

    Attributes:
        train, test: inputs and labels.
        natural: the training samples of each client, if the data define them.
        images: how stored bytes become inputs, if the samples are pictures.
        names: the names of the clients, if the data define them.
        tests: the test samples of each client, if every client has its own.
    """

    train: Arrays
    test: Arrays
    natural: list[npt.NDArray[np.int64]] | None = None
    images: Images | None = None
    names: tuple[str, ...] | None = None
    tests: list[npt.NDArray[np.int64]] | None = None


def a9a(folder: Path) -> Samples:
    """Read a9a (LIBSVM text): 123 binary features of people, label 1 for an income above 50,000.

    The test file never mentions feature 123, so the number of features cannot be taken from it.
    """
    return Samples(read_libsvm(folder / "a9a", 32_561, 123), read_libsvm(folder / "a9a.t", 16_281, 123))


def fashion_mnist(folder: Path) -> Samples:
    """Read Fashion-MNIST (gzipped idx): 60,000 and 10,000 grey pictures of 28 x 28 in ten classes.

    Pictures are normalised with mean 0.1307 and standard deviation 0.3081, the constants of the authors' code,
    which are those of MNIST.
    """
    parts = []
    for name, samples in (("train", 60_000), ("t10k", 10_000)):
        X = read_idx(folder / f"{name}-images-idx3-ubyte.gz", (samples, 28, 28))
        labels = folder / f"{name}-labels-idx1-ubyte.gz"
        parts.append((X[:, None], class_labels(labels, read_idx(labels, (samples,)))))
    return Samples(parts[0], parts[1], images=Images(mean=(0.1307,), std=(0.3081,)))


def cifar10(folder: Path) -> Samples:
    """Read CIFAR-10 (the binary release): 50,000 and 10,000 colour pictures of 32 x 32 in ten classes.

    As in the authors' code, pictures are normalised per channel. In training they are also cropped out of a
    frame of 4 pixels and flipped.
    """
    files = [f"data_batch_{i}.bin" for i in range(1, 6)]
    train = [read_cifar(folder / "cifar-10-batches-bin" / name) for name in files]
    X, y = (np.concatenate([part[k] for part in train]) for k in (0, 1))
    images = Images(mean=(0.4914, 0.4822, 0.4465), std=(0.2023, 0.1994, 0.2010), padding=4)
    return Samples((X, y), read_cifar(folder / "cifar-10-batches-bin" / "test_batch.bin"), images=images)


def read_libsvm(path: Path, samples: int, features: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Read LIBSVM text; return inputs [samples, features] and labels, 1 for positive ones and 0 for others."""
    from sklearn.datasets import load_svmlight_file

    _check_size(path, samples * (LONGEST_VALUE * features + LONGEST_VALUE))
    try:
        X, y = load_svmlight_file(str(path), n_features=features, dtype=np.float32)
    except (ValueError, OverflowError, TypeError) as error:
        raise InputError(str(path), "another content", f"LIBSVM text with {features} features ({error})") from None
    if len(y) != samples:
        raise InputError(str(path), f"{len(y)} samples", f"{samples} samples")
    if not np.isfinite(X.data).all() or not np.isfinite(y).all():
        raise InputError(str(path), "NaN or infinity", "finite numbers")
    return np.asarray(X.todense(), np.float32), (y > 0).astype(np.int64)


def read_idx(path: Path, shape: tuple[int, ...]) -> npt.NDArray[np.uint8]:
    """Read a gzipped idx file and return its bytes; its header must have the expected shape."""
    expected = bytes([0, 0, 8, len(shape)]) + b"".join(n.to_bytes(4, "big") for n in shape)
    size = int(np.prod(shape))
    _check_size(path, largest_file(len(expected) + size))
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


def _check_size(path: Path, most: int) -> None:
    """Refuse a file that is larger than its content can be, before it is read."""
    size = path.stat().st_size
    if size > most:
        raise InputError(str(path), f"{size} bytes", f"at most {most} bytes")


def read_cifar(path: Path, pictures: int = 10_000) -> tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]:
    """Read a batch of CIFAR-10, one label byte and 3 x 32 x 32 bytes a picture; return pictures and labels."""
    size = path.stat().st_size
    if size != pictures * 3073:
        raise InputError(str(path), f"{size} bytes", f"{pictures:,} records of 3,073 bytes")
    records = np.fromfile(path, np.uint8, pictures * 3073).reshape(pictures, 3073)
    return records[:, 1:].reshape(-1, 3, 32, 32), class_labels(path, records[:, 0])


def class_labels(path: Path, labels: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """Return labels of ten classes as integers; refuse labels above 9."""
    if labels.max() > 9:
        raise InputError(str(path), f"a label {labels.max()}", "labels from 0 to 9")
    return labels.astype(np.int64)


def digits() -> Samples:
    """Load the 1797 handwritten digits of 8 x 8 pixels that ship with scikit-learn: 1437 to train, 360 to test.

    The split is stratified by class and always that of scikit-learn with random_state=0. Pixels are scaled to
    [0, 1]. scikit-learn is not imported, because that takes as long as importing torch.
    """
    package = find_spec("sklearn")  # does not import it
    assert package is not None
    assert package.origin is not None
    with gzip.open(Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz", "rt") as file:
        table = np.loadtxt(file, delimiter=",")
    X, y = (table[:, :-1] / 16.0).astype(np.float32), table[:, -1].astype(np.int64)
    train, test = _stratified(y, 1437, 360)
    return Samples((X[train], y[train]), (X[test], y[test]))


def _stratified(y: npt.NDArray[np.int64], train: int, test: int) -> tuple[npt.NDArray[np.int64], ...]:
    """Split samples at random so that every class has its share in both parts, exactly as scikit-learn does."""
    rng = np.random.RandomState(0)
    members = [np.flatnonzero(y == label) for label in np.unique(y)]
    sizes = np.array([len(rows) for rows in members])
    for_train = _shares(sizes, train, rng)
    for_test = _shares(sizes - for_train, test, rng)
    parts: tuple[list[int], list[int]] = [], []
    for rows, n, m in zip(members, for_train, for_test, strict=True):
        mixed = rows[rng.permutation(len(rows))]
        parts[0].extend(mixed[:n])
        parts[1].extend(mixed[n : n + m])
    return rng.permutation(parts[0]), rng.permutation(parts[1])


def _shares(sizes: npt.NDArray[np.int64], number: int, rng: np.random.RandomState) -> npt.NDArray[np.int64]:
    """Return the samples of each class: its share rounded down, and one more where the rest is largest."""
    shares = sizes / sizes.sum() * number
    counts = np.floor(shares)
    rests, missing = shares - counts, int(number - counts.sum())
    for rest in np.sort(np.unique(rests))[::-1]:
        if missing == 0:  # before a number is drawn
            break
        (classes,) = np.where(rests == rest)
        chosen = rng.choice(classes, min(len(classes), missing), replace=False)
        counts[chosen] += 1
        missing -= len(chosen)
    return np.asarray(counts, np.int64)


def synthetic(clients: int, alpha: float = 1.0, beta: float = 1.0, seed: int = 0) -> Samples:
    """Draw the Synthetic(alpha, beta) logistic problem of the FedProx paper (Li et al., MLSys 2020, Section 5.1).

    Client k labels x by argmax(softmax(W_k x + b_k)) with W_k, b_k ~ Normal(u_k, 1), u_k ~ Normal(0, alpha),
    and draws x ~ Normal(v_k, Sigma), Sigma diagonal with j^-1.2, v_k ~ Normal(B_k, 1), B_k ~ Normal(0, beta);
    60 features, 10 classes, lognormal(4, 2) + 50 samples. As in the authors' code, alpha and beta are standard
    deviations. beta moves the clients' inputs apart. A tenth of every client's samples is the test set.

    u_k shifts all weights of a client and therefore all its logits alike, and argmax ignores a common shift: alpha
    changes no label. The recipe is kept as published. Clients differ because each draws its own W_k.
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
