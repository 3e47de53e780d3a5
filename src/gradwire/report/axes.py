"""Axes of charts: what maps values to pixels, which values are marked, and how they are written."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.core.figures import si_bits_per_s


class DrawingSize(NamedTuple):
    """Size of a drawing and of the margins around its plot, in pixels; the left one grows with its labels."""

    width: int
    height: int
    left: int
    right: int
    top: int = 16
    bottom: int = 40


WIDE = DrawingSize(548, 388, left=34, right=44)
NARROW = DrawingSize(350, 330, left=30, right=34)


@dataclass(frozen=True)
class Scale:
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
        found = log_ticks(self.low, self.high, about) if self.log else []
        return found if len(found) > 1 else round_ticks(self.low, self.high, about)


def round_ticks(low: float, high: float, about: int) -> list[float]:
    """Multiples of 1, 2 or 5 times a power of ten between two values.

    Example:
        >>> round_ticks(0.0, 1.0, 5)
        [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    """
    rough = (high - low) / max(1, about)
    exponent = math.floor(math.log10(rough))
    step = next(m * 10.0**exponent for m in (1, 2, 5, 10) if m * 10.0**exponent >= rough * 0.999)
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(n * step, max(0, 1 - exponent)) + 0.0 for n in range(first, last + 1)]


def log_ticks(low: float, high: float, about: int) -> list[float]:
    """Powers of ten between two values, with 2 and 5 in between where there is room, or only every n-th power.

    Example:
        >>> log_ticks(1, 1000, 4), log_ticks(1, 1e9, 4)
        ([1.0, 10.0, 100.0, 1000.0], [1.0, 1000.0, 1000000.0, 1000000000.0])
    """
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 2, 5), (1, 3), (1,)):
        ticks = [m * 10.0**p for p in powers for m in steps if low * 0.999 <= m * 10.0**p <= high * 1.001]
        if len(ticks) <= about:
            return ticks
    return ticks[:: math.ceil(len(ticks) / about)]


def number_labels(values: Sequence[float]) -> list[str]:
    """Numbers with as many decimals as it takes to write each of them, so that no two are alike.

    Example:
        >>> number_labels([2.3, 2.35, 2.4]), number_labels([0.0, 1e7, 2e7])
        (['2.30', '2.35', '2.40'], ['0', '1e+07', '2e+07'])
    """
    largest = max(map(abs, values), default=0.0)
    apart = min((b - a for a, b in itertools.pairwise(values)), default=1.0)
    if largest < 1e6 and apart >= 1e-6:
        return _exactly(values, apart, lambda value, digits: f"{value:,.{digits}f}")
    return _exactly(values, apart, lambda value, digits: f"{value:.{digits}e}" if value else "0")


def byte_labels(values: Sequence[float]) -> list[str]:
    """Bytes with decimal prefixes and as many digits as it takes.

    Example:
        >>> byte_labels([500.0, 1000.0, 1.25e6])
        ['500 B', '1 kB', '1.25 MB']
    """
    apart = min((b - a for a, b in itertools.pairwise(values)), default=1.0)
    return _exactly(values, apart, _bytes)


def rate_labels(values: Sequence[float]) -> list[str]:
    """Rates as links are sold.

    Example:
        >>> rate_labels([1e6, 5e8, 1e10])
        ['1 Mbit/s', '500 Mbit/s', '10 Gbit/s']
    """
    return [si_bits_per_s(value, digits=1) for value in values]


def _bytes(value: float, digits: int) -> str:
    power = min(4, int(math.log10(max(abs(value), 1)) / 3 + 1e-9))
    return f"{value / 1000**power:.{digits + 3}g} {('B', 'kB', 'MB', 'GB', 'TB')[power]}"


def _exactly(values: Sequence[float], apart: float, write: Callable[[float, int], str]) -> list[str]:
    """Write values with the fewest digits that move none of them by more than a hundredth of their distance."""
    labels = [write(value, 0) for value in values]
    for digits in range(17):
        labels = [write(value, digits) for value in values]
        if all(abs(_value(label) - value) <= apart / 100 for label, value in zip(labels, values, strict=True)):
            break
    return labels


def _value(label: str) -> float:
    number, _, unit = label.replace(",", "").partition(" ")
    return float(number) * 1000.0 ** ("B", "kB", "MB", "GB", "TB").index(unit or "B")
