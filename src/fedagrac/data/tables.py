"""Federations from data frames: one row per sample, one column with the client's name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.core.streams import Purpose, stream
from fedagrac.data.partitions import held_out
from fedagrac.errors import InputError, nearest

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    Pair = tuple[npt.NDArray[Any], npt.NDArray[Any]]

__all__ = ["Table", "split_clients"]


@dataclass(frozen=True)
class Table:
    """How the columns of a data frame become clients, inputs and targets.

    Attributes:
        client: the column of the client.
        target: the column of the target, or columns.
        features: the columns of the inputs, in order.
        classes: the names of the classes, numbered 0, 1, ...; None if the target is numeric.
    """

    client: str
    target: str | list[str]
    features: list[str]
    classes: tuple[Any, ...] | None

    @classmethod
    def of(
        cls, frame: pd.DataFrame, client: str, target: str | Sequence[str], features: Sequence[str] | None
    ) -> Table:
        """Check the columns and return how they are used."""
        if not len(frame):
            raise InputError("data frame", "no rows", "at least one row")
        names = target if isinstance(target, str) else list(target)
        listed = [names] if isinstance(names, str) else names
        if features is None:
            features = [column for column in frame.columns if column not in (client, *listed)]
        if not features:
            raise InputError("features", [], "at least one column")
        for column in (client, *listed, *features):
            _column(frame, column)
        classes = None
        if isinstance(names, str) and not _is_numeric(frame[names]):
            classes = tuple(frame[names].astype("category").cat.categories)
        return cls(client, names, list(features), classes)

    def clients(self, frame: pd.DataFrame) -> dict[str, Pair]:
        """Return inputs and targets of every client by name, in the order in which clients first appear."""
        import pandas as pd

        column = _column(frame, self.client)
        if column.isna().any():
            row = int(np.flatnonzero(column.isna())[0])
            raise InputError(f"column {self.client!r}", f"a missing value in row {row}", "a client for every row")
        owner, values = pd.factorize(column, sort=False)
        names = [str(value) for value in values]
        inputs, targets = self.pair(frame)
        order = np.argsort(owner, kind="stable")
        pieces = np.split(order, np.cumsum(np.bincount(owner))[:-1])
        if len(set(names)) != len(names):
            raise InputError(f"column {self.client!r}", "different values with the same text", "unique names")
        return {name: (inputs[piece], targets[piece]) for name, piece in zip(names, pieces, strict=True)}

    def pair(self, frame: pd.DataFrame) -> Pair:
        """Return the inputs of all rows, [n, features] in float32, and their targets."""
        inputs = np.stack([_numbers(frame, column).astype(np.float32) for column in self.features], axis=1)
        _check_finite(inputs, self.features)
        if not isinstance(self.target, str):
            targets = np.stack([_numbers(frame, column) for column in self.target], axis=1)
            _check_finite(targets, self.target)
            return inputs, targets.astype(np.float32)
        if self.classes is not None:
            return inputs, self._labels(frame, self.target)
        targets = _numbers(frame, self.target)
        _check_finite(targets[:, None], [self.target])
        if targets.dtype.kind == "f":
            targets = targets.astype(np.float32)
        return inputs, targets

    def _labels(self, frame: pd.DataFrame, target: str) -> npt.NDArray[np.int64]:
        import pandas as pd

        labels = pd.Index(list(self.classes or ())).get_indexer(pd.Index(_column(frame, target)))
        if (labels < 0).any():
            row = int(np.flatnonzero(labels < 0)[0])
            value = frame[target].iloc[row]
            raise InputError(
                f"column {target!r} row {row}", value, f"one of {', '.join(map(str, self.classes or ()))}"
            )
        return np.asarray(labels, np.int64)


def split_clients(
    clients: dict[str, Pair], share: float, seed: int
) -> tuple[dict[str, Pair], dict[str, Pair | None]]:
    """Return the training part and the test part of every client; a client of one sample has no test part."""
    train: dict[str, Pair] = {}
    test: dict[str, Pair | None] = {}
    for i, (name, (inputs, targets)) in enumerate(clients.items()):
        chosen = np.zeros(len(inputs), bool)
        chosen[held_out(len(inputs), share, stream(seed, Purpose.PARTITION, client=i))] = True
        train[name] = (inputs[~chosen], targets[~chosen])
        test[name] = (inputs[chosen], targets[chosen]) if chosen.any() else None
    return train, test


def _column(frame: pd.DataFrame, name: Any) -> pd.Series[Any]:
    matches = int((frame.columns == name).sum())
    if matches != 1:
        known = [str(column) for column in frame.columns]
        accepted = f"one of {', '.join(known)}{nearest(name, known)}" if not matches else "a name of one column"
        raise InputError("column", name, accepted)
    column: pd.Series[Any] = frame[name]
    return column


def _is_numeric(column: pd.Series[Any]) -> bool:
    import pandas as pd

    kinds = pd.api.types
    return bool(kinds.is_numeric_dtype(column) and not kinds.is_complex_dtype(column))


def _numbers(frame: pd.DataFrame, name: str) -> npt.NDArray[Any]:
    """Return a column of numbers, integers or floats; missing values as NaN."""
    import pandas as pd

    column = _column(frame, name)
    if not _is_numeric(column):
        raise InputError(
            f"column {name!r}",
            f"values of type {column.dtype}",
            "numbers: leave it out with features=[...], or encode it, as pandas.get_dummies does",
        )
    if pd.api.types.is_float_dtype(column) or column.isna().any():
        return column.to_numpy(dtype=np.float64, na_value=np.nan)
    return column.to_numpy(dtype=np.int64)


def _check_finite(numbers: npt.NDArray[Any], names: Sequence[str]) -> None:
    rows, columns = np.nonzero(~np.isfinite(numbers.astype(np.float64, copy=False)))
    if len(rows):
        raise InputError(
            f"column {names[columns[0]]!r}",
            f"{numbers[rows[0], columns[0]]} in row {rows[0]}",
            "finite numbers: fill missing values or drop the rows",
        )
