"""What the ranks of `test_routes.py` run."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
import torch.distributed as dist

from gradwire.core.grain import flat_grain
from gradwire.drivers.process_group import GroupTransport, run_program
from gradwire.reducers import Reduced, Reducer, Step
from gradwire.spec import parse


def tensor(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


def reduced(reducer: Reducer, x: torch.Tensor, transport: GroupTransport) -> Reduced:
    grain, step = flat_grain(x.numel()), Step(0, transport.rank, transport.world_size)
    return run_program(reducer.reduce(grain, x, reducer.init(grain, step), step), transport)


def means(rank: int, world_size: int, specs: list[str], numels: list[int]) -> dict[str, Any]:
    """For each spec and size: a digest of the mean, and how far it is from the reference."""
    group = dist.group.WORLD
    assert isinstance(group, dist.ProcessGroup)
    transport = GroupTransport(group)
    found: dict[str, Any] = {}
    for spec in specs:
        for numel in numels:
            mean = reduced(parse(spec), tensor(rank, numel), transport).mean
            want = torch.stack([tensor(r, numel) for r in range(world_size)]).double().mean(0)
            digest = hashlib.sha256(mean.numpy().tobytes()).hexdigest()
            off = float((mean.double() - want).abs().max()) if numel else 0.0
            found[f"{spec} {numel}"] = [digest, off]
    return found
