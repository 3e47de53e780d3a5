"""Delays and losses as people write them; rates are read in `gradwire.core.rates`."""

from __future__ import annotations

from gradwire.core.rates import TIMES, number_in, seconds_in, shortened

SHORTEST_DELAY_S, LONGEST_DELAY_S = 1e-3, 10.0
MOST_LOSS = 0.5


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
    seconds = seconds_in(delay)
    if seconds is None or not (seconds == 0 or SHORTEST_DELAY_S <= seconds <= LONGEST_DELAY_S):
        raise ValueError(
            f"delay {shortened(delay)} cannot be emulated: write a number and a unit of {', '.join(TIMES)}, "
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
    percent = 0.0 if loss.strip() == "0" else number_in(loss, {"%": 1.0})
    if percent is None or percent > 100 * MOST_LOSS:
        raise ValueError(f'loss {shortened(loss)} cannot be used: write per cent from 0% to 50%, such as "0.1%"')
    return percent / 100
