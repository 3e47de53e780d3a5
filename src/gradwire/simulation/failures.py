"""What failures of hosts and checkpoints take, and how many seconds apart checkpoints should be."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.core.errors import SpecError


@dataclass(frozen=True)
class Failing:
    """Hosts that fail, and a run that goes on from its last checkpoint.

    A failure of one host ends the work of all. Failures are independent and at a constant rate, so `hosts` hosts fail
    every M = mtbf_s / hosts seconds in the mean. Work since the last checkpoint is lost, and failures strike while a
    checkpoint is written and while the run starts again, too.

    Args:
        mtbf_s: mean time between failures of one host.
        hosts: how many.
        checkpoint_s: what a checkpoint takes, while which no rank computes.
        restart_s: from a failure until training goes on: noticing it, starting ranks, reading the checkpoint.

    Raises:
        SpecError: times that cannot be.

    >>> failing = Failing(mtbf_s=86_400.0, hosts=24, checkpoint_s=20.0, restart_s=60.0)
    >>> [round(seconds) for seconds in (failing.young_s, failing.daly_s, failing.best_s)]
    [379, 366, 366]
    >>> round(failing.lost(failing.best_s), 3)
    0.117
    """

    mtbf_s: float
    hosts: int
    checkpoint_s: float
    restart_s: float

    def __post_init__(self) -> None:
        if not (0 < self.mtbf_s < math.inf and self.hosts >= 1):
            raise SpecError(f"hosts fail every {self.mtbf_s:g} s: give a time above 0, and one host or more")
        if not (0 < self.checkpoint_s < math.inf and 0 <= self.restart_s < math.inf):
            raise SpecError(
                f"a checkpoint takes {self.checkpoint_s:g} s and a restart {self.restart_s:g} s: give a checkpoint "
                "a time above 0, and a restart one of 0 or more"
            )

    @property
    def mean_s(self) -> float:
        """M, the mean time between failures of any host."""
        return self.mtbf_s / self.hosts

    @property
    def young_s(self) -> float:
        """Seconds of work between checkpoints by Young (1974): sqrt(2 C M)."""
        return math.sqrt(2 * self.checkpoint_s * self.mean_s)

    @property
    def daly_s(self) -> float:
        """Seconds of work between checkpoints by Daly (2006, Equation 37), C the time of a checkpoint.

        sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C where C < 2 M, else M
        """
        half = self.checkpoint_s / (2 * self.mean_s)
        if half >= 1:
            return self.mean_s
        return self.young_s * (1 + math.sqrt(half) / 3 + half / 9) - self.checkpoint_s

    @property
    def best_s(self) -> float:
        """Seconds of work between checkpoints at which `lost` is least.

        They solve (1 - t/M) exp(t/M) = exp(-C/M), whatever a restart takes; found by bisection.
        """
        low, high, goal = 0.0, 1.0, math.exp(-self.checkpoint_s / self.mean_s)
        for _ in range(200):
            middle = (low + high) / 2
            if (1 - middle) * math.exp(middle) > goal:
                low = middle
            else:
                high = middle
        return self.mean_s * (low + high) / 2

    def lost(self, interval_s: float) -> float:
        """The share of time that is no training, with so many seconds of work between checkpoints (Daly 2006).

        1 - t / (M exp(R/M) (exp((t + C)/M) - 1))
        """
        exponent = (interval_s + self.checkpoint_s + self.restart_s) / self.mean_s
        if exponent > 700:
            return 1.0
        mean = self.mean_s
        spent = mean * math.exp(self.restart_s / mean) * math.expm1((interval_s + self.checkpoint_s) / mean)
        return 1 - interval_s / spent

    def refuse_hopeless(self) -> None:
        """Refuse hosts of which one fails before another checkpoint is there, nearly always.

        Raises:
            SpecError: with what would help.
        """
        if self.lost(self.best_s) > 0.99:
            raise SpecError(
                f"one of {self.hosts} hosts fails every {self.mean_s:.3g} s, and a checkpoint with a restart takes "
                f"{self.checkpoint_s + self.restart_s:.3g} s, so training never gets on: shorten these, take fewer "
                "hosts, or elastic:50, which goes on without a host that is lost"
            )


class FailedRun(NamedTuple):
    """A run with failures; times are seconds.

    Attributes:
        total_s: from beginning to end.
        work_s: of training that was kept.
        repeated_s: of training, or of a checkpoint, that a failure undid.
        checkpoints_s: of finished checkpoints.
        restarts_s: of starting again, also where a failure ended that.
        failures: how many.
    """

    total_s: float
    work_s: float
    repeated_s: float
    checkpoints_s: float
    restarts_s: float
    failures: int

    @property
    def lost(self) -> float:
        """The share of time that is no training."""
        return 1 - self.work_s / self.total_s


def run_with_failures(
    work_s: float, interval_s: float, checkpoint_s: float, restart_s: float, gaps_s: Iterator[float]
) -> FailedRun:
    """Train for so many seconds of work, with failures that come one after the other.

    Args:
        work_s: of training that must be done.
        interval_s: of training between two checkpoints.
        checkpoint_s, restart_s: see `Failing`.
        gaps_s: seconds from each failure to the next; where they end, none comes.

    >>> run_with_failures(10.0, 4.0, 1.0, 2.0, iter([6.0]))
    FailedRun(total_s=15.0, work_s=10.0, repeated_s=1.0, checkpoints_s=2.0, restarts_s=2.0, failures=1)
    """
    now_s = done_s = repeated_s = checkpoints_s = restarts_s = 0.0
    failures, fails_at_s = 0, next(gaps_s, math.inf)
    while done_s < work_s:
        segment = interval_s + checkpoint_s
        whole = max(0, math.ceil((work_s - done_s) / interval_s) - 1)
        whole = whole if math.isinf(fails_at_s) else min(whole, int((fails_at_s - now_s) / segment))
        now_s, done_s = now_s + whole * segment, done_s + whole * interval_s
        checkpoints_s += whole * checkpoint_s
        left_s = work_s - done_s
        last = left_s if left_s <= interval_s else segment
        if fails_at_s >= now_s + last:
            now_s, done_s = now_s + last, done_s + min(left_s, interval_s)
            checkpoints_s += last - min(left_s, interval_s)
            continue
        repeated_s += fails_at_s - now_s
        now_s, resumed_s = fails_at_s, fails_at_s + restart_s
        failures, fails_at_s = failures + 1, fails_at_s + next(gaps_s, math.inf)
        while fails_at_s < resumed_s:
            failures, resumed_s = failures + 1, fails_at_s + restart_s
            fails_at_s += next(gaps_s, math.inf)
        restarts_s, now_s = restarts_s + resumed_s - now_s, resumed_s
    return FailedRun(now_s, work_s, repeated_s, checkpoints_s, restarts_s, failures)
