# pyright: basic
"""The kernels of aggregation rules in numba: tiles of a few columns that stay in the nearest cache.

A tile is sorted by a network of minima and maxima over its rows, which is the same for every column, so that it runs on
vectors.
"""

from __future__ import annotations

import functools

import numpy as np
import torch
from llvmlite import ir
from torch import Tensor

from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.sums import segment_sum
from gradwire.kernels.runtime.torch_blocks import LANES, SEGMENT

_TILE = 128


@functools.cache
def _network(n: int) -> np.ndarray:
    """Pairs (lower, upper) that sort n values: Batcher's odd-even merge sort (Knuth 5.2.2, Algorithm M)."""
    pairs: list[tuple[int, int]] = []
    t = max(1, (n - 1).bit_length())
    p = 1 << (t - 1)
    while p > 0:
        q, r, d = 1 << (t - 1), 0, p
        while d > 0:
            pairs += [(i, i + d) for i in range(n - d) if i & p == r]
            d, q, r = q - p, q >> 1, p
        p >>= 1
    return np.array(pairs, np.int64).reshape(-1, 2)


@inline
def _load(rows, start, stop, tile):
    for i in range(rows.shape[0]):
        for w in range(stop - start):
            x = rows[i, start + w]
            tile[i, w] = x if x == x else np.float32(np.inf)


@inline
def _sort(tile, network, width):
    for k in range(network.shape[0]):
        low, high = tile[network[k, 0]], tile[network[k, 1]]
        for w in range(width):
            a, b = low[w], high[w]
            low[w] = b if b < a else a
            high[w] = a if b < a else b


@compiled("void(float32[:, ::1], int64, int64, int64, int64[:, ::1], float32[::1])")
def _trimmed_mean(rows, begin, end, trim, network, out):
    n = rows.shape[0]
    tile = np.empty((n, _TILE), np.float32)
    total = np.empty(_TILE, np.float32)
    count = np.float32(n - 2 * trim)
    for start in range(begin, end, _TILE):
        stop = min(start + _TILE, end)
        _load(rows, start, stop, tile)
        _sort(tile, network, _TILE if stop - start == _TILE else stop - start)
        total[:] = np.float32(0.0)
        for i in range(trim, n - trim):
            for w in range(stop - start):
                total[w] += tile[i, w]
        for w in range(stop - start):
            out[start + w] = total[w] / count


def trimmed_mean(rows: Tensor, trim: int, out: Tensor) -> None:
    x, o, network = array_of(rows), array_of(out), _network(rows.shape[0])
    pieces = pool.chunks(out.numel(), _TILE)
    pool.run([functools.partial(_trimmed_mean, x, i, j, trim, network, o) for i, j in pieces])


@compiled("void(float32[:, ::1], int64, int64, int64, int64[:, ::1], float32[::1])")
def _mean_around_median(rows, begin, end, keep, network, out):
    n = rows.shape[0]
    tile = np.empty((n, _TILE), np.float32)
    for start in range(begin, end, _TILE):
        stop = min(start + _TILE, end)
        _load(rows, start, stop, tile)
        _sort(tile, network, stop - start)
        for w in range(stop - start):
            median = tile[n // 2, w]
            if n % 2 == 0:
                median = tile[n // 2 - 1, w] * np.float32(0.5) + median * np.float32(0.5)
            first = 0
            for dropped in range(n - keep):
                low, high = tile[first, w], tile[first + n - 1 - dropped, w]
                first += 1 if median - low > high - median else 0
            total = np.float32(0.0)
            for i in range(first, first + keep):
                total += tile[i, w]
            out[start + w] = total / np.float32(keep)


def mean_around_median(rows: Tensor, keep: int, out: Tensor) -> None:
    x, o, network = array_of(rows), array_of(out), _network(rows.shape[0])
    pieces = pool.chunks(out.numel(), _TILE)
    pool.run([functools.partial(_mean_around_median, x, i, j, keep, network, o) for i, j in pieces])


_FLOATS, _DOUBLES = ir.VectorType(ir.FloatType(), LANES), ir.VectorType(ir.DoubleType(), LANES)


def _differences(builder, x, y):
    away = builder.fpext(builder.fsub(x, y), _DOUBLES)
    return away, away


def _both(builder, x, y):
    return builder.fpext(x, _DOUBLES), builder.fpext(y, _DOUBLES)


_distance, _product = segment_sum(_FLOATS, _differences), segment_sum(_FLOATS, _both)


@inline
def _pairs(rows, first, stop, out, apart):
    """Distances or products of all pairs of rows in segments [first, stop), each segment for itself."""
    n, numel = rows.shape
    flat, tail = rows.reshape(-1), np.zeros(n * SEGMENT, np.float32)
    for segment in range(first, stop):
        at = segment * SEGMENT
        source, step, start = flat, numel, at
        if at + SEGMENT > numel:
            for i in range(n):
                for j in range(numel - at):
                    tail[i * SEGMENT + j] = rows[i, at + j]
            source, step, start = tail, SEGMENT, 0
        for i in range(n):
            for j in range(i, n):
                a, b = i * step + start, j * step + start
                out[segment, i, j] = (
                    _distance(source, a, source, b, SEGMENT) if apart else _product(source, a, source, b, SEGMENT)
                )


@compiled("void(float32[:, ::1], int64, int64, float64[:, :, ::1])")
def _squared_distances(rows, first, stop, out):
    _pairs(rows, first, stop, out, True)


@compiled("void(float32[:, ::1], int64, int64, float64[:, :, ::1])")
def _products(rows, first, stop, out):
    _pairs(rows, first, stop, out, False)


@compiled("void(float64[:, :, ::1], float64[:, ::1])")
def _in_turn(parts, total):
    for segment in range(parts.shape[0]):
        for i in range(total.shape[0]):
            for j in range(i, total.shape[0]):
                total[i, j] += parts[segment, i, j]


def _added_up(kernel, rows: Tensor) -> Tensor:
    """The upper triangle: the sums of all segments in turn, whatever thread each was taken by."""
    n, numel = rows.shape
    segments = -(-numel // SEGMENT)
    x, parts, total = array_of(rows.contiguous()), np.empty((segments, n, n)), np.zeros((n, n))
    pool.run([functools.partial(kernel, x, i, j, parts) for i, j in pool.chunks(segments, 1, SEGMENT)])
    _in_turn(parts, total)
    return torch.from_numpy(total)


def squared_distances(rows: Tensor) -> Tensor:
    upper = _added_up(_squared_distances, rows)
    return upper + upper.T


def products(rows: Tensor) -> Tensor:
    upper = _added_up(_products, rows)
    return upper + upper.triu(1).T


@compiled("void(float32[:, ::1], int64, int64, float64[::1], float32[::1])")
def _weighted_sum(rows, begin, end, weights, out):
    total = np.empty(_TILE)
    for start in range(begin, end, _TILE):
        stop = min(start + _TILE, end)
        total[:] = 0.0
        for i in range(rows.shape[0]):
            weight = weights[i]
            if weight != 0.0:  # NaN is no zero
                for w in range(stop - start):
                    total[w] += weight * np.float64(rows[i, start + w])
        for w in range(stop - start):
            out[start + w] = np.float32(total[w])


def weighted_sum(rows: Tensor, weights: Tensor, out: Tensor) -> None:
    x, o, c = array_of(rows), array_of(out), array_of(weights.contiguous())
    pool.run([functools.partial(_weighted_sum, x, i, j, c, o) for i, j in pool.chunks(out.numel(), _TILE)])
