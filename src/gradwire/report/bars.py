"""Stacked bars: where the milliseconds of a step went."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradwire.report.axes import Scale, number_labels
from gradwire.report.svg import label, shortened, tag, width_of
from gradwire.report.text import milliseconds

BAR_PITCH = 34
BAR_HEIGHT = 16
MOST_LEFT = 0.4
"""Share of the width that names may take."""


@dataclass(frozen=True)
class Bar:
    """One stacked bar: a name and the parts it is made of, in milliseconds, each by the class of its colour."""

    name: str
    parts: Mapping[str, float]


def bar_svg(title: str, bars: Sequence[Bar], floor_ms: float | None, *, width: int, each: str = "a step") -> str:
    """Horizontal stacked bars of milliseconds, with a line where computation alone would end.

    Args:
        title: of the picture.
        bars: the first one on top.
        floor_ms: where computation alone would end; None for no line.
        width: in pixels.
        each: of what the bars are.
    """
    top, bottom = 26, 38
    height = top + BAR_PITCH * len(bars) + bottom
    x = _axis(bars, floor_ms, width)
    body = [tag("title", html.escape(title)), *across(x, f"milliseconds {each}", width, top, height - bottom)]
    rows = [_bar(bar, x, top + BAR_PITCH * i + (BAR_PITCH - BAR_HEIGHT) / 2, each) for i, bar in enumerate(bars)]
    body += [bar for bar, _ in rows]
    if floor_ms is not None:
        at = x(floor_ms)
        body.append(tag("line", class_="target", x1=at, x2=at, y1=top - 6, y2=height - bottom))
        note = f"floor: {milliseconds(floor_ms)} ms" + (", no communication" if width > 400 else "")
        body.append(label(note, at, top - 12, class_="note" if at < width / 2 else "note end"))
    body += [figure for _, figure in rows]  # last, so that the line of the floor does not cross one out
    return tag("svg", "".join(body), class_="bars", viewBox=f"0 0 {width} {height}", role="img")


def across(x: Scale, what: str, width: int, top: int, bottom: float) -> Iterator[str]:
    """The grid of a picture whose values go from left to right, and the axis below it.

    Args:
        x: of the values.
        what: they are.
        width: of the picture, in pixels.
        top, bottom: where the grid begins and ends.
    """
    ticks = x.ticks(6 if width > 400 else 3)
    for value, shown in zip(ticks, number_labels(ticks), strict=True):
        yield tag("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=bottom)
        yield label(shown, x(value), bottom + 18, class_="tick middle")
    yield label(what, (x.start + x.end) / 2, bottom + 36, class_="axis middle")


def _axis(bars: Sequence[Bar], floor_ms: float | None, width: int) -> Scale:
    """From zero to the longest bar, between the widest name and the widest figure."""
    longest = max([*(sum(bar.parts.values()) for bar in bars), floor_ms or 0.0], default=0.0) or 1.0
    left = 14 + max((width_of(bar.name) for bar in bars), default=0.0)
    right = 14 + width_of(milliseconds(longest))
    return Scale(0.0, longest, min(left, MOST_LEFT * width), width - right)


def _bar(bar: Bar, x: Scale, y: float, each: str) -> tuple[str, str]:
    """A bar with its name, and the figure at its end."""
    name = label(shortened(bar.name, x.start - 10), x.start - 10, y + BAR_HEIGHT - 4, class_="name end")
    pieces = [tag("g", tag("title", html.escape(bar.name)) + name)]
    start = 0.0
    for part, value in bar.parts.items():
        width = max(0.0, x(start + value) - x(start))
        tip = tag("title", html.escape(f"{bar.name}: {part} {milliseconds(value)} ms {each}"))
        pieces.append(tag("rect", tip, class_=part, x=x(start), y=y, width=width, height=BAR_HEIGHT))
        start += value
    return tag("g", "".join(pieces)), label(milliseconds(start), x(start) + 7, y + BAR_HEIGHT - 4, class_="value")
