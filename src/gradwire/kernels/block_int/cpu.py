# pyright: basic
"""Integers with a scale for each block on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.packing.cpu import pack_codes, unpack_codes
from gradwire.kernels.random.cpu import uniform_at
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import (
    TILE,
    decode_blocks,
    end_of_block,
    max_magnitude,
    tile_of_blocks,
    write_or_add_at,
)


@inline
def _quantise(x, start, stop, inverse, levels, codes):
    # A product is at most levels * (1 + 2^-23), which rounds to levels: nothing to clamp.
    for i in range(start, stop):
        codes[np.uintp(i)] = np.uint8(np.int32(np.rint(x[np.uintp(i)] * inverse)) + levels)


@inline
def _quantise_randomly(x, start, stop, inverse, levels, codes, first, k0, k1):
    counter = np.uint32(first + start)
    for i in range(start, stop):
        u = uniform_at(counter, k0, k1)
        counter = np.uint32(counter + np.uint32(1))
        q = np.int32(np.floor(x[np.uintp(i)] * inverse + u))
        q = max(min(q, levels), np.int32(-levels))
        codes[np.uintp(i)] = np.uint8(q + levels)


@inline
def _subtract_decoded(x, start, stop, scale, levels, codes):
    # As _block_int_decode spells it, so that what is left is the same bit for bit.
    step, zero = scale / np.float32(levels), np.float32(levels)
    for i in range(start, stop):
        x[np.uintp(i)] -= (np.float32(np.int32(codes[np.uintp(i)])) - zero) * step


@compiled("void(float32[::1], int64, int64, boolean, int64, int64, int64, uint8[::1], float32[::1], boolean)")
def _block_int_encode(x, bits, block, stochastic, k0, k1, first, packed, scales, keep):
    # `first` is the number of x[0] in the whole tensor, which random numbers are counted by. A tile is a multiple of 8
    # elements, so its codes begin at a whole byte: elements come to `origin`, bytes to origin / 8 * bits.
    levels = np.int32((1 << (bits - 1)) - 1)
    k0, k1 = np.uint32(k0), np.uint32(k1)
    scales_raw, tile = scales.view(np.uint32), tile_of_blocks(block)
    scratch = np.empty(tile, np.uint8)
    for origin in range(0, x.size, tile):
        piece = x[origin : origin + tile]
        raw, at, out = piece.view(np.uint32), np.uint32(first + origin), packed[origin // 8 * bits :]
        codes = (out if bits == 8 else scratch)[: piece.size]
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), np.uintp((origin + start) // block)
            scales_raw[b] = max_magnitude(raw, start, stop)
            scale = scales[b]
            inverse = np.float32(levels) / scale
            if not (np.isfinite(inverse) and np.isfinite(scale)):
                for i in range(start, stop):
                    codes[np.uintp(i)] = np.uint8(levels)
                if np.isfinite(scale):
                    scales[b] = np.float32(0)
            elif stochastic:
                _quantise_randomly(piece, start, stop, inverse, levels, codes, at, k0, k1)
            else:
                _quantise(piece, start, stop, inverse, levels, codes)
            if keep:
                _subtract_decoded(piece, start, stop, scales[b], levels, codes)
        if bits != 8:
            pack_codes(codes, bits, out)


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    a, p, s = array_of(x), array_of(packed), array_of(scales)
    words = (0, 0) if key is None else uniform_words(key)
    pool.run(
        [
            functools.partial(
                _block_int_encode,
                *(a[i:j], bits, block, key is not None, *words, i),
                *(p[i // 8 * bits :], s[i // block : -(-j // block)], keep),
            )
            for i, j in pool.chunks(x.numel(), block)
        ]
    )


@compiled("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _block_int_decode(packed, scales, bits, block, into, alpha, overwrite):
    levels, scratch = np.float32((1 << (bits - 1)) - 1), np.empty(TILE, np.uint8)
    for origin in range(0, into.size, TILE):
        piece, start = into[origin : origin + TILE], 0
        codes = (packed[origin:] if bits == 8 else scratch)[: piece.size]
        if bits != 8:
            unpack_codes(packed[origin // 8 * bits :], bits, codes)
        while start < piece.size:
            step = scales[np.uintp((origin + start) // block)] / levels
            stop = end_of_block(start, origin, block, piece.size)
            for i in range(start, stop):
                value = (np.float32(np.int32(codes[np.uintp(i)])) - levels) * step
                write_or_add_at(value, piece, np.uintp(i), alpha, overwrite)
            start = stop


def block_int_decode(
    packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    decode_blocks(_block_int_decode, packed, scales, bits, bits, block, out, weight)
