"""Which client's reply is unlike those of the others, for events and for the diagnosis of a diverged run."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.rounds.divergence import Divergence
from fedagrac.rounds.exchange import NOT_SENT, Lengths

if TYPE_CHECKING:
    import numpy.typing as npt

    from fedagrac.rounds.exchange import Replies

__all__ = ["FAR", "LiveDivergence", "far_longer", "longest_update", "times_the_others"]

FAR = 1000.0
"""A vector that is longer than this many times the median of the others is an event, also without a guard."""


@dataclass(frozen=True)
class LiveDivergence(Divergence):
    """Where a live run diverged. Replies that are not finite are dropped, so it is the server that is not finite.

    Attributes:
        longest: the client with the longest update.
        factor: how long that update is, in multiples of the median of the others; None if that is not known.

    Examples:
        >>> print(LiveDivergence(round=3, lr=0.1, longest=4, factor=2e9))
        round 3: all replies are finite, but the model, its squared norm or its loss is not; the longest update \
is that of client 4, 2e+09 x the median of the others; the round is not saved: repeat `flwr run` with a guard or \
without the client, undo earlier rounds with `fedagrac flower rollback`, or start again with a smaller lr than 0.1
    """

    longest: int | None = None
    factor: float | None = None

    def __str__(self) -> str:
        what = "all replies are finite, but the model, its squared norm or its loss is not"
        if self.longest is not None:
            what += f"; the longest update is that of client {self.longest}"
            what += "" if self.factor is None else f", {self.factor:.3g} x the median of the others"
        advice = "the round is not saved: repeat `flwr run` with a guard or without the client, undo earlier "
        advice += f"rounds with `fedagrac flower rollback`, or start again with a smaller lr than {self.lr:g}"
        return f"round {self.round}: {what}; {advice}"


def times_the_others(lengths: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return every length as a multiple of the median of the others, [m]; NaN if there are none, or it is 0.

    The median is that without the longest, which is exact for all lengths in the upper half.

    Examples:
        >>> times_the_others(np.array([1.0, 3000.0])).tolist()
        [1.0, 3000.0]
        >>> times_the_others(np.array([1.0, 2.0, 3.0, 5000.0])).tolist()
        [0.5, 1.0, 1.5, 2500.0]
        >>> times_the_others(np.array([7.0])).tolist()
        [nan]
    """
    others = np.sort(lengths)[:-1]
    median = float(np.median(others)) if len(others) else 0.0
    with np.errstate(over="ignore"):
        return lengths / median if median > 0 else np.full(len(lengths), np.nan)


def far_longer(replies: Replies) -> dict[int, str]:
    """Return the clients that sent a vector far longer than those of the others, and how long it is."""
    lengths = Lengths.of(replies.order.plan, replies.order.x, replies.result)
    sent_first = lengths.first != NOT_SENT
    transmitted = times_the_others(np.where(sent_first, lengths.first, lengths.mean))
    sent = lengths.gradient[lengths.gradient != NOT_SENT]  # of all members, or of none
    found = {}
    for name, times in (
        ("gradient", times_the_others(sent)),
        ("first gradient", np.where(sent_first, transmitted, np.nan)),
        ("update", times_the_others(lengths.update)),
    ):
        for row in np.flatnonzero(times > FAR):
            client = int(replies.order.cohort.clients[row])
            found[client] = f"its {name} is {times[row]:.3g} x the median of the others"
    return found


def longest_update(replies: Replies) -> tuple[int, float | None]:
    """Return the client with the longest update, and how long it is in multiples of the median of the others."""
    lengths = Lengths.of(replies.order.plan, replies.order.x, replies.result).update
    row = int(np.argmax(lengths))
    times = float(times_the_others(lengths)[row])
    return int(replies.order.cohort.clients[row]), times if np.isfinite(times) else None
