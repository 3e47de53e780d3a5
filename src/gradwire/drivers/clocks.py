"""By how much the clocks of hosts differ, by exchanges as of the Network Time Protocol."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.drivers.interpreter import Transport
from gradwire.drivers.words import gathered_words

TRIPS = 8
_NBYTES = 8


class ClockOffset(NamedTuple):
    """By how much the clock of a rank is ahead of that of the first one.

    Attributes:
        rank: whose clock.
        seconds: ahead, negative behind.
        error_s: half of the round trip that told it: the offset is no further away from what was found.
        at_s: when that was, by the clock of the rank.
    """

    rank: int
    seconds: float
    error_s: float
    at_s: float


def clock_offsets(
    ranks: Sequence[int], transport: Transport, device: torch.device, clock: Callable[[], float] = time.time
) -> tuple[ClockOffset, ...]:
    """Compare the clocks of some ranks with that of the first of them; return the same numbers on every rank.

    The first rank notes t0, asks, and notes t1 when the answer is there, which is what the other clock showed. Without
    a message that is slower in one direction the other clock showed that at (t0 + t1) / 2, so the offset is the answer
    less this (RFC 5905, Section 8). Of several exchanges the one with the shortest round trip counts.

    Every rank of the transport must call it at the same place.

    Args:
        ranks: the first one asks all others.
        transport: of all ranks, which may be more.
        device: where its tensors lie.
        clock: seconds; the same function of every rank.

    Raises:
        ConnectionLost: a rank ended or fell silent.
    """
    asker, found = ranks[0], list[ClockOffset]()
    for other in ranks[1:]:
        trips = [_exchange(asker, other, transport, device, clock) for _ in range(TRIPS)]
        found.append(min(trips, key=lambda trip: trip.error_s))
    said = gathered_words([list(each) for each in found], transport, device)
    return tuple(ClockOffset(*each) for each in said[asker])


def _exchange(
    asker: int, other: int, transport: Transport, device: torch.device, clock: Callable[[], float]
) -> ClockOffset:
    """One question and its answer; ranks that are neither issue the same with nothing in it."""
    like = torch.zeros(0, dtype=torch.uint8, device=device)
    question, nothing = torch.zeros(_NBYTES, dtype=torch.uint8, device=device), SendRecv(like)
    if transport.rank == asker:
        t0 = clock()
        there = transport.issue(SendRecv(like, sends=(Message(other, question),)))
        back = transport.issue(SendRecv(like, receives=(Expected(other, _NBYTES),)))
        there.wait()
        theirs = _time_in(back.wait())
        t1 = clock()
        return ClockOffset(other, theirs - (t0 + t1) / 2, (t1 - t0) / 2, theirs)
    if transport.rank == other:
        transport.issue(SendRecv(like, receives=(Expected(asker, _NBYTES),))).wait()
        answer = torch.tensor([clock()], dtype=torch.float64).view(torch.uint8).to(device)
        transport.issue(SendRecv(like, sends=(Message(asker, answer),))).wait()
    else:
        transport.issue(nothing).wait()
        transport.issue(nothing).wait()
    return ClockOffset(other, 0.0, 0.0, 0.0)


def _time_in(answer: Tensor) -> float:
    return float(answer.cpu().clone().view(torch.float64))
