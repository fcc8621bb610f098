"""A federation: one pool of samples, and which client holds which of them.

The samples exist once; clients are lists of sample numbers. Weights are omega_i = n_i / n, or the user's.
"""

from __future__ import annotations

from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from fedagrac.data.partition import IID, Partition
from fedagrac.data.sources import digits, synthetic
from fedagrac.errors import InputError, count, one_of, unknown

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy.typing as npt
    from matplotlib.figure import Figure
    from torch import Tensor

__all__ = ["DATASETS", "Federation"]

DATASETS = ("digits", "synthetic")
"""The names `Federation.load` knows."""


class Federation:
    """M clients and their data.

    Attributes:
        name: what it is called in tables and run folders.
        inputs, targets: the pooled training samples, [n, ...] and [n].
        test: the test inputs and targets, or None.
        sizes: n_i, samples per client, [M].
        weights: omega_i, [M], summing to 1.
        masses: the weights before normalisation, exact: sample counts, or the user's weights as fractions.

    Examples:
        >>> fed = Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
        >>> fed.num_clients, fed.sizes.tolist()
        (2, [2, 1])
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        shares: Sequence[npt.NDArray[np.int64]],
        test: tuple[Tensor, Tensor] | None = None,
        weights: Sequence[float] | npt.NDArray[np.float64] | None = None,
        name: str = "custom",
        cites: tuple[str, ...] = (),
    ) -> None:
        self.name, self.cites = name, cites
        self.inputs, self.targets, self.test = inputs, targets, test
        for field, tensor in (("inputs", inputs), ("targets", targets), *_named(test)):
            _check_finite(field, tensor)
        if test is not None and test[0].shape[1:] != inputs.shape[1:]:
            raise InputError("test inputs", tuple(test[0].shape), f"samples of shape {tuple(inputs.shape[1:])}")
        if not shares:
            raise InputError("clients", 0, "at least one client")
        self.sizes = np.array([len(share) for share in shares], np.int64)
        for i, size in enumerate(self.sizes):
            if size == 0:
                raise InputError(f"client {i}", "no samples", "at least one sample per client")
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        self._flat = np.concatenate(shares).astype(np.int64)
        self.masses: tuple[int | Fraction, ...] = (
            tuple(int(n) for n in self.sizes) if weights is None else _exact_weights(weights, len(self.sizes))
        )
        total = sum(self.masses)
        self.weights = np.array([float(Fraction(n) / total) for n in self.masses])

    @property
    def num_clients(self) -> int:
        """M."""
        return len(self.sizes)

    @property
    def num_classes(self) -> int | None:
        """How many classes the labels name, or None where targets are not labels."""
        if self.targets.dtype != torch.int64:
            return None
        return 1 + max(int(t.max()) for t in (self.targets, *([self.test[1]] if self.test else [])))

    def samples_of(self, client: int) -> npt.NDArray[np.int64]:
        """Return the numbers of the client's samples in the pool."""
        return self._flat[self._offsets[client] : self._offsets[client + 1]]

    def __repr__(self) -> str:
        return (
            f"Federation({self.name!r}, {self.num_clients} clients, {len(self._flat)} samples of shape "
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
        """Make a federation from each client's (inputs, targets): anything that becomes a tensor.

        Integer targets are class labels 0..C-1; floating targets are regression targets. Weights must be
        positive and sum to 1; without them a client weighs what it holds.
        """
        if not len(clients):
            raise InputError("clients", [], "at least one (inputs, targets) pair")
        pairs = [_pair(f"client {i}", pair) for i, pair in enumerate(clients)]
        for i, (X, y) in enumerate(pairs):
            for what, mine, first in (("inputs", X, pairs[0][0]), ("targets", y, pairs[0][1])):
                if mine.shape[1:] != first.shape[1:]:
                    raise InputError(
                        f"client {i} {what}",
                        f"samples of shape {tuple(mine.shape[1:])}",
                        f"the shape of client 0, {tuple(first.shape[1:])}",
                    )
        inputs, targets = (torch.cat([pair[part] for pair in pairs]) for part in (0, 1))
        ends = np.cumsum([len(X) for X, _ in pairs])
        shares = [np.arange(end - len(X), end) for end, (X, _) in zip(ends, pairs, strict=True)]
        return cls(inputs, targets, shares, None if test is None else _pair("test", test), weights, name)

    @classmethod
    def load(
        cls,
        name: str,
        clients: int = 20,
        partition: Partition | None = None,
        seed: int = 0,
        **options: Any,
    ) -> Federation:
        """Load a built-in data set and split it over clients.

        Args:
            name: digits or synthetic.
            clients: M.
            partition: how to split; IID by default. Synthetic comes split by nature and takes none.
            seed: of the partition, and of synthetic's samples.
            options: synthetic takes alpha and beta.

        Examples:
            >>> Federation.load("digits", clients=5, seed=0)
            Federation('digits', 5 clients, 1437 samples of shape (64,), 287 to 288 each)
        """
        one_of("name", name, DATASETS)
        count("clients", clients)
        count("seed", seed, least=0)
        allowed = {"synthetic": ["alpha", "beta"]}.get(name, [])
        for key, value in options.items():
            if key not in allowed:
                raise unknown(f"{name}.{key}", value, allowed)
        if partition is not None and not isinstance(partition, Partition):
            raise InputError("partition", partition, "a partition such as Dirichlet(0.3), Shards(5) or IID()")
        samples = synthetic(clients, seed=seed, **options) if name == "synthetic" else digits()
        if samples.natural is not None and partition is not None:
            raise InputError("partition", partition, f"none: {name} is split by nature, client by client")
        shares = samples.natural or (partition or IID()).split(samples.train[1], clients, seed)
        inputs, targets = map(torch.from_numpy, samples.train)
        test = (torch.from_numpy(samples.test[0]), torch.from_numpy(samples.test[1]))
        return cls(inputs, targets, shares, test, None, name, (name,))

    def plot(self) -> Figure:
        """Draw who holds which labels: one column per client, one row per class, area by sample count."""
        from fedagrac.data.plot import plot_labels

        return plot_labels(self)


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
        tensor = value.detach() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(field, type(value).__name__, f"something that becomes a tensor ({error})") from error
    return tensor


def _exact_weights(weights: Any, clients: int) -> tuple[Fraction, ...]:
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != (clients,):
        raise InputError("weights", weights, f"one weight for each of {clients} clients")
    if not np.isfinite(values).all() or (values <= 0).any():
        raise InputError("weights", weights, "weights above 0")
    if abs(values.sum() - 1) > 1e-6:
        raise InputError("weights", f"a sum of {values.sum():.6g}", "a sum of 1 (divide the weights by their sum)")
    return tuple(Fraction(float(v)) for v in values)
