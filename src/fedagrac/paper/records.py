"""Records: the outcomes of a recipe's runs, one line each in RECIPE.jsonl.

A recorded run is not run again, so recipes can be stopped, continued, and filled in over days and machines. The
lines are sorted by the trials' names. Environments, which many runs share, are in environments.json under short
keys.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedagrac.files import make_folder, opener, write_atomically
from fedagrac.parsing import parse_json
from fedagrac.storage.claims import LOCK

__all__ = ["ENVIRONMENTS", "Records", "Trial", "TrialRecord", "key_of", "progress"]

log = logging.getLogger("fedagrac")

ENVIRONMENTS = "environments.json"
"""The file with the environments by key."""


def key_of(value: object) -> str:
    """Return a short hash of a JSON value; the order of keys does not matter.

    Examples:
        >>> key_of({"a": 1, "b": 2}) == key_of({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Trial:
    """One run of a recipe.

    Attributes:
        name: where it belongs, such as "alexnet-dp1-v10000-fixed/fedagrac/lr=0.03/seed0".
        settings: everything that decides the outcome.
        recipe: the recipe that keeps the record, where a recipe shows the run of another one.
    """

    name: str
    settings: dict[str, Any]
    recipe: str | None = None

    @property
    def key(self) -> str:
        """A short hash of the settings.

        Examples:
            >>> Trial("a", {"lr": 0.1}).key == Trial("b", {"lr": 0.1}).key
            True
        """
        return key_of(self.settings)


@dataclass(frozen=True)
class TrialRecord:
    """What a run gave.

    Attributes:
        trial: the name of the trial when it was run.
        settings: its settings.
        outcome: curves and numbers.
        environment: versions and machine.
    """

    trial: str
    settings: dict[str, Any]
    outcome: dict[str, Any]
    environment: dict[str, Any]

    @property
    def finished(self) -> bool:
        """Whether the run came to its end; one that ran out of time did not."""
        return bool(self.outcome.get("finished", True))

    def replaces(self, other: TrialRecord | None) -> bool:
        """Say whether this record is worth more than another one of the same settings.

        Examples:
            >>> half = TrialRecord("a", {}, {"rounds": 3, "finished": False}, {})
            >>> whole = TrialRecord("a", {}, {"rounds": 9, "finished": True}, {})
            >>> whole.replaces(half), half.replaces(whole), half.replaces(None), whole.replaces(whole)
            (True, False, True, False)
        """
        if other is None or other.finished:
            return other is None
        return self.finished or progress(self.outcome) > progress(other.outcome)


def progress(outcome: dict[str, Any]) -> tuple[int, int]:
    """Return how far a run that was cut off has come: the settings that a search has tried, and its rounds.

    Examples:
        >>> progress({"rounds": 3, "tried": [{}, {}]}) > progress({"rounds": 40, "tried": [{}]})
        True
    """
    return len(outcome.get("tried", ())), outcome.get("rounds", 0)


class Records:
    """The records of a folder, one file per recipe.

    Reading takes a file again only when it has changed. Writing replaces the whole file at once, under a lock, so
    that several processes can write to one folder.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self._read: dict[str, tuple[object, dict[str, TrialRecord]]] = {}

    def path(self, recipe: str) -> Path:
        """Return the file with the records of a recipe."""
        return self.folder / f"{recipe}.jsonl"

    def recipes(self) -> list[str]:
        """Return the names of the recipes that have records."""
        return sorted(path.stem for path in self.folder.glob("*.jsonl"))

    def all(self, recipe: str) -> dict[str, TrialRecord]:
        """Return every record of a recipe by the key of its settings; lines that are no records are left out."""
        state = _state(self.path(recipe)), _state(self.folder / ENVIRONMENTS)
        known = self._read.get(recipe)
        if known is None or known[0] != state:
            records, unreadable = self._parsed(recipe)
            if unreadable:
                log.warning(
                    "%d lines of %s are no records, so their runs count as not made; environments are in %s",
                    len(unreadable), self.path(recipe), self.folder / ENVIRONMENTS,
                )  # fmt: skip
            known = state, records
            self._read[recipe] = known
        return dict(known[1])

    def get(self, recipe: str, trial: Trial) -> TrialRecord | None:
        """Return the record of a trial, or None."""
        return self.all(trial.recipe or recipe).get(trial.key)

    def put(self, recipe: str, trial: Trial, outcome: dict[str, Any], environment: dict[str, Any]) -> TrialRecord:
        """Write the record of a trial, in place of an older one, and return it."""
        record = TrialRecord(trial.name, trial.settings, outcome, environment)
        self.update(trial.recipe or recipe, [record])
        return record

    def update(self, recipe: str, records: Iterable[TrialRecord]) -> None:
        """Write records of a recipe, in place of older ones with the same settings."""
        make_folder(self.folder)
        with _locked(self.folder):
            known, unreadable = self._parsed(recipe)
            known |= {key_of(record.settings): record for record in records}
            places = self._environments() | {key_of(r.environment): r.environment for r in known.values()}
            table = json.dumps(places, indent=1, sort_keys=True) + "\n"
            write_atomically(self.folder / ENVIRONMENTS, table.encode())
            ordered = sorted(known.items(), key=lambda item: (item[1].trial, item[0]))
            lines = [_line(record) for _, record in ordered] + unreadable
            content = "".join(f"{line}\n" for line in lines)
            write_atomically(self.path(recipe), content.encode("utf-8", "surrogateescape"))

    def merge(self, other: Records) -> int:
        """Take over records of another folder that are missing or unfinished here, and return how many."""
        taken = 0
        for recipe in other.recipes():
            present = self.all(recipe)
            better = [r for key, r in other.all(recipe).items() if r.replaces(present.get(key))]
            if better:
                self.update(recipe, better)
            taken += len(better)
        return taken

    def _environments(self) -> dict[str, dict[str, Any]]:
        try:
            table = parse_json((self.folder / ENVIRONMENTS).read_bytes())
        except (OSError, ValueError):
            return {}
        if not isinstance(table, dict):
            return {}
        return {key: value for key, value in table.items() if isinstance(value, dict)}

    def _parsed(self, recipe: str) -> tuple[dict[str, TrialRecord], list[str]]:
        """Return the records in a recipe's file by key, and the lines that are none."""
        try:
            text = self.path(recipe).read_bytes().decode("utf-8", "surrogateescape")
        except OSError:
            return {}, []
        environments = self._environments()
        records, unreadable = {}, []
        for line in text.splitlines():
            record = _record(line, environments)
            if record is not None:
                records[key_of(record.settings)] = record
            elif line.strip():
                unreadable.append(line)
        return records, unreadable


def _line(record: TrialRecord) -> str:
    return json.dumps(
        {
            "trial": record.trial,
            "settings": record.settings,
            "environment": key_of(record.environment),
            "outcome": record.outcome,
        }
    )


def _record(line: str, environments: dict[str, dict[str, Any]]) -> TrialRecord | None:
    """Read a line, or return None if it is invalid or its environment is unknown."""
    try:
        table = parse_json(line)
        trial, settings, outcome, place = (table[key] for key in ("trial", "settings", "outcome", "environment"))
    except (ValueError, KeyError, TypeError):
        return None
    environment = environments.get(place) if isinstance(place, str) else place
    if not (isinstance(settings, dict) and isinstance(outcome, dict) and isinstance(environment, dict)):
        return None
    return TrialRecord(str(trial), settings, outcome, environment)


def _state(path: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file is replaced, or None where it does not exist."""
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_ino, facts.st_mtime_ns, facts.st_size


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, which ends with the process; systems without fcntl do not keep writers apart."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with open(folder / LOCK, "w", opener=opener) as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
