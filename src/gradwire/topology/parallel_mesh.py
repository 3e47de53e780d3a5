"""Meshes for parallel training, whose axes fit the number of ranks and the nodes that these share."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from gradwire.core.axis import Axis
from gradwire.core.errors import TopologyError
from gradwire.core.figures import listed
from gradwire.topology.levels import Topology

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

AXES = ("pp", "dp", "ep", "cp", "tp")
"""The axes of a mesh, the outermost first: the ranks of the last one follow each other, so they share a node."""


def mesh(
    dp: int | None = None,
    tp: int | None = None,
    pp: int | None = None,
    cp: int | None = None,
    ep: int | None = None,
    *,
    nodes: int | Topology | None = None,
    device_type: str | None = None,
) -> DeviceMesh:
    """Make a `DeviceMesh` for data, tensor, pipeline, context and expert parallelism, with `tp` innermost.

    The mesh has the axes that are given, in the order pp, dp, ep, cp, tp. Their product is the number of ranks. Every
    rank must call it, with equal arguments. Without a default group `init_device_mesh` makes one, as torchrun says.

    Args:
        dp: ranks that train on different data; None: as many as the other axes leave.
        tp: ranks that share each layer, which send most and so must lie in one node.
        pp: stages of a pipeline.
        cp: ranks that share each sequence.
        ep: ranks that share the experts of a layer.
        nodes: ranks of every node, or what was found (`find_topology(...).topology`); None: what torchrun says in
            LOCAL_WORLD_SIZE, and nothing is checked where it says nothing.
        device_type: of `init_device_mesh`; None: "cuda" where there is a GPU, else "cpu".

    Raises:
        TopologyError: on every rank, for sizes below 1, a product that is not the number of ranks, a `tp` that crosses
            nodes, and nodes that are not those of this run.

    Example:
        mesh = gradwire.topology.mesh(dp=2, tp=4)  # 8 ranks
        mesh["tp"].get_group()
    """
    world_size = _world_size()
    sizes = mesh_sizes(world_size, {"pp": pp, "dp": dp, "ep": ep, "cp": cp, "tp": tp}, nodes, _started_here())
    from torch.distributed.device_mesh import init_device_mesh  # takes long to import

    device_type = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    return init_device_mesh(device_type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def mesh_sizes(
    world_size: int,
    wanted: Mapping[str, int | None],
    nodes: int | Topology | None = None,
    started_here: int | None = None,
) -> dict[str, int]:
    """Return the size of each axis of `mesh`, the outermost first.

    Args:
        world_size: how many ranks there are.
        wanted: the size of each axis; None leaves it out, and leaves dp as many ranks as there are for it.
        nodes: as for `mesh`.
        started_here: ranks that torchrun started on this host; None: unknown.

    Raises:
        TopologyError: see `mesh`.

    >>> mesh_sizes(16, {"tp": 4, "pp": 2}, nodes=8)
    {'pp': 2, 'dp': 2, 'tp': 4}
    >>> mesh_sizes(8, {"dp": 3, "tp": 2})
    Traceback (most recent call last):
        ...
    gradwire.core.errors.TopologyError: dp=3 x tp=2 make 6 ranks, and there are 8: take dp=4, or start 6 ranks
    """
    sizes = {name: size for name in AXES if (size := wanted.get(name)) is not None}
    for name, size in sizes.items():
        if size < 1:
            raise TopologyError(f"{name}={size} is below 1: write how many ranks the axis has, or leave it out")
    others = math.prod(size for name, size in sizes.items() if name != "dp")
    shown = " x ".join(f"{name}={size}" for name, size in sizes.items())
    if world_size % others:
        rest = " x ".join(f"{name}={size}" for name, size in sizes.items() if name != "dp")
        raise TopologyError(
            f"{rest} make {others} ranks, which do not divide the {world_size} that there are: start a multiple of "
            f"{others}, or take smaller axes"
        )
    sizes.setdefault("dp", world_size // others)
    if (product := math.prod(sizes.values())) != world_size:
        raise TopologyError(
            f"{shown} make {product} ranks, and there are {world_size}: take dp={world_size // others}, or start "
            f"{product} ranks"
        )
    _require_inside_nodes(world_size, sizes.get("tp", 1), nodes, started_here)
    return {name: sizes[name] for name in AXES if name in sizes}


def _require_inside_nodes(world_size: int, tp: int, nodes: int | Topology | None, started_here: int | None) -> None:
    """Refuse a `tp` of which some ranks are on another node than the others."""
    topology = _topology(world_size, nodes, started_here)
    if topology is None:
        return
    node_of = {rank: place for place, group in enumerate(topology.groups) for rank in group}
    for first in range(0, world_size, tp):
        members = Axis(tp).members(first)
        crossed = sorted({node_of[rank] for rank in members})
        if len(crossed) > 1:
            fits = math.gcd(*(len(group) for group in topology.groups))
            raise TopologyError(
                f"tp={tp} puts ranks {listed(members)} into one group, and they are on nodes {listed(crossed)}: tensor "
                f"parallelism sends in every layer, so take a tp that divides {fits}, with the ranks of a node one "
                "after the other"
            )


def _topology(world_size: int, nodes: int | Topology | None, started_here: int | None) -> Topology | None:
    """The nodes of this run.

    Raises:
        TopologyError: nodes of other ranks, or that contradict how many ranks this host has.
    """
    if nodes is None:
        nodes = started_here if started_here is not None and world_size % started_here == 0 else None
    elif started_here is not None and not isinstance(nodes, Topology) and nodes != started_here:
        raise TopologyError(
            f"nodes={nodes} says that each node has so many ranks, and torchrun has started {started_here} on this "
            "one: leave nodes= out, or pass what was found (find_topology)"
        )
    if nodes is None or isinstance(nodes, Topology):
        if nodes is not None and nodes.world_size != world_size:
            raise TopologyError(
                f"nodes= is a topology of {nodes.world_size} ranks, and there are {world_size}: find it anew"
            )
        return nodes
    if nodes < 1 or world_size % nodes:
        raise TopologyError(
            f"nodes of {nodes} ranks do not make up the {world_size} ranks of this run: write nodes= as a number that "
            "divides it, or pass what was found (find_topology)"
        )
    return Topology.of_keys([rank // nodes for rank in range(world_size)])


def _world_size() -> int:
    if dist.is_initialized():
        return dist.get_world_size()
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    raise TopologyError("a mesh needs ranks: start them by torchrun, or call init_process_group first")


def _started_here() -> int | None:
    said = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(said) if said.isdigit() and int(said) > 0 else None
