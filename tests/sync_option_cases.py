"""What each rank does to tell whether options of `gradwire.sync` change anything."""

import contextlib
import hashlib

import torch
import torch.distributed as dist
from torch import Tensor, nn

import gradwire
from gradwire.core.errors import CompositionError
from gradwire.sync import AveragingOptimizer
from spec_places import where_of

STEPS = 12


def model() -> nn.Module:
    """With matrices that two factors of rank 4 make smaller, and others that they do not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(24, 32), nn.BatchNorm1d(32), nn.Linear(32, 4), nn.Linear(4, 24))


def trained(spec: str) -> str:
    """A digest of what a rank had after every step, and after a last average: parameters and buffers."""
    net, digest = model(), hashlib.sha256()
    inner = torch.optim.Adam(net.parameters(), lr=0.01, weight_decay=0.01)
    optimizer = gradwire.sync.parse(spec).optimizer(inner, net, **where_of(spec))
    generator = torch.Generator().manual_seed(dist.get_rank())
    for _ in range(STEPS):
        optimizer.zero_grad()
        x = torch.randn(8, 24, generator=generator)
        net(x).sub(x.flip(1)).square().mean().backward()
        optimizer.step()
        for tensor in (*net.parameters(), *net.buffers()):
            digest.update(bytes_of(tensor))
    if isinstance(optimizer, AveragingOptimizer):
        optimizer.sync()
        for tensor in (*net.parameters(), *net.buffers()):
            digest.update(bytes_of(tensor))
    optimizer.close()
    return digest.hexdigest()


def bytes_of(tensor: Tensor) -> bytes:
    return tensor.detach().numpy().tobytes()


def digests(rank: int, world_size: int, specs: list[str]) -> dict[str, str]:
    """Of every spec that can be had for the model."""
    found: dict[str, str] = {}
    for spec in specs:
        with contextlib.suppress(CompositionError):  # more fragments than layers
            found[spec] = trained(spec)
    return found
