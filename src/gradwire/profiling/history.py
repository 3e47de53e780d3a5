"""A figure over all steps of a run, in bounded memory: means over stretches of steps that grow longer."""

from __future__ import annotations

import math
from typing import Literal, TypeAlias

MOST_POINTS = 256
"""Stretches that are kept; where there would be more, two become one."""

JsonNumber: TypeAlias = float | Literal["nan", "inf", "-inf"]
"""A number in JSON, which has none that is not finite: those are texts."""


def to_json_number(value: float) -> JsonNumber:
    """Return a number as JSON can hold it.

    >>> to_json_number(2.5), to_json_number(math.nan), to_json_number(-math.inf)
    (2.5, 'nan', '-inf')
    """
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"


class History:
    """The course of one figure: the mean over each stretch of `stride` steps, which doubles when memory is full.

    The mean over a stretch that has a NaN is NaN, so none is lost. Stretches begin at multiples of `stride`, so those
    of ranks that have told of the same steps lie at the same places.

    Args:
        most: stretches that are kept; an even number.

    Attributes:
        stride: steps of a stretch.

    >>> history = History(most=4)
    >>> for index in range(6):
    ...     history.add(index, float(index))
    >>> history.stride, history.points()
    (2, [(0, 0.5), (2, 2.5), (4, 4.5)])
    """

    def __init__(self, most: int = MOST_POINTS) -> None:
        self.stride = 1
        self._most = most
        self._sums: dict[int, tuple[float, int]] = {}

    def add(self, index: int, value: float) -> None:
        """Count the value of a step; several of one step count as so many."""
        _count(self._sums, index // self.stride, value, 1)
        while len(self._sums) > self._most:
            self.stride *= 2
            halved: dict[int, tuple[float, int]] = {}
            for place, (total, count) in self._sums.items():
                _count(halved, place // 2, total, count)
            self._sums = halved

    def points(self) -> list[tuple[int, JsonNumber]]:
        """Return the first step of each stretch and the mean, in the order of steps."""
        sums = sorted(self._sums.items())
        return [(self.stride * place, to_json_number(total / count)) for place, (total, count) in sums]


def _count(sums: dict[int, tuple[float, int]], place: int, total: float, count: int) -> None:
    before, counted = sums.get(place, (0.0, 0))
    sums[place] = before + total, counted + count
