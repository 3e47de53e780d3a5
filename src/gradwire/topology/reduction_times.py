"""How long the gradients of a model take to be all-reduced, by size, and how sure that is."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

from gradwire.core.link import Curve, Link, TimedSize

LEAST_BYTES = 4
"""Of the smallest all-reduce."""
WARM_S, COLD_S = 0.2, 0.5
"""TCP halves its window after each idle retransmission timeout, which takes 0.2 s and a round trip or two. So it counts
as warm and as cold after these."""


class Probe(NamedTuple):
    """An all-reduce of `nbytes` takes `seconds` in the mean, which lie within `error_s` of it 99 times in 100."""

    nbytes: int
    seconds: float
    error_s: float


@dataclass(frozen=True)
class ReductionTimes:
    """How long the gradients of a model take to be all-reduced, alike on every rank.

    Attributes:
        nbytes: of all gradients.
        least_s: of the smallest all-reduce.
        probes: what was timed, by rising size, with warm windows; the last one is all gradients where that was
            affordable.
        cold_s: how much longer the first bucket takes after a pause, and
        cold_error_s: how far that may be from the truth.

    Example:
        >>> times = ReductionTimes(300, 0.1, (Probe(100, 1.0, 0.1), Probe(200, 2.0, 0.1)), cold_s=0.5)
        >>> times.curve.seconds(150), times.cold_after(1.0), times.cold_after(0.1)
        (1.5, (0.5, 0.0), (0.0, 0.0))
        >>> ReductionTimes(200, 0.1, (Probe(100, 3.0, 0.1), Probe(200, 2.0, 0.1))).curve.seconds(100)
        2.0
    """

    nbytes: int
    least_s: float
    probes: tuple[Probe, ...]
    cold_s: float = 0.0
    cold_error_s: float = 0.0

    @property
    def curve(self) -> Curve:
        """Seconds by size; beyond the last probe as between the last two.

        Fewer bytes take no longer than more: where they did, something else had the processor or the link meanwhile.
        """
        sizes = [LEAST_BYTES, *(probe.nbytes for probe in self.probes)]
        longest_first = [*(probe.seconds for probe in reversed(self.probes)), self.least_s]
        seconds = reversed([*accumulate(longest_first, min)])
        return Curve(tuple(map(TimedSize, sizes, seconds)))

    @property
    def seconds(self) -> float:
        """Of all gradients, with warm windows."""
        return self.curve.seconds(self.nbytes)

    @property
    def error_s(self) -> float:
        """How far `seconds` may be from the truth; infinite where too few sizes could be timed to go on from them.

        What goes on beyond the last probe may be wrong by as much as the last two slopes differ.
        """
        last, beyond = self.probes[-1], self.nbytes - self.probes[-1].nbytes
        if beyond <= 0:
            return last.error_s
        if len(self.probes) < 3:
            return math.inf
        first, middle = self.probes[-3], self.probes[-2]
        slopes = [(b.seconds - a.seconds) / (b.nbytes - a.nbytes) for a, b in pairwise((first, middle, last))]
        scatter = (last.error_s + middle.error_s) / (last.nbytes - middle.nbytes)
        return last.error_s + beyond * (abs(slopes[1] - slopes[0]) + scatter)

    def cold_after(self, idle_s: float) -> tuple[float, float]:
        """How much longer an all-reduce takes whose connections were idle for so long, and how far that may be off."""
        share = min(max((idle_s - WARM_S) / (COLD_S - WARM_S), 0.0), 1.0)
        return share * self.cold_s, min(share, 1 - share) * self.cold_s + share * self.cold_error_s

    @property
    def link(self) -> Link:
        """The straight line through the smallest all-reduce and that of all gradients."""
        return Link(self.least_s, max(self.seconds - self.least_s, 1e-9) / max(self.nbytes, 1))
