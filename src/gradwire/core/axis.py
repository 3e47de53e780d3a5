"""Which ranks take part in a collective, where not all do: an axis of a mesh, or groups of any sizes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise

Ranks = tuple[int, ...]

NodeSize = int | tuple[int, ...]
"""How many ranks every node has, or how many each has; of levels above nodes, how many groups of the level below."""


class SubGroups(ABC):
    """A cut of the ranks into sub-groups, of which every rank is in one. It can be a key, and is alike on all ranks."""

    @abstractmethod
    def members(self, rank: int) -> Ranks:
        """The ranks of the sub-group of `rank`, in order."""

    @abstractmethod
    def index(self, rank: int) -> int:
        """Where `rank` stands in its sub-group."""

    @abstractmethod
    def size_of(self, rank: int) -> int:
        """How many ranks are in the sub-group of `rank`."""

    def within(self, outer: SubGroups | None) -> SubGroups:
        """The same cut of each sub-group of `outer`, whose ranks count as 0, 1, ... there."""
        return self if outer is None else Within(self, outer)


@dataclass(frozen=True)
class Axis(SubGroups):
    """An axis of a mesh of ranks: it cuts the world into sub-groups of `size` ranks that are `stride` apart.

    On a mesh of 2 nodes by 3 ranks in row-major order (rank = 3 * node + place) the ranks of a node are joined by
    `Axis(3)` and those of equal place by `Axis(2, 3)`.

    >>> Axis(3).members(4), Axis(2, 3).members(4)
    ((3, 4, 5), (1, 4))
    >>> Axis(2, 3).index(4)
    1
    """

    size: int
    stride: int = 1

    def index(self, rank: int) -> int:
        """Where `rank` stands in its sub-group."""
        return rank // self.stride % self.size

    def members(self, rank: int) -> Ranks:
        """The ranks of the sub-group of `rank`, in order."""
        first = rank - self.index(rank) * self.stride
        return tuple(first + i * self.stride for i in range(self.size))

    def size_of(self, rank: int) -> int:
        """The size of all."""
        return self.size

    def within(self, outer: SubGroups | None) -> SubGroups:
        """The same axis of a mesh whose ranks are the places of a sub-group of `outer`."""
        return Axis(self.size, self.stride * outer.stride) if isinstance(outer, Axis) else super().within(outer)


@dataclass(frozen=True)
class RankGroups(SubGroups):
    """Sub-groups that are written down, of any sizes.

    Args:
        groups: the ranks of each, in order; every rank is in one.

    >>> groups = RankGroups.of_sizes((1, 3))
    >>> groups.members(2), groups.index(2), groups.size_of(0)
    ((1, 2, 3), 1, 1)
    """

    groups: tuple[Ranks, ...]

    @classmethod
    def of_sizes(cls, sizes: Ranks) -> RankGroups:
        """Groups of these sizes, whose ranks follow each other."""
        return cls(tuple(tuple(range(*ends)) for ends in pairwise(accumulate(sizes, initial=0))))

    def members(self, rank: int) -> Ranks:
        """The ranks of the sub-group of `rank`, in order."""
        return self._of_rank[rank]

    def index(self, rank: int) -> int:
        """Where `rank` stands in its sub-group."""
        return self._of_rank[rank].index(rank)

    def size_of(self, rank: int) -> int:
        """How many ranks are in the sub-group of `rank`."""
        return len(self._of_rank[rank])

    @cached_property
    def _of_rank(self) -> dict[int, Ranks]:
        return {rank: group for group in self.groups for rank in group}


@dataclass(frozen=True)
class Within(SubGroups):
    """The cut `inner` of every sub-group of `outer`. A sub-group of one rank stays as it is: it takes no part.

    >>> Within(Axis(2), RankGroups(((0, 1, 3, 6), (2,), (4,), (5,)))).members(6)
    (3, 6)
    """

    inner: SubGroups
    outer: SubGroups

    def members(self, rank: int) -> Ranks:
        """The ranks of the sub-group of `rank`, in order."""
        whole = self.outer.members(rank)
        return whole if len(whole) == 1 else tuple(whole[place] for place in self._places(rank))

    def index(self, rank: int) -> int:
        """Where `rank` stands in its sub-group."""
        return self.members(rank).index(rank)

    def size_of(self, rank: int) -> int:
        """How many ranks are in the sub-group of `rank`."""
        return len(self.members(rank))

    def _places(self, rank: int) -> Iterator[int]:
        return iter(self.inner.members(self.outer.index(rank)))
