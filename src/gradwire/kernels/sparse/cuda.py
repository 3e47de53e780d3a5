# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""Sparse tensors on GPUs: gather and scatter."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.launch import ceil_div, launch


@triton.jit
def _gather(x, indices, out, numel, k, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + at, mask=at < k, other=0)
    # A damaged index reads NaN rather than what is not ours.
    within = (index >= 0) & (index < numel)
    tl.store(out + at, tl.load(x + index, mask=(at < k) & within, other=float("nan")), mask=at < k)


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.gather`. Indices outside read NaN."""
    k = indices.numel()
    launch(_gather, ceil_div(k, 1024), x.device, x, indices, out, x.numel(), k, TILE=1024, num_warps=4)


@triton.jit
def _scatter_add(into, indices, values, numel, k, alpha, TILE: tl.constexpr):
    at = tl.program_id(0) * TILE + tl.arange(0, TILE)
    index = tl.load(indices + at, mask=at < k, other=-1)
    value = tl.load(values + at, mask=at < k, other=0.0).to(tl.float32) * alpha
    tl.atomic_add(into + index, value, mask=(index >= 0) & (index < numel), sem="relaxed")


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """Those that are none add zero to the last element."""
    if out.numel():
        scatter_add_(out.zero_(), indices.clamp(max=out.numel() - 1), values)


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """See `gradwire.kernels.scatter_add_`. Indices outside are left out.

    Where indices repeat, the order of addition is the device's. Atomic additions take subnormal numbers for zero.
    """
    k = indices.numel()
    meta = {"TILE": 1024, "num_warps": 4}
    launch(_scatter_add, ceil_div(k, 1024), into.device, into, indices, values, into.numel(), k, float(alpha), **meta)
