"""Even shards of a tensor as bytes: cut for an all-to-all, read back as rows, joined after an all-gather."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import pad


def shard_numel(numel: int, world_size: int) -> int:
    """Elements of a shard: the same for all, so that the last may have zeros behind the end."""
    return -(-numel // world_size)


def cut(x: Tensor, world_size: int) -> Tensor:
    """Return `x` as one row of bytes a shard; a view where shards come out even."""
    shard = shard_numel(x.numel(), world_size)
    flat = x.reshape(-1)
    if shard * world_size > flat.numel():
        flat = pad(flat, (0, shard * world_size - flat.numel()))
    return flat.view(torch.uint8).view(world_size, shard * x.element_size())


def rows_of(received: Tensor, dtype: torch.dtype) -> Tensor:
    """Return what all ranks sent of one shard, one row a rank, in float32 or for float64 in that."""
    values = received.reshape(-1).view(dtype).view(len(received), received.shape[1] // dtype.itemsize)
    return values.to(arithmetic(dtype))


def join(gathered: Tensor, like: Tensor) -> Tensor:
    """Return the tensor that all ranks' shards make up, in the shape and dtype of `like`."""
    return gathered.view(-1).view(like.dtype)[: like.numel()].view(like.shape)


def arithmetic(dtype: torch.dtype) -> torch.dtype:
    """What sums of `dtype` are taken in."""
    return dtype if dtype == torch.float64 else torch.float32


def add_in_order(parts: Tensor) -> Tensor:
    """The sum of the rows in rank order."""
    first, *others = parts.unbind(0)
    for part in others:
        first = first + part
    return first
