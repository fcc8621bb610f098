"""The report as one HTML page that needs no other file and no network.

All text from files is escaped: by Jinja in the page, and by `_text` in the charts, because Plotly interprets some
HTML. Control characters and bidirectional overrides are shown as escapes. A content security policy allows the
page's own two scripts only, and no requests.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
from collections.abc import Mapping
from importlib import resources
from typing import TYPE_CHECKING, Any

from fedagrac.algorithms import REGISTRY
from fedagrac.citations import ENTRIES, bibtex
from fedagrac.parsing import printable
from fedagrac.report.charts import (
    MOST_POINTS,
    accuracy_range,
    charts_of,
    curve,
    headline,
    measures_own_models,
    scales_shared_lr,
    series_of,
    target_of,
)
from fedagrac.report.clients import client_rows, strip_range, strips_of
from fedagrac.report.fleet import COLUMNS, fleet_tables
from fedagrac.report.style import SHADE
from fedagrac.report.summary import full_columns, summarise, table_cells
from fedagrac.rounds.per_client import STATISTICS

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedagrac.data.describe import Description
    from fedagrac.report.charts import Chart, Curve, Series
    from fedagrac.report.clients import Strip
    from fedagrac.report.style import Look
    from fedagrac.storage.runs import StoredRun

__all__ = ["render_page"]

PlotlyFigure = dict[str, Any]
"""A Plotly figure as plain values: id, title, data, layout."""


def render_page(runs: Sequence[StoredRun]) -> str:
    """Return the HTML page that compares the runs."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    from fedagrac.version import __version__

    series, charts, rows = series_of(runs), charts_of(runs), summarise(runs)
    curves = [_chart_figure(chart, series, target_of(runs)) for chart in charts]
    federations = _federations(runs)
    strips = strips_of(runs)
    clients = [_strip_figure(strip, strip_range(strips), f"clients-{i}") for i, strip in enumerate(strips)]
    columns = full_columns(rows)
    names = [row["run"] for row in rows]
    looks = {run.folder: line.look for line in series for run in line.runs}
    script = _file("page.js")
    library = get_plotlyjs()
    page = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True, finalize=_visible
    )
    page.filters["dashes"] = _dashes
    return page.from_string(_file("page.html")).render(
        title=headline(runs),
        facts=_facts(runs),
        columns=columns,
        table=list(zip(rows, (looks[run.folder] for run in runs), table_cells(rows, columns), strict=True)),
        notes=_notes(runs, names),
        seeds=any(len(line.runs) > 1 for line in series),
        thinned=any(len(run.history) > MOST_POINTS for run in runs),
        curves=curves,
        clients=clients,
        client_rows=client_rows(runs),
        client_columns=[name.replace("_", " ") for name in STATISTICS],
        client_field=strips[0].field if strips else "accuracy",
        clients_hidden=any(len(strip.places) < strip.clients for strip in strips),
        fine_tuned=any(strip.after is not None for strip in strips),
        fleets=fleet_tables(runs),
        fleet_columns=COLUMNS,
        federations=federations,
        settings=_compare(names, [_flat(_settings(run)) for run in runs]),
        environment=_compare(names, [_flat(run.environment) for run in runs]),
        citations=_citations(runs),
        version=__version__,
        figures=[*curves, *clients, *(figure for _, _, figures in federations for figure in figures)],
        style=_file("page.css"),
        library=library,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {_hash(library)} "
        + _hash(script),
    )


def _file(name: str) -> str:
    """Return the text of a template file."""
    return resources.files("fedagrac.report").joinpath("template", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return the hash of a script in the notation of a content security policy."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _visible(value: Any) -> Any:
    """Return a text with its control characters as escapes; what is markup already, or no text, stays as it is."""
    is_text = isinstance(value, str) and not hasattr(value, "__html__")
    return printable(value, lines=True) if is_text else value


def _text(text: str) -> str:
    """Escape text for Plotly, which interprets tags and entities."""
    return html.escape(printable(text), quote=False)


def _names(federation: Description) -> list[str]:
    """Return the names of the shown clients for the axis of a chart. They are distinct."""
    names = federation.names or [str(i) for i in federation.shown]
    texts = [_text(_short(name)) for name in names]
    return texts if len(set(texts)) == len(texts) else [f"{text} ({i})" for i, text in enumerate(texts)]


def _short(text: str, most: int = 44) -> str:
    """Shorten text to fit a legend on a phone; keep its beginning and its end.

    Examples:
        >>> _short("fedagrac, runs of today", 12)
        'fedagr…today'
    """
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


def _dashes(look: Look, width: float) -> str:
    """Return the dash pattern of a line in the notation of SVG and Plotly.

    Examples:
        >>> from fedagrac.report.style import look_of
        >>> _dashes(look_of("fedavg"), 2)
        '8px,3.6px'
    """
    return ",".join(f"{width * length:g}px" for length in look.pattern) or "solid"


def _rounded(values: Sequence[float]) -> list[float]:
    """Round values to six significant digits, to keep the page small."""
    return [float(f"{value:.6g}") for value in values]


def _chart_figure(chart: Chart, series: Sequence[Series], target: float | None) -> PlotlyFigure:
    """Return a chart with all series, and with the target where the chart shows accuracy."""
    curves = [curve(line, chart) for line in series]
    data = []
    for number, (line, points) in enumerate(zip(series, curves, strict=True)):
        data += _traces(chart, line, points, f"line{number}")
    accuracy = chart.y.field == "test_accuracy"
    x = [value for points in curves for value in points.x]
    if accuracy and target is not None and x:
        data.append(_target_trace(target, min(x), max(x)))
    y: dict[str, Any] = {
        "title": {"text": chart.y.label},
        "nticks": 4 if chart.log else 7,
        "type": "log" if chart.log else "linear",
    }
    if accuracy:
        y["range"] = _rounded(accuracy_range(curves))
    layout = {
        "xaxis": {"title": {"text": chart.x.label}, "type": "linear"},
        "yaxis": y,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
    }
    return {"id": chart.key, "title": chart.title, "log": chart.log, "data": data, "layout": layout}


def _target_trace(target: float, left: float, right: float) -> dict[str, Any]:
    """Return the trace of the line that marks the target accuracy."""
    return {
        "name": "target",
        "x": _rounded([left, right]),
        "y": [100 * target] * 2,
        "text": [f"{100 * target:g}%", ""],
        "mode": "lines+text",
        "textposition": "top right",
        "line": {"color": "#8a919c", "width": 1, "dash": "2px,2px"},
        "showlegend": False,
        "hoverinfo": "skip",
    }


def _traces(chart: Chart, series: Series, points: Curve, group: str) -> list[dict[str, Any]]:
    """Return the traces of one series: the line, and before it the band of its seeds if there are several."""
    width = 1.2 * series.look.width
    points = points.thinned()
    x, y = points.x, points.y
    unit = " %" if chart.y.field == "test_accuracy" else ""
    x_value = "" if chart.x.field == "round" else f"<br>{_text(chart.x.label)} %{{x:.4~g}}"
    traces: list[dict[str, Any]] = []
    if len(series.runs) > 1:
        band = {"fill": "toself", "fillcolor": series.look.rgba(0.15), "line": {"width": 0}, "mode": "lines"}
        across = {"x": _rounded([*x, *x[::-1]]), "y": _rounded([*points.high, *points.low[::-1]])}
        traces.append({**across, **band, "legendgroup": group, "showlegend": False, "hoverinfo": "skip"})
    traces.append(
        {
            "name": _text(_short(series.note)),
            "legendgroup": group,
            "x": _rounded(x),
            "y": _rounded(y),
            "customdata": points.rounds,
            "mode": "markers" if len(x) == 1 else "lines",
            "line": {"color": series.look.colour, "width": width, "dash": _dashes(series.look, width)},
            "marker": {"color": series.look.colour},
            "hovertemplate": "<b>%{fullData.name}</b><br>round %{customdata}<br>"
            f"{_text(chart.y.label.removesuffix(' (%)'))} %{{y:.4~g}}{unit}{x_value}<extra></extra>",
        }
    )
    return traces


def _strip_figure(strip: Strip, ends: tuple[float, float], key: str) -> PlotlyFigure:
    """Return one dot per client, slowest first, with a line at the mean of each group by speed."""
    unit = " %" if strip.field == "accuracy" else ""
    colour, places = strip.look.colour, strip.places
    facts = [
        [_text(_short(name)), "unknown" if k is None else f"{k:.4g}", n]
        for name, k, n in zip(strip.names, strip.steps, strip.samples, strict=True)
    ]
    hover = "<b>%{customdata[0]}</b><br>%{customdata[1]} local steps, %{customdata[2]} test samples<br>"
    dots = {"x": places, "customdata": facts, "mode": "markers", "showlegend": False}
    data: list[dict[str, Any]] = []
    for left, right, mean in strip.groups:
        line = {"x": [left - 0.4, right + 0.4], "y": _rounded([mean] * 2), "mode": "lines", "showlegend": False}
        data.append({**line, "line": {"color": strip.look.rgba(0.6), "width": 2}, "hoverinfo": "skip"})
    if strip.after is not None:
        x: list[float | None] = []
        y: list[float | None] = []
        for place, one, other in zip(places, strip.before, strip.after, strict=True):
            x += [place, place, None]
            y += [one, other, None]
        joint = {"x": x, "y": y, "mode": "lines", "line": {"color": strip.look.rgba(0.35), "width": 1}}
        data.append({**joint, "showlegend": False, "hoverinfo": "skip"})
    template = f"{strip.field} %{{y:.4~g}}{unit}<extra></extra>"
    size = 6 if len(places) <= 200 else 4
    filled = {"color": colour, "size": size}
    data.append({**dots, "y": _rounded(strip.before), "marker": filled, "hovertemplate": hover + template})
    if strip.after is not None:
        empty = {"color": colour, "size": size + 1, "symbol": "diamond-open"}
        tuned = f"{hover}fine-tuned: {template}"
        data.append({**dots, "y": strip.after, "marker": empty, "hovertemplate": tuned})
    layout = {
        "height": 300,
        "xaxis": {
            "title": {"text": "clients, slowest to fastest (mean local steps)"},
            "tickvals": [place for place, _ in strip.ticks],
            "ticktext": [text for _, text in strip.ticks],
            "showgrid": False,
        },
        "yaxis": {"title": {"text": strip.field + (" (%)" if unit else "")}, "range": _rounded(ends)},
    }
    return {"id": key, "title": strip.label, "data": data, "layout": layout}


def _federations(runs: Sequence[StoredRun]) -> list[tuple[str, str, list[PlotlyFigure]]]:
    """Return a heading, a sentence and the figures for each federation that the runs used."""
    used: dict[str, tuple[Description, list[str]]] = {}
    for run in runs:
        if run.federation is not None:
            _, names = used.setdefault(repr(run.federation), (run.federation, []))
            names.append(run.folder.resolve().parent.name)
    result = []
    for number, (federation, names) in enumerate(used.values()):
        heading = f"{federation.name}, in {', '.join(dict.fromkeys(names))}" if len(used) > 1 else federation.name
        sizes, steps = _span(federation.sizes_range), _span(federation.steps_range)
        sentence = (
            f"{federation.samples:,} samples on {federation.clients:,} clients, {sizes} each; {steps} local steps "
            f"in round 1, weighted mean {federation.steps_mean:,.1f}."
        )
        if len(federation.shown) < federation.clients:
            sentence += f" The figures show {len(federation.shown)} evenly spaced clients."
        figures = [_steps_figure(federation, f"steps-{number}")]
        if federation.labels:
            figures.insert(0, _labels_figure(federation, f"labels-{number}"))
        result.append((heading, sentence, figures))
    return result


def _span(ends: Sequence[int]) -> str:
    """Return a range as text."""
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"


def _labels_figure(federation: Description, key: str) -> PlotlyFigure:
    """Return the heat map of samples per class and client."""
    labels = federation.labels or []
    clients, classes = _names(federation), len(labels[0])
    return {
        "id": key,
        "title": "Samples per class and client",
        "data": [
            {
                "type": "heatmap",
                "x": clients,
                "y": [str(i) for i in range(classes)],
                "z": [[row[i] for row in labels] for i in range(classes)],
                "zmin": 0,
                # from transparent to the full colour, which suits a light and a dark page
                "colorscale": [[0, f"{SHADE}00"], [1, SHADE]],
                "colorbar": {"title": {"text": "samples"}, "thickness": 12, "outlinewidth": 0},
                "hovertemplate": "client %{x}, class %{y}<br>%{z} samples<extra></extra>",
                "xgap": 1 if len(clients) <= 40 else 0,
                "ygap": 1,
            }
        ],
        "layout": {
            "height": _height(labels),
            "xaxis": {"title": {"text": "client"}, "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": "class"}, "type": "category", "showgrid": False},
        },
    }


def _height(labels: list[list[int]]) -> int:
    """Return the height of the heat map in pixels."""
    return min(160 + 24 * len(labels[0]), 700)


def _steps_figure(federation: Description, key: str) -> PlotlyFigure:
    """Return the bar chart of the local steps of each client in round 1."""
    clients = _names(federation)
    return {
        "id": key,
        "title": "Local steps in round 1",
        "data": [
            {
                "type": "bar",
                "x": clients,
                "y": federation.steps,
                "customdata": federation.sizes,
                "marker": {"color": SHADE},
                "hovertemplate": "client %{x}<br>%{y} steps<br>%{customdata} samples<extra></extra>",
                "showlegend": False,
            },
            {
                "x": clients,
                "y": [federation.steps_mean] * len(clients),
                "name": "weighted mean",
                "mode": "lines",
                "line": {"color": "#8a919c", "width": 1.5, "dash": "4px,3px"},
                "hovertemplate": f"weighted mean {federation.steps_mean:.1f}<extra></extra>",
                "showlegend": False,
            },
        ],
        "layout": {
            "height": 300 if federation.labels is None else _height(federation.labels),
            "xaxis": {"title": {"text": "client"}, "type": "category", "showgrid": False},
            "yaxis": {"title": {"text": "local steps"}, "rangemode": "tozero"},
        },
    }


def _facts(runs: Sequence[StoredRun]) -> list[tuple[str, str]]:
    """Return the names and values of the facts at the top of the page."""

    def distinct(values: Sequence[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    flat = [_flat(_settings(run)) for run in runs]
    facts = {
        "data": distinct([settings.get("data.name") for settings in flat]),
        "model": distinct([settings.get("model.name") for settings in flat]),
        "rounds": distinct([settings.get("rounds") for settings in flat]),
        "runs": str(len(runs)),
        "seed": distinct([run.seed for run in runs]),
        "device": distinct([run.environment.get("gpu") or run.environment.get("device") for run in runs]),
    }
    return [(name, value) for name, value in facts.items() if value]


def _notes(runs: Sequence[StoredRun], names: Sequence[str]) -> list[str]:
    """Return the notes below the table: runs that did not finish, scaled learning rates, models of clients."""
    notes = []
    for run, name in zip(runs, names, strict=True):
        if run.status in ("diverged", "unfinished"):
            notes.append(f"{name} {run.status}: {run.reason}")
        shared, lr = run.experiment.get("lr"), run.algorithm_settings.get("lr")
        numbers = isinstance(shared, int | float) and isinstance(lr, int | float)
        if scales_shared_lr(run) and numbers and shared and lr and lr != shared:
            factor = f"lr {lr:.4g} is {lr / shared:.4g} times the shared {shared:g}"
            notes.append(f"{run.label}: {factor}, because {run.algorithm} divides its step size by K_i.")
        if measures_own_models(run):
            notes.append(f"{run.label}: test results are those of the clients' own models, not of one for all.")
    return list(dict.fromkeys(notes))


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the run's settings without its label, and without the algorithm's name if that equals the label."""
    omitted = {"label", "name"} if run.algorithm == run.label else {"label"}
    algorithm = {
        key: _phrase(value) if isinstance(value, Mapping) else value
        for key, value in run.algorithm_settings.items()
        if key not in omitted
    }
    return {**run.experiment, "algorithm": algorithm}


def _phrase(table: Mapping[str, Any]) -> str:
    """Return a table inside the settings of an algorithm as one text, its kind or name first.

    Examples:
        >>> _phrase({"kind": "adam", "betas": [0.9, 0.99], "eps": 1e-8})
        'adam: betas [0.9, 0.99], eps 1e-08'
        >>> _phrase({"0": 0.1, "50": 0.01})
        '0 0.1, 50 0.01'
    """
    whole = _flat({key: _phrase(value) if isinstance(value, Mapping) else value for key, value in table.items()})
    title = whole.pop("kind", None) or whole.pop("name", None)
    words = ", ".join(f"{key} {value}" for key, value in whole.items())
    return ": ".join(filter(None, (title, words)))


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten nested tables into one with dotted keys; return its values as text.

    Examples:
        >>> _flat({"rounds": 5, "data": {"name": "digits", "balance": True}})
        {'rounds': '5', 'data.name': 'digits', 'data.balance': 'true'}
    """
    result: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            result.update(_flat(value, f"{prefix}{key}."))
        elif isinstance(value, float):
            result[prefix + key] = f"{value:.6g}"
        else:
            result[prefix + key] = value if isinstance(value, str) else json.dumps(value, default=str)
    return result


def _compare(names: Sequence[str], tables: Sequence[dict[str, str]]) -> dict[str, Any]:
    """Return the values that all tables share, and the others run by run."""
    keys = list(dict.fromkeys(key for table in tables for key in table))
    same = [key for key in keys if len({table.get(key) for table in tables}) == 1]
    different = [key for key in keys if key not in same]
    short = {key: key.removeprefix("algorithm.") for key in different}
    return {
        "shared": [(key, tables[0][key]) for key in same],
        "keys": [key if short[key] in (*keys, "name") else short[key] for key in different],
        "rows": [
            (name, [table.get(key, "") for key in different]) for name, table in zip(names, tables, strict=True)
        ],
    }


def _citations(runs: Sequence[StoredRun]) -> str:
    """Return BibTeX for the package, and for the algorithms and data sets of the runs."""
    keys = ["fedagrac"]
    for run in runs:
        for name in run.algorithms:
            keys += REGISTRY[name][0].cites if name in REGISTRY else ()
        keys += [run.federation.name] if run.federation is not None else []
        keys += [str(run.experiment.get("data", {}).get("name"))]
    return bibtex(key for key in dict.fromkeys(keys) if key in ENTRIES)
