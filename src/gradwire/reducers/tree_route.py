"""The route over two binary trees, see `gradwire.reducers.routes`."""

from __future__ import annotations

import functools
from collections.abc import Generator
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from gradwire.codecs.base import layout_of
from gradwire.core.collective import Collective
from gradwire.core.errors import CompositionError
from gradwire.core.link import Link
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.reducers.routes import Route, shards
from gradwire.reducers.step import Step


class Node(NamedTuple):
    """A rank's place in a tree: how far from the root, under whom, over whom."""

    depth: int
    parent: int | None
    children: tuple[int, ...]


@functools.cache
def double_tree(n: int) -> tuple[tuple[Node, ...], tuple[Node, ...]]:
    """Return two binary trees over n ranks, by rank, in which no rank has children in both.

    The first is the in-order tree over positions 1 to n, whose odd positions are leaves; the second is the same with
    each rank moved on by one position.

    >>> first, second = double_tree(4)
    >>> [len(node.children) for node in first], [len(node.children) for node in second]
    ([0, 2, 0, 1], [2, 0, 1, 0])
    """
    return _tree(n, 0), _tree(n, 1)


def _tree(n: int, shift: int) -> tuple[Node, ...]:
    """The in-order tree in which rank r stands at position (r + shift) mod n + 1."""
    nodes: dict[int, Node] = {}

    def plant(low: int, high: int, depth: int, parent: int | None) -> tuple[int, ...]:
        if low > high:
            return ()
        position = max(range(low, high + 1), key=lambda p: p & -p)
        rank = (position - 1 - shift) % n
        under = plant(low, position - 1, depth + 1, rank) + plant(position + 1, high, depth + 1, rank)
        nodes[rank] = Node(depth, parent, under)
        return (rank,)

    plant(1, n, 0, None)
    return tuple(nodes[rank] for rank in range(n))


@dataclass(frozen=True)
class Tree(Route):
    """Up and down two binary trees at once, half the tensor in each (Sanders, Speck & Träff 2009, Section 3).

    A rank with children in one tree is a leaf of the other, so both directions of every link are used. In round t a
    rank of depth d sends chunk t - (D - d) of sums to its parent and chunk t - D - d of results to its children,
    where D is the depth of the deeper tree: sums and results of different chunks move in the same rounds, 2 D + C - 1
    in all. Latency grows with log2(n); bytes are 2 M, a third more than the least for four ranks.

    Args:
        codec: an additive codec.
        chunk_bytes: at most, of a message; smaller ones fill the trees sooner and pay alpha more often.

    Raises:
        CompositionError: a codec whose payloads cannot be added, or chunks of no bytes.

    References:
        Sanders, Speck & Träff 2009, "Two-tree algorithms for full bandwidth broadcast, reduction and scan".
    """

    chunk_bytes: int = 1 << 18

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.chunk_bytes < 1:
            raise CompositionError(f"chunk_bytes {self.chunk_bytes} is below 1; 262144 is usual")

    def add_up(self, buffer: Tensor, step: Step) -> Generator[Collective, Tensor, None]:
        """One program of rounds for both trees."""
        trees = double_tree(step.world_size)
        depth = max(node.depth for tree in trees for node in tree)
        largest = buffer.nbytes
        if step.largest is not None:  # ranks with smaller parts make as many rounds
            largest = layout_of(self.codec, step.largest, buffer.dtype).nbytes
        count = self.chunks(largest)
        climbs = [
            _Climb(tree[step.rank], depth, shards(half, count))
            for tree, half in zip(trees, shards(buffer, 2), strict=True)
        ]
        for turn in range(2 * depth + count - 1 if depth else 0):
            sends = tuple(message for climb in climbs for message in climb.sends(turn))
            awaited = [each for climb in climbs for each in climb.receives(turn)]
            received = yield SendRecv(buffer, sends, tuple(Expected(a.source, a.place.numel()) for a in awaited))
            for a, piece in zip(awaited, received.split([a.place.numel() for a in awaited]), strict=True):
                a.place.add_(piece) if a.is_part else a.place.copy_(piece)

    def chunks(self, nbytes: int) -> int:
        """How many chunks half a tensor is cut into."""
        return max(1, -(-nbytes // 2 // self.chunk_bytes))

    def time_s(self, nbytes: int, world_size: int, link: Link) -> float:
        """(2 D + C - 1) alpha + (2 + (2 D - 1)/C) M beta: every round but the first and last carries 2 M/C each way."""
        if world_size == 1:
            return 0.0
        depth = max(node.depth for tree in double_tree(world_size) for node in tree)
        count = self.chunks(nbytes)
        return link.seconds((2 + (2 * depth - 1) / count) * nbytes, 2 * depth + count - 1)


class _Awaited(NamedTuple):
    source: int
    place: Tensor
    is_part: bool


class _Climb:
    """What a rank does in one tree, round by round."""

    def __init__(self, node: Node, depth: int, chunks: list[Tensor]) -> None:
        self.node, self.depth, self.chunks = node, depth, chunks

    def sends(self, turn: int) -> list[Message]:
        """A chunk of sums to the parent, one of results to the children."""
        node, up, down = self.node, turn - (self.depth - self.node.depth), turn - self.depth - self.node.depth
        parents = [] if node.parent is None else [node.parent]
        found = [Message(parent, self.chunks[up]) for parent in parents if self._has(up)]
        return found + [Message(child, self.chunks[down]) for child in node.children if self._has(down)]

    def receives(self, turn: int) -> list[_Awaited]:
        """A chunk of sums from each child, one of results from the parent."""
        node, up, down = self.node, turn - (self.depth - self.node.depth - 1), turn - self.depth - self.node.depth + 1
        found = [_Awaited(child, self.chunks[up], True) for child in node.children if self._has(up)]
        parents = [] if node.parent is None else [node.parent]
        return found + [_Awaited(parent, self.chunks[down], False) for parent in parents if self._has(down)]

    def _has(self, chunk: int) -> bool:
        return 0 <= chunk < len(self.chunks)
