"""The results of each client on its own test set, and their summary: mean, worst tenth, spread, by speed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import numpy as np

from fedagrac.errors import InputError, one_of
from fedagrac.heterogeneity.steps import checked_counts

if TYPE_CHECKING:
    import numpy.typing as npt
    import pandas as pd

    from fedagrac.heterogeneity import StepSchedule

__all__ = ["CLIENT_MEASURES", "GROUPS", "PerClient", "client_measures", "mean_steps", "speed_groups"]

GROUPS = ("slow", "middle", "fast")
"""The groups of clients by speed."""

STATISTICS = ("mean", "worst_decile", "spread", *GROUPS)
"""The names in a summary."""

CLIENT_MEASURES = (*(f"client_accuracy_{name}" for name in STATISTICS), "client_loss_mean")
"""What an evaluation of the clients adds to a round of the history."""

MOST_ROUNDS = 100
"""The most rounds over which the mean steps of clients are taken."""


@dataclass(frozen=True, eq=False)
class PerClient:
    """A table with one row per client: its results on its own test set.

    A value is NaN if the client has no test sample that counts, or if it is not known.

    Attributes:
        client: client numbers, [M].
        name: client names.
        samples: test samples, [M].
        steps: the mean K_i over the rounds, [M].
        accuracy: test accuracy, [M]; None if the task is not classification.
        loss: test loss, [M].

    Examples:
        >>> table = PerClient.of({"client": [0, 1, 2], "name": ["ann", "bob", "eve"], "samples": [5, 4, 9],
        ...                       "steps": [2, 9, 30], "accuracy": [0.5, 0.75, 1.0], "loss": [2.0, 1.0, 0.5]})
        >>> table.summary()["slow"], table.summary("loss")["worst_decile"]
        (0.5, 2.0)
        >>> print(table)
        3 clients      mean  worst decile  spread   slow  middle   fast
        accuracy (%)   75.0          50.0    20.4   50.0    75.0  100.0
        loss          1.167         2.000   0.624  2.000   1.000  0.500
    """

    client: npt.NDArray[np.int64]
    name: tuple[str, ...]
    samples: npt.NDArray[np.int64]
    steps: npt.NDArray[np.float64]
    accuracy: npt.NDArray[np.float64] | None
    loss: npt.NDArray[np.float64]

    def __post_init__(self) -> None:
        for column in fields(self):
            values = getattr(self, column.name)
            if values is not None and len(values) != len(self.client):
                accepted = f"one value for each of {len(self.client)} clients"
                raise InputError(f"per_client.{column.name}", f"{len(values)} values", accepted)

    @classmethod
    def of(cls, columns: Mapping[str, Sequence[Any] | None]) -> PerClient:
        """Make a table from columns by name. None stands for a number that is not known."""

        def numbers(name: str) -> npt.NDArray[np.float64]:
            values = columns[name]
            assert values is not None
            return np.array([np.nan if value is None else value for value in values], np.float64)

        accuracy = columns.get("accuracy")
        return cls(
            client=np.array(columns["client"], np.int64),
            name=tuple(map(str, columns["name"] or ())),
            samples=np.array(columns["samples"], np.int64),
            steps=numbers("steps"),
            accuracy=None if accuracy is None else numbers("accuracy"),
            loss=numbers("loss"),
        )

    def columns(self) -> dict[str, list[Any] | None]:
        """Return the columns as plain lists, which JSON can hold. A number that is not finite becomes None."""
        columns: dict[str, list[Any] | None] = {
            "client": self.client.tolist(),
            "name": list(self.name),
            "samples": self.samples.tolist(),
        }
        for name in ("steps", "accuracy", "loss"):
            values = getattr(self, name)
            if values is not None:
                values = [value if np.isfinite(value) else None for value in values.tolist()]
            columns[name] = values
        return columns

    def __len__(self) -> int:
        return len(self.client)

    def summary(self, of: str | None = None) -> dict[str, float | None]:
        """Return the mean over clients, the mean of the worst tenth, the spread, and the means by speed.

        Every client counts once. "worst_decile" is the mean over the worst tenth of the clients, at least one:
        the lowest accuracies or the highest losses. "spread" is the standard deviation. "slow", "middle" and
        "fast" are thirds of the clients by steps. Clients with equal steps share a group, so a group may be
        empty: its value is None.

        Args:
            of: "accuracy" or "loss"; by default the accuracy if there is one.
        """
        name = one_of("of", of or ("loss" if self.accuracy is None else "accuracy"), ["accuracy", "loss"])
        column = getattr(self, name)
        known = np.zeros(len(self), np.bool_) if column is None else ~np.isnan(column)
        if not known.any():
            return dict.fromkeys(STATISTICS)
        values = column[known]
        ascending = np.sort(values)
        tenth = max(1, len(values) // 10)
        worst = ascending[:tenth] if name == "accuracy" else ascending[-tenth:]
        groups = speed_groups(self.steps[known])
        return {
            "mean": float(values.mean()),
            "worst_decile": float(worst.mean()),
            "spread": float(values.std()),
            **{group: float(values[groups == group].mean()) if group in groups else None for group in GROUPS},
        }

    def to_pandas(self) -> pd.DataFrame:
        """Return the table as a DataFrame, one row per client."""
        import pandas as pd

        columns = {column.name: getattr(self, column.name) for column in fields(self)}
        return pd.DataFrame({name: values for name, values in columns.items() if values is not None})

    def __repr__(self) -> str:
        rows = [[f"{len(self)} clients".ljust(12), *(name.replace("_", " ") for name in STATISTICS)]]
        for name, label, scale, digits in (("accuracy", "accuracy (%)", 100, 1), ("loss", "loss".ljust(12), 1, 3)):
            if getattr(self, name) is not None:
                values = self.summary(name).values()
                rows.append(
                    [label, *("-" if value is None else f"{scale * value:.{digits}f}" for value in values)]
                )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join("  ".join(map(str.rjust, row, widths)) for row in rows)


def client_measures(table: PerClient) -> dict[str, float | None]:
    """Return what the history records of a table, by name.

    Examples:
        >>> table = PerClient.of({"client": [0], "name": ["0"], "samples": [3], "steps": [5],
        ...                       "accuracy": None, "loss": [2.0]})
        >>> measures = client_measures(table)
        >>> measures["client_loss_mean"], measures["client_accuracy_mean"]
        (2.0, None)
    """
    values = (*table.summary("accuracy").values(), table.summary("loss")["mean"])
    return dict(zip(CLIENT_MEASURES, values, strict=True))


def speed_groups(steps: npt.NDArray[np.float64]) -> npt.NDArray[np.str_]:
    """Return the group of each client: thirds by steps, in which clients with equal steps stay together.

    Only two groups are "slow" and "fast", and a single one is "middle".

    Examples:
        >>> speed_groups(np.array([30.0, 10.0, 20.0])).tolist()
        ['fast', 'slow', 'middle']
        >>> speed_groups(np.array([5.0, 5.0, 5.0, 50.0])).tolist(), speed_groups(np.array([5.0, 5.0])).tolist()
        (['slow', 'slow', 'slow', 'fast'], ['middle', 'middle'])
        >>> speed_groups(np.array([np.nan])).tolist()
        ['']
    """
    if np.isnan(steps).any():
        return np.full(len(steps), "", "<U6")
    _, level, sizes = np.unique(steps, return_inverse=True, return_counts=True)
    # the place of a client among all, in the middle of those with equal steps
    place = ((np.cumsum(sizes) - sizes / 2) / len(steps))[level]
    third = np.where(place < 1 / 3, 0, np.where(place > 2 / 3, 2, 1))
    distinct = np.unique(third)
    names = {1: ["middle"], 2: ["slow", "fast"], 3: list(GROUPS)}[len(distinct)]
    return np.array(names)[np.searchsorted(distinct, third)]


def mean_steps(steps: StepSchedule, clients: int, rounds: int, seed: int) -> npt.NDArray[np.float64]:
    """Return each client's mean K_i over the rounds, or over 100 evenly spaced ones of them, [clients].

    Examples:
        >>> from fedagrac import Explicit
        >>> mean_steps(Explicit([[1, 5], [3, 5]]), clients=2, rounds=2, seed=0).tolist()
        [2.0, 5.0]
    """
    chosen = np.unique(np.linspace(0, rounds - 1, min(rounds, MOST_ROUNDS)).round().astype(np.int64))
    total = np.zeros(clients)
    for round in chosen.tolist():
        total += checked_counts(steps, round, clients, seed)
    mean: npt.NDArray[np.float64] = total / len(chosen)
    return mean
