"""Which positions of a sequence each rank of an axis has."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from gradwire.core.errors import CompositionError


@dataclass(frozen=True)
class SequenceLayout(ABC):
    """A sequence of `length` positions, spread over the ranks of an axis.

    Args:
        length: positions of the whole sequence, padding and packed sequences included.
        ranks: of the axis.

    Raises:
        CompositionError: a length or a number of ranks below 1.
    """

    length: int
    ranks: int

    def __post_init__(self) -> None:
        if self.length < 1 or self.ranks < 1:
            raise CompositionError(
                f"a sequence of {self.length} positions on {self.ranks} ranks: there must be at least one of each"
            )

    @abstractmethod
    def ranges(self, place: int) -> tuple[range, ...]:
        """The positions of a rank, as ranges in ascending order, none of them empty."""

    def count(self, place: int) -> int:
        """How many positions a rank has."""
        return sum(map(len, self.ranges(place)))

    def positions(self, place: int, lengths: Sequence[int] | None = None) -> Tensor:
        """The positions of a rank, in the order in which it has them: what rotary embeddings take.

        Args:
            place: of the rank.
            lengths: of packed sequences; positions are then counted from the beginning of each.

        Returns:
            (count,) int64.

        >>> Zigzag(8, 2).positions(0), Zigzag(8, 2).positions(0, lengths=(5, 3))
        (tensor([0, 1, 6, 7]), tensor([0, 1, 1, 2]))
        """
        whole = torch.cat([torch.arange(r.start, r.stop) for r in self.ranges(place)] or [torch.empty(0).long()])
        if lengths is None:
            return whole
        ends = packed_ends(lengths, self.length)
        begins = torch.cat([ends.new_zeros(1), ends[:-1]])
        return whole - begins[torch.bucketize(whole, ends, right=True)]

    def shard(self, x: Tensor, place: int, dim: int = 1) -> Tensor:
        """The part of a whole tensor that a rank has.

        Args:
            x: `length` long in dimension `dim`.
            place: of the rank.
            dim: of positions.

        Raises:
            CompositionError: a tensor of another length.

        >>> Zigzag(8, 2).shard(torch.arange(8).view(1, 8), place=1)
        tensor([[2, 3, 4, 5]])
        """
        if x.shape[dim] != self.length:
            raise CompositionError(f"dimension {dim} is {x.shape[dim]} long, and the layout is of {self.length}")
        return x.index_select(dim, self.positions(place).to(x.device))

    def join(self, parts: Sequence[Tensor], dim: int = 1) -> Tensor:
        """The whole tensor of the parts of all ranks, in rank order.

        >>> layout, x = Zigzag(8, 2), torch.arange(8).view(1, 8)
        >>> torch.equal(layout.join([layout.shard(x, place) for place in range(2)]), x)
        True
        """
        places = torch.cat([self.positions(place) for place in range(self.ranks)])
        return torch.cat(list(parts), dim).index_select(dim, places.argsort().to(parts[0].device))


@dataclass(frozen=True)
class Contiguous(SequenceLayout):
    """Rank r has the r-th of P pieces, whose lengths differ by at most one. For attention without a causal mask.

    >>> Contiguous(7, 3).ranges(1)
    (range(3, 5),)
    """

    @override
    def ranges(self, place: int) -> tuple[range, ...]:
        return _nonempty(even_piece(self.length, self.ranks, place))


@dataclass(frozen=True)
class Zigzag(SequenceLayout):
    """Of 2 P pieces, rank r has the r-th from the front and the r-th from the back. For causal attention.

    Under a causal mask the first positions see little and the last ones see all. A rank that has some of both has as
    much to compute as every other one. Pieces differ by at most one position, so any length will do.

    References:
        Brandon et al. 2023, "Striped attention", for the imbalance. The order is that of zhuzilin 2024,
        ring-flash-attention, and of Grattafiori et al. 2024, "The Llama 3 herd of models", section 3.3.2.

    >>> Zigzag(16, 2).ranges(1)
    (range(4, 8), range(8, 12))
    """

    @override
    def ranges(self, place: int) -> tuple[range, ...]:
        front, back = place, 2 * self.ranks - 1 - place
        return _nonempty(*(even_piece(self.length, 2 * self.ranks, piece) for piece in (front, back)))


def even_piece(length: int, pieces: int, piece: int) -> range:
    """The piece-th of so many pieces of `length`; the first ones are longer by one where it does not divide.

    >>> [even_piece(7, 3, piece) for piece in range(3)]
    [range(0, 3), range(3, 5), range(5, 7)]
    """
    size, longer = divmod(length, pieces)
    begin = piece * size + min(piece, longer)
    return range(begin, begin + size + (piece < longer))


def packed_ends(lengths: Sequence[int], whole: int) -> Tensor:
    """Where each of the packed sequences ends.

    Raises:
        CompositionError: lengths below 1, or that do not add up to the whole.

    >>> packed_ends((5, 3), 8)
    tensor([5, 8])
    """
    if min(lengths, default=0) < 1 or sum(lengths) != whole:
        raise CompositionError(
            f"packed sequences of {list(lengths)} positions do not add up to {whole}: give the length of each, and "
            "count padding as a sequence of its own"
        )
    return torch.tensor(list(lengths)).cumsum(0)


def _nonempty(*ranges: range) -> tuple[range, ...]:
    return tuple(r for r in ranges if r)
