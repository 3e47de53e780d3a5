# pyright: basic
"""Ternary digits on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.random.cpu import uniform_at
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.tiles import (
    max_magnitude,
    spread_over_threads,
    sum_squares,
    write_or_add_at,
)


@inline
def _write_scale(x, start, stop, clip, scales, b):
    scales.view(np.uint32)[b] = max_magnitude(x.view(np.uint32), start, stop)
    largest = scales[b]
    limit = np.float32(np.sqrt(sum_squares(x, start, stop) / np.float64(stop - start)) * clip)
    if np.isfinite(largest) and limit < largest:
        scales[b] = limit
    if np.isinf(np.float32(1) / scales[b]):
        scales[b] = np.float32(0)


@compiled("void(float32[::1], float64, int64, float32[::1])")
def _ternary_scales(x, clip, block, scales):
    for start in range(0, x.size, block):
        _write_scale(x, start, min(start + block, x.size), clip, scales, np.uintp(start // block))


def ternary_scales(x: Tensor, clip: float, block: int, scales: Tensor) -> None:
    a, s = array_of(x), array_of(scales)
    spread_over_threads(
        a.size,
        block,
        lambda i, j: functools.partial(_ternary_scales, a[i:j], float(clip), block, s[i // block : -(-j // block)]),
    )


@compiled("void(float32[::1], float32[::1], float64, int64, int64, int64, int64, int64, uint8[::1])")
def _ternary_encode(x, scales, clip, first, k0, k1, block, digits, packed):
    """`clip` is negative where the scales are given."""
    k0, k1 = np.uint32(k0), np.uint32(k1)
    counter = np.uint32(first)
    scratch = np.empty(block, np.uint8)
    for start in range(0, x.size, block):
        stop = min(start + block, x.size)
        if clip >= 0:
            _write_scale(x, start, stop, clip, scales, np.uintp(start // block))
        inverse = np.float32(1) / scales[np.uintp(start // block)]
        inverse = inverse if np.isfinite(inverse) else np.float32(0)
        for i in range(start, stop):
            u = uniform_at(counter, k0, k1)
            counter = np.uint32(counter + np.uint32(1))
            value = x[np.uintp(i)]
            hit = np.int32(abs(value) * inverse + u >= np.float32(1))
            negative = np.int32(value < np.float32(0))
            digit = np.int32(np.int32(1) + hit) - np.int32(np.int32(2) * (hit & negative))
            scratch[np.uintp(i - start)] = np.uint8(digit)
        nbytes = -(-(stop - start) // digits)
        for i in range(stop - start, nbytes * digits):
            scratch[np.uintp(i)] = np.uint8(0)
        _pack_digits(scratch, nbytes, digits, packed, start // digits)


@inline
def _pack_digits(scratch, nbytes, digits, packed, start):
    """packed[start + j] = the sum over planes p of base^p scratch[p nbytes + j]."""
    one, two, three, four = np.uintp(nbytes), np.uintp(2 * nbytes), np.uintp(3 * nbytes), np.uintp(4 * nbytes)
    if digits == 4:
        for j in range(nbytes):
            i = np.uintp(j)
            high = np.uint8((scratch[i + three] << np.uint8(6)) | (scratch[i + two] << np.uint8(4)))
            packed[np.uintp(start) + i] = np.uint8(high | np.uint8(scratch[i + one] << np.uint8(2)) | scratch[i])
    else:
        base = np.uint8(3)
        for j in range(nbytes):
            i = np.uintp(j)
            word = np.uint8(np.uint8(scratch[i + four] * base) + scratch[i + three])
            word = np.uint8(np.uint8(word * base) + scratch[i + two])
            word = np.uint8(np.uint8(word * base) + scratch[i + one])
            packed[np.uintp(start) + i] = np.uint8(np.uint8(word * base) + scratch[i])


def ternary_encode(
    x: Tensor, scales: Tensor, key: int, block: int, digits: int, packed: Tensor, clip: float | None = None
) -> None:
    a, s, p, words = array_of(x), array_of(scales), array_of(packed), uniform_words(key)
    spread_over_threads(
        a.size,
        block,
        lambda i, j: functools.partial(
            _ternary_encode,
            *(a[i:j], s[i // block : -(-j // block)], -1.0 if clip is None else float(clip), i, *words),
            *(block, digits, p[i // digits : -(-j // digits)]),
        ),
    )


@compiled("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _ternary_decode(packed, scales, block, digits, into, alpha, overwrite):
    rest, values = np.empty(block // digits, np.uint16), np.empty(block, np.float32)
    for start in range(0, into.size, block):
        piece = into[start : start + block]
        scale = scales[np.uintp(start // block)]
        _unpack_digits(packed, start // digits, -(-piece.size // digits), digits, rest, scale, values)
        for i in range(piece.size):
            write_or_add_at(values[i], piece, i, alpha, overwrite)


@inline
def _unpack_digits(packed, first, nbytes, digits, rest, scale, values):
    """values[p nbytes + j] = scale times digit p of byte j, less 1."""
    for j in range(nbytes):
        rest[j] = np.uint16(packed[np.uintp(first + j)])
    # rest // 3 of a byte is (171 * rest) >> 9; rest // 4 is rest >> 2
    base, factor, shift = np.uint16(3), np.uint16(171), np.uint16(9)
    if digits == 4:
        base, factor, shift = np.uint16(4), np.uint16(1), np.uint16(2)
    for plane in range(digits):
        at = plane * nbytes
        for j in range(nbytes):
            quotient = np.uint16(np.uint16(rest[j] * factor) >> shift)
            digit = np.uint16(rest[j] - np.uint16(quotient * base))
            rest[j] = quotient
            values[np.uintp(at + j)] = np.float32(np.int32(digit) - np.int32(1)) * scale


def ternary_decode(
    packed: Tensor, scales: Tensor, block: int, digits: int, out: Tensor, weight: float | None = None
) -> None:
    p, s, o, factor = array_of(packed), array_of(scales), array_of(out), np.float32(weight or 0.0)
    spread_over_threads(
        o.size,
        block,
        lambda i, j: functools.partial(
            _ternary_decode,
            *(p[i // digits : -(-j // digits)], s[i // block : -(-j // block)], block, digits),
            *(o[i:j], factor, weight is None),
        ),
    )
