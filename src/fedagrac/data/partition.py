"""Who holds which samples: ways of splitting one data set over M clients.

A partition takes the labels and returns one array of sample numbers per client. Every client gets at least one
sample; the same seed gives the same split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.errors import InputError, count, positive
from fedagrac.streams import Purpose, stream

if TYPE_CHECKING:
    import numpy.typing as npt

    Labels = npt.NDArray[np.int64]
    Shares = list[npt.NDArray[np.int64]]

__all__ = ["IID", "Dirichlet", "Partition", "Shards"]


@dataclass(frozen=True)
class Partition(ABC):
    """A way of splitting a data set over clients."""

    @abstractmethod
    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Return each client's sample numbers, in increasing order."""


def _check(labels: Labels, clients: int) -> None:
    count("clients", clients)
    if clients > len(labels):
        raise InputError("clients", clients, f"at most one client per sample; there are {len(labels)} samples")


@dataclass(frozen=True)
class IID(Partition):
    """A random split into equal shares (sizes differ by one at most); every sample exactly once.

    Examples:
        >>> [len(share) for share in IID().split(np.zeros(10, np.int64), clients=3, seed=0)]
        [4, 3, 3]
    """

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Shuffle and cut."""
        _check(labels, clients)
        order = stream(seed, Purpose.PARTITION).permutation(len(labels))
        return [np.sort(share) for share in np.array_split(order, clients)]


@dataclass(frozen=True)
class Dirichlet(Partition):
    """For every class, the clients' shares are drawn from Dirichlet(alpha); every sample exactly once.

    The paper's DP1 is Dirichlet(0.3). The smaller alpha, the more unequal the labels and the sizes. A draw
    that leaves a client with fewer than `least` samples is repeated as a whole (the usual repeat-until rule);
    where 1000 draws do not do, the clients that are short receive samples from the largest ones, so that every
    client is non-empty for any alpha.

    Examples:
        >>> shares = Dirichlet(0.3).split(np.repeat(np.arange(10), 100), clients=20, seed=0)
        >>> len(shares), sum(map(len, shares)), min(map(len, shares)) > 0
        (20, 1000, True)
    """

    alpha: float
    least: int = 1

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)
        count("least", self.least)

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Draw until every client holds at least `least` samples."""
        _check(labels, clients)
        if clients * self.least > len(labels):
            raise InputError("least", self.least, f"at most {len(labels) // clients} for {clients} clients")
        generator = stream(seed, Purpose.PARTITION)
        by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        for _ in range(1000):
            shares = self._draw(by_class, clients, generator)
            if min(map(len, shares)) >= self.least:
                return [np.sort(share) for share in shares]
        return [np.sort(share) for share in self._fill(shares)]

    def _draw(self, by_class: Shares, clients: int, generator: np.random.Generator) -> Shares:
        pieces: list[Shares] = []
        for members in by_class:
            proportions = generator.dirichlet(np.full(clients, self.alpha))
            cuts = np.rint(np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
            pieces.append(np.split(generator.permutation(members), cuts))
        return [np.concatenate([piece[i] for piece in pieces]) for i in range(clients)]

    def _fill(self, shares: Shares) -> Shares:
        for i in range(len(shares)):
            while len(shares[i]) < self.least:
                giver = max(range(len(shares)), key=lambda j: len(shares[j]))
                shares[i] = np.append(shares[i], shares[giver][-1])
                shares[giver] = shares[giver][:-1]
        return shares


@dataclass(frozen=True)
class Shards(Partition):
    """Every client holds `classes` different classes and as many samples as every other client.

    The paper's DP2 is Shards(5). The data are cut into M * classes shards of one size and one class each; the
    size is the largest for which enough shards exist, and the samples left over are used by nobody (none are
    left over when class sizes are equal and divide evenly).

    Examples:
        >>> labels = np.repeat(np.arange(10), 100)
        >>> shares = Shards(5).split(labels, clients=20, seed=0)
        >>> {len(share) for share in shares}, {len(set(labels[share])) for share in shares}
        ({50}, {5})
    """

    classes: int

    def __post_init__(self) -> None:
        count("classes", self.classes)

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Cut every class into shards, then deal each client shards of different classes."""
        _check(labels, clients)
        kinds, sizes = np.unique(labels, return_counts=True)
        if self.classes > len(kinds):
            raise InputError(
                "Shards.classes", self.classes, f"at most the number of classes in the data, {len(kinds)}"
            )
        size = self._shard_size(sizes, clients)
        generator = stream(seed, Purpose.PARTITION)
        left = self._shards_per_class(sizes, clients, size)
        members = [generator.permutation(np.flatnonzero(labels == kind)) for kind in kinds]
        shares: Shares = []
        for _ in range(clients):
            # the classes with most shards left, ties at random: never leaves a client short (Gale-Ryser)
            chosen = np.lexsort((generator.random(len(kinds)), -left))[: self.classes]
            pieces = []
            for c in chosen:
                left[c] -= 1
                pieces.append(members[c][left[c] * size : (left[c] + 1) * size])
            shares.append(np.sort(np.concatenate(pieces)))
        return [shares[i] for i in generator.permutation(clients)]

    def _shard_size(self, sizes: Labels, clients: int) -> int:
        needed = clients * self.classes
        low, high = 0, int(sizes.sum()) // needed
        while low < high:  # the largest size for which min(M, n_c // size) summed over classes is enough
            middle = (low + high + 1) // 2
            enough = np.minimum(clients, sizes // middle).sum() >= needed
            low, high = (middle, high) if enough else (low, middle - 1)
        if low == 0:
            raise InputError(
                "Shards.classes",
                self.classes,
                f"fewer: {clients} clients with {self.classes} classes each need {needed} shards, more than "
                f"{sizes.sum()} samples in {len(sizes)} classes can give",
            )
        return low

    def _shards_per_class(self, sizes: Labels, clients: int, size: int) -> Labels:
        shards = np.minimum(clients, sizes // size)
        for _ in range(int(shards.sum()) - clients * self.classes):
            shards[np.argmax(shards)] -= 1
        return shards
