"""How ranks are cut into nodes, of one size or of several, and who of them serves the exchange between nodes."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from gradwire.core.axis import Axis, NodeSize, RankGroups, SubGroups


@dataclass(frozen=True)
class NodeCut:
    """Ranks on nodes, those of a node one after the other.

    Place i of every node serves shard i of what is exchanged between nodes, for i below `places`: the ranks of the
    smallest node. What further ranks of larger nodes have goes into the sums that these serve.

    Attributes:
        inside: the ranks of each node.
        between: the ranks of each place that serves; a rank that does not is by itself.
        count: how many nodes there are.
        places: how many ranks of a node serve, which are its first ones.
        is_even: whether all nodes have equally many ranks, so that all of them serve.
        ranks_per_node: in the mean over nodes.

    >>> cut = cut_into_nodes((2, 3), 5)
    >>> cut.between.members(1), cut.between.members(4), cut.places
    ((1, 3), (4,), 2)
    """

    inside: SubGroups
    between: SubGroups
    count: int
    places: int
    is_even: bool
    ranks_per_node: float

    def place(self, rank: int) -> int:
        """Where a rank stands in its node."""
        return self.inside.index(rank)

    def serves(self, rank: int) -> bool:
        """Whether a rank takes part between nodes."""
        return self.place(rank) < self.places


@functools.lru_cache(maxsize=64)
def cut_into_nodes(size: NodeSize, world_size: int) -> NodeCut:
    """Return the cut of `world_size` ranks into nodes of a size that divides it, or of sizes that add up to it."""
    sizes = (size,) * (world_size // size) if isinstance(size, int) else size
    count, places = len(sizes), min(sizes)
    if len(set(sizes)) == 1:
        return NodeCut(Axis(places), Axis(count, places), count, places, True, float(places))
    inside = RankGroups.of_sizes(sizes)
    serving = [tuple(group[place] for group in inside.groups) for place in range(places)]
    others = [(rank,) for group in inside.groups for rank in group[places:]]
    between = RankGroups((*serving, *others))
    return NodeCut(inside, between, count, places, False, world_size / count)
