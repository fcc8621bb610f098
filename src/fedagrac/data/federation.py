"""A federation: one pool of samples, and the share of every client.

The samples exist once; a client is a list of sample numbers. Weights are omega_i = n_i / n, or the user's.
"""

from __future__ import annotations

from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.data.download import ready
from fedagrac.data.partitions import IID, Partition, Shares, StoredShares
from fedagrac.data.pictures import Images
from fedagrac.data.sources import a9a, cifar10, digits, fashion_mnist, synthetic
from fedagrac.errors import MOST_CLIENTS, InputError, count, one_of, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["DATASETS", "Federation"]

READERS = {"a9a": a9a, "fashion-mnist": fashion_mnist, "cifar10": cifar10}
"""The readers of the data sets that are read from files, by name."""

DATASETS = (*READERS, "digits", "synthetic")
"""The names that `Federation.load` accepts."""


class Federation:
    """M clients and their data.

    Attributes:
        name: the name in tables and run folders.
        cites: the keys of its papers in `fedagrac.citations.ENTRIES`.
        inputs, targets: the pooled training samples, [n, ...] and [n]; pictures stay bytes.
        images: how bytes become inputs, or None.
        test: the test inputs and targets, or None.
        sizes: n_i, the samples of each client, [M].
        weights: omega_i, [M], summing to 1.
        masses: the exact weights before normalisation: sample counts, or the user's weights as fractions.

    Examples:
        >>> fed = Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
        >>> fed.num_clients, fed.sizes.tolist()
        (2, [2, 1])
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        shares: Shares,
        test: tuple[Tensor, Tensor] | None = None,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
        cites: tuple[str, ...] = (),
        images: Images | None = None,
    ) -> None:
        self.name, self.cites, self.images = name, cites, images
        self.transform = None
        self.inputs, self.targets, self.test, self.shares = inputs, targets, test, shares
        for field, tensor in (("inputs", inputs), ("targets", targets), *_named(test)):
            _check_finite(field, tensor)
        if test is not None and test[0].shape[1:] != inputs.shape[1:]:
            raise InputError("test inputs", tuple(test[0].shape), f"samples of shape {tuple(inputs.shape[1:])}")
        self.sizes = shares.sizes
        if not len(self.sizes):
            raise InputError("clients", 0, "at least one client")
        if self.sizes.min() == 0:
            raise InputError(f"client {self.sizes.argmin()}", "no samples", "at least one sample per client")
        self.masses: Sequence[int | Fraction] = self.sizes.tolist()
        self.weights = self.sizes / self.sizes.sum()
        if weights is not None:
            self.masses = _exact_weights(weights, len(self.sizes))
            total = sum(self.masses)
            self.weights = np.array([float(mass / total) for mass in self.masses])

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.sizes)

    @property
    def num_classes(self) -> int | None:
        """The number of classes, or None if targets are not labels."""
        if self.targets.dtype != torch.int64:
            return None
        return 1 + max(int(t.max()) for t in (self.targets, *([self.test[1]] if self.test else [])))

    def samples_of(self, client: int) -> npt.NDArray[np.int64]:
        """Return the client's sample numbers in the pool."""
        return self.shares[client]

    def __repr__(self) -> str:
        return (
            f"Federation({self.name!r}, {self.num_clients} clients, {self.sizes.sum()} samples of shape "
            f"{tuple(self.inputs.shape[1:])}, {self.sizes.min()} to {self.sizes.max()} each)"
        )

    @classmethod
    def from_arrays(
        cls,
        clients: Sequence[tuple[Any, Any]],
        test: tuple[Any, Any] | None = None,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
    ) -> Federation:
        """Make a federation from each client's (inputs, targets), which may be anything that becomes a tensor.

        Integer targets are class labels 0..C-1; floating-point targets are regression targets. Weights must be
        positive and sum to 1; without them a client's weight is its share of the samples.
        """
        if not len(clients):
            raise InputError("clients", [], "at least one (inputs, targets) pair")
        pairs = [_pair(f"client {i}", pair) for i, pair in enumerate(clients)]
        for i, (X, y) in enumerate(pairs):
            for what, tensor, first in (("inputs", X, pairs[0][0]), ("targets", y, pairs[0][1])):
                if tensor.shape[1:] != first.shape[1:]:
                    raise InputError(
                        f"client {i} {what}",
                        f"samples of shape {tuple(tensor.shape[1:])}",
                        f"the shape of client 0, {tuple(first.shape[1:])}",
                    )
        inputs, targets = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
        ends = np.cumsum([len(X) for X, _ in pairs])
        shares = StoredShares([np.arange(end - len(X), end) for end, (X, _) in zip(ends, pairs, strict=True)])
        return cls(inputs, targets, shares, None if test is None else _pair("test", test), weights, name)

    @classmethod
    def from_pool(
        cls,
        inputs: Any,
        targets: Any,
        clients: int,
        partition: Partition,
        test: tuple[Any, Any] | None = None,
        seed: int = 0,
        name: str = "custom",
    ) -> Federation:
        """Split a data set of your own over clients by a partition.

        Examples:
            >>> from fedagrac import Natural
            >>> fed = Federation.from_pool([[0.0], [1.0], [2.0]], [0, 1, 1], 2, Natural(["ann", "bob", "ann"]))
            >>> fed.sizes.tolist()
            [2, 1]
        """
        X, y = _pair("pool", (inputs, targets))
        _check_partition(partition)
        shares = partition.split(_labels(y), clients, count("seed", seed, least=0))
        return cls(X, y, shares, None if test is None else _pair("test", test), None, name)

    @classmethod
    def load(
        cls,
        name: str,
        clients: int = 20,
        partition: Partition | None = None,
        seed: int = 0,
        data_dir: str | Path | None = None,
        **options: Any,
    ) -> Federation:
        """Load a built-in data set and split it over clients.

        Args:
            name: a9a, fashion-mnist, cifar10, digits or synthetic.
            clients: M.
            partition: how to split; IID by default. Synthetic is already split by client and takes none.
            seed: the seed of the partition, and of synthetic's samples.
            data_dir: a folder to search for files before the usual ones.
            options: alpha and beta of synthetic.

        Examples:
            >>> Federation.load("digits", clients=5, seed=0)
            Federation('digits', 5 clients, 1437 samples of shape (64,), 287 to 288 each)
        """
        one_of("name", name, DATASETS)
        count("clients", clients, most=MOST_CLIENTS)
        count("seed", seed, least=0)
        allowed = ["alpha", "beta"] if name == "synthetic" else []
        for key, value in options.items():
            if key not in allowed:
                raise unknown(f"{name}.{key}", value, allowed)
        if partition is not None:
            _check_partition(partition)
        if name == "synthetic":
            samples = synthetic(clients, seed=seed, **options)
        elif name == "digits":
            samples = digits()
        else:
            samples = READERS[name](ready(name, data_dir))
        if samples.natural is not None and partition is not None:
            raise InputError("partition", partition, f"none: {name} is split by nature, client by client")
        shares: Shares
        if samples.natural is not None:
            shares = StoredShares(samples.natural)
        else:
            shares = (partition or IID()).split(samples.train[1], clients, seed)
        inputs, targets = map(torch.from_numpy, samples.train)
        test = (torch.from_numpy(samples.test[0]), torch.from_numpy(samples.test[1]))
        return cls(inputs, targets, shares, test, None, name, (name,), samples.images)

    def plot(self) -> Figure:
        """Draw the labels of every client: one column per client, one row per class, area by sample count."""
        from fedagrac.data.plot import plot_federation

        return plot_federation(self)


def _check_partition(partition: Any) -> None:
    if not isinstance(partition, Partition):
        raise InputError("partition", partition, "a partition such as Dirichlet(0.3), Shards(5) or IID()")


def _labels(targets: Tensor) -> npt.NDArray[np.int64]:
    """Return the labels for a partition; if targets are not class labels, all samples are of one class."""
    return (
        targets.numpy() if targets.dtype == torch.int64 and targets.ndim == 1 else np.zeros(len(targets), np.int64)
    )


def _named(test: tuple[Tensor, Tensor] | None) -> list[tuple[str, Tensor]]:
    return [] if test is None else [("test inputs", test[0]), ("test targets", test[1])]


def _check_finite(field: str, tensor: Tensor) -> None:
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        bad = int((~torch.isfinite(tensor)).reshape(len(tensor), -1).any(1).nonzero()[0, 0])
        raise InputError(field, f"NaN or infinity in sample {bad}", "finite numbers")


def _pair(field: str, pair: Any) -> tuple[Tensor, Tensor]:
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InputError(field, type(pair).__name__, "a pair (inputs, targets)")
    X, y = (_tensor(f"{field} {part}", value) for part, value in zip(("inputs", "targets"), pair, strict=True))
    if X.ndim == 0 or y.ndim == 0 or len(X) != len(y):
        raise InputError(field, f"inputs {tuple(X.shape)}, targets {tuple(y.shape)}", "as many targets as inputs")
    if len(X) == 0:
        raise InputError(field, "no samples", "at least one sample")
    return X, y if y.is_floating_point() else y.long()


def _tensor(field: str, value: Any) -> Tensor:
    try:
        return value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(field, type(value).__name__, f"something that becomes a tensor ({error})") from error


def _exact_weights(weights: Any, clients: int) -> tuple[Fraction, ...]:
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (clients,):
        raise InputError("weights", weights, f"one weight for each of {clients} clients")
    if not np.isfinite(values).all() or (values <= 0).any():
        raise InputError("weights", weights, "weights above 0")
    if abs(values.sum() - 1) > 1e-6:
        raise InputError("weights", f"a sum of {values.sum():.6g}", "a sum of 1 (divide the weights by their sum)")
    return tuple(Fraction(float(v)) for v in values)
