"""Structured logs: events as JSON lines, and what an event is about.

Events are written for people. One that is about a client begins with `client I: `, and its words tell its kind.
"""

from __future__ import annotations

import contextlib
import io
import json
import logging
import re
from collections.abc import Iterator
from logging.handlers import RotatingFileHandler
from pathlib import Path

from fedagrac.files import opener
from fedagrac.parsing import printable, utc

__all__ = ["JsonLines", "client_of", "fault_of", "json_log", "kind_of"]

NAME = "log.jsonl"

LARGEST_LOG, OLD_LOGS = 2**24, 2
"""A log file of this many bytes is replaced by a new one. So many old ones are kept: log.jsonl.1, log.jsonl.2."""

LONGEST_MESSAGE = 2000
"""The longest message, in characters."""

KINDS = {
    "round": r"round \d+: \d+ of \d+ clients",
    "end": r"(finished|stopped|diverged): ",
    "failed": r"failed: ",
    "waiting": r"waiting for ",
    "started": r"started without ",
    "resumed": r"resumed (after|without) ",
    "repeated": r"fewer than min_clients",
    "connected": r"client \d+: (connected|moved to another node)",
    "left": r"client \d+: its node left",
    "no_reply": r"client \d+: no reply",
    "late": r"client \d+: late reply",
    "reconstructed": r"client \d+: missed the second exchange",
    "dropped": r"(client|node) \d+: (\w+ ){0,2}dropped, |client \d+ \(.*\): dropped, ",
    "suspect": r"client \d+: .*; it counts, because there is no guard",
    "excluded": r"client \d+: (no longer )?excluded",
    "claimed": r"node \d+: claims client|client \d+: its node has become ",
    "refused": r"node \d+: refused, ",
    "error": r"(client|node) \d+: ",
}
"""The kinds of events, by how their words begin. The first that fits is the kind."""

NO_FAULT = ("connected", "late", "reconstructed", "suspect", "excluded", "claimed")
"""Events about a client that do not explain why it does not count in this round."""


def kind_of(event: str) -> str:
    """Return the kind of an event; "note" for any other message.

    Examples:
        >>> kind_of("client 3: its node left"), kind_of("client 3: ValueError"), kind_of("engine: serial")
        ('left', 'error', 'note')
        >>> kind_of("node 8234: refused, its samples are 0"), kind_of("client 3: no longer excluded")
        ('refused', 'excluded')
    """
    return next((kind for kind, words in KINDS.items() if re.match(words, event)), "note")


def client_of(event: str) -> int | None:
    """Return the client that an event is about, or None.

    Examples:
        >>> client_of("client 3: its node left"), client_of("node 8234: no")
        (3, None)
    """
    match = re.match(r"client (\d{1,9})\b", event)
    return None if match is None else int(match[1])


def fault_of(event: str) -> tuple[int | None, str]:
    """Return the client whose reply is missing or not used, and why; None for any other event.

    Examples:
        >>> fault_of("client 3: no reply to train.steps within 600 s")
        (3, 'no reply to train.steps within 600 s')
        >>> fault_of("client 3: connected again")
        (None, '')
    """
    client = client_of(event)
    if client is None or kind_of(event) in NO_FAULT:
        return None, ""
    return client, event.partition(": ")[2]


class JsonLines(logging.Formatter):
    """Format log records as JSON, one object a line.

    Attributes:
        round: the round in progress; None before the first.

    Examples:
        >>> record = logging.LogRecord("fedagrac", logging.WARNING, "", 0, "client %d: its node left", (3,), None)
        >>> record.created = 1_700_000_000.0
        >>> JsonLines().format(record)  # doctest: +NORMALIZE_WHITESPACE
        '{"time": "2023-11-14T22:13:20Z", "level": "warning", "event": "left", "round": null, "client": 3,
          "message": "client 3: its node left"}'
    """

    round: int | None = None

    def format(self, record: logging.LogRecord) -> str:
        """Return one line without its end."""
        message = record.getMessage()
        line = {
            "time": utc(record.created),
            "level": record.levelname.lower(),
            "event": kind_of(message),
            "round": self.round,
            "client": client_of(message),
            "message": printable(message)[:LONGEST_MESSAGE],
        }
        return json.dumps(line)


class _LogFile(RotatingFileHandler):
    """A log file of bounded size that is not writable for every user."""

    def _open(self) -> io.TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=opener)


@contextlib.contextmanager
def json_log(folder: Path) -> Iterator[JsonLines]:
    """Write every message that the package logs inside the block to log.jsonl in a folder. Yield the format.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with json_log(folder) as lines:
        ...     lines.round = 7
        ...     logging.getLogger("fedagrac").error("no")
        >>> json.loads((folder / "log.jsonl").read_text())["round"]
        7
    """
    logger, lines = logging.getLogger("fedagrac"), JsonLines()
    file = _LogFile(folder / NAME, maxBytes=LARGEST_LOG, backupCount=OLD_LOGS)
    file.setFormatter(lines)
    logger.addHandler(file)
    try:
        yield lines
    finally:
        logger.removeHandler(file)
        file.close()
