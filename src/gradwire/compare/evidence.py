"""How good the evidence of a comparison is: what was learned, how well methods ended, and what is no number."""

from __future__ import annotations

import math
from typing import NamedTuple

from gradwire.compare.chance import Estimate, estimate, with_both_errors
from gradwire.compare.figures import example_gaps, final_loss, mean, paired, speed_ups
from gradwire.compare.results import FP32, Comparison, Run
from gradwire.compare.step_time import step_time

LEAST_NOISES = 5.0
"""A loss that fell by fewer standard deviations of the fall has not been shown to fall."""

LEAST_TOLERANCES = 4.0
"""A relative target must lie within this fraction of the fall, else it is reached by not learning."""

ONE_SEED_SHARE = 0.01
"""With one seed, a method that ends worse by at most this share of the baseline's figure counts as its equal."""

LEAST_SHARE = 0.001
"""With several seeds, a difference below this share of the baseline's figure is none that matters."""

NO_SIGN = 2.0
"""A method that ends worse by at most so many standard errors shows no sign of being worse."""

LEAST_WINDOWS = 5
"""Runs shorter than this many times the steps that losses are means of have no beginning and no end to compare."""

STILL_LEARNING = 0.2
"""Where the last quarter of a run brings more than this share of the loss's whole fall, the run has not come to an end:
a straight line has a quarter."""

CLEARLY_SOONER = 1.5
"""Where every seed is sooner, or every seed later, by this factor, no statistics are needed to see it."""


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


class Shortness(NamedTuple):
    """How short the baseline's runs are.

    Attributes:
        steps: of the shortest run.
        least: steps that a run needs, given how many its losses are means of.
        late: share of the loss's fall that the last quarter of a run brought, the largest over seeds.
    """

    steps: int
    least: int
    late: float

    @property
    def too_short(self) -> bool:
        """Whether nothing can be concluded from so short a run."""
        return self.steps < self.least or self.late > STILL_LEARNING


def shortness(comparison: Comparison) -> Shortness | None:
    """How short fp32's runs are; None if it has not finished."""
    runs, window = comparison.finished(FP32), comparison.smoothing
    if not runs:
        return None
    return Shortness(min(run.steps for run in runs), LEAST_WINDOWS * window, max(_late(run, window) for run in runs))


def _late(run: Run, window: int) -> float:
    """The share of a loss's fall that lies in the last quarter of the run; 0 where it did not fall."""
    found, before = learning(run, window), run.losses[: -(run.steps // 4) or None]
    width = max(1, min(window, run.steps // 2))
    return (mean(before[-width:]) - found.end) / found.fall if found.fall > 0 else 0.0


# -------------------------------------------------------------------------------------------- the ends


class Shortfall(NamedTuple):
    """How much worse a method ends than fp32, and what chance does to that.

    Attributes:
        worse_by: mean over seeds, which are paired, and its standard error; negative where the method ends better.
        baseline: mean of fp32's figure.
        seeds: how many both have finished.
        examples: held out that both were evaluated on; 0 where they are not known one by one.
        least: a difference that does not matter, however sure it is.
    """

    worse_by: Estimate
    baseline: float
    seeds: int
    examples: int
    least: float

    @property
    def is_worse(self) -> bool:
        """Whether it is told from chance that the method ends worse.

        Two models of one seed may well differ although their methods do not, so several seeds are needed.
        """
        return self.seeds > 1 and self.worse_by.mean > max(self.worse_by.detectable, self.least)

    @property
    def no_sign(self) -> bool:
        """Whether there is no sign that the method ends worse."""
        return self.worse_by.mean <= max(NO_SIGN * (self.worse_by.error or 0.0), self.least)


def shortfall(comparison: Comparison, method: str) -> Shortfall | None:
    """How much worse a method ends than fp32 by the metric; None where there is no pair of final metrics."""
    sign = -1 if comparison.task["higher_is_better"] else 1
    pairs = [p for p in paired(comparison, comparison.finished(method), FP32) if all(r.evaluations for r in p)]
    if not pairs:
        return None
    ends = [(sign * mine.evaluations[-1].value, sign * base.evaluations[-1].value) for mine, base in pairs]
    baseline, share = sign * mean(base for _, base in ends), LEAST_SHARE if len(pairs) > 1 else ONE_SEED_SHARE
    by_example = [sign * gap for gap in example_gaps(pairs)]
    worse_by = with_both_errors(estimate([mine - base for mine, base in ends]), estimate(by_example or [0.0]))
    return Shortfall(worse_by, baseline, len(pairs), len(by_example), share * abs(baseline))


def loss_shortfall(comparison: Comparison, method: str) -> Shortfall | None:
    """How far a method's smoothed training loss ends above fp32's, as log(mine / fp32's); None without a pair of runs.

    Seeds that end at a high loss differ more than those that end at a low one, and logarithms take that away. Where a
    loss is not positive it is the difference over the mean of fp32's.
    """
    pairs, window = paired(comparison, comparison.finished(method), FP32), comparison.smoothing
    if not pairs:
        return None
    ends = [(final_loss(mine, window), final_loss(base, window)) for mine, base in pairs]
    baseline = mean(base for _, base in ends)
    if all(loss > 0 for pair in ends for loss in pair):
        gaps = [math.log(mine / base) for mine, base in ends]
    else:
        gaps = [(mine - base) / (abs(baseline) or 1.0) for mine, base in ends]
    return Shortfall(estimate(gaps), baseline, len(pairs), 0, comparison.tolerance)


def told_apart(comparison: Comparison, method: str) -> bool:
    """Whether a method's time to the target differs from fp32's by more than chance, over the seeds that reach it."""
    ratios = speed_ups(comparison, comparison.finished(method), FP32)
    clear = bool(ratios) and (min(ratios) > CLEARLY_SOONER or max(ratios) < 1 / CLEARLY_SOONER)
    return clear or (len(ratios) > 1 and estimate([math.log(ratio) for ratio in ratios]).stands_out)


# ------------------------------------------------------------------------------------ estimated times


class TimedInPart(NamedTuple):
    """A method whose times are estimated, in one run at least, from those steps that were timed.

    Attributes:
        method: its spec.
        timed_steps: the fewest of a run.
        steps: that such a run made.
        error: standard error of the time of a step over that time, the largest of a run.
    """

    method: str
    timed_steps: int
    steps: int
    error: float


def timed_in_part(comparison: Comparison) -> tuple[TimedInPart, ...]:
    """The methods whose times are estimated."""
    found: list[TimedInPart] = []
    for method in comparison.methods:
        runs = [run for run in comparison.finished(method) if run.timed_steps is not None]
        if runs:
            timed_steps, steps = min((run.timed_steps or 0, run.steps) for run in runs)
            found.append(TimedInPart(method, timed_steps, steps, max(map(_time_error, runs))))
    return tuple(found)


def _time_error(run: Run) -> float:
    """Standard error of the time of a step, over that time."""
    found = step_time(run.times_s[: run.timed_steps])
    return (found.error or 0.0) / found.mean if found.mean else 0.0


# ----------------------------------------------------------------------------------------- finiteness


def not_finite(run: Run) -> str | None:
    """What of a finished run is not a number, as the end of a sentence; None where all is well.

    The floor, torch.noop, is not looked at: its ranks train alone, and only its times are used.
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
