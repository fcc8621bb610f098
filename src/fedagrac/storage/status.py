"""How a live run is doing, read from its folder alone, also while its server runs.

Every file may come from anyone: it is read up to a size and checked. Of the history only the last rounds are read.
Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, FiniteFloat, ValidationError

from fedagrac.errors import FedagracError, InputError
from fedagrac.files import read_bounded, write_atomically
from fedagrac.parsing import parse_json, parse_toml, printable, utc
from fedagrac.storage.activity import LONGEST, Activity, Count, LiveRound, activities, last_rounds
from fedagrac.storage.claims import LOCK, is_claimed

__all__ = ["BAD_STATES", "RunStatus", "forget_failure", "patience", "read_status", "recording_failure"]

BAD_STATES = ("failed", "diverged", "interrupted")
"""States of a run that ended and has no good result."""

LARGEST_FILE = 2**24
"""The largest experiment.toml, status.json or failure.json that is read, in bytes."""

LAST_EVENTS = 10
"""How many of the last events are kept."""

LATEST = 2.5e11
"""The latest time that is shown, in seconds since 1970: the year 9892."""

PACE_ROUNDS = 10
"""The number of rounds whose mean time predicts the end."""


class _File(BaseModel):
    model_config = ConfigDict(extra="ignore", strict=True)


class _Experiment(_File):
    rounds: Count | None = None
    clients: Count | None = None
    round_seconds: FiniteFloat | None = None
    wait_seconds: FiniteFloat | None = None
    attempts: Count | None = None


class _End(_File):
    status: str
    reason: str
    rounds: Count | None = None


class _Failure(_File):
    reason: str
    events: list[str] = []


@dataclass(frozen=True)
class RunStatus:
    """The state of a run.

    Attributes:
        folder: the run folder.
        state: "starting", "running", "finished", "stopped", "diverged", "failed", or "interrupted" if the server
            does not run and the run has not ended.
        reason: one sentence that says why the run is in this state; empty while it runs.
        rounds: the number of rounds to do, or None if it is not known.
        clients: the number of clients, or None if it is not known.
        last: the last complete round, or None.
        since: when the server or the round in progress began, in seconds since 1970; None if the server does not
            run.
        end: when the run will end, estimated, in seconds since 1970; None if that is not known.
        stalled: whether the round in progress takes longer than it may.
        read_rounds: the number of rounds that were read.
        complete: whether these are all rounds.
        activities: what each client did in these rounds, those first that were dropped most often.
        events: the last events, each with its round.
    """

    folder: str
    state: str
    reason: str
    rounds: int | None
    clients: int | None
    last: LiveRound | None
    since: float | None
    end: float | None
    stalled: bool
    read_rounds: int
    complete: bool
    activities: list[Activity]
    events: list[tuple[int, str]]

    def to_json(self) -> str:
        """Return the status as one JSON object. Times are in ISO 8601 and UTC."""
        last = self.last
        measured = ("test_accuracy", "test_loss", "train_loss", "asked", "clients", "bytes_total", "wall_time")
        values = {
            **vars(self),
            "since": None if self.since is None else utc(self.since),
            "end": None if self.end is None else utc(self.end),
            "last": None if last is None else {n: getattr(last, n) for n in ("round", *measured)},
            "activities": [activity.row() for activity in self.activities],
            "events": [{"round": number, "event": event} for number, event in self.events],
        }
        return json.dumps(values, allow_nan=False)


def read_status(folder: Path, now: float | None = None) -> RunStatus:
    """Read the status of a run from its folder; raise InputError if it is not the folder of a run.

    Args:
        folder: the run folder.
        now: the time in seconds since 1970; by default that of the clock.
    """
    now = time.time() if now is None else now
    alive = is_claimed(folder)  # looked at first: a server that ends now has written everything when it lets go
    history = folder / "history.jsonl"
    failure = _read(folder / "failure.json", parse_json, _Failure)
    if not alive and failure is None and not history.exists():
        raise InputError("folder", str(folder), "the folder of a run, which holds a history.jsonl")
    experiment = _read(folder / "experiment.toml", parse_toml, _Experiment) or _Experiment()
    rounds, complete = last_rounds(history) if history.exists() else ([], True)
    last = rounds[-1] if rounds else None
    done = 0 if last is None else last.round
    state, reason = _state(folder, alive, failure, done)
    since = max(p.stat().st_mtime for p in (history, folder / LOCK) if p.exists()) if alive else None
    longest = None
    if experiment.round_seconds and experiment.wait_seconds and experiment.attempts:
        longest = patience(experiment.round_seconds, experiment.wait_seconds, experiment.attempts)
    events = [(record.round, event) for record in rounds for event in record.events]
    events += [(done + 1, event) for event in (failure.events if failure is not None and not alive else ())]
    return RunStatus(
        folder=str(folder),
        state=state,
        reason=printable(reason),
        rounds=experiment.rounds,
        clients=experiment.clients,
        last=last,
        since=since,
        end=_estimated_end(rounds, experiment.rounds, since, now),
        stalled=since is not None and longest is not None and now - since > longest,
        read_rounds=len(rounds),
        complete=complete,
        activities=activities(rounds),
        events=[(number, printable(event)[:LONGEST]) for number, event in events[-LAST_EVENTS:]],
    )


def _state(folder: Path, alive: bool, failure: _Failure | None, done: int) -> tuple[str, str]:
    """Return the state of a run and the reason for it."""
    if alive:
        return ("running" if (folder / "history.jsonl").exists() else "starting"), ""
    end = _read(folder / "status.json", parse_json, _End)
    if failure is not None:
        return "failed", failure.reason
    if end is not None and end.rounds in (None, done):  # an earlier end is that of a run which was extended
        if end.status not in ("finished", "stopped", "diverged"):
            accepted = "finished, stopped or diverged"
            raise InputError(f"{folder / 'status.json'}: status", end.status, accepted)
        return end.status, end.reason
    return "interrupted", "the server does not run, and the run has not ended; start it again to resume"


def _estimated_end(rounds: list[LiveRound], planned: int | None, since: float | None, now: float) -> float | None:
    """Return when the last round will end if all take as long as the last ones; None if that is not known."""
    if since is None or planned is None or len(rounds) < 2:
        return None
    last = rounds[-PACE_ROUNDS - 1 :]
    mean = statistics.fmean(b.wall_time - a.wall_time for a, b in itertools.pairwise(last))
    end = max(now, since + mean) + mean * max(0, planned - last[-1].round - 1)
    return end if end < LATEST else None


def patience(round_seconds: float, wait_seconds: float, attempts: int) -> float:
    """Return how many seconds may pass without a new round before something is wrong.

    Examples:
        >>> patience(600.0, 300.0, 3)
        2100.0
    """
    return round_seconds * attempts + wait_seconds


@contextlib.contextmanager
def recording_failure(folder: Path, events: Callable[[], Sequence[str]] = tuple) -> Iterator[None]:
    """Write failure.json if an error ends the block: the reason, the time and the last events of the round.

    Input that is refused, such as the folder of another run, leaves a folder with a history as it was.

    Examples:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp())
        >>> with contextlib.suppress(FedagracError), recording_failure(folder):
        ...     raise FedagracError("too few replies")
        >>> read_status(folder).state, read_status(folder).reason
        ('failed', 'too few replies')
    """
    try:
        yield
    except Exception as error:
        if isinstance(error, InputError) and (folder / "history.jsonl").exists():
            raise
        reason = str(error) if isinstance(error, FedagracError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(OSError):  # the error itself matters more
            last = [event[:LONGEST] for event in events()[-LAST_EVENTS:]]
            failure = {"reason": reason[: 10 * LONGEST], "time": utc(time.time()), "events": last}
            write_atomically(folder / "failure.json", json.dumps(failure).encode() + b"\n")
        raise


def forget_failure(folder: Path) -> None:
    """Remove failure.json, because the run goes on."""
    (folder / "failure.json").unlink(missing_ok=True)


def _read(path: Path, parse: Callable[[str], Any], schema: type[Any]) -> Any:
    """Return the checked content of a file, or None if it does not exist."""
    try:
        return schema.model_validate(parse(read_bounded(path, LARGEST_FILE).decode()))
    except FileNotFoundError:
        return None
    except ValidationError as error:
        first = error.errors()[0]
        field = ": ".join([str(path), *map(str, first["loc"])])
        raise InputError(field, first["input"], first["msg"].removeprefix("Input should be ")) from None
    except InputError:
        raise
    except (OSError, ValueError) as error:
        raise InputError("folder", str(path.parent), f"a readable {path.name} ({error})") from None
