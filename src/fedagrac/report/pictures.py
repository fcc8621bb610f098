"""Curves of several runs in one picture."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedagrac.report.runs import StoredRun

__all__ = ["plot_costs", "plot_curves", "save_costs", "save_curves"]

STYLES = ["-", "--", "-.", ":"]


def plot_curves(runs: Sequence[StoredRun], target: float | None = None, title: str = "") -> Figure:
    """Draw accuracy (or, without labels, test loss) and training loss against rounds, one line per run."""
    from matplotlib.figure import Figure

    classifies = any(run.history.best("test_accuracy") is not None for run in runs)
    tests = any(run.history.best("test_loss") is not None for run in runs)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    left, right = figure.subplots(1, 2)
    if classifies:
        _draw(left, runs, "test_accuracy", "test accuracy (%)", scale=100)
        if target is not None:
            left.axhline(100 * target, color="0.6", lw=0.8, zorder=0)
            where = left.get_yaxis_transform()  # x in parts of the axes, y in data
            mark = left.text(0.005, 100 * target, f"{target:.0%}", fontsize=8, color="0.4", va="bottom")
            mark.set(transform=where, clip_on=True, in_layout=False)  # it may lie outside the picture
        finals = [100 * v for run in runs for v in run.history.column("test_accuracy") if v is not None]
        left.set_ylim(max(0, sorted(finals)[len(finals) // 20] - 2), min(100, max(finals) + 1.5))
    else:
        _draw(left, runs, "test_loss" if tests else "train_loss", "loss", scale=1)
        _log_if_wide(left)
    _draw(
        right, runs, "test_loss" if classifies else "train_loss", "test loss" if classifies else "training loss", 1
    )
    _log_if_wide(right)
    return _with_legend(figure, left, title)


def plot_costs(runs: Sequence[StoredRun], title: str = "") -> Figure:
    """Draw accuracy (or, without labels, loss) against what it cost: simulated time and bytes moved."""
    from matplotlib.figure import Figure

    classifies = any(run.history.best("test_accuracy") is not None for run in runs)
    tests = any(run.history.best("test_loss") is not None for run in runs)
    figure = Figure(figsize=(10, 4.4), layout="constrained")
    field, label, scale = ("test_accuracy", "test accuracy (%)", 100.0)
    if not classifies:
        field, label, scale = ("test_loss" if tests else "train_loss", "loss", 1.0)
    left, right = figure.subplots(1, 2, sharey=True)
    for axes, x, unit, name in (
        (left, "sim_time", 1.0, "simulated seconds"),
        (right, "bytes_total", 1e-6, "MB moved"),
    ):
        _draw(axes, runs, field, label, scale, x, unit)
        axes.set_xlabel(name)
        if not classifies:
            _log_if_wide(axes)
    return _with_legend(figure, left, title)


def _draw(
    axes: Axes,
    runs: Sequence[StoredRun],
    field: str,
    label: str,
    scale: float,
    x: str = "round",
    unit: float = 1.0,
) -> None:
    for i, run in enumerate(runs):
        points = [(unit * r[x], scale * r[field]) for r in run.history if r[field] is not None]
        focus = run.label == "fedagrac"
        axes.plot(
            [p[0] for p in points],
            [p[1] for p in points],
            color="black" if focus else f"C{i % 10}",
            linestyle="-" if focus else STYLES[i % len(STYLES)],
            lw=2.4 if focus else 1.4,
            zorder=5 if focus else 2,
            label=run.label + (" (diverged)" if run.status == "diverged" else ""),
        )
    axes.set(xlabel="round", ylabel=label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def _with_legend(figure: Figure, axes: Axes, title: str) -> Figure:
    """Add the title, and one legend for all axes of the figure."""
    figure.suptitle(title, fontsize=11)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right center", frameon=False, fontsize=9)
    return figure


def _log_if_wide(axes: Axes) -> None:
    """Use a logarithmic scale where values spread; on a narrow range its tick labels would fill the picture."""
    values = [float(y) for line in axes.get_lines() for y in np.asarray(line.get_ydata(), float)]
    if values and min(values) > 0 and max(values) > 3 * min(values):
        axes.set_yscale("log")


def save_curves(runs: Sequence[StoredRun], path: Path, target: float | None = None, title: str = "") -> Path:
    """Write the picture as a PNG file."""
    plot_curves(runs, target, title).savefig(path, dpi=150)
    return path


def save_costs(runs: Sequence[StoredRun], path: Path, title: str = "") -> Path:
    """Write the picture as a PNG file."""
    plot_costs(runs, title).savefig(path, dpi=150)
    return path
