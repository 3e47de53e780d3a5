# pyright: basic
"""Sparse tensors on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline, raw_bits_of
from gradwire.kernels.runtime.tiles import PAST_CACHES, RANDOM_ACCESS_WEIGHT, TILE, deliver
from gradwire.kernels.runtime.vectors import fence, use_widest_vectors


@compiled("void(float32[::1], int32[::1], float32[::1])")
def _gather(x, indices, out):
    use_widest_vectors()
    for i in range(indices.size):
        out[i] = x[np.uint32(indices[i])]


def gather(x: Tensor, indices: Tensor, out: Tensor) -> None:
    source, at, o = array_of(x), array_of(indices), array_of(out)
    pool.run(
        [
            functools.partial(_gather, source, at[i:j], o[i:j])
            for i, j in pool.chunks(at.size, weight=RANDOM_ACCESS_WEIGHT)
        ]
    )


@compiled("void(float32[::1], int32[::1], float32[::1], float32)")
def _scatter_add(into, indices, values, alpha):
    use_widest_vectors()
    for i in range(indices.size):
        into[np.uint32(indices[i])] += values[i] * alpha


def scatter_add_(into: Tensor, indices: Tensor, values: Tensor, alpha: float = 1.0, distinct: bool = False) -> None:
    """One thread where indices may repeat: the order of addition must not depend on the number of threads."""
    o, at, v = array_of(into), array_of(indices), array_of(values.to(torch.float32))
    cuts = pool.chunks(at.size, weight=RANDOM_ACCESS_WEIGHT) if distinct else [(0, at.size)]
    pool.run([functools.partial(_scatter_add, o, at[i:j], v[i:j], np.float32(alpha)) for i, j in cuts])


@inline
def _increase(indices, start, stop):
    """Whether each of indices[start:stop] is greater than the one before."""
    use_widest_vectors()
    least = np.int32(1)
    for i in range(start, stop):
        least = min(least, np.int32(indices[np.uintp(i)] - indices[np.uintp(i - 1)]))
    return least > 0


@compiled("boolean(int32[::1], float32[::1], int64, float32[::1])")
def _scatter(indices, values, first, out):
    """out[indices - first] = values and 0 elsewhere; false where the indices are none of these places, or unordered."""
    use_widest_vectors()
    at, past_caches = 0, out.size >= PAST_CACHES
    tile = np.zeros(TILE, np.float32)
    for origin in range(0, out.size, TILE):
        piece, begin = out[origin : origin + TILE], at
        base, size = np.int32(first + origin), np.uint32(piece.size)
        while at < indices.size:
            place = np.uint32(indices[np.uintp(at)] - base)
            if place >= size:
                break
            tile[np.uintp(place)] = np.float32(0) + values[np.uintp(at)]  # which is not -0.0
            at += 1
        if not _increase(indices, max(begin, 1), at):
            return False
        deliver(tile, piece, 0, piece.size, np.float32(0), True, past_caches)
        if (at - begin) * 16 > TILE:
            tile[:] = np.float32(0)
        else:
            for i in range(begin, at):
                tile[np.uintp(np.uint32(indices[np.uintp(i)] - base))] = np.float32(0)
    fence()
    return at == indices.size


def scatter_(out: Tensor, indices: Tensor, values: Tensor) -> None:
    """One pass over `out` where indices increase, as they do unless they are damaged."""
    at, v, o = array_of(indices), array_of(values.to(torch.float32)), array_of(out)
    some = int(np.searchsorted(at, np.int32(o.size)))  # behind them stand those that are none
    if some < at.size and at[some:].min() < o.size:
        some = 0  # they do not increase, so it is not known where those that are none stand
    at = at[:some] if some else at
    cuts = pool.chunks(o.size)
    ends = [0, *np.searchsorted(at, np.array([j for _, j in cuts[:-1]], np.int32)), at.size]
    parts = zip(cuts, ends[:-1], ends[1:], strict=True)
    if not all(pool.run([functools.partial(_scatter, at[a:b], v[a:b], i, o[i:j]) for (i, j), a, b in parts])):
        keep = indices < out.numel()
        scatter_add_(out.zero_(), indices[keep], values[keep])


@compiled("uint32(uint32[::1])")
def _largest_index(raw):
    use_widest_vectors()
    largest = np.uint32(0)
    for i in range(raw.size):
        largest = max(largest, raw[i])
    return largest


def indices_within(indices: Tensor, numel: int) -> bool:
    """Whether all lie in [0, numel). Negative ones look huge as unsigned."""
    return not indices.numel() or int(_largest_index(raw_bits_of(indices))) < numel
