"""How an algorithm looks, in every picture: one colour and one dash pattern per name.

The one table that the page and the PNG and PDF pictures share.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["LOOKS", "OTHER", "SHADE", "Look", "look_of"]

SOLID: tuple[float, ...] = ()
DASHED = (4.0, 1.8)
DOTTED = (1.2, 1.4)
DASH_DOT = (5.0, 1.5, 1.2, 1.5)
LONG = (9.0, 2.0)
DASH_DOT_DOT = (5.0, 1.5, 1.2, 1.5, 1.2, 1.5)
PATTERNS = (SOLID, DASHED, DOTTED, DASH_DOT, LONG, DASH_DOT_DOT)

SHADE = "#566b8a"
"""The colour of pictures that are about clients, not about algorithms."""


@dataclass(frozen=True)
class Look:
    """How one line is drawn.

    Attributes:
        colour: as #rrggbb.
        pattern: lengths of strokes and gaps, in line widths; empty for a solid line.
        width: of the line, in points.
    """

    colour: str
    pattern: tuple[float, ...]
    width: float = 1.5

    def rgba(self, alpha: float) -> str:
        """Return the colour with an alpha value, as CSS writes it.

        Examples:
            >>> Look("#ff8000", ()).rgba(0.5)
            'rgba(255, 128, 0, 0.5)'
        """
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red}, {green}, {blue}, {alpha})"


LOOKS = {
    "fedavg": Look("#2f74d0", DASHED),
    "fedprox": Look("#0c8f9e", DOTTED),
    "fednova": Look("#3b9440", DASH_DOT),
    "scaffold": Look("#8a5fd0", SOLID),
    "fedlin": Look("#8d6e4f", LONG),
    "fedagrac": Look("#dd2c22", SOLID, 2.4),
    "fedagrac-avg": Look("#cf6a08", DASHED),
    "fedagrac-first": Look("#d44a9b", DASH_DOT),
    "fedagrac-reverse": Look("#9c8400", DOTTED),
}
"""Every registered algorithm. Each colour is readable on white and on the dark page (at least 3:1)."""

OTHER = Look("#7d8590", SOLID)
"""Any other algorithm."""


def look_of(algorithm: str, earlier: int = 0) -> Look:
    """Return how a run of the algorithm is drawn; `earlier` others of it in the picture change the pattern only.

    Examples:
        >>> look_of("scaffold").colour == look_of("scaffold", earlier=1).colour
        True
        >>> look_of("scaffold", earlier=1).pattern
        (4.0, 1.8)
    """
    look = LOOKS.get(algorithm, OTHER)
    if not earlier:
        return look
    return Look(look.colour, PATTERNS[(PATTERNS.index(look.pattern) + earlier) % len(PATTERNS)], look.width)
