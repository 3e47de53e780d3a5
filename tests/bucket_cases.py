"""What ranks do in tests of how finely DDP hands gradients over: models larger than a bucket, with DDP's defaults."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import gradwire
from ddp_cases import digest
from gradwire.session.feed import Piece

WIDTH = 256
"""A layer's weight is 256 KiB: a bucket of its own, at the least size that buckets are made."""


class Stack(nn.Module):
    """Six layers, of which `unused` are left out and the last shares its weight with the first."""

    def __init__(self, unused: tuple[int, ...] = (), checkpointed: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.unused, self.checkpointed = unused, checkpointed

    def forward(self, x: Tensor) -> Tensor:
        """Every layer that is used, and the first one twice."""
        for i, layer in enumerate([*self.layers, self.layers[0]]):
            if i in self.unused:
                continue
            x = checkpoint(layer, x, use_reentrant=True) if self.checkpointed and i else layer(x)
            x = x.tanh()
        return x


Change = Callable[[DDP], contextlib.AbstractContextManager[Any]]


def _batch(rank: int, step: int) -> Tensor:
    return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * step + rank))


def _pass(ddp: DDP, rank: int, step: int) -> None:
    ddp(_batch(rank, step)).square().sum().backward()


def _steps(ddp: DDP, rank: int, variant: str) -> None:
    """Four steps of plain SGD."""
    rounds = 4 - rank if variant == "join" else 4  # the other rank runs out of input first
    with ddp.join() if variant == "join" else contextlib.nullcontext():
        for step in range(rounds):
            if variant == "no_sync":
                with ddp.no_sync():
                    _pass(ddp, rank, 100 + step)
            _pass(ddp, rank, step)
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter.data.sub_(parameter.grad, alpha=0.01)
            ddp.zero_grad(set_to_none=variant != "as_view")


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "no_sync": {},
    "join": {},
    "as_view": {"gradient_as_bucket_view": True},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "sizes": {"bucket_cap_mb_list": [0.1, 1.0, 5.0]},
}


def variants(rank: int, world_size: int) -> dict[str, dict[str, Any]]:
    """Train with DDP alone and with `none` attached; return parameters, and how many buckets a step had."""
    found: dict[str, dict[str, Any]] = {}
    for variant, options in OPTIONS.items():
        found[variant] = {}
        for attached in (False, True):
            model = Stack(unused=(2, 3 + rank) if variant == "unused" else (), checkpointed=variant == "static")
            ddp = DDP(model, **options)
            with gradwire.attach(ddp, "none", deadline_s=60) if attached else contextlib.nullcontext() as handle:
                buckets: list[int] = []
                if handle is not None:
                    _count_buckets(handle, buckets)
                _steps(ddp, rank, variant)
            found[variant]["attached" if attached else "alone"] = digest(ddp)
        found[variant]["buckets"] = buckets[-1]
    return found


def _count_buckets(handle: gradwire.Session, buckets: list[int]) -> None:
    """Note after each step how many buckets it had."""
    feed = handle.feed
    begin, put = feed.open, feed.put

    def opened() -> None:
        buckets.append(0)
        begin()

    def counted(pieces: Iterable[Piece]) -> None:
        buckets[-1] += 1
        put(pieces)

    feed.open, feed.put = opened, counted  # type: ignore[method-assign]
