"""Ctrl-C and its like: a run that is asked to end does so between two rounds, never inside one.

The command line turns the signals into `Interruption`; whoever uses the library has Python's own
KeyboardInterrupt. Either way the round loop holds signals back while it takes a round in, and tells the callbacks
before it lets them through, so that a checkpoint is written.
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
"""Ctrl-C, the system's request to end, and a terminal that is closed."""


class Interruption(BaseException):
    """The process was asked to end.

    Like KeyboardInterrupt it is no Exception: nothing that goes on after errors may go on after this one.

    Attributes:
        signal: by which signal.

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
"""What a run may be cut off by."""


@contextlib.contextmanager
def listening() -> Iterator[None]:
    """Raise `Interruption` for every signal that would end the process; one that is ignored stays so."""

    def interrupt(signum: int, frame: FrameType | None) -> None:
        raise Interruption(signum)

    before = {}
    if threading.current_thread() is threading.main_thread():
        for one in SIGNALS:
            if signal.getsignal(one) in (signal.SIG_DFL, signal.default_int_handler):
                before[one] = signal.signal(one, interrupt)
    try:
        yield
    finally:
        for one, handler in before.items():
            signal.signal(one, handler)


class Held:
    """Signals that arrive inside the block are handled at its end.

    Attributes:
        pending: the first that arrived, or None. What the block sets here is handled as if it had arrived.

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
        # handlers can be set in the main thread alone, and run there alone
        self._hold = hold and threading.current_thread() is threading.main_thread()
        self._before: dict[int, Callable[[int, FrameType | None], Any]] = {}
        self.pending: int | None = None

    def __enter__(self) -> Held:
        if self._hold:
            for one in SIGNALS:
                handler = signal.getsignal(one)
                if callable(handler):  # what ends or leaves the process alone without Python stays as it is
                    self._before[one] = handler
                    signal.signal(one, self._note)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.pending = self.pending or signum

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for one, handler in self._before.items():
            signal.signal(one, handler)
        if self.pending is None or kind is not None:
            return
        if self.pending not in self._before:
            raise Interruption(self.pending)
        self._before[self.pending](self.pending, None)  # it may belong to a block around this one
