"""The server's guard: which updates of a round are not let into the model.

It catches clients that broke: data in other units, a step size too large for them, memory gone bad. It is no
defence against clients that mean harm and know of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.errors import positive

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["Guard"]


@dataclass(frozen=True)
class Guard:
    """Drop updates that are not finite, and those that are far longer than the cohort's.

    The length of an update is |x_i - x~| / (eta_i K_i), the client's mean step per unit of step size: fast clients
    may go further, and so may clients whose eta_i is larger. With equal K_i and eta_i the
    rule is that of the norm |x_i - x~|. A dropped client counts as one that did not answer: the weights are those
    of the others, and what the server remembers of it stays.

    Attributes:
        factor: how many times the median of the cohort's finite updates one may be long, above 1.

    Examples:
        >>> Guard(factor=10.0).dropped(np.array([1.0, 3.0, 2.0, 21.0, 19.0, np.nan]))
        {5: 'not finite'}
        >>> Guard(factor=5.0).dropped(np.array([1.0, 3.0, 2.0, 21.0, 4.0]))
        {3: '7 x the median'}
    """

    factor: float = 10.0

    def __post_init__(self) -> None:
        positive("guard.factor", self.factor, above=1)

    def dropped(self, lengths: npt.NDArray[np.float64]) -> dict[int, str]:
        """Return by row which updates are dropped, and what each is; a median of 0 makes no update long.

        Unless none is finite, at least half of the finite ones stay: those up to the median.
        """
        finite = np.isfinite(lengths)
        median = float(np.median(lengths[finite])) if finite.any() else 0.0
        found = {}
        for row, length in enumerate(lengths.tolist()):
            if not finite[row]:
                found[row] = "not finite"
            elif median > 0 and length > self.factor * median:
                found[row] = f"{length / median:.3g} x the median"
        return found
