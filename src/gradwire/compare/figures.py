"""The figures that follow from a comparison's runs, and can be derived again from what is stored.

`summarise` gives a `Row` a method, which the table on the terminal, the CSV and the report all show. What may be
concluded from the figures is for `verdict` to say.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from gradwire.compare.results import FP32, SIXTEEN_BIT, Comparison, ResultsError, Run, Wire


def mean(values: Iterable[float]) -> float:
    """The arithmetic mean; NaN or infinite, without an exception, where a value or the sum is not finite.

    Example:
        >>> mean([1.0, 2.0, 6.0]), mean([math.inf, -math.inf])
        (3.0, nan)
    """
    numbers = list(values)
    try:
        return math.fsum(numbers) / len(numbers)
    except (OverflowError, ValueError):  # a sum beyond the largest float, and infinity minus infinity
        return sum(numbers)


def smooth(values: Sequence[float], window: int) -> list[float]:
    """Trailing moving average: of the last `window` values, or of as many as there are yet.

    Example:
        >>> smooth([4.0, 2.0, 0.0], 2)
        [4.0, 3.0, 1.0]
    """
    return [mean(values[max(0, end - window) : end]) for end in range(1, len(values) + 1)]


def final_loss(run: Run, window: int) -> float:
    """Smoothed training loss at the end of a run."""
    return mean(run.losses[-window:])


class Hit(NamedTuple):
    """Where a run first reached its target: after so many steps and so many seconds of training."""

    steps: int
    time_s: float


def hit_of_loss(run: Run, target: float, window: int) -> Hit | None:
    """Where the smoothed training loss first is at or below `target`; None if it never is."""
    losses = enumerate(smooth(run.losses, window), start=1)
    return next((Hit(step, run.times_s[step - 1]) for step, loss in losses if loss <= target), None)


def hit_of_metric(run: Run, target: float, *, higher_is_better: bool) -> Hit | None:
    """Where an evaluation first is as good as `target`; None if none is."""
    as_good = operator.ge if higher_is_better else operator.le
    return next((Hit(e.steps, e.time_s) for e in run.evaluations if as_good(e.value, target)), None)


def target_loss(comparison: Comparison, seed: int) -> float | None:
    """The training loss to be reached with this seed; None if the method that sets it has not finished.

    A method's own end differs a little from seed to seed, and so does the target it sets: seeds are paired.
    """
    target = comparison.target
    if target is not None and not target.startswith("method:"):
        return None if target.startswith("metric:") else float(target)
    setter = comparison.run(FP32 if target is None else target.removeprefix("method:"), seed)
    if setter is None:
        return None
    end = final_loss(setter, comparison.smoothing)
    return end + comparison.tolerance * abs(end)


def target_hit(comparison: Comparison, run: Run) -> Hit | None:
    """Where a run reaches the comparison's target; None if it does not, or none is set."""
    if not run.has_accuracy:
        return None
    target = comparison.target
    if target is not None and target.startswith("metric:"):
        value = float(target.removeprefix("metric:"))
        return hit_of_metric(run, value, higher_is_better=comparison.task["higher_is_better"])
    loss = target_loss(comparison, run.seed)
    return None if loss is None else hit_of_loss(run, loss, comparison.smoothing)


def check_target(target: str | None) -> str | None:
    """Refuse a target that is neither a number, nor `metric:NUMBER`, nor `method:SPEC`."""
    if target is None or target.startswith("method:"):
        return target
    with contextlib.suppress(ValueError):
        if math.isfinite(float(target.removeprefix("metric:"))):
            return target
    raise ResultsError(
        f"--target {target!r}: give a training loss (2.1), metric:NUMBER (metric:98), "
        "or method:SPEC (the loss that method ends at)"
    )


class Spread(NamedTuple):
    """A mean over seeds, with the extremes and the standard deviation."""

    mean: float
    low: float
    high: float
    std: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """Summarise values; None if there are none."""
        numbers = list(values)
        if not numbers:
            return None
        middle = mean(numbers)
        squares = sum((number - middle) * (number - middle) for number in numbers)
        std = math.sqrt(squares / (len(numbers) - 1)) if len(numbers) > 1 else 0.0
        return cls(middle, min(numbers), max(numbers), std)


@dataclass(frozen=True)
class Row:
    """The figures of one method: means over its finished seeds; None where a figure does not apply.

    Attributes:
        method: its spec.
        label: what the spec became.
        seeds: how many finished.
        failure: why a seed failed, empty if none did.
        bytes_per_step: sent through a host's link in a step, framing included.
        ratio: fp32's bytes per step over this method's.
        step_ms: compute_ms + encode_ms + wait_ms.
        compute_ms: see `Split`, as for the next two.
        encode_ms: codec work that was not hidden.
        wait_ms: waiting for the network.
        overhead_percent: the codec's CPU seconds over the compute seconds.
        metric: at the end, on held-out data.
        metric_gap: minus fp32's, over paired seeds.
        loss: smoothed, at the end.
        target_s: seconds to the target, over the seeds that reached it.
        reached: how many seeds reached the target.
        speed_up: fp32's time to the target over this method's, over paired seeds.
        speed_up_16bit: the same against the 16-bit baseline.
        wire: itemised bytes of a step.
        timed_steps: of the fewest steps that tell the time of a run whose other steps were not timed; None where all
            runs were timed as a whole.
    """

    method: str
    label: str
    seeds: int
    failure: str
    bytes_per_step: float | None = None
    ratio: float | None = None
    step_ms: float | None = None
    compute_ms: float | None = None
    encode_ms: float | None = None
    wait_ms: float | None = None
    overhead_percent: float | None = None
    metric: Spread | None = None
    metric_gap: float | None = None
    loss: Spread | None = None
    target_s: Spread | None = None
    reached: int = 0
    speed_up: Spread | None = None
    speed_up_16bit: Spread | None = None
    wire: Wire = field(default_factory=Wire)
    timed_steps: int | None = None


def summarise(comparison: Comparison) -> list[Row]:
    """One row a method, in the order they are shown."""
    return [_row(comparison, method) for method in comparison.methods]


def _row(comparison: Comparison, method: str) -> Row:
    failed = [run for run in comparison.runs if run.method == method and run.status == "failed"]
    runs = comparison.finished(method)
    row = Row(method, runs[0].label if runs else "", len(runs), failed[0].reason if failed else "")
    if not runs:
        return row
    row = dataclasses.replace(row, **_costs(comparison, runs))
    return dataclasses.replace(row, **_accuracy(comparison, runs)) if runs[0].has_accuracy else row


def _costs(comparison: Comparison, runs: list[Run]) -> dict[str, Any]:
    def per_step_ms(seconds: str) -> float:
        return mean(1000 * getattr(run.split, seconds) / run.steps for run in runs)

    sent = bytes_per_step(runs)
    step_ms = mean(1000 * run.times_s[-1] / run.steps for run in runs)
    encode_ms = per_step_ms("encode_s")
    dense = bytes_per_step(comparison.finished(FP32))
    compute_ms = per_step_ms("compute_s")
    return {
        "bytes_per_step": sent,
        # a method that sends nothing still acknowledges and agrees: its ratio would be noise
        "ratio": dense / sent if dense and sent and runs[0].has_accuracy else None,
        "step_ms": step_ms,
        "compute_ms": compute_ms,
        "encode_ms": encode_ms,
        # a step lasts as long as its slowest rank: what the mean rank did not do itself, it waited for
        "wait_ms": max(0.0, step_ms - compute_ms - encode_ms),
        "overhead_percent": 100 * per_step_ms("codec_cpu_s") / compute_ms if compute_ms else None,
        "wire": _wire_per_step(runs),
        "timed_steps": min((run.timed_steps for run in runs if run.timed_steps is not None), default=None),
    }


def bytes_per_step(runs: list[Run]) -> float | None:
    """Mean over runs of the bytes that a host sends through its link in a step."""
    return mean(run.wire.through_link / run.steps for run in runs) if runs else None


def _wire_per_step(runs: list[Run]) -> Wire:
    def per_step(name: str) -> float:
        return mean(getattr(run.wire, name) / (1 if name == "setup" else run.steps) for run in runs)

    return Wire(**{f.name: per_step(f.name) for f in dataclasses.fields(Wire)})


def _accuracy(comparison: Comparison, runs: list[Run]) -> dict[str, Any]:
    hits = [hit for run in runs if (hit := target_hit(comparison, run))]
    gaps = metric_gaps(comparison, runs)
    return {
        "metric": Spread.of(run.evaluations[-1].value for run in runs if run.evaluations),
        "metric_gap": mean(gaps) if gaps else None,
        "loss": Spread.of(final_loss(run, comparison.smoothing) for run in runs),
        "target_s": Spread.of(hit.time_s for hit in hits),
        "reached": len(hits),
        "speed_up": Spread.of(speed_ups(comparison, runs, FP32)),
        "speed_up_16bit": Spread.of(speed_ups(comparison, runs, sixteen_bit(comparison))),
    }


def metric_gaps(comparison: Comparison, runs: Iterable[Run]) -> list[float]:
    """Final metric minus fp32's, for each seed with which both have finished."""
    return [
        mine.evaluations[-1].value - base.evaluations[-1].value
        for mine, base in paired(comparison, runs, FP32)
        if mine.evaluations and base.evaluations
    ]


def example_gaps(pairs: Sequence[Pair]) -> list[float]:
    """Final metric minus the baseline's of each held-out example, the mean over pairs of runs.

    Both runs of a pair were evaluated on the same examples, so what makes an example hard for either cancels.

    Returns:
        One gap for each example; none where a run has no metrics of single examples, or not as many as the others.
    """
    if len({len(run.metric_values) for pair in pairs for run in pair}) != 1:
        return []
    gaps = [[a - b for a, b in zip(mine.metric_values, base.metric_values, strict=True)] for mine, base in pairs]
    return [mean(of_one) for of_one in zip(*gaps, strict=True)]


def sixteen_bit(comparison: Comparison) -> str | None:
    """The method that serves as the 16-bit baseline, or None if none was run."""
    return next((method for method in SIXTEEN_BIT if comparison.finished(method)), None)


class Pair(NamedTuple):
    """A method's run and the baseline's with the same seed."""

    mine: Run
    base: Run


def paired(comparison: Comparison, runs: Iterable[Run], baseline: str | None) -> list[Pair]:
    """Runs of a method, each beside the baseline's with the same seed; those without one are left out."""
    found = [(run, comparison.run(baseline, run.seed)) for run in runs] if baseline else []
    return [Pair(run, base) for run, base in found if base is not None]


def speed_ups(comparison: Comparison, runs: Iterable[Run], baseline: str | None) -> list[float]:
    """Iso-accuracy speed-up: the baseline's time to the target over a method's, for each seed that both reached."""
    ratios: list[float] = []
    for pair in paired(comparison, runs, baseline):
        base, mine = target_hit(comparison, pair.base), target_hit(comparison, pair.mine)
        if base and mine and base.time_s and mine.time_s:
            ratios.append(base.time_s / mine.time_s)
    return ratios
