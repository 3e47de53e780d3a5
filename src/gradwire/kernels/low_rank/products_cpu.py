# pyright: basic
"""P Q^T on CPUs, in numba: `runtime.sums` says why the inner loops are spelled in LLVM."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import types
from numba.core import cgutils
from torch import Tensor

from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.sums import (
    FUSED,
    INDEX,
    add_product,
    element_at,
    index_constant,
    load_vector,
    store_vector,
    zero_sums,
)
from gradwire.kernels.runtime.vectors import in_every_lane, vector_intrinsic

_PANEL = 32
"""Columns whose sums for two rows of a product fill half of the registers of AVX2, sixteen of 8 lanes. Sums that do not
fit take twice the time; twice as many, which fit into those of AVX-512, gain nothing. How many sums are made at once
decides nothing about their bits."""

WIDTH = 16


def _product_of(rows: int, flags: tuple[str, ...] = ()) -> Any:
    """A function that writes `rows` rows of a panel of P Q^T; a row's factors lie `step` after those of the last.

    Two rows at a time share what is loaded of Q. One at a time, here and in M Q, a step of `powersgd:8` on large
    matrices codes 5% longer with AVX-512 and 25% longer with AVX2.
    """

    @vector_intrinsic
    def product(context, p, step, q, panel, rank, out, at, out_step, alpha, add):
        def generate(context, builder, signature, args):
            P, step, Q, panel, rank, Out, at, out_step, alpha, add = args
            sums = [zero_sums(builder, _PANEL // 16) for _ in range(rows)]
            with cgutils.for_range(builder, rank, intp=INDEX) as loop:
                line = builder.mul(loop.index, index_constant(_PANEL))
                terms = [
                    load_vector(builder, element_at(context, builder, q, Q, panel, line, index_constant(i)))
                    for i in range(0, _PANEL, 16)
                ]
                for y in range(rows):
                    factor = builder.load(
                        element_at(context, builder, p, P, loop.index, builder.mul(step, index_constant(y)))
                    )
                    for sum_, term in zip(sums[y], terms, strict=True):
                        add_product(builder, sum_, in_every_lane(builder, factor, 16), term, flags)
            scale = in_every_lane(builder, alpha, 16)
            for y in range(rows):
                for i, sum_ in enumerate(sums[y]):
                    to = element_at(
                        context, builder, out, Out, at, builder.mul(out_step, index_constant(y)), index_constant(16 * i)
                    )
                    value = builder.fmul(builder.load(sum_), scale)
                    with builder.if_else(add) as (adding, writing):
                        with adding:
                            store_vector(builder, builder.fadd(load_vector(builder, to), value), to)
                        with writing:
                            store_vector(builder, value, to)
            return context.get_dummy_value()

        whole = types.intp
        return types.void(p, whole, q, whole, whole, out, whole, whole, types.float32, types.boolean), generate

    return product


def _filling(flags: tuple[str, ...]) -> Any:
    """A function that writes rows of products."""
    one_row, two_rows = _product_of(1, flags), _product_of(2, flags)

    @inline
    def fill(P, by_row, Q, out, start, stop, alpha, add):
        """Rows [start, stop) of all products, which lie end to end. P stands row by row, or transposed."""
        rank, rows, columns = Q.shape[1], out.shape[1], out.shape[2]
        panels, whole = (columns + _PANEL - 1) // _PANEL, columns // _PANEL
        size = rank * _PANEL
        # Panels and factors are copied side by side: rows that are a power of two apart would share places in a cache.
        near, factors = np.zeros(panels * size, np.float32), np.empty(2 * rank, np.float32)
        scratch = np.empty(_PANEL, np.float32)
        flat = out.reshape(-1)
        row = start
        while row < stop:
            b = row // rows
            end = min(stop, (b + 1) * rows)
            for k in range(rank):
                for j in range(columns):
                    near[j // _PANEL * size + k * _PANEL + j % _PANEL] = Q[b, k, j]
            for pair in range(row, end, 2):
                i, taken = pair - b * rows, min(2, end - pair)
                for y in range(taken):
                    for k in range(rank):
                        factors[y * rank + k] = P[b, i + y, k] if by_row else P[b, k, i + y]
                for panel in range(whole):
                    at = pair * columns + panel * _PANEL
                    if taken == 2:
                        two_rows(factors, rank, near, panel * size, rank, flat, at, columns, alpha, add)
                    else:
                        one_row(factors, rank, near, panel * size, rank, flat, at, columns, alpha, add)
                if panels > whole:
                    for y in range(taken):
                        one_row(factors[y * rank :], rank, near, whole * size, rank, scratch, 0, 0, alpha, False)
                        tail = out[b, i + y, whole * _PANEL :]
                        for j in range(tail.size):
                            tail[j] = tail[j] + scratch[j] if add else scratch[j]
            row = end

    return fill


fill_product, _fill_fused = _filling(()), _filling(FUSED)


@compiled("void(float32[:,:,::1], boolean, float32[:,:,::1], float32[:,:,::1], int64, int64, float32, boolean)")
def _low_rank(P, by_row, Q, out, start, stop, alpha, add):
    """Rows of products: see `_filling`."""
    fill_product(P, by_row, Q, out, start, stop, alpha, add)


@compiled("void(float32[:,:,::1], boolean, float32[:,:,::1], float32[:,:,::1], int64, int64, float32, boolean)")
def _low_rank_fused(P, by_row, Q, out, start, stop, alpha, add):
    """The same, where a processor may fuse a multiplication with an addition."""
    _fill_fused(P, by_row, Q, out, start, stop, alpha, add)


def low_rank_(out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    _run(_low_rank, out, Pt, Qt, alpha, add)


def subtract_low_rank_(x: Tensor, Pt: Tensor, Qt: Tensor, scale: float) -> None:
    _run(_low_rank_fused, x, Pt, Qt, -scale, True)


def _run(kernel: Any, out: Tensor, Pt: Tensor, Qt: Tensor, alpha: float, add: bool) -> None:
    batch, rows, columns = out.shape
    by_row = not Pt.is_contiguous()
    P = Pt.mT.contiguous() if by_row else Pt
    arrays, scale = (array_of(P), by_row, array_of(Qt.contiguous()), array_of(out)), np.float32(alpha)
    cuts = cut_rows(batch * rows, columns * Pt.shape[1])
    pool.run([functools.partial(kernel, *arrays, start, stop, scale, add) for start, stop in cuts])


def cut_rows(rows: int, cost: int) -> list[pool.Chunk]:
    """Rows for each thread, where each takes `cost` multiplications; eight take about as long as coding an element."""
    return pool.chunks(rows, 2, max(1, cost // 8))
