"""How good the evidence of a comparison is: what was learned, how well methods ended, and what is no number."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.bench.figures import Spread, mean, metric_gaps, paired
from gradwire.bench.results import FP32, Comparison, Run

LEAST_NOISES = 5.0
"""A loss that fell by fewer standard deviations of the fall has not been shown to fall."""

LEAST_TOLERANCES = 4.0
"""A relative target must lie within this fraction of the fall, else it is reached by not learning."""

ONE_SEED_SHARE = 0.01
"""With one seed, a final metric this share of the baseline's worse counts as worse: no spread can be measured."""

LEAST_SHARE = 0.001
"""A final metric that is worse by less than this share of the baseline's is as good, however near seeds lie."""


# -------------------------------------------------------------------------------------------- learning


class Learning(NamedTuple):
    """How far the training loss of a run fell, and what chance does to that.

    Attributes:
        start: mean of the first losses, over as many steps as losses are smoothed over, or half of them all.
        end: mean of as many last ones.
        noise: standard deviation that the noise of single losses gives to `start - end`.
    """

    start: float
    end: float
    noise: float

    @property
    def fall(self) -> float:
        """How far the loss fell."""
        return self.start - self.end

    @property
    def in_noises(self) -> float:
        """The fall in units of its noise; infinite for a fall without any noise."""
        if self.noise:
            return self.fall / self.noise
        return math.inf if self.fall > 0 else 0.0


def learning(run: Run, window: int) -> Learning:
    """How far a run's loss fell.

    The noise of a single loss is estimated from second differences, `l[i-1] - 2 l[i] + l[i+1]`, whose variance is six
    times that of a loss: a trend, however steep, cancels in them. Few of them tell little, so the estimate is widened
    by 6 / their number. (Of 20,000 runs of pure noise 3 of 12 steps, and none of 60, fell by five times this noise.)

    Example:
        >>> learning(Run("int4", 0, losses=[4.0, 3.0, 2.0, 1.0]), window=1)
        Learning(start=4.0, end=1.0, noise=0.0)
    """
    losses = run.losses
    width = max(1, min(window, len(losses) // 2))
    bends = [a - 2 * b + c for a, b, c in zip(losses, losses[1:], losses[2:], strict=False)]
    variance = mean(bend * bend for bend in bends) / 6 if bends else 0.0
    doubt = 1 + 6 / len(bends) if bends else 1.0
    return Learning(mean(losses[:width]), mean(losses[-width:]), doubt * math.sqrt(2 * variance / width))


def hardly_learned(found: Learning, tolerance: float) -> bool:
    """Whether a fall is too small to compare methods by: against its noise, or against the target's tolerance."""
    least = LEAST_TOLERANCES * tolerance * abs(found.end)
    return not (found.in_noises >= LEAST_NOISES and found.fall > least)


def baseline_learning(comparison: Comparison) -> Learning | None:
    """The fall of fp32's loss with the seed where it stands out least; None if it has not finished."""
    found = [learning(run, comparison.smoothing) for run in comparison.finished(FP32)]
    return min(found, key=lambda one: one.in_noises, default=None)


# ------------------------------------------------------------------------------------------ end metric


class Shortfall(NamedTuple):
    """How much worse a method ends than fp32 by the metric, and how much of that seeds explain.

    Attributes:
        worse_by: mean over seeds; negative where the method ends better.
        allowed: standard deviation of fp32's metric over these seeds, or with one seed a share of it.
        baseline: mean of fp32's metric.
        seeds: how many both have finished.
    """

    worse_by: float
    allowed: float
    baseline: float
    seeds: int


def shortfall(comparison: Comparison, method: str) -> Shortfall | None:
    """How much worse a method ends than fp32; None where there is no pair of final metrics.

    What seeds explain is fp32's spread alone: a method that varies more than the baseline is not excused by it.
    """
    runs = comparison.finished(method)
    gaps = metric_gaps(comparison, runs)
    ends = [pair.base.evaluations[-1].value for pair in paired(comparison, runs, FP32) if pair.base.evaluations]
    spread = Spread.of(ends)
    if not gaps or spread is None:
        return None
    share = LEAST_SHARE if len(gaps) > 1 else ONE_SEED_SHARE
    sign = -1 if comparison.task["higher_is_better"] else 1
    return Shortfall(sign * mean(gaps), max(spread.std, share * abs(spread.mean)), spread.mean, len(gaps))


# ----------------------------------------------------------------------------------------- finiteness


def not_finite(run: Run) -> str | None:
    """What of a finished run is not a number, as the end of a sentence; None where all is well.

    The floor, torch:noop, is not looked at: its ranks train alone, and only its times are used.
    """
    if not run.has_accuracy:
        return None
    bad = [step for step, loss in enumerate(run.losses, start=1) if not math.isfinite(loss)]
    if bad and bad == list(range(bad[0], run.steps + 1)):
        return f"the loss is not finite from step {bad[0]} on"
    if bad:
        return f"the loss is not finite at {len(bad)} of {run.steps} steps, first at step {bad[0]}"
    if not all(math.isfinite(evaluation.value) for evaluation in run.evaluations):
        return "the metric is not finite"
    return None
