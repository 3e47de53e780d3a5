# pyright: basic
"""The kernels of low-rank methods for CPUs, in numba. See `cpu` for the rules they keep.

The inner loops are spelled in LLVM's vectors of 16 lanes, since numba keeps the sums of a loop in memory: with the sums
in registers M Q takes a sixth of the time. A processor with narrower vectors takes several for one, and rounds alike.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.np.arrayobj import make_array
from torch import Tensor

from gradwire.kernels import pool
from gradwire.kernels.cpu import _array, _inline, _intrinsic, _kernel, _lanes_of, _target_has, _uniform_at, _widest
from gradwire.kernels.reference import uniform_words
from gradwire.kernels.reference_matrices import CENTRE, LANES, LOG_2, LOGARITHM, SEGMENT, SQRT_HALF, TAIL, TOLERANCES

_FLOATS, _DOUBLES = ir.VectorType(ir.FloatType(), 16), ir.VectorType(ir.DoubleType(), LANES)
_INDEX = ir.IntType(64)
_WIDE = _target_has("avx512f")
"""Whether there are 32 registers of 16 lanes; else 16 of 8 at most. Sums that do not fit into them cost twice the time.
How many sums are made at once decides nothing about their bits."""
_PANEL = 64 if _WIDE else 32
"""Columns whose sums for two rows of a product fill half of the registers."""
_OUTER_PANEL = 64 if _WIDE else 16
"""Columns whose sums for four rows of P^T M do, and fewer where there are fewer registers."""
_DOTS = 4 if _WIDE else 2
"""Rows of Q^T whose products with two rows of M fill half of the registers."""
_NEAR = 4096
"""Elements of Q that stay in the nearest cache while rows of P Q^T pass."""
_ROWS = 32
"""Rows of M that are added up before their sum is added to P^T M: a panel of them stays in the nearest cache."""
_WIDTH = 16


# Vectors ----------------------------------------------------------------------------------------------------


def _at(context: Any, builder: Any, kind: Any, array: Any, *offsets: Any) -> Any:
    """A pointer to the element of a 1-d array at the sum of some offsets."""
    return builder.gep(make_array(kind)(context, builder, array).data, [functools.reduce(builder.add, offsets)])


def _load(builder: Any, pointer: Any, vector: Any = _FLOATS) -> Any:
    return builder.load(builder.bitcast(pointer, vector.as_pointer()), align=4)


def _store(builder: Any, value: Any, pointer: Any) -> None:
    builder.store(value, builder.bitcast(pointer, value.type.as_pointer()), align=4)


def _index(value: int) -> Any:
    return ir.Constant(_INDEX, value)


def _sums(builder: Any, count: int, vector: Any = _FLOATS) -> list[Any]:
    """Sums of zero, which LLVM keeps in registers."""
    made = [cgutils.alloca_once(builder, vector) for _ in range(count)]
    for sum_ in made:
        builder.store(ir.Constant(vector, None), sum_)
    return made


FUSED = ("contract",)
"""Flags of operations that a processor may fuse: only in what a rank computes before it sends, where it halves them."""


def _add_product(builder: Any, sum_: Any, a: Any, b: Any, flags: tuple[str, ...] = ()) -> None:
    builder.store(builder.fadd(builder.load(sum_), builder.fmul(a, b, flags=flags), flags=flags), sum_)


def _folded(builder: Any, vector: Any) -> Any:
    """The sum of a vector's lanes: the upper half is added to the lower until one is left."""
    word = ir.IntType(32)
    while (half := vector.type.count // 2) > 0:
        low, high = (
            builder.shuffle_vector(vector, vector, ir.Constant(ir.VectorType(word, half), list(range(at, at + half))))
            for at in (0, half)
        )
        vector = builder.fadd(low, high)
    return builder.extract_element(vector, ir.Constant(word, 0))


# P Q^T ------------------------------------------------------------------------------------------------------


def _product_of(rows: int, flags: tuple[str, ...] = ()) -> Any:
    """A function that writes `rows` rows of a panel of P Q^T; a row's factors lie `step` after those of the last."""

    @_intrinsic
    def product(context, p, step, q, panel, rank, out, at, out_step, alpha, add):
        def generate(context, builder, signature, args):
            P, step, Q, panel, rank, Out, at, out_step, alpha, add = args
            sums = [_sums(builder, _PANEL // 16) for _ in range(rows)]
            with cgutils.for_range(builder, rank, intp=_INDEX) as loop:
                line = builder.mul(loop.index, _index(_PANEL))
                terms = [
                    _load(builder, _at(context, builder, q, Q, panel, line, _index(i))) for i in range(0, _PANEL, 16)
                ]
                for y in range(rows):
                    factor = builder.load(_at(context, builder, p, P, loop.index, builder.mul(step, _index(y))))
                    for sum_, term in zip(sums[y], terms, strict=True):
                        _add_product(builder, sum_, _lanes_of(builder, factor, 16), term, flags)
            scale = _lanes_of(builder, alpha, 16)
            for y in range(rows):
                for i, sum_ in enumerate(sums[y]):
                    to = _at(context, builder, out, Out, at, builder.mul(out_step, _index(y)), _index(16 * i))
                    value = builder.fmul(builder.load(sum_), scale)
                    with builder.if_else(add) as (adding, writing):
                        with adding:
                            _store(builder, builder.fadd(_load(builder, to), value), to)
                        with writing:
                            _store(builder, value, to)
            return context.get_dummy_value()

        whole = types.intp
        return types.void(p, whole, q, whole, whole, out, whole, whole, types.float32, types.boolean), generate

    return product


def _filling(flags: tuple[str, ...]) -> Any:
    """A function that writes rows of products."""
    one_row, two_rows = _product_of(1, flags), _product_of(2, flags)

    @_inline
    def fill(P, by_row, Q, out, start, stop, alpha, add):
        """Rows [start, stop) of all products, which lie end to end. P stands row by row, or transposed."""
        _widest()
        rank, rows, columns = Q.shape[1], out.shape[1], out.shape[2]
        panels, whole = (columns + _PANEL - 1) // _PANEL, columns // _PANEL
        size = rank * _PANEL
        # Panels and factors are copied side by side: rows that are a power of two apart would share places in a cache.
        near, factors = np.zeros(panels * size, np.float32), np.empty(2 * rank, np.float32)
        scratch = np.empty(_PANEL, np.float32)
        block, flat = max(1, _NEAR // size), out.reshape(-1)
        row = start
        while row < stop:
            b = row // rows
            end = min(stop, (b + 1) * rows)
            for k in range(rank):
                for j in range(columns):
                    near[j // _PANEL * size + k * _PANEL + j % _PANEL] = Q[b, k, j]
            for first in range(0, panels, block):
                last = min(first + block, panels)
                for pair in range(row, end, 2):
                    i, taken = pair - b * rows, min(2, end - pair)
                    for y in range(taken):
                        for k in range(rank):
                            factors[y * rank + k] = P[b, i + y, k] if by_row else P[b, k, i + y]
                    for panel in range(first, min(last, whole)):
                        at = pair * columns + panel * _PANEL
                        if taken == 2:
                            two_rows(factors, rank, near, panel * size, rank, flat, at, columns, alpha, add)
                        else:
                            one_row(factors, rank, near, panel * size, rank, flat, at, columns, alpha, add)
                    if last > whole:
                        for y in range(taken):
                            one_row(factors[y * rank :], rank, near, whole * size, rank, scratch, 0, 0, alpha, False)
                            tail = out[b, i + y, whole * _PANEL :]
                            for j in range(tail.size):
                                tail[j] = tail[j] + scratch[j] if add else scratch[j]
            row = end

    return fill


_fill, _fill_fused = _filling(()), _filling(FUSED)


@_kernel("void(float32[:,:,::1], boolean, float32[:,:,::1], float32[:,:,::1], int64, int64, float32, boolean)")
def _low_rank(P, by_row, Q, out, start, stop, alpha, add):
    """Rows of products: see `_fill`."""
    _fill(P, by_row, Q, out, start, stop, alpha, add)


@_kernel("void(float32[:,:,::1], boolean, float32[:,:,::1], float32[:,:,::1], int64, int64, float32, boolean)")
def _low_rank_fused(P, by_row, Q, out, start, stop, alpha, add):
    """The same, where a processor may fuse a multiplication with an addition."""
    _fill_fused(P, by_row, Q, out, start, stop, alpha, add)


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    """See `gradwire.kernels.matrices.low_rank_`."""
    _run(_low_rank, out, Pt, Qt, alpha, add)


def subtract_low_rank_(x: Tensor, Pt: Tensor, Qt: Tensor, scale: float) -> None:
    """See `gradwire.kernels.matrices.subtract_low_rank_`."""
    _run(_low_rank_fused, x, Pt, Qt, -scale, True)


def _run(kernel: Any, out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    batch, rows, columns = out.shape
    by_row = not Pt.is_contiguous()
    P = Pt.mT.contiguous() if by_row else Pt
    arrays, scale = (_array(P), by_row, _array(Qt.contiguous()), _array(out)), np.float32(alpha)
    cuts = _cut(batch * rows, columns * Pt.shape[1])
    pool.run([functools.partial(kernel, *arrays, start, stop, scale, add) for start, stop in cuts])


def _cut(rows: int, cost: int) -> list[pool.Chunk]:
    """Rows for each thread, where each takes `cost` multiplications; eight take about as long as coding an element."""
    return pool.chunks(rows, 2, max(1, cost // 8))


# M Q --------------------------------------------------------------------------------------------------------


def _dots_of(rows: int, rank: int) -> Any:
    """A function that writes the products of `rows` rows of M with `rank` rows of Q^T, 16 sums for each."""

    @_intrinsic
    def dots(context, m, row, m_step, tail, q, vector, q_step, q_tail, tail_at, whole, out, at, out_step):
        def generate(context, builder, signature, args):
            M, row, m_step, Tail, Q, vector, q_step, QTail, tail_at, whole, Out, at, out_step = args
            sums = [_sums(builder, rank) for _ in range(rows)]

            def add(xs: list[Any], ys: list[Any]) -> None:
                for y, x in enumerate(xs):
                    for k, factor in enumerate(ys):
                        _add_product(builder, sums[y][k], x, factor, FUSED)

            def lines(kind: Any, array: Any, step: Any, count: int, *offsets: Any) -> list[Any]:
                places = [builder.mul(step, _index(i)) for i in range(count)]
                return [_load(builder, _at(context, builder, kind, array, place, *offsets)) for place in places]

            with cgutils.for_range_slice(builder, _index(0), whole, _index(16), _INDEX) as (c, _):
                add(lines(m, M, m_step, rows, row, c), lines(q, Q, q_step, rank, vector, c))
            wide = _index(16)
            add(lines(tail, Tail, wide, rows, _index(0)), lines(q_tail, QTail, wide, rank, tail_at))
            for y in range(rows):
                for k in range(rank):
                    to = _at(context, builder, out, Out, at, builder.mul(out_step, _index(k)), _index(y))
                    builder.store(_folded(builder, builder.load(sums[y][k])), to)
            return context.get_dummy_value()

        i = types.intp
        return types.void(m, i, i, tail, q, i, i, q_tail, i, i, out, i, i), generate

    return dots


_dots_2_many, _dots_2_one, _dots_1_many, _dots_1_one = (_dots_of(rows, rank) for rows in (2, 1) for rank in (_DOTS, 1))


@_kernel("void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], int64, int64)")
def _project_columns(M, Q, out, start, stop):
    """Products of rows [start, stop) of all matrices, which lie end to end, with the vectors of Q^T."""
    _widest()
    rows, columns, rank = M.shape[1], M.shape[2], Q.shape[1]
    whole = columns // _WIDTH * _WIDTH
    m, q, o = M.reshape(-1), Q.reshape(-1), out.reshape(-1)
    tail, q_tail = np.zeros(2 * _WIDTH, np.float32), np.zeros(rank * _WIDTH, np.float32)
    row = start
    while row < stop:
        b = row // rows
        end = min(stop, (b + 1) * rows)
        for k in range(rank):
            for j in range(columns - whole):
                q_tail[k * _WIDTH + j] = Q[b, k, whole + j]
        while row < end:
            taken = 2 if row + 2 <= end else 1
            i = row - b * rows
            for y in range(taken):
                for j in range(columns - whole):
                    tail[y * _WIDTH + j] = M[b, i + y, whole + j]
            k = 0
            while k < rank:
                vector, at = (b * rank + k) * columns, (b * rank + k) * rows + i
                here = (m, row * columns, columns, tail, q, vector, columns, q_tail, k * _WIDTH, whole, o, at, rows)
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
    """See `gradwire.kernels.matrices.project_columns`."""
    batch, rows, columns = M.shape
    out = torch.empty(batch, Qt.shape[1], rows, dtype=torch.float32)
    arrays = (_array(M), _array(Qt.contiguous()), _array(out))
    cuts = _cut(batch * rows, columns * Qt.shape[1])
    pool.run([functools.partial(_project_columns, *arrays, i, j) for i, j in cuts])
    return out


# P^T M ------------------------------------------------------------------------------------------------------


def _outer_of(rank: int) -> Any:
    """A function that adds the product of some rows of `rank` columns of P with a panel of M to what `out` holds."""

    @_intrinsic
    def outer(context, p, first, p_step, m, panel, m_step, rows, out, at, out_step):
        def generate(context, builder, signature, args):
            P, first, p_step, M, panel, m_step, rows, Out, at, out_step = args
            sums = [_sums(builder, _OUTER_PANEL // 16) for _ in range(rank)]
            with cgutils.for_range(builder, rows, intp=_INDEX) as loop:
                line = builder.mul(loop.index, m_step)
                terms = [
                    _load(builder, _at(context, builder, m, M, panel, line, _index(i)))
                    for i in range(0, _OUTER_PANEL, 16)
                ]
                for k in range(rank):
                    place = builder.mul(p_step, _index(k))
                    factor = builder.load(_at(context, builder, p, P, first, loop.index, place))
                    for sum_, term in zip(sums[k], terms, strict=True):
                        _add_product(builder, sum_, _lanes_of(builder, factor, 16), term, FUSED)
            for k in range(rank):
                for i, sum_ in enumerate(sums[k]):
                    to = _at(context, builder, out, Out, at, builder.mul(out_step, _index(k)), _index(16 * i))
                    _store(builder, builder.fadd(_load(builder, to), builder.load(sum_)), to)
            return context.get_dummy_value()

        i = types.intp
        return types.void(p, i, i, m, i, i, i, out, i, i), generate

    return outer


_outer_of_4, _outer_of_1 = _outer_of(4), _outer_of(1)


@_kernel("void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], int64, int64)")
def _project_rows(P, M, out, start, stop):
    """Panels [start, stop) of all matrices: those of the first, then those of the second, ..."""
    _widest()
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
    """See `gradwire.kernels.matrices.project_rows`."""
    batch, rows, columns = M.shape
    out = torch.zeros(batch, Pt.shape[1], columns, dtype=torch.float32)
    arrays = (_array(Pt.contiguous()), _array(M), _array(out))
    cuts = _cut(batch * (-(-columns // _OUTER_PANEL)), rows * _OUTER_PANEL * Pt.shape[1])
    pool.run([functools.partial(_project_rows, *arrays, i, j) for i, j in cuts])
    return out


# Orthonormal rows -------------------------------------------------------------------------------------------


def segment_sum(lanes_type: Any, factors: Callable[[Any, Any, Any], tuple[Any, Any]]) -> Any:
    """A function f(a, i, b, j, n): the sum over the segments a[i : i + n] and b[j : j + n] of products in float64.

    Lanes in turn, then halves: `gradwire.kernels.reference_matrices.add_segments` has the same order. n is a
    multiple of LANES and at most SEGMENT: what would follow in a short segment is zeros.

    Args:
        lanes_type: the vector to load from both.
        factors: makes the two factors, vectors of float64, of what was loaded: called with LLVM's builder.
    """

    @_intrinsic
    def sum_(context, a, i, b, j, n):
        def generate(context, builder, signature, args):
            A, i, B, j, n = args
            (lanes,) = _sums(builder, 1, _DOUBLES)
            with cgutils.for_range_slice(builder, _index(0), n, _index(LANES), _INDEX) as (c, _):
                x = _load(builder, _at(context, builder, a, A, i, c), lanes_type)
                y = _load(builder, _at(context, builder, b, B, j, c), lanes_type)
                _add_product(builder, lanes, *factors(builder, x, y))
            return _folded(builder, builder.load(lanes))

        return types.float64(a, types.intp, b, types.intp, types.intp), generate

    return sum_


_segment_product = segment_sum(_DOUBLES, lambda builder, x, y: (x, y))


@_inline
def _eliminate(gram, w, tolerance):
    """Write R^-1 of G = R^T R to `w` and use `gram` up: see `gradwire.kernels.reference_matrices._weights`."""
    rank = gram.shape[0]
    lengths, share = np.empty(rank, np.float64), np.empty(rank, np.float64)
    w[:, :] = 0.0
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


@_inline
def _orthonormal_round(A, weights, out, tolerance):
    rank, length = A.shape[1], A.shape[2]
    width = (length + LANES - 1) // LANES * LANES
    doubles = np.zeros((rank, width), np.float64)
    flat = doubles.reshape(-1)
    gram, w = np.empty((rank, rank), np.float64), np.empty((rank, rank), np.float64)
    for b in range(A.shape[0]):
        doubles[:, :length] = A[b]
        for j in range(rank):
            for k in range(j, rank):
                total = 0.0
                for at in range(0, width, SEGMENT):
                    total += _segment_product(flat, j * width + at, flat, k * width + at, min(SEGMENT, width - at))
                gram[j, k] = total
                gram[k, j] = total
        _eliminate(gram, w, tolerance)
        weights[b] = w
    _fill(weights, False, A, out, 0, A.shape[0] * rank, np.float32(1.0), False)


@_kernel("void(float32[:,:,::1], float32[:,:,::1], float32[:,:,::1], float64, float64)")
def _orthonormalise(A, scratch, out, tolerance, again):
    """Two rounds of Cholesky QR."""
    weights = np.empty((A.shape[0], A.shape[1], A.shape[1]), np.float32)
    _orthonormal_round(A, weights, scratch, tolerance)
    _orthonormal_round(scratch, weights, out, again)


def orthonormalise(vectors: Tensor) -> Tensor:
    """See `gradwire.kernels.matrices.orthonormalise`."""
    scratch, out = torch.empty_like(vectors), torch.empty_like(vectors)
    arrays = [(_array(vectors[i:j]), _array(scratch[i:j]), _array(out[i:j])) for i, j in _matrices(vectors)]
    pool.run([functools.partial(_orthonormalise, *pieces, *TOLERANCES) for pieces in arrays])
    return out


def _matrices(vectors: Tensor) -> list[pool.Chunk]:
    """Matrices for each thread."""
    batch, rank, length = vectors.shape
    return pool.chunks(batch, 1, rank * rank * length // 8)


# Gaussian numbers -------------------------------------------------------------------------------------------


@_inline
def _polynomial(coefficients, x):
    total = coefficients[-1]
    for i in range(len(coefficients) - 2, -1, -1):
        total = total * x + coefficients[i]
    return total


@_inline
def _log(x):
    m, e = math.frexp(x)
    if m < SQRT_HALF:
        m, e = m + m, e - 1
    s = (m - 1.0) / (m + 1.0)
    return s * _polynomial(LOGARITHM, s * s) + float(e) * LOG_2


@_kernel("void(float32[::1], int64, int64, int64)")
def _gaussian(out, first, k0, k1):
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for i in range(out.size):
        u = np.float64(_uniform_at(counter, k0, k1)) + 2.0**-25
        counter = np.uint32(counter + np.uint32(1))
        q = u - 0.5
        if abs(q) <= 0.425:
            centre = 0.180625 - q * q
            out[i] = q * _polynomial(CENTRE[0], centre) / _polynomial(CENTRE[1], centre)
        else:
            tail = math.sqrt(-_log(u if q < 0 else 1.0 - u)) - 1.6
            far = _polynomial(TAIL[0], tail) / _polynomial(TAIL[1], tail)
            out[i] = -far if q < 0 else far


def gaussian(bits: int, numel: int) -> Tensor:
    """See `gradwire.kernels.matrices.gaussian`."""
    out, words = torch.empty(numel, dtype=torch.float32), uniform_words(bits)
    o, chunks = _array(out), pool.chunks(numel, 1, 8)
    pool.run([functools.partial(_gaussian, o[i:j], i, *words) for i, j in chunks])
    return out
