# pyright: basic
"""The kernels of low-rank methods for GPUs: products with thin factors, and orthonormal rows.

Sums have the order that `gradwire.kernels.low_rank.reference` gives them: the ranks of a step may have different
devices, and what they compute from what all of them received must be the same bits. So a segment of 1024 elements is
added up by one program, over 32 lanes that are folded in halves, and nothing is left to `tl.sum`, whose order is its
own.

What a rank computes before it sends takes the library's products.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.low_rank.reference import TOLERANCES
from gradwire.kernels.runtime.torch_blocks import LANES, SEGMENT
from gradwire.kernels.triton.launch import ceil_div, launch, power_of_two

ROWS, COLUMNS = 16, 128
"""A tile of a product."""


@triton.jit(do_not_specialize=["rank", "alpha"])
def _low_rank(p, q, out, rows, columns, rank, alpha, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """A tile of alpha * P Q^T of one matrix."""
    matrix = tl.program_id(2).to(tl.int64)
    p += matrix * rank * rows
    q += matrix * rank * columns
    out += matrix * rows * columns
    row, column = tl.program_id(1) * ROWS + tl.arange(0, ROWS), tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for k in range(rank):
        factor = tl.load(p + k * rows + row, mask=row < rows, other=0.0)
        term = tl.load(q + k * columns + column, mask=column < columns, other=0.0)
        total += factor[:, None] * term[None, :]
    total = total * alpha
    at = row.to(tl.int64)[:, None] * columns + column[None, :]
    inside = (row < rows)[:, None] & (column < columns)[None, :]
    if ADD:
        total = tl.load(out + at, mask=inside, other=0.0) + total
    tl.store(out + at, total, mask=inside)


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    batch, rows, columns = out.shape
    grid = (ceil_div(columns, COLUMNS), ceil_div(rows, ROWS), batch)
    tensors = (Pt.contiguous(), Qt.contiguous(), out)
    shape = (rows, columns, Pt.shape[1])
    meta = {"ADD": add, "ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
    launch(_low_rank, grid, out.device, *tensors, *shape, float(torch.tensor(alpha, dtype=torch.float32)), **meta)


def subtract_low_rank_(x: Tensor, Pt: Tensor, Qt: Tensor, scale: float) -> None:
    x.baddbmm_(Pt.mT, Qt, alpha=-scale)


@triton.jit(do_not_specialize=["length"])
def _size_rows(a, out, length, TILE: tl.constexpr):
    """A row at a largest magnitude in [1, 2), one of subnormal numbers as zero."""
    row = tl.program_id(0).to(tl.int64)
    a += row * length
    out += row * length
    largest = tl.zeros([TILE], tl.int32)
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        x = tl.load(a + at, mask=at < length, other=0.0)
        largest = tl.maximum(largest, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    exponent = tl.max(largest, 0) >> 23
    bits = tl.where(exponent == 0, 0, tl.maximum(254 - exponent, 1) << 23)
    scale = bits.to(tl.float32, bitcast=True)
    for start in range(0, length, TILE):
        at = start + tl.arange(0, TILE)
        tl.store(out + at, tl.load(a + at, mask=at < length, other=0.0) * scale, mask=at < length)


@triton.jit
def _halved(x, HALF: tl.constexpr, R: tl.constexpr):
    """The upper half of the lanes added to the lower: (2 HALF, R) to (HALF, R)."""
    low, high = tl.split(tl.permute(tl.reshape(x, [2, HALF, R]), [1, 2, 0]))
    return low + high


@triton.jit(do_not_specialize=["rank"])
def _gram(a, parts, rank, length, SEGMENT: tl.constexpr, LANES: tl.constexpr, R: tl.constexpr):
    """A segment's part of A A^T, row j by row j."""
    tl.static_assert(LANES == 32, "lanes are folded five times")
    segment, segments, matrix = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    a += matrix * rank * length
    parts += (matrix * segments + segment) * R * R
    vector = tl.arange(0, R)[None, :]
    for j in range(rank):
        total = tl.zeros([LANES, R], tl.float64)
        for step in range(0, SEGMENT, LANES):
            at = segment * SEGMENT + step + tl.arange(0, LANES)[:, None]
            tile = tl.load(a + vector * length + at, mask=(at < length) & (vector < rank), other=0.0)
            line = tl.load(a + j * length + at, mask=at < length, other=0.0)
            total += tile.to(tl.float64) * line.to(tl.float64)
        total = _halved(_halved(_halved(_halved(_halved(total, 16, R), 8, R), 4, R), 2, R), 1, R)
        tl.store(parts + j * R + tl.arange(0, R), tl.reshape(total, [R]))


@triton.jit
def _pick(x, mask, axis: tl.constexpr):
    """What the mask leaves of x, along an axis: one element and zeros, whose sum is exact in any order."""
    return tl.sum(tl.where(mask, x, 0.0), axis)


@triton.jit(do_not_specialize=["rank", "segments"])
def _factor(parts, weights, rank, segments, TOLERANCE: tl.constexpr, R: tl.constexpr):
    """R^-1 of G = R^T R: eliminate column after column from G, and do the same to the identity.

    A column that depends on those before it, but for rounding, gets weights of zero. NaN is kept.
    """
    matrix = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    inside = (i < rank) & (j < rank)
    gram = tl.zeros([R, R], tl.float64)
    for segment in range(segments):
        at = (matrix * segments + segment) * R * R
        gram += tl.load(parts + at + i * R + j, mask=inside, other=0.0)
    length = tl.sum(tl.where(i == j, gram, 0.0), 0)
    w = (i == j).to(tl.float64)
    for column in range(rank):
        # What is left of the column, squared, and its products with the others.
        row = _pick(gram, i == column, 0)
        left = tl.sum(tl.where(tl.arange(0, R) == column, row, 0.0))
        whole = tl.sum(tl.where(tl.arange(0, R) == column, length, 0.0))
        dependent = left <= whole * TOLERANCE
        inverse = tl.where(dependent, 0.0, 1.0 / tl.sqrt(tl.where(dependent, 1.0, left)))
        share = row * inverse
        gram -= share[:, None] * share[None, :]
        unit = _pick(w, j == column, 1) * inverse
        w = tl.where(j == column, unit[:, None], tl.where(j > column, w - unit[:, None] * share[None, :], w))
    tl.store(weights + matrix * rank * rank + i * rank + j, w.to(tl.float32), mask=inside)


def _round(a: Tensor, tolerance: float) -> Tensor:
    batch, rank, length = a.shape
    width, segments = power_of_two(rank), ceil_div(length, SEGMENT)
    parts = torch.empty(batch, segments, width, width, dtype=torch.float64, device=a.device)
    weights = torch.empty(batch, rank, rank, dtype=torch.float32, device=a.device)
    out = torch.empty_like(a)
    meta = {"R": width, "num_warps": 4}
    launch(_gram, (segments, batch), a.device, a, parts, rank, length, SEGMENT=SEGMENT, LANES=LANES, **meta)
    launch(_factor, batch, a.device, parts, weights, rank, segments, TOLERANCE=tolerance, **meta)
    low_rank_(out, weights, a, 1.0, False)
    return out


def orthonormalise(vectors: Tensor) -> Tensor:
    batch, rank, length = vectors.shape
    sized = torch.empty_like(vectors)
    launch(_size_rows, batch * rank, vectors.device, vectors, sized, length, TILE=SEGMENT, num_warps=4)
    vectors = sized
    for tolerance in TOLERANCES:
        vectors = _round(vectors, tolerance)
    return vectors
