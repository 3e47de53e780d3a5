# pyright: basic
"""Products with matrices, and orthonormal rows, on CPUs, in numba. `runtime.sums` says why inner loops are in LLVM."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from torch import Tensor

from gradwire.core import buffers
from gradwire.kernels.low_rank.products_cpu import WIDTH, cut_rows, fill_product, low_rank_, subtract_low_rank_
from gradwire.kernels.low_rank.reference import TOLERANCES
from gradwire.kernels.random.cpu import uniform_at
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.sums import (
    DOUBLES,
    FUSED,
    INDEX,
    add_product,
    element_at,
    folded_sum,
    index_constant,
    load_vector,
    segment_sum,
    store_vector,
    zero_sums,
)
from gradwire.kernels.runtime.tiles import max_magnitude
from gradwire.kernels.runtime.torch_blocks import LANES, SEGMENT
from gradwire.kernels.runtime.vectors import in_every_lane, vector_intrinsic

__all__ = ["low_rank_", "orthonormalise", "project_columns", "project_rows", "subtract_low_rank_", "unit_rows_"]


# Factors ----------------------------------------------------------------------------------------------------


@inline
def _unit_scale(largest):
    """The power of two that brings a magnitude, given by its bits, to [1, 2), as near as float32 has one."""
    return np.float32(math.ldexp(1.0, min(max(254 - int(largest >> np.uint32(23)), 1), 254) - 127))


@compiled("void(float32[::1], uint32[::1], int64, int64, int64)")
def _unit_rows(Q, raw, columns, k0, k1):
    k0, k1 = np.uint32(k0), np.uint32(k1)
    for start in range(0, Q.size, columns):
        largest = max_magnitude(raw, start, start + columns)
        scale = _unit_scale(largest)
        for i in range(start, start + columns):
            if largest == 0:
                Q[i] = uniform_at(np.uint32(i), k0, k1) * np.float32(2.0) - np.float32(1.0)
            else:
                Q[i] = Q[i] * scale


def unit_rows_(Q: Tensor, seed: int) -> None:
    q = array_of(Q.view(-1))
    if q.size:
        _unit_rows(q, q.view(np.uint32), Q.shape[1], *uniform_words(seed))


_OUTER_PANEL = 16
"""Columns whose sums for four rows of P^T M fill half of the registers of AVX2: see `products_cpu`."""

_DOTS = 2
"""Rows of Q^T whose products with two rows of M do."""

_ROWS = 32
"""Rows of M that are added up before their sum is added to P^T M: a panel of them stays in the nearest cache."""


# M Q --------------------------------------------------------------------------------------------------------


def _dots_of(rows: int, rank: int) -> Any:
    """A function that writes the products of `rows` rows of M with `rank` rows of Q^T, 16 sums for each."""

    @vector_intrinsic
    def dots(context, m, row, m_step, tail, q, vector, q_step, q_tail, tail_at, whole, out, at, out_step):
        def generate(context, builder, signature, args):
            M, row, m_step, Tail, Q, vector, q_step, QTail, tail_at, whole, Out, at, out_step = args
            sums = [zero_sums(builder, rank) for _ in range(rows)]

            def add(xs: list[Any], ys: list[Any]) -> None:
                for y, x in enumerate(xs):
                    for k, factor in enumerate(ys):
                        add_product(builder, sums[y][k], x, factor, FUSED)

            def lines(kind: Any, array: Any, step: Any, count: int, *offsets: Any) -> list[Any]:
                places = [builder.mul(step, index_constant(i)) for i in range(count)]
                return [
                    load_vector(builder, element_at(context, builder, kind, array, place, *offsets)) for place in places
                ]

            with cgutils.for_range_slice(builder, index_constant(0), whole, index_constant(16), INDEX) as (c, _):
                add(lines(m, M, m_step, rows, row, c), lines(q, Q, q_step, rank, vector, c))
            wide = index_constant(16)
            add(lines(tail, Tail, wide, rows, index_constant(0)), lines(q_tail, QTail, wide, rank, tail_at))
            for y in range(rows):
                for k in range(rank):
                    to = element_at(
                        context, builder, out, Out, at, builder.mul(out_step, index_constant(k)), index_constant(y)
                    )
                    builder.store(folded_sum(builder, builder.load(sums[y][k])), to)
            return context.get_dummy_value()

        i = types.intp
        return types.void(m, i, i, tail, q, i, i, q_tail, i, i, out, i, i), generate

    return dots


_dots_2_many, _dots_2_one, _dots_1_many, _dots_1_one = (_dots_of(rows, rank) for rows in (2, 1) for rank in (_DOTS, 1))


@compiled("void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], int64, int64)")
def _project_columns(M, Q, out, start, stop):
    """Products of rows [start, stop) of all matrices, which lie end to end, with the vectors of Q^T."""
    rows, columns, rank = M.shape[1], M.shape[2], Q.shape[1]
    whole = columns // WIDTH * WIDTH
    m, q, o = M.reshape(-1), Q.reshape(-1), out.reshape(-1)
    tail, q_tail = np.zeros(2 * WIDTH, np.float32), np.zeros(rank * WIDTH, np.float32)
    row = start
    while row < stop:
        b = row // rows
        end = min(stop, (b + 1) * rows)
        for k in range(rank):
            for j in range(columns - whole):
                q_tail[k * WIDTH + j] = Q[b, k, whole + j]
        while row < end:
            taken = 2 if row + 2 <= end else 1
            i = row - b * rows
            for y in range(taken):
                for j in range(columns - whole):
                    tail[y * WIDTH + j] = M[b, i + y, whole + j]
            k = 0
            while k < rank:
                vector, at = (b * rank + k) * columns, (b * rank + k) * rows + i
                here = (m, row * columns, columns, tail, q, vector, columns, q_tail, k * WIDTH, whole, o, at, rows)
                if k + _DOTS <= rank:
                    if taken == 2:
                        _dots_2_many(*here)
                    else:
                        _dots_1_many(*here)
                    k += _DOTS
                else:
                    if taken == 2:
                        _dots_2_one(*here)
                    else:
                        _dots_1_one(*here)
                    k += 1
            row += taken


def project_columns(M: Tensor, Qt: Tensor) -> Tensor:
    batch, rows, columns = M.shape
    out = buffers.empty((batch, Qt.shape[1], rows), torch.float32, M.device)
    arrays = (array_of(M), array_of(Qt.contiguous()), array_of(out))
    cuts = cut_rows(batch * rows, columns * Qt.shape[1])
    pool.run([functools.partial(_project_columns, *arrays, i, j) for i, j in cuts])
    return out


# P^T M ------------------------------------------------------------------------------------------------------


def _outer_of(rank: int) -> Any:
    """A function that adds the product of some rows of `rank` columns of P with a panel of M to what `out` holds."""

    @vector_intrinsic
    def outer(context, p, first, p_step, m, panel, m_step, rows, out, at, out_step):
        def generate(context, builder, signature, args):
            P, first, p_step, M, panel, m_step, rows, Out, at, out_step = args
            sums = [zero_sums(builder, _OUTER_PANEL // 16) for _ in range(rank)]
            with cgutils.for_range(builder, rows, intp=INDEX) as loop:
                line = builder.mul(loop.index, m_step)
                terms = [
                    load_vector(builder, element_at(context, builder, m, M, panel, line, index_constant(i)))
                    for i in range(0, _OUTER_PANEL, 16)
                ]
                for k in range(rank):
                    place = builder.mul(p_step, index_constant(k))
                    factor = builder.load(element_at(context, builder, p, P, first, loop.index, place))
                    for sum_, term in zip(sums[k], terms, strict=True):
                        add_product(builder, sum_, in_every_lane(builder, factor, 16), term, FUSED)
            for k in range(rank):
                for i, sum_ in enumerate(sums[k]):
                    to = element_at(
                        context, builder, out, Out, at, builder.mul(out_step, index_constant(k)), index_constant(16 * i)
                    )
                    store_vector(builder, builder.fadd(load_vector(builder, to), builder.load(sum_)), to)
            return context.get_dummy_value()

        i = types.intp
        return types.void(p, i, i, m, i, i, i, out, i, i), generate

    return outer


_outer_of_4, _outer_of_1 = _outer_of(4), _outer_of(1)


@compiled("void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], int64, int64)")
def _project_rows(P, M, out, start, stop):
    """Panels [start, stop) of all matrices: those of the first, then those of the second, ..."""
    rank, rows, columns = P.shape[1], M.shape[1], M.shape[2]
    panels = (columns + _OUTER_PANEL - 1) // _OUTER_PANEL
    p, m, o = P.reshape(-1), M.reshape(-1), out.reshape(-1)
    block, sums = np.zeros(_ROWS * _OUTER_PANEL, np.float32), np.zeros(rank * _OUTER_PANEL, np.float32)
    for b in range(start // panels, (stop + panels - 1) // panels):
        low, high = max(start - b * panels, 0), min(stop - b * panels, panels)
        for i in range(0, rows, _ROWS):
            count = min(_ROWS, rows - i)
            for panel in range(low, high):
                c = panel * _OUTER_PANEL
                width, at = min(_OUTER_PANEL, columns - c), b * rank * columns + c
                source, origin, step, to, begin, to_step = m, (b * rows + i) * columns + c, columns, o, at, columns
                if width < _OUTER_PANEL:
                    for y in range(count):
                        for j in range(width):
                            block[y * _OUTER_PANEL + j] = M[b, i + y, c + j]
                    sums[:] = 0.0
                    source, origin, step, to, begin, to_step = block, 0, _OUTER_PANEL, sums, 0, _OUTER_PANEL
                k = 0
                while k < rank:
                    first, here = (b * rank + k) * rows + i, begin + k * to_step
                    if k + 4 <= rank:
                        _outer_of_4(p, first, rows, source, origin, step, count, to, here, to_step)
                        k += 4
                    else:
                        _outer_of_1(p, first, rows, source, origin, step, count, to, here, to_step)
                        k += 1
                if width < _OUTER_PANEL:
                    for k in range(rank):
                        for j in range(width):
                            out[b, k, c + j] += sums[k * _OUTER_PANEL + j]


def project_rows(Pt: Tensor, M: Tensor) -> Tensor:
    batch, rows, columns = M.shape
    out = torch.zeros(batch, Pt.shape[1], columns, dtype=torch.float32)
    arrays = (array_of(Pt.contiguous()), array_of(M), array_of(out))
    cuts = cut_rows(batch * (-(-columns // _OUTER_PANEL)), rows * _OUTER_PANEL * Pt.shape[1])
    pool.run([functools.partial(_project_rows, *arrays, i, j) for i, j in cuts])
    return out


_segment_product = segment_sum(DOUBLES, lambda builder, x, y: (x, y))


@inline
def _eliminate(gram, w, tolerance):
    """Write R^-1 of G = R^T R to `w` and use `gram` up: see `the reference`."""
    rank = gram.shape[0]
    lengths, share = np.empty(rank, np.float64), np.empty(rank, np.float64)
    w.fill(0.0)
    for k in range(rank):
        lengths[k], w[k, k] = gram[k, k], 1.0
    for k in range(rank):
        left = gram[k, k]
        inverse = 0.0 if left <= lengths[k] * tolerance else 1.0 / np.sqrt(left)
        for j in range(rank):
            share[j] = gram[k, j] * inverse
        for i in range(k + 1, rank):
            for j in range(rank):
                gram[i, j] = gram[i, j] - share[i] * share[j]
        for i in range(rank):
            unit = w[i, k] * inverse
            w[i, k] = unit
            for j in range(k + 1, rank):
                w[i, j] = w[i, j] - unit * share[j]


@inline
def _size_rows(a, raw, length, out):
    """Write rows of length `length` at a largest magnitude in [1, 2), those of subnormal numbers as zero."""
    for start in range(0, a.size, length):
        largest = max_magnitude(raw, start, start + length)
        scale = _unit_scale(largest) if largest >> np.uint32(23) else np.float32(0.0)
        for i in range(start, start + length):
            out[i] = a[i] * scale


@inline
def _orthonormal_round(A, weights, out, tolerance):
    rank, length = A.shape[1], A.shape[2]
    width = (length + LANES - 1) // LANES * LANES
    doubles = np.zeros((rank, width), np.float64)
    flat = doubles.reshape(-1)
    gram, w = np.empty((rank, rank), np.float64), np.empty((rank, rank), np.float64)
    for b in range(A.shape[0]):
        for j in range(rank):
            for i in range(length):
                doubles[j, i] = A[b, j, i]
        for j in range(rank):
            for k in range(j, rank):
                total = 0.0
                for at in range(0, width, SEGMENT):
                    total += _segment_product(flat, j * width + at, flat, k * width + at, min(SEGMENT, width - at))
                gram[j, k] = total
                gram[k, j] = total
        _eliminate(gram, w, tolerance)
        for j in range(rank):
            for k in range(rank):
                weights[b, j, k] = w[j, k]
    fill_product(weights, False, A, out, 0, A.shape[0] * rank, np.float32(1.0), False)


@compiled("void(float32[:,:,::1], uint32[::1], float32[:,:,::1], float32[:,:,::1], float64, float64)")
def _orthonormalise(A, raw, scratch, out, tolerance, again):
    """Two rounds of Cholesky QR."""
    weights = np.empty((A.shape[0], A.shape[1], A.shape[1]), np.float32)
    _size_rows(A.reshape(-1), raw, A.shape[2], out.reshape(-1))
    source, to, least = out, scratch, tolerance
    for _ in range(2):  # a loop, since two calls would be compiled twice
        _orthonormal_round(source, weights, to, least)
        source, to, least = scratch, out, again


def orthonormalise(vectors: Tensor) -> Tensor:
    scratch, out = buffers.like(vectors), buffers.like(vectors)
    jobs = []
    for i, j in _matrices(vectors):
        a = array_of(vectors[i:j])
        arrays = (a, a.reshape(-1).view(np.uint32), array_of(scratch[i:j]), array_of(out[i:j]))
        jobs.append(functools.partial(_orthonormalise, *arrays, *TOLERANCES))
    pool.run(jobs)
    return out


def _matrices(vectors: Tensor) -> list[pool.Chunk]:
    """Matrices for each thread."""
    batch, rank, length = vectors.shape
    return pool.chunks(batch, 1, rank * rank * length // 8)
