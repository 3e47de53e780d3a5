"""How long steps take, and how long they would without the method: from a window of steps, without communication."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from gradwire.drivers.window import Ready, Sample, exposed_s
from gradwire.session.step_times import ToldSteps, communication
from gradwire.topology.reduction_times import ReductionTimes

TELLS = 0.1
"""Part of the uncompressed step that its estimate may be wrong by, one way or the other, to be called known."""
FEWEST_COMMON = 3
"""Steps that all ranks must have told of before one knows which part of its waiting is for slower ones."""


@dataclass(frozen=True)
class Times:
    """Milliseconds of one step.

    Attributes:
        step_ms: from the end of one step to the end of the next: the median of computing, data and all, on the slowest
            rank, and the mean of communication, since now and then a frame that gets lost makes it long.
        exposed_ms: from this rank's last gradient to the end of the step: communication that the backward pass did not
            hide, and waiting for slower ranks; the median, as the next two.
        encode_ms: CPU time of encoding and decoding, hidden or not.
        wait_ms: waiting for collectives, hidden or not: for the link, and for slower ranks.
        dense_step_ms: the step as it would be without compression, estimated, as if coding had made computing longer by
            half of what it took: where both want the same cores it does so by all of it, and else by nothing.
        half_step_ms: the step as it would be with half of the bytes, estimated; what that casting costs is left out.
        dense_low_ms: what `dense_step_ms` is at least, as far as its parts are known and if coding made computing
            longer by all it took, and
        dense_high_ms: at most; infinite where too little could be timed.
    """

    step_ms: float
    exposed_ms: float
    encode_ms: float
    wait_ms: float
    dense_step_ms: float
    half_step_ms: float
    dense_low_ms: float
    dense_high_ms: float

    @property
    def tells(self) -> bool:
        """Whether the uncompressed step is known to a tenth."""
        return self.dense_high_ms - self.dense_low_ms <= 2 * TELLS * self.dense_step_ms


def summarise(samples: Sequence[Sample], first: int, link: ReductionTimes, others: Sequence[ToldSteps] | None) -> Times:
    """What a window's steps took, and the uncompressed step over `link`.

    Args:
        samples: the steps, one at least.
        first: number of the first one.
        link: how long an all-reduce takes.
        others: what the other ranks have told; None if that is not known.

    >>> from gradwire.topology.reduction_times import Probe
    >>> sample = Sample(0.5, 0.2, 0.05, 0.1, 10, 80, (Ready(0.0, 100_000),))
    >>> link = ReductionTimes(100_000, 0.001, (Probe(50_000, 0.5, 0.0), Probe(100_000, 1.0, 0.1)))
    >>> times = summarise([sample] * 3, 5, link, [ToldSteps(5, (0.3, 0.3, 0.3), 0.05, sample.buckets)])
    >>> round(times.dense_step_ms)  # 300 that are not exposed, less half of coding, and an all-reduce of 1000
    1275
    >>> round(times.dense_low_ms), round(times.dense_high_ms), times.tells
    (1150, 1400, True)
    """
    mine = ToldSteps.of(samples, first)
    known = communication(mine, others, FEWEST_COMMON) if others is not None else None
    if known is None:  # all that is exposed may be waiting for slower ranks, or none of it
        known = communication(mine, (), 1)
        assert known is not None, "there is a sample"
        most_s = statistics.median(sample.step_s for sample in samples) + link.seconds
    else:
        most_s = 0.0
    common = zip(known.steps, known.seconds, strict=True)
    busy_s = statistics.median(samples[i].step_s - of_link for i, of_link in common)
    dense, half = (_Exposed(known.buckets, link, busy_s, share) for share in (1.0, 0.5))
    computing_s = max(busy_s - known.encode_s / 2, 0.0)
    return Times(
        step_ms=1000 * (busy_s + statistics.fmean(known.seconds)),
        exposed_ms=_median_ms([s.exposed_s for s in samples]),
        encode_ms=_median_ms([s.encode_s for s in samples]),
        wait_ms=_median_ms([s.wait_s for s in samples]),
        dense_step_ms=1000 * (computing_s + dense.seconds),
        half_step_ms=1000 * (computing_s + half.seconds),
        dense_low_ms=1000 * (max(busy_s - known.encode_s, 0.0) + max(dense.seconds - dense.error_s, 0.0)),
        dense_high_ms=1000 * (max(busy_s + dense.seconds, most_s) + dense.error_s),
    )


class _Exposed:
    """How long a share of all gradients is on its way after the last of them is complete, and how sure that is."""

    def __init__(self, buckets: Sequence[Ready], link: ReductionTimes, busy_s: float, share: float) -> None:
        idle_s = busy_s + (buckets[0].at_s if buckets else 0.0)
        cold_s, cold_error_s = link.cold_after(idle_s)
        self.seconds = exposed_s(buckets, link.curve.seconds, share, cold_s)
        relative = link.error_s / link.seconds if link.seconds > 0 else math.inf
        self.error_s = relative * self.seconds + cold_error_s


def _median_ms(seconds: Sequence[float]) -> float:
    return 1000 * statistics.median(seconds)
