"""A description of a federation, small enough for every experiment folder; reports draw their pictures from it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.errors import InputError

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.data.federation import Federation

__all__ = ["Description", "describe", "label_counts"]

MOST_SHOWN = 100
"""The most clients that a description shows."""


@dataclass(frozen=True)
class Description:
    """The samples, labels and steps of the clients.

    Attributes:
        name: the data set.
        clients: M.
        samples: the samples of all clients together.
        sizes_range: the fewest and the most samples of a client.
        steps_range: the fewest and the most steps of a client in round 1.
        steps_mean: Kbar of round 1 over all clients, weighted by omega.
        shown: the clients that the next fields describe: all of them, or `MOST_SHOWN` evenly spaced ones.
        sizes: the samples of each shown client.
        steps: K_i of each shown client in round 1.
        labels: the samples of each shown client in each class; None if targets are not class labels.
        names: the names of the shown clients; None if they have none of their own.
    """

    name: str
    clients: int
    samples: int
    sizes_range: list[int]
    steps_range: list[int]
    steps_mean: float
    shown: list[int]
    sizes: list[int]
    steps: list[int]
    labels: list[list[int]] | None
    names: list[str] | None = None

    def __post_init__(self) -> None:
        optional = (self.shown if rows is None else rows for rows in (self.labels, self.names))
        lengths = {len(self.sizes), len(self.steps), *map(len, optional)}
        if lengths != {len(self.shown)}:
            raise InputError("federation", self.name, "as many sizes, steps, labels and names as clients shown")
        if self.labels and len({len(row) for row in self.labels}) != 1:
            raise InputError("federation.labels", self.name, "as many classes for each client")


def label_counts(federation: Federation, clients: npt.NDArray[np.int64]) -> npt.NDArray[np.int64] | None:
    """Return how many samples of each class each of the clients holds, [clients, classes]; None without labels.

    Negative labels are padding and belong to no class.
    """
    classes = federation.num_classes
    if classes is None or federation.targets.ndim != 1:
        return None
    labels = federation.targets.cpu().numpy()
    own = (labels[federation.samples_of(int(i))] for i in clients)
    return np.stack([np.bincount(found[found >= 0], minlength=classes) for found in own])


def describe(federation: Federation, steps: npt.NDArray[np.int64]) -> Description:
    """Describe a federation whose clients run `steps` steps.

    Examples:
        >>> from fedagrac import Federation
        >>> fed = Federation.from_arrays([([[0.0], [1.0]], [0, 1]), ([[2.0]], [1])])
        >>> found = describe(fed, np.array([3, 9]))
        >>> found.labels, found.steps_mean
        ([[1, 1], [0, 1]], 5.0)
    """
    M, sizes = federation.num_clients, federation.sizes
    shown = np.linspace(0, M - 1, min(M, MOST_SHOWN)).round().astype(np.int64)
    counts = label_counts(federation, shown)
    return Description(
        name=federation.name,
        clients=M,
        samples=int(sizes.sum()),
        sizes_range=[int(sizes.min()), int(sizes.max())],
        steps_range=[int(steps.min()), int(steps.max())],
        steps_mean=float(federation.weights @ steps),
        shown=shown.tolist(),
        sizes=sizes[shown].tolist(),
        steps=steps[shown].tolist(),
        labels=None if counts is None else counts.tolist(),
        names=[federation.name_of(int(i)) for i in shown] if federation.has_names else None,
    )
