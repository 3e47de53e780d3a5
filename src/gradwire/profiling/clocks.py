"""How far the clocks of other ranks are from rank 0's, by exchanges as of the Network Time Protocol.

A rank sends at t0 by its own clock, rank 0 answers with its time t1, and the answer is here at t2. Were both ways
equally long, rank 0's clock would show t1 at (t0 + t2) / 2 of this one, so the offset is t1 - (t0 + t2) / 2, with an
error of half the round trip at most. Of several exchanges the one with the shortest round trip counts, since the others
had to queue (RFC 5905, sections 8 and 10).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from gradwire.profiling.records import ClockReading

EXCHANGES = 12


def clock_reading(group: dist.ProcessGroup, clock: Callable[[], float]) -> ClockReading:
    """Return how far this rank's clock is from rank 0's; all ranks of a group on CPUs call it at the same place."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    if rank == 0:
        for other in range(1, size):
            for _ in range(EXCHANGES):
                _answer(group, other, clock)
        return ClockReading(clock(), 0.0, 0.0)
    return min((_ask(group, clock) for _ in range(EXCHANGES)), key=lambda reading: reading.round_trip_s)


def _answer(group: dist.ProcessGroup, other: int, clock: Callable[[], float]) -> None:
    word = torch.zeros(1, dtype=torch.float64)
    dist.recv(word, group_src=other, group=group)
    word[0] = clock()
    dist.send(word, group_dst=other, group=group)


def _ask(group: dist.ProcessGroup, clock: Callable[[], float]) -> ClockReading:
    word = torch.zeros(1, dtype=torch.float64)
    sent_s = clock()
    dist.send(word, group_dst=0, group=group)
    dist.recv(word, group_src=0, group=group)
    here_s = clock()
    return ClockReading((sent_s + here_s) / 2, float(word) - (sent_s + here_s) / 2, here_s - sent_s)
