# pyright: basic
"""The kernels of `gradwire.kernels.quantise` for CPUs, in numba. See `cpu` for how such kernels are written."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import pool
from gradwire.kernels.cpu import (
    _AHEAD,
    _CHUNK,
    _PAST_CACHES,
    _TILE,
    _array,
    _ask,
    _bits_of,
    _choose,
    _deliver,
    _delivered,
    _end_of_block,
    _fence,
    _float_of,
    _inline,
    _kernel,
    _max_magnitude,
    _mix,
    _ones,
    _pack_at_least,
    _pack_below,
    _raw,
    _sum,
    _sum_squares,
    _tile,
    _uniform_at,
    _unpack,
    _widest,
)
from gradwire.kernels.reference import uniform_words
from gradwire.kernels.reference_quantise import AFFINE_LEVELS, BROKEN

Array = np.ndarray[Any, Any]


def _spread(numel: int, granule: int, task: Callable[[int, int], functools.partial[Any]]) -> None:
    """Run `task(start, stop)` over the pool."""
    pool.run([task(i, j) for i, j in pool.chunks(numel, granule)])


@_inline
def _word_at(counter, k0, k1):
    return _mix(np.uint32(_mix(np.uint32(counter ^ k0)) ^ k1))


# Floats of 8 bits -------------------------------------------------------------------------------------------


@_kernel("void(float32[::1], int64, int64, uint8[::1], uint8[::1])")
def _float8_encode(x, mantissa, block, codes, exponents):
    """`mantissa` is 3 for e4m3 and 2 for e5m2."""
    _widest()
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
        largest = np.int64(_max_magnitude(raw, start, stop))
        exponent = max(((largest + 0x1FFFFF) >> 23) - top, 1)
        if largest >= 0x7F800000:
            exponents[b] = np.uint8(BROKEN)
            for i in range(start, stop):
                codes[np.uintp(i)] = np.uint8(0)
            continue
        exponents[b] = np.uint8(exponent)
        inverse = np.float32(2.0 ** (127 - exponent))
        for chunk in range(start, stop, _CHUNK):
            end = min(chunk + _CHUNK, stop)
            _ask(x, chunk + block, end + block)
            for i in range(chunk, end):
                value = abs(x[np.uintp(i)]) * inverse
                v = _bits_of(value)
                even = np.uint32(np.uint32(v >> shift) & np.uint32(1))
                large = np.uint32(np.uint32(np.uint32(np.uint32(v + half) + even) >> shift) - offset)
                small = np.uint32(_bits_of(value + anchor) - anchor_bits)
                sign = np.uint32(np.uint32(raw[np.uintp(i)] >> np.uint32(24)) & np.uint32(0x80))
                codes[np.uintp(i)] = np.uint8(np.uint32((large if v >= normal else small) | sign))


def float8_encode(x: Tensor, dtype: torch.dtype, block: int, codes: Tensor, exponents: Tensor) -> None:
    """See `gradwire.kernels.quantise.float8_encode`."""
    a, c, e, mantissa = _array(x), _array(codes), _array(exponents), _mantissa(dtype)
    _spread(
        a.size,
        block,
        lambda i, j: functools.partial(_float8_encode, a[i:j], mantissa, block, c[i:j], e[i // block : -(-j // block)]),
    )


@_kernel("void(uint8[::1], uint8[::1], int64, int64, float32[::1], float32, boolean)")
def _float8_decode(codes, exponents, mantissa, block, into, alpha, overwrite):
    _widest()
    # Arithmetic on the bits: to look codes up in a table takes three times as long.
    bias = 7 if mantissa == 3 else 15
    shift, offset = np.uint32(23 - mantissa), np.uint32((127 - bias) << 23)
    normal, special = np.uint32(1 << mantissa), np.uint32(0x7F if mantissa == 3 else 0x7C)
    least = np.float32(2.0 ** (1 - bias - mantissa))
    values, past_caches = np.empty(_TILE, np.float32), into.size >= _PAST_CACHES
    for origin in range(0, into.size, _TILE):
        piece, code, start, sent = into[origin : origin + _TILE], codes[origin : origin + _TILE], 0, 0
        while start < piece.size:
            stop = _end_of_block(start, origin, block, piece.size)
            scale = _float_of(np.uint32(np.uint32(exponents[np.uintp((origin + start) // block)]) << np.uint32(23)))
            for i in range(start, stop):
                whole = np.uint32(code[np.uintp(i)])
                magnitude = np.uint32(whole & np.uint32(0x7F))
                bits = np.uint32(magnitude << shift)
                small = _bits_of(np.float32(np.int32(magnitude)) * least)
                broken = np.uint32(bits | np.uint32(0x7F800000))  # infinity or NaN, as far as the format has them
                bits = np.uint32(bits + offset) if magnitude >= normal else small
                bits = broken if magnitude >= special else bits
                sign = np.uint32(np.uint32(whole & np.uint32(0x80)) << np.uint32(24))
                values[np.uintp(i)] = _float_of(np.uint32(bits | sign)) * scale
            start = stop
            sent = _delivered(values, piece, sent, stop, alpha, overwrite, past_caches)
    _fence()


def _mantissa(dtype: torch.dtype) -> int:
    return 3 if dtype == torch.float8_e4m3fn else 2


def _float8_into(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, into: Tensor, alpha: float | None
) -> None:
    c, e, o, factor = _array(codes), _array(exponents), _array(into), np.float32(alpha or 0.0)
    _spread(
        o.size,
        block,
        lambda i, j: functools.partial(
            _float8_decode,
            *(c[i:j], e[i // block : -(-j // block)], _mantissa(dtype), block),
            *(o[i:j], factor, alpha is None),
        ),
    )


def float8_accumulate(
    codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.quantise.float8_accumulate`."""
    _float8_into(codes, exponents, dtype, block, into, alpha)


def float8_decode(codes: Tensor, exponents: Tensor, dtype: torch.dtype, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.float8_decode`."""
    _float8_into(codes, exponents, dtype, block, out, None)


# Powers of two and bfloat16, rounded at random --------------------------------------------------------------


@_kernel("void(uint32[::1], int64, int64, int64, uint8[::1], uint8[::1])")
def _natural_encode(raw, first, k0, k1, exponents, signs):
    _widest()
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(first)
    words = np.empty(_TILE, np.uint32)
    for origin in range(0, raw.size, _TILE):
        piece, out = raw[origin : origin + _TILE], exponents[origin : origin + _TILE]
        for chunk in range(0, piece.size, _CHUNK):
            end = min(chunk + _CHUNK, piece.size)
            _ask(piece, chunk + _TILE, end + _TILE)
            for i in range(chunk, end):
                words[np.uintp(i)] = np.uint32(_word_at(counter, k0, k1) >> np.uint32(9))
                counter = np.uint32(counter + np.uint32(1))
        for i in range(piece.size):
            magnitude = np.uint32(piece[i] & np.uint32(0x7FFFFFFF))
            rounded = min(np.uint32(np.uint32(magnitude + words[i]) >> np.uint32(23)), np.uint32(254))
            out[i] = np.uint8(rounded if magnitude < np.uint32(0x7F800000) else np.uint32(255))
        _pack_below(piece.view(np.int32), np.int32(0), signs[origin // 8 :])


def natural_encode(x: Tensor, key: int, exponents: Tensor, signs: Tensor) -> None:
    """See `gradwire.kernels.quantise.natural_encode`."""
    raw, e, s, words = _raw(x), _array(exponents), _array(signs), uniform_words(key)
    _spread(raw.size, 8, lambda i, j: functools.partial(_natural_encode, raw[i:j], i, *words, e[i:j], s[i // 8 :]))


@_kernel("void(uint8[::1], uint8[::1], float32[::1], float32, boolean)")
def _natural_decode(exponents, signs, into, alpha, overwrite):
    _widest()
    scratch, values, past_caches = np.empty(_TILE, np.uint8), np.empty(_TILE, np.float32), into.size >= _PAST_CACHES
    values_raw = values.view(np.uint32)
    for origin in range(0, into.size, _TILE):
        piece, codes = into[origin : origin + _TILE], exponents[origin : origin + _TILE]
        negative = scratch[: piece.size]
        _unpack(signs[origin // 8 :], 1, negative)
        for i in range(piece.size):
            magnitude = np.uint32(np.uint32(codes[i]) << np.uint32(23))
            values_raw[i] = np.uint32(magnitude | np.uint32(np.uint32(negative[i]) << np.uint32(31)))
        _deliver(values, piece, 0, piece.size, alpha, overwrite, past_caches)
    _fence()


def _natural_into(exponents: Tensor, signs: Tensor, into: Tensor, alpha: float | None) -> None:
    e, s, o, factor = _array(exponents), _array(signs), _array(into), np.float32(alpha or 0.0)
    _spread(
        o.size,
        8,
        lambda i, j: functools.partial(_natural_decode, e[i:j], s[i // 8 :], o[i:j], factor, alpha is None),
    )


def natural_accumulate(exponents: Tensor, signs: Tensor, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.quantise.natural_accumulate`."""
    _natural_into(exponents, signs, into, alpha)


def natural_decode(exponents: Tensor, signs: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.natural_decode`."""
    _natural_into(exponents, signs, out, None)


@_kernel("void(uint32[::1], int64, int64, int64, uint16[::1])")
def _bfloat16_encode(raw, first, k0, k1, out):
    _widest()
    k0, k1, counter = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for chunk in range(0, raw.size, _CHUNK):
        end = min(chunk + _CHUNK, raw.size)
        _ask(raw, chunk + _AHEAD, end + _AHEAD)
        for i in range(chunk, end):
            word = np.uint32(_word_at(counter, k0, k1) >> np.uint32(16))
            counter = np.uint32(counter + np.uint32(1))
            magnitude = np.uint32(raw[np.uintp(i)] & np.uint32(0x7FFFFFFF))
            broken = magnitude >= np.uint32(0x7F800000)
            quiet = np.uint32(0x40) if magnitude > np.uint32(0x7F800000) else np.uint32(0)
            kept = np.uint32(raw[np.uintp(i)] if broken else np.uint32(raw[np.uintp(i)] + word))
            out[np.uintp(i)] = np.uint16(np.uint32(np.uint32(kept >> np.uint32(16)) | quiet))


def bfloat16_encode(x: Tensor, key: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.bfloat16_encode`."""
    raw, o, words = _raw(x), out.view(torch.int16).numpy().view(np.uint16), uniform_words(key)
    _spread(raw.size, 1, lambda i, j: functools.partial(_bfloat16_encode, raw[i:j], i, *words, o[i:j]))


# Ternary ----------------------------------------------------------------------------------------------------


@_inline
def _write_scale(x, start, stop, clip, scales, b):
    scales.view(np.uint32)[b] = _max_magnitude(x.view(np.uint32), start, stop)
    largest = scales[b]
    limit = np.float32(np.sqrt(_sum_squares(x, start, stop) / np.float64(stop - start)) * clip)
    if np.isfinite(largest) and limit < largest:
        scales[b] = limit
    if np.isinf(np.float32(1) / scales[b]):
        scales[b] = np.float32(0)


@_kernel("void(float32[::1], float64, int64, float32[::1])")
def _ternary_scales(x, clip, block, scales):
    for start in range(0, x.size, block):
        _write_scale(x, start, min(start + block, x.size), clip, scales, np.uintp(start // block))


def ternary_scales(x: Tensor, clip: float, block: int, scales: Tensor) -> None:
    """See `gradwire.kernels.quantise.ternary_scales`."""
    a, s = _array(x), _array(scales)
    _spread(
        a.size,
        block,
        lambda i, j: functools.partial(_ternary_scales, a[i:j], float(clip), block, s[i // block : -(-j // block)]),
    )


@_kernel("void(float32[::1], float32[::1], float64, int64, int64, int64, int64, int64, uint8[::1])")
def _ternary_encode(x, scales, clip, first, k0, k1, block, digits, packed):
    """`clip` is negative where the scales are given."""
    _widest()
    k0, k1 = np.uint32(k0), np.uint32(k1)
    counter = np.uint32(first)
    scratch = np.empty(block, np.uint8)
    for start in range(0, x.size, block):
        stop = min(start + block, x.size)
        if clip >= 0:
            _write_scale(x, start, stop, clip, scales, np.uintp(start // block))
        inverse = np.float32(1) / scales[np.uintp(start // block)]
        inverse = inverse if np.isfinite(inverse) else np.float32(0)
        for chunk in range(start, stop, _CHUNK):
            end = min(chunk + _CHUNK, stop)
            _ask(x, chunk + block, end + block)
            for i in range(chunk, end):
                u = _uniform_at(counter, k0, k1)
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


@_inline
def _pack_digits(scratch, nbytes, digits, packed, start):
    """packed[start + j] = the sum over planes p of base^p scratch[p nbytes + j]."""
    _widest()
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
    """See `gradwire.kernels.quantise.ternary_encode`."""
    a, s, p, words = _array(x), _array(scales), _array(packed), uniform_words(key)
    _spread(
        a.size,
        block,
        lambda i, j: functools.partial(
            _ternary_encode,
            *(a[i:j], s[i // block : -(-j // block)], -1.0 if clip is None else float(clip), i, *words),
            *(block, digits, p[i // digits : -(-j // digits)]),
        ),
    )


@_kernel("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _ternary_decode(packed, scales, block, digits, into, alpha, overwrite):
    tile, past_caches = _tile(block), into.size >= _PAST_CACHES
    rest, values = np.empty(block // digits, np.uint16), np.empty(tile, np.float32)
    for origin in range(0, into.size, tile):
        piece = into[origin : origin + tile]
        for start in range(0, piece.size, block):
            nbytes = -(-min(block, piece.size - start) // digits)
            scale = scales[np.uintp((origin + start) // block)]
            _unpack_digits(packed, (origin + start) // digits, nbytes, digits, rest, scale, values, start)
        _deliver(values, piece, 0, piece.size, alpha, overwrite, past_caches)
    _fence()


@_inline
def _unpack_digits(packed, first, nbytes, digits, rest, scale, values, start):
    """values[start + p nbytes + j] = scale times digit p of byte j, less 1."""
    _widest()
    for j in range(nbytes):
        rest[j] = np.uint16(packed[np.uintp(first + j)])
    # rest // 3 of a byte is (171 * rest) >> 9; rest // 4 is rest >> 2
    base, factor, shift = np.uint16(3), np.uint16(171), np.uint16(9)
    if digits == 4:
        base, factor, shift = np.uint16(4), np.uint16(1), np.uint16(2)
    for plane in range(digits):
        at = start + plane * nbytes
        for j in range(nbytes):
            quotient = np.uint16(np.uint16(rest[j] * factor) >> shift)
            digit = np.uint16(rest[j] - np.uint16(quotient * base))
            rest[j] = quotient
            values[np.uintp(at + j)] = np.float32(np.int32(digit) - np.int32(1)) * scale


def _ternary_into(packed: Tensor, scales: Tensor, block: int, digits: int, into: Tensor, alpha: float | None) -> None:
    p, s, o, factor = _array(packed), _array(scales), _array(into), np.float32(alpha or 0.0)
    _spread(
        o.size,
        block,
        lambda i, j: functools.partial(
            _ternary_decode,
            *(p[i // digits : -(-j // digits)], s[i // block : -(-j // block)], block, digits),
            *(o[i:j], factor, alpha is None),
        ),
    )


def ternary_accumulate(
    packed: Tensor, scales: Tensor, block: int, digits: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.quantise.ternary_accumulate`."""
    _ternary_into(packed, scales, block, digits, into, alpha)


def ternary_decode(packed: Tensor, scales: Tensor, block: int, digits: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.ternary_decode`."""
    _ternary_into(packed, scales, block, digits, out, None)


# One bit ----------------------------------------------------------------------------------------------------


@_sum
def _sums_of_halves(x, start, stop):
    """The sum of those that are at least 0, and of all others."""
    _widest()
    up = down = 0.0
    for i in range(start, stop):
        # Masks and no choices: of two on one condition LLVM makes a branch, which takes three times as long.
        value = x[np.uintp(i)]
        bits, keep = _bits_of(value), np.uint32(np.uint32(0) - np.uint32(value >= np.float32(0)))
        up += np.float64(_float_of(np.uint32(bits & keep)))
        down += np.float64(_float_of(np.uint32(bits & np.uint32(~keep))))
    return up, down


@_sum
def _count_ones(bits, start, stop):
    _widest()
    count = 0
    for j in range(start, stop):
        count += np.int64(_ones(np.uint64(bits[np.uintp(j)])))
    return count


@_kernel("void(float32[::1], int64, uint8[::1], float32[::1])")
def _one_bit_encode(x, block, packed, means):
    _widest()
    tile = _tile(block)
    for origin in range(0, x.size, tile):
        piece, bits = x[origin : origin + tile], packed[origin // 8 :]
        _pack_at_least(piece, np.float32(0), bits)
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), (origin + start) // block
            count, up, down = _count_ones(bits, start // 8, -(-stop // 8)), 0.0, 0.0
            for chunk in range(start, stop, _CHUNK):
                end = min(chunk + _CHUNK, stop)
                _ask(piece, chunk + tile, end + tile)
                sums = _sums_of_halves(piece, chunk, end)
                up, down = up + sums[0], down + sums[1]
            means[np.uintp(2 * b)] = np.float32(up / np.float64(max(count, 1)))
            means[np.uintp(2 * b + 1)] = np.float32(down / np.float64(max(stop - start - count, 1)))


def one_bit_encode(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    """See `gradwire.kernels.quantise.one_bit_encode`."""
    a, p, m = _array(x), _array(packed), _array(means)
    _spread(
        a.size,
        block,
        lambda i, j: functools.partial(
            _one_bit_encode, a[i:j], block, p[i // 8 :], m[2 * (i // block) : -2 * (-j // block)]
        ),
    )


@_kernel("void(uint8[::1], float32[::1], int64, float32[::1], float32, boolean)")
def _one_bit_decode(packed, means, block, into, alpha, overwrite):
    _widest()
    values, past_caches = np.empty(_TILE, np.float32), into.size >= _PAST_CACHES
    for origin in range(0, into.size, _TILE):
        piece, start, sent = into[origin : origin + _TILE], 0, 0
        while start < piece.size:
            b, stop = (origin + start) // block, _end_of_block(start, origin, block, piece.size)
            up, down = means[np.uintp(2 * b)], means[np.uintp(2 * b + 1)]
            _choose(packed[origin // 8 :], start, stop, up, down, values)
            start = stop
            sent = _delivered(values, piece, sent, stop, alpha, overwrite, past_caches)
    _fence()


def _one_bit_into(packed: Tensor, means: Tensor, block: int, into: Tensor, alpha: float | None) -> None:
    p, m, o, factor = _array(packed), _array(means), _array(into), np.float32(alpha or 0.0)
    _spread(
        o.size,
        block,
        lambda i, j: functools.partial(
            _one_bit_decode,
            *(p[i // 8 :], m[2 * (i // block) : -2 * (-j // block)], block),
            *(o[i:j], factor, alpha is None),
        ),
    )


def one_bit_accumulate(packed: Tensor, means: Tensor, block: int, into: Tensor, alpha: float = 1.0) -> None:
    """See `gradwire.kernels.quantise.one_bit_accumulate`."""
    _one_bit_into(packed, means, block, into, alpha)


def one_bit_decode(packed: Tensor, means: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.one_bit_decode`."""
    _one_bit_into(packed, means, block, out, None)


@_inline
def _bytes_of_bits(byte):
    """Bit i of a byte in byte i of a word: see `cpu._unpack`."""
    w = (np.uint64(byte) * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)
    return ((w + np.uint64(0x00406070787C7E7F)) >> np.uint64(7)) & np.uint64(0x0101010101010101)


@_kernel("void(uint8[:, ::1], int64, int64, int64, uint8[::1])")
def _majority(ballots, casting, start, stop, out):
    _widest()
    voters = ballots.shape[0]
    # A byte that counts more than `voters` reaches 128 with this added.
    margin = np.uint64(127 - voters) * np.uint64(0x0101010101010101)
    counts = np.empty(min(_TILE, stop - start), np.uint64)
    for origin in range(start, stop, _TILE):
        size = min(_TILE, stop - origin)
        counts[:size] = margin
        for voter in range(voters):
            weight = np.uint64(3 if voter == casting else 2)
            ballot = ballots[voter, origin : origin + size]
            for i in range(size):
                counts[i] += weight * _bytes_of_bits(ballot[i])
        for i in range(size):
            won = (counts[i] >> np.uint64(7)) & np.uint64(0x0101010101010101)
            out[origin + i] = np.uint8((won * np.uint64(0x0102040810204080)) >> np.uint64(56))


def majority(ballots: Tensor, casting: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.majority`. For up to 127 voters, who fit the counters of a byte."""
    b, o = _array(ballots), _array(out)
    _spread(o.size, 1, lambda i, j: functools.partial(_majority, b, casting, i, j, o))


# An affine grid ---------------------------------------------------------------------------------------------


@_inline
def _ordered(bits):
    """The bits of a float32 as an integer that orders as it does, NaN beyond infinity; its own inverse."""
    return np.int32(bits ^ np.int32(np.int32(bits >> np.int32(31)) & np.int32(0x7FFFFFFF)))


@_inline
def _extremes(bits, start, stop):
    """The lowest and the highest of a block in `_ordered`'s order, 0 among them."""
    _widest()
    low, high = np.int32(0), np.int32(0)
    for i in range(start, stop):  # a minimum of integers needs no leave to be reordered
        order = _ordered(bits[np.uintp(i)])
        low, high = min(low, order), max(high, order)
    return low, high


@_kernel("void(int32[::1], int32[::1])")
def _affine_extremes(bits, extremes):
    extremes[0], extremes[1] = _extremes(bits, 0, bits.size)


@_inline
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


@_inline
def _affine_round(x, start, stop, scale, zero, levels, ahead):
    _widest()
    if scale == np.float32(0) or not np.isfinite(scale):
        levels[start:stop] = np.uint8(0)
        return
    for chunk in range(start, stop, _CHUNK):
        end = min(chunk + _CHUNK, stop)
        _ask(x, chunk + ahead, end + ahead)
        for i in range(chunk, end):
            q = np.int32(np.rint(x[np.uintp(i)] / scale) + zero)
            levels[np.uintp(i)] = np.uint8(max(min(q, np.int32(AFFINE_LEVELS)), np.int32(0)))


@_kernel("void(float32[::1], int64, float32[::1], uint8[::1], uint8[::1])")
def _affine_encode(x, block, scales, zeros, levels):
    _widest()
    bits, pair = x.view(np.int32), np.empty(2, np.int32)
    for start in range(0, x.size, block):
        stop, b = min(start + block, x.size), np.uintp(start // block)
        low, high = _extremes(bits, start, stop)
        scale, zero = _affine_grid(low, high, pair)
        scales[b], zeros[b] = scale, np.uint8(zero)
        _affine_round(x, start, stop, scale, zero, levels, stop - start)


@_kernel("void(float32[::1], int32[:, ::1], float32[::1], uint8[::1], uint8[::1])")
def _affine_encode_whole(x, extremes, scales, zeros, levels):
    """A piece of a tensor that is one block, given the extremes of all pieces."""
    scale, zero = _affine_grid(extremes[:, 0].min(), extremes[:, 1].max(), np.empty(2, np.int32))
    scales[0], zeros[0] = scale, np.uint8(zero)
    for stop in range(x.size, 0, -_TILE):  # from the end, which the extremes were sought in last and caches still hold
        start = max(stop - _TILE, 0)
        _affine_round(x, start, stop, scale, zero, levels, -_TILE)


def affine_encode(x: Tensor, block: int, scales: Tensor, zeros: Tensor, levels: Tensor) -> None:
    """See `gradwire.kernels.quantise.affine_encode`."""
    a, s, z, q = _array(x), _array(scales), _array(zeros), _array(levels)
    if not a.size:
        return
    if block:
        _spread(a.size, block, lambda i, j: functools.partial(_affine_encode, *_affine_part(i, j, a, block, s, z, q)))
        return
    cuts = pool.chunks(a.size)
    found, bits = np.empty((len(cuts), 2), np.int32), a.view(np.int32)
    pool.run([functools.partial(_affine_extremes, bits[i:j], found[n]) for n, (i, j) in enumerate(cuts)])
    _spread(a.size, 1, lambda i, j: functools.partial(_affine_encode_whole, a[i:j], found, s, z, q[i:j]))


def _affine_part(i: int, j: int, a: Array, block: int, s: Array, z: Array, q: Array) -> tuple[Any, ...]:
    """The elements [i, j), what a block is there, and its scales, zero points and levels."""
    if not block:
        return a[i:j], a.size, s, z, q[i:j]
    blocks = slice(i // block, -(-j // block))
    return a[i:j], block, s[blocks], z[blocks], q[i:j]


@_kernel("void(float32[::1], int64, float32[::1], uint8[::1], uint8[::1], float32, boolean)")
def _affine_decode(into, block, scales, zeros, levels, alpha, overwrite):
    _widest()
    values, past_caches = np.empty(_TILE, np.float32), into.size >= _PAST_CACHES
    for origin in range(0, into.size, _TILE):
        piece, codes, start, sent = into[origin : origin + _TILE], levels[origin : origin + _TILE], 0, 0
        while start < piece.size:
            b, stop = np.uintp((origin + start) // block), _end_of_block(start, origin, block, piece.size)
            scale, zero = scales[b], np.int32(zeros[b])
            for i in range(start, stop):
                values[np.uintp(i)] = np.float32(np.int32(codes[np.uintp(i)]) - zero) * scale
            start = stop
            sent = _delivered(values, piece, sent, stop, alpha, overwrite, past_caches)
    _fence()


def _affine_into(scales: Tensor, zeros: Tensor, levels: Tensor, block: int, into: Tensor, alpha: float | None) -> None:
    s, z, q, o, factor = _array(scales), _array(zeros), _array(levels), _array(into), np.float32(alpha or 0.0)
    if not o.size:
        return
    _spread(
        o.size,
        block or 1,
        lambda i, j: functools.partial(_affine_decode, *_affine_part(i, j, o, block, s, z, q), factor, alpha is None),
    )


def affine_accumulate(
    scales: Tensor, zeros: Tensor, levels: Tensor, block: int, into: Tensor, alpha: float = 1.0
) -> None:
    """See `gradwire.kernels.quantise.affine_accumulate`."""
    _affine_into(scales, zeros, levels, block, into, alpha)


def affine_decode(scales: Tensor, zeros: Tensor, levels: Tensor, block: int, out: Tensor) -> None:
    """See `gradwire.kernels.quantise.affine_decode`."""
    _affine_into(scales, zeros, levels, block, out, None)
