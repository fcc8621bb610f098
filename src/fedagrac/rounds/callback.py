"""The protocol of callbacks. Code outside the round loop watches and ends a run through callbacks only."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from fedagrac.errors import InputError

if TYPE_CHECKING:
    from fedagrac.rounds.loop import Run
    from fedagrac.rounds.record import RoundRecord, SimulationResult

__all__ = ["Callback", "checked_callbacks"]


@runtime_checkable
class Callback(Protocol):
    """An object that a run calls at its start, after every round and at its end.

    Inherit from this class and override the methods you need.

    Examples:
        >>> class Print(Callback):
        ...     def on_round(self, run, record):
        ...         print(record["round"], record["test_accuracy"])
    """

    def on_start(self, run: Run) -> None:
        """Act before the first round."""
        return  # a body of only a docstring would make the method abstract

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Act after every round; `run.stop(reason)` ends the run.

        `run.cohort`, `run.plan` and `run.replies` belong to this round.
        """
        return

    def on_interrupt(self, run: Run) -> None:
        """Act when the process is asked to end (Ctrl-C, SIGTERM); the history holds the complete rounds."""
        return

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Act after the last round, for whatever reason the run ended."""
        return


REQUIRED = ("on_start", "on_round", "on_end")


class _Observer(Callback):
    """Wrap a user's callback that neither inherits from `Callback` nor has `on_interrupt`."""

    def __init__(self, callback: Any) -> None:
        self.on_start = callback.on_start  # type: ignore[method-assign]
        self.on_round = callback.on_round  # type: ignore[method-assign]
        self.on_end = callback.on_end  # type: ignore[method-assign]


def checked_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return the callbacks; raise InputError for an object that is not a callback.

    Examples:
        >>> checked_callbacks([3])
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: callbacks = 3: expected a method on_start; inherit from fedagrac.Callback
    """
    checked: list[Callback] = []
    for callback in callbacks:
        for name in REQUIRED:
            if not callable(getattr(callback, name, None)):
                raise InputError("callbacks", callback, f"a method {name}; inherit from fedagrac.Callback")
        checked.append(callback if isinstance(callback, Callback) else _Observer(callback))
    return checked
