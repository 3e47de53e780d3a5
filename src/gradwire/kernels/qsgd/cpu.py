# pyright: basic
"""QSGD on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.packing.cpu import pack_codes, pack_wide_eights, unpack_codes, unpack_wide_eights
from gradwire.kernels.random.cpu import uniform_at
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import (
    TILE,
    decode_blocks,
    end_of_block,
    sum_squares,
    tile_of_blocks,
    write_or_add_at,
)


@inline
def _level_bits(levels):
    bits = 0
    while levels >> bits:
        bits += 1
    return bits


@inline
def _qsgd_norm(x, start, stop, levels):
    """Return the norm to store and levels / norm, or 0 where all codes are to be 0."""
    norm = np.float32(np.sqrt(sum_squares(x, start, stop)))
    inverse = np.float32(levels) / norm
    if np.isfinite(inverse) and np.isfinite(norm):
        return norm, inverse
    return (np.float32(0) if np.isfinite(norm) else norm), np.float32(0)


@inline
def _qsgd_codes(x, start, stop, inverse, levels, sign_shift, codes, first, k0, k1):
    counter = np.uint32(first + start)
    for i in range(start, stop):
        u = uniform_at(counter, k0, k1)
        counter = np.uint32(counter + np.uint32(1))
        level = min(np.int32(abs(x[np.uintp(i)]) * inverse + u), levels)
        negative = np.int32(x[np.uintp(i)] < np.float32(0))
        codes[np.uintp(i)] = np.int32(level | np.int32(negative << sign_shift))


@compiled("void(float32[::1], int64, int64, int64, int64, int64, uint8[::1], float32[::1])")
def _qsgd_encode(x, levels, block, k0, k1, first, packed, norms):
    k0, k1, most, shift = np.uint32(k0), np.uint32(k1), np.int32(levels), np.int32(_level_bits(levels))
    bits, tile = _level_bits(levels) + 1, tile_of_blocks(block)
    narrow, wide = np.empty(tile, np.uint8), np.empty(tile, np.int32)
    for origin in range(0, x.size, tile):
        piece = x[origin : origin + tile]
        at = np.uint32(first + origin)
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), np.uintp((origin + start) // block)
            norms[b], inverse = _qsgd_norm(piece, start, stop, levels)
            if inverse == np.float32(0):
                narrow[start:stop] = np.uint8(0)
                wide[start:stop] = np.int32(0)
            elif bits <= 8:
                _qsgd_codes(piece, start, stop, inverse, most, shift, narrow, at, k0, k1)
            else:
                _qsgd_codes(piece, start, stop, inverse, most, shift, wide, at, k0, k1)
        if bits <= 8:
            pack_codes(narrow[: piece.size], bits, packed[origin // 8 * bits :])
        else:
            pack_wide_eights(wide[: piece.size], bits, packed[origin // 8 * bits :])


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    bits, words = levels.bit_length() + 1, uniform_words(key)
    a, p, s = array_of(x), array_of(packed), array_of(norms)
    pool.run(
        [
            functools.partial(
                _qsgd_encode,
                *(a[i:j], levels, block, *words, i),
                *(p[i // 8 * bits :], s[i // block : -(-j // block)]),
            )
            for i, j in pool.chunks(x.numel(), block)
        ]
    )
    if keep:
        qsgd_decode(packed, norms, levels, block, x, -1.0)


@inline
def _write_levels(codes, start, stop, mask, step, into, alpha, overwrite):
    for i in range(start, stop):
        code = np.int32(codes[np.uintp(i)])
        value = np.float32(np.int32(code & mask)) * step
        write_or_add_at(-value if code > mask else value, into, np.uintp(i), alpha, overwrite)


@compiled("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _qsgd_decode(packed, norms, levels, block, into, alpha, overwrite):
    bits, mask = _level_bits(levels) + 1, np.int32((1 << _level_bits(levels)) - 1)
    narrow, wide = np.empty(TILE, np.uint8), np.empty(TILE, np.int32)
    for origin in range(0, into.size, TILE):
        piece, start = into[origin : origin + TILE], 0
        if bits <= 8:
            unpack_codes(packed[origin // 8 * bits :], bits, narrow[: piece.size])
        else:
            unpack_wide_eights(packed[origin // 8 * bits :], bits, wide[: piece.size])
        while start < piece.size:
            step = norms[np.uintp((origin + start) // block)] / np.float32(levels)
            stop = end_of_block(start, origin, block, piece.size)
            if bits <= 8:
                _write_levels(narrow, start, stop, mask, step, piece, alpha, overwrite)
            else:
                _write_levels(wide, start, stop, mask, step, piece, alpha, overwrite)
            start = stop


def qsgd_decode(
    packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    decode_blocks(_qsgd_decode, packed, norms, levels.bit_length() + 1, levels, block, out, weight)
