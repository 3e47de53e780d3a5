"""Times of calls that all ranks make together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from gradwire.core.collective import AllGather, AllReduce
from gradwire.drivers.interpreter import Transport, ask

FEWEST_CALLS, MOST_CALLS = 3, 1000
QUICK_S = 0.01
"""A call that takes less is estimated by ten more: a single one may have waited for a processor."""


@dataclass(frozen=True)
class CallTimes:
    """What calls took, alike on all ranks.

    Attributes:
        calls: how many counted.
        mean_s: the mean over calls and ranks, as nccl-tests has it.
        slowest_s: the mean over the calls of the slowest rank. Bandwidths are of this one: a sender whose message lies
            in a buffer of the kernel has ended its call while it is still on its way.
        p99_s: the 99th percentile over calls of what the slowest rank of each call took.
    """

    calls: int
    mean_s: float
    slowest_s: float
    p99_s: float

    @classmethod
    def of(cls, seconds: Tensor) -> CallTimes:
        """The figures of times (ranks, calls).

        >>> CallTimes.of(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
        CallTimes(calls=2, mean_s=2.5, slowest_s=3.5, p99_s=4.0)
        """
        calls = seconds.shape[1]
        slowest = seconds.amax(0).sort().values
        place = math.ceil(0.99 * calls) - 1
        return cls(calls, float(seconds.mean()), float(seconds.mean(1).max()), float(slowest[place]))


class CallClock:
    """Times calls that follow each other without a pause, from a moment at which all ranks begin.

    How many calls count is agreed on, so all ranks make equally many.

    Args:
        control: moves a few numbers between the ranks, apart from what is timed; its tensors lie on the CPU.
        device: where the work is done. On a GPU times are those between events of its stream.
        calls: how many count; None takes as many as `seconds` has room for.
        seconds: what they take together, about.
    """

    def __init__(self, control: Transport, device: torch.device, calls: int | None, seconds: float) -> None:
        self._control, self._device, self._calls, self._seconds = control, device, calls, seconds

    def time(self, job: Callable[[], object], before: Callable[[], object] | None = None) -> CallTimes:
        """Time a job that has run before, so that connections and buffers are there.

        Args:
            job: what is timed: every rank calls this method at the same place.
            before: done before each call, and not counted.
        """
        return CallTimes.of(self._times(job, before, self._calls or self._count(job, before)))

    def _count(self, job: Callable[[], object], before: Callable[[], object] | None) -> int:
        """How many calls fit into the seconds, at the pace of those that are made to find out."""
        found = float(self._times(job, before, 1).max())
        if found < QUICK_S:
            found = float(self._times(job, before, 10).mean(1).max())
        return min(max(int(self._seconds / max(found, 1e-9)), FEWEST_CALLS), MOST_CALLS)

    def _times(self, job: Callable[[], object], before: Callable[[], object] | None, count: int) -> Tensor:
        """Seconds of each call of each rank, (ranks, calls)."""
        self.meet()
        run = self._on_gpu if self._device.type == "cuda" else self._on_cpu
        mine = torch.tensor(run(job, before, count), dtype=torch.float64)
        return ask(AllGather(mine), self._control)

    def meet(self) -> None:
        """Wait until all ranks are here."""
        ask(AllReduce(torch.zeros(1)), self._control)

    def _on_cpu(self, job: Callable[[], object], before: Callable[[], object] | None, count: int) -> list[float]:
        if before is None:
            ends = [time.perf_counter()]
            for _ in range(count):
                job()
                ends.append(time.perf_counter())
            return [after - earlier for earlier, after in pairwise(ends)]
        found: list[float] = []
        for _ in range(count):
            before()
            began = time.perf_counter()
            job()
            found.append(time.perf_counter() - began)
        return found

    def _on_gpu(self, job: Callable[[], object], before: Callable[[], object] | None, count: int) -> list[float]:
        events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(count)]
        for begins, ends in events:
            if before is not None:
                before()
            begins.record()
            job()
            ends.record()
        torch.cuda.synchronize(self._device)
        return [1e-3 * begins.elapsed_time(ends) for begins, ends in events]
