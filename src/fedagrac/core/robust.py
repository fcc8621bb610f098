"""Robust aggregation: what stands in for a weighted sum over clients when some of them may be hostile.

A sum over a cohort is a number C times a weighted mean,

    sum_i c_i r_i = C sum_i a_i y_i,   y_i = sign(c_i) r_i / s_i,   a_i = |c_i| s_i / C,   C = sum_i |c_i| s_i,

where s_i brings the rows to a common scale (K_i if r_i is the sum of K_i steps; otherwise 1). A robust rule
replaces the mean of the y_i by a location that a minority of the weight cannot move far. Algorithms are not aware
of it. Rows with a number that is not finite are left out, and the weights of the others are normalised.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedagrac.errors import InputError, non_negative, positive

if TYPE_CHECKING:
    import numpy.typing as npt
    from torch import Tensor

__all__ = ["AGGREGATIONS", "Aggregation", "Median", "NormBounded", "TrimmedMean", "robust_sum"]

BLOCK = 2**18
"""How many numbers of the clients' vectors are sorted at a time. It bounds the memory, not the result."""

TIE = 1e-9
"""Shares of the weight that differ by no more than this count as equal."""

LARGEST_SHARE = 0.49

FEWEST = 3
"""The smallest cohort in which one client can be outvoted."""

Blocks = Callable[[], Iterator["Tensor"]]
"""Yields the vectors of all m members, some coordinates at a time, each block [n, m] in float64."""


@dataclass(frozen=True)
class Aggregation(ABC):
    """A rule that replaces the weighted mean over a cohort's vectors."""

    @abstractmethod
    def location(self, weights: Tensor, blocks: Blocks) -> Tensor:
        """Return the location of the vectors, [d].

        Args:
            weights: a_i, above 0 and summing to 1, [m], in float64.
            blocks: yields the vectors, some coordinates at a time; every call begins again.
        """

    def check_cohort(self, members: int) -> None:
        """Refuse cohorts in which one client cannot be outvoted."""
        if members < FEWEST:
            accepted = f"a cohort of at least {FEWEST} clients: among {members} no client can be outvoted"
            raise InputError("aggregate", self, accepted)


@dataclass(frozen=True)
class Median(Aggregation):
    """The weighted median of each coordinate.

    It is the value with half of the weight at or below it, and half at or above it. If two neighbouring values
    qualify, it is their midpoint. With equal weights this is the usual median: the middle value of an odd number
    of clients, the midpoint of the middle two of an even number. A client with more than half of the weight
    decides alone.

    Examples:
        >>> rows = torch.tensor([[1.0, 9.0], [2.0, 2.0], [1e30, 3.0]])
        >>> robust_sum(Median(), np.full(3, 1 / 3), rows)
        tensor([2., 3.])
    """

    def location(self, weights: Tensor, blocks: Blocks) -> Tensor:
        """Return the median of each coordinate, [d]."""
        return torch.cat([_medians(weights, block) for block in blocks()])


@dataclass(frozen=True)
class TrimmedMean(Aggregation):
    """The weighted mean of each coordinate without its smallest and its largest values.

    `share` of the weight is left out at both ends. The client at the border counts with the rest of its weight, so
    share = 0 is the mean, and shares near 0.5 approach the median. Clients that together have more than `share` of
    the weight are not left out completely.

    Attributes:
        share: the share of the weight left out at each end, from 0 to 0.49.

    Examples:
        >>> rows = torch.tensor([[1.0], [2.0], [4.0], [1e30]])
        >>> robust_sum(TrimmedMean(share=0.25), np.full(4, 0.25), rows)
        tensor([3.])
        >>> TrimmedMean(share=0.5)
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: aggregate.share = 0.5: expected a number from 0 to 0.49 (or the median)
    """

    share: float = 0.1

    def __post_init__(self) -> None:
        if non_negative("aggregate.share", self.share) > LARGEST_SHARE:
            raise InputError("aggregate.share", self.share, f"a number from 0 to {LARGEST_SHARE} (or the median)")

    def location(self, weights: Tensor, blocks: Blocks) -> Tensor:
        """Return the trimmed mean of each coordinate, [d]."""
        return torch.cat([self._means(weights, block) for block in blocks()])

    def _means(self, weights: Tensor, block: Tensor) -> Tensor:
        """Return the trimmed mean of each row of a block, [n]."""
        values, order = _sorted(block)
        own = weights[order]
        above = own.cumsum(dim=1)
        kept = above.clamp(max=1 - self.share) - (above - own).clamp(min=self.share)
        kept = torch.where(kept > TIE, kept, 0.0)  # rounding must not leave a trace of a huge value
        return (kept * values).sum(dim=1) / kept.sum(dim=1)


@dataclass(frozen=True)
class NormBounded(Aggregation):
    """The weighted mean of vectors that are moved towards a centre until they are near it.

    The centre is the weighted median of each coordinate. No vector counts as further from it than `factor` times
    the weighted median of all distances. A large factor gives the mean.

    Attributes:
        factor: the largest distance, in multiples of the median distance.

    Examples:
        >>> rows = torch.tensor([[-1.0], [0.0], [2.0], [-1.0], [1e30]])
        >>> robust_sum(NormBounded(factor=1.0), np.full(5, 0.2), rows)      # -1, 0, 1, -1 and 1
        tensor([0.])
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        positive("aggregate.factor", self.factor)

    def location(self, weights: Tensor, blocks: Blocks) -> Tensor:
        """Return the mean of the bounded vectors, [d]."""
        centre = [_medians(weights, block) for block in blocks()]
        squares = torch.zeros_like(weights)
        for middle, block in zip(centre, blocks(), strict=True):
            squares += (block - middle[:, None]).square().sum(dim=0)
        distances = squares.sqrt()
        bound = self.factor * _medians(weights, distances[None])
        shrunk = weights * torch.where(distances > bound, bound / distances, 1.0)
        means = [
            middle + (block - middle[:, None]) @ shrunk for middle, block in zip(centre, blocks(), strict=True)
        ]
        return torch.cat(means)


AGGREGATIONS: dict[str, type[Aggregation]] = {
    "median": Median,
    "trimmed-mean": TrimmedMean,
    "norm-bounded": NormBounded,
}
"""Every rule by its name in settings."""


def _sorted(block: Tensor) -> tuple[Tensor, Tensor]:
    """Return each row of a block in ascending order, and the places of its values before, [n, m] each."""
    if block.device.type != "cpu":
        values, order = block.sort(dim=1)
        return values, order
    order = torch.from_numpy(np.argsort(block.numpy(), axis=1))  # three times as fast as torch for short rows
    return block.gather(1, order), order


def _medians(weights: Tensor, block: Tensor) -> Tensor:
    """Return the weighted median of each row of a block, [n]."""
    values, order = _sorted(block)
    below = weights[order].cumsum(dim=1)
    lower = (below < 0.5 - TIE).sum(dim=1, keepdim=True)
    upper = (below <= 0.5 + TIE).sum(dim=1, keepdim=True).clamp(max=len(weights) - 1)
    return (values.gather(1, lower) / 2 + values.gather(1, upper) / 2)[:, 0]


def robust_sum(
    rule: Aggregation,
    coefficients: npt.NDArray[np.float64],
    rows: Tensor,
    scale: npt.NDArray[np.int64] | npt.NDArray[np.float64] | None = None,
    places: npt.NDArray[np.int64] | None = None,
    members: int | None = None,
    total: Callable[[Tensor], Tensor] = lambda tensor: tensor,
) -> Tensor:
    """Return C times the location of the y_i instead of sum_i c_i r_i, [d]; NaN if no row is finite.

    Args:
        rule: the location.
        coefficients: c_i of the rows of this process, [n].
        rows: r_i, [n, d].
        scale: s_i, [n]; None for 1.
        places: which of all members the rows belong to, [n]; None if they are those of all.
        members: the number of members over all processes.
        total: adds up a tensor over all processes.

    Examples:
        >>> robust_sum(Median(), np.array([0.5, 0.25, 0.25]), torch.tensor([[1.0], [8.0], [9.0]]))
        tensor([4.5000])
    """
    device, m = rows.device, len(rows) if members is None else members
    here = torch.arange(len(rows), device=device) if places is None else torch.from_numpy(places).to(device)
    size = np.abs(coefficients) if scale is None else np.abs(coefficients) * scale
    finite = _finite(rows, m)
    masses = torch.zeros((2, m), dtype=torch.float64, device=device)
    masses[0, here] = torch.from_numpy(size).to(device)
    masses[1, here] = torch.where(finite, masses[0, here], 0.0)
    whole, counted = total(masses)
    present = counted > 0
    if not bool(present.any()):
        return rows.new_full((rows.shape[1],), 0.0 if float(whole.sum()) == 0 else torch.nan)
    sign = np.sign(coefficients) if scale is None else np.sign(coefficients) / scale
    factors = torch.from_numpy(sign).to(device)[:, None]

    def blocks() -> Iterator[Tensor]:
        for some in _columns(rows, m):
            block = torch.zeros((m, some.shape[1]), dtype=torch.float64, device=device)
            block[here] = torch.where(finite[:, None], some.double() * factors, 0.0)
            yield total(block)[present].T.contiguous()

    location = rule.location(counted[present] / counted.sum(), blocks)
    summed: Tensor = (whole.sum() * location).to(rows.dtype)
    return summed


def _columns(rows: Tensor, members: int) -> Iterator[Tensor]:
    """Yield the columns of rows, so many at a time that those of all members are a block."""
    width = max(1, BLOCK // max(1, members))
    for start in range(0, rows.shape[1], width):
        yield rows[:, start : start + width]


def _finite(rows: Tensor, members: int) -> Tensor:
    """Return which rows hold neither NaN nor infinity, [m]."""
    finite = torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    for some in _columns(rows, members):
        finite &= torch.isfinite(some).all(dim=1)
    return finite
