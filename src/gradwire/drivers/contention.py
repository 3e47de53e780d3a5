"""What communication and computing take from each other: all-reduces are timed while ranks compute.

A processor that computes also copies what is sent and received, sums it up, and runs the network stack of the kernel.
So messages wait for it, and computing waits for them. Neither is seen while the processor has nothing else to do: on
two cores that train the byte-GPT, an all-reduce of 1 MB took 0.65 ms of the processor alone, and 2.2 ms beside
computing.

Of ranks that share cores, as many compute as there are cores. Where all of them did so without a pause, messages of
eight ranks on two cores had six times as much of the processors as they have in training, whose ranks wait for messages
most of the time (docs/building/log/planning.md).
"""

from __future__ import annotations

import statistics
import threading
import time
from typing import NamedTuple

import torch

from gradwire.core.collective import AllReduce
from gradwire.core.link import Link
from gradwire.drivers.interpreter import Transport, ask
from gradwire.topology.processors import Processors

TRIALS = 3
"""Of which the median counts."""
BUDGET_S = 2.0
"""After so long there is no further trial. A link on which one would take so long is not tried: its messages wait for
the link, and not for processors."""
TRIAL_S, FEWEST, MOST = 0.06, 3, 12
"""What the messages of a size take in a trial while nothing is computed, about; and how many there are."""
PAUSE_S = 0.002
"""Before each message, as in training, where threads wake up for every one: without it a message of 16 KB takes half as
much of the processor."""
LEAST_BYTES, MOST_BYTES = 1 << 14, 1 << 20
"""Of the two sizes that are timed. The larger one is less on slow links, and twice the smaller one at least."""
LONGEST_S = 0.05
"""What the larger size may take while nothing is computed."""
_SIDE, _MEMORY, _PASS = 128, 1 << 21, 1 << 17
"""A round of computing multiplies square matrices of this side and goes through half a megabyte of eight, as training
goes through more memory than a core's own caches hold."""
LONGEST_COMPUTING_S = 60.0
"""After which a thread ends by itself, whatever became of the one that started it."""


class Contention(NamedTuple):
    """What messages take while the ranks compute, and what they take from computing.

    Attributes:
        link: seconds of a message while the ranks compute.
        work: seconds for which a rank computes less, of a message.
    """

    link: Link
    work: Link

    def among(self, processors: Processors) -> Contention:
        """Return the same, of processor seconds as `work`, for ranks with so many cores.

        On a core that is spare, messages take nothing from computing. On cores that ranks share, each waits for the
        others' messages too.

        >>> found = Contention(Link(2e-3, 0.0), Link(1e-3, 0.0))
        >>> for cores in (0.5, 1.0, 2.0):
        ...     print(found.among(Processors(cores, threads=1)).work.alpha_s)
        0.002
        0.001
        0.0
        """
        times = 0.0 if processors.has_spare else processors.crowding
        return self._replace(work=Link(times * self.work.alpha_s, times * self.work.beta_s_per_byte))


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


def contention(transport: Transport, link: Link, computes: bool = True) -> Contention:
    """Time messages while ranks compute, and the processors that they have meanwhile.

    The work of a message is the time of processors that this process had without its thread that computes. Both come
    from all-reduces of two sizes, and a straight line through them. It takes about half a second, and three at most
    where ranks share cores. Every rank must call it at the same place, in the thread that communicates; all get the
    same bits.

    Args:
        transport: between the ranks, two at least, on CPUs.
        link: seconds of a message while nothing is computed, alike on all ranks.
        computes: whether this rank does (`gradwire.topology.processors.has_core`), as one rank at least must; what
            counts is the mean of those that do.
    """
    n, idle = transport.world_size, reduction(link, transport.world_size)
    largest = min(MOST_BYTES, int((LONGEST_S - idle.alpha_s) / max(idle.beta_s_per_byte, 1e-12)))
    sizes = LEAST_BYTES, max(4 * (largest // 4), 2 * LEAST_BYTES)
    each_s = [PAUSE_S + idle.seconds(size) for size in sizes]
    counts = [min(max(int(TRIAL_S / seconds), FEWEST), MOST) for seconds in each_s]
    if sum(count * seconds for count, seconds in zip(counts, each_s, strict=True)) > BUDGET_S:
        return Contention(link, Link(0.0, 0.0))
    trials, began = list[list[float]](), time.perf_counter()
    with Computing(computes) as computing:
        while len(trials) < TRIALS and (not trials or _longest(transport, time.perf_counter() - began) < BUDGET_S):
            trials.append(_trial(transport, computing, sizes, counts))
    found = [statistics.median(each) for each in zip(*trials, strict=True)]
    mine = torch.tensor([*found, 1.0], dtype=torch.float64) * computes
    *sums, computing_ranks = ask(AllReduce(mine), transport).tolist()
    small_s, small_work_s, large_s, large_work_s = (each / computing_ranks for each in sums)
    lines = _line(sizes, small_s, large_s), _line(sizes, small_work_s, large_work_s)
    return Contention(*(message(each, n) for each in lines))


def _longest(transport: Transport, seconds: float) -> float:
    """The longest time of a rank, the same on all of them."""
    return float(ask(AllReduce(torch.tensor([seconds], dtype=torch.float64), "max"), transport))


def _line(sizes: tuple[int, int], smaller_s: float, larger_s: float) -> Link:
    """The straight line through the seconds of two sizes; neither part of it is negative."""
    smaller, larger = sizes
    beta = max(larger_s - smaller_s, 0.0) / (larger - smaller)
    return Link(max(smaller_s - beta * smaller, 0.0), beta)


def _trial(transport: Transport, computing: Computing, sizes: tuple[int, int], counts: list[int]) -> list[float]:
    """Seconds of a message, and of processors that it had, for each size."""
    found = list[float]()
    for size, count in zip(sizes, counts, strict=True):
        part, took_s = torch.zeros(size // 4), 0.0
        ask(AllReduce(torch.zeros(1)), transport)
        worked_s = computing.others_s()
        for _ in range(count):
            time.sleep(PAUSE_S)
            began = time.perf_counter()
            ask(AllReduce(part), transport)
            took_s += time.perf_counter() - began
        found += [took_s / count, (computing.others_s() - worked_s) / count]
    return found


class Computing:
    """A thread that computes for the length of a `with` block.

    It computes nothing where PyTorch has several threads: what all of these work would not be told apart from messages.
    What it raises is raised by the caller's next request. It ends with the main thread too, since a thread that is at
    work while Python ends aborts the process.

    Args:
        is_wanted: False computes nothing either.

    >>> with Computing() as computing:
    ...     computing.others_s() >= 0.0
    True
    """

    def __init__(self, is_wanted: bool = True) -> None:
        self._is_wanted = is_wanted
        self._worked_s, self._begun, self._is_over = 0.0, threading.Event(), threading.Event()
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._compute, name="gradwire-computing", daemon=True)

    def _compute(self) -> None:
        try:
            self._go_on()
        except Exception as error:  # memory that there is not, for instance
            self._error = error
        self._begun.set()

    def _go_on(self) -> None:
        main, ends_s, at = threading.main_thread(), time.monotonic() + LONGEST_COMPUTING_S, 0
        matrix, product, memory = torch.zeros(_SIDE, _SIDE), torch.empty(_SIDE, _SIDE), torch.zeros(_MEMORY)
        with torch.inference_mode():
            while not self._is_over.is_set() and main.is_alive() and time.monotonic() < ends_s:
                torch.mm(matrix, matrix, out=product)
                memory[at : at + _PASS].add_(1.0)
                at = (at + _PASS) % _MEMORY
                self._worked_s = time.thread_time()
                self._begun.set()

    def others_s(self) -> float:
        """Seconds of processors that this process has had so far without this thread."""
        if self._error is not None:
            raise self._error
        return time.process_time() - self._worked_s

    def __enter__(self) -> Computing:
        if self._is_wanted and torch.get_num_threads() == 1:
            self._thread.start()
            self._begun.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_over.set()
        if self._thread.ident is not None:
            self._thread.join()
