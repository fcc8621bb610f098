"""docs/reproduction.md out of the records in the repository.

python -m fedagrac.paper.page docs/reproduction > docs/reproduction.md
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence

from fedagrac.paper import RECIPES, Records, TrialRecord, records_of

__all__ = ["page"]

HEAD = """# The paper, ours beside theirs

Generated from the records in `docs/reproduction/` (one JSON file per run, named after its settings) and the
remarks there by `python -m fedagrac.paper.page docs/reproduction`; the pictures by `fedagrac reproduce NAME
--scale paper --out docs/reproduction`. A trial reads ours / paper; "> 200" is a target not reached in that many
rounds, "cut off" a run that ended with its time budget, "-" a run that was not made yet. One seed unless a table
says otherwise. Nothing was tuned to agree; where a choice was made after seeing results, the assumptions say so.
"""


def page(records: Records) -> str:
    """Return the page: every recipe with records (or that needs none) at the paper's counts."""
    parts = [HEAD]
    for recipe in RECIPES.values():
        found = records_of(recipe, "paper", records)
        if recipe.run is not None and not found:
            continue
        table = recipe.table(found, "paper")
        parts += [f"## {recipe.name}", recipe.title + ".", _markdown([table.columns, *table.rows])]
        if recipe.picture is not None:
            parts.append(f"![{recipe.title}](reproduction/{recipe.name}/paper.png)")
        verdicts = [
            ("verdict", "claim", "numbers"),
            *[(v.verdict, v.claim, v.numbers) for v in recipe.claims(found)],
        ]
        parts.append(_markdown(verdicts))
        remarks = records.folder / recipe.name / "remarks.md"
        if remarks.exists():
            parts.append(remarks.read_text(encoding="utf-8"))
        parts.append("\n".join(f"- Assumed: {a}." for a in recipe.assumptions))
        if found:
            parts.append("Run on: " + "; ".join(sorted(_machines(found.values()))) + ".")
    return "\n\n".join(part.rstrip() for part in parts) + "\n"


def _machines(found: Iterable[TrialRecord]) -> set[str]:
    return {
        f"{r.environment.get('gpu') or r.environment.get('machine')}, torch {r.environment.get('torch')}, "
        f"fedagrac {r.environment.get('fedagrac')}"
        for r in found
    }


def _markdown(rows: Sequence[tuple[str, ...]]) -> str:
    lines = ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join([lines[0], "|" + "---|" * len(rows[0]), *lines[1:]])


if __name__ == "__main__":
    print(page(Records(sys.argv[1])), end="")
