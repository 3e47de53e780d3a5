"""Rates of links, and other numbers with units, as people write them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_COUNTS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "B": 1e9, "T": 1e12}
_SPOKEN = {"bit": "bit/s", "kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s", "tbit": "Tbit/s"}


def parse_rate(rate: str) -> float:
    """Read a rate in `tc`'s notation and return bits per second.

    Args:
        rate: a number and one of the units bit, kbit, mbit, gbit, tbit (powers of 1000), such as "100mbit".

    Raises:
        ValueError: for anything else, and beyond 1kbit to 10tbit. "mbps" is refused too: `tc` means megabytes by it,
            people megabits.

    >>> parse_rate("100mbit"), parse_rate("2.5gbit")
    (100000000.0, 2500000000.0)
    """
    bits_per_s = number_in(rate, RATES)
    if bits_per_s is None or not 1e3 <= bits_per_s <= 1e13:
        raise ValueError(
            f"rate {shortened(rate)} cannot be used: write a number and a unit of {', '.join(RATES)}, "
            'from 1kbit to 10tbit, such as "100mbit"'
        )
    return bits_per_s


def format_rate(bits_per_s: float) -> str:
    """Write a rate in the largest unit in which it is 1 or more.

    >>> format_rate(100e6), format_rate(2.5e9)
    ('100mbit', '2.5gbit')
    """
    unit = _unit(bits_per_s)
    return f"{bits_per_s / RATES[unit]:g}{unit}"


def spoken_rate(bits_per_s: float) -> str:
    """Write a rate for people, with three digits.

    >>> spoken_rate(100e6), spoken_rate(47_812_345.0), spoken_rate(999_999_999.0)
    ('100 Mbit/s', '47.8 Mbit/s', '1 Gbit/s')
    """
    bits_per_s = float(f"{bits_per_s:.3g}")  # before there is a unit: else it may round up to 1e+03 of a smaller one
    unit = _unit(bits_per_s)
    return f"{bits_per_s / RATES[unit]:.3g} {_SPOKEN[unit]}"


def _unit(bits_per_s: float) -> str:
    return max((unit for unit, bits in RATES.items() if bits <= bits_per_s), key=RATES.__getitem__, default="bit")


def number_in(text: str, units: Mapping[str, float]) -> float | None:
    """The number that stands in a text, in units of 1; None where there is none, or no such unit."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+|%)\s*", text.lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


def seconds_in(text: str, units: Mapping[str, float] = TIMES) -> float | None:
    """Return the seconds that a text says; None where it is no time, or an endless one.

    >>> seconds_in("50ms"), seconds_in("0"), seconds_in("-1s"), seconds_in("50")
    (0.05, 0.0, None, None)
    """
    found = 0.0 if text.strip() == "0" else number_in(text, units)
    return None if found is None or not 0 <= found < math.inf else found


def count_in(text: str) -> float | None:
    """How many parameters or tokens a text says; None where it says none, or nothing at all.

    >>> count_in("1.85M"), count_in("7B"), count_in("15T"), count_in("12"), count_in("many")
    (1850000.0, 7000000000.0, 15000000000000.0, 12.0, None)
    >>> count_in("9" * 400)  # more than a float holds
    """
    match = re.fullmatch(r"(\d+\.?\d*)([kMGBT]?)", text.strip())
    found = float(match[1]) * _COUNTS[match[2]] if match else 0.0
    return found if 0 < found < math.inf else None


def shortened(text: str) -> str:
    """A text as errors show it.

    >>> shortened("fast")
    "'fast'"
    """
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
