"""Routes: all-reduces made of messages between pairs of ranks, for links on which they beat the backend's own.

Each adds the payloads of an additive codec in one order, at one rank for each element, and sends the sum on, so every
rank has the same mean bit for bit. With M bytes, n ranks, a latency of alpha and 1/beta bytes per second:

    Direct                      2 alpha                  + 2 (n - 1)/n M beta    each shard straight to its owner
    RecursiveHalvingDoubling    2 log2(n) alpha          + 2 (n - 1)/n M beta    n a power of two
    Ring                        2 (n - 1) alpha          + 2 (n - 1)/n M beta
    Tree                        (2 log2(n) + C) alpha    + 2 M beta and a little   C chunks

The formulas do not contain flows that meet at a receiver, nor processors that are shared: that is why `Auto` measures.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor
from typing_extensions import override

from gradwire.core import buffers
from gradwire.core.collective import Collective
from gradwire.core.link import Link
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.reducers.exchange import AllReduceExchange
from gradwire.reducers.step import Step

Total = Generator[Collective, Tensor, Tensor]


def shards(buffer: Tensor, count: int) -> list[Tensor]:
    """Cut a 1-d tensor into `count` views whose sizes differ by at most one element.

    >>> import torch
    >>> [s.tolist() for s in shards(torch.arange(5), 3)]
    [[0], [1, 2], [3, 4]]
    """
    numel = buffer.numel()
    bounds = [numel * i // count for i in range(count + 1)]
    return [buffer[a:b] for a, b in pairwise(bounds)]


def _to(rank: int, tensor: Tensor) -> tuple[Message, ...]:
    return (Message(rank, tensor),)


def _from(rank: int, like: Tensor) -> tuple[Expected, ...]:
    return (Expected(rank, like.numel()),)


# A codec that loses something needs its payload to tell what was sent, so only a lossless one's is worked on in place.
@dataclass(frozen=True)
class Route(AllReduceExchange):
    """An all-reduce by messages between pairs: mean = decode(sum over ranks of encode(x / n)).

    Args:
        codec: an additive codec.

    Raises:
        CompositionError: a codec whose payloads cannot be added.
    """

    def total(self, payload: Tensor, step: Step) -> Total:
        """The sum over ranks, each element added up at one rank."""
        buffer = payload if self.lossless else buffers.copied(payload)
        yield from self.add_up(buffer, step)
        return buffer

    @abstractmethod
    def add_up(self, buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
        """Make `buffer`, 1-d, the sum over ranks, in place."""

    @abstractmethod
    def time_s(self, nbytes: int, world_size: int, link: Link) -> float:
        """Seconds that `nbytes` take by the alpha-beta model."""


# Direct --------------------------------------------------------------------------------------------------------------


def direct_scatter(buffer: Tensor, step: Step) -> Total:
    """Sum shard `rank` of every rank's `buffer` in place, in rank order, and return it.

    One round: shard j goes straight to rank j, n - 1 messages at once. Bytes: (n - 1)/n of the buffer.
    """
    n, rank, parts = step.world_size, step.rank, shards(buffer, step.world_size)
    mine, peers = parts[rank], _others(rank, n)
    sends = tuple(Message(peer, parts[peer]) for peer in peers)
    receives = tuple(Expected(peer, mine.numel()) for peer in reversed(peers))
    received = yield SendRecv(buffer, sends, receives)
    by_rank = dict(zip(reversed(peers), received.split([mine.numel()] * (n - 1)), strict=True)) if n > 1 else {}
    for source in sorted(by_rank):
        mine.add_(by_rank[source])
    return mine


def direct_gather(buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
    """Fill `buffer` with every rank's own shard. One round of n - 1 messages."""
    n, rank, parts = step.world_size, step.rank, shards(buffer, step.world_size)
    peers = _others(rank, n)
    sends = tuple(Message(peer, parts[rank]) for peer in peers)
    sources = peers[::-1]
    received = yield SendRecv(buffer, sends, tuple(Expected(peer, parts[peer].numel()) for peer in sources))
    _put(received, [parts[peer] for peer in sources])


def _others(rank: int, n: int) -> list[int]:
    """The other ranks from the next one on, so that no two ranks begin with the same."""
    return [(rank + i) % n for i in range(1, n)]


def _put(received: Tensor, targets: Sequence[Tensor]) -> None:
    if targets:
        for target, piece in zip(targets, received.split([t.numel() for t in targets]), strict=True):
            target.copy_(piece)


@dataclass(frozen=True)
class Direct(Route):
    """Each shard straight to its owner, each sum straight to all: two rounds of n - 1 messages.

    It does what two-shot does, but encodes only once. No route has fewer rounds, but large messages meet at their
    receivers.

    >>> from gradwire.codecs import Identity
    >>> Direct(Identity()).time_s(4_000_000, 4, Link(0.001, 1e-6))
    6.002
    """

    @override
    def add_up(self, buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
        yield from direct_scatter(buffer, step)
        yield from direct_gather(buffer, step)

    def time_s(self, nbytes: int, world_size: int, link: Link) -> float:
        """2 alpha + 2 (n - 1)/n M beta."""
        n = world_size
        return link.seconds(2 * (n - 1) / n * nbytes, 2 if n > 1 else 0)


# Ring ----------------------------------------------------------------------------------------------------------------


def ring_scatter(buffer: Tensor, step: Step) -> Total:
    """Sum shard `rank` of every rank's `buffer`, in place, and return it: n - 1 rounds around the ring.

    Shard j sets out at rank j + 1 and is added to at every rank it passes; it ends at rank j. Bytes: (n - 1)/n of the
    buffer.
    """
    n, rank, parts = step.world_size, step.rank, shards(buffer, step.world_size)
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):
        leaving, coming = parts[(rank - 1 - turn) % n], parts[(rank - 2 - turn) % n]
        received = yield SendRecv(buffer, _to(right, leaving), _from(left, coming))
        coming.add_(received)
    return parts[rank]


def ring_gather(buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
    """Fill `buffer` with every rank's own shard: n - 1 rounds around the ring."""
    n, rank, parts = step.world_size, step.rank, shards(buffer, step.world_size)
    right, left = (rank + 1) % n, (rank - 1) % n
    for turn in range(n - 1):
        leaving, coming = parts[(rank - turn) % n], parts[(rank - 1 - turn) % n]
        received = yield SendRecv(buffer, _to(right, leaving), _from(left, coming))
        coming.copy_(received)


@dataclass(frozen=True)
class Ring(Route):
    """Around a ring twice: sums on the first turn, results on the second (Patarasuk & Yuan 2009, Section 3).

    2 (n - 1) rounds, each of which sends 1/n of the buffer to the right and receives as much from the left: every link
    carries the least bytes there can be, and no two flows meet.

    References:
        Patarasuk & Yuan 2009, "Bandwidth optimal all-reduce algorithms for clusters of workstations".

    >>> from gradwire.codecs import Identity
    >>> Ring(Identity()).time_s(4_000_000, 4, Link(0.001, 1e-6))
    6.006
    """

    @override
    def add_up(self, buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
        yield from ring_scatter(buffer, step)
        yield from ring_gather(buffer, step)

    def time_s(self, nbytes: int, world_size: int, link: Link) -> float:
        """2 (n - 1) alpha + 2 (n - 1)/n M beta."""
        n = world_size
        return link.seconds(2 * (n - 1) / n * nbytes, 2 * (n - 1))


# Recursive halving and doubling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecursiveHalvingDoubling(Route):
    """Halve what is exchanged with a partner log2(n) times, then double it back (Thakur et al. 2005, Section 4.4).

    In round k the partners are n / 2^(k + 1) apart and each sends the half of its range that the other will own. Ranks
    beyond the largest power of two p hand their whole tensor to rank - p before and get the result after, which
    costs odd world sizes two more rounds and 2 M bytes.

    References:
        Thakur, Rabenseifner & Gropp 2005, "Optimization of collective communication operations in MPICH".

    >>> from gradwire.codecs import Identity
    >>> RecursiveHalvingDoubling(Identity()).time_s(4_000_000, 4, Link(0.001, 1e-6))
    6.004
    """

    def add_up(self, buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
        """Fold to a power of two, halve, double, unfold."""
        p = power_of_two(step.world_size)
        yield from _fold(buffer, step, p)
        masks = [p >> k for k in range(1, p.bit_length())]
        ranges = [_half(buffer, step.rank, masks[:k], p) for k in range(len(masks) + 1)]
        for k, mask in enumerate(masks):
            kept, given = ranges[k + 1], _other_half(buffer, step.rank, masks[: k + 1], p)
            received = yield _with_partner(buffer, step, mask, p, given, kept)
            _add(kept, received)
        for k, mask in reversed(list(enumerate(masks))):
            kept, other = ranges[k + 1], _other_half(buffer, step.rank, masks[: k + 1], p)
            received = yield _with_partner(buffer, step, mask, p, kept, other)
            _copy(other, received)
        yield from _unfold(buffer, step, p)

    def time_s(self, nbytes: int, world_size: int, link: Link) -> float:
        """2 log2(p) alpha + 2 (p - 1)/p M beta; beyond a power of two p, 2 alpha + 2 M beta more."""
        p = power_of_two(world_size)
        folds = 2 if p < world_size else 0
        return link.seconds((2 * (p - 1) / p + folds) * nbytes, 2 * (p.bit_length() - 1) + folds)


def power_of_two(n: int) -> int:
    """The largest power of two that is at most n.

    >>> [power_of_two(n) for n in (1, 2, 3, 7, 8)]
    [1, 2, 2, 4, 8]
    """
    return 1 << (n.bit_length() - 1)


def _fold(buffer: Tensor, step: Step, p: int) -> Generator[Collective, Tensor, None]:
    """Ranks from p on hand their tensor over."""
    if p == step.world_size:
        return
    if step.rank >= p:
        yield SendRecv(buffer, _to(step.rank - p, buffer))
    elif step.rank + p < step.world_size:
        buffer.add_((yield SendRecv(buffer, receives=_from(step.rank + p, buffer))))
    else:
        yield SendRecv(buffer)


def _unfold(buffer: Tensor, step: Step, p: int) -> Generator[Collective, Tensor, None]:
    """Ranks from p on get the result."""
    if p == step.world_size:
        return
    if step.rank >= p:
        buffer.copy_((yield SendRecv(buffer, receives=_from(step.rank - p, buffer))))
    elif step.rank + p < step.world_size:
        yield SendRecv(buffer, _to(step.rank + p, buffer))
    else:
        yield SendRecv(buffer)


def _half(buffer: Tensor, rank: int, masks: Sequence[int], p: int) -> Tensor:
    """What a rank still works on after a round for each mask: the upper half where its bit is set."""
    first, last = 0, p
    for mask in masks:
        first, last = (first + mask, last) if rank & mask else (first, last - mask)
    numel = buffer.numel()
    return buffer[numel * first // p : numel * last // p]


def _other_half(buffer: Tensor, rank: int, masks: Sequence[int], p: int) -> Tensor:
    return _half(buffer, rank ^ masks[-1], masks, p)


def _with_partner(buffer: Tensor, step: Step, mask: int, p: int, given: Tensor, coming: Tensor) -> SendRecv:
    if step.rank >= p:
        return SendRecv(buffer)
    return SendRecv(buffer, _to(step.rank ^ mask, given), _from(step.rank ^ mask, coming))


def _add(place: Tensor, received: Tensor) -> None:
    if received.numel():
        place.add_(received)


def _copy(place: Tensor, received: Tensor) -> None:
    if received.numel():
        place.copy_(received)
