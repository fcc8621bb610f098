"""The server's guard, which drops updates that would damage the model.

It catches broken clients: data in other units, a step size that is too large for them, faulty memory. It is no
defence against malicious clients that know of it.
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

    The length of an update is |x_i - x~| / (eta_i K_i), the client's mean step per unit of step size. Fast clients
    and clients with a larger eta_i may therefore move further. With equal K_i and eta_i the rule compares the
    norms |x_i - x~|. A dropped client counts as one that did not reply: weights are normalised over the others,
    and the rows that the server keeps for it stay the same.

    Attributes:
        factor: the largest accepted length, in multiples of the median over the cohort's finite updates; above 1.

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
        """Return the rows of the dropped updates, each with what is wrong with the update.

        If the median is 0, no update is too long. Finite updates up to the median are never dropped.
        """
        finite = np.isfinite(lengths)
        median = float(np.median(lengths[finite])) if finite.any() else 0.0
        dropped = {}
        for row, length in enumerate(lengths.tolist()):
            if not finite[row]:
                dropped[row] = "not finite"
            elif median > 0 and length > self.factor * median:
                dropped[row] = f"{length / median:.3g} x the median"
        return dropped
