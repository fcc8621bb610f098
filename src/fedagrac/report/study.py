"""The picture of a study: measured errors of the algorithms next to the bounds of the theorems."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedagrac.report.pictures import add_legend, log_axis, new_figure, paper_style, stroke
from fedagrac.report.style import DASH_DOT, DASHED, DOTTED, Look, look_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedagrac.experiments.study import Rate, Study

__all__ = ["plot_study"]

FLOOR = Look("#777777", DASHED, 1.2)
BOUND = Look("#777777", DOTTED, 1.2)
LEADING = Look("#777777", DASH_DOT, 1.2)


def plot_study(study: Study) -> Figure:
    """Draw the error of every algorithm over rounds with the bounds, and over T, M and Kbar; return the figure."""
    rates = study.rates
    with paper_style():
        figure = new_figure(5.2 + 1.9 * len(rates), 4.0)
        panels = figure.subplots(1, 1 + len(rates), squeeze=False, width_ratios=[2.2, *[1] * len(rates)])[0]
        lines = _draw_errors(panels[0], study)
        for axes, rate in zip(panels[1:], rates, strict=True):
            _draw_rate(axes, rate)
        add_legend(figure, lines, "outside lower center", 3)
    return figure


def _draw_errors(axes: Axes, study: Study) -> list[tuple[str, Look]]:
    """Draw the errors and the bounds over rounds; return the labels and looks of the lines."""
    lines: list[tuple[str, Look]] = []
    for curve in study.curves:
        look = look_of(curve.label)
        values = np.where(np.isfinite(curve.errors), np.maximum(curve.errors, 1e-300), np.nan)
        axes.plot(curve.rounds, values, **stroke(look))
        lines.append((curve.label, look))
    c = study.constants
    if c.mu is not None:
        floor = study.bounds[0].total
        if np.all(floor > 0):
            axes.axhline(float(floor), **stroke(FLOOR))
            lines.append(("Theorem 1's floor (up to a constant)", FLOOR))
        T = np.unique(np.geomspace(1, study.rounds, 100).astype(int))
        bound = c.theorem3(study.weights, study.steps, T)
        leading = bound.terms["exponential"] + bound.terms["H / (mu T)"]
        for name, line, look in (("Theorem 3", bound.total, BOUND), ("Theorem 3 without P", leading, LEADING)):
            axes.plot(T, line, **stroke(look))
            lines.append((f"{name} (up to a constant)", look))
    axes.set_yscale("log")
    axes.set(xlabel="round", ylabel="F(x) - F(x*)" if c.mu is not None else "|gradient of F|^2")
    _add_grid(axes)
    return lines


def _draw_rate(axes: Axes, rate: Rate) -> None:
    """Draw the errors over one of T, M and Kbar, and the fitted power law."""
    axes.semilogx(rate.sizes, rate.errors, "o", ms=3.5, color=look_of("fedagrac").colour)
    x = np.array([min(rate.sizes), max(rate.sizes)])
    centre = np.exp(np.mean(np.log(rate.sizes))), np.exp(np.mean(np.log(np.maximum(rate.errors, 1e-300))))
    axes.plot(x, centre[1] * (x / centre[0]) ** rate.slope.value, lw=1, color="0.4")
    axes.set_title(f"{rate.name}: slope {rate.slope.value:.2f}", fontsize=9)
    axes.set(xlabel=rate.name)
    axes.minorticks_off()
    axes.set_xticks(sorted(set(rate.sizes)), [f"{size:.3g}" for size in sorted(set(rate.sizes))])
    log_axis(axes)
    _add_grid(axes)


def _add_grid(axes: Axes) -> None:
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
