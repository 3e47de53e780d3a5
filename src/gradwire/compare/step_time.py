"""How long a step takes, told from some of a run's steps: the others need no slow link, as only losses are left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from gradwire.compare.chance import Estimate, estimate

WARM_UP = 2
"""Steps that are no sample of the others: DDP makes its buckets anew after the first, and connections gain speed."""

LEAST = 10
"""Steps after the warm-up that are timed at least: fewer tell little of how much steps differ."""

PRECISION = 0.02
"""The time of a step is known once its standard error is this share of it."""


def step_time(times_s: Sequence[float]) -> Estimate:
    """Seconds of a step after the warm-up, by the times at which steps ended: their mean and its standard error.

    Example:
        >>> step_time([5.0, 6.0, 7.0, 9.0])
        Estimate(mean=1.5, error=0.5, freedom=1)
    """
    return estimate([later - earlier for earlier, later in pairwise(times_s[WARM_UP - 1 :])])


def is_known(times_s: Sequence[float], precision: float) -> bool:
    """Whether the time of a step is known to `precision`, a share of it, by the times at which steps ended.

    Example:
        >>> ends = [0.1 * step for step in range(1, 13)]
        >>> is_known(ends, 0.02), is_known(ends[:-1], 0.02)
        (True, False)
    """
    if len(times_s) < WARM_UP + LEAST:
        return False
    found = step_time(times_s)
    return found.error is not None and found.error <= precision * found.mean


def extended(sums: Sequence[float], steps: int) -> list[float]:
    """Sums after each step, continued to `steps` steps by the mean of what a step added after the warm-up.

    Example:
        >>> extended([5.0, 6.0, 7.0, 8.0], 6)
        [5.0, 6.0, 7.0, 8.0, 9.0, 10.0]
    """
    each = step_time(sums).mean
    return [*sums, *(sums[-1] + each * more for more in range(1, steps - len(sums) + 1))]
