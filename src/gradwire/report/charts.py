"""Charts as inline SVG: lines over time or bytes, and stacked bars. Colours come from the page's style sheet."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.report.text import milliseconds, si_bytes, significant

LABEL_GAP = 15
LETTER = 7.0
MOST_NAMES = 7
MOST_POINTS = 240


class Point(NamedTuple):
    """A point of a line, with the extremes over seeds."""

    x: float
    y: float
    low: float
    high: float


@dataclass(frozen=True)
class Series:
    """One line of a chart.

    Attributes:
        name: shown beside its end.
        tone: which colour of the palette (a CSS class).
        points: in the order of x.
    """

    name: str
    tone: str
    points: list[Point]


@dataclass(frozen=True)
class Bar:
    """One stacked bar: a name and the parts it is made of, in milliseconds."""

    name: str
    parts: tuple[float, float, float]


class Frame(NamedTuple):
    """Size of a drawing and of the margins around its plot, in pixels."""

    width: int
    height: int
    left: int
    right: int
    top: int = 16
    bottom: int = 40


WIDE = Frame(548, 388, left=34, right=44)
NARROW = Frame(350, 330, left=30, right=34)


@dataclass(frozen=True)
class Axis:
    """Maps values to pixels.

    Attributes:
        low: value at `start`.
        high: value at `end`.
        start: pixel.
        end: pixel.
        log: whether equal steps are equal factors.
    """

    low: float
    high: float
    start: float
    end: float
    log: bool = False

    def __call__(self, value: float) -> float:
        """Pixel of a value."""
        low, high, value = (self._scale(v) for v in (self.low, self.high, value))
        return self.start + (value - low) / (high - low) * (self.end - self.start)

    def _scale(self, value: float) -> float:
        return math.log10(max(value, 1e-12)) if self.log else value

    def ticks(self, about: int) -> list[float]:
        """Round values to mark, roughly so many."""
        return log_ticks(self.low, self.high, about) if self.log else round_ticks(self.low, self.high, about)


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values.

    Example:
        >>> round_ticks(0.0, 1.0, 5)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / max(1, about)
    power = 10 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * float(step), 10) for n in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Powers of ten between two values, with 2 and 5 in between where there is room.

    Example:
        >>> log_ticks(1, 1000, 4)
        [1.0, 10.0, 100.0, 1000.0]
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in powers for m in steps]
        ticks = [t for t in ticks if low * 0.999 <= t <= high * 1.001]
        if len(ticks) <= about:
            return ticks
    return ticks


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
    """A text element."""
    return tag("text", html.escape(text), x=x, y=y, **attributes)


# ----------------------------------------------------------------------------------------------- lines


@dataclass(frozen=True)
class LineChart:
    """Losses over something.

    Attributes:
        title: read out by screen readers.
        series: the lines.
        unit: how x is written: "s" or "bytes".
        x_title: what x is.
        target: a value of y to mark, or None.
        y_top: where to cut the first, steep part off.
    """

    title: str
    series: list[Series]
    unit: str
    x_title: str
    target: float | None = None
    y_top: float | None = None

    def svg(self, frame: Frame) -> str:
        """Draw it."""
        x, y = self._axes(frame)
        clip = f"clip-{self.unit}-{frame.width}"
        inside = tag("rect", x=x.start, y=y.end, width=x.end - x.start, height=y.start - y.end)
        lines = "".join(self._line(series, x, y) for series in self.series)
        body = [
            tag("title", html.escape(self.title)),
            tag("clipPath", inside, id=clip),
            *self._grid(frame, x, y),
            tag("g", lines, clip_path=f"url(#{clip})"),
            *self._target(x, y),
            *self._names(x, y),
            tag("line", class_="cross", x1=0, x2=0, y1=y.end, y2=y.start),
        ]
        return tag(
            "svg",
            "".join(body),
            class_="chart",
            viewBox=f"0 0 {frame.width} {frame.height}",
            role="img",
            data_axis=json.dumps({"x": vars(x), "y": vars(y), "unit": self.unit}),
        )

    def _axes(self, frame: Frame) -> tuple[Axis, Axis]:
        points = [p for s in self.series for p in s.points if math.isfinite(p.y)]
        points = points or [Point(1, 1, 1, 1)]
        log = self.unit == "bytes"
        x_high = max(p.x for p in points) or 1.0
        starts = [s.points[0].x for s in self.series if s.points]
        x_low = max(1.0, min(starts, default=1.0)) if log else 0.0
        y_low, y_high = min(p.low for p in points), max(p.high for p in points)
        y_high = min(y_high, self.y_top) if self.y_top and self.y_top > y_low else y_high
        room = 0.06 * (y_high - y_low) or 0.5
        floor = y_low - room - (y_high - y_low) * LABEL_GAP * self._name_rows() / frame.height
        x = Axis(x_low, x_high if x_high > x_low else x_low * 2 + 1, frame.left, frame.width - frame.right, log)
        return x, Axis(floor, y_high, frame.height - frame.bottom, frame.top)

    def _name_rows(self) -> int:
        """Rows of names to leave room for below the lines."""
        return min(3, len(self.series)) if len(self.series) <= MOST_NAMES else 0

    def _grid(self, frame: Frame, x: Axis, y: Axis) -> Iterable[str]:
        for value in y.ticks(5):
            yield tag("line", class_="grid", x1=x.start, x2=x.end, y1=y(value), y2=y(value))
            yield label(significant(value, 2) if value else "0", x.start - 7, y(value) + 4, class_="tick end")
        for value in x.ticks(6 if frame.width > 400 else 4):
            shown = si_bytes(value).replace(".00", "") if self.unit == "bytes" else f"{value:g}"
            shown = shown.replace(".0 ", " ")
            yield label(shown, x(value), y.start + 18, class_="tick middle")
            yield tag("line", class_="mark", x1=x(value), x2=x(value), y1=y.start, y2=y.start + 4)
        yield tag("line", class_="base", x1=x.start, x2=x.end, y1=y.start, y2=y.start)
        yield label(self.x_title, (x.start + x.end) / 2, y.start + 36, class_="axis middle")

    def _line(self, series: Series, x: Axis, y: Axis) -> str:
        points = [p for p in thin(series.points) if math.isfinite(p.y)]
        path = " ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in points)
        parts: list[str] = []
        if any(p.high > p.low for p in points):
            upper = [f"{x(p.x):.1f},{y(p.high):.1f}" for p in points]
            lower = [f"{x(p.x):.1f},{y(p.low):.1f}" for p in reversed(points)]
            parts.append(tag("polygon", class_="band", points=" ".join([*upper, *lower])))
        parts.append(tag("polyline", class_="line", points=path))
        data = json.dumps([[float(f"{p.x:.5g}"), float(f"{p.y:.5g}")] for p in points])
        return tag("g", "".join(parts), class_=f"series {series.tone}", data_name=series.name, data_points=data)

    def _target(self, x: Axis, y: Axis) -> Iterable[str]:
        if self.target is None or not y.low < self.target < y.high:
            return
        height = y(self.target)
        yield tag("line", class_="target", x1=x.start, x2=x.end, y1=height, y2=height)
        yield label(f"target {significant(self.target, 3)}", x.start + 6, height - 6, class_="note")
        for series in self.series:
            hit = next((p for p in series.points if p.y <= self.target), None)
            if hit is not None:
                dot = tag("circle", class_="dot", cx=x(hit.x), cy=height, r=3.5)
                yield tag("g", dot, class_=f"series {series.tone}", data_name=series.name)

    def _names(self, x: Axis, y: Axis) -> Iterable[str]:
        """Write each line's name below its end: losses fall, so that is where nothing else is.

        More than `MOST_NAMES` would not fit there; the legend has them too.
        """
        if len(self.series) > MOST_NAMES:
            return
        ends = [(s, p) for s in self.series for p in s.points[-1:] if math.isfinite(p.y)]
        ends.sort(key=lambda item: y(item[1].y))
        taken: list[Box] = []
        for series, point in ends:
            width = LETTER * len(series.name)
            left = min(max(x(point.x) - width / 2, x.start), x.end + 24 - width)
            box = free_below(Box(left, y(point.y) + 7, width), taken)
            taken.append(box)
            name = label(series.name, box.left + width / 2, box.top + 11, class_="name middle")
            yield tag("g", name, class_=f"series {series.tone}", data_name=series.name)


class Box(NamedTuple):
    """Where a name stands; all are `LABEL_GAP` high."""

    left: float
    top: float
    width: float

    def overlaps(self, other: Box) -> bool:
        """Whether two names would be hard to read."""
        beside = self.left + self.width + 6 < other.left or other.left + other.width + 6 < self.left
        return not beside and abs(self.top - other.top) < LABEL_GAP


def free_below(box: Box, taken: Sequence[Box]) -> Box:
    """Move a box down until it overlaps none of those taken.

    Example:
        >>> free_below(Box(0, 0, 50), [Box(10, 5, 50)])
        Box(left=0, top=20, width=50)
    """
    for other in sorted(taken, key=lambda other: other.top):
        if box.overlaps(other):
            box = box._replace(top=other.top + LABEL_GAP)
    return box


def thin(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS` points: more would not show, and would make the file large."""
    if len(points) <= MOST_POINTS:
        return list(points)
    chosen = {round(i * (len(points) - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}
    return [points[i] for i in sorted(chosen)]


# ------------------------------------------------------------------------------------------------ bars

PARTS = ("compute", "encode", "wait")
BAR_PITCH = 34
BAR_HEIGHT = 16


def bar_svg(title: str, bars: Sequence[Bar], floor_ms: float | None, *, width: int, left: int) -> str:
    """Horizontal stacked bars of milliseconds a step, with a line where computation alone would end."""
    top, bottom, right = 26, 38, 64
    height = top + BAR_PITCH * len(bars) + bottom
    longest = max((sum(bar.parts) for bar in bars), default=1.0) or 1.0
    x = Axis(0.0, longest, left, width - right)
    body = [tag("title", html.escape(title))]
    for value in x.ticks(6 if width > 400 else 3):
        body.append(tag("line", class_="grid", x1=x(value), x2=x(value), y1=top, y2=height - bottom))
        body.append(label(f"{value:g}", x(value), height - bottom + 18, class_="tick middle"))
    body.append(label("milliseconds a step", (x.start + x.end) / 2, height - 2, class_="axis middle"))
    for row, bar in enumerate(bars):
        body.append(_bar(bar, x, top + BAR_PITCH * row + (BAR_PITCH - BAR_HEIGHT) / 2))
    if floor_ms is not None:
        at = x(floor_ms)
        body.append(tag("line", class_="target", x1=at, x2=at, y1=top - 6, y2=height - bottom))
        note = f"floor: {milliseconds(floor_ms)} ms" + (", no communication" if width > 400 else "")
        body.append(label(note, at, top - 12, class_="note" if at < width / 2 else "note end"))
    return tag("svg", "".join(body), class_="bars", viewBox=f"0 0 {width} {height}", role="img")


def _bar(bar: Bar, x: Axis, y: float) -> str:
    pieces = [label(bar.name, x.start - 10, y + BAR_HEIGHT - 4, class_="name end")]
    start = 0.0
    for name, value in zip(PARTS, bar.parts, strict=True):
        width = max(0.0, x(start + value) - x(start))
        tip = tag("title", html.escape(f"{bar.name}: {name} {milliseconds(value)} ms a step"))
        pieces.append(tag("rect", tip, class_=name, x=x(start), y=y, width=width, height=BAR_HEIGHT))
        start += value
    pieces.append(label(milliseconds(start), x(start) + 7, y + BAR_HEIGHT - 4, class_="value"))
    return tag("g", "".join(pieces))
