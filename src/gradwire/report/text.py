"""Numbers as people read them; shared by the report and the terminal."""

from __future__ import annotations

import math

from gradwire.compare.figures import Row, Spread
from gradwire.compare.findings import FindingKind
from gradwire.core.figures import NOTHING as NOTHING
from gradwire.core.figures import milliseconds as milliseconds
from gradwire.core.figures import si_bytes as si_bytes
from gradwire.core.figures import significant as significant


def seconds(value: float | None) -> str:
    """A duration: 0.42 s, 83 s, 12 min 5 s.

    Example:
        >>> seconds(0.418), seconds(83.2), seconds(725)
        ('0.42 s', '83 s', '12 min 5 s')
    """
    if value is None or not math.isfinite(value):
        return NOTHING
    if value >= 300:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    return f"{significant(value, 2)} s"


def times(value: float | None) -> str:
    """A ratio as people read it: 4.2x."""
    return NOTHING if value is None else f"{significant(value, 2 if value < 10 else 3)}×"


def percent(value: float | None) -> str:
    """A percentage with one decimal below ten."""
    if value is None:
        return NOTHING
    return f"{value:.1f} %" if abs(value) < 9.95 else f"{value:.0f} %"


def spread(value: Spread | None, digits: int = 4) -> str:
    """A mean, with its standard deviation where seeds differ."""
    if value is None:
        return NOTHING
    text = significant(value.mean, digits)
    return f"{text} ± {significant(value.std, 2)}" if value.std else text


def gap(value: float | None, error: float | None = None) -> str:
    """A difference, always with its sign, and its standard error where it is known.

    Example:
        >>> gap(0.25), gap(-0.25, 0.0912)
        ('+0.250', '-0.250 ± 0.091')
    """
    if value is None:
        return NOTHING
    return f"{value:+.3f} ± {significant(error, 2)}" if error else f"{value:+.3f}"


def speed_up(value: Spread | None, why_not: FindingKind | None) -> str:
    """A speed-up with its range over seeds; where none may be shown, why."""
    if why_not is not None:
        return why_not.value
    if value is None:
        return NOTHING
    text = times(value.mean)
    if value.high - value.low > 0.005:
        text += f" ({significant(value.low, 2)}–{significant(value.high, 2)})"
    return text


def target_time(row: Row) -> str:
    """Time to target, and how many seeds reached it where not all did."""
    if row.loss is None:
        return NOTHING
    if row.target_s is None:
        return "not reached"
    text = estimated(row, seconds(row.target_s.mean))
    return text if row.reached == row.seeds else f"{text} ({row.reached} of {row.seeds})"


def estimated(row: Row, text: str) -> str:
    """A time of a method, with a mark where it is estimated from some of the steps."""
    return text if row.timed_steps is None else f"≈ {text}"


def counted(number: int, noun: str) -> str:
    """A number of things.

    Example:
        >>> counted(1, "host"), counted(4, "host"), counted(8, "batch")
        ('1 host', '4 hosts', '8 batches')
    """
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number} {noun}" if number == 1 else f"{number} {noun}{plural}"
