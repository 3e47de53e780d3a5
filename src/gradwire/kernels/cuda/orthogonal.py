# pyright: basic
"""Orthonormal columns of tall matrices: Gram-Schmidt on Gram matrices, twice.

With G = A^T A in float64, a Cholesky factorisation G = R^T R gives Q = A R^-1 (CholeskyQR). Gram matrices are sums over
rows, so any number of programs makes them; what is sequential is r by r and stays in one program. The error
of the first round is about 2^-53 cond(A)^2 and float32's rounding of Q; a second round takes it to float32's own
(Yamamoto et al. 2015, "Roundoff error analysis of the CholeskyQR2 algorithm").

Partial sums are added in a fixed order, so results do not vary from run to run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.launch import ceil_div, launch, power_of_two, programs_at_once

TILE = 2048
"""Elements that a program holds at a time."""


@triton.jit
def _load_rows(a, first, stop, columns, CHUNK: tl.constexpr, R: tl.constexpr):
    row, column = first + tl.arange(0, CHUNK)[:, None], tl.arange(0, R)[None, :]
    return tl.load(a + row * columns + column, mask=(row < stop) & (column < columns), other=0.0)


@triton.jit
def _load_column(a, j, first, stop, columns, CHUNK: tl.constexpr):
    row = first + tl.arange(0, CHUNK)
    return tl.load(a + row * columns + j, mask=row < stop, other=0.0)[:, None]


@triton.jit(do_not_specialize=["columns"])
def _gram(a, parts, rows, columns, CHUNK: tl.constexpr, R: tl.constexpr):
    """A piece's part of A^T A, row j by row j."""
    split, splits, matrix = tl.program_id(0), tl.num_programs(0), tl.program_id(1).to(tl.int64)
    a += matrix * rows * columns
    parts += (matrix * splits + split) * R * R
    size = tl.cdiv(tl.cdiv(rows, splits), CHUNK) * CHUNK
    low = split * size
    stop = tl.minimum(low + size, rows)
    for j in range(columns):
        total = tl.zeros([CHUNK, R], tl.float64)
        for first in range(low, stop, CHUNK):
            tile = _load_rows(a, first, stop, columns, CHUNK, R).to(tl.float64)
            total += tile * _load_column(a, j, first, stop, columns, CHUNK).to(tl.float64)
        tl.store(parts + j * R + tl.arange(0, R), tl.sum(total, 0))


@triton.jit
def _pick(x, mask, axis: tl.constexpr):
    """What the mask leaves of x, along an axis."""
    return tl.sum(tl.where(mask, x, 0.0), axis)


@triton.jit(do_not_specialize=["columns", "splits"])
def _factor(parts, weights, columns, splits, TOLERANCE: tl.constexpr, R: tl.constexpr):
    """W with A W orthonormal: eliminate column after column from G, and do the same to the identity.

    A column that depends on those before it, but for rounding, gets weights of zero. NaN is kept.
    """
    matrix = tl.program_id(0).to(tl.int64)
    i, j = tl.arange(0, R)[:, None], tl.arange(0, R)[None, :]
    inside = (i < columns) & (j < columns)
    gram = tl.zeros([R, R], tl.float64)
    for split in range(splits):
        at = (matrix * splits + split) * R * R
        gram += tl.load(parts + at + i * R + j, mask=inside, other=0.0)
    length = tl.sum(tl.where(i == j, gram, 0.0), 0)
    w = (i == j).to(tl.float64)
    for column in range(columns):
        # What is left of the column, squared, and its products with the others.
        row = _pick(gram, i == column, 0)
        left = tl.sum(tl.where(tl.arange(0, R) == column, row, 0.0))
        whole = tl.sum(tl.where(tl.arange(0, R) == column, length, 0.0))
        dependent = left <= TOLERANCE * whole
        inverse = tl.where(dependent, 0.0, 1.0 / tl.sqrt(tl.where(dependent, 1.0, left)))
        share = row * inverse
        gram -= share[:, None] * share[None, :]
        unit = _pick(w, j == column, 1) * inverse
        w = tl.where(j == column, unit[:, None], tl.where(j > column, w - unit[:, None] * share[None, :], w))
    tl.store(weights + matrix * R * R + i * R + j, w.to(tl.float32))


@triton.jit(do_not_specialize=["columns"])
def _apply(a, weights, out, rows, columns, CHUNK: tl.constexpr, R: tl.constexpr):
    """A piece of A W."""
    matrix = tl.program_id(1).to(tl.int64)
    a += matrix * rows * columns
    weights += matrix * R * R
    first = tl.program_id(0) * CHUNK
    row, column = first + tl.arange(0, CHUNK)[:, None], tl.arange(0, R)[None, :]
    total = tl.zeros([CHUNK, R], tl.float32)
    for j in range(columns):
        total += _load_column(a, j, first, rows, columns, CHUNK) * tl.load(weights + j * R + column)
    tl.store(out + matrix * rows * columns + row * columns + column, total, mask=(row < rows) & (column < columns))


def _round(a: Tensor, tolerance: float) -> Tensor:
    batch, rows, columns = a.shape
    width = power_of_two(columns)
    chunk = min(TILE // width, power_of_two(rows))
    splits = max(1, min(ceil_div(rows, chunk), ceil_div(programs_at_once(a.device), batch)))
    parts = torch.empty(batch, splits, width, width, dtype=torch.float64, device=a.device)
    weights = torch.empty(batch, width, width, dtype=torch.float32, device=a.device)
    out = torch.empty_like(a)
    meta = {"R": width, "num_warps": 4}
    launch(_gram, (splits, batch), a.device, a, parts, rows, columns, CHUNK=chunk, **meta)
    launch(_factor, batch, a.device, parts, weights, columns, splits, TOLERANCE=tolerance, **meta)
    launch(_apply, (ceil_div(rows, chunk), batch), a.device, a, weights, out, rows, columns, CHUNK=chunk, **meta)
    return out


def orthonormalise(matrices: Tensor) -> Tensor:
    """See `gradwire.kernels.fused.orthonormalise`."""
    if not matrices.numel():
        return matrices.clone()
    return _round(_round(matrices.contiguous(), 2.0**-40), 0.25)
