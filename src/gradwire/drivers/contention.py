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
BUDGET_S = 2.0
"""After so long there is no further trial. A link on which one would take so long is not tried: its messages wait for
the link, and not for processors."""
TRIAL_S = 0.06
"""For so long a trial computes without messages. Messages of each size take about as long while nothing is computed."""
PAUSE_S = 0.002
"""Before each message, as in training, where threads wake up for every one: without it a message of 16 KB takes half as
much of the processor."""
FEWEST = 3
"""Messages of a size in a trial."""
LEAST_BYTES, MOST_BYTES = 1 << 14, 1 << 20
"""Of the two sizes that are timed. The larger one is less on slow links, and twice the smaller one at least."""
LONGEST_S = 0.05
"""What the larger size may take while nothing is computed."""
_SIDE, _MEMORY, _PASS = 128, 1 << 21, 1 << 17
"""A round of computing multiplies square matrices of this side and goes through half a megabyte of eight, as training
goes through more memory than a core's own caches hold. With several threads there is as much for each."""
LONGEST_COMPUTING_S = 60.0
"""After which a thread ends by itself, whatever became of the one that started it."""


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


def message(whole: Link, world_size: int) -> Link:
    """Return what a message and a byte cost where all-reduces are rings: 2 (n - 1) messages, 2 (n - 1)/n of the bytes.

    >>> message(Link(0.006, 3e-6), 4)
    Link(alpha_s=0.001, beta_s_per_byte=2e-06)
    """
    rounds = 2 * (world_size - 1)
    return Link(whole.alpha_s / rounds, whole.beta_s_per_byte * world_size / rounds)


def reduction(each: Link, world_size: int) -> Link:
    """Return what an all-reduce and its bytes cost, the other way round.

    >>> reduction(Link(0.001, 2e-06), 4)
    Link(alpha_s=0.006, beta_s_per_byte=3e-06)
    """
    rounds = 2 * (world_size - 1)
    return Link(each.alpha_s * rounds, each.beta_s_per_byte * rounds / world_size)


def contention(transport: Transport, link: Link) -> Contention:
    """Time messages while every rank computes, and computing while messages travel.

    With r rounds of computing a second while messages travel, r0 while none do, and m messages in t seconds,

        work of a message = (1 - r / r0) * t / m

    Both come from all-reduces of two sizes, and a straight line through them. It takes about half a second, and three
    at most where ranks share cores. Every rank must call it at the same place, in the thread that communicates, with
    equal arguments; all get the same bits.

    Args:
        transport: between the ranks, two at least, on CPUs.
        link: seconds of a message while nothing is computed, alike on all ranks.
    """
    n, idle = transport.world_size, reduction(link, transport.world_size)
    largest = min(MOST_BYTES, int((LONGEST_S - idle.alpha_s) / max(idle.beta_s_per_byte, 1e-12)))
    sizes = LEAST_BYTES, max(4 * (largest // 4), 2 * LEAST_BYTES)
    each_s = [PAUSE_S + idle.seconds(size) for size in sizes]
    counts = [max(int(TRIAL_S / seconds), FEWEST) for seconds in each_s]
    if sum(count * seconds for count, seconds in zip(counts, each_s, strict=True)) > BUDGET_S:
        return Contention(link, Link(0.0, 0.0))
    trials, began = list[list[float]](), time.perf_counter()
    with Computing() as computing:
        while len(trials) < TRIALS and (not trials or _longest(transport, time.perf_counter() - began) < BUDGET_S):
            trials.append(_trial(transport, computing, sizes, counts))
    mine = torch.tensor([statistics.median(each) for each in zip(*trials, strict=True)], dtype=torch.float64)
    small_s, small_work_s, large_s, large_work_s = (ask(AllReduce(mine), transport) / n).tolist()
    line = _line(*sizes)
    return Contention(message(line(small_s, large_s), n), message(line(small_work_s, large_work_s), n))


def _longest(transport: Transport, seconds: float) -> float:
    """The longest time of a rank, the same on all of them."""
    return float(ask(AllReduce(torch.tensor([seconds], dtype=torch.float64), "max"), transport))


def _line(smaller: int, larger: int) -> Callable[[float, float], Link]:
    """Return what draws a line through the seconds of two sizes; neither part of it is negative."""

    def through(smaller_s: float, larger_s: float) -> Link:
        beta = max(larger_s - smaller_s, 0.0) / (larger - smaller)
        return Link(max(smaller_s - beta * smaller, 0.0), beta)

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
        found += [statistics.fmean(sends.taken_s), (1 - beside / alone) * all_s / count]
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

    What it raises is raised by the caller's next request. It ends with the main thread too, since a thread that is at
    work while Python ends aborts the process.

    >>> with Computing() as computing:
    ...     computing.rate_during(lambda: time.sleep(0.1)) > 0.0
    True
    """

    def __init__(self) -> None:
        self._rounds, self._is_over = 0, threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._compute, name="gradwire-computing", daemon=True)

    def _compute(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # memory that there is not, for instance
            self._error = error

    def _go_on(self) -> None:
        threads, ends_s, at = torch.get_num_threads(), time.monotonic() + LONGEST_COMPUTING_S, 0
        matrix, memory = torch.zeros(threads * _SIDE, _SIDE), torch.zeros(threads * _MEMORY)
        other, product = torch.zeros(_SIDE, _SIDE), torch.empty_like(matrix)
        size, main = threads * _PASS, threading.main_thread()
        with torch.inference_mode():
            while not self._is_over.is_set() and main.is_alive() and time.monotonic() < ends_s:
                torch.mm(matrix, other, out=product)
                memory[at : at + size].add_(1.0)
                at = (at + size) % memory.numel()
                self._rounds += 1

    def rate_during(self, job: Callable[[], object]) -> float:
        """Do a job in the caller's thread, and return the rounds of a second meanwhile; one at least."""
        began, before = time.perf_counter(), self._rounds
        job()
        if self._error is not None:
            raise self._error
        return max(self._rounds - before, 1) / (time.perf_counter() - began)

    def __enter__(self) -> Computing:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        self._thread.join()
