"""Which ranks are near each other: nodes, and groups of nodes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property

from gradwire.core.axis import Axis, NodeSize
from gradwire.core.errors import TopologyError
from gradwire.core.figures import listed
from gradwire.core.rates import spoken_rate

RANK, NODE = "rank", "node"
"""Levels that every topology has: each rank by itself, and the ranks that share a node."""

Group = tuple[int, ...]


@dataclass(frozen=True)
class Level:
    """One level of a topology: a cut of the ranks into groups, which links of one kind join.

    Attributes:
        name: of one of its groups, such as "node".
        groups: ranks of each, in order; groups in the order of their first ranks.
        bits_per_s: of the link between two of its groups, where a description says so, and
        latency_s: what an empty message takes on it, one way.

    >>> Level("node", ((0, 1), (2, 3))).sizes
    (2, 2)
    """

    name: str
    groups: tuple[Group, ...]
    bits_per_s: float | None = None
    latency_s: float | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each group."""
        return tuple(map(len, self.groups))

    @property
    def is_described(self) -> bool:
        """Whether a description says all of its links, so that nothing is measured."""
        return self.bits_per_s is not None and self.latency_s is not None

    def group_of(self, rank: int) -> int:
        """The place of the group that has a rank."""
        return self._places[rank]

    @cached_property
    def _places(self) -> dict[int, int]:
        return {rank: place for place, group in enumerate(self.groups) for rank in group}


@dataclass(frozen=True)
class Topology:
    """The levels of a topology, each inside the next.

    The links of a level join its groups that lie in one group of the level above; those of the last level join all of
    its groups. So two nodes of two ranks have links of two kinds: between the ranks of a node, and between nodes.

    Args:
        levels: the finest first, which is "rank", then "node", then any others.

    Raises:
        TopologyError: levels that do not lie inside each other.

    >>> topology = Topology.of_keys(["a", "a", "b", "b", "b"])
    >>> topology.groups, topology.node_size
    (((0, 1), (2, 3, 4)), None)
    >>> print(topology.summary)
    5 ranks on 2 nodes of 2 and 3 ranks
    >>> Topology.of_keys(["a", "a", "b", "b"]).axes
    (Axis(size=2, stride=1), Axis(size=2, stride=2))
    """

    levels: tuple[Level, ...]

    def __post_init__(self) -> None:
        for inner, outer in zip(self.levels, self.levels[1:], strict=False):
            for group in inner.groups:
                places = {outer.group_of(rank) for rank in group}
                if len(places) > 1:
                    raise TopologyError(
                        f"ranks {listed(group)} share a {inner.name}, and are put into different groups of level "
                        f"{outer.name}: a {inner.name} must lie in one of them"
                    )

    @classmethod
    def of_keys(cls, keys: Sequence[Hashable]) -> Topology:
        """Ranks with equal keys share a node.

        Args:
            keys: of each rank, such as `HostIdentity.key`.
        """
        groups = defaultdict[Hashable, list[int]](list)
        for rank, key in enumerate(keys):
            groups[key].append(rank)
        ranks = Level(RANK, tuple((rank,) for rank in range(len(keys))))
        return cls((ranks, Level(NODE, tuple(map(tuple, groups.values())))))

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return len(self.levels[0].groups)

    def level(self, name: str) -> Level:
        """The level of a name.

        Raises:
            TopologyError: there is none.
        """
        for level in self.levels:
            if level.name == name:
                return level
        raise TopologyError(f"there is no level {name!r}: known are {', '.join(level.name for level in self.levels)}")

    @property
    def groups(self) -> tuple[Group, ...]:
        """The ranks of each node."""
        return self.level(NODE).groups

    def above(self, place: int) -> tuple[Group, ...]:
        """The groups within which links of the level at a place join: those of the next level, or all ranks."""
        return self.levels[place + 1].groups if place + 1 < len(self.levels) else (tuple(range(self.world_size)),)

    @cached_property
    def fan_outs(self) -> tuple[int, ...] | None:
        """How many groups of each level lie in one group above it, the finest first; None where this differs.

        Their product is the number of ranks.
        """
        counts: list[int] = []
        for place, level in enumerate(self.levels):
            firsts = {group[0] for group in level.groups}
            found = {sum(rank in firsts for rank in group) for group in self.above(place)}
            if len(found) > 1:
                return None
            counts += found
        return tuple(counts)

    @cached_property
    def axes(self) -> tuple[Axis, ...] | None:
        """The axis of the mesh for each level, the finest first; None where the ranks form no mesh (`why_no_axes`).

        An axis of size 1 has no links. Ranks are on a mesh where all groups of a level are equally large, and have
        consecutive ranks, as torchrun numbers them.
        """
        if self.fan_outs is None or self.why_no_axes is not None:
            return None
        strides = [math.prod(self.fan_outs[:place]) for place in range(len(self.fan_outs))]
        return tuple(Axis(size, stride) for size, stride in zip(self.fan_outs, strides, strict=True))

    @property
    def why_no_axes(self) -> str | None:
        """Why the ranks are not on a mesh, in a sentence; None where they are."""
        for level in self.levels:
            for group in level.groups:
                if group[-1] - group[0] + 1 != len(group):
                    return f"ranks {listed(group)} of a {level.name} do not follow each other"
        for level in self.levels:
            if len(set(level.sizes)) > 1:
                return f"groups of level {level.name} have {listed(sorted(set(level.sizes)))} ranks"
        return None

    @property
    def node_size(self) -> int | None:
        """How many ranks a node has, where this is the same for all and their ranks follow each other.

        It is what `Hierarchical` needs, whatever lies above nodes.
        """
        groups = self.groups
        is_mesh = all(group[-1] - group[0] + 1 == len(group) == len(groups[0]) for group in groups)
        return len(groups[0]) if is_mesh else None

    @property
    def node_levels(self) -> tuple[NodeSize, ...] | None:
        """What `in_levels` needs: ranks of a node, then nodes of a group of nodes, and so on.

        One number where all groups of a level have equally many, else one for each group. Levels of a single group, and
        levels whose groups each have one group of the level before, are left out, but for nodes. None where the ranks
        of some group do not follow each other.

        >>> Topology.of_keys(["a", "a", "b", "b", "b"]).node_levels
        ((2, 3),)
        """
        finer, found = self.levels[0], list[NodeSize]()
        for level in self.levels[1:]:
            if any(group[-1] - group[0] + 1 != len(group) for group in level.groups):
                return None
            firsts = {group[0] for group in finer.groups}
            counts = tuple(sum(rank in firsts for rank in group) for group in level.groups)
            if level.name == NODE or (len(counts) > 1 and max(counts) > 1):
                found.append(counts[0] if len(set(counts)) == 1 else counts)
                finer = level
        return tuple(found)

    def links_name(self, place: int) -> str:
        """What the links of the level at a place join, for people.

        >>> topology = Topology.of_keys([0, 0, 1, 1])
        >>> topology.links_name(0), topology.links_name(1)
        ('between ranks of a node', 'between nodes')
        """
        above = f" of a {self.levels[place + 1].name}" if place + 1 < len(self.levels) else ""
        return f"between {self.levels[place].name}s{above}"

    @property
    def summary(self) -> str:
        """A line for all nodes, and one for each level above them."""
        first, *others = self.levels[1:]
        lines = [f"{_counted(self.world_size, 'rank')} on {_sized(first)}"]
        lines += [_sized(level) + _described(level) for level in others]
        lines[0] += _described(first)
        return "\n".join(lines)


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'s' * (count != 1)}"


def _sized(level: Level) -> str:
    sizes = sorted(set(level.sizes))
    return f"{_counted(len(level.groups), level.name)} of {listed(sizes)} rank{'s' * (sizes != [1])}"


def _described(level: Level) -> str:
    said = [] if level.bits_per_s is None else [spoken_rate(level.bits_per_s)]
    said += [] if level.latency_s is None else [f"{1e3 * level.latency_s:g} ms one way"]
    return f" (described as joined by {', '.join(said)})" if said else ""
