"""Numbers as people read them: in the report of a run, on pages and on the terminal."""

from __future__ import annotations

import math
from collections.abc import Sequence

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


def si_bits_per_s(value: float, digits: int = 3) -> str:
    """A rate as links are sold: 95.1 Mbit/s.

    Example:
        >>> si_bits_per_s(95.13e6), si_bits_per_s(2.5e9), si_bits_per_s(1e9, digits=1)
        ('95.1 Mbit/s', '2.50 Gbit/s', '1 Gbit/s')
    """
    power = min(4, max(1, int(math.log10(max(value, 1)) / 3 + 1e-9)))
    unit = ("bit/s", "kbit/s", "Mbit/s", "Gbit/s", "Tbit/s")[power]
    return f"{significant(value / 1000**power, digits)} {unit}"


def milliseconds(value: float | None) -> str:
    """Milliseconds: whole ones from ten on, else one decimal."""
    if value is None:
        return NOTHING
    return f"{value:,.0f}" if value >= 9.95 else f"{value:.1f}"


def spoken_seconds(value: float) -> str:
    """A predicted duration as people read it.

    >>> spoken_seconds(17.914), spoken_seconds(0.00321)
    ('17.91 s', '3.21 ms')
    """
    return f"{value:.2f} s" if value >= 0.1 else f"{1e3 * value:.2f} ms"


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


def listed(numbers: Sequence[int]) -> str:
    """Numbers as one says them, such as those of ranks.

    >>> listed([1]), listed([0, 2, 5])
    ('1', '0, 2 and 5')
    """
    *most, last = map(str, numbers)
    return f"{', '.join(most)} and {last}" if most else last


def ranks_named(ranks: Sequence[int]) -> str:
    """Ranks with the word before them.

    >>> ranks_named([1]), ranks_named([0, 2])
    ('rank 1', 'ranks 0 and 2')
    """
    return f"rank{'s' * (len(ranks) > 1)} {listed(ranks)}"
