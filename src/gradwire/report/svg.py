"""Elements of inline SVG, and boxes that tell whether labels would overlap."""

from __future__ import annotations

import html
from typing import NamedTuple

LABEL_GAP = 15
"""Height of a line of text, in pixels."""

LETTER = 7.2
"""Width of a letter, in pixels, as good as it can be known without the font."""

WIDTHS = (1096, 350)
"""Of pictures, in pixels: on a screen, and on a phone."""


def tag(name: str, content: str = "", **attributes: object) -> str:
    """An element; `class_` gives `class`, and underscores become hyphens.

    Example:
        >>> tag("line", x1=0, stroke_width=2)
        '<line x1="0" stroke-width="2"/>'
    """
    words = [name]
    for key, value in attributes.items():
        shown = f"{value:.1f}" if isinstance(value, float) else html.escape(str(value))
        words.append(f'{key.rstrip("_").replace("_", "-")}="{shown}"')
    return f"<{' '.join(words)}>{content}</{name}>" if content else f"<{' '.join(words)}/>"


def label(text: str, x: float, y: float, **attributes: object) -> str:
    """A text element of SVG, escaped."""
    return tag("text", html.escape(text), x=x, y=y, **attributes)


def width_of(text: str) -> float:
    """Pixels that a text takes."""
    return LETTER * len(text)


def shortened(text: str, width: float) -> str:
    """A text cut to a width in pixels, with an ellipsis where something is missing.

    Example:
        >>> shortened("topk:0.05+int8", 70), shortened("int4", 70)
        ('topk:0.0…', 'int4')
    """
    room = max(1, int(width / LETTER))
    return text if len(text) <= room else text[: room - 1] + "…"


class Box(NamedTuple):
    """Where a label stands; all are `LABEL_GAP` high."""

    left: float
    top: float
    width: float

    def overlaps(self, other: Box) -> bool:
        """Whether two labels would be hard to read."""
        beside = self.left + self.width + 6 < other.left or other.left + other.width + 6 < self.left
        return not beside and abs(self.top - other.top) < LABEL_GAP
