# pyright: basic
"""Affine integers on CPUs, in numba."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.affine.reference import AFFINE_LEVELS
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import Array, spread_over_threads, write_or_add_at


@inline
def _ordered(bits):
    """The bits of a float32 as an integer that orders as it does, NaN beyond infinity; its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@inline
def _extremes(bits, start, stop):
    """The lowest and the highest of a block in `_ordered`'s order, 0 among them."""
    low, high = np.int32(0), np.int32(0)
    for i in range(start, stop):  # a minimum of integers needs no leave to be reordered
        order = _ordered(bits[np.uintp(i)])
        low, high = min(low, order), max(high, order)
    return low, high


@compiled("void(int32[::1], int32[::1])")
def _affine_extremes(bits, extremes):
    extremes[0], extremes[1] = _extremes(bits, 0, bits.size)


@inline
def _affine_grid(low, high, pair):
    """s = (high - low) / 255 and z = round(-low / s), as in the reference; `pair` is a scratch of two integers."""
    largest = np.int32(0x7F7FFFFF)
    if high > largest or np.int32(~low) > largest:
        return np.float32(np.nan), np.float32(0)
    pair[0], pair[1] = _ordered(low), _ordered(high)
    ends, count = pair.view(np.float32), np.float32(AFFINE_LEVELS)
    scale = ends[1] / count - ends[0] / count
    if scale == np.float32(0):
        return scale, np.float32(0)
    return scale, min(max(np.rint(-ends[0] / scale), np.float32(0)), count)


@inline
def _affine_round(x, start, stop, scale, zero, levels):
    if scale == np.float32(0) or not np.isfinite(scale):
        levels[start:stop] = np.uint8(0)
        return
    for i in range(start, stop):
        q = np.int32(np.rint(x[np.uintp(i)] / scale) + zero)
        levels[np.uintp(i)] = np.uint8(max(min(q, np.int32(AFFINE_LEVELS)), np.int32(0)))


@compiled("void(float32[::1], int64, float32[::1], uint8[::1], uint8[::1])")
def _affine_encode(x, block, scales, zeros, levels):
    bits, pair = x.view(np.int32), np.empty(2, np.int32)
    for start in range(0, x.size, block):
        stop, b = min(start + block, x.size), np.uintp(start // block)
        low, high = _extremes(bits, start, stop)
        scale, zero = _affine_grid(low, high, pair)
        scales[b], zeros[b] = scale, np.uint8(zero)
        _affine_round(x, start, stop, scale, zero, levels)


@compiled("void(float32[::1], int32[:, ::1], float32[::1], uint8[::1], uint8[::1])")
def _affine_encode_whole(x, extremes, scales, zeros, levels):
    """A piece of a tensor that is one block, given the extremes of all pieces."""
    scale, zero = _affine_grid(extremes[:, 0].min(), extremes[:, 1].max(), np.empty(2, np.int32))
    scales[0], zeros[0] = scale, np.uint8(zero)
    _affine_round(x, 0, x.size, scale, zero, levels)


def affine_encode(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    a, s, z, q = array_of(x), array_of(scales), array_of(zeros), array_of(levels)
    if not a.size:
        return
    if block:
        spread_over_threads(
            a.size, block, lambda i, j: functools.partial(_affine_encode, *_affine_part(i, j, a, block, s, z, q))
        )
        return
    cuts = pool.chunks(a.size)
    found, bits = np.empty((len(cuts), 2), np.int32), a.view(np.int32)
    pool.run([functools.partial(_affine_extremes, bits[i:j], found[n]) for n, (i, j) in enumerate(cuts)])
    spread_over_threads(a.size, 1, lambda i, j: functools.partial(_affine_encode_whole, a[i:j], found, s, z, q[i:j]))


def _affine_part(i: int, j: int, a: Array, block: int, s: Array, z: Array, q: Array) -> tuple[Any, ...]:
    """The elements [i, j), what a block is there, and its scales, zero points and levels."""
    if not block:
        return a[i:j], a.size, s, z, q[i:j]
    blocks = slice(i // block, -(-j // block))
    return a[i:j], block, s[blocks], z[blocks], q[i:j]


@compiled("void(float32[::1], int64, float32[::1], uint8[::1], uint8[::1], float32, boolean)")
def _affine_decode(into, block, scales, zeros, levels, alpha, overwrite):
    for start in range(0, into.size, block):
        stop, b = min(start + block, into.size), np.uintp(start // block)
        scale, zero = scales[b], np.int32(zeros[b])
        for i in range(start, stop):
            value = np.float32(np.int32(levels[np.uintp(i)]) - zero) * scale
            write_or_add_at(value, into, np.uintp(i), alpha, overwrite)


def affine_decode(
    scales: Tensor, zeros: Tensor, levels: Tensor, block: int, out: Tensor, weight: float | None = None
) -> None:
    s, z, q, o, factor = array_of(scales), array_of(zeros), array_of(levels), array_of(out), np.float32(weight or 0.0)
    if not o.size:
        return
    spread_over_threads(
        o.size,
        block or 1,
        lambda i, j: functools.partial(_affine_decode, *_affine_part(i, j, o, block, s, z, q), factor, weight is None),
    )
