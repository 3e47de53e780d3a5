"""What communication and computing take from each other: all-reduces are timed while every rank computes.

A processor that computes also copies what is sent and received, sums it up, and runs the network stack of the kernel.
So messages wait for it, and computing waits for them. Neither is seen while the processor has nothing else to do: on
two cores that train the byte-GPT, an all-reduce of 1 MB took 0.65 ms of the processor alone, and 2.2 ms beside
computing.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.collective import AllReduce
from gradwire.core.link import Link
from gradwire.drivers.interpreter import Transport, ask

TRIALS = 3
"""Of which the median counts."""
TRIAL_S = 0.06
"""For which a trial computes without messages, and what its messages of a size take, alone, about."""
PAUSE_S = 0.002
"""Before each message, as in training, where threads wake up for every one: without it a message of 16 KB takes half as
much of the processor."""
LEAST_BYTES, MOST_BYTES = 1 << 14, 1 << 20
"""Of the two sizes that are timed; on slow links the larger one is less."""
LONGEST_S = 0.02
"""What the larger size takes at most."""
FEWEST, MOST = 3, 100
"""Messages of a trial."""
_SIDE, _MEMORY, _PASS = 128, 1 << 21, 1 << 17
"""A round of computing multiplies matrices of 128 rows and goes through half a megabyte of eight, as training goes
through more memory than caches hold."""


class Contention(NamedTuple):
    """What messages take while the ranks compute, and what they take from computing.

    Attributes:
        link: seconds of a message while the ranks compute.
        work: seconds for which a rank computes less, of a message.

    >>> Contention(Link(2e-3, 1e-8), Link(1e-3, 1e-9)).work.seconds(10**6)
    0.002
    """

    link: Link
    work: Link

    @classmethod
    def of_reductions(cls, reductions: Contention, world_size: int) -> Contention:
        """Return the same for messages, of which 2 (n - 1) make an all-reduce, with 2 (n - 1)/n of its bytes.

        >>> Contention.of_reductions(Contention(Link(0.006, 3e-6), Link(0.0, 0.0)), 4).link
        Link(alpha_s=0.001, beta_s_per_byte=2e-06)
        """
        return cls(*(of_ring(each, world_size) for each in reductions))


def of_ring(reduction: Link, world_size: int) -> Link:
    """Return what a message and a byte cost of which an all-reduce is made, as a ring: 2 (n - 1) messages follow
    each other, with 2 (n - 1)/n of the bytes.
    """
    rounds = 2 * (world_size - 1)
    return Link(reduction.alpha_s / rounds, reduction.beta_s_per_byte * world_size / rounds)


def contention(transport: Transport, idle: Link) -> Contention:
    """Time messages while every rank computes, and computing while messages travel.

    With r rounds of computing a second while messages travel, r0 while none do, and m messages in t seconds,

        work of a message = (1 - r / r0) * t / m

    Both come from all-reduces of two sizes, and a straight line through them. It takes about half a second. Every rank
    must call it at the same place, in the thread that communicates, with equal arguments; all get the same bits.

    Args:
        transport: between the ranks, two at least, on CPUs.
        idle: seconds of an all-reduce while nothing is computed, alike on all ranks.
    """
    largest = min(MOST_BYTES, int((LONGEST_S - idle.alpha_s) / max(idle.beta_s_per_byte, 1e-12)))
    sizes = LEAST_BYTES, max(4 * (largest // 4), 2 * LEAST_BYTES)
    counts = [min(max(int(TRIAL_S / (PAUSE_S + idle.seconds(size))), FEWEST), MOST) for size in sizes]
    with Computing() as computing:
        trials = [_trial(transport, computing, sizes, counts) for _ in range(TRIALS)]
    mine = torch.tensor([statistics.median(each) for each in zip(*trials, strict=True)], dtype=torch.float64)
    small_s, small_work_s, large_s, large_work_s = (
        ask(AllReduce(mine), transport) / transport.world_size
    ).tolist()  # fmt: skip
    line = _line(*sizes)
    return Contention.of_reductions(
        Contention(line(small_s, large_s), line(small_work_s, large_work_s)), transport.world_size
    )


def _line(smaller: int, larger: int) -> Callable[[float, float], Link]:
    """Makes straight lines through the seconds of two sizes; neither part is negative."""

    def through(smaller_s: float, larger_s: float) -> Link:
        beta = max(larger_s - smaller_s, 0.0) / (larger - smaller)
        return Link(max(min(smaller_s, larger_s) - beta * smaller, 0.0), beta)

    return through


def _trial(transport: Transport, computing: Computing, sizes: tuple[int, int], counts: list[int]) -> list[float]:
    """Seconds of a message, and of computing that it takes away, for each size."""
    found = list[float]()
    _begin_together(transport)
    alone = computing.rate_during(lambda: time.sleep(TRIAL_S))
    for size, count in zip(sizes, counts, strict=True):
        sends = _Sends(transport, torch.zeros(size // 4), count)
        _begin_together(transport)
        began = time.perf_counter()
        beside = computing.rate_during(sends)
        all_s = time.perf_counter() - began
        found += [statistics.fmean(sends.taken_s), max(1 - beside / alone, 0.0) * all_s / count]
    return found


@dataclass
class _Sends:
    """Reduces a tensor so often, and notes how long each time has taken."""

    transport: Transport
    part: Tensor
    count: int
    taken_s: list[float] = field(default_factory=list[float])

    def __call__(self) -> None:
        for _ in range(self.count):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            ask(AllReduce(self.part), self.transport)
            self.taken_s.append(time.perf_counter() - began)


def _begin_together(transport: Transport) -> None:
    ask(AllReduce(torch.zeros(1)), transport)


class Computing:
    """A thread that computes for the length of a `with` block, and counts its rounds.

    >>> with Computing() as computing:
    ...     computing.rate_during(lambda: time.sleep(0.1)) > 0.0
    True
    """

    def __init__(self) -> None:
        self._rounds, self._is_over = 0, threading.Event()
        self._thread = threading.Thread(target=self._compute, name="gradwire-computing", daemon=True)

    def _compute(self) -> None:
        matrix, memory, at = torch.zeros(_SIDE, _SIDE), torch.zeros(_MEMORY), 0
        product = torch.empty_like(matrix)
        with torch.inference_mode():
            while not self._is_over.is_set():
                torch.mm(matrix, matrix, out=product)
                memory[at : at + _PASS].add_(1.0)
                at = (at + _PASS) % _MEMORY
                self._rounds += 1

    def rate_during(self, job: Callable[[], object]) -> float:
        """Do a job in the caller's thread, and return the rounds of a second meanwhile; one at least."""
        began, before = time.perf_counter(), self._rounds
        job()
        return max(self._rounds - before, 1) / (time.perf_counter() - began)

    def __enter__(self) -> Computing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
