"""Latency and bandwidth of the links of each level, measured between pairs of ranks.

One time of one message tells neither. A connection that was idle begins with a small window, so a message takes round
trips that another one right behind it does not, and what the kernel has buffered is not yet there. So the latency is
that of many round trips of a few bytes, before the streams and after them; the lower quartile, since a host that is
busy adds to half of them. The rate is told by the receiver: a stream of messages without a pause between them, of which
only the second half counts, when windows are as large as the link wants them.

The latency is that of the transport. Gloo takes about 55 us where plain sockets take 13, on a link without a delay.

Streams grow until one takes long enough, so a link of 1 Mbit/s and one of 100 Gbit/s take seconds both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from gradwire.core.collective import AllReduce
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.drivers.interpreter import Pending, Transport, ask
from gradwire.topology.axis_links import AxisLink, MeasuredPair, with_described
from gradwire.topology.levels import Level, Topology
from gradwire.topology.link_matrix import slow_links
from gradwire.topology.pairs import RankPair, rounds_of_pairs

Issue = Callable[[], Pending]

PING_BYTES = 8
TRIPS_S = 0.4
FEWEST_TRIPS, MOST_TRIPS = 12, 400
FIRST_TRIPS = 5
"""Round trips after the one that makes connections, which tell how many take `TRIPS_S`."""

FIRST_BYTES, MOST_BYTES = 1 << 15, 1 << 26
MESSAGES = 32
"""Of a stream; the arrivals of the last half of them give the rate. The longest messages have 2 MiB: beyond some 100
Gbit/s they tell of what the transport does for each of them, and the rate is above what is measured."""
STREAM_S, STREAM_TRIPS = 0.4, 10
"""A stream counts where it takes so long and so many round trips: slow start doubles its window in each, so that ten of
them reach a thousand times the first one."""
LEAST_GROWTH, MOST_GROWTH = 2.0, 8.0
FEWEST_STREAMS, MOST_STREAMS = 2, 4
ALIKE = 0.02
"""Relative difference of two streams that ends their repetitions."""


class Effort(NamedTuple):
    """How long each pair is measured.

    Attributes:
        trips_s: seconds of round trips, before the streams and after them.
        stream_s: a stream counts where it takes so long, and `STREAM_TRIPS` round trips.
        most_streams: in each direction, where the first two of them are not alike.
    """

    trips_s: float
    stream_s: float
    most_streams: int


QUICK = Effort(0.1, 0.2, 3)
"""Some two seconds a pair where a round trip takes 10 ms, half of what is taken otherwise; rates within some 10%."""


def measured_links(topology: Topology, transport: Transport, device: torch.device) -> tuple[AxisLink, ...]:
    """Measure the links of every level that has any, the finest first; return the same numbers on every rank.

    Every rank must call it at the same place, while nothing else is under way. A level takes about five seconds where
    a round trip takes 10 ms, 14 where it takes 100, and twice as long where the number of its groups is odd. What a
    description of the topology says is not measured.

    Args:
        topology: of all ranks of the transport.
        transport: moves tensors between ranks; it must serve `SendRecv`.
        device: where they lie.

    Raises:
        ConnectionLost: a rank ended or fell silent.
    """
    found: list[AxisLink] = []
    for place, level in enumerate(topology.levels):
        rounds = rounds_of_pairs(topology, place)
        if rounds:
            found.append(_measured(level, rounds, transport, device))
    return with_described(found, topology)


def _measured(
    level: Level, rounds: Sequence[Sequence[RankPair]], transport: Transport, device: torch.device
) -> AxisLink:
    if level.is_described:
        return AxisLink(level.name)
    return AxisLink(level.name, measured_pairs(rounds, transport, device))


def measured_pairs(
    rounds: Sequence[Sequence[RankPair]], transport: Transport, device: torch.device, effort: Effort | None = None
) -> tuple[MeasuredPair, ...]:
    """Measure latency and rate between pairs of ranks; return the same numbers on every rank.

    Every rank must call it at the same place, with the same rounds, while nothing else is under way.

    Args:
        rounds: pairs of a round talk at once, so no rank may be in two of them.
        transport: moves tensors between ranks; it must serve `SendRecv`.
        device: where they lie.
        effort: equal on all ranks; None takes as long as the links of a profile are measured.

    Raises:
        ConnectionLost: a rank ended or fell silent.
    """
    effort = effort or Effort(TRIPS_S, STREAM_S, MOST_STREAMS)
    return tuple(pair for round_ in rounds for pair in _RoundOfPairs(round_, transport, device, effort).measure())


def compared_pairs(
    rounds: Sequence[Sequence[RankPair]], transport: Transport, device: torch.device
) -> tuple[MeasuredPair, ...]:
    """Measure all pairs soon, and those that look slow once more, with more effort: a busy host may look so.

    Args:
        rounds, transport, device: as of `measured_pairs`.
    """
    pairs = measured_pairs(rounds, transport, device, QUICK)
    slow = {each.pair for each in slow_links(pairs)}
    again = [[pair for pair in each if tuple(pair) in slow] for each in rounds]
    better = {each.ranks: each for each in measured_pairs([each for each in again if each], transport, device)}
    return tuple(_faster(pair, better.get(pair.ranks, pair)) for pair in pairs)


def _faster(one: MeasuredPair, other: MeasuredPair) -> MeasuredPair:
    beta = min(one.beta_s_per_byte, other.beta_s_per_byte)
    return MeasuredPair(one.ranks, min(one.alpha_s, other.alpha_s), beta)


class _RoundOfPairs:
    """Pairs that talk at once, seen from one rank, which is in one of them or in none.

    All ranks issue the same requests equally often, with nothing in them where a rank has nothing to say: what decides
    how many is agreed on.
    """

    def __init__(self, pairs: Sequence[RankPair], transport: Transport, device: torch.device, effort: Effort) -> None:
        self._pairs, self._transport, self._device, self._effort = pairs, transport, device, effort
        rank = transport.rank
        self._place = next((place for place, pair in enumerate(pairs) if rank in pair), None)
        self._is_first = self._place is not None and pairs[self._place].first == rank
        self._peer = sum(pairs[self._place]) - rank if self._place is not None else None
        self._like = torch.zeros(0, dtype=torch.uint8, device=device)

    def measure(self) -> list[MeasuredPair]:
        """Latency and rate of each pair."""
        self._trips(1)  # makes connections
        count = min(max(int(self._effort.trips_s / max(*self._trips(FIRST_TRIPS), 1e-9)), FEWEST_TRIPS), MOST_TRIPS)
        before_s = self._trips(count)
        there, back = self._ways(self._effort.stream_s + STREAM_TRIPS * max(before_s))
        alphas_s = [min(trips_s) / 2 for trips_s in zip(before_s, self._trips(count), strict=True)]
        betas = [max(both) for both in zip(_medians(there), _medians(back), strict=True)]
        found = zip(self._pairs, alphas_s, betas, strict=True)
        return [MeasuredPair((pair.first, pair.second), alpha_s, beta) for pair, alpha_s, beta in found]

    # Round trips ------------------------------------------------------------------------------------------------------

    def _trips(self, count: int) -> list[float]:
        """The lower quartile of each pair's round trips, in seconds."""
        ping = torch.zeros(PING_BYTES, dtype=torch.uint8, device=self._device)
        messages = self._message(PING_BYTES, ping), self._message(PING_BYTES, None)
        send, expect = (_repeated(message, self._transport) for message in messages)
        if self._is_first:
            times = sorted(self._trip(send, expect) for _ in range(count))
            return self._agreed(times[count // 4])
        answer_pings(send, expect, count, self._wait)
        return self._agreed(0.0)

    def _trip(self, send: Issue, expect: Issue) -> float:
        """A ping from the first to the second of each pair, and one back, in seconds."""
        began = time.perf_counter()
        there, back = send(), expect()
        self._wait(there)
        return self._wait(back) - began

    # Streams ----------------------------------------------------------------------------------------------------------

    def _ways(self, enough_s: float) -> tuple[list[list[float]], list[list[float]]]:
        """Seconds a byte of streams that count, a list of all pairs for each: there, and back."""
        nbytes = FIRST_BYTES
        longest_s, betas = self._stream(nbytes, from_first=True)
        while longest_s < enough_s and nbytes < MOST_BYTES:
            growth = min(max(1.2 * enough_s / max(longest_s, 1e-9), LEAST_GROWTH), MOST_GROWTH)
            nbytes = min(int(growth * nbytes) // MESSAGES * MESSAGES, MOST_BYTES)
            longest_s, betas = self._stream(nbytes, from_first=True)
        return self._repeated(nbytes, True, [betas]), self._repeated(nbytes, False, [])

    def _repeated(self, nbytes: int, from_first: bool, streams: list[list[float]]) -> list[list[float]]:
        """Streams of a size in one direction, until the last two of each pair are alike."""
        most = self._effort.most_streams
        while len(streams) < FEWEST_STREAMS or (len(streams) < most and not _are_alike(*streams[-2:])):
            streams.append(self._stream(nbytes, from_first)[1])
        return streams

    def _stream(self, nbytes: int, from_first: bool) -> tuple[float, list[float]]:
        """How long the slowest pair's stream takes, and the seconds a byte of each pair."""
        sends = self._is_first == from_first
        size = nbytes // MESSAGES
        content = torch.zeros(size, dtype=torch.uint8, device=self._device) if sends else None
        message, began = self._message(size, content), time.perf_counter()
        messages = [self._transport.issue(message) for _ in range(MESSAGES)]
        arrivals = [self._wait(message) - began for message in messages]
        is_told = self._place is not None and not sends
        slope = statistics.linear_regression(range(MESSAGES // 2), arrivals[MESSAGES // 2 :]).slope if is_told else 0.0
        longest = ask(AllReduce(self._number(arrivals[-1] if is_told else 0.0), "max"), self._transport)
        return float(longest), self._agreed(max(slope, 0.0) / size)

    # What both are made of --------------------------------------------------------------------------------------------

    def _message(self, size: int, content: Tensor | None) -> SendRecv:
        """A message to the other one of the pair, or one of a size from there where there is no content."""
        if self._peer is None:
            return SendRecv(self._like)
        if content is not None:
            return SendRecv(self._like, sends=(Message(self._peer, content),))
        return SendRecv(self._like, receives=(Expected(self._peer, size),))

    def _wait(self, pending: Pending) -> float:
        """Wait for a message; return the time at which it is there."""
        pending.wait()
        if self._device.type == "cuda":
            arrived = torch.cuda.Event()  # of this message: `synchronize` would wait for those behind it too
            arrived.record(torch.cuda.current_stream(self._device))
            arrived.synchronize()
        return time.perf_counter()

    def _number(self, value: float) -> Tensor:
        return torch.tensor([value], dtype=torch.float64, device=self._device)

    def _agreed(self, value: float) -> list[float]:
        """What the rank of each pair that has measured it says, the same bits on all ranks."""
        values = torch.zeros(len(self._pairs), dtype=torch.float64, device=self._device)
        if self._place is not None:
            values[self._place] = value
        return ask(AllReduce(values, "max"), self._transport).tolist()


def answer_pings(send: Issue, expect: Issue, count: int, wait: Callable[[Pending], object]) -> None:
    """The other side of round trips; also that of ranks which are in no pair, and say nothing.

    The next ping is expected as soon as the last one is answered, long before it can come. Gloo's thread asks the
    kernel for messages without a pause while another thread has the lock of their connection, as one has that expects a
    message. Where both share a core, the other one goes on at the kernel's next tick, up to 4 ms later.

    Args:
        send, expect: issue an answer, and what a ping is received by.
        count: of pings.
        wait: for what one of the two has issued.
    """
    ping = expect()
    for left in reversed(range(count)):
        wait(ping)
        answer = send()
        if left:
            ping = expect()
        wait(answer)


def _medians(streams: Sequence[Sequence[float]]) -> list[float]:
    """The median stream of each pair."""
    return [statistics.median(of_pair) for of_pair in zip(*streams, strict=True)]


def _are_alike(one: Sequence[float], other: Sequence[float]) -> bool:
    return all(abs(a - b) <= ALIKE * max(a, b) for a, b in zip(one, other, strict=True))


def _repeated(request: SendRecv, transport: Transport) -> Issue:
    """Return what issues a request again and again; the results may lie in the same memory.

    A transport that has a method `prepared` does once what is alike each time.
    """
    prepare: Callable[[SendRecv], Issue] | None = getattr(transport, "prepared", None)
    return (lambda: transport.issue(request)) if prepare is None else prepare(request)
