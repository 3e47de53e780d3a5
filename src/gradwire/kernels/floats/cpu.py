# pyright: basic
"""Short floats on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels.floats.reference import BROKEN
from gradwire.kernels.packing.cpu import pack_below, unpack_codes
from gradwire.kernels.random.cpu import word_at
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime.compiling import array_of, compiled, raw_bits_of
from gradwire.kernels.runtime.tiles import TILE, max_magnitude, spread_over_threads, write_or_add_at
from gradwire.kernels.runtime.vectors import bits_of, float_of


@compiled("void(float32[::1], int64, int64, uint8[::1], uint8[::1])")
def _float8_encode(x, mantissa, block, codes, exponents):
    """`mantissa` is 3 for e4m3 and 2 for e5m2."""
    bias = 7 if mantissa == 3 else 15
    top, shift = 8 if mantissa == 3 else 15, np.uint32(23 - mantissa)
    half, offset = np.uint32((1 << (22 - mantissa)) - 1), np.uint32((127 - bias) << mantissa)
    normal = np.uint32((128 - bias) << 23)
    # Added to a number below the least normal one, it leaves the multiple of the least step in the low bits.
    anchor_bits = np.uint32((127 + 23 + 1 - bias - mantissa) << 23)
    anchor = np.float32(2.0 ** (23 + 1 - bias - mantissa))
    raw = x.view(np.uint32)
    for start in range(0, x.size, block):
        stop, b = min(start + block, x.size), np.uintp(start // block)
        largest = np.int64(max_magnitude(raw, start, stop))
        exponent = max(((largest + 0x1FFFFF) >> 23) - top, 1)
        if largest >= 0x7F800000:
            exponents[b] = np.uint8(BROKEN)
            for i in range(start, stop):
                codes[np.uintp(i)] = np.uint8(0)
            continue
        exponents[b] = np.uint8(exponent)
        inverse = np.float32(2.0 ** (127 - exponent))
        for i in range(start, stop):
            value = abs(x[np.uintp(i)]) * inverse
            v = bits_of(value)
            even = np.uint32(np.uint32(v >> shift) & np.uint32(1))
            large = np.uint32(np.uint32(np.uint32(np.uint32(v + half) + even) >> shift) - offset)
            small = np.uint32(bits_of(value + anchor) - anchor_bits)
            sign = np.uint32(np.uint32(raw[np.uintp(i)] >> np.uint32(24)) & np.uint32(0x80))
            codes[np.uintp(i)] = np.uint8(np.uint32((large if v >= normal else small) | sign))


def float8_encode(x: Tensor, dtype: torch.dtype, block: int, codes: Tensor, exponents: Tensor) -> None:
    a, c, e, mantissa = array_of(x), array_of(codes), array_of(exponents), _mantissa(dtype)
    spread_over_threads(
        a.size,
        block,
        lambda i, j: functools.partial(_float8_encode, a[i:j], mantissa, block, c[i:j], e[i // block : -(-j // block)]),
    )


@compiled("void(uint8[::1], uint8[::1], int64, int64, float32[::1], float32, boolean)")
def _float8_decode(codes, exponents, mantissa, block, into, alpha, overwrite):
    # Arithmetic on the bits: to look codes up in a table takes three times as long.
    bias = 7 if mantissa == 3 else 15
    shift, offset = np.uint32(23 - mantissa), np.uint32((127 - bias) << 23)
    normal, special = np.uint32(1 << mantissa), np.uint32(0x7F if mantissa == 3 else 0x7C)
    least = np.float32(2.0 ** (1 - bias - mantissa))
    for start in range(0, into.size, block):
        scale = float_of(np.uint32(np.uint32(exponents[np.uintp(start // block)]) << np.uint32(23)))
        for i in range(start, min(start + block, into.size)):
            whole = np.uint32(codes[np.uintp(i)])
            magnitude = np.uint32(whole & np.uint32(0x7F))
            bits = np.uint32(magnitude << shift)
            small = bits_of(np.float32(np.int32(magnitude)) * least)
            broken = np.uint32(bits | np.uint32(0x7F800000))  # infinity or NaN, as far as the format has them
            bits = np.uint32(bits + offset) if magnitude >= normal else small
            bits = broken if magnitude >= special else bits
            sign = np.uint32(np.uint32(whole & np.uint32(0x80)) << np.uint32(24))
            write_or_add_at(float_of(np.uint32(bits | sign)) * scale, into, np.uintp(i), alpha, overwrite)


def _mantissa(dtype: torch.dtype) -> int:
    return 3 if dtype == torch.float8_e4m3fn else 2


def float8_decode(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, out: Tensor, weight: float | None = None
) -> None:
    c, e, o, factor = array_of(codes), array_of(exponents), array_of(out), np.float32(weight or 0.0)
    spread_over_threads(
        o.size,
        block,
        lambda i, j: functools.partial(
            _float8_decode,
            *(c[i:j], e[i // block : -(-j // block)], _mantissa(dtype), block),
            *(o[i:j], factor, weight is None),
        ),
    )


@compiled("void(uint32[::1], int64, int64, int64, uint8[::1], uint8[::1])")
def _natural_encode(raw, first, k0, k1, exponents, signs):
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for origin in range(0, raw.size, TILE):
        piece, out = raw[origin : origin + TILE], exponents[origin : origin + TILE]
        for i in range(piece.size):
            word = np.uint32(word_at(counter, k0, k1) >> np.uint32(9))
            counter = np.uint32(counter + np.uint32(1))
            magnitude = np.uint32(piece[i] & np.uint32(0x7FFFFFFF))
            rounded = min(np.uint32(np.uint32(magnitude + word) >> np.uint32(23)), np.uint32(254))
            out[i] = np.uint8(rounded if magnitude < np.uint32(0x7F800000) else np.uint32(255))
        pack_below(piece.view(np.int32), np.int32(0), signs[origin // 8 :])


def natural_encode(x: Tensor, key: int, exponents: Tensor, signs: Tensor) -> None:
    raw, e, s, words = raw_bits_of(x), array_of(exponents), array_of(signs), uniform_words(key)
    spread_over_threads(
        raw.size, 8, lambda i, j: functools.partial(_natural_encode, raw[i:j], i, *words, e[i:j], s[i // 8 :])
    )


@compiled("void(uint8[::1], uint8[::1], float32[::1], float32, boolean)")
def _natural_decode(exponents, signs, into, alpha, overwrite):
    scratch = np.empty(TILE, np.uint8)
    for origin in range(0, into.size, TILE):
        piece, codes = into[origin : origin + TILE], exponents[origin : origin + TILE]
        negative = scratch[: piece.size]
        unpack_codes(signs[origin // 8 :], 1, negative)
        for i in range(piece.size):
            magnitude = np.uint32(np.uint32(codes[i]) << np.uint32(23))
            bits = np.uint32(magnitude | np.uint32(np.uint32(negative[i]) << np.uint32(31)))
            write_or_add_at(float_of(bits), piece, i, alpha, overwrite)


def natural_decode(exponents: Tensor, signs: Tensor, out: Tensor, weight: float | None = None) -> None:
    e, s, o, factor = array_of(exponents), array_of(signs), array_of(out), np.float32(weight or 0.0)
    spread_over_threads(
        o.size,
        8,
        lambda i, j: functools.partial(_natural_decode, e[i:j], s[i // 8 :], o[i:j], factor, weight is None),
    )


@compiled("void(uint32[::1], int64, int64, int64, uint16[::1])")
def _bfloat16_encode(raw, first, k0, k1, out):
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for i in range(raw.size):
        word = np.uint32(word_at(counter, k0, k1) >> np.uint32(16))
        counter = np.uint32(counter + np.uint32(1))
        magnitude = np.uint32(raw[i] & np.uint32(0x7FFFFFFF))
        broken = magnitude >= np.uint32(0x7F800000)
        quiet = np.uint32(0x40) if magnitude > np.uint32(0x7F800000) else np.uint32(0)
        kept = np.uint32(raw[i] if broken else np.uint32(raw[i] + word))
        out[i] = np.uint16(np.uint32(np.uint32(kept >> np.uint32(16)) | quiet))


def bfloat16_encode(x: Tensor, key: int, out: Tensor) -> None:
    raw, o, words = raw_bits_of(x), out.view(torch.int16).numpy().view(np.uint16), uniform_words(key)
    spread_over_threads(raw.size, 1, lambda i, j: functools.partial(_bfloat16_encode, raw[i:j], i, *words, o[i:j]))
