"""The simulated clock of a synchronous round: the slowest client decides."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedagrac.errors import positive

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

__all__ = ["Clock"]


@dataclass(frozen=True)
class Clock:
    """Simulated seconds: every client computes one step in `step_time` seconds; the wire takes no time.

    A round lasts until its slowest member is done, so by default the client with the most steps decides.

    Examples:
        >>> import numpy as np
        >>> Clock(step_time=0.5).round_time(np.array([2, 7, 4]))
        3.5
    """

    step_time: float = 0.001

    def __post_init__(self) -> None:
        positive("step_time", self.step_time)

    def round_time(self, steps: npt.NDArray[np.int64]) -> float:
        """Return how long a round lasts in which the members compute `steps` steps each."""
        return float(steps.max() * self.step_time)
