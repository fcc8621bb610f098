"""Ctrl-C and other signals: an interrupted run ends between two rounds, never inside one.

The command line turns signals into `Interruption`; users of the library get Python's KeyboardInterrupt. In both
cases the round loop delays signals while it takes in a round. It then calls the callbacks, which write a
checkpoint, before the exception leaves the loop.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from types import FrameType, TracebackType
from typing import Any

__all__ = ["INTERRUPTIONS", "Held", "Interruption", "listening"]

SIGNALS = tuple(getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name))
"""The signals of Ctrl-C, of a system that asks a process to end, and of a terminal that is closed."""


class Interruption(BaseException):
    """The process was asked to end.

    Like KeyboardInterrupt, it is not an Exception, so code that continues after errors does not catch it.

    Attributes:
        signal: the signal that asked.

    Examples:
        >>> Interruption(signal.SIGTERM).code
        143
    """

    def __init__(self, signum: int) -> None:
        self.signal = signal.Signals(signum)
        super().__init__(f"interrupted by {self.signal.name}")

    @property
    def code(self) -> int:
        """The exit code: 130 after Ctrl-C, 143 after SIGTERM."""
        return 128 + self.signal


INTERRUPTIONS = (KeyboardInterrupt, Interruption)
"""The exceptions that interrupt a run."""


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Run a block in which signals that would end the process raise `Interruption`. Ignored ones stay ignored."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interruption(signum)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for signum in SIGNALS:
            if signal.getsignal(signum) in (signal.SIG_DFL, signal.default_int_handler):
                before[signum] = signal.signal(signum, interrupt)
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


class Held:
    """Run a block, and handle signals that arrive inside it at its end.

    Attributes:
        pending: the first signal that arrived, or None. A signal that the block sets here is handled in the same
            way.

    Examples:
        >>> _ = signal.signal(signal.SIGINT, signal.default_int_handler)
        >>> done = []
        >>> try:
        ...     with Held():
        ...         signal.raise_signal(signal.SIGINT)
        ...         done.append("this is still done")
        ... except KeyboardInterrupt:
        ...     done.append("interrupted")
        >>> done
        ['this is still done', 'interrupted']
    """

    def __init__(self, hold: bool = True) -> None:
        # Python sets and runs signal handlers in the main thread only
        self._hold = hold and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.pending: int | None = None

    def __enter__(self) -> Held:
        if self._hold:
            for signum in SIGNALS:
                handler = signal.getsignal(signum)
                if callable(handler):  # default and ignored signals, which Python does not handle, stay so
                    self._before[signum] = handler
                    signal.signal(signum, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Keep the first signal that arrives."""
        self.pending = self.pending or signum

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        if self.pending is None or kind is not None:
            return
        if self.pending not in self._before:
            raise Interruption(self.pending)
        self._before[self.pending](self.pending, None)  # the handler may be that of a block around this one
