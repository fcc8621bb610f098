"""What a simulation returns: the history of its rounds and the final model."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.citations import bibtex

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from torch import Tensor, nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.data.federation import Federation
    from fedagrac.models.vector import VectorModel
    from fedagrac.rounds.divergence import Divergence

__all__ = ["History", "Record", "SimulationResult", "Status", "over_seeds"]

Record = dict[str, Any]
"""One round, readable as record["round"].

round (from 1), test_accuracy, test_loss and metrics (None without evaluation), train_loss (mean over the round's
steps, weighted by omega), clients and fast (how many took part, and how many of them were fast), steps_mean (mean
K_i of the cohort), bytes_up and bytes_down (of this round), bytes_total (both directions, since the start and
including it), sim_time and wall_time (cumulative seconds); with a guard also dropped (the clients whose update it
did not let in: they took part, moved bytes and took time, and count in nothing else)."""

Status = Literal["finished", "stopped", "diverged"]


def over_seeds(values: Sequence[float | None]) -> tuple[float | None, float]:
    """Return the mean over seeds, None where one of them gave nothing, and the standard deviation, 0 with one.

    Examples:
        >>> over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
        >>> over_seeds([1.0, None]), over_seeds([])
        ((None, 0.0), (None, 0.0))
    """
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known and len(known) == len(values) else None
    return mean, statistics.stdev(known) if len(known) > 1 else 0.0


@functools.lru_cache(maxsize=16)
def _table(names: tuple[str, ...]) -> type:
    """Return a class for records of these names: the dicts of its instances share one table of them."""
    return type("Table", (), {})


def _lean(record: Record) -> Record:
    """Return the record as a dict that shares its names with its like: 470 bytes instead of 750."""
    found: Record = vars(_table(tuple(record))())
    for name, value in record.items():
        found[name] = value  # one by one: update() would copy the table
    return found


class History(list[Record]):
    """The rounds of a run, in order. It is what grows in a long run, so its records are kept lean.

    Examples:
        >>> History([{"round": 1, "test_accuracy": 0.5}]).column("test_accuracy")
        [0.5]
    """

    def __init__(self, records: Iterable[Record] = ()) -> None:
        super().__init__(map(_lean, records))

    def append(self, record: Record) -> None:
        """Add a round; `history[-1]` is a copy of the record."""
        super().append(_lean(record))

    def column(self, name: str) -> list[Any]:
        """Return one field of every round."""
        return [record[name] for record in self]

    def to_pandas(self) -> pd.DataFrame:
        """Return the history as a DataFrame, one row per round."""
        import pandas as pd

        return pd.DataFrame.from_records(list(self))

    def to_csv(self, path: str | Path) -> None:
        """Write the history as a CSV file, one line per round."""
        self.to_pandas().to_csv(path, index=False)

    def rounds_to(self, accuracy: float) -> int | None:
        """Return the first round whose test accuracy is at or above `accuracy`, or None."""
        for record in self:
            if record["test_accuracy"] is not None and record["test_accuracy"] >= accuracy:
                return int(record["round"])
        return None

    def best(self, name: str = "test_accuracy") -> float | None:
        """Return the largest value of a field over the evaluated rounds, or None."""
        return max((record[name] for record in self if record[name] is not None), default=None)

    def last(self, name: str = "test_accuracy") -> float | None:
        """Return the value of a field in the last evaluated round, or None."""
        return next((record[name] for record in reversed(self) if record[name] is not None), None)


@dataclass(frozen=True, eq=False)
class SimulationResult:
    """The outcome of `simulate`.

    Attributes:
        algorithm: the algorithm that ran.
        vector: the final global model as one vector.
        history: one record per round.
        status: "finished" all rounds, "stopped" by a stop rule or a callback, or "diverged".
        reason: one sentence that says why it ended.
        divergence: which client left the finite numbers first, and where; None unless the run diverged.
    """

    algorithm: Algorithm
    federation: Federation
    vector: Tensor
    history: History
    status: Status
    reason: str
    vector_model: VectorModel
    divergence: Divergence | None = None

    @property
    def params(self) -> dict[str, Tensor]:
        """The final global model's trainable parameters by name."""
        return self.vector_model.views(self.vector)

    def model(self) -> nn.Module:
        """Return a new module with the final weights."""
        return self.vector_model.export(self.vector).cpu()

    def rounds_to(self, accuracy: float) -> int | None:
        """Return the first round whose test accuracy is at or above `accuracy`, or None."""
        return self.history.rounds_to(accuracy)

    def citations(self) -> str:
        """Return BibTeX for what this run used: the algorithm, the data set, and the paper behind the package."""
        return bibtex(("fedagrac", *self.algorithm.cites, *self.federation.cites))
