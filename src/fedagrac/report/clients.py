"""The data behind the pictures of clients: the results of each client, sorted by speed, for each algorithm.

The page and the PNG and PDF pictures share this module.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.report.charts import series_of
from fedagrac.rounds.per_client import GROUPS, PerClient, speed_groups

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedagrac.report.style import Look
    from fedagrac.storage.runs import StoredRun

__all__ = ["MOST_DOTS", "Strip", "client_rows", "strip_range", "strips_of"]

MOST_DOTS = 500
"""The most clients that a picture shows."""


@dataclass(frozen=True, eq=False)
class Strip:
    """The clients of one run, slowest first.

    Attributes:
        label: the name of the run.
        look: the style of its algorithm.
        field: what is shown: "accuracy" in percent, or "loss".
        clients: how many clients the run has; some may not be shown.
        places: the place of each shown client among all, from 1.
        names, steps, samples: the shown clients' names, mean local steps and test samples.
        before: the value of each shown client with the global model.
        after: the same after fine-tuning; None if that was not stored. A value may be None.
        groups: the first place, the last place and the mean of each group by speed; of one group if all clients
            are equally fast.
    """

    label: str
    look: Look
    field: str
    clients: int
    places: list[int]
    names: list[str]
    steps: list[float | None]
    samples: list[int]
    before: list[float]
    after: list[float | None] | None
    groups: list[tuple[int, int, float]]

    @property
    def worst(self) -> int:
        """The row of the client with the worst value before fine-tuning."""
        return int(np.argmin(self.before) if self.field == "accuracy" else np.argmax(self.before))

    @property
    def ticks(self) -> list[tuple[int, str]]:
        """The places of a few clients with their mean local steps, for the axis of clients."""
        last = len(self.places) - 1
        chosen = sorted({round(last * share / 5) for share in range(6)})
        return [(self.places[i], "" if (k := self.steps[i]) is None else f"{k:.3g}") for i in chosen]


def strips_of(runs: Sequence[StoredRun]) -> list[Strip]:
    """Return one strip per series whose clients were measured; of several seeds, the first."""
    measured = _measured(runs)
    field = "accuracy" if all(before.accuracy is not None for _, _, before, _ in measured) else "loss"
    strips = [_strip(label, look, field, before, after) for label, look, before, after in measured]
    return [strip for strip in strips if strip is not None]


def _measured(runs: Sequence[StoredRun]) -> list[tuple[str, Look, PerClient, PerClient | None]]:
    """Return the label, the look, and the results before and after fine-tuning of each series."""
    result = []
    for line in series_of(runs):
        run = next((run for run in line.runs if run.per_client is not None), None)
        if run is not None:
            label = line.label + (f", seed {run.seed}" if len(line.runs) > 1 else "")
            result.append((label, line.look, *_tables(run)))
    return result


def _tables(run: StoredRun) -> tuple[PerClient, PerClient | None]:
    """Return the results of a run's clients before and after fine-tuning."""
    columns = run.per_client
    assert columns is not None
    before = PerClient.of(columns)
    if columns.get("tuned_loss") is None:
        return before, None
    tuned = {"accuracy": columns.get("tuned_accuracy"), "loss": columns["tuned_loss"]}
    return before, PerClient.of({**columns, **tuned})


def _strip(label: str, look: Look, field: str, before: PerClient, after: PerClient | None) -> Strip | None:
    """Return the strip of a run, or None if no client has a value."""
    scale = 100.0 if field == "accuracy" else 1.0
    values = scale * getattr(before, field)
    known = np.flatnonzero(~np.isnan(values))
    if not len(known):
        return None
    order = known[np.argsort(before.steps[known], kind="stable")]
    speed = speed_groups(before.steps[order])
    groups = []
    for group in ("", *GROUPS):
        places = np.flatnonzero(speed == group)
        if len(places):
            groups.append((int(places[0]) + 1, int(places[-1]) + 1, float(values[order][places].mean())))
    shown = np.unique(np.linspace(0, len(order) - 1, min(len(order), MOST_DOTS)).round().astype(np.int64))
    rows = order[shown]
    later = None if after is None else getattr(after, field)
    return Strip(
        label=label,
        look=look,
        field=field,
        clients=len(order),
        places=(shown + 1).tolist(),
        names=[before.name[i] for i in rows],
        steps=[None if np.isnan(k) else float(k) for k in before.steps[rows]],
        samples=before.samples[rows].tolist(),
        before=values[rows].tolist(),
        after=None if later is None else [None if np.isnan(v) else float(v) for v in scale * later[rows]],
        groups=groups,
    )


def strip_range(strips: Sequence[Strip]) -> tuple[float, float]:
    """Return the range of the value axis that all strips share."""
    values = [v for strip in strips for v in (*strip.before, *(strip.after or ())) if v is not None]
    low, high = min(values), max(values)
    margin = 0.06 * (high - low) or 1.0
    if strips[0].field == "accuracy":
        return max(-2.0, low - margin), min(102.0, high + margin)
    return low - margin, high + margin


def client_rows(runs: Sequence[StoredRun]) -> list[tuple[str, list[str]]]:
    """Return the table of clients: for each series the summary, and another one after fine-tuning."""
    rows = []
    for label, _, before, after in _measured(runs):
        for name, table in ((label, before), (f"{label}, fine-tuned", after)):
            if table is None:
                continue
            values = table.summary().values()
            scale, digits = (1, 3) if table.accuracy is None else (100, 1)
            rows.append((name, ["-" if v is None else f"{scale * v:.{digits}f}" for v in values]))
    return rows
