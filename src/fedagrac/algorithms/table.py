"""The table of all algorithms in the README and the docs, made from the code.

`python -m fedagrac.algorithms.table` prints it, and writes it into the files that are named.
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import numpy as np
import torch

from fedagrac.algorithms import REGISTRY, Algorithm, algorithm
from fedagrac.citations import ENTRIES
from fedagrac.core.cohort import Cohort
from fedagrac.core.layout import Layout, Parameter
from fedagrac.errors import InputError

__all__ = ["table", "write_table"]

COLUMNS = (
    "name",
    "class",
    "paper",
    "rule",
    "server keeps",
    "exchanges",
    "more gradients",
    "bytes down",
    "bytes up",
)

BEGIN = "<!-- algorithms: written by python -m fedagrac.algorithms.table README.md docs/algorithms/index.md -->"
END = "<!-- algorithms: end -->"


def table(pages: str = "") -> str:
    """Return the table of all registered algorithms, with their default settings, in Markdown.

    `pages` is the path to the pages of the algorithms, for links.

    Examples:
        >>> print(table().splitlines()[0])
        | name | class | paper | rule | server keeps | exchanges | more gradients | bytes down | bytes up |
    """
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{'---|' * len(COLUMNS)}"]
    return "\n".join([*lines, *(f"| {' | '.join(_row(name, pages))} |" for name in REGISTRY)])


def write_table(path: Path) -> None:
    """Replace the table in a file, between its two marks. Pages of algorithms lie in docs/algorithms."""
    before, begun, rest = path.read_text().partition(f"{BEGIN}\n")
    _, ended, after = rest.partition(END)
    if not (begun and ended):
        raise InputError(str(path), "a file without marks", f"the lines {BEGIN} and {END}")
    pages = "" if path.resolve().parent.name == "algorithms" else "docs/algorithms/"
    path.write_text(f"{before}{begun}{table(pages)}\n\n{ended}{after}")


def _row(name: str, pages: str) -> list[str]:
    """Return the cells of an algorithm."""
    cls, fixed = REGISTRY[name]
    one = algorithm(name, lr=0.1)
    rule = (inspect.getdoc(cls) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")
    rule = re.sub(r"\|([^|]*)\|", r"norm(\1)", rule)  # a bar would end a cell
    rule += "".join(f'; {key} = "{value}"' for key, value in fixed.items())
    page = cls.__module__.rpartition(".")[2]
    papers = ", ".join(_paper(ENTRIES[key]) for key in cls.cites)
    return [
        f"[`{name}`]({pages}{page}.md)",
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
    """Return the gradients beside the steps, and the bytes down and up, of a slow and of a fast client."""
    words = {(0, 0): "none", (100, 100): "an epoch", (1, 9): "`K_i`", (101, 109): "an epoch and `K_i`"}
    shorter, longer = (one.cost(_two_clients(d)) for d in (LENGTH, 2 * LENGTH))
    moved = zip(shorter.bytes(4 * LENGTH), longer.bytes(8 * LENGTH), strict=True)
    texts = [[_text(int(a), int(b)) for a, b in zip(*members, strict=True)] for members in moved]
    layers = Parameter("0.weight", (LENGTH // 2, 1), "Linear"), Parameter("1.weight", (1, LENGTH // 2), "Linear")
    part = one.cost(_two_clients(LENGTH, Layout(layers))).bytes(4 * LENGTH)[0][1] < shorter.bytes(4 * LENGTH)[0][1]
    at_most = "at most " if part else ""
    return [
        words[tuple(shorter.extra_steps.tolist())],
        *(at_most + (slow if slow == fast else f"{slow}, {fast} if fast") for slow, fast in texts),
    ]


LENGTH = 1000
"""The length d of a vector for which costs are declared, and twice it."""


def _two_clients(d: int, layout: Layout | None = None) -> Cohort:
    """Return a cohort of a slow and a fast client with vectors of d numbers in float32."""
    K, epoch, half = np.array([1, 9]), np.array([100, 100]), np.array([0.5, 0.5])
    return Cohort(1, np.arange(2), K, [1, 1], half, epoch, True, lambda *_: torch.zeros(2, 1), layout=layout)


def _text(moved: int, with_twice_d: int) -> str:
    """Return bytes as a function of d, such as "4 d".

    Examples:
        >>> _text(8 * LENGTH, 16 * LENGTH), _text(4 * LENGTH + 7, 8 * LENGTH + 7), _text(64, 64)
        ('8 d', '4 d + 7', '64')
    """
    slope = (with_twice_d - moved) / LENGTH
    rest = moved - (with_twice_d - moved)
    return " + ".join([f"{slope:g} d"] * bool(slope) + [str(rest)] * (bool(rest) or not slope))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        write_table(Path(name))
    if not sys.argv[1:]:
        print(table())
