"""Methods that have ranks find out who shares a node."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from gradwire.core.axis import NodeSize
from gradwire.core.errors import TopologyError
from gradwire.core.grain import ParameterSpec
from gradwire.core.spoken import called_as
from gradwire.drivers.level_bytes import level_bytes
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.reducers.base import Reducer, with_parts
from gradwire.reducers.hierarchical import AS_FOUND, Hierarchical, in_levels
from gradwire.topology.axis_links import AxisLinks
from gradwire.topology.levels import Topology


def on_nodes(
    reducer: Reducer, links: LinkProfiler, specs: Sequence[ParameterSpec], grain_numel: int | None = None
) -> Reducer:
    """Return a reducer in which every `node=auto` is the nodes that ranks have found; without one, as it is.

    Every rank must call it at the same place, with equal arguments. Nothing is compressed where all ranks share a
    node, and the method is used as it is where each rank has a node of its own. Where a description names groups of
    nodes, the links are measured: inside these groups too nothing is compressed, if that takes less time by the bytes
    that cross the link of each level (`level_bytes`).

    Args:
        reducer: what a spec says.
        links: of the group.
        specs: what will be reduced.
        grain_numel: elements of a grain at most.

    Raises:
        TopologyError: on every rank, for nodes whose ranks do not follow each other.
    """
    if not finds_nodes(reducer):
        return reducer
    topology = links.topology().topology
    levels = topology.node_levels
    if levels is None:
        raise TopologyError(
            f"node=auto needs nodes whose ranks follow each other, and found {topology.summary}: number the ranks node "
            f"by node, as torchrun does, or leave it out ({topology.why_no_axes})"
        )
    ways = [_with_nodes(reducer, levels[:count]) for count in range(1, len(levels) + 1)]
    if len(ways) == 1:
        return ways[0]
    joined = links.axis_links()
    times_s = [predicted_s(way, specs, topology, joined, grain_numel) for way in ways]
    return ways[times_s.index(min(times_s))]


def finds_nodes(reducer: Reducer) -> bool:
    """Whether a reducer has `node=auto` in it, so that its ranks find their nodes.

    >>> from gradwire.spec import parse
    >>> finds_nodes(parse("int4,node=auto")), finds_nodes(parse("int4,node=8"))
    (True, False)
    """
    return _with_nodes(reducer, (1,)) is not reducer


def predicted_s(
    reducer: Reducer,
    specs: Sequence[ParameterSpec],
    topology: Topology,
    links: AxisLinks,
    grain_numel: int | None = None,
) -> float:
    """Return how long the links of all levels take for a step, one level after the other; coding takes no time.

    Only sums and products of what all ranks know, so it is the same number on each of them.
    """
    sent = level_bytes(reducer, specs, topology, grain_numel=grain_numel)
    return sum(each.seconds(link) for each in sent if (link := links.of(each.level)) is not None)


def _with_nodes(part: Any, levels: Sequence[NodeSize]) -> Any:
    if isinstance(part, Hierarchical) and part.node_size == AS_FOUND:
        outermost = Hierarchical(part.inter, levels[-1])
        return called_as(in_levels(outermost, levels[:-1]), part)
    return with_parts(part, lambda each: _with_nodes(each, levels))
