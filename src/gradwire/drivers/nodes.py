"""Methods that have ranks find out who shares a node."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gradwire.core.errors import TopologyError
from gradwire.core.spoken import called_as
from gradwire.drivers.link_profiler import LinkProfiler
from gradwire.reducers.base import Reducer, with_parts
from gradwire.reducers.hierarchical import AS_FOUND, Hierarchical


def on_nodes(reducer: Reducer, links: LinkProfiler) -> Reducer:
    """Return a reducer in which every `node=auto` is the number of ranks that share a node; without one, as it is.

    Every rank must call it at the same place, with an equal reducer. Nothing is compressed where all ranks share a
    node, and the method is used as it is where each rank has a node of its own.

    Raises:
        TopologyError: on every rank, for nodes of different sizes, or whose ranks do not follow each other.
    """
    if _with_nodes(reducer, 1) is reducer:
        return reducer
    topology = links.topology().topology
    if topology.node_size is None:
        raise TopologyError(
            f"node=auto needs nodes of one size, whose ranks follow each other, and found {topology.summary}: leave it "
            f"out, or write node= with a number ({topology.why_no_axes})"
        )
    return _with_nodes(reducer, topology.node_size)


def _with_nodes(part: Any, node_size: int) -> Any:
    if isinstance(part, Hierarchical) and part.node_size == AS_FOUND:
        return called_as(replace(part, node_size=node_size), part)
    return with_parts(part, lambda each: _with_nodes(each, node_size))
