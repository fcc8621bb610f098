"""The colour and the dash pattern of each algorithm, on the page and in the PNG and PDF pictures."""

from __future__ import annotations

from dataclasses import dataclass

from fedagrac.algorithms import REGISTRY

__all__ = ["LOOKS", "OTHER", "SHADE", "Look", "look_of"]

SOLID: tuple[float, ...] = ()
DASHED = (4.0, 1.8)
DOTTED = (1.2, 1.4)
DASH_DOT = (5.0, 1.5, 1.2, 1.5)
LONG = (9.0, 2.0)
DASH_DOT_DOT = (5.0, 1.5, 1.2, 1.5, 1.2, 1.5)
PATTERNS = (SOLID, DASHED, DOTTED, DASH_DOT, LONG, DASH_DOT_DOT)

SHADE = "#566b8a"
"""The colour of pictures of clients."""


@dataclass(frozen=True)
class Look:
    """The style of one line.

    Attributes:
        colour: the colour as #rrggbb.
        pattern: the lengths of strokes and gaps in line widths; empty for a solid line.
        width: the width of the line in points.
    """

    colour: str
    pattern: tuple[float, ...]
    width: float = 1.5

    def rgba(self, alpha: float) -> str:
        """Return the colour with an alpha value in CSS notation.

        Examples:
            >>> Look("#ff8000", ()).rgba(0.5)
            'rgba(255, 128, 0, 0.5)'
        """
        red, green, blue = (int(self.colour[i : i + 2], 16) for i in (1, 3, 5))
        return f"rgba({red}, {green}, {blue}, {alpha})"


_IN_ORDER = (
    Look("#2f74d0", DASHED),
    Look("#0c8f9e", DOTTED),
    Look("#3b9440", DASH_DOT),
    Look("#8a5fd0", SOLID),
    Look("#8d6e4f", LONG),
    Look("#dd2c22", SOLID, 2.4),
    Look("#cf6a08", DASHED),
    Look("#d44a9b", DASH_DOT),
    Look("#9c8400", DOTTED),
    Look("#0b96d2", LONG),
    Look("#c65959", DASHED),
    Look("#b92eb9", DOTTED),
    Look("#6d9908", DASHED),
    Look("#853df2", DASH_DOT_DOT),
    Look("#f20c68", DASH_DOT),
    Look("#497957", LONG),
    Look("#995c81", DASHED),
    Look("#f20cf2", SOLID),
    Look("#0c68f2", DASH_DOT),
    Look("#7d8c3f", DASH_DOT_DOT),
    Look("#9f5828", DOTTED),
    Look("#08a608", SOLID),
    Look("#f20cad", LONG),
    Look("#886bb2", DASH_DOT),
    Look("#16a077", DASHED),
    Look("#b905fd", DOTTED),
    Look("#c43666", LONG),
    Look("#6a80b5", DASH_DOT_DOT),
    Look("#c07c81", DASH_DOT_DOT),
)

LOOKS = dict(zip(REGISTRY, _IN_ORDER, strict=True))
"""The look of every registered algorithm. The contrast is at least 3:1 on white and on the dark page."""

OTHER = Look("#7d8590", SOLID)
"""The look of any other algorithm."""


def look_of(algorithm: str, earlier: int = 0) -> Look:
    """Return the look of a run; after `earlier` runs of the same algorithm only the pattern changes.

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
