"""The command `fedagrac doctor`."""

from __future__ import annotations

import json
import os
from pathlib import Path

from fedagrac.cli.options import Json
from fedagrac.cli.printing import Terminal, one_line, plain_table

__all__ = ["doctor"]

REQUIRED = [
    "torch",
    "numpy",
    "pandas",
    "scikit-learn",
    "safetensors",
    "typer",
    "rich",
    "pydantic",
    "pooch",
    "matplotlib",
    "plotly",
    "jinja2",
]
EXTRAS = {"flwr": "flower", "tensorboard": "tensorboard", "mlflow": "mlflow"}
"""The extra of this package that installs an optional package."""


def doctor(as_json: Json = False) -> None:
    """Print installed versions, usable devices and engines, and where data and runs are kept.

    For anything that is missing it prints how to get it.

    [bold]Example[/]
      fedagrac doctor --json
    """
    findings = _findings()
    if as_json:
        print(json.dumps(findings))
        return
    table = plain_table(show_header=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for section, facts in findings.items():
        table.add_row(f"[underline]{section}[/]", "")
        for name, value in facts.items():
            table.add_row(f"  {one_line(name)}", one_line(value))
    Terminal().print(table, highlight=False)


def _findings() -> dict[str, dict[str, str]]:
    """Return what is printed: facts by name, by section."""
    import fedagrac
    from fedagrac.data import DATASETS
    from fedagrac.data.locating import data_roots

    return {
        "versions": _versions(),
        "devices": _devices(),
        "engines": _engines(),
        "data": {name: _location(name) for name in DATASETS},
        "folders": {
            "data": str(data_roots()[0]),
            "runs": str(Path("runs").absolute()),
            "package": str(Path(fedagrac.__file__).parent),
        },
    }


def _versions() -> dict[str, str]:
    """Return the versions of Python and of the packages."""
    import platform
    from importlib import metadata

    from fedagrac.version import __version__

    versions = {"fedagrac": __version__, "python": platform.python_version()}
    for name in (*REQUIRED, *EXTRAS):
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            command = f" (pip install 'fedagrac[{EXTRAS[name]}]')" if name in EXTRAS else ""
            versions[name] = f"not installed{command}"
    return versions


def _devices() -> dict[str, str]:
    """Return the devices, and whether torch can use them."""
    import torch

    devices = {"cpu": f"usable, cores: {os.cpu_count()}, threads of torch: {torch.get_num_threads()}"}
    if not torch.cuda.is_available():
        devices["cuda"] = "not usable: torch finds no GPU"
        return devices
    for i in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(i)
        devices[f"cuda:{i}"] = f"usable, {properties.name}, {properties.total_memory / 2**30:.0f} GiB"
    return devices


def _engines() -> dict[str, str]:
    """Return the engines, the rule by which one is chosen, and what was measured on this machine."""
    import shutil

    from fedagrac.engines import measured_choices
    from fedagrac.engines.choice import COMPILE_FROM, MEASURE_FROM
    from fedagrac.engines.lanes.routes import measured_routes

    compiler = os.environ.get("CXX") or next((c for c in ("g++", "clang++", "c++") if shutil.which(c)), None)
    engines = {
        "serial": "usable",
        "lanes": "usable",
        "compiled steps": f"usable with {compiler}" if compiler else "not usable: no C++ compiler found (g++)",
        "auto": (
            f"below {MEASURE_FROM:,} client-steps: lanes on a GPU and for small models, otherwise serial; longer "
            "runs measure the engines and take the fastest; compiled steps are considered for runs of over "
            f"{COMPILE_FROM:.0f} s"
        ),
    }
    for choice in measured_choices():
        rows = sorted(choice["candidates"].items(), key=lambda row: float(row[1]["us"]))
        times = ", ".join(f"{engine} {row['us']:.3g}" for engine, row in rows)
        name = f"{choice.get('model')}, {choice.get('parameters')} parameters, {choice.get('lanes')} lanes"
        name += f", threads: {choice.get('threads')}"
        engines[name] = f"us per client-step on {choice.get('device')}: {times}"
    shapes = len(measured_routes())
    if shapes:
        engines["convolutions"] = f"shapes measured: {shapes}; each takes its fastest route"
    return engines


def _location(name: str) -> str:
    """Return where a data set is, or how to get it."""
    from fedagrac.data.catalogue import DATA_FILES
    from fedagrac.data.locating import locate

    if name not in DATA_FILES:
        return "built in"
    folder = locate(name)
    return f"in {folder}" if folder else f"not found; download it with: fedagrac data fetch {name}"
