"""Writes a report: the page, its pictures as PNG and PDF, and the summary as JSON."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from fedagrac.files import make_folder, write_atomically
from fedagrac.report.charts import charts_of
from fedagrac.report.clients import strips_of
from fedagrac.report.page import render_page
from fedagrac.report.pictures import (
    plot_chart,
    plot_clients,
    plot_costs,
    plot_curves,
    plot_label_counts,
    plot_steps,
    save,
)
from fedagrac.report.summary import summarise

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from fedagrac.storage.runs import StoredRun

__all__ = ["write_report"]


def write_report(runs: Sequence[StoredRun], folder: Path) -> Path:
    """Write a report into a folder, replacing an earlier one; return the path of the page.

    The files are report.html, summary.json, the overviews curves and costs, and every figure in figures/.
    """
    figures = folder / "figures"
    make_folder(figures)
    charts = charts_of(runs)
    if charts:
        save(plot_curves(runs), folder / "curves")
        save(plot_costs(runs), folder / "costs")
    for chart in charts:
        save(plot_chart(chart, runs), figures / chart.key)
    if strips_of(runs):
        save(plot_clients(runs), figures / "clients")
    federations = {repr(run.federation): run.federation for run in runs if run.federation is not None}
    for number, federation in enumerate(federations.values(), start=1):
        suffix = f"-{number}" if len(federations) > 1 else ""
        save(plot_steps(federation), figures / f"steps{suffix}")
        if federation.labels:
            save(plot_label_counts(federation), figures / f"labels{suffix}")
    write_atomically(folder / "summary.json", json.dumps(summarise(runs), indent=2).encode() + b"\n")
    page = folder / "report.html"
    write_atomically(page, render_page(runs).encode("utf-8", "replace"))
    return page
