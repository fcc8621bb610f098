"""A picture of the labels that every client holds."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from fedagrac.data.describe import label_counts
from fedagrac.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedagrac.data.federation import Federation

__all__ = ["plot_federation"]


def plot_federation(federation: Federation) -> Figure:
    """Return a figure with a column per client and a row per class; a disc's area is its number of samples."""
    from matplotlib.figure import Figure

    M = federation.num_clients
    counts = label_counts(federation, np.arange(M))
    if counts is None:
        raise InputError("plot", federation.name, "a federation whose targets are class labels")
    classes = counts.shape[1]
    figure = Figure(figsize=(min(2.5 + 0.3 * M, 16), 1.6 + 0.28 * classes), layout="constrained")
    axes = figure.subplots()
    clients, kinds = np.nonzero(counts)
    areas = counts[clients, kinds] / counts.max() * 220
    axes.scatter(clients, kinds, s=areas, c=kinds, cmap="tab10" if classes <= 10 else "viridis", alpha=0.85)
    axes.set(
        xlabel="client",
        ylabel="class",
        title=f"{federation.name}: who holds which labels (largest disc: {counts.max()} samples)",
        yticks=range(classes),
        xlim=(-0.7, M - 0.3),
        ylim=(-0.7, classes - 0.3),
    )
    if M <= 30:
        axes.set_xticks(range(M))
    if M <= 30 and federation.has_names:
        axes.set_xticklabels(federation.names, rotation=90)
    axes.grid(alpha=0.25)
    axes.set_axisbelow(True)
    return figure
