"""Numbers as people read them; shared by the report and the terminal."""

from __future__ import annotations

import math

from gradwire.bench.results import Row, Spread

NOTHING = "–"


def si_bytes(value: float | None) -> str:
    """Bytes with a decimal prefix, as networks count: 11.8 MB.

    Example:
        >>> si_bytes(11_838_071), si_bytes(900), si_bytes(None)
        ('11.8 MB', '900 B', '–')
    """
    if value is None:
        return NOTHING
    power = min(4, int(math.log10(max(abs(value), 1)) / 3 + 1e-9))
    unit = ("B", "kB", "MB", "GB", "TB")[power]
    return f"{significant(value / 1000**power, 3)} {unit}"


def seconds(value: float | None) -> str:
    """A duration: 0.42 s, 83 s, 12 min 5 s.

    Example:
        >>> seconds(0.418), seconds(83.2), seconds(725)
        ('0.42 s', '83 s', '12 min 5 s')
    """
    if value is None:
        return NOTHING
    if value >= 300:
        minutes, rest = divmod(round(value), 60)
        return f"{minutes} min {rest} s"
    return f"{significant(value, 2)} s"


def milliseconds(value: float | None) -> str:
    """Milliseconds: whole ones from ten on, else one decimal."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def significant(value: float, digits: int) -> str:
    """A number with so many significant digits and no exponent; whole numbers keep all of theirs.

    Example:
        >>> significant(0.0123, 2), significant(1.0, 3), significant(118.4, 2)
        ('0.012', '1.00', '118')
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    decimals = max(0, digits - 1 - math.floor(math.log10(abs(value))))
    return f"{value:,.{decimals}f}"


def times(value: float | None) -> str:
    """A ratio: 4.2x."""
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


def gap(value: float | None) -> str:
    """A signed difference."""
    if value is None:
        return NOTHING
    return f"{value:+.3f}"


def speed_up(value: Spread | None, row: Row) -> str:
    """A speed-up with its range over seeds, or why there is none."""
    if value is None:
        return NOTHING if row.loss is None or row.reached else "not reached"
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
    text = seconds(row.target_s.mean)
    return text if row.reached == row.seeds else f"{text} ({row.reached} of {row.seeds})"
