"""What a callback is: the one way in which anything outside watches or ends a run."""

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
    """Called at the start, after every round and at the end of a run; inherit and override what you need.

    Examples:
        >>> class Print(Callback):
        ...     def on_round(self, run, record):
        ...         print(record["round"], record["test_accuracy"])
    """

    def on_start(self, run: Run) -> None:
        """Act before the first round."""
        return  # or the method would count as abstract

    def on_round(self, run: Run, record: RoundRecord) -> None:
        """Act after every round; `run.stop(reason)` ends the run.

        `run.cohort`, `run.plan` and `run.replies` are those of this round.
        """
        return

    def on_interrupt(self, run: Run) -> None:
        """Act when the process is asked to end (Ctrl-C, SIGTERM); the history holds the rounds that stand."""
        return

    def on_end(self, run: Run, result: SimulationResult) -> None:
        """Act after the last round, whatever ended the run."""
        return


REQUIRED = ("on_start", "on_round", "on_end")


class _Observer(Callback):
    """A callback of the user's that does not inherit from `Callback` and has nothing to do on interrupts."""

    def __init__(self, callback: Any) -> None:
        self.on_start = callback.on_start  # type: ignore[method-assign]
        self.on_round = callback.on_round  # type: ignore[method-assign]
        self.on_end = callback.on_end  # type: ignore[method-assign]


def checked_callbacks(callbacks: Sequence[Any]) -> list[Callback]:
    """Return the callbacks; raise InputError for what is none.

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
