"""Traces of step counts: the local steps of each client in each round, from a CSV file or a pandas DataFrame.

A trace has one of two forms. The wide one has a column for each client and a row for each round. The long one has
the columns round, client and steps, and a row for each client in each round. Rounds are numbered from 0 or from 1,
clients from 0.
"""

from __future__ import annotations

import csv
import io
import numbers
import sys
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeGuard

from fedagrac.errors import InputError, count
from fedagrac.files import read_bounded

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["frame_rows", "is_frame", "read_trace"]

LARGEST_TRACE = 2**25
"""The largest CSV file in bytes. It has room for the step counts of some million client-rounds."""

LONG = ("round", "client", "steps")
"""The columns of the long form."""

DIGITS = 19
"""The most digits of a number in a CSV file; more do not fit into 64 bits."""

Row = tuple[str, Sequence[Any]]
"""Where a row is, in words, and its values."""


def is_frame(given: object) -> TypeGuard[pd.DataFrame]:
    """Return whether a value is a pandas DataFrame. Pandas is not imported: only its user can have made one.

    Examples:
        >>> is_frame([[1, 2]])
        False
    """
    pandas = sys.modules.get("pandas")
    return pandas is not None and isinstance(given, pandas.DataFrame)


def read_trace(path: str | Path) -> list[list[int]]:
    r"""Return the step counts in a CSV file, a row for each round. Its first line names the columns.

    Examples:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp()) / "k.csv"
        >>> file.write_text("round,0,1\n1,5,9\n2,6,9\n")
        22
        >>> read_trace(file)
        [[5, 9], [6, 9]]
    """
    name = str(path)
    try:
        text = read_bounded(Path(path), LARGEST_TRACE).decode("utf-8-sig")
        lines = csv.reader(io.StringIO(text, newline=""), strict=True)
        table = [(lines.line_num, [cell.strip() for cell in line]) for line in lines if any(map(str.strip, line))]
    except FileNotFoundError:
        raise InputError("steps", name, "a CSV file that exists") from None
    except (OSError, UnicodeDecodeError, ValueError, csv.Error) as error:
        if isinstance(error, InputError):
            raise
        raise InputError("steps", name, f"a CSV file that can be read ({error})") from None
    if not table:
        raise InputError("steps", name, "a CSV file with a first line that names the columns")
    header, rows = table[0][1], table[1:]
    for number, cells in rows:
        if len(cells) != len(header):
            raise InputError(
                f"{name} line {number}", f"{len(cells)} values", f"{len(header)}, as in its first line"
            )
    return _rows(name, header, [(f"{name} line {number}", list(map(_number, cells))) for number, cells in rows])


def _number(text: str) -> int | str:
    """Return the integer that a text writes in digits, or else the text."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= DIGITS else text


def frame_rows(frame: pd.DataFrame) -> list[list[int]]:
    """Return the step counts in a DataFrame, a row for each round. Its index does not count.

    Examples:
        >>> import pandas as pd
        >>> frame_rows(pd.DataFrame({"round": [0, 0, 1, 1], "client": [1, 0, 0, 1], "steps": [9, 5, 6, 9]}))
        [[5, 9], [6, 9]]
    """
    columns = [frame.iloc[:, j].tolist() for j in range(frame.shape[1])]
    rows = zip(*columns, strict=True)
    return _rows("steps", list(frame.columns), [(f"steps row {i}", row) for i, row in enumerate(rows)])


def _rows(source: str, labels: Sequence[Hashable], table: list[Row]) -> list[list[int]]:
    """Return K, a row for each round, of a table in either form."""
    header = [_number(label) if isinstance(label, str) else label for label in labels]
    if len(set(header)) < len(header):
        raise InputError(f"{source} columns", _shown(header), "each name once")
    if not table:
        raise InputError(source, "no rows", "a row for each round, or for each client in each round")
    if set(header) == set(LONG):
        return _long(source, [header.index(name) for name in LONG], table)
    return _wide(source, header, table)


def _wide(source: str, header: list[Hashable], table: list[Row]) -> list[list[int]]:
    """Return the rows of the wide form; clients named by numbers come in the order of these.

    The first column may number the rounds: it is called round, or nothing, as pandas writes its index.
    """
    numbered = len(header) > 1 and header[0] in ("round", "")
    clients = header[1:] if numbered else header
    places = {client: place for place, client in enumerate(clients, start=int(numbered))}
    if any(isinstance(client, numbers.Integral) for client in clients):
        if set(clients) != set(range(len(clients))):
            accepted = f"the names of the clients, or their numbers 0 to {len(clients) - 1}, or {', '.join(LONG)}"
            raise InputError(f"{source} columns", _shown(header), accepted)
        clients = list(range(len(clients)))
    rounds = [_whole(row, 0, "round", 0) for row in table] if numbered else list(range(len(table)))
    in_order = _in_order(source, rounds)
    rows = dict(zip(rounds, table, strict=True))
    return [[_whole(rows[t], places[client], f"client {client}") for client in clients] for t in in_order]


def _long(source: str, places: Sequence[int], table: list[Row]) -> list[list[int]]:
    """Return the rows of the long form; every client has one number of steps in every round."""
    K: dict[tuple[int, int], int] = {}
    for row in table:
        t, client, steps = (
            _whole(row, place, name, least) for place, name, least in zip(places, LONG, (0, 0, 1), strict=True)
        )
        if (t, client) in K:
            raise InputError(row[0], f"client {client} in round {t} again", "each client once in a round")
        K[t, client] = steps
    rounds = _in_order(source, list(dict.fromkeys(t for t, _ in K)))
    clients = max(client for _, client in K) + 1
    if clients * len(rounds) > len(K):
        t, client = next((t, client) for t in rounds for client in range(clients) if (t, client) not in K)
        raise InputError(source, f"no client {client} in round {t}", "every client, from 0, in every round")
    return [[K[t, client] for client in range(clients)] for t in rounds]


def _in_order(source: str, rounds: Sequence[int]) -> list[int]:
    """Return the numbers of rounds in their order; they must be consecutive from 0 or from 1, each once."""
    ordered = sorted(rounds)
    if ordered[0] > 1 or ordered != list(range(ordered[0], ordered[0] + len(ordered))):
        raise InputError(f"{source} rounds", _shown(rounds), "numbers from 0 or 1 on, each once and none left out")
    return ordered


def _whole(row: Row, place: int, name: str, least: int = 1) -> int:
    """Return the integer at a place of a row."""
    where, values = row
    return count(f"{where}, {name}", values[place], least=least)


def _shown(values: Sequence[object]) -> str:
    """Return the first values as text."""
    return ", ".join(map(str, values[:10])) + (", ..." if len(values) > 10 else "")
