"""What each client of a live run did, from the fields of its history that live fleets write.

A history may come from anyone and may be large. Lines are checked as they are read, and a reader may ask for the
last rounds only. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from fedagrac.errors import InputError
from fedagrac.files import open_bounded
from fedagrac.parsing import printable

__all__ = ["Activity", "LiveRound", "activities", "last_rounds"]

TAIL = 2**24
"""How many bytes at the end of a history are read for its last rounds; also the longest line that is read."""

LONGEST = 300
"""The longest reason or event that is shown, in characters."""

Client = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Count = Annotated[int, Field(ge=0, lt=2**63)]
Seconds = Annotated[float, Field(ge=0, lt=1e12)]
Time = Annotated[str, Field(pattern=r"^\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ$")]


class LiveRound(BaseModel):
    """A line of the history of a live run. The fields are those of a `RoundRecord`; a simulation lacks most."""

    model_config = ConfigDict(extra="ignore", strict=True)

    round: Annotated[int, Field(ge=1, lt=2**63)]
    test_accuracy: Annotated[float, Field(ge=0, le=1)] | None = None
    test_loss: FiniteFloat | None = None
    train_loss: FiniteFloat | None = None
    clients: Count = 0
    bytes_total: Count = 0
    wall_time: Seconds = 0.0
    asked: Count | None = None
    dropped: list[Annotated[int, Field(ge=0, lt=10**9)]] = []
    steps: dict[Client, Count] = {}
    weights: dict[Client, Annotated[float, Field(ge=0, le=2)]] = {}
    seconds: dict[Client, Seconds] = {}
    sent: dict[Client, Count] = {}
    received: dict[Client, Count] = {}
    seen: dict[Client, Time] = {}
    reasons: dict[Client, str] = {}
    events: list[str] = []

    @classmethod
    def read(cls, path: Path, line: bytes) -> LiveRound:
        """Check one line; raise InputError if it is wrong."""
        try:
            return cls.model_validate_json(line)
        except ValidationError as error:
            first = error.errors()[0]
            if first["type"] == "json_invalid":
                raise InputError(str(path), line[:100], f"one JSON object in each line ({first['msg']})") from None
            field = ": ".join([str(path), *map(str, first["loc"])])
            raise InputError(field, first["input"], first["msg"].removeprefix("Input should be ")) from None


@dataclass
class Activity:
    """What one client did in some rounds.

    Attributes:
        client: its number.
        rounds: the number of rounds in which its reply counts.
        weights: the sum of its weights in those rounds.
        steps: the sum of its local steps, over `trained` rounds.
        trained: the number of rounds in which its reply could be used.
        replies: the number of rounds in which it replied.
        seconds: the sum of the seconds until its replies.
        last_seconds: the seconds until its last reply; None if it did not reply.
        sent, received: bytes to the client and from it.
        seen: when its last readable message arrived, in ISO 8601 and UTC; None if none did.
        dropped: the number of rounds in which it was asked but does not count.
        reason: why it was dropped last; None if it never was.
        reason_round: the round in which it was dropped last.
    """

    client: int
    rounds: int = 0
    weights: float = 0.0
    steps: int = 0
    trained: int = 0
    replies: int = 0
    seconds: float = 0.0
    last_seconds: float | None = None
    sent: int = 0
    received: int = 0
    seen: str | None = None
    dropped: int = 0
    reason: str | None = None
    reason_round: int | None = None

    def row(self) -> dict[str, Any]:
        """Return the numbers of a table: means and last values, None where there is none."""
        return {
            "client": self.client,
            "rounds": self.rounds,
            "weight": self.weights / self.rounds if self.rounds else None,
            "steps": self.steps / self.trained if self.trained else None,
            "seconds": self.seconds / self.replies if self.replies else None,
            "last_seconds": self.last_seconds,
            "sent": self.sent,
            "received": self.received,
            "seen": self.seen,
            "dropped": self.dropped,
            "reason": self.reason,
            "reason_round": self.reason_round,
        }


def activities(rounds: Iterable[LiveRound]) -> list[Activity]:
    """Return what each client did, with those first that were dropped most often; empty for a simulation.

    Examples:
        >>> one = LiveRound(round=1, weights={"0": 1.0}, dropped=[1], reasons={"1": "its node left"})
        >>> [(a.client, a.rounds, a.dropped, a.reason) for a in activities([one])]
        [(1, 0, 1, 'its node left'), (0, 1, 0, None)]
    """
    clients: dict[str, Activity] = {}

    def of(client: str) -> Activity:
        if client not in clients:
            clients[client] = Activity(int(client))
        return clients[client]

    for record in rounds:
        for client, weight in record.weights.items():
            activity = of(client)
            activity.rounds += 1
            activity.weights += weight
        for client, steps in record.steps.items():
            activity = of(client)
            activity.steps += steps
            activity.trained += 1
        for client, seconds in record.seconds.items():
            activity = of(client)
            activity.replies += 1
            activity.seconds += seconds
            activity.last_seconds = seconds
        for client, sent in record.sent.items():
            of(client).sent += sent
        for client, received in record.received.items():
            of(client).received += received
        for client, seen in record.seen.items():
            of(client).seen = seen
        for number in record.dropped if record.asked is not None or record.reasons else ():
            activity = of(str(number))
            activity.dropped += 1
            activity.reason = printable(record.reasons.get(str(number), "no usable reply"))[:LONGEST]
            activity.reason_round = record.round
    return sorted(clients.values(), key=lambda activity: (-activity.dropped, activity.rounds, activity.client))


def last_rounds(path: Path, most_bytes: int = TAIL) -> tuple[list[LiveRound], bool]:
    r"""Return the rounds in the last bytes of a history, and whether these are all of its rounds.

    A last line without an end, which a running server may be writing, is left out.

    Examples:
        >>> import tempfile
        >>> path = Path(tempfile.mkdtemp()) / "history.jsonl"
        >>> _ = path.write_text('{"round": 1}\n{"round": 2}\n{"rou')
        >>> rounds, complete = last_rounds(path)
        >>> [record.round for record in rounds], complete
        ([1, 2], True)
        >>> rounds, complete = last_rounds(path, most_bytes=20)
        >>> [record.round for record in rounds], complete
        ([2], False)
    """
    with open_bounded(path, most=2**63) as file:
        size = os.fstat(file.fileno()).st_size
        start = max(0, size - most_bytes)
        file.seek(start)
        tail = file.read(most_bytes)
    lines = tail.split(b"\n")[:-1]
    if start:
        lines = lines[1:]  # it may lack its beginning
    rounds = [LiveRound.read(path, line) for line in lines]
    if not rounds and start:
        raise InputError(str(path), f"a line of more than {most_bytes:,} bytes", "shorter lines")
    for before, after in itertools.pairwise(rounds):
        if after.round <= before.round:
            raise InputError(f"{path}: round", after.round, f"a number above {before.round}")
    return rounds, start == 0
