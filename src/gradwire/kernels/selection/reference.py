"""Selection in plain torch: no shape depends on data."""

from __future__ import annotations

import torch
from torch import Tensor

from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN, magnitude_bits
from gradwire.kernels.sparse.reference import scatter_add_


def all_finite(x: Tensor) -> Tensor:
    """Whether no element is NaN or infinite."""
    if not x.numel():
        return torch.ones((), dtype=torch.bool, device=x.device)
    least, greatest = torch.aminmax(x)  # both are NaN where any element is, and nothing of x's size is made
    return least.isfinite() & greatest.isfinite()


def topk_indices(x: Tensor, k: int) -> Tensor:
    """The threshold from `torch.topk`, then a compaction whose output has k entries whatever the data."""
    if k == 0:
        return torch.empty(0, dtype=torch.int32, device=x.device)
    bits = magnitude_bits(x).clamp(max=CANONICAL_NAN)
    threshold = bits.topk(k, sorted=True).values[-1]
    above, equal = bits > threshold, bits == threshold
    quota = k - above.sum()
    keep = above | (equal & (equal.cumsum(0) <= quota))
    slot = torch.where(keep, keep.cumsum(0) - 1, k)
    indices = torch.arange(x.numel(), dtype=torch.int32, device=x.device)
    out = torch.empty(k + 1, dtype=torch.int32, device=x.device)
    return out.scatter_(0, slot, indices)[:k]


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    indices = topk_indices(x, k)
    found = x.index_select(0, indices)
    return indices, found if values is None else values.copy_(found)


_PIECE = 1 << 15  # values gathered at a time: all at once they would take as much memory as the gradient


def at_least(x: Tensor, tau: Tensor, values: Tensor) -> Tensor:
    """The largest, less those below `tau`, which stand behind the others as none."""
    most = values.numel()
    indices = topk_indices(x, most)
    magnitudes = magnitude_bits(x).clamp(max=CANONICAL_NAN).index_select(0, indices)
    keep = magnitudes >= magnitude_bits(tau.view(1)).clamp(max=CANONICAL_NAN)
    slot = torch.where(keep, keep.cumsum(0) - 1, most)
    out = torch.full((most + 1,), x.numel(), dtype=torch.int32, device=x.device)
    at = out.scatter_(0, slot, indices)[:most]
    for some, target in zip(at.split(_PIECE), values.split(_PIECE), strict=True):
        if x.numel():
            torch.index_select(x, 0, some.clamp(max=x.numel() - 1), out=target)
            target.masked_fill_(some == x.numel(), 0.0)
    return at


def topk_encode_keeping(x: Tensor, values: Tensor, indices: Tensor) -> None:
    indices.copy_(topk(x, indices.numel(), values)[0])
    scatter_add_(x, indices, values, -1.0, distinct=True)
