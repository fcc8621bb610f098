"""The authors' own splits and step counts, rebuilt from the facts of their public code.

Their repository, github.com/HarliWu/FedaGrac, draws both from NumPy's old generator with fixed seeds, and NumPy
keeps the numbers of that generator as they are. The splits are in `data/utils.py` (seed 1234). Step counts are in
`get_num_steps` of `federated_learning/*/learner.py`, with seeds made from the client's number, which begins at 1.
Those that change every round are drawn from the same generators one after another if every client is a process of
its own, which a run with all clients needs. First models cannot be rebuilt, because torch is not seeded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.data import Partition
from fedagrac.data.partitions import Shares, StoredShares
from fedagrac.errors import InputError, count, positive

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["PARTITIONS", "SEED", "AuthorsClasses", "AuthorsDirichlet", "gaussian_steps", "uniform_steps"]

SEED = 1234
"""The seed of every split in the authors' code."""

ATTEMPTS = 1000
"""How often a split is drawn before it is given up."""


@dataclass(frozen=True)
class AuthorsDirichlet(Partition):
    """The authors' Dirichlet split: class by class, without clients that hold their equal share already.

    It is drawn again until every client holds as many samples as there are classes. The shares are in the authors'
    order, which is shuffled once.

    Examples:
        >>> labels = np.repeat(np.arange(10), 100)
        >>> AuthorsDirichlet(0.3).split(labels, clients=5, seed=1234).sizes.tolist()
        [100, 190, 230, 277, 203]
    """

    alpha: float

    def __post_init__(self) -> None:
        positive("alpha", self.alpha)

    def split(self, labels: npt.NDArray[np.int64], clients: int, seed: int) -> Shares:
        """Draw until every client holds enough."""
        generator, kinds = np.random.RandomState(seed), np.unique(labels)
        for _ in range(ATTEMPTS):
            pieces = self._draw(generator, labels, kinds, clients)
            if min(map(len, pieces)) >= len(kinds):
                for piece in pieces:
                    generator.shuffle(piece)
                return StoredShares(pieces)
        accepted = f"a larger one: {ATTEMPTS} draws left a client with fewer than {len(kinds)} samples"
        raise InputError("alpha", self.alpha, accepted)

    def _draw(
        self,
        generator: np.random.RandomState,
        labels: npt.NDArray[np.int64],
        kinds: npt.NDArray[np.int64],
        clients: int,
    ) -> list[npt.NDArray[np.int64]]:
        held, parts = np.zeros(clients, np.int64), []
        for kind in kinds:
            members = np.flatnonzero(labels == kind)
            generator.shuffle(members)
            chances = generator.dirichlet(np.full(clients, self.alpha)) * (held < len(labels) / clients)
            ends = (np.cumsum(chances / chances.sum()) * len(members)).astype(np.int64)
            parts.append(np.split(members, ends[:-1]))
            held += [len(part) for part in parts[-1]]
        return [np.concatenate(part) for part in zip(*parts, strict=True)]


@dataclass(frozen=True)
class AuthorsClasses(Partition):
    """The authors' split with so many classes per client, which their code calls pathological.

    Every class is dealt once, the other places are filled at random, and a client with a class twice draws all its
    classes again. The clients of a class get equal parts of it.

    Examples:
        >>> labels = np.repeat(np.arange(10), 100)
        >>> shares = AuthorsClasses(2).split(labels, clients=5, seed=1234)
        >>> shares.sizes.tolist(), np.unique(labels[shares[0]]).tolist()
        ([200, 200, 200, 200, 200], [2, 7])
    """

    classes: int

    def __post_init__(self) -> None:
        count("classes", self.classes)

    def split(self, labels: npt.NDArray[np.int64], clients: int, seed: int) -> Shares:
        """Deal classes to clients, then cut every class into the parts of its clients."""
        kinds = np.unique(labels)
        if not self.classes <= len(kinds) <= clients * self.classes:
            accepted = f"at most {len(kinds)}, and enough for every class to have one of {clients} clients"
            raise InputError("classes", self.classes, accepted)
        generator = np.random.RandomState(seed)
        dealt = self._deal(generator, len(kinds), clients)
        members = [np.flatnonzero(labels == kind) for kind in kinds]
        for one in members:
            generator.shuffle(one)
        parts = [len(one) // max(1, int((dealt == k).sum())) for k, one in enumerate(members)]
        taken, pieces = [0] * len(kinds), []
        for classes in dealt:
            own = []
            for k in classes:
                own.append(members[k][taken[k] : taken[k] + parts[k]])
                taken[k] += parts[k]
            piece = np.concatenate(own)
            generator.shuffle(piece)
            pieces.append(piece)
        return StoredShares(pieces)

    def _deal(self, generator: np.random.RandomState, kinds: int, clients: int) -> npt.NDArray[np.int64]:
        """Return the classes of each client, [clients, classes]."""
        each_once = generator.choice(kinds, kinds, replace=False)
        others = generator.choice(kinds, clients * self.classes - kinds, replace=True)
        dealt = np.concatenate([each_once, others]).reshape(clients, self.classes)
        for i in range(clients):
            while len(set(dealt[i].tolist())) < self.classes:
                dealt[i] = generator.choice(kinds, self.classes, replace=False)
        return dealt


PARTITIONS: dict[str, type[Partition]] = {
    "authors-dirichlet": AuthorsDirichlet,
    "authors-classes": AuthorsClasses,
}
"""The kinds of partitions that recipes can name besides those of experiment files."""


def _generators(clients: int) -> list[np.random.RandomState]:
    """Return the generator of each client, whose seed is drawn from another one."""
    first = [np.random.RandomState(42 * number).randint(12345) for number in range(1, clients + 1)]
    return [np.random.RandomState(seed) for seed in first]


def gaussian_steps(mean: float, variance: float, clients: int, rounds: int = 1) -> dict[str, Any]:
    """Return the authors' K_i ~ Normal(mean, variance), cut off to integers, as a step schedule.

    One row holds for all rounds; several are those of K_i that change every round.

    Examples:
        >>> gaussian_steps(500, 10_000, clients=4)
        {'kind': 'explicit', 'table': [[529, 408, 629, 348]]}
    """
    drawn = np.array([generator.normal(mean, variance**0.5, rounds) for generator in _generators(clients)])
    return {"kind": "explicit", "table": np.abs(drawn).astype(np.int64).T.tolist()}


def uniform_steps(lo: int, hi: int, clients: int, rounds: int = 1) -> dict[str, Any]:
    """Return the authors' K_i, uniform from lo to hi - 1, as a step schedule, in as many rows as `gaussian_steps`.

    Examples:
        >>> uniform_steps(100, 400, clients=4)
        {'kind': 'explicit', 'table': [[243, 337, 125, 160]]}
    """
    drawn = np.array([generator.randint(lo, hi, rounds) for generator in _generators(clients)])
    return {"kind": "explicit", "table": drawn.T.tolist()}
