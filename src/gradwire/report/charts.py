"""Charts of lines over time or bytes, as inline SVG. Colours come from the page's style sheet."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.report.axes import DrawingSize, Scale, byte_labels, number_labels, rate_labels
from gradwire.report.room import Placed, Room
from gradwire.report.svg import LABEL_GAP, Box, label, shortened, tag, width_of
from gradwire.report.text import significant

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
        name: shown beside its end; "" shows none.
        tone: which colour of the palette (a CSS class).
        points: in the order of x.
    """

    name: str
    tone: str
    points: list[Point]


class Mark(NamedTuple):
    """A point that is marked on a line: the line's name, where, and what is written beside it."""

    name: str
    x: float
    y: float
    text: str


@dataclass(frozen=True)
class LineChart:
    """Losses, or a metric, over something.

    Attributes:
        title: read out by screen readers.
        series: the lines.
        unit: how x is written: "s", "bytes" or "bit/s" on a logarithmic axis, or a plural noun such as "rounds".
        x_title: what x is.
        target: a value of y to mark, or None.
        y_top: where to cut the first, steep part off.
        nothing: what to say where no value is finite.
        from_zero: whether the axis of y begins at 0 where no value is below, so that heights compare.
        log_y: whether equal heights are equal factors; values are above 0.
        marks: points to mark on the lines that have their names.
    """

    title: str
    series: list[Series]
    unit: str
    x_title: str
    target: float | None = None
    y_top: float | None = None
    nothing: str = "No loss was finite."
    from_zero: bool = False
    log_y: bool = False
    marks: Sequence[Mark] = ()

    def svg(self, frame: DrawingSize) -> str:
        """Draw the chart, as SVG."""
        if not any(math.isfinite(point.y) for series in self.series for point in series.points):
            return self._empty(frame)
        x, y, labels = self._axes(frame)
        clip = f"clip-{re.sub('[^a-z0-9]+', '-', self.title.lower())}-{frame.width}"
        inside = tag("rect", x=x.start, y=y.end, width=x.end - x.start, height=y.start - y.end)
        lines = "".join(self._line(series, x, y) for series in self.series)
        body = [
            tag("title", html.escape(self.title)),
            tag("clipPath", inside, id=clip),
            *self._grid(frame, x, y, labels),
            tag("g", lines, clip_path=f"url(#{clip})"),
            *self._labels(x, y),
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

    def _empty(self, frame: DrawingSize) -> str:
        """A sentence where there is nothing to draw."""
        said = "Nothing was sent." if self.unit == "bytes" else self.nothing
        body = tag("title", html.escape(self.title)) + label(said, frame.width / 2, 40, class_="axis middle")
        return tag("svg", body, class_="empty", viewBox=f"0 0 {frame.width} 80", role="img")

    def _axes(self, frame: DrawingSize) -> tuple[Scale, Scale, list[tuple[float, str]]]:
        """Both axes, and the marks of y, whose width decides where x begins."""
        points = [p for s in self.series for p in s.points if math.isfinite(p.y)]
        low = min(p.low for p in points)
        y = self._y_axis(frame, min(0.0, low) if self.from_zero else low, max(p.high for p in points))
        ticks = y.ticks(5)
        labels = number_labels(ticks)
        left = max([frame.left, *(12 + width_of(shown) for shown in labels)])
        return self._x_axis(frame, left, points), y, list(zip(ticks, labels, strict=True))

    def _y_axis(self, frame: DrawingSize, low: float, high: float) -> Scale:
        high = min(high, self.y_top) if self.y_top is not None and self.y_top > low else high
        if self.log_y:
            factor = max(high / low, 1.001)
            floor = low / factor ** (0.06 + LABEL_GAP * self._name_rows() / frame.height)
            return Scale(floor, low * factor**1.03, frame.height - frame.bottom, frame.top, log=True)
        # a line that does not move needs some height all the same, and one of 1e30 more than of 1
        height = max(high - low, 1e-6 * abs(high), 1e-9)
        floor = low - height * (0.06 + LABEL_GAP * self._name_rows() / frame.height)
        return Scale(floor, low + 1.03 * height, frame.height - frame.bottom, frame.top)

    def _x_axis(self, frame: DrawingSize, left: float, points: Sequence[Point]) -> Scale:
        log = self.unit in ("bytes", "bit/s")
        low = max(1.0, min(p.x for p in points)) if log else 0.0
        high = max(p.x for p in points)
        return Scale(low, high if high > low else low * 2 + 1, left, frame.width - frame.right, log)

    def _name_rows(self) -> int:
        """Rows of names to leave room for below the lines."""
        return min(3, sum(bool(s.name) for s in self.series)) if len(self.series) <= MOST_NAMES else 0

    def _grid(self, frame: DrawingSize, x: Scale, y: Scale, labels: Iterable[tuple[float, str]]) -> Iterable[str]:
        for value, shown in labels:
            yield tag("line", class_="grid", x1=x.start, x2=x.end, y1=y(value), y2=y(value))
            yield label(shown, x.start - 7, y(value) + 4, class_="tick end")
        ticks = x.ticks(6 if frame.width > 400 else 4)
        written = {"bytes": byte_labels, "bit/s": rate_labels}.get(self.unit, number_labels)
        for value, shown in zip(ticks, written(ticks), strict=True):
            yield label(shown, x(value), y.start + 18, class_="tick middle")
            yield tag("line", class_="mark", x1=x(value), x2=x(value), y1=y.start, y2=y.start + 4)
        yield tag("line", class_="base", x1=x.start, x2=x.end, y1=y.start, y2=y.start)
        yield label(self.x_title, (x.start + x.end) / 2, y.start + 36, class_="axis middle")

    def _line(self, series: Series, x: Scale, y: Scale) -> str:
        parts = [piece for points in stretches(thin(series.points)) for piece in self._stretch(points, x, y)]
        data = [[float(f"{p.x:.5g}"), float(f"{p.y:.5g}")] for p in thin(series.points) if math.isfinite(p.y)]
        if not data:
            return ""
        classes = f"series {series.tone}"
        return tag("g", "".join(parts), class_=classes, data_name=series.name, data_points=json.dumps(data))

    def _stretch(self, points: Sequence[Point], x: Scale, y: Scale) -> Iterable[str]:
        """A piece of a line, with the band of its seeds; a single point is a dot."""
        if any(p.high > p.low for p in points):
            upper = [f"{x(p.x):.1f},{y(p.high):.1f}" for p in points]
            lower = [f"{x(p.x):.1f},{y(p.low):.1f}" for p in reversed(points)]
            yield tag("polygon", class_="band", points=" ".join([*upper, *lower]))
        if len(points) == 1:
            yield tag("circle", class_="dot", cx=x(points[0].x), cy=y(points[0].y), r=2.0)
        yield tag("polyline", class_="line", points=" ".join(f"{x(p.x):.1f},{y(p.y):.1f}" for p in points))

    def _labels(self, x: Scale, y: Scale) -> Iterable[str]:
        """The target and the lines' names, none of them on a line or on another label."""
        room = Room(x.start, y.end, x.end + 24, y.start)
        for series in self.series:
            for points in stretches(thin(series.points)):
                room.take_line([(x(point.x), y(point.y)) for point in points])
        yield from self._target(x, y, room)
        yield from self._marks(x, y, room)
        yield from self._names(x, y, room)

    def _target(self, x: Scale, y: Scale, room: Room) -> Iterable[str]:
        """The line of the target, what it is, and where each line reaches it."""
        if self.target is None or not y.low < self.target < y.high:
            return
        height = y(self.target)
        room.take_line([(x.start, height), (x.end, height)])
        yield tag("line", class_="target", x1=x.start, x2=x.end, y1=height, y2=height)
        hits = [(s, p) for s in self.series for p in [p for p in s.points if p.y <= self.target][:1]]
        for series, hit in hits:
            room.take_line([(x(hit.x) - 4, height - 4), (x(hit.x) + 4, height + 4)])
            dot = tag("circle", class_="dot", cx=x(hit.x), cy=height, r=3.5)
            yield tag("g", dot, class_=f"series {series.tone}", data_name=series.name)
        text = f"target {significant(self.target, 3)}"
        placed = room.place(Box(x.start + 6, height - 19, width_of(text)))
        if placed is not None:
            yield label(text, placed.box.left, placed.box.top + 11, class_="note")

    def _marks(self, x: Scale, y: Scale, room: Room) -> Iterable[str]:
        """Dots on lines, each with its text where there is room."""
        tones = {series.name: series.tone for series in self.series}
        for mark in self.marks:
            at = (x(mark.x), y(mark.y))
            room.take_line([(at[0] - 4, at[1] - 4), (at[0] + 4, at[1] + 4)])
            dot = tag("circle", tag("title", html.escape(mark.text)), class_="dot", cx=at[0], cy=at[1], r=3.5)
            yield tag("g", dot, class_=f"series {tones.get(mark.name, '')}", data_name=mark.name)
            placed = room.place(Box(at[0] + 7, at[1] - 19, width_of(mark.text)), at)
            if placed is not None:
                named = _named(mark.text, placed)
                yield tag("g", named, class_=f"series {tones.get(mark.name, '')}", data_name=mark.name)

    def _names(self, x: Scale, y: Scale, room: Room) -> Iterable[str]:
        """Write each line's name below its end, or as near to it as there is room inside the plot.

        More than `MOST_NAMES` would not fit there, nor does one that finds no room; the legend has them too.
        """
        if len(self.series) > MOST_NAMES:
            return
        named = [s for s in self.series if s.name]
        ends = [(s, p) for s in named for p in [p for p in s.points if math.isfinite(p.y)][-1:]]
        ends.sort(key=lambda item: y(item[1].y))
        for series, point in ends:
            shown = shortened(series.name, (x.end - x.start) / 2)
            at, width = (x(point.x), min(max(y(point.y), y.end), y.start)), width_of(shown)
            placed = room.place(Box(at[0] - width / 2, at[1] + 7, width), at)
            if placed is not None:
                yield tag("g", _named(shown, placed), class_=f"series {series.tone}", data_name=series.name)


def _named(text: str, placed: Placed) -> str:
    """A label, with the line that joins it to what it names where that is not near."""
    box = placed.box
    name = label(text, box.left + box.width / 2, box.top + 11, class_="name middle")
    if placed.leader is None:
        return name
    (x1, y1), (x2, y2) = placed.leader
    return tag("line", class_="leader", x1=x1, y1=y1, x2=x2, y2=y2) + name


def stretches(points: Sequence[Point]) -> list[list[Point]]:
    """Points cut where a loss is not finite: a line across the gap would tell of losses that were not there."""
    cut: list[list[Point]] = [[]]
    for point in points:
        if math.isfinite(point.y):
            cut[-1].append(point)
        elif cut[-1]:
            cut.append([])
    return [stretch for stretch in cut if stretch]


def thin(points: Sequence[Point]) -> list[Point]:
    """At most `MOST_POINTS` points: more would not show, and would make the file large."""
    if len(points) <= MOST_POINTS:
        return list(points)
    chosen = {round(i * (len(points) - 1) / (MOST_POINTS - 1)) for i in range(MOST_POINTS)}
    return [points[i] for i in sorted(chosen)]
