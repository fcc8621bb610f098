"""Parsing of TOML and JSON from untrusted sources, and text of theirs that may be shown.

Experiment files, run folders, histories and checkpoints are parsed here. A text that is nested too deeply or holds
an integer of more than 64 bits raises a ParseError. Otherwise it would raise a RecursionError or an OverflowError
where its content is used.
"""

from __future__ import annotations

import datetime
import json
import re
import tomllib
from typing import Any

from fedagrac.errors import FedagracError

__all__ = ["ParseError", "parse_json", "parse_toml", "printable", "utc"]

DEEPEST = 32
"""How many levels deep tables and lists may be nested; real files have four levels."""

_LONG_KEY = re.compile(
    rf"""(?<![\w-]) (?: (?> "(?:[^"\\\n]|\\.)*+" | '[^'\n]*+' | [\w-]++ ) [ \t]*+ \. [ \t]*+ ){{{DEEPEST}}}""",
    re.VERBOSE,
)
"""Matches a dotted key of too many parts, for which the standard library needs quadratic time and memory."""


_UNPRINTABLE = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\ud800-\udfff\U000e0000-\U000e007f]"
)
"""Matches a character that a terminal or browser obeys instead of showing it, or that nobody sees."""


class ParseError(FedagracError, ValueError):
    """A text that cannot be parsed, or whose values are not accepted."""


def parse_toml(text: str) -> dict[str, Any]:
    """Return the table that a TOML text describes.

    Examples:
        >>> parse_toml("rounds = 5")
        {'rounds': 5}
        >>> parse_toml("seed = 0x1_0000_0000_0000_0000")
        Traceback (most recent call last):
        ...
        fedagrac.parsing.ParseError: it holds an integer of more than 64 bits
    """
    if _LONG_KEY.search(text):
        raise ParseError(f"it is nested more than {DEEPEST} levels deep")
    try:
        return dict(_checked(tomllib.loads(text)))
    except RecursionError:
        raise ParseError("it is nested too deeply") from None
    except ValueError as error:  # also raised for a number of thousands of digits
        raise ParseError(str(error)) from None


def parse_json(text: str | bytes) -> Any:
    """Return the value that a JSON text describes.

    Examples:
        >>> parse_json('{"round": 1}')
        {'round': 1}
    """
    try:
        return _checked(json.loads(text))
    except RecursionError:
        raise ParseError("it is nested too deeply") from None
    except ValueError as error:
        raise ParseError(str(error)) from None


def printable(text: str, lines: bool = False) -> str:
    r"""Return a text whose control characters, bidirectional overrides and the like are written as escapes.

    A terminal obeys escape sequences wherever they come from: a label may rename its window or hide a line. If
    `lines` is true, ends of lines and tabs are kept.

    Examples:
        >>> print(printable("fedavg\x1b]0;mine\x07"), printable("two\nlines"))
        fedavg\x1b]0;mine\x07 two\nlines
        >>> print(printable("two\nlines", lines=True))
        two
        lines
    """

    def escaped(match: re.Match[str]) -> str:
        character = match[0]
        if lines and character in "\n\t":
            return character
        return character.encode("unicode_escape", "backslashreplace").decode("ascii")

    return _UNPRINTABLE.sub(escaped, text)


def utc(seconds: float) -> str:
    """Return a time, given in seconds since 1970, in ISO 8601 and UTC.

    Examples:
        >>> utc(1_700_000_000.9)
        '2023-11-14T22:13:20Z'
    """
    return datetime.datetime.fromtimestamp(int(seconds), datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _checked(whole: Any) -> Any:
    """Check the depth of a value and the integers in it. Return the value.

    The walk uses a list rather than recursion, so depth cannot exhaust the stack.
    """
    pending = [(whole, 0)]
    while pending:
        value, depth = pending.pop()
        if depth > DEEPEST:
            raise ParseError(f"it is nested more than {DEEPEST} levels deep")
        if isinstance(value, dict):
            pending += [(inner, depth + 1) for inner in value.values()]
        elif isinstance(value, list):
            pending += [(inner, depth + 1) for inner in value]
        elif isinstance(value, int) and not -(2**63) <= value < 2**63:
            raise ParseError("it holds an integer of more than 64 bits")
        elif isinstance(value, datetime.date | datetime.time):
            raise ParseError(f"it holds the date or time {value}, but no setting is one: write it in quotes")
    return whole
