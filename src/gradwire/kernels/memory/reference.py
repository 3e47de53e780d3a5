"""Memories in plain torch."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.random.reference import uniform

_PIECE = 1 << 16


def add_bf16_(x: Tensor, r: Tensor, alpha: float) -> None:
    """x += alpha * r."""
    x.add_(r.float() * alpha)


def add_scaled_(into: Tensor, x: Tensor, alpha: float) -> None:
    """into += alpha * x, a piece at a time, so that the products stay small."""
    for piece, part in zip(into.split(_PIECE), x.split(_PIECE), strict=True):
        piece.add_(buffers.copied(part, into.dtype).mul_(alpha))


def round_bf16(x: Tensor, seed: int, out: Tensor) -> None:
    """Add sixteen random bits below the last one that is kept, and cut."""
    raw = x.view(torch.int32).to(torch.int64)
    cut = raw >> 16
    up = (raw + (uniform(seed, x.numel(), x.device) * 65536).to(torch.int64)) >> 16
    overflows = ((up & 0x7F80) == 0x7F80) | ~torch.isfinite(x)
    cut = torch.where(x.isnan(), cut | 0x40, cut)  # a NaN whose upper bits are zero would become infinity
    out.view(torch.int16).copy_(torch.where(overflows, cut, up))
