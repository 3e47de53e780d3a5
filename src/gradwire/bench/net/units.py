"""Rates, delays and losses as people write them."""

from __future__ import annotations

import re

_RATES = {"bit": 1.0, "kbit": 1e3, "mbit": 1e6, "gbit": 1e9, "tbit": 1e12}
_TIMES = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
SHORTEST_DELAY_S, LONGEST_DELAY_S = 1e-3, 10.0
MOST_LOSS = 0.5


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
    bits_per_s = _number(rate, _RATES)
    if bits_per_s is None or not 1e3 <= bits_per_s <= 1e13:
        raise ValueError(
            f"rate {_shown(rate)} cannot be used: write a number and a unit of {', '.join(_RATES)}, "
            'from 1kbit to 10tbit, such as "100mbit"'
        )
    return bits_per_s


def format_rate(bits_per_s: float) -> str:
    """Write a rate in the largest unit in which it is 1 or more.

    >>> format_rate(100e6), format_rate(2.5e9)
    ('100mbit', '2.5gbit')
    """
    unit = max((unit for unit, bits in _RATES.items() if bits <= bits_per_s), key=_RATES.__getitem__)
    return f"{bits_per_s / _RATES[unit]:g}{unit}"


def parse_delay(delay: str) -> float:
    """Read a delay in `tc`'s notation and return seconds.

    Args:
        delay: a number and one of the units us, ms, s, such as "50ms"; or "0".

    Raises:
        ValueError: for anything else, and for what cannot be emulated: a delay below 1 ms, which is what a process
            that waits its turn makes of it anyhow, or above 10 s.

    >>> parse_delay("50ms"), parse_delay("0")
    (0.05, 0.0)
    """
    seconds = 0.0 if delay.strip() == "0" else _number(delay, _TIMES)
    if seconds is None or not (seconds == 0 or SHORTEST_DELAY_S <= seconds <= LONGEST_DELAY_S):
        raise ValueError(
            f"delay {_shown(delay)} cannot be emulated: write a number and a unit of {', '.join(_TIMES)}, "
            'from 1ms to 10s, such as "50ms", or 0'
        )
    return seconds


def parse_loss(loss: str) -> float:
    """Read a loss and return the share of frames that get lost.

    Args:
        loss: a number of per cent, such as "0.1%"; or "0".

    Raises:
        ValueError: for anything else, and above 50%, where nothing arrives in the end.

    >>> parse_loss("0.1%"), parse_loss("0")
    (0.001, 0.0)
    """
    percent = 0.0 if loss.strip() == "0" else _number(loss, {"%": 1.0})
    if percent is None or percent > 100 * MOST_LOSS:
        raise ValueError(f'loss {_shown(loss)} cannot be used: write per cent from 0% to 50%, such as "0.1%"')
    return percent / 100


def _number(text: str, units: dict[str, float]) -> float | None:
    """The number that stands in a text, in units of 1; None where there is none, or no such unit."""
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*([a-z]+|%)\s*", text.lower())
    return float(match[1]) * units[match[2]] if match and match[2] in units else None


def _shown(text: str) -> str:
    return repr(text) if len(text) <= 40 else f"{text[:40]!r}..."
