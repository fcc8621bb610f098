"""The pictures of a report, one function per figure: PNG for the screen, PDF with real text for papers."""

from __future__ import annotations

import io
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from fedagrac.files import write_atomically
from fedagrac.report.charts import accuracy_range, charts_of, curve, headline, series_of, target_of
from fedagrac.report.clients import strip_range, strips_of
from fedagrac.report.style import SHADE

if TYPE_CHECKING:
    from collections.abc import Sequence
    from contextlib import AbstractContextManager
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedagrac.data.describe import Description
    from fedagrac.report.charts import Chart, Series
    from fedagrac.report.clients import Strip
    from fedagrac.report.style import Look
    from fedagrac.storage.runs import StoredRun

__all__ = [
    "add_legend",
    "log_axis",
    "new_figure",
    "paper_style",
    "plot_chart",
    "plot_clients",
    "plot_costs",
    "plot_curves",
    "plot_label_counts",
    "plot_steps",
    "save",
    "stroke",
]

Place = Literal["outside right center", "outside lower center"]


def paper_style() -> AbstractContextManager[None]:
    """Return a context for text as in a two-column paper; in PDF files it is TrueType, which can be searched."""
    from matplotlib import rc_context

    return rc_context({"font.size": 9, "axes.labelsize": 9, "legend.fontsize": 8, "pdf.fonttype": 42})


def save(figure: Figure, stem: Path) -> Path:
    """Write stem.png (200 dpi) and stem.pdf atomically; return the path of the PNG file."""
    png = stem.with_name(f"{stem.name}.png")
    for path, options in ((png, {"dpi": 200}), (png.with_suffix(".pdf"), {"metadata": {"CreationDate": None}})):
        content = io.BytesIO()
        with paper_style():
            figure.savefig(content, format=path.suffix[1:], **options)
        write_atomically(path, content.getvalue())
        figure.set_layout_engine("none")  # everything has its place; finding it takes as long as drawing
    return png


def new_figure(width: float, height: float) -> Figure:
    """Return an empty figure of the given size in inches that lays out its contents."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def stroke(look: Look) -> dict[str, Any]:
    """Return the options of a matplotlib line that has this look."""
    return {
        "color": look.colour,
        "linestyle": (0, look.pattern) if look.pattern else "-",
        "lw": look.width,
        "zorder": 5 if look.width > 2 else 3,
    }


def plot_curves(runs: Sequence[StoredRun]) -> Figure:
    """Draw accuracy and test loss (or the measured losses) against rounds; return the figure."""
    charts = [chart for chart in charts_of(runs) if chart.x.field == "round"]
    return _side_by_side(charts[:2], runs)


def plot_costs(runs: Sequence[StoredRun]) -> Figure:
    """Draw accuracy (or loss, without labels) against simulated time and bytes moved; return the figure."""
    return _side_by_side([chart for chart in charts_of(runs) if chart.x.field != "round"], runs)


def _side_by_side(charts: Sequence[Chart], runs: Sequence[StoredRun]) -> Figure:
    with paper_style():
        figure = new_figure(9.2, 3.8)
        series = series_of(runs)
        for axes, chart in zip(figure.subplots(1, len(charts), squeeze=False)[0], charts, strict=True):
            _draw(axes, chart, series, target_of(runs))
        figure.suptitle(headline(runs), fontsize=10).set_parse_math(False)
        if max(len(line.note) for line in series) <= 24:
            _legend(figure, series, "outside right center", 1)
        else:
            _legend(figure, series, "outside lower center", _columns(series, 140))
    return figure


def plot_chart(chart: Chart, runs: Sequence[StoredRun]) -> Figure:
    """Draw one chart, sized for a column of a paper; return the figure."""
    with paper_style():
        series = series_of(runs)
        columns = _columns(series, 72)
        figure = new_figure(4.8, 3.2 + 0.17 * -(-len(series) // columns))
        _draw(figure.subplots(), chart, series, target_of(runs))
        _legend(figure, series, "outside lower center", columns)
    return figure


def _columns(series: Sequence[Series], letters: int) -> int:
    """Return how many columns of the legend fit into a width given in letters."""
    return max(1, min(len(series), 3, letters // (max(len(line.note) for line in series) + 8)))


def _draw(axes: Axes, chart: Chart, series: Sequence[Series], target: float | None) -> None:
    from matplotlib.ticker import MaxNLocator

    curves = [curve(line, chart) for line in series]
    for line, points in zip(series, [points.thinned() for points in curves], strict=True):
        axes.plot(points.x, points.y, marker="o" if len(points.x) == 1 else None, **stroke(line.look))
        if len(line.runs) > 1:
            axes.fill_between(
                points.x, points.low, points.high, color=line.look.colour, alpha=0.15, lw=0, zorder=2
            )
    if chart.y.field == "test_accuracy":
        axes.set_ylim(*accuracy_range(curves))
        if target is not None:
            _mark_target(axes, target)
    elif chart.log:
        log_axis(axes)
    if chart.x.field == "round":
        axes.xaxis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.set(xlabel=chart.x.label, ylabel=chart.y.label)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def log_axis(axes: Axes) -> None:
    """Make the y axis logarithmic; up to three decades get labels such as 0.5, 1, 2 instead of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    if high < 1000 * low:
        axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter(NullFormatter())


def _mark_target(axes: Axes, target: float) -> None:
    axes.axhline(100 * target, color="0.6", lw=0.8, zorder=0)
    mark = axes.text(0.005, 100 * target, f"{100 * target:g}%", fontsize=8, color="0.4", va="bottom")
    # x is a fraction of the axes, y a data value; the mark may lie outside the picture
    mark.set(transform=axes.get_yaxis_transform(), clip_on=True, in_layout=False)


def _legend(figure: Figure, series: Sequence[Series], where: Place, columns: int) -> None:
    add_legend(figure, [(line.note, line.look) for line in series], where, columns)


def add_legend(figure: Figure, lines: Sequence[tuple[str, Look]], where: Place, columns: int) -> None:
    """Add one legend for all axes of the figure; labels are shown literally, without math notation."""
    from matplotlib.lines import Line2D

    handles = [Line2D([], [], **stroke(look)) for _, look in lines]
    legend = figure.legend(handles, ["x"] * len(lines), loc=where, ncols=columns, frameon=False, handlelength=3)
    for text, (label, _) in zip(legend.get_texts(), lines, strict=True):
        text.set_parse_math(False)
        text.set_text(label)


def plot_clients(runs: Sequence[StoredRun]) -> Figure:
    """Draw the results of every client, sorted by speed, one panel per algorithm; return the figure."""
    strips = strips_of(runs)
    columns = 1 if len(strips) == 1 else 2
    rows = -(-len(strips) // columns)
    with paper_style():
        figure = new_figure(4.8 * columns, 0.5 + 2.1 * rows)
        grid = figure.subplots(rows, columns, squeeze=False, sharey=True)
        for axes, strip in zip(grid.flat, strips, strict=False):
            _draw_strip(axes, strip)
        for axes in grid.flat[len(strips) :]:
            axes.set_visible(False)
        grid[0, 0].set_ylim(*strip_range(strips))
        for row in grid:
            row[0].set_ylabel(strips[0].field + (" (%)" if strips[0].field == "accuracy" else ""))
        label = "clients, slowest to fastest (mean local steps)"
        if any(strip.after is not None for strip in strips):
            label += "; open: after fine-tuning"
        figure.supxlabel(label, fontsize=9)
    return figure


def _draw_strip(axes: Axes, strip: Strip) -> None:
    """Draw one dot per client, a line at the mean of each group by speed, and the name of the worst client."""
    colour, places = strip.look.colour, strip.places
    size = 10 if len(places) <= 200 else 3
    for left, right, mean in strip.groups:
        axes.hlines(mean, left - 0.4, right + 0.4, color=colour, alpha=0.6, lw=1.5, zorder=2)
    if strip.after is not None:
        after = [np.nan if value is None else value for value in strip.after]
        axes.vlines(places, strip.before, after, color=colour, alpha=0.35, lw=0.6, zorder=2)
        axes.scatter(places, after, s=size, marker="D", facecolors="none", edgecolors=colour, lw=0.7, zorder=3)
    axes.scatter(places, strip.before, s=size, color=colour, lw=0, zorder=3)
    worst, name = strip.worst, strip.names[strip.worst]
    mark = axes.annotate(
        name if len(name) <= 18 else f"{name[:17]}…",
        (places[worst], strip.before[worst]),
        xytext=(4, 0) if places[worst] <= strip.clients / 2 else (-4, 0),
        textcoords="offset points",
        ha="left" if places[worst] <= strip.clients / 2 else "right",
        va="center",
        fontsize=7,
        color="0.35",
    )
    mark.set_parse_math(False)
    axes.set_xticks([place for place, _ in strip.ticks], [text for _, text in strip.ticks])
    axes.set_title(strip.label, fontsize=9).set_parse_math(False)
    axes.grid(axis="y", alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)


def plot_label_counts(federation: Description) -> Figure:
    """Draw the samples per class (rows) and client (columns); return the figure."""
    from matplotlib.colors import LinearSegmentedColormap

    counts = np.array(federation.labels).T
    classes = len(counts)
    with paper_style():
        figure = new_figure(4.8, min(1.3 + 0.2 * classes, 5.0))
        axes = figure.subplots()
        colours = LinearSegmentedColormap.from_list("samples", ["white", SHADE])
        image = axes.imshow(counts, cmap=colours, vmin=0, aspect="auto", interpolation="nearest", origin="lower")
        figure.colorbar(image, label="samples", pad=0.02)
        axes.set(xlabel=_clients_label(federation), ylabel="class")
        if classes <= 20:
            axes.set_yticks(range(classes))
        _client_ticks(axes, federation)
    return figure


def plot_steps(federation: Description) -> Figure:
    """Draw the local steps of each client in round 1 and their weighted mean; return the figure."""
    with paper_style():
        figure = new_figure(4.8, 2.4)
        axes = figure.subplots()
        axes.bar(range(len(federation.steps)), federation.steps, color=SHADE, width=0.8)
        axes.axhline(federation.steps_mean, color="0.35", lw=1, linestyle="--")
        mark = axes.text(
            1.005, federation.steps_mean, f"weighted\nmean {federation.steps_mean:.1f}", fontsize=8, va="center"
        )
        mark.set_transform(axes.get_yaxis_transform())
        axes.set(xlabel=_clients_label(federation), ylabel="local steps in round 1")
        axes.margins(x=0.01)
        axes.spines[["top", "right"]].set_visible(False)
        _client_ticks(axes, federation)
    return figure


def _clients_label(federation: Description) -> str:
    """Return the label of an axis of clients."""
    shown = len(federation.shown)
    if shown == federation.clients:
        return "client"
    return f"client ({shown} of {federation.clients:,}, evenly spaced)"


def _client_ticks(axes: Axes, federation: Description) -> None:
    """Label as many clients as there is room for, with their names if these are short."""
    most = 20 if federation.clients <= 100 else 10 if federation.clients <= 10_000 else 6
    positions = range(0, len(federation.shown), -(-len(federation.shown) // most))
    names = federation.names or []
    short = bool(names) and max(map(len, names)) <= 6
    axes.set_xticks(list(positions), [names[i] if short else str(federation.shown[i]) for i in positions])
