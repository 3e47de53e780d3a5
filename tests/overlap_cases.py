"""What each rank does in the tests of overlap."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import gradwire
from gradwire.overlap import Stopwatch, all_reduce_alone, reduce_alone

CPU = torch.device("cpu")


def world() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 8), nn.LayerNorm(8))


def loss_of(network: nn.Module, step: int, rank: int) -> Tensor:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return network(torch.randn(16, 40, generator=generator)).square().mean()


def slowest_counts(rank: int, world_size: int) -> dict[str, Any]:
    """Rank 1 takes 30 ms for a job that takes the others 10."""
    calls: list[str] = []

    def job(name: str, seconds: float) -> None:
        calls.append(name)
        time.sleep(seconds)

    slow = 0.03 if rank == 1 else 0.01
    jobs = {"slow": lambda: job("slow", slow), "quick": lambda: job("quick", 0.002)}
    found = Stopwatch(world(), CPU).interleaved(jobs, rounds=3, stretch=2, untimed=1)
    overlap = Stopwatch(world(), CPU).overlap(
        lambda: time.sleep(0.05), lambda: time.sleep(0.03), lambda: time.sleep(0.04), rounds=2, stretch=1
    )
    return {"calls": calls, "rounds_s": found.rounds_s, "median_s": found.median_s("slow"), "overlap": overlap}


def alone(rank: int, world_size: int) -> dict[str, Any]:
    """Communication by itself gives the mean that a backward pass gives, and all of a model's buckets."""
    ddp = DDP(model())
    loss_of(ddp.module, 0, rank).backward()
    gradients = {name: p.grad.clone() for name, p in ddp.module.named_parameters() if p.grad is not None}
    with gradwire.attach(ddp, "none") as session:
        reduce_alone(session, gradients)
        sent = session.stats().payload_bytes
        ddp.zero_grad()
        loss_of(ddp, 0, rank).backward()
        same = all(
            torch.equal(gradients[name], p.grad) for name, p in ddp.module.named_parameters() if p.grad is not None
        )
        twice = session.stats().payload_bytes
    plain, counted = DDP(model()), list[int]()
    real = dist.all_reduce

    def counting(tensor: Tensor, *arguments: Any, **options: Any) -> Any:
        counted.append(tensor.numel())
        return real(tensor, *arguments, **options)

    dist.all_reduce = counting
    try:
        all_reduce_alone(plain)
    finally:
        dist.all_reduce = real
    numel = sum(p.numel() for p in plain.parameters())
    return {"same": same, "sent": sent, "twice": twice, "reduced": sum(counted), "numel": numel}
