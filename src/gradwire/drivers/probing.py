"""How long an uncompressed all-reduce of a model's gradients takes on the group at hand, and how sure that is.

TCP makes one number for a latency and one for a rate miss the truth several times over. A connection that was idle
sends little in its first round trips. An all-reduce of Gloo waits 2 (n - 1) times for the slowest link, and more often
once it is cut into segments. A frame that gets lost may cost a fifth of a second. So what is timed is what DDP does:
buckets of the same sizes, several times one after the other without a barrier between them, as steps follow each other.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Sequence
from itertools import pairwise

import torch

from gradwire.core.collective import AllReduce
from gradwire.drivers.interpreter import ask
from gradwire.drivers.measure import Bench
from gradwire.drivers.window import DDP_CAPS, Caps
from gradwire.topology.reduction_times import LEAST_BYTES, Probe, ReductionTimes

BUDGET_S = 10.0
"""What all probing may take, about: ten steps, where a step takes a second. On fast links it takes a tenth of one."""
MOST_BYTES = 1 << 26
"""Of a probe: it lies in memory beside the model."""
FIRST_BYTES = 1 << 15
LEAST_COUNTED = 3
COUNTED_S = 1.0
ENOUGH, MOST_COUNTED = 16, 32
"""Repetitions of what counts go on until three are counted, until they have taken so long or are enough, and then until
the mean is known: a frame that gets lost in one of five is not seen in two of them."""
PRECISE = 0.03
"""Relative error of a mean that ends its repetitions."""
PAUSE_S = 1.0
NEAR_S = 0.003
"""Latency of the smallest all-reduce below which cold windows are not looked at: they hold what such a link carries."""
REST_S = 0.03
"""Between two repetitions on links with a delay, as computing is between steps: without it the quickest ranks begin
while the others still end, and where links are unequal a mean comes out 2% longer."""


def reduction_times(bench: Bench, nbytes: int, caps: Caps = DDP_CAPS) -> ReductionTimes | None:
    """Time the all-reduce of a model's gradients while nothing else is under way; None with one rank.

    Every rank must call it at the same place, with equal arguments. All that is decided on the way is decided by times
    that all ranks agree on, so they send the same sizes equally often. Sizes grow while `BUDGET_S` allows, up to all
    gradients; then the largest are repeated until their means are known.

    Args:
        bench: where.
        nbytes: of all gradients.
        caps: of DDP's buckets.
    """
    if bench.transport.world_size == 1 or not nbytes:
        return None
    prober = _Prober(bench, caps)
    prober.repeat(LEAST_BYTES, 1)  # makes connections
    least_s, sizes = min(prober.repeat(LEAST_BYTES, 4)), _sizes(nbytes)
    prober.rest_s = REST_S if least_s >= NEAR_S else 0.0
    for size in sizes:
        if prober.found() and not prober.can_afford(_at_most_s(prober, size, least_s)):
            middle = 2 * prober.found()[-1].nbytes
            if middle < size and prober.can_afford(_at_most_s(prober, middle, least_s)):
                prober.repeat(middle, LEAST_COUNTED)
            break
        prober.repeat(size, 1 if size < sizes[-1] else LEAST_COUNTED)
    *_, largest = probes = prober.found()
    prober.settle(largest.nbytes)
    smaller = probes[-2] if len(probes) > 1 else largest
    cold = prober.cold(smaller, least_s) if least_s >= NEAR_S else (0.0, 0.0)
    if largest.nbytes < nbytes:
        prober.settle(smaller.nbytes)
    return ReductionTimes(nbytes, least_s, prober.found(), *cold)


def _sizes(nbytes: int) -> list[int]:
    """What to time, by rising size: all, half, an eighth, and so on; whole numbers of float32."""
    sizes, divisor = [nbytes], 2
    while nbytes // divisor >= FIRST_BYTES or divisor == 2:
        sizes.append(nbytes // divisor)
        divisor *= 4
    return sorted({max(-(-size // 4) * 4, 2 * LEAST_BYTES) for size in sizes if size <= MOST_BYTES})


def _at_most_s(prober: _Prober, size: int, least_s: float) -> float:
    """What a larger size takes at most: as if what the last one took beyond the smallest call grew with its bytes."""
    last = prober.found()[-1]
    return least_s + max(last.seconds - least_s, 0.0) * size / last.nbytes


class _Prober:
    """Times that all ranks agree on, by size."""

    def __init__(self, bench: Bench, caps: Caps) -> None:
        self._bench, self._caps = bench, caps
        self._began_s, self._spent_s = time.perf_counter(), 0.0
        self.times: dict[int, list[float]] = {}
        self.rest_s = 0.0

    def can_afford(self, seconds: float) -> bool:
        """Whether there is time for one that is not counted and three that are, of such a length."""
        return self._spent_s + (1 + LEAST_COUNTED) * seconds <= BUDGET_S

    def repeat(self, nbytes: int, count: int, cold_after_s: float | None = None) -> list[float]:
        """Reduce so often after one that is not counted, and note how long each took, the mean over ranks.

        What took place with cold windows, each time after so long a pause, is returned and not noted.

        The first one makes windows and buffers warm, and takes up that ranks do not come together.
        """
        sizes, pause_s = self._caps.split(nbytes), self.rest_s if cold_after_s is None else cold_after_s
        ends = [self._reduced(sizes, pause_s) for _ in range(count + 1)]
        mine = [after - before - pause_s for before, after in pairwise(ends)]
        *agreed, spent_s = self._mean([*mine, time.perf_counter() - self._began_s])
        self._spent_s = spent_s
        if cold_after_s is None:
            self.times.setdefault(nbytes, []).extend(agreed)
        return agreed

    def _reduced(self, sizes: Sequence[int], pause_s: float) -> float:
        """Reduce buckets as DDP does, all of them at once; return the time at which they are there."""
        time.sleep(pause_s)
        device, transport = self._bench.device, self._bench.transport
        parts = [torch.zeros(max(size // 4, 1), dtype=torch.float32, device=device) for size in sizes]
        for pending in [transport.issue(AllReduce(part)) for part in parts]:
            pending.wait()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def _mean(self, values: Sequence[float]) -> list[float]:
        """The mean over ranks, the same bits on all of them."""
        transport = self._bench.transport
        total = ask(AllReduce(torch.tensor(values, dtype=torch.float64, device=self._bench.device)), transport)
        return (total / transport.world_size).tolist()

    def settle(self, nbytes: int) -> None:
        """Repeat a size until its mean is known, or the time is over."""
        while not self._is_settled(nbytes):
            times = self.times[nbytes]
            affordable = int((BUDGET_S - self._spent_s) / max(statistics.fmean(times), 1e-6)) - 1
            if affordable < 1:
                return
            self.repeat(nbytes, min(max(len(times), 2), affordable))

    def _is_settled(self, nbytes: int) -> bool:
        times = self.times[nbytes]
        seen = len(times) >= ENOUGH or (len(times) >= LEAST_COUNTED and sum(times) >= COUNTED_S)
        mean_s, error_s = mean_and_error(times)
        return seen and (error_s <= PRECISE * mean_s or len(times) >= MOST_COUNTED)

    def cold(self, probe: Probe, least_s: float) -> tuple[float, float]:
        """How much longer a size takes after a pause than without one; and by how much its repetitions differ.

        Where that would take too long, it is no more than some round trips, which the smallest call is made of.
        """
        nbytes, longest_s = probe.nbytes, PAUSE_S + 2 * probe.seconds
        if self._spent_s + LEAST_COUNTED * longest_s > 1.5 * BUDGET_S:
            return 0.0, 4 * least_s
        if len(self.times[nbytes]) < LEAST_COUNTED:
            self.repeat(nbytes, LEAST_COUNTED - 1)
        warm, cold = self.times[nbytes], self.repeat(nbytes, 2, PAUSE_S)
        longer_s = max(statistics.fmean(cold) - statistics.fmean(warm), 0.0)
        return longer_s, max(cold) - min(cold) + max(warm) - min(warm)

    def found(self) -> tuple[Probe, ...]:
        """The probes so far, by rising size, without the smallest call."""
        return tuple(
            Probe(size, *mean_and_error(self.times[size])) for size in sorted(self.times) if size > LEAST_BYTES
        )


FEWEST_LIKE = 6
"""Values that tell whether neighbours are alike."""
_STUDENT = (63.66, 9.92, 5.84, 4.60, 4.03, 3.71, 3.50, 3.36, 3.25)
"""Of Student's t, the 99.5% points for one degree of freedom, two, and so on."""


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean, and half the length of its 99% interval by Student's t; infinite for a single value.

    Values that are like those before them tell less: after a frame was lost TCP sends less for seconds. With the
    correlation r of neighbours the interval is sqrt((1 + r) / (1 - r)) times as long, as for a process that forgets at
    that pace.

    >>> mean_and_error([1.0, 1.0, 1.0])
    (1.0, 0.0)
    >>> mean, error = mean_and_error([1.0, 2.0, 3.0])
    >>> round(error, 2)
    5.73
    >>> [round(mean_and_error(values)[1], 2) for values in ([1.0, 2.0] * 8, [1.0] * 8 + [2.0] * 8)]
    [0.38, 1.2]
    """
    mean, count = statistics.fmean(values), len(values)
    if count < 2:
        return mean, math.inf
    factor = _STUDENT[count - 2] if count - 2 < len(_STUDENT) else 2.58 + 6.0 / (count - 1)
    likeness = _likeness(values, mean) if count >= FEWEST_LIKE else 0.0
    return mean, factor * statistics.stdev(values) * math.sqrt((1 + likeness) / (1 - likeness) / count)


def _likeness(values: Sequence[float], mean: float) -> float:
    """The correlation of neighbours, from 0 to 0.9."""
    squares = sum((value - mean) ** 2 for value in values)
    products = sum((one - mean) * (other - mean) for one, other in pairwise(values))
    return min(max(products / squares, 0.0), 0.9) if squares > 0 else 0.0
