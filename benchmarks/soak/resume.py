"""Interrupt and resume every combination of algorithm, engine, sampling mode, participation and step schedule."""

from __future__ import annotations

import shutil
import sys
from typing import TYPE_CHECKING

import torch

from benchmarks.soak.part import TESTS, Part, Promise

if TYPE_CHECKING:
    from pathlib import Path

__all__ = ["run"]


def run(out: Path) -> Part:
    """Run every combination whole and in two parts and compare the bits; only a few with compiled steps."""
    sys.path.insert(0, str(TESTS))
    from interrupted_runs import Problem, combinations, same

    problem, threads = Problem(), torch.get_num_threads()
    torch.set_num_threads(1)  # the models are too small for two
    every = [(one, {}) for one in combinations()]
    compiled = {"engine": "lanes", "compile": True}
    for name, schedule in (("fedprox", "constant"), ("scaffold", "linear"), ("fedagrac", "gaussian random")):
        every.append(((name, "compiled", "replacement", "all", schedule), compiled))
    differ = []
    for combination, options in every:
        folder = out / "resume"
        whole = problem.run(*combination, **options)
        if not same(problem.run_in_two(folder, *combination, **options), whole):
            differ.append(" ".join(combination))
        shutil.rmtree(folder)
    torch.set_num_threads(threads)
    return Part(
        {"combinations": len(every), "that differ": differ},
        [Promise("combinations that are not the same bit for bit", len(differ), "==", 0)],
    )
