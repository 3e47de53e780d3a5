"""What each rank does in the tests of `gradwire.sync` over sharded models: two copies on two ranks each."""

from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

import fsdp2_cases
from fsdp2_cases import Net, batches, loss_of, shard, two_dimensions, whole
from gradwire.sync import BMUF, DiLoCo, DriftTriggered, LocalSGD, SlowMo

STEPS = 13
DEADLINE_S = 30.0

METHODS: dict[str, dict[str, Any]] = {
    "local": {},
    "diloco": {"outer": DiLoCo()},
    "slowmo": {"outer": SlowMo()},
    "bmuf": {"outer": BMUF(0.5)},
    "warm": {"outer": DiLoCo(), "warmup": 3},
    "moments": {"moments": "average"},
    "forgetful": {"moments": "reset", "outer": SlowMo()},
    "streaming": {"outer": DiLoCo(), "fragments": 2, "delay": 1},
    "progress": {"delay": 3, "merge": "progress"},
    "drift": {"every": DriftTriggered(0.02, 6)},
}
"""Settings under which shards are averaged as whole models are."""


def sharded(mesh: DeviceMesh, net: Net | None = None) -> Net:
    """A copy on the ranks of one shard dimension, in double precision unless it is given."""
    return shard(net or Net().double(), mesh["shard"])


def adam(net: nn.Module) -> torch.optim.Optimizer:
    """Has moments."""
    return torch.optim.AdamW([p for p in net.parameters() if p.requires_grad], 0.01)


def settings(mesh: DeviceMesh, name: str) -> dict[str, Any]:
    """Of a method, between copies."""
    return {"every": 4, "group": mesh["replicate"].get_group(), "deadline_s": DEADLINE_S, **METHODS[name]}


def loss_of_copy(net: nn.Module, mesh: DeviceMesh, step: int) -> Tensor:
    """The mean loss of all batches that the ranks of this rank's copy have in a step."""
    ranks = cast("list[int]", mesh["shard"].mesh.tolist())
    losses = [loss_of(net, *next(batches(rank, step + 1, step))) for rank in ranks]
    return torch.stack(losses).mean()


def train(net: nn.Module, optimizer: torch.optim.Optimizer, rank: int, begin: int, end: int) -> None:
    """Steps of a sharded model, each rank with its own batch."""
    for x, y in batches(rank, end, begin):
        optimizer.zero_grad()
        loss_of(net, x, y).backward()
        optimizer.step()


def far(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> float:
    """The largest difference of an element."""
    assert found.keys() == wanted.keys()
    return max(float((found[name] - wanted[name]).abs().max()) for name in found)


# Cases ---------------------------------------------------------------------------------------------------------


def as_whole(rank: int, world_size: int, names: list[str]) -> dict[str, dict[str, Any]]:
    """How far sharded copies are from whole ones that are fed the same data, in mid-window and at the end."""
    return {name: _as_whole(rank, name) for name in names}


def _as_whole(rank: int, name: str) -> dict[str, Any]:
    mesh = two_dimensions()
    net, plain = sharded(mesh), Net().double()
    start = {key: value.detach().clone() for key, value in plain.named_parameters()}
    how = settings(mesh, name)
    found: dict[str, Any] = {}
    with LocalSGD(adam(net), net, **how) as ours, LocalSGD(adam(plain), plain, **how) as other:
        ended: list[list[int]] = [[], []]
        for step in range(STEPS):
            train(net, ours, rank, step, step + 1)
            other.zero_grad()
            loss_of_copy(plain, mesh, step).backward()
            other.step()
            for seen, optimizer in zip(ended, (ours, other), strict=True):
                seen.append(optimizer.averaging.since)
        found["windows"] = ended[0] == ended[1] and 0 in ended[0]
        found["mid-window"] = far(whole(net), dict(plain.named_parameters()))
        copies = {key: cast(Any, value).full_tensor() for key, value in ours.averaging.global_copy().items()}
        found["copies"] = far(copies, other.averaging.global_copy())
        ours.sync()
        other.sync()
    found["end"] = far(whole(net), dict(plain.named_parameters()))
    found["moved"] = far(whole(net), start)
    found["digest"] = fsdp2_cases.digest(net)
    return found
