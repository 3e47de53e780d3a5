"""Where labels of a chart find room: beside the curves, and beside each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from gradwire.report.svg import LABEL_GAP, Box

CELL = 4.0
"""Side of the squares that a plot is divided into, in pixels."""

STEP = 2
"""Cells between two places that are tried."""

LEADER = 16.0
"""Pixels between a label and what it names from which on a line joins them."""

DETOUR = 60.0
"""Pixels that a label may be farther away for a line to it; else its colour alone tells what it names."""

Spot = tuple[float, float]
"""A point of the drawing, (x, y) in pixels."""


class Placed(NamedTuple):
    """A label's place, and the line from what it names to the label, if they are far from each other."""

    box: Box
    leader: tuple[Spot, Spot] | None


class Room:
    """The plot of a chart, in squares that are free or taken.

    Args:
        left: of the plot, as `top`, `right` and `bottom` are, in pixels.
    """

    def __init__(self, left: float, top: float, right: float, bottom: float) -> None:
        self._left, self._top, self._right, self._bottom = left, top, right, bottom
        self._columns, self._rows = int((right - left) / CELL) + 1, int((bottom - top) / CELL) + 1
        self._taken = [bytearray(self._columns) for _ in range(self._rows)]
        self._labels: list[Box] = []

    def take_line(self, points: Sequence[Spot]) -> None:
        """Keep labels off a line through these points, or off one single point."""
        for start, end in itertools.pairwise(points if len(points) != 1 else [*points, *points]):
            inside = self._inside(start, end)
            if inside is None:
                continue
            (x0, y0), (x1, y1) = inside
            pieces = max(1, math.ceil(max(abs(x1 - x0), abs(y1 - y0)) / (CELL / 2)))
            for i in range(pieces + 1):
                x, y = x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces
                row, column = int((y - self._top) // CELL), int((x - self._left) // CELL)
                if 0 <= row < self._rows and 0 <= column < self._columns:
                    self._taken[row][column] = 1

    def _inside(self, start: Spot, end: Spot) -> tuple[Spot, Spot] | None:
        """The part of a line between the plot's upper and lower edge: a loss of 1e20 would be a very long line."""
        (x0, y0), (x1, y1) = start, end
        if max(y0, y1) < self._top or min(y0, y1) > self._bottom:
            return None
        if y0 == y1:
            return start, end

        def at(y: float) -> Spot:
            within = min(max(y, self._top), self._bottom)
            return x0 + (x1 - x0) * (within - y0) / (y1 - y0), within

        return at(y0), at(y1)

    def place(self, wanted: Box, named: Spot | None = None) -> Placed | None:
        """Find the free place that is nearest to where a label is wanted, and take it.

        Args:
            wanted: where it would stand best.
            named: the point that it names; a label that ends up far from it gets a line to it.

        Returns:
            The place; None where there is no room left.
        """
        best = self._best(wanted, named)
        if best is not None:
            self._labels.append(best.box)
            self.take_line(best.leader or [])
        return best

    def _best(self, wanted: Box, named: Spot | None) -> Placed | None:
        """The nearest free place to which a line crosses no label; or without a line, if that is much nearer."""
        unjoined: tuple[float, Placed] | None = None
        for far, box in self._places(wanted):
            if unjoined and far > unjoined[0] + DETOUR:
                break
            if not self._is_free(box):
                continue
            leader = _leader(box, named)
            if leader is None or not any(_crosses(leader, label) for label in self._labels):
                return Placed(box, leader)
            unjoined = unjoined or (far, Placed(box, None))
        return unjoined[1] if unjoined else None

    def _places(self, wanted: Box) -> Iterable[tuple[float, Box]]:
        """How far away each place inside the plot is, the nearest first; upwards counts twice, since losses fall."""
        last_x, last_y = self._right - wanted.width, self._bottom - LABEL_GAP
        x, y = min(max(wanted.left, self._left), last_x), min(max(wanted.top, self._top), last_y)
        if last_x < self._left or last_y < self._top:
            return []
        step = STEP * CELL
        xs = [x + step * i for i in range(-math.floor((x - self._left) / step), math.floor((last_x - x) / step) + 1)]
        ys = [y + step * i for i in range(-math.floor((y - self._top) / step), math.floor((last_y - y) / step) + 1)]
        places = [(math.hypot(left - x, max(top - y, 2 * (y - top))), left, top) for left in xs for top in ys]
        return ((far, Box(left, top, wanted.width)) for far, left, top in sorted(places))

    def _is_free(self, box: Box) -> bool:
        if any(map(box.overlaps, self._labels)):
            return False
        first, last = int((box.left - self._left) // CELL), int((box.left + box.width - self._left) // CELL)
        rows = range(int((box.top - self._top) // CELL), int((box.top + LABEL_GAP - self._top) // CELL) + 1)
        return not any(any(self._taken[row][max(0, first) : last + 1]) for row in rows if row < self._rows)


def _leader(box: Box, named: Spot | None) -> tuple[Spot, Spot] | None:
    """The line from a point to the nearest edge of a label; None where they are near, or nothing is named."""
    if named is None:
        return None
    x, y = named
    end = min(max(x, box.left), box.left + box.width), min(max(y, box.top), box.top + LABEL_GAP)
    return (named, end) if math.dist(named, end) > LEADER else None


def _crosses(line: tuple[Spot, Spot], box: Box) -> bool:
    """Whether a line runs through a label, as seen at every second pixel."""
    (x0, y0), (x1, y1) = line
    pieces = max(1, int(math.dist(*line) / 2))
    spots = ((x0 + (x1 - x0) * i / pieces, y0 + (y1 - y0) * i / pieces) for i in range(pieces + 1))
    return any(box.left <= x <= box.left + box.width and box.top <= y <= box.top + LABEL_GAP for x, y in spots)
