"""Sparse tensors in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    """Return x[indices], in the order of the indices."""
    torch.index_select(x.detach(), 0, indices, out=out)


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Those that are none add zero to the last element."""
    if out.numel():
        scatter_add_(out.zero_(), indices.clamp(max=out.numel() - 1), values)


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """into[indices] += alpha * values."""
    into.index_add_(0, indices, values.to(torch.float32) * alpha)


def indices_within(indices: Tensor, numel: int) -> bool:
    """Whether all lie in [0, numel)."""
    return bool(((indices >= 0) & (indices < numel)).all())
