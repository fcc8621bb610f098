"""Run the parts of the soak in turn and print their figures and whether every promise holds.

    python -m benchmarks.soak [PART ...] [--out DIR]

Run it from the root of the repository. It writes soak.json and the files of all parts to DIR (default:
runs/soak-TIME). The exit code is 1 if a promise is broken.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.soak import checkpoint, clients, concurrent, inputs, kills, resume, rounds
from benchmarks.soak.part import Part
from fedagrac.storage.environment import environment

PARTS = {
    "resume": resume.run,
    "kills": kills.run,
    "inputs": inputs.run,
    "rounds": rounds.run,
    "clients": clients.run,
    "concurrent": concurrent.run,
    "checkpoint": checkpoint.run,
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"{', '.join(PARTS)} (default: all)")
    parser.add_argument("--out", type=Path, default=Path("runs") / f"soak-{time.strftime('%Y%m%d-%H%M%S')}")
    options = parser.parse_args()
    if unknown := [name for name in options.parts if name not in PARTS]:
        parser.error(f"no part {unknown[0]!r}; there are {', '.join(PARTS)}")
    if options.out.exists() and any(options.out.iterdir()):
        parser.error(f"--out: {options.out} is not empty")
    options.out.mkdir(parents=True, exist_ok=True)
    results: dict[str, Any] = {"environment": environment(), "parts": {}}
    broken = 0
    for name in options.parts or PARTS:
        begun = time.perf_counter()
        part = PARTS[name](options.out)
        took = time.perf_counter() - begun
        promises = [{**asdict(promise), "kept": promise.kept} for promise in part.promises]
        results["parts"][name] = {"seconds": took, "figures": part.figures, "promises": promises}
        (options.out / "soak.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        broken += sum(not promise.kept for promise in part.promises)
        _print(name, took, part)
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


if __name__ == "__main__":
    sys.exit(main())
