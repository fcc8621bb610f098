"""The server's guard, which drops updates that would damage the model.

It looks at every vector that clients send after their steps. It catches broken clients: data in other units, a
step size that is too large for them, faulty memory. It is no defence against malicious clients that know of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.errors import positive
from fedagrac.rounds.exchange import NOT_SENT

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.rounds.exchange import Lengths

__all__ = ["Guard"]


@dataclass(frozen=True)
class Guard:
    """Drop updates that are not finite, and those that are far longer than the cohort's.

    The length of an update is |x_i - x~| / (eta_i K_i), the client's mean step per unit of step size. Fast clients
    and clients with a larger eta_i may therefore move further. With equal K_i and eta_i the rule compares the
    norms |x_i - x~|. The other vectors of a reply must be finite and not too long, either:

    - A first gradient is compared with what the cohort transmits: the first gradients of some, the mean gradients
      of the others. A sum of gradients is divided by K_i. A gradient at x~ is compared with those of the others.
    - Moving buffers are too long if their norm is, and if they also moved too far in each step. Norms below 1, and
      below that at the start of the round, count as such.
    - The state of a local optimizer must be finite. It may be long, because only the same client receives it.

    A dropped client counts as one that did not reply: weights are normalised over the others, and the rows that
    the server keeps for it stay the same.

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

    def faults(self, lengths: Lengths) -> dict[int, str]:
        """Return the rows of the dropped replies, each with which of its vectors is wrong, and how."""
        sent_first = lengths.first != NOT_SENT
        transmitted = np.where(sent_first, lengths.first, lengths.mean)
        too_fast = self._sent(lengths.moved)
        checks = (
            ("the norm of its buffers", {r: f for r, f in self._sent(lengths.buffers).items() if r in too_fast}),
            ("its gradient", self._sent(lengths.gradient)),
            ("its gradient sum", self._sent(lengths.total)),
            ("its first gradient", {r: f for r, f in self._sent(transmitted).items() if sent_first[r]}),
            ("its update", self.dropped(lengths.update)),
        )
        found = {row: f"{name} is {fault}" for name, faults in checks for row, fault in faults.items()}
        return dict(sorted(found.items()))

    def _sent(self, lengths: npt.NDArray[np.float64]) -> dict[int, str]:
        """Return what `dropped` returns, without the rows of clients that did not send the vector."""
        rows = np.flatnonzero(lengths != NOT_SENT)
        return {int(rows[row]): fault for row, fault in self.dropped(lengths[rows]).items()}

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
