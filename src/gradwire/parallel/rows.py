"""Rows of unequal number between the ranks of an axis, as programs: in one hop, or in two hops over nodes.

A *block* is what one rank has for another, as bytes. Ranks of an axis with nodes are numbered node by node: rank
n L + l is place l of node n, where L is the number of ranks of a node.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.axis import Axis
from gradwire.core.collective import AllToAll, AllToAllV
from gradwire.core.program import Program

BlockBytes = Callable[[int], int]
"""The bytes of a block of so many rows."""

Counts = tuple[int, ...]


class RowCounts(ABC):
    """How many rows each rank has for each, and the way there and back.

    Attributes:
        sends: rows for each rank, in rank order.
        receives: rows from each rank.
        place: of this rank.
    """

    sends: Counts
    receives: Counts
    place: int

    @abstractmethod
    def there(self, blocks: Tensor, nbytes: BlockBytes) -> Program[Tensor]:
        """Send the blocks of `sends`, end to end in rank order; return those of `receives`, in rank order."""

    @abstractmethod
    def back(self, blocks: Tensor, nbytes: BlockBytes) -> Program[Tensor]:
        """Send the blocks of `receives` to where they came from; return those of `sends`."""


@dataclass(frozen=True)
class FlatRows(RowCounts):
    """One all-to-all: each rank sends a message to every other one.

    A rank sends sum over j != place of nbytes(sends[j]) bytes there, and of nbytes(receives[j]) bytes back.

    >>> from gradwire.drivers.cost import asked_by
    >>> rows = FlatRows(sends=(2, 5), receives=(2, 0), place=0)
    >>> blocks = torch.empty(7 * 10, dtype=torch.uint8, device="meta")
    >>> [request.wire_bytes(2) for request in asked_by(rows.there(blocks, lambda count: 10 * count), 2)]
    [50]
    """

    sends: Counts
    receives: Counts
    place: int

    @override
    def there(self, blocks: Tensor, nbytes: BlockBytes) -> Program[Tensor]:
        sends, receives = _sizes(self.sends, nbytes), _sizes(self.receives, nbytes)
        return (yield AllToAllV(blocks, sends, receives, self.place))

    @override
    def back(self, blocks: Tensor, nbytes: BlockBytes) -> Program[Tensor]:
        sends, receives = _sizes(self.receives, nbytes), _sizes(self.sends, nbytes)
        return (yield AllToAllV(blocks, sends, receives, self.place))


@dataclass(frozen=True)
class TwoLevelRows(RowCounts):
    """Two all-to-alls: between nodes among the ranks of equal place, then inside the node; and back the other way.

    Between nodes a rank sends N - 1 messages where the flat exchange sends (N - 1) L, and the same bytes. Inside its
    node it sends what came for the others. Blocks are opaque, so what arrives is the same bit for bit.

    Args:
        sends: rows for each rank.
        receives: rows from each rank.
        place: of this rank.
        local: ranks of a node, L.
        through: rows that come from this rank's place on each node for each place of its own node: what it passes on.

    References:
        Rajbhandari et al. 2022, "DeepSpeed-MoE", section 5.3 (hierarchical all-to-all).
    """

    sends: Counts
    receives: Counts
    place: int
    local: int
    through: tuple[Counts, ...]

    @property
    def between(self) -> Axis:
        """The ranks of equal place on all nodes."""
        return Axis(self._nodes, self.local)

    @property
    def inside(self) -> Axis:
        """The ranks of a node."""
        return Axis(self.local)

    @property
    def _nodes(self) -> int:
        return len(self.sends) // self.local

    @override
    def there(self, blocks: Tensor, nbytes: BlockBytes) -> Program[Tensor]:
        sends, receives, through = self._bytes(nbytes)
        node, place = divmod(self.place, self.local)
        passing = yield AllToAllV(blocks, _per_node(sends), _per_node(through), node, self.between)
        passing = _transposed(passing, through)
        to_place, from_place = _per_node(_turned(through)), _per_node(_turned(receives))
        arrived = yield AllToAllV(passing, to_place, from_place, place, self.inside)
        return _transposed(arrived, _turned(receives))

    @override
    def back(self, blocks: Tensor, nbytes: BlockBytes) -> Program[Tensor]:
        sends, receives, through = self._bytes(nbytes)
        node, place = divmod(self.place, self.local)
        blocks = _transposed(blocks, receives)
        to_place, from_place = _per_node(_turned(receives)), _per_node(_turned(through))
        passing = yield AllToAllV(blocks, to_place, from_place, place, self.inside)
        passing = _transposed(passing, _turned(through))
        return (yield AllToAllV(passing, _per_node(through), _per_node(sends), node, self.between))

    def _bytes(self, nbytes: BlockBytes) -> tuple[_Table, _Table, _Table]:
        """Of what is sent, received and passed on, the bytes by node (a row) and place (a column)."""
        sends, receives = (_cut(_sizes(counts, nbytes), self.local) for counts in (self.sends, self.receives))
        return sends, receives, [_sizes(row, nbytes) for row in self.through]


_Table = Sequence[Counts]


def _sizes(counts: Iterable[int], nbytes: BlockBytes) -> Counts:
    return tuple(nbytes(count) for count in counts)


def _cut(sizes: Counts, local: int) -> list[Counts]:
    return [sizes[first : first + local] for first in range(0, len(sizes), local)]


def _per_node(table: _Table) -> Counts:
    return tuple(map(sum, table))


def _turned(table: _Table) -> list[Counts]:
    return list(zip(*table, strict=True))


def _transposed(blocks: Tensor, table: _Table) -> Tensor:
    """Blocks that lie row by row of the table, laid column by column."""
    columns = len(table[0])
    pieces = blocks.split([size for row in table for size in row])
    return torch.cat([pieces[row * columns + column] for column in range(columns) for row in range(len(table))])


# Which rows there are -------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Announced:
    """What ranks have told each other before rows travel.

    Attributes:
        words: (ranks, words): row i is what rank i told this one.
        through: (nodes, local, words): what this rank's place on each node told each place of this node; None where
            the exchange is flat.
    """

    words: Tensor
    through: Tensor | None


def announce(words: Tensor, local: int | None = None) -> Program[Announced]:
    """Tell each rank a row of numbers, such as how many rows will come. All ranks take the same way as rows do.

    A rank sends 8 w (n - 1) bytes for w words to each of n ranks; with N nodes of L ranks 8 w L (N - 1) bytes between
    nodes, and 8 w N (L - 1) inside its own.

    Args:
        words: (ranks, w) int64: row j is for rank j.
        local: ranks of a node, where the exchange has two levels.
    """
    ranks, width = words.shape
    if local is None:
        got = yield AllToAll(words.contiguous().view(torch.uint8))
        return Announced(got.view(torch.int64), None)
    nodes = ranks // local
    rows = words.contiguous().view(nodes, local * width).view(torch.uint8)
    through = (yield AllToAll(rows, Axis(nodes, local))).view(torch.int64).view(nodes, local, width)
    rows = through.transpose(0, 1).contiguous().view(local, nodes * width).view(torch.uint8)
    arrived = (yield AllToAll(rows, Axis(local))).view(torch.int64).view(local, nodes, width)
    return Announced(arrived.transpose(0, 1).reshape(ranks, width), through)


def rows_of(mine: Sequence[Sequence[int]], announced: Announced, place: int, part: slice) -> RowCounts:
    """Return the rows whose counts are the sums of the words of `part`.

    Args:
        mine: what this rank told each rank.
        announced: what it was told.
        place: of this rank.
        part: which words.
    """
    sends = tuple(sum(words[part]) for words in mine)
    receives = tuple(announced.words[:, part].sum(1).tolist())
    if announced.through is None:
        return FlatRows(sends, receives, place)
    through = announced.through[..., part].sum(-1).tolist()
    return TwoLevelRows(sends, receives, place, len(through[0]), tuple(map(tuple, through)))
