"""Heat maps of a grid: one panel per algorithm or setting, with the value in every box and a frame on the best."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedagrac.report.pictures import new_figure, paper_style

if TYPE_CHECKING:
    from collections.abc import Sequence

    from matplotlib.axes import Axes
    from matplotlib.colors import Normalize
    from matplotlib.figure import Figure

__all__ = ["HeatMap", "plot_heat_maps"]


@dataclass(frozen=True)
class HeatMap:
    """One panel of a heat map.

    Attributes:
        title: the heading of the panel.
        down, across: the settings that vary from row to row and from column to column; empty if none does.
        rows, columns: the values of these settings.
        values: the numbers, row by row; None if there is no number, NaN if a run diverged.
        what: the name of the quantity.
        larger_is_better: whether the largest value is the best, or the smallest.
    """

    title: str
    down: str
    rows: tuple[str, ...]
    across: str
    columns: tuple[str, ...]
    values: tuple[tuple[float | None, ...], ...]
    what: str
    larger_is_better: bool = True


def plot_heat_maps(maps: Sequence[HeatMap], across: int = 3, one_scale: bool = True) -> Figure:
    """Draw the panels, `across` of them side by side; return the figure. Darker is better.

    The panels share one colour scale, or each has its own if `one_scale` is False.
    """
    from matplotlib.cm import ScalarMappable

    columns = min(across, len(maps))
    rows = -(-len(maps) // columns)
    width = sum(_size(m)[0] for m in _widest(maps, columns))
    height = rows * max(_size(m)[1] for m in maps)
    with paper_style():
        figure = new_figure(max(3.2, width + 0.9), max(1.6, height + 0.3))
        axes = figure.subplots(rows, columns, squeeze=False)
        for place in axes.flat[len(maps) :]:
            place.set_visible(False)
        colours = "Blues" if maps[0].larger_is_better else "Blues_r"
        for place, m in zip(axes.flat, maps, strict=False):
            _draw(place, m, _scale(maps if one_scale else [m]), colours)
        if one_scale:
            bar = figure.colorbar(ScalarMappable(_scale(maps), colours), ax=axes, shrink=0.8, pad=0.02)
            bar.set_label(maps[0].what)
        else:
            figure.suptitle(maps[0].what, fontsize=9)
    return figure


def _scale(maps: Sequence[HeatMap]) -> Normalize:
    """Return the colour scale that covers the numbers of the panels."""
    from matplotlib.colors import Normalize

    known = [
        value for m in maps for row in m.values for value in row if value is not None and not math.isnan(value)
    ]
    return Normalize(min(known, default=0.0), max(known, default=1.0))


def _widest(maps: Sequence[HeatMap], columns: int) -> list[HeatMap]:
    """Return the widest panel of each column."""
    return [max(maps[i::columns], key=lambda m: _size(m)[0]) for i in range(columns)]


def _size(m: HeatMap) -> tuple[float, float]:
    """Return the width and height of a panel in inches."""
    return 0.9 + 0.5 * len(m.columns), 0.75 + 0.3 * len(m.rows)


def _draw(axes: Axes, m: HeatMap, scale: Normalize, colours: str) -> None:
    from matplotlib.patches import Rectangle

    numbers = np.array([[np.nan if v is None else v for v in row] for row in m.values], dtype=float)
    axes.imshow(numbers, cmap=colours, norm=scale, aspect="auto")
    known = numbers[np.isfinite(numbers)]
    best = None if not len(known) else (known.max() if m.larger_is_better else known.min())
    for (y, x), value in np.ndenumerate(numbers):
        text = f"{value:.3g}" if abs(value) < 1 else f"{value:.1f}"
        if np.isnan(value):
            text = "-" if m.values[y][x] is None else "div."
        shade = 0.0 if np.isnan(value) else float(scale(value))
        dark = shade > 0.55 if m.larger_is_better else (shade < 0.45 and not np.isnan(value))
        axes.text(x, y, text, ha="center", va="center", fontsize=7, color="white" if dark else "black")
        if value == best:
            axes.add_patch(Rectangle((x - 0.5, y - 0.5), 1, 1, fill=False, edgecolor="#dd2c22", lw=1.6, zorder=5))
    axes.set_xticks(range(len(m.columns)), m.columns)
    axes.set_yticks(range(len(m.rows)), m.rows)
    axes.tick_params(length=0, labelsize=7)
    axes.set_title(m.title, fontsize=9)
    axes.set(xlabel=m.across, ylabel=m.down)
