"""Errors, and the checks of user input that raise them.

Every message names the field, the value and what would be accepted. The command line tells bad input (exit code 2)
from a failure (exit code 1) by the type of the error.
"""

from __future__ import annotations

import difflib
import math
import numbers
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

__all__ = ["MOST_CLIENTS", "FedagracError", "InputError"]

MOST_CLIENTS = 10_000_000
"""The largest number of clients. Memory is allocated for the number that a file states, so it has a limit."""


class FedagracError(Exception):
    """The base class of the errors that this package raises."""


class InputError(FedagracError, ValueError):
    """A value that cannot be used.

    Attributes:
        field: the name of the field.
        value: its value.
        accepted: what would be accepted.

    Examples:
        >>> raise InputError("lr", -1.0, "a number above 0")
        Traceback (most recent call last):
        ...
        fedagrac.errors.InputError: lr = -1.0: expected a number above 0
    """

    def __init__(self, field: str, value: Any, accepted: str) -> None:
        self.field, self.value, self.accepted = field, value, accepted
        super().__init__(f"{field} = {shown(value)}: expected {accepted}")


def shown(value: Any) -> str:
    """Return a value as messages show it, cut to 120 characters.

    Examples:
        >>> shown("a"), shown(16**9999)
        ("'a'", 'an int that is too large to show')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"an {type(value).__name__} that is too large to show"
    return text if len(text) <= 120 else text[:117] + "..."


def nearest(name: object, known: Iterable[str]) -> str:
    """Return a hint such as "; did you mean 'fedavg'?", or an empty string."""
    match = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5) if isinstance(name, str) else []
    return f"; did you mean {match[0]!r}?" if match else ""


def unknown(field: str, value: Any, known: Iterable[str]) -> InputError:
    """Return the error for a setting that does not exist, naming those that do."""
    names = list(known)
    last = field.rsplit(".", 1)[-1]
    accepted = f"a known setting ({', '.join(names)})" if names else "no setting: there are none here"
    return InputError(field, value, accepted + nearest(last, names))


def one_of(field: str, value: Any, known: Iterable[str]) -> str:
    """Check that a value is one of the known names. Return it."""
    names = list(known)
    if not isinstance(value, str) or value not in names:
        raise InputError(field, value, f"one of {', '.join(names)}{nearest(value, names)}")
    return value


def _number(field: str, value: Any, accepted: str) -> float:
    """Check for a finite number. Return it."""
    try:
        number = math.nan if isinstance(value, bool) or not isinstance(value, numbers.Real) else float(value)
    except OverflowError:  # the integer is too large for a float
        number = math.inf
    if not math.isfinite(number):
        raise InputError(field, value, accepted)
    return number


def positive(field: str, value: Any, above: float = 0) -> float:
    """Check for a finite number above a bound. Return it."""
    accepted = f"a number above {above:g}"
    number = _number(field, value, accepted)
    if number <= above:
        raise InputError(field, value, accepted)
    return number


def non_negative(field: str, value: Any) -> float:
    """Check for a finite number of at least 0. Return it."""
    accepted = "a number of at least 0"
    number = _number(field, value, accepted)
    if number < 0:
        raise InputError(field, value, accepted)
    return number


def share(field: str, value: Any) -> float:
    """Check for a number in [0, 1), such as a momentum. Return it."""
    accepted = "a number from 0 to below 1"
    number = _number(field, value, accepted)
    if not 0 <= number < 1:
        raise InputError(field, value, accepted)
    return number


def fraction(field: str, value: Any) -> float:
    """Check for a number in (0, 1]. Return it."""
    accepted = "a fraction in (0, 1]: 0.68, not 68"
    number = _number(field, value, accepted)
    if not 0 < number <= 1:
        raise InputError(field, value, accepted)
    return number


def count(field: str, value: Any, least: int = 1, most: int = 2**63 - 1) -> int:
    """Check for an integer from `least` to `most`. Return it."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or value < least:
        raise InputError(field, value, f"an integer of at least {least}")
    number = int(value)
    if number > most:
        raise InputError(field, value, f"an integer of at most {most}")
    return number


def flag(field: str, value: Any) -> bool:
    """Check for a boolean; the string "false" is an error. Return it."""
    if not isinstance(value, bool):
        raise InputError(field, value, "true or false (a boolean, not a string or a number)")
    return value
