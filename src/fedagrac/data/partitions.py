"""Partitions: ways of splitting one data set over M clients.

A partition takes the labels and returns `Shares`: each client's sample numbers. Every client gets at least one
sample; the same seed gives the same split.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.errors import MOST_CLIENTS, InputError, count, flag, positive

if TYPE_CHECKING:
    import numpy.typing as npt

    Labels = npt.NDArray[np.int64]
    Pieces = list[npt.NDArray[np.int64]]

__all__ = [
    "IID",
    "Dirichlet",
    "DrawnShares",
    "Indices",
    "Natural",
    "Partition",
    "Resample",
    "Shards",
    "Shares",
    "StoredShares",
    "held_out",
]


class Shares(Protocol):
    """The shares of a split: the sizes of all clients, and one client's sample numbers at a time."""

    @property
    def sizes(self) -> npt.NDArray[np.int64]:
        """n_i, samples per client, [M]."""

    def __getitem__(self, client: int) -> npt.NDArray[np.int64]:
        """Return the client's sample numbers."""


class StoredShares:
    """Shares stored as one flat array of sample numbers, 4 bytes each where they fit.

    Attributes:
        sizes: n_i, samples per client, [M].
        names: the names of the clients, if the partition knows them.

    Examples:
        >>> shares = StoredShares([np.array([4, 7]), np.array([1])])
        >>> shares.sizes.tolist(), shares[0].tolist()
        ([2, 1], [4, 7])
    """

    def __init__(
        self, pieces: Sequence[npt.NDArray[np.int64]], names: Sequence[object] | npt.NDArray[Any] | None = None
    ) -> None:
        self.names = names
        self.sizes = np.array([len(piece) for piece in pieces], np.int64)
        self._offsets = np.concatenate([[0], np.cumsum(self.sizes)])
        flat = np.concatenate(list(pieces)) if len(pieces) else np.zeros(0, np.int64)
        fits = not len(flat) or flat.max() < 2**31
        self._flat = flat.astype(np.int32 if fits else np.int64)

    def __getitem__(self, client: int) -> npt.NDArray[np.int64]:
        """Return the client's sample numbers."""
        return self._flat[self._offsets[client] : self._offsets[client + 1]].astype(np.int64)


class DrawnShares:
    """Shares that are drawn again from their own stream whenever they are read, so they need no memory."""

    def __init__(self, samples: int, clients: int, size: int, seed: int) -> None:
        self.samples, self.size, self.seed = samples, size, seed
        self.sizes = np.full(clients, size, np.int64)

    def __getitem__(self, client: int) -> npt.NDArray[np.int64]:
        """Return the client's sample numbers."""
        return stream(self.seed, Purpose.PARTITION, client=int(client)).integers(0, self.samples, self.size)


@dataclass(frozen=True)
class Partition(ABC):
    """A way of splitting a data set over clients."""

    @abstractmethod
    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Return the clients' shares."""


def held_out(samples: int, share: float, generator: np.random.Generator) -> npt.NDArray[np.int64]:
    """Draw the positions that are held out, the share's nearest number, and never all. Return them sorted.

    Examples:
        >>> len(held_out(10, 0.25, np.random.default_rng(0))), len(held_out(1, 0.9, np.random.default_rng(0)))
        (3, 0)
    """
    number = min(int(share * samples + 0.5), samples - 1)
    return np.sort(generator.permutation(samples)[:number])


def _check(labels: Labels, clients: int) -> None:
    count("clients", clients)
    if clients > len(labels):
        raise InputError("clients", clients, f"at most one client per sample; there are {len(labels)} samples")


@dataclass(frozen=True)
class IID(Partition):
    """Split at random into equal shares, whose sizes differ by one at most; every sample is used exactly once.

    Examples:
        >>> IID().split(np.zeros(10, np.int64), clients=3, seed=0).sizes.tolist()
        [4, 3, 3]
    """

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Shuffle and cut."""
        _check(labels, clients)
        order = stream(seed, Purpose.PARTITION).permutation(len(labels))
        return StoredShares([np.sort(share) for share in np.array_split(order, clients)])


@dataclass(frozen=True)
class Dirichlet(Partition):
    """Draw the clients' shares of every class from Dirichlet(alpha); every sample is used exactly once.

    A smaller alpha makes labels and sizes more unequal. The whole draw is repeated until every client holds at
    least `least` samples. If 1000 draws fail, clients that are short receive samples from the largest ones, so
    every client holds `least` samples for any alpha. The paper's DP1 is Dirichlet(0.3); its authors draw it with
    balance=True and least = the number of classes.

    Attributes:
        alpha: the concentration of the Dirichlet distribution.
        least: the fewest samples a client may hold.
        balance: whether a client that holds its equal share n / M gets nothing of the classes that follow. A
            client then holds at most n / M samples and one class more.

    Examples:
        >>> shares = Dirichlet(0.3).split(np.repeat(np.arange(10), 100), clients=20, seed=0)
        >>> len(shares.sizes), int(shares.sizes.sum()), bool(shares.sizes.min() > 0)
        (20, 1000, True)
    """

    alpha: float
    least: int = 1
    balance: bool = False

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)
        count("least", self.least)
        flag("balance", self.balance)

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Draw until every client holds at least `least` samples."""
        _check(labels, clients)
        if clients * self.least > len(labels):
            raise InputError("least", self.least, f"at most {len(labels) // clients} for {clients} clients")
        generator = stream(seed, Purpose.PARTITION)
        by_class = [np.flatnonzero(labels == label) for label in np.unique(labels)]
        for _ in range(1000):
            pieces = self._draw(by_class, len(labels), clients, generator)
            if min(map(len, pieces)) >= self.least:
                break
        else:
            pieces = self._fill(pieces)
        return StoredShares([np.sort(piece) for piece in pieces])

    def _draw(self, by_class: Pieces, samples: int, clients: int, generator: np.random.Generator) -> Pieces:
        held = np.zeros(clients, np.int64)
        parts: list[Pieces] = []
        for members in by_class:
            proportions = generator.dirichlet(np.full(clients, self.alpha))
            if self.balance:
                proportions = _among(proportions, held < samples / clients)
            cuts = np.rint(np.cumsum(proportions)[:-1] * len(members)).astype(np.int64)
            parts.append(np.split(generator.permutation(members), cuts))
            held += [len(part) for part in parts[-1]]
        return [np.concatenate([part[i] for part in parts]) for i in range(clients)]

    def _fill(self, pieces: Pieces) -> Pieces:
        for i in range(len(pieces)):
            while len(pieces[i]) < self.least:
                giver = max(range(len(pieces)), key=lambda j: len(pieces[j]))
                pieces[i] = np.append(pieces[i], pieces[giver][-1])
                pieces[giver] = pieces[giver][:-1]
        return pieces


def _among(proportions: npt.NDArray[np.float64], waiting: npt.NDArray[np.bool_]) -> npt.NDArray[np.float64]:
    """Return the proportions of the waiting clients, scaled to a sum of 1; equal ones if the draw gave none."""
    left = proportions * waiting
    if not left.sum() > 0:  # a very small alpha gives everything to one client, which may be full
        left = waiting.astype(np.float64)
    scaled: npt.NDArray[np.float64] = left / left.sum()
    return scaled


@dataclass(frozen=True)
class Shards(Partition):
    """Give every client `classes` different classes and as many samples as every other client.

    The paper's DP2 is Shards(5). The data are cut into M * classes shards of one size and one class each; the
    size is the largest for which enough shards exist, and the samples left over are used by nobody (none are
    left over when class sizes are equal and divide evenly).

    Examples:
        >>> labels = np.repeat(np.arange(10), 100)
        >>> shares = Shards(5).split(labels, clients=20, seed=0)
        >>> {len(shares[i]) for i in range(20)}, {len(set(labels[shares[i]])) for i in range(20)}
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
        dealt: Pieces = []
        for _ in range(clients):
            # take the classes with most shards left, ties at random: no client is left short (Gale-Ryser)
            chosen = np.lexsort((generator.random(len(kinds)), -left))[: self.classes]
            pieces = []
            for c in chosen:
                left[c] -= 1
                pieces.append(members[c][left[c] * size : (left[c] + 1) * size])
            dealt.append(np.sort(np.concatenate(pieces)))
        return StoredShares([dealt[i] for i in generator.permutation(clients)])

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


@dataclass(frozen=True)
class Resample(Partition):
    """Let every client draw its own `size` samples, with replacement, from the whole data set.

    There may be many more clients than samples. The draws are repeated from the seed whenever they are needed, so
    a million clients cost no index memory.

    Examples:
        >>> shares = Resample(3).split(np.zeros(10, np.int64), clients=1_000_000, seed=0)
        >>> len(shares.sizes), len(shares[999_999])
        (1000000, 3)
    """

    size: int

    def __post_init__(self) -> None:
        count("size", self.size, most=MOST_CLIENTS)

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Return shares that are drawn when they are read."""
        count("clients", clients, most=MOST_CLIENTS)
        return DrawnShares(len(labels), clients, self.size, seed)


@dataclass(frozen=True, eq=False)
class Natural(Partition):
    """Take clients from a column of the data: one value per training sample, one client per value.

    Clients are numbered in the sorted order of the values, and the values are their names.

    Examples:
        >>> shares = Natural(["ann", "bob", "ann"]).split(np.zeros(3, np.int64), clients=2, seed=0)
        >>> shares[0].tolist(), shares[1].tolist()
        ([0, 2], [1])
    """

    column: Sequence[object] | npt.NDArray[np.generic]

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Group the samples by their value."""
        values = np.asarray(self.column)
        if values.shape != (len(labels),):
            raise InputError("Natural", f"{values.shape} values", f"one for each of {len(labels)} samples")
        kinds, owner = np.unique(values, return_inverse=True)
        if clients != len(kinds):
            raise InputError("clients", clients, f"the number of different values in the column, {len(kinds)}")
        order = np.argsort(owner, kind="stable")
        return StoredShares(np.split(order, np.cumsum(np.bincount(owner))[:-1]), names=kinds)


@dataclass(frozen=True, eq=False)
class Indices(Partition):
    """Take clients from lists of sample numbers, which may overlap and need not cover the data.

    Examples:
        >>> Indices([[0, 2], [1]]).split(np.zeros(3, np.int64), clients=2, seed=0).sizes.tolist()
        [2, 1]
    """

    lists: Sequence[Sequence[int] | npt.NDArray[np.int64]]

    def split(self, labels: Labels, clients: int, seed: int) -> Shares:
        """Take the lists as they are."""
        if clients != len(self.lists):
            raise InputError("clients", clients, f"the number of index lists, {len(self.lists)}")
        pieces = [np.asarray(numbers, np.int64) for numbers in self.lists]
        for i, piece in enumerate(pieces):
            if len(piece) and not (piece.min() >= 0 and piece.max() < len(labels)):
                accepted = f"sample numbers from 0 to {len(labels) - 1}"
                raise InputError(f"Indices[{i}]", f"{piece.min()} to {piece.max()}", accepted)
        return StoredShares(pieces)
