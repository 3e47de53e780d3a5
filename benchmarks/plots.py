"""Plots of results as SVG files that stand alone: panels side by side, and one legend below them."""

from __future__ import annotations

import html
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from gradwire.report.axes import Scale, number_labels
from gradwire.report.svg import label, tag, width_of

Points = Sequence[tuple[float, float]]

TONES = ("#0072b2", "#d55e00", "#007a5e", "#a03d78", "#8a6d00", "#56616b", "#111111")
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 400, 330, 62, 20, 34, 46
STYLE = """
svg { background: #fcfcfa; font: 11.5px system-ui, "Segoe UI", Roboto, "DejaVu Sans", sans-serif; fill: #1c1f23; }
.end { text-anchor: end; } .middle { text-anchor: middle; } .tick, .axis { fill: #5d646d; } .head { font-size: 13px; }
.grid { stroke: #e3e4e0; } .base { stroke: #9aa1a9; } .line { fill: none; stroke-width: 1.6; }
"""


class Line(NamedTuple):
    """A line of a panel; lines of one name have one colour in all panels.

    Attributes:
        name: in the legend; none for a line that the panel's title explains.
        points: x and y, in the order of x. What is not finite is left out.
        dots: whether points are marked, as measurements; where not joined, they are marked alone.
        joined: whether a line joins them.
    """

    name: str
    points: Points
    dots: bool = False
    joined: bool = True


class Panel(NamedTuple):
    """Axes and what is drawn in them. `low` and `high` cut y off; None leaves them to the points."""

    title: str
    x_title: str
    lines: Sequence[Line]
    log_x: bool = False
    log_y: bool = False
    low: float | None = None
    high: float | None = None


def figure(title: str, panels: Sequence[Panel]) -> str:
    """The drawing. `title` is read out by screen readers."""
    names = list(dict.fromkeys(line.name for panel in panels for line in panel.lines if line.name))
    tones = {name: TONES[i % len(TONES)] for i, name in enumerate(names)}
    width = WIDTH * len(panels)
    rows, marks = legend(names, tones, width)
    body = [tag("style", STYLE), tag("title", html.escape(title))]
    for number, panel in enumerate(panels):
        body += drawn(panel, tones, WIDTH * number)
    size = f"0 0 {width} {HEIGHT + 18 * rows + (8 if rows else 0)}"
    return tag("svg", "\n".join([*body, *marks]), xmlns="http://www.w3.org/2000/svg", viewBox=size, role="img") + "\n"


def legend(names: Sequence[str], tones: dict[str, str], width: float) -> tuple[int, list[str]]:
    """How many rows it takes, and its elements."""
    marks, row, x = list[str](), 0, float(LEFT)
    for name in names:
        if x > LEFT and x + 30 + width_of(name) > width:
            row, x = row + 1, float(LEFT)
        y = HEIGHT + 12 + 18 * row
        marks.append(tag("line", x1=x, x2=x + 18, y1=y - 4, y2=y - 4, stroke=tones[name], stroke_width=3))
        marks.append(label(name, x + 24, y))
        x += 44 + width_of(name)
    return (row + 1 if names else 0), marks


def drawn(panel: Panel, tones: dict[str, str], left: float) -> Iterator[str]:
    """A panel whose left edge is at a pixel."""
    x, y = axes(panel, left)
    yield label(panel.title, left + LEFT, 20, class_="head")
    for value, shown in ticks(y, 6):
        yield tag("line", class_="grid", x1=x.start, x2=x.end, y1=y(value), y2=y(value))
        yield label(shown, x.start - 6, y(value) + 4, class_="tick end")
    for value, shown in ticks(x, 6):
        yield tag("line", class_="grid", x1=x(value), x2=x(value), y1=y.start, y2=y.start + 4)
        yield label(shown, x(value), y.start + 18, class_="tick middle")
    yield tag("line", class_="base", x1=x.start, x2=x.end, y1=y.start, y2=y.start)
    yield label(panel.x_title, (x.start + x.end) / 2, y.start + 36, class_="axis middle")
    for line in panel.lines:
        yield from marked(line, x, y, tones.get(line.name, TONES[0]))


def marked(line: Line, x: Scale, y: Scale, tone: str) -> Iterator[str]:
    """A line and its dots, kept inside the panel."""
    low, high = sorted((y.low, y.high))
    at = [(x(a), y(min(max(b, low), high))) for a, b in line.points if math.isfinite(b)]
    if line.joined:
        yield tag("polyline", class_="line", points=" ".join(f"{a:.1f},{b:.1f}" for a, b in at), stroke=tone)
    if line.dots:
        yield from (tag("circle", cx=a, cy=b, r=3.2, fill=tone) for a, b in at)


def axes(panel: Panel, left: float) -> tuple[Scale, Scale]:
    """Both, around all points; a linear y begins at 0 where it is not told to begin elsewhere."""
    points = [point for line in panel.lines for point in line.points if math.isfinite(point[1])]
    xs, ys = [a for a, _ in points], [b for _, b in points]
    low = panel.low if panel.low is not None else (0.9 * min(ys) if panel.log_y else 0.0)
    high = panel.high if panel.high is not None else 1.05 * max(ys)
    x = Scale(min(xs) if panel.log_x else 0.0, max(xs), left + LEFT, left + WIDTH - RIGHT, panel.log_x)
    return x, Scale(low, high, HEIGHT - BOTTOM, TOP, panel.log_y)


def ticks(axis: Scale, about: int) -> list[tuple[float, str]]:
    """Marks and how they are written."""
    values = axis.ticks(about)
    return list(
        zip(
            values,
            number_labels(values) if not axis.log else [f"{v:g}".replace("e+0", "e") for v in values],
            strict=True,
        )
    )
