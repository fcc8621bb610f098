"""The table of all algorithms in the docs, made from the code: `python -m fedagrac.algorithms.table` prints it."""

from __future__ import annotations

import inspect
import re

import numpy as np
import torch

from fedagrac.algorithms import REGISTRY, Algorithm, algorithm
from fedagrac.citations import ENTRIES
from fedagrac.core.cohort import Cohort

__all__ = ["names", "table"]

COLUMNS = ("name", "class", "paper", "rule", "server keeps", "exchanges", "more gradients", "down", "up")


def names() -> str:
    """Return all registered names in Markdown.

    Examples:
        >>> names().split(", ")[:2]
        ['`fedavg`', '`fedprox`']
    """
    return ", ".join(f"`{name}`" for name in REGISTRY)


def table() -> str:
    """Return the table of all registered algorithms, with their default settings, in Markdown.

    Examples:
        >>> print(table().splitlines()[0])
        | name | class | paper | rule | server keeps | exchanges | more gradients | down | up |
    """
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_row(name))} |" for name in REGISTRY)])


def _row(name: str) -> list[str]:
    """Return the cells of an algorithm."""
    cls, fixed = REGISTRY[name]
    one = algorithm(name, lr=0.1)
    rule = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
    rule = re.sub(r"\|([^|]*)\|", r"norm(\1)", rule)  # a bar would end a cell
    rule += "".join(f'; {key} = "{value}"' for key, value in fixed.items())
    page = cls.__module__.rpartition(".")[2]
    papers = ", ".join(_paper(ENTRIES[key]) for key in cls.cites)
    return [
        f"[`{name}`]({page}.md)",
        f"`{cls.__name__}`",
        papers,
        f"`{rule}`",
        _kept(one),
        str(one.traits.exchanges),
        *_costs(one),
    ]


def _paper(entry: str) -> str:
    """Return the first author and the year of a BibTeX entry."""
    (author,), (year,) = re.findall(r"author = \{([^,]+),", entry), re.findall(r"year = \{(\d+)\}", entry)
    return f"{author} et al. {year}"


def _kept(one: Algorithm) -> str:
    """Return what the server keeps besides the model."""
    kept = [f"`{name}`" for name in (*one.traits.vectors, *one.traits.sums) if name != "x"]
    kept += [f"`{name}_i` of every client" for name in one.traits.rows]
    return ", ".join(kept) or "nothing"


def _costs(one: Algorithm) -> list[str]:
    """Return the gradients beside the steps, and the vectors down and up, of a slow and of a fast client."""
    K, epoch = np.array([1, 9]), np.array([100, 100])
    half = np.array([0.5, 0.5])
    cost = one.cost(Cohort(1, np.arange(2), K, [1, 1], half, epoch, True, lambda *_: torch.zeros(2, 1)))
    words = {(0, 0): "none", (100, 100): "an epoch", (1, 9): "`K_i`", (101, 109): "an epoch and `K_i`"}
    slow_fast = [tuple(values.tolist()) for values in (cost.down, cost.up)]
    return [
        words[tuple(cost.extra_steps.tolist())],
        *(str(slow) if slow == fast else f"{slow}, {fast} if fast" for slow, fast in slow_fast),
    ]


if __name__ == "__main__":
    print(table())
