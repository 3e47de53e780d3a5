"""Times of jobs that all ranks do together, interleaved so that whatever else a machine does falls on all alike."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
import torch.distributed as dist

from gradwire.overlap.figures import Overlap

Job = Callable[[], object]
"""What is timed: every rank calls it at the same place."""

ROUNDS = 5
STRETCH = 3
"""Calls of a job in a row."""

UNTIMED = 1
"""Calls before each stretch that do not count: caches are cold after another job, and connections are idle."""


class Timings(NamedTuple):
    """Seconds of a call of each job, one for each round, alike on all ranks.

    Attributes:
        rounds_s: by the job's name.
    """

    rounds_s: dict[str, list[float]]

    def median_s(self, name: str) -> float:
        """The median over rounds."""
        return statistics.median(self.rounds_s[name])


class Stopwatch:
    """Times jobs of the ranks of a process group, on a CPU or a GPU.

    Each number is that of the slowest rank, and all ranks have the same numbers, so what they conclude is the same.

    Args:
        group: whose ranks do the jobs.
        device: that they compute on. The end of a stretch waits for a GPU.

    Example:
        watch = Stopwatch(group, torch.device("cpu"))
        found = watch.overlap(step, floor, isolated)
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group, self._device = group, device

    def interleaved(
        self, jobs: Mapping[str, Job], rounds: int = ROUNDS, stretch: int = STRETCH, untimed: int = UNTIMED
    ) -> Timings:
        """Time every job in turn, `stretch` calls in a row, for so many rounds.

        Args:
            jobs: by name, the same names in the same order on every rank.
            rounds: how many.
            stretch: calls in a row that count.
            untimed: calls before them that do not.
        """
        seconds = [[self._stretch_s(job, stretch, untimed) for job in jobs.values()] for _ in range(rounds)]
        slowest = torch.tensor(seconds, dtype=torch.float64, device=self._device)
        if slowest.numel():
            dist.all_reduce(slowest, dist.ReduceOp.MAX, group=self._group)
        return Timings(dict(zip(jobs, slowest.T.tolist(), strict=True)))

    def overlap(
        self,
        step: Job,
        floor: Job,
        isolated: Job,
        rounds: int = ROUNDS,
        stretch: int = STRETCH,
        untimed: int = UNTIMED,
    ) -> Overlap:
        """Return how much of a step's communication is exposed.

        Args:
            step: a step as it is trained.
            floor: the same where nothing is sent.
            isolated: the communication of a step by itself.
            rounds, stretch, untimed: as of `interleaved`.
        """
        found = self.interleaved({"step": step, "floor": floor, "isolated": isolated}, rounds, stretch, untimed)
        return Overlap(found.median_s("step"), found.median_s("floor"), found.median_s("isolated"))

    def _stretch_s(self, job: Job, stretch: int, untimed: int) -> float:
        """Seconds of a call, by the mean over a stretch that all ranks begin at the same time.

        Ranks that are done wait for the others. Without that, ranks that share cores took processors for their next job
        from ranks that were still timed, and a step without communication seemed to take up to 1.45 times as long.
        """
        for _ in range(untimed):
            job()
        self._meet()
        began_s = time.perf_counter()
        for _ in range(stretch):
            job()
        self._settle()
        took_s = time.perf_counter() - began_s
        self._meet()
        return took_s / stretch

    def _meet(self) -> None:
        """Wait until all ranks are here: a sum, since a barrier of NCCL guesses the device."""
        dist.all_reduce(torch.zeros(1, device=self._device), group=self._group)
        self._settle()

    def _settle(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
