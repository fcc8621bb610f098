"""The output of a run: a record of every round, the history of all rounds, and the result.

Simulated and live fleets write the same records, so tables, reports and trackers can read both.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

from fedagrac.citations import bibtex
from fedagrac.errors import InputError
from fedagrac.parsing import printable, utc
from fedagrac.rounds.per_client import CLIENT_MEASURES
from fedagrac.rounds.stop import target_accuracy
from fedagrac.rounds.summary import five_lines, plot_result

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd
    from matplotlib.figure import Figure
    from torch import Tensor, nn

    from fedagrac.algorithms import Algorithm
    from fedagrac.data.federation import Federation
    from fedagrac.models.vector import VectorModel
    from fedagrac.rounds.divergence import Divergence
    from fedagrac.rounds.exchange import Contact
    from fedagrac.rounds.own_models import OwnModels
    from fedagrac.rounds.per_client import PerClient

__all__ = ["History", "RoundRecord", "SimulationResult", "Status", "over_seeds"]

Status = Literal["finished", "stopped", "diverged"]

LONGEST_REASON = 300
"""The longest reason why a client was dropped, in characters. Reasons may hold text from clients."""

NO_METRICS: Mapping[str, float | None] = MappingProxyType({})
"""An empty table that all records without metrics share, because a long run has many records."""


@dataclass(slots=True)
class RoundRecord(Mapping[str, Any]):
    """One round, readable as `record["round"]` and as `record.round`.

    Attributes:
        round: the number of the round, from 1.
        test_accuracy, test_loss: None in rounds without evaluation.
        metrics: the other measures of the test data by name; each is a key of the record.
        train_loss: the mean over the round's steps, weighted by omega; None in a stored record if not finite.
        clients: the number of clients that took part and count.
        fast: the number of fast clients among them.
        steps_mean: the mean K_i of the cohort.
        bytes_up, bytes_down: the bytes of this round.
        bytes_total: the bytes in both directions since the start, including the start.
        sim_time: seconds on the fleet's clock since the start.
        wall_time: real seconds since the start.
        dropped: the clients that were asked but do not count; their bytes and their time do. A simulation writes
            this field only with a guard.
        asked: the number of clients that were asked. This and the following fields are written by live fleets.
        first_gradients: the number of clients that sent a first gradient.
        steps: K_i by client.
        weights: omega_i by client, normalised over the clients that count.
        events: what went wrong or changed, in words.
        seconds: after how many seconds the reply of each client arrived.
        sent, received: the bytes of the vectors sent to and received from each client since the round before.
        seen: when the last readable message of each client since the round before arrived, in ISO 8601 and UTC.
        reasons: why each client in `dropped` was dropped.

    Examples:
        >>> record = RoundRecord.of({**EXAMPLE, "top5": 0.9})
        >>> record["test_accuracy"], record["top5"], record.round, "dropped" in record
        (0.5, 0.9, 1, False)
    """

    round: int
    test_accuracy: float | None
    test_loss: float | None
    train_loss: float | None
    clients: int
    fast: int
    steps_mean: float
    bytes_up: int
    bytes_down: int
    bytes_total: int
    sim_time: float
    wall_time: float
    dropped: list[int] | None = None
    asked: int | None = None
    first_gradients: int | None = None
    steps: dict[str, int] | None = None
    weights: dict[str, float] | None = None
    events: list[str] | None = None
    seconds: dict[str, float] | None = None
    sent: dict[str, int] | None = None
    received: dict[str, int] | None = None
    seen: dict[str, str] | None = None
    reasons: dict[str, str] | None = None
    metrics: Mapping[str, float | None] = dataclasses.field(default_factory=lambda: NO_METRICS)

    @classmethod
    def of(cls, values: Mapping[str, Any]) -> RoundRecord:
        """Make a record from plain values, such as a line of history.jsonl; raise ValueError if it is invalid."""
        missing = [name for name in ALWAYS if name not in values]
        if missing:
            raise ValueError(f"a round lacks {', '.join(missing)}")
        for name in ("round", "bytes_total", "sim_time", "wall_time"):
            if isinstance(values[name], bool) or not isinstance(values[name], int | float):
                raise ValueError(f"a round has {name} = {values[name]!r}, which is not a number")
        known = {name: values[name] for name in (*ALWAYS, *SOMETIMES) if name in values}
        metrics = {name: value for name, value in values.items() if name not in known}
        return cls(**known, metrics=metrics or NO_METRICS)

    def __getitem__(self, name: str) -> Any:
        if name in self.metrics:
            return self.metrics[name]
        if name in ALWAYS or (name in SOMETIMES and getattr(self, name) is not None):
            return getattr(self, name)
        raise KeyError(name)

    def __iter__(self) -> Iterator[str]:
        yield from ALWAYS[:3]
        yield from self.metrics
        yield from ALWAYS[3:]
        yield from (name for name in SOMETIMES if getattr(self, name) is not None)

    __hash__ = None  # type: ignore[assignment]  # an evaluation may still change the record

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __eq__(self, other: object) -> bool:
        return dict(self) == dict(other) if isinstance(other, Mapping) else NotImplemented

    def add_contacts(self, contacts: Mapping[int, Contact], dropped: Mapping[int, str]) -> None:
        """Set what a live fleet knows of each client: seconds, bytes, when it was seen, and why it was dropped."""
        known = sorted(contacts.items())
        self.seconds = {str(i): round(c.seconds, 3) for i, c in known if c.seconds is not None}
        self.sent = {str(i): c.sent for i, c in known if c.sent}
        self.received = {str(i): c.received for i, c in known if c.received}
        self.seen = {str(i): utc(c.seen) for i, c in known if c.seen is not None}
        self.reasons = {str(i): printable(reason)[:LONGEST_REASON] for i, reason in sorted(dropped.items())}

    def measured(self, values: Mapping[str, float | None]) -> None:
        """Set the results of an evaluation."""
        self.test_accuracy, self.test_loss = values["test_accuracy"], values["test_loss"]
        self.metrics = {name: value for name, value in values.items() if name not in ALWAYS} or NO_METRICS


SOMETIMES = (
    "dropped", "asked", "first_gradients", "steps", "weights", "events", "seconds", "sent", "received", "seen",
    "reasons",
)  # fmt: skip
"""Fields that are keys of a record only if they were written."""

ALWAYS = tuple(
    field.name for field in dataclasses.fields(RoundRecord) if field.name not in (*SOMETIMES, "metrics")
)
"""Fields that every record has."""

VALIDATION = ("val_accuracy", "val_loss")
"""What an evaluation on held-out training samples adds to a round."""

RESERVED = (*ALWAYS, *SOMETIMES, *VALIDATION, *CLIENT_MEASURES)
"""Names that a metric of the user's may not have."""

SMALLEST = ("loss", "perplexity", "mse", "mae", "error")
"""The ends of the names whose best value is the smallest."""

EXAMPLE = {**dict.fromkeys(ALWAYS, 0), "round": 1, "test_accuracy": 0.5, "test_loss": 1.0}
"""A record as plain values, for documentation."""


def over_seeds(values: Sequence[float | None]) -> tuple[float | None, float]:
    """Return the mean and the standard deviation over seeds.

    The mean is None if the value of a seed is None. The deviation is 0 for a single seed.

    Examples:
        >>> over_seeds([1.0, 3.0])
        (2.0, 1.4142135623730951)
        >>> over_seeds([1.0, None]), over_seeds([])
        ((None, 0.0), (None, 0.0))
    """
    known = [value for value in values if value is not None]
    mean = statistics.fmean(known) if known and len(known) == len(values) else None
    return mean, statistics.stdev(known) if len(known) > 1 else 0.0


class History(list[RoundRecord]):
    """The rounds of a run, in order.

    Examples:
        >>> History([EXAMPLE]).column("test_accuracy")
        [0.5]
    """

    def __init__(self, records: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__(r if isinstance(r, RoundRecord) else RoundRecord.of(r) for r in records)

    def column(self, name: str) -> list[Any]:
        """Return one field of every round; None in rounds that lack it. Raise KeyError if all of them do."""
        if self and not any(name in record for record in self):
            raise KeyError(name)
        return [record.get(name) for record in self]

    def to_pandas(self) -> pd.DataFrame:
        """Return the history as a DataFrame, one row per round."""
        import pandas as pd

        return pd.DataFrame.from_records([dict(record) for record in self])

    def to_csv(self, path: str | Path) -> None:
        """Write the history as a CSV file, one line per round."""
        self.to_pandas().to_csv(path, index=False)

    def rounds_to(self, accuracy: float) -> int | None:
        """Return the first round whose test accuracy is at or above `accuracy`, a fraction, or None."""
        target_accuracy("accuracy", accuracy)
        for record in self:
            if record.test_accuracy is not None and record.test_accuracy >= accuracy:
                return int(record.round)
        return None

    def best(self, name: str = "test_accuracy", smallest: bool | None = None) -> float | None:
        """Return the best value of a field over the evaluated rounds, or None.

        Args:
            name: the field.
            smallest: whether the smallest value is the best. By default it is that of fields whose name ends in
                loss, error, mse, mae, rmse or perplexity, or in one of these and _mean.

        Examples:
            >>> history = History([EXAMPLE, {**EXAMPLE, "round": 2, "test_accuracy": 0.6, "test_loss": 0.5}])
            >>> history.best(), history.best("test_loss"), history.best("test_loss", smallest=False)
            (0.6, 0.5, 1.0)
        """
        values = [value for value in self.column(name) if value is not None]
        if smallest is None:
            smallest = name.lower().removesuffix("_mean").endswith(SMALLEST)
        return (min if smallest else max)(values, default=None)

    def last(self, name: str = "test_accuracy") -> float | None:
        """Return the value of a field in the last evaluated round, or None."""
        return next((value for value in reversed(self.column(name)) if value is not None), None)


@dataclass(frozen=True, eq=False, repr=False)
class SimulationResult:
    """The outcome of a run.

    Attributes:
        algorithm: the algorithm that ran.
        federation: the clients and their data; None if they are not on this machine.
        vector: the final global model as one vector.
        history: one record per round.
        status: "finished" after all rounds, "stopped" by a stopping rule or a callback, or "diverged".
        reason: one sentence that says why the run ended.
        vector_model: the module as a function of the vector.
        divergence: which client diverged first, and after how many steps; None unless the run diverged.
        buffer_vector: the final moving buffers of the module as one vector; None if it has none.
        per_client: the results of the final model on each client's own test set; None without such sets.
        own: the models that clients use; None if all use the global model with its buffers.
    """

    algorithm: Algorithm
    federation: Federation | None
    vector: Tensor
    history: History
    status: Status
    reason: str
    vector_model: VectorModel
    divergence: Divergence | None = None
    buffer_vector: Tensor | None = None
    per_client: PerClient | None = None
    own: OwnModels | None = None

    def __repr__(self) -> str:
        return five_lines(self)

    def plot(self) -> Figure:
        """Draw test accuracy, if it was measured, and the losses against rounds; return a matplotlib figure."""
        return plot_result(self)

    @property
    def params(self) -> dict[str, Tensor]:
        """The final global model's trainable parameters by name."""
        return self.vector_model.views(self.vector)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The final moving buffers by name, such as the running statistics of BatchNorm."""
        if self.buffer_vector is None:
            return {}
        return {name: rows[0] for name, rows in self.vector_model.buffers.rows(self.buffer_vector[None]).items()}

    def model(self, client: int | None = None) -> nn.Module:
        """Return a new module with the final weights and buffers, or with those that a client uses.

        Clients use weights of their own with personal algorithms such as FedPer, and buffers of their own with
        buffers="local". If several processes share the run, all of them must call this.
        """
        if client is None or self.own is None:
            return self.vector_model.export(self.vector, self.buffer_vector).cpu()
        if not 0 <= client < len(self.own.weights):
            raise InputError("client", client, f"a client from 0 to {len(self.own.weights) - 1}")
        return self.vector_model.export(*self.own.of(client)).cpu()

    def rounds_to(self, accuracy: float) -> int | None:
        """Return the first round whose test accuracy is at or above `accuracy`, a fraction, or None."""
        return self.history.rounds_to(accuracy)

    def citations(self) -> str:
        """Return BibTeX entries for the package, the algorithm, one inside it, and the data set of this run."""
        data = () if self.federation is None else self.federation.cites
        return bibtex(("fedagrac", *self.algorithm.papers, *data))
