# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""Selection: top-k by radix, gather, scatter, and whether all is finite. Nothing waits for the host.

Top-k finds the k-th largest magnitude eight bits at a time, from the exponent down: a histogram of those elements whose
bits above are the k-th's, four times. Each pass works out from the histograms before it where the k-th lies, in every
program alike, so no pass waits for another but by the order of the stream. Then tiles count what lies above and what
ties, and know by a cumulative sum where they write. Six reading passes, whatever the data.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.sparse.cuda import gather
from gradwire.kernels.triton.launch import TILE, ceil_div, launch, programs_at_once
from gradwire.kernels.triton.tiles import load_tile, magnitude_bits

BINS = 256
PASSES = 4


@triton.jit
def _all_finite(x, out, numel, TILE: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * TILE
    local = tl.arange(0, TILE)
    tile = load_tile(x + start, local, local < numel - start, start + TILE <= numel)
    if tl.max(magnitude_bits(tile)) >= 0x7F800000:
        tl.store(out, 0)  # whoever writes writes this


def all_finite(x: Tensor) -> Tensor:
    out = torch.ones((), dtype=torch.uint8, device=x.device)
    launch(_all_finite, ceil_div(x.numel(), TILE), x.device, x, out, x.numel(), TILE=TILE)
    return out.view(torch.bool)


@triton.jit
def _ranked_bits(x):
    """Magnitudes as integers, all NaNs alike."""
    return tl.minimum(magnitude_bits(x), 0x7F800001)


@triton.jit
def _narrow(counts, rank, BINS: tl.constexpr):
    """Return the bin of the `rank`-th largest, and its rank in there."""
    bins = tl.arange(0, BINS)
    count = tl.load(counts + bins)
    at_least = tl.sum(count) - tl.cumsum(count, 0) + count
    digit = tl.sum((at_least >= rank).to(tl.int32)) - 1
    return digit, rank - tl.sum(tl.where(bins > digit, count, 0))


@triton.jit
def _kth(counts, k, PASSES: tl.constexpr, BINS: tl.constexpr):
    """Return the upper bits of the k-th largest that `PASSES` passes found, and its rank among those alike."""
    prefix = tl.full([], 0, tl.int32)
    rank = k
    for number in tl.static_range(PASSES):
        digit, rank = _narrow(counts + number * BINS, rank, BINS)
        prefix = (prefix << (8 if number < 3 else 7)) | digit
    return prefix, rank


@triton.jit(do_not_specialize=["k"])
def _histogram(
    x,
    counts,
    numel,
    k,
    PASS: tl.constexpr,
    BINS: tl.constexpr,
    TILE: tl.constexpr,
):
    """Count a pass's digit."""
    SHIFT: tl.constexpr = 23 - 8 * PASS if PASS < 3 else 0
    WIDTH: tl.constexpr = 8 if PASS < 3 else 7
    prefix, _ = _kth(counts, k, PASS, BINS)
    found = tl.zeros([BINS], tl.int32)
    local = tl.arange(0, TILE)
    for number in range(tl.program_id(0), tl.cdiv(numel, TILE), tl.num_programs(0)):
        start = number * TILE
        inside = local < numel - start
        full = numel - start >= TILE
        tile = load_tile(x + start, local, inside, full)
        magnitude = _ranked_bits(tile)
        digit = (magnitude >> SHIFT) & ((1 << WIDTH) - 1)
        found += tl.histogram(digit, BINS, mask=inside & ((magnitude >> (SHIFT + WIDTH)) == prefix))
    tl.atomic_add(counts + PASS * BINS + tl.arange(0, BINS), found, sem="relaxed")


@triton.jit(do_not_specialize=["k"])
def _threshold(counts, found, k, PASSES: tl.constexpr, BINS: tl.constexpr):
    """Write the k-th largest magnitude's bits, and how many of those that tie with it are kept."""
    threshold, quota = _kth(counts, k, PASSES, BINS)
    tl.store(found, threshold)
    tl.store(found + 1, quota)


@triton.jit
def _compared(x, found, numel, TILE: tl.constexpr):
    """A tile, and for each element 1 where it lies above the threshold, 2^16 where it ties."""
    start = tl.program_id(0) * TILE
    local = tl.arange(0, TILE)
    inside = local < numel - start
    tile = load_tile(x + start, local, inside, numel - start >= TILE)
    magnitude, threshold = _ranked_bits(tile), tl.load(found)
    above = (inside & (magnitude > threshold)).to(tl.int32)
    tied = (inside & (magnitude == threshold)).to(tl.int32)
    return tile, start + local, above + (tied << 16)


@triton.jit
def _count_kept(x, found, kept, numel, TILE: tl.constexpr):
    """How many of a tile lie above the threshold, and how many tie with it."""
    _, _, compared = _compared(x, found, numel, TILE)
    total = tl.sum(compared)
    tl.store(kept + tl.program_id(0), total & 0xFFFF)
    tl.store(kept + tl.num_programs(0) + tl.program_id(0), total >> 16)


@triton.jit
def _emit(x, found, before, indices, values, numel, VALUES: tl.constexpr, TILE: tl.constexpr):
    """Write the tile's kept indices in their slots; with VALUES also the values, which `x` loses."""
    tile, index, compared = _compared(x, found, numel, TILE)
    earlier = tl.cumsum(compared, 0) - compared  # one scan for both counts: a tile has fewer than 2^15 of each
    higher = tl.load(before + tl.program_id(0)) + (earlier & 0xFFFF)
    equal = tl.load(before + tl.num_programs(0) + tl.program_id(0)) + (earlier >> 16)
    quota = tl.load(found + 1)
    keep = ((compared & 0xFFFF) != 0) | (((compared >> 16) != 0) & (equal < quota))
    slot = higher + tl.minimum(equal, quota)
    tl.store(indices + slot, index, mask=keep)
    if VALUES:
        rounded = tile.to(values.dtype.element_ty)
        tl.store(values + slot, rounded, mask=keep)
        tl.store(x + index, tile - rounded.to(tl.float32), mask=keep)


def _count(x: Tensor, k: int) -> Tensor:
    """The histograms of all passes, (PASSES, BINS)."""
    counts = torch.zeros(PASSES, BINS, dtype=torch.int32, device=x.device)
    programs = min(ceil_div(x.numel(), TILE), programs_at_once(x.device))
    for number in range(PASSES):
        launch(_histogram, programs, x.device, x, counts, x.numel(), k, PASS=number, BINS=BINS, TILE=TILE)
    return counts


def _select(x: Tensor, counts: Tensor, k: int, indices: Tensor, values: Tensor | None) -> None:
    """Write indices, and values that `x` loses."""
    tiles, numel = ceil_div(x.numel(), TILE), x.numel()
    found = torch.empty(2, dtype=torch.int32, device=x.device)
    kept = torch.empty(2, tiles, dtype=torch.int32, device=x.device)
    launch(_threshold, 1, x.device, counts, found, k, PASSES=PASSES, BINS=BINS, num_warps=4)
    launch(_count_kept, tiles, x.device, x, found, kept, numel, TILE=TILE)
    before = kept.cumsum(1, dtype=torch.int32).sub_(kept)
    given = x if values is None else values
    launch(_emit, tiles, x.device, x, found, before, indices, given, numel, VALUES=values is not None, TILE=TILE)


def topk_indices(x: Tensor, k: int) -> Tensor:
    indices = torch.empty(k, dtype=torch.int32, device=x.device)
    if k:
        _select(x, _count(x, k), k, indices, None)
    return indices


def topk_encode_keeping(x: Tensor, values: Tensor, indices: Tensor) -> None:
    k = indices.numel()
    if k:
        _select(x, _count(x, k), k, indices, values)


def topk(x: Tensor, k: int, values: Tensor | None = None) -> tuple[Tensor, Tensor]:
    indices = topk_indices(x, k)
    found = (
        torch.empty(k, dtype=torch.float32, device=x.device)
        if values is None or values.dtype != torch.float32
        else values
    )
    gather(x, indices, found)
    return indices, found if values is None or values is found else values.copy_(found)
