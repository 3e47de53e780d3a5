"""What the ranks of `test_routes.py` run."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import gradwire
from gradwire.codecs import BlockInt, Identity, TopK
from gradwire.core.grain import flat_grain
from gradwire.core.messages import Expected, Message, SendRecv
from gradwire.drivers import measure
from gradwire.drivers.interpreter import coalesced, run_program
from gradwire.drivers.process_group import GroupTransport
from gradwire.reducers import (
    Auto,
    ErrorFeedback,
    Guard,
    Hierarchical,
    Reduced,
    Reducer,
    ScatterReduce,
    ShardwiseScatterReduce,
    Step,
)
from gradwire.spec import parse


def tensor(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def reduced(reducer: Reducer, x: torch.Tensor, transport: GroupTransport) -> Reduced:
    grain, step = flat_grain(x.numel()), Step(0, transport.rank, transport.world_size)
    return run_program(reducer.reduce(grain, x, reducer.init(grain, step), step), transport)


def digest(x: torch.Tensor) -> str:
    return hashlib.sha256(x.detach().numpy().tobytes()).hexdigest()


def means(rank: int, world_size: int, specs: list[str], numels: list[int]) -> dict[str, Any]:
    """For each spec and size: a digest of the mean, with messages posted as for Gloo and as for other backends."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    transport, batching = GroupTransport(group), GroupTransport(group)
    batching._is_gloo = False  # pyright: ignore[reportPrivateUsage]
    found: dict[str, Any] = {}
    for spec in specs:
        found[f"{spec} batched"] = digest(reduced(parse(spec), tensor(rank, numels[-1]), batching).value)
        for numel in numels:
            found[f"{spec} {numel}"] = digest(reduced(parse(spec), tensor(rank, numel), transport).value)
    return found


HALVES: dict[str, Reducer] = {
    "cut": Guard(ErrorFeedback(ScatterReduce(BlockInt(4)))),
    "by itself": Guard(ErrorFeedback(ShardwiseScatterReduce(TopK(0.1)))),
    "uncompressed": ScatterReduce(Identity()),
}


def shards(rank: int, world_size: int, numel: int) -> dict[str, str]:
    """For each scatter-reduce: a digest of this rank's shard of the mean."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    transport = GroupTransport(group)
    return {name: digest(reduced(half, tensor(rank, numel), transport).value) for name, half in HALVES.items()}


def joined(rank: int, world_size: int) -> list[list[float]]:
    """Two rounds that travel as one batch: 2 elements to the right, 3 to the left, and nothing to oneself."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    right, left, like = (rank + 1) % world_size, (rank - 1) % world_size, torch.empty(0)
    to_right, to_left = torch.full((2,), rank + 0.5), torch.full((3,), float(rank))
    first = SendRecv(like, (Message(right, to_right),), (Expected(left, 2),))
    second = SendRecv(like, (Message(left, to_left), Message(right, like)), (Expected(right, 3), Expected(left, 0)))
    (batch,) = coalesced([(0, first), (1, second)])
    assert batch.joined.nbytes == 20
    return [piece.tolist() for piece in batch.split(GroupTransport(group).issue(batch.joined).wait())]


def trained(rank: int, world_size: int, spec: str) -> dict[str, Any]:
    """A few steps of a small model, and what its `Auto` was told. Few rounds: processes that share cores are slow."""
    measure.SAMPLES = tuple(sample._replace(rounds=2, burst=1) for sample in measure.SAMPLES)
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Linear(300, 40))
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    handle = gradwire.attach(ddp, spec)
    for step in range(3):
        optimizer.zero_grad()
        ddp(tensor(10 * step + rank, 300)).square().mean().backward()
        optimizer.step()
    (unit,) = handle.session.engine.plan.units
    auto = unit.reducer.inter if isinstance(unit.reducer, Hierarchical) else unit.reducer
    assert isinstance(auto, Auto)
    result = {
        "digest": digest(torch.cat([p.reshape(-1) for p in ddp.parameters()])),
        "curves": [curve.points for curve in auto.curves],
        "sent": handle.stats().wire_bytes,
    }
    handle.close()
    return result
