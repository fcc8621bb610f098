"""A result in five lines of text, and as a picture."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from fedagrac.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from fedagrac.algorithms import Algorithm
    from fedagrac.rounds.record import History, SimulationResult

__all__ = ["five_lines", "plot_result"]


def five_lines(result: SimulationResult) -> str:
    """Return what ran, how it ended, what the model achieved, the work of the clients, and the costs."""
    history = result.history
    fed = "clients on other machines" if result.federation is None else repr(result.federation)
    ran = f"{settings_text(result.algorithm)} on {fed}"
    return "\n".join([ran, f"{result.status}: {result.reason}", _measured(history), *_spent(history)])


def settings_text(algorithm: Algorithm) -> str:
    """Return an algorithm with its step size and the settings that are not the default ones.

    Examples:
        >>> from fedagrac.algorithms import FedaGrac
        >>> settings_text(FedaGrac(lr=0.1)), settings_text(FedaGrac(lr=0.1, calibration=0.5))
        ('FedaGrac(lr=0.1)', 'FedaGrac(lr=0.1, calibration=0.5)')
    """
    fields = [(field, getattr(algorithm, field.name)) for field in dataclasses.fields(algorithm) if field.init]
    shown = [f"{field.name}={value!r}" for field, value in fields if not _default(field, value)]
    return f"{type(algorithm).__name__}({', '.join(shown)})"


def _default(field: dataclasses.Field[object], value: object) -> bool:
    """Return whether a field has its default value."""
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return field.default is not dataclasses.MISSING and bool(value == field.default)


def _measured(history: History) -> str:
    """Return the last and the best accuracy, or else the last loss."""
    last = next((r for r in reversed(history) if r.test_loss is not None or r.test_accuracy is not None), None)
    if last is None:
        return "the model was not tested"
    texts = []
    if last.test_accuracy is not None:
        best = history.best("test_accuracy")
        texts.append(f"test accuracy {last.test_accuracy:.4f} (best {best:.4f})")
    if last.test_loss is not None:
        texts.append(f"test loss {last.test_loss:.4g}")
    return f"{', '.join(texts)} after round {last.round}"


def _spent(history: History) -> list[str]:
    """Return the line of the clients' work and the line of the costs."""
    if not history:
        return ["no round was done", "nothing was spent"]
    last = history[-1]
    clients, steps = (
        sum(column) / len(history) for column in (history.column("clients"), history.column("steps_mean"))
    )
    loss = "not finite" if last.train_loss is None else f"{last.train_loss:.4g}"
    work = f"train loss {loss}; {clients:g} clients x {steps:.4g} local steps a round"
    costs = f"{last.bytes_total / 1e6:.4g} MB moved, {last.sim_time:.4g} s simulated, {last.wall_time:.3g} s here"
    return [work, costs]


def plot_result(result: SimulationResult) -> Figure:
    """Draw test accuracy, if it was measured, and the losses against rounds; return the figure.

    Raises:
        InputError: the run has no rounds.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    history = result.history
    if not history:
        raise InputError("plot", "no rounds", "a run that has done a round")
    rounds = history.column("round")
    panels = [("losses", {"train loss": "train_loss", "test loss": "test_loss"})]
    if any(value is not None for value in history.column("test_accuracy")):
        panels.insert(0, ("test accuracy", {"test accuracy": "test_accuracy"}))
    figure = Figure(figsize=(4.6 * len(panels), 3.4), layout="constrained")
    for axes, (title, lines) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        for label, field in lines.items():
            points = [
                (t, value) for t, value in zip(rounds, history.column(field), strict=True) if value is not None
            ]
            if points:
                axes.plot(*zip(*points, strict=True), label=label, marker="o" if len(points) == 1 else None)
        axes.set(xlabel="round", ylabel=title)
        if len(lines) > 1:
            axes.legend(frameon=False)
        axes.xaxis.set_major_locator(MaxNLocator("auto", integer=True))
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(settings_text(result.algorithm), fontsize=10).set_parse_math(False)
    return figure
