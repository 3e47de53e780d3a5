"""Below which bandwidth a method pays, by what was measured at one bandwidth.

A step of a method at rate `B` (bit/s) is modelled from what it took at the rate `R` it was measured at:

    t(B) = busy + max(0, wait + 8 * sent * (1/B - 1/R))

where `busy` are the seconds of computing and of coding that was not hidden, `wait` what was left of the step, and
`sent` the bytes that go through a host's link in it. What the bytes take is the only part that depends on the rate.
Latencies and collectives that wait for each other, `wait - 8 * sent / R`, stay as they were; where that is negative,
the backward pass hid so much of the sending, and goes on hiding as much.

A method reaches the target in `steps` steps whatever the link is: losses do not depend on it. (In a comparison of
so many minutes they do, through the learning rate, and the answer is rougher.) So a method pays at `B` where

    steps * t(B) < baseline.steps * baseline.t(B)

Both sides are straight lines in 1/B with one kink each, so that the crossing has a closed form. `docs/results.md`
compares the model with runs at two rates.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gradwire.compare.figures import bytes_per_step, mean, paired, target_hit
from gradwire.compare.results import FP32, Comparison
from gradwire.network import parse_rate


@dataclass(frozen=True)
class TargetCost:
    """What it takes a method to reach the target.

    Attributes:
        steps: to the target.
        busy_s: of a step, spent on computing and on coding that was not hidden.
        wait_s: of a step, the rest.
        sent_bytes: in a step, through the link of a host.
        rate: of the links, in bit/s, when this was measured.
    """

    steps: float
    busy_s: float
    wait_s: float
    sent_bytes: float
    rate: float

    def step_s(self, rate: float) -> float:
        """Seconds that a step would take on links of `rate` bit/s.

        Example:
            >>> course = TargetCost(steps=100, busy_s=0.1, wait_s=0.9, sent_bytes=1e7, rate=1e8)
            >>> round(course.step_s(1e8), 6), round(course.step_s(5e7), 6), round(course.step_s(1e10), 6)
            (1.0, 1.8, 0.208)
        """
        return self._step_s(1 / rate)

    def seconds(self, rate: float) -> float:
        """Seconds of training to the target on links of `rate` bit/s."""
        return self.steps * self._step_s(1 / rate)

    @property
    def seconds_a_unit(self) -> float:
        """How much longer the target takes for each unit of 1/B, once the sending is not hidden: bits on the way."""
        return 8 * self.steps * self.sent_bytes

    @property
    def kink(self) -> float:
        """The 1/B from which on the sending is not hidden, 0 if it never is."""
        return max(0.0, 1 / self.rate - self.wait_s / (8 * self.sent_bytes)) if self.sent_bytes else 0.0

    def _step_s(self, slowness: float) -> float:
        return self.busy_s + max(0.0, self.wait_s + 8 * self.sent_bytes * (slowness - 1 / self.rate))

    def lead_s(self, other: TargetCost, slowness: float) -> float:
        """By how many seconds this course ends before another one at 1/B = `slowness`."""
        return other.steps * other._step_s(slowness) - self.steps * self._step_s(slowness)


def pays_below(mine: TargetCost, baseline: TargetCost) -> float | None:
    """The rate (bit/s) below which a method reaches the target sooner than a baseline.

    Returns:
        The rate; infinity where the method is sooner on every link; None where there is no such rate, since the
        method sends as much on its way to the target as the baseline does.

    Example:
        >>> fp32 = TargetCost(steps=100, busy_s=0.1, wait_s=0.8, sent_bytes=1e7, rate=1e8)
        >>> small = TargetCost(steps=100, busy_s=0.2, wait_s=0.08, sent_bytes=1e6, rate=1e8)
        >>> round(pays_below(small, fp32) / 1e6)
        720
    """
    slope = baseline.seconds_a_unit - mine.seconds_a_unit
    if slope <= 0:
        return None
    corners = sorted({0.0, mine.kink, baseline.kink})
    leads = [mine.lead_s(baseline, corner) for corner in corners]
    behind = max((i for i, lead in enumerate(leads) if lead < 0), default=None)
    if behind is None:
        return math.inf
    if behind == len(corners) - 1:
        return 1 / (corners[-1] - leads[-1] / slope)
    (x, after), (lead, lead_after) = corners[behind : behind + 2], leads[behind : behind + 2]
    return 1 / (x + (after - x) * -lead / (lead_after - lead))


def measured_rate(comparison: Comparison) -> float | None:
    """Bit/s of a comparison's links; None where they differ, and where the rate is in other words than ours."""
    if comparison.options.get("rates"):
        return None
    try:
        return parse_rate(comparison.options["rate"])
    except ValueError:
        return None


def course(comparison: Comparison, method: str, seeds: set[int]) -> TargetCost | None:
    """What it took a method to reach the target, the mean over these seeds; None if it was not reached with one."""
    runs = [run for run in comparison.finished(method) if run.seed in seeds]
    hits = [target_hit(comparison, run) for run in runs]
    steps = [hit.steps for hit in hits if hit is not None]
    sent, rate = bytes_per_step(runs), measured_rate(comparison)
    if sent is None or rate is None or len(steps) < len(runs):
        return None
    step_s = mean(run.times_s[-1] / run.steps for run in runs)
    busy_s = mean((run.split.compute_s + run.split.encode_s) / run.steps for run in runs)
    return TargetCost(mean(steps), busy_s, max(0.0, step_s - busy_s), sent, rate)


def method_pays_below(comparison: Comparison, method: str) -> float | None:
    """`pays_below` of a method of a comparison against fp32, over the seeds with which both have finished.

    Returns:
        Bit/s, infinity, or None, also where one of them does not reach the target.
    """
    seeds = {pair.mine.seed for pair in paired(comparison, comparison.finished(method), FP32)}
    mine, baseline = course(comparison, method, seeds), course(comparison, FP32, seeds)
    return pays_below(mine, baseline) if mine and baseline else None
