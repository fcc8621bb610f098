"""A part of the soak or of the attack: its figures and promises, and the command that runs parts in turn."""

from __future__ import annotations

import argparse
import json
import operator
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from fedagrac.storage.environment import environment

__all__ = ["TESTS", "Part", "Promise", "run_parts"]

TESTS = Path(__file__).resolve().parents[2] / "tests"
"""The folder of the programs that `make test` runs in a shorter form."""

KEPT = {"<=": operator.le, "==": operator.eq, ">=": operator.ge}


@dataclass(frozen=True)
class Promise:
    """A measurement that must be <=, == or >= a limit."""

    text: str
    measured: float
    relation: str
    limit: float

    @property
    def kept(self) -> bool:
        """Whether the promise holds; it does not if the measurement is NaN."""
        return bool(KEPT[self.relation](self.measured, self.limit))


@dataclass
class Part:
    """The figures of a part by name, and its promises."""

    figures: dict[str, Any] = field(default_factory=dict)
    promises: list[Promise] = field(default_factory=list)


def run_parts(name: str, description: str, parts: Mapping[str, Callable[[Path], Part]]) -> int:
    """Run the parts that the command line names, or all. Print and write their figures; return the exit code."""
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}", description=description)
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(parts)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    if unknown := [part for part in options.parts if part not in parts]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(parts)}")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out: {options.out} is not empty")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": environment(), "parts": {}}
    broken = 0
    for chosen in options.parts or parts:
        begun = time.perf_counter()
        part = parts[chosen](options.out)
        took = time.perf_counter() - begun
        promises = [{**asdict(promise), "kept": promise.kept} for promise in part.promises]
        results["parts"][chosen] = {"seconds": took, "figures": part.figures, "promises": promises}
        (options.out / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        broken += sum(not promise.kept for promise in part.promises)
        _print(chosen, took, part)
    return int(broken > 0)


def _print(name: str, seconds: float, part: Part) -> None:
    """Print the figures and promises of a part."""
    print(f"{name} ({seconds:.0f} s)")
    for key, value in part.figures.items():
        print(f"  {key:<28}{_shown(value)}")
    for promise in part.promises:
        comparison = f"{promise.measured:.6g} {promise.relation} {promise.limit:.6g}"
        print(f"  {'kept  ' if promise.kept else 'BROKEN'}  {promise.text}: {comparison}", flush=True)


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {_shown(one)}" for key, one in value.items())
    if isinstance(value, list):
        return " ".join(map(_shown, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)
