"""What a simulated run took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from gradwire.simulation.windows import StepOfAll


class Interval(NamedTuple):
    """Seconds of training between two checkpoints, and what that costs.

    Attributes:
        name: whose rule it is.
        interval_s: the seconds.
        lost: the share of time that is no training, by Daly's formula.
        simulated: the same of a simulated run.
    """

    name: str
    interval_s: float
    lost: float
    simulated: float


class StepShares(NamedTuple):
    """StepShares of a rank's time without failures, in the mean of all ranks, which add up to 1.

    Attributes:
        computing, coding: shares of these.
        waiting: for slower ranks, for ranks that a bound holds back, or until a host is known to be lost.
        messages: waiting for messages.
    """

    computing: float
    coding: float
    waiting: float
    messages: float

    @classmethod
    def of(cls, computing_s: float, coding_s: float, waiting_s: float, messages_s: float) -> StepShares:
        """The shares of seconds.

        >>> StepShares.of(1.0, 0.0, 1.0, 2.0)
        StepShares(computing=0.25, coding=0.0, waiting=0.25, messages=0.5)
        """
        whole = computing_s + coding_s + waiting_s + messages_s
        return cls(computing_s / whole, coding_s / whole, waiting_s / whole, messages_s / whole)


@dataclass(frozen=True)
class SimulatedRun:
    """What training takes on simulated ranks.

    Attributes:
        method: its spec.
        schedule: how ranks meet: "every step", "windows", "elastic" or "servers".
        ranks: how many.
        steps: that each rank made, in the mean of all.
        step_s: seconds of a step in the mean: all that was simulated, over the steps.
        p50_s, p99_s: the median and the 99th percentile. Of windows and rounds, of their mean step.
        alone_s: what one rank computes in a step by itself.
        shares: of a step.
        lost: the share of all time that failures and checkpoints take; of elastic, that ranks were away.
        intervals: of checkpoints, the one that was taken first; none without failures.
        staleness: of pushes, in the mean; None where there are no servers.
        present: the mean number of ranks that train.
        shown: the first steps of all ranks, for `chrome_trace`.
    """

    method: str
    schedule: str
    ranks: int
    steps: float
    step_s: float
    p50_s: float
    p99_s: float
    alone_s: float
    shares: StepShares
    lost: float = 0.0
    intervals: tuple[Interval, ...] = ()
    staleness: float | None = None
    present: float | None = None
    shown: tuple[StepOfAll, ...] = ()

    @property
    def steps_per_h(self) -> float:
        """Steps that each rank makes in an hour, failures counted."""
        return 3600 / self.step_s * (1 - self.lost)

    @property
    def efficiency(self) -> float:
        """Steps of all ranks in a time, in those of so many ranks that each train alone and never fail."""
        return self.alone_s / self.step_s * (1 - self.lost)

    def as_dict(self) -> dict[str, Any]:
        """Plain data for JSON: all but `shown`."""
        found = {name: value for name, value in vars(self).items() if name not in ("shown", "intervals")}
        found["shares"] = self.shares._asdict()
        found["intervals"] = [each._asdict() for each in self.intervals]
        return found | {"steps_per_h": self.steps_per_h, "efficiency": self.efficiency}


def percentile(values: Sequence[float], share: float) -> float:
    """The least value that at least `share` of all are not above (nearest rank).

    >>> percentile([4.0, 1.0, 3.0, 2.0], 0.5), percentile([1.0, 2.0], 0.99)
    (2.0, 2.0)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(share * len(ordered)) - 1)]
