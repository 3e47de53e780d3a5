"""Whether copies and shards lie on nodes in such a way that `node=auto` compresses what crosses slow links."""

from __future__ import annotations

import warnings

import torch
import torch.distributed as dist

from gradwire.core.collective import AllReduce
from gradwire.core.errors import AttachError
from gradwire.drivers.interpreter import ask
from gradwire.drivers.topology import find_topology
from gradwire.session import Session
from gradwire.session.figures import described_ranks
from gradwire.session.lane import Lane

_WHERE = " in gradwire.attach"


def require_copies_on_nodes(session: Session, shards: dist.ProcessGroup, device: torch.device) -> None:
    """Refuse shards that cross nodes where copies share one: what travels between nodes would be uncompressed.

    Every rank of every copy must call it. Where both cross nodes, a warning says what is not compressed.

    Args:
        session: of the ranks that hold this shard of all copies.
        shards: the ranks of this copy.
        device: of the shards.

    Raises:
        AttachError: on all ranks, with how to make the mesh.
    """
    lane = Lane(shards, device, session.lane.deadline_s, "gradwire.attach")
    transport = lane.transport()
    try:
        file, members = described_ranks(shards)
        found = lane.call(lambda: find_topology(transport, device, file, members=members).topology, _WHERE)
    finally:
        lane.let_go(transport)
    between = session.found_topology(_WHERE)
    numbers = torch.tensor([len(found.groups), len(between.groups)], dtype=torch.int64, device=device)
    inside, copies = session.lane.call(lambda: ask(AllReduce(numbers, "max"), session.transport), _WHERE).tolist()
    if inside == 1:
        return
    if copies == 1:
        raise AttachError(
            f"node=auto compresses between nodes, and here the ranks of replicate= share a node while the shards of a "
            f"copy are on {inside} nodes: change the axes, so that shards lie inside nodes, as in "
            f'init_device_mesh(..., ({inside}, ranks of a node), mesh_dim_names=("replicate", "shard"))'
        )
    warnings.warn(
        f"the shards of a copy are on {inside} nodes: what FSDP2 reduces and gathers among them crosses links between "
        "nodes uncompressed, and only what travels between copies is compressed",
        stacklevel=5,
    )
