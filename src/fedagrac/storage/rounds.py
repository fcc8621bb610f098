"""The rounds in a history.jsonl: numbers as columns in memory, whole records from the file.

A history may come from anyone and may be large. It is read line by line, and only the numbers that every report
needs are kept, 64 bytes a round.
"""

from __future__ import annotations

import itertools
import operator
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, overload

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from fedagrac.errors import InputError
from fedagrac.files import open_bounded
from fedagrac.parsing import ParseError, parse_json
from fedagrac.storage.run_folder import LARGEST, lines_of

if TYPE_CHECKING:
    import numpy.typing as npt

__all__ = ["MOST_ROUNDS", "StoredRounds"]

MOST_ROUNDS = 5_000_000
"""The most rounds of a history that is read."""

INTEGERS = ("round", "bytes_total")
NUMBERS = ("test_accuracy", "test_loss", "train_loss", "sim_time", "wall_time")
FIELDS = (*INTEGERS, *NUMBERS)
"""The numbers that are kept."""

Seconds = Annotated[FiniteFloat, Field(ge=0)]


class _Record(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)

    round: Annotated[int, Field(ge=1, lt=2**63)]
    test_accuracy: Annotated[float, Field(ge=0, le=1)] | None
    test_loss: FiniteFloat | None
    train_loss: FiniteFloat | None
    bytes_total: Annotated[int, Field(ge=0, lt=2**63)]
    sim_time: Seconds
    wall_time: Seconds


class StoredRounds(Sequence[dict[str, Any]]):
    r"""The rounds of a stored run: a sequence of records that are read from the file when they are asked for.

    Attributes:
        path: the history.jsonl.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> zeros = ", ".join(f'"{name}": 0' for name in FIELDS[1:])
        >>> _ = path.write_text(f'{{"round": 1, "clients": 3, {zeros}}}\n')
        >>> rounds = StoredRounds.read(path)
        >>> len(rounds), rounds[0]["clients"], rounds.column("train_loss").tolist()
        (1, 3, [0.0])
    """

    def __init__(self, path: Path, columns: dict[str, npt.NDArray[Any]], starts: npt.NDArray[np.int64]) -> None:
        self.path, self._columns, self._starts = path, columns, starts

    @classmethod
    def read(cls, path: Path, finished: bool = True) -> StoredRounds:
        """Read and check a history. The last line of an unfinished run is left out if it has no end."""
        columns: dict[str, array[Any]] = {name: array("q" if name in INTEGERS else "d") for name in FIELDS}
        appends = [(columns[name].append, operator.attrgetter(name)) for name in FIELDS]
        starts, position, last = array("q"), 0, 0
        with open_bounded(path, LARGEST["history.jsonl"]) as file:
            for number, line in enumerate(lines_of(file), start=1):
                if not finished and not line.endswith(b"\n"):
                    break
                if number > MOST_ROUNDS:
                    raise InputError(str(path), f"more than {MOST_ROUNDS:,} rounds", f"at most {MOST_ROUNDS:,}")
                record = _checked(path, number, line)
                if record.round <= last:
                    raise InputError(f"{path}: line {number}: round", record.round, f"a number above {last}")
                last = record.round
                for append, value_of in appends:
                    value = value_of(record)
                    append(np.nan if value is None else value)
                starts.append(position)
                position += len(line)
        kept = {name: np.frombuffer(column, column.typecode) for name, column in columns.items()}
        return cls(path, kept, np.frombuffer(starts, np.int64))

    def column(self, field: str) -> npt.NDArray[Any]:
        """Return one of the numbers in `FIELDS` for all rounds; NaN where a round has none."""
        return self._columns[field]

    def __len__(self) -> int:
        return len(self._starts)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        with open_bounded(self.path, LARGEST["history.jsonl"]) as file:
            for line in itertools.islice(lines_of(file), len(self)):
                yield _parsed(self.path, line)

    @overload
    def __getitem__(self, index: int) -> dict[str, Any]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[str, Any]]: ...

    def __getitem__(self, index: int | slice) -> dict[str, Any] | list[dict[str, Any]]:
        with open_bounded(self.path, LARGEST["history.jsonl"]) as file:
            records = []
            for start in np.atleast_1d(self._starts[index]):
                file.seek(int(start))
                records.append(_parsed(self.path, next(lines_of(file), b"")))
        return records if isinstance(index, slice) else records[0]

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and len(self) == len(other) and all(map(operator.eq, self, other))

    __hash__ = None  # type: ignore[assignment]


def _checked(path: Path, number: int, line: bytes) -> _Record:
    """Return the numbers in a line that are kept; raise InputError or ParseError if they are not right."""
    try:
        return _Record.model_validate_json(line)
    except ValidationError as error:
        first = error.errors()[0]
        field = ": ".join([f"{path}: line {number}", *map(str, first["loc"])])
        if first["type"] == "missing":
            raise InputError(field, None, "a value") from None
        if first["type"] == "json_invalid":
            raise ParseError(f"line {number}: {first['msg'].removeprefix('Invalid JSON: ')}") from None
        raise InputError(field, first["input"], first["msg"].removeprefix("Input should be ")) from None


def _parsed(path: Path, line: bytes) -> dict[str, Any]:
    """Return a whole record."""
    try:
        return dict(parse_json(line))
    except (ParseError, TypeError) as error:
        raise InputError(str(path), "another content", f"one JSON object in each line ({error})") from None
