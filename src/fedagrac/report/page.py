"""The report as one HTML page that needs nothing else: no other file, no network.

All text that comes from files is escaped: by Jinja in the page, by `_text` in the curves (whose library reads a
little HTML), and a content policy in the page lets no script run but its own two and no request leave.
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
from fedagrac.report.charts import charts_of, curve, frame, headline, series_of, target_of
from fedagrac.report.style import SHADE
from fedagrac.report.summary import cells, full_columns, summarise

if TYPE_CHECKING:
    from collections.abc import Sequence

    from fedagrac.data.describe import Description
    from fedagrac.report.charts import Chart, Curve, Series
    from fedagrac.report.runs import StoredRun
    from fedagrac.report.style import Look

__all__ = ["render_page"]

MOST_POINTS = 2000
"""More points of a curve than this are thinned on the page; no screen shows them."""

Figure = dict[str, Any]
"""A Plotly figure as plain values: id, title, data, layout."""


def render_page(runs: Sequence[StoredRun]) -> str:
    """Return the page that compares the runs."""
    from jinja2 import Environment, StrictUndefined
    from plotly.offline import get_plotlyjs

    from fedagrac.version import __version__

    series, charts, rows = series_of(runs), charts_of(runs), summarise(runs)
    curves = [_chart_figure(chart, series, target_of(runs)) for chart in charts]
    federations = _federations(runs)
    columns = full_columns(rows)
    names = [row["run"] for row in rows]
    looks = {run.folder: line.look for line in series for run in line.runs}
    script = _file("page.js")
    library = get_plotlyjs()
    page = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    page.filters["dashes"] = _dashes
    return page.from_string(_file("page.html")).render(
        title=headline(runs),
        facts=_facts(runs),
        columns=columns,
        table=list(zip(rows, (looks[run.folder] for run in runs), cells(rows, columns), strict=True)),
        notes=_notes(runs, names),
        seeds=any(len(line.runs) > 1 for line in series),
        thinned=any(len(run.history) > MOST_POINTS for run in runs),
        curves=curves,
        federations=federations,
        settings=_compare(names, [_flat(_settings(run)) for run in runs]),
        environment=_compare(names, [_flat(run.environment) for run in runs]),
        citations=_citations(runs),
        version=__version__,
        figures=[*curves, *(figure for _, _, figures in federations for figure in figures)],
        style=_file("page.css"),
        library=library,
        script=script,
        policy=f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src {_hash(library)} "
        + _hash(script),
    )


def _file(name: str) -> str:
    return resources.files("fedagrac.report").joinpath("template", name).read_text(encoding="utf-8")


def _hash(script: str) -> str:
    """Return how a content policy names a script."""
    return f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"


def _text(text: str) -> str:
    """Return text as Plotly shows it literally: it reads tags and entities."""
    return html.escape(text, quote=False)


def _short(text: str, most: int = 44) -> str:
    """Return text that fits a legend on a phone: beginning and end of what is longer.

    Examples:
        >>> _short("fedagrac, runs of today", 12)
        'fedagr…today'
    """
    return text if len(text) <= most else f"{text[: most // 2]}…{text[-(most // 2 - 1) :]}"


def _dashes(look: Look, width: float) -> str:
    """Return the pattern of a line as SVG and Plotly write it.

    Examples:
        >>> from fedagrac.report.style import look_of
        >>> _dashes(look_of("fedavg"), 2)
        '8px,3.6px'
    """
    return ",".join(f"{width * length:g}px" for length in look.pattern) or "solid"


def _rounded(values: Sequence[float]) -> list[float]:
    return [float(f"{value:.6g}") for value in values]


def _chart_figure(chart: Chart, series: Sequence[Series], target: float | None) -> Figure:
    curves = [curve(line, chart) for line in series]
    data = []
    for number, (line, points) in enumerate(zip(series, curves, strict=True)):
        data += _traces(chart, line, points, f"line{number}")
    accuracy = chart.y.field == "test_accuracy"
    x = [value for points in curves for value in points.x]
    if accuracy and target is not None and x:
        data.append(
            {
                "name": "target",
                "x": _rounded([min(x), max(x)]),
                "y": [100 * target] * 2,
                "text": [f"{100 * target:g}%", ""],
                "mode": "lines+text",
                "textposition": "top right",
                "line": {"color": "#8a919c", "width": 1, "dash": "2px,2px"},
                "showlegend": False,
                "hoverinfo": "skip",
            }
        )
    y: dict[str, Any] = {
        "title": {"text": chart.y.label},
        "nticks": 4 if chart.log else 7,
        "type": "log" if chart.log else "linear",
    }
    if accuracy:
        y["range"] = _rounded(frame(curves))
    layout = {
        "xaxis": {"title": {"text": chart.x.label}, "type": "linear"},
        "yaxis": y,
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "xanchor": "left", "yanchor": "bottom"},
    }
    return {"id": chart.key, "title": chart.title, "log": chart.log, "data": data, "layout": layout}


def _traces(chart: Chart, line: Series, points: Curve, group: str) -> list[dict[str, Any]]:
    """Return the traces of one line: the band of its seeds, if it has several, and the line itself."""
    width = 1.2 * line.look.width
    every = range(0, len(points.x), -(-len(points.x) // MOST_POINTS) or 1)
    kept = sorted({*every, len(points.x) - 1} - {-1})
    x, y, rounds = ([values[i] for i in kept] for values in (points.x, points.y, points.rounds))
    unit = " %" if chart.y.field == "test_accuracy" else ""
    where = "" if chart.x.field == "round" else f"<br>{_text(chart.x.label)} %{{x:.4~g}}"
    traces: list[dict[str, Any]] = []
    if len(line.runs) > 1:
        low, high = ([values[i] for i in kept] for values in (points.low, points.high))
        band = {"fill": "toself", "fillcolor": line.look.rgba(0.15), "line": {"width": 0}, "mode": "lines"}
        across = {"x": _rounded([*x, *x[::-1]]), "y": _rounded([*high, *low[::-1]])}
        traces.append({**across, **band, "legendgroup": group, "showlegend": False, "hoverinfo": "skip"})
    traces.append(
        {
            "name": _text(_short(line.note)),
            "legendgroup": group,
            "x": _rounded(x),
            "y": _rounded(y),
            "customdata": rounds,
            "mode": "markers" if len(x) == 1 else "lines",
            "line": {"color": line.look.colour, "width": width, "dash": _dashes(line.look, width)},
            "marker": {"color": line.look.colour},
            "hovertemplate": "<b>%{fullData.name}</b><br>round %{customdata}<br>"
            f"{_text(chart.y.label.removesuffix(' (%)'))} %{{y:.4~g}}{unit}{where}<extra></extra>",
        }
    )
    return traces


def _federations(runs: Sequence[StoredRun]) -> list[tuple[str, str, list[Figure]]]:
    """Return the heading, one sentence and the pictures of each federation that the runs used, each once."""
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
            sentence += f" The pictures show {len(federation.shown)} clients, evenly spaced."
        figures = [_steps_figure(federation, f"steps-{number}")]
        if federation.labels:
            figures.insert(0, _labels_figure(federation, f"labels-{number}"))
        result.append((heading, sentence, figures))
    return result


def _span(ends: Sequence[int]) -> str:
    return f"{ends[0]:,}" if ends[0] == ends[1] else f"{ends[0]:,} to {ends[1]:,}"


def _labels_figure(federation: Description, key: str) -> Figure:
    labels = federation.labels or []
    clients, classes = [str(i) for i in federation.shown], len(labels[0])
    return {
        "id": key,
        "title": "Who holds which labels",
        "data": [
            {
                "type": "heatmap",
                "x": clients,
                "y": [str(i) for i in range(classes)],
                "z": [[row[i] for row in labels] for i in range(classes)],
                "zmin": 0,
                # from nothing to the full colour, so that it fits a light and a dark page
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
    return min(160 + 24 * len(labels[0]), 700)


def _steps_figure(federation: Description, key: str) -> Figure:
    clients = [str(i) for i in federation.shown]
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
    """Return what the top of the page says about all runs."""

    def each(values: Sequence[Any]) -> str:
        return ", ".join(dict.fromkeys(str(value) for value in values if value is not None))

    flat = [_flat(_settings(run)) for run in runs]
    facts = {
        "data": each([settings.get("data.name") for settings in flat]),
        "model": each([settings.get("model.name") for settings in flat]),
        "rounds": each([settings.get("rounds") for settings in flat]),
        "runs": str(len(runs)),
        "seed": each([run.seed for run in runs]),
        "device": each([run.environment.get("gpu") or run.environment.get("device") for run in runs]),
    }
    return [(name, value) for name, value in facts.items() if value]


def _notes(runs: Sequence[StoredRun], names: Sequence[str]) -> list[str]:
    """Return what a reader of the table must know: runs that did not finish, and FedLin's step size."""
    notes = []
    for run, name in zip(runs, names, strict=True):
        if run.status in ("diverged", "unfinished"):
            notes.append(f"{name} {run.status}: {run.reason}")
        shared, own = run.experiment.get("lr"), run.experiment["algorithm"][0].get("lr")
        if run.algorithm == "fedlin" and shared and own and own != shared:
            factor = f"lr {own:.4g} is {own / shared:.4g} times the shared {shared:g}"
            notes.append(f"{run.label}: {factor}; FedLin divides its steps by K_i.")
    return list(dict.fromkeys(notes))


def _settings(run: StoredRun) -> dict[str, Any]:
    """Return the run's settings; a name that is the run's label anyway is left out."""
    named = {"label", "name"} if run.algorithm == run.label else {"label"}
    entry = {key: value for key, value in run.experiment["algorithm"][0].items() if key not in named}
    return {**run.experiment, "algorithm": entry}


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested tables as one, with dotted keys and values as text.

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
    """Split the tables of the runs into what all share and what differs, run by run."""
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
    """Return BibTeX for the package, the algorithms and the data sets."""
    keys = ["fedagrac"]
    for run in runs:
        keys += REGISTRY[run.algorithm][0].cites if run.algorithm in REGISTRY else ()
        keys += [run.federation.name] if run.federation is not None else []
        keys += [str(run.experiment.get("data", {}).get("name"))]
    return bibtex(key for key in dict.fromkeys(keys) if key in ENTRIES)
