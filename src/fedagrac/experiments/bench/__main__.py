"""Benchmarks without the libraries of the command line: `python -m fedagrac.experiments.bench`."""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterator
from typing import Any

import torch

from fedagrac.experiments.bench.cases import CASES, SWEEPS
from fedagrac.experiments.bench.profile import profile_rounds
from fedagrac.experiments.bench.timing import Bench, cases_for, compare, engines_for, machine, sweep
from fedagrac.files import opener


def main(arguments: list[str] | None = None) -> None:
    """Run benchmarks. Print one JSON line per row, and write a file as it goes."""
    parser = argparse.ArgumentParser(prog="python -m fedagrac.experiments.bench")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--precision", default="float32")
    parser.add_argument("--only", help="cases, separated by commas; '' for none")
    parser.add_argument("--sweeps", default="", help=f"any of {','.join(SWEEPS)}")
    parser.add_argument("--engines")
    parser.add_argument("--budget", type=float, default=10.0)
    parser.add_argument("--profile", action="store_true", help="where the time goes, instead of times")
    parser.add_argument("--json")
    o = parser.parse_args(arguments)
    bench = Bench(o.device, o.precision, o.budget)
    rows: list[dict[str, Any]] = []
    for row in _rows(o, bench):
        rows.append(row)
        print(json.dumps(row), flush=True)
        if o.json:
            with open(o.json, "w", encoding="utf-8", opener=opener) as file:
                json.dump({"machine": machine(o.device), "precision": o.precision, "rows": rows}, file, indent=1)


def _rows(o: argparse.Namespace, bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the rows that the options ask for."""
    names = cases_for(o.device) if o.only is None else list(filter(None, o.only.split(",")))
    if o.profile:
        for name, engine in itertools.product(names, o.engines.split(",") if o.engines else ["auto"]):
            yield profile_rounds(name, CASES[name], engine, bench)
        return
    engines = o.engines.split(",") if o.engines else engines_for(o.device)
    yield from compare(names, engines, bench)
    for name in filter(None, o.sweeps.split(",")):
        yield from sweep(name, engines, bench)


if __name__ == "__main__":
    main()
