# pyright: basic
"""The low-rank and sketching kernels for CPUs, in numba. See `cpu` for the rules they keep."""

from __future__ import annotations

import functools
import math

import numpy as np
import torch
from torch import Tensor

from gradwire.kernels import pool
from gradwire.kernels.cpu import _array, _inline, _kernel, _max_magnitude, _mix, _uniform_at
from gradwire.kernels.reference import CANONICAL_NAN, uniform_words
from gradwire.kernels.reference_lowrank import sketch_words

# Factors ----------------------------------------------------------------------------------------------------


@_kernel("void(float32[::1], uint32[::1], int64, int64, int64)")
def _unit_rows(Q, raw, columns, k0, k1):
    k0, k1 = np.uint32(k0), np.uint32(k1)
    for start in range(0, Q.size, columns):
        largest = _max_magnitude(raw, start, start + columns)
        exponent = min(max(254 - int(largest >> np.uint32(23)), 1), 254) - 127
        scale = np.float32(math.ldexp(1.0, exponent))
        for i in range(start, start + columns):
            if largest == 0:
                Q[i] = _uniform_at(np.uint32(i), k0, k1) * np.float32(2.0) - np.float32(1.0)
            else:
                Q[i] = Q[i] * scale


def unit_rows_(Q: Tensor, bits: int) -> None:
    """See `gradwire.kernels.lowrank.unit_rows_`."""
    q = _array(Q.view(-1))
    if q.size:
        _unit_rows(q, q.view(np.uint32), Q.shape[1], *uniform_words(bits))


# Count sketch -----------------------------------------------------------------------------------------------

_TILE = 1024


@_inline
def _hash(words, first, columns, k0, k1):
    """Columns of a tile's elements, with the sign in the lowest bit."""
    for i in range(words.size):
        word = _mix(np.uint32(_mix(np.uint32(np.uint32(first + i) ^ k0)) ^ k1))
        column = np.uint32((np.uint64(word >> np.uint32(1)) * np.uint64(columns)) >> np.uint64(31))
        words[i] = np.uint32((column << np.uint32(1)) | (word & np.uint32(1)))


@_kernel("void(float32[::1], float32[::1], int64, int64)")
def _count_sketch(x, row, k0, k1):
    k0, k1, columns = np.uint32(k0), np.uint32(k1), np.uint32(row.size)
    words = np.empty(_TILE, np.uint32)
    row[:] = 0.0
    for start in range(0, x.size, _TILE):
        tile = words[: min(_TILE, x.size - start)]
        _hash(tile, start, columns, k0, k1)
        for i in range(tile.size):
            value = x[start + i]
            row[tile[i] >> np.uint32(1)] += -value if tile[i] & np.uint32(1) else value


def count_sketch(x: Tensor, bits: int, sketch: Tensor) -> None:
    """See `gradwire.kernels.lowrank.count_sketch`."""
    rows = zip(_array(sketch), sketch_words(bits, sketch.shape[0]), strict=True)
    tasks = [functools.partial(_count_sketch, _array(x), row, *words) for row, words in rows]
    _run(tasks, x.numel())


def _run(tasks, numel):
    if numel > pool.SERIAL_NUMEL:
        pool.run(tasks)
    else:
        for task in tasks:
            task()


@_inline
def _median(values):
    """Of an odd number of values, which are left sorted; NaN where one is."""
    total = np.float32(0.0)
    for i in range(values.size):
        value = values[i]
        total += value * np.float32(0.0)
        j = i
        while j > 0 and values[j - 1] > value:
            values[j] = values[j - 1]
            j -= 1
        values[j] = value
    return values[values.size // 2] if total == total else np.float32(np.nan)


@_inline
def _median_of_3(a, b, c):
    low, high = (a, b) if a < b else (b, a)
    middle = c if c > low else low
    middle = middle if middle < high else high
    return middle if a == a and b == b and c == c else np.float32(np.nan)


@_inline
def _estimates(row, words, first, k0, k1, out):
    _hash(words, first, np.uint32(row.size), k0, k1)
    for i in range(words.size):
        value = row[words[i] >> np.uint32(1)]
        out[i] = -value if words[i] & np.uint32(1) else value


@_kernel("void(float32[:,::1], uint32[:,::1], int64, float32[::1])")
def _count_unsketch(sketch, keys, first, out):
    rows = sketch.shape[0]
    words = np.empty(_TILE, np.uint32)
    found = np.empty((rows, _TILE), np.float32)
    values = np.empty(rows, np.float32)
    for start in range(0, out.size, _TILE):
        stop = min(start + _TILE, out.size)
        for j in range(rows):
            _estimates(sketch[j], words[: stop - start], first + start, keys[j, 0], keys[j, 1], found[j])
        for i in range(stop - start):
            if rows == 3:
                out[start + i] = _median_of_3(found[0, i], found[1, i], found[2, i])
            else:
                values[:] = found[:, i]
                out[start + i] = _median(values)


def count_unsketch(sketch: Tensor, bits: int, out: Tensor) -> None:
    """See `gradwire.kernels.lowrank.count_unsketch`."""
    s, o, keys = _array(sketch), _array(out), np.array(sketch_words(bits, sketch.shape[0]), np.uint32)
    pool.run([functools.partial(_count_unsketch, s, keys, i, o[i:j]) for i, j in pool.chunks(out.numel())])


# Transforms -------------------------------------------------------------------------------------------------


@_inline
def _largest(ranks):
    largest = np.int64(-1)
    for i in range(ranks.size):
        largest = max(largest, ranks[i])
    return largest


@_kernel("void(float32[:,::1], uint32[:,::1], int64, float32[::1], uint8[::1])")
def _topk_rows(x, raw, k, values, codes):
    columns = x.shape[1]
    ranks = np.empty(columns, np.int64)
    for row in range(x.shape[0]):
        for i in range(columns):
            # Magnitude first, then the lower column; all NaNs alike, above infinity.
            magnitude = min(np.int64(raw[row, i] & np.uint32(0x7FFFFFFF)), np.int64(CANONICAL_NAN))
            ranks[i] = (magnitude << 8) | (255 - i)
        for _ in range(k):
            ranks[255 - (_largest(ranks) & 255)] = -1
        at = row * k
        for i in range(columns):
            if ranks[i] < 0:
                values[at], codes[at] = x[row, i], np.uint8(i)
                at += 1


def topk_rows(x: Tensor, k: int, values: Tensor, codes: Tensor) -> None:
    """See `gradwire.kernels.lowrank.topk_rows`."""
    a, v, c = _array(x), _array(values), _array(codes)
    raw, columns = a.view(np.uint32), x.shape[1]
    rows = [(i // columns, j // columns) for i, j in pool.chunks(x.numel(), columns)]
    pool.run([functools.partial(_topk_rows, a[i:j], raw[i:j], k, v[i * k : j * k], c[i * k : j * k]) for i, j in rows])


@_kernel("void(float32[::1], uint8[::1], float32[:,::1], float32[:,::1])")
def _combine_rows(values, codes, basis, out):
    k = values.size // max(1, out.shape[0])
    for row in range(out.shape[0]):
        target = out[row]
        target[:] = 0.0
        for j in range(row * k, row * k + k):
            value, term = values[j], basis[np.int64(codes[j])]
            for i in range(target.size):
                target[i] += value * term[i]


def combine_rows(values: Tensor, codes: Tensor, basis: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.lowrank.combine_rows`."""
    v, c, b, o = _array(values), _array(codes), _array(basis), _array(out)
    k, columns = values.numel() // max(1, out.shape[0]), out.shape[1]
    rows = [(i // columns, j // columns) for i, j in pool.chunks(out.numel(), columns)]
    pool.run([functools.partial(_combine_rows, v[i * k : j * k], c[i * k : j * k], b, o[i:j]) for i, j in rows])


@_inline
def _hadamard_8(x):
    """The stages of halves 1, 2 and 4, in registers."""
    for i in range(0, x.size, 8):
        at = np.uintp(i)
        a, b, c, d = x[at], x[at + np.uintp(1)], x[at + np.uintp(2)], x[at + np.uintp(3)]
        e, f, g, h = x[at + np.uintp(4)], x[at + np.uintp(5)], x[at + np.uintp(6)], x[at + np.uintp(7)]
        a, b, c, d, e, f, g, h = a + b, a - b, c + d, c - d, e + f, e - f, g + h, g - h
        a, b, c, d, e, f, g, h = a + c, b + d, a - c, b - d, e + g, f + h, e - g, f - h
        x[at], x[at + np.uintp(1)], x[at + np.uintp(2)], x[at + np.uintp(3)] = a + e, b + f, c + g, d + h
        x[at + np.uintp(4)], x[at + np.uintp(5)], x[at + np.uintp(6)], x[at + np.uintp(7)] = a - e, b - f, c - g, d - h


@_inline
def _hadamard_stage(x, half):
    for start in range(0, x.size, 2 * half):
        # Slices start at 0: an index that might be negative would not be vectorised.
        upper, lower = x[start : start + half], x[start + half : start + 2 * half]
        for i in range(upper.size):
            a, b = upper[i], lower[i]
            upper[i], lower[i] = a + b, a - b


@_inline
def _hadamard(x):
    half = 1
    if x.size >= 8:
        _hadamard_8(x)
        half = 8
    while half < x.size:
        _hadamard_stage(x, half)
        half *= 2


@_inline
def _flip_signs(raw, first, k0, k1):
    """Negate where uniform is a half or more: where its word's highest bit is set."""
    for i in range(raw.size):
        word = _mix(np.uint32(_mix(np.uint32(np.uint32(first + np.uint32(i)) ^ k0)) ^ k1))
        raw[i] = np.uint32(raw[i] ^ np.uint32(word & np.uint32(0x80000000)))


@_kernel("void(float32[::1], int64, int64, int64, int64, int32[::1], float32, float32[::1])")
def _hadamard_encode(x, block, first, k0, k1, chosen, scale, out):
    k0, k1 = np.uint32(k0), np.uint32(k1)
    scratch = np.empty(block, np.float32)
    raw = scratch.view(np.uint32)
    for start in range(0, x.size, block):
        piece = x[start : start + block]
        scratch[: piece.size] = piece
        scratch[piece.size :] = 0.0
        _flip_signs(raw[: piece.size], np.uint32(first + start), k0, k1)
        _hadamard(scratch)
        target = out[start // block * chosen.size :]
        for j in range(chosen.size):
            target[j] = scratch[chosen[j]] * scale


def hadamard_encode(x: Tensor, block: int, bits: int, chosen: Tensor, out: Tensor) -> None:
    """See `gradwire.kernels.lowrank.hadamard_encode`."""
    a, c, o, (k0, k1) = _array(x), _array(chosen), _array(out), uniform_words(bits)
    scale, k = np.float32(block**-0.5), chosen.numel()
    tasks = [
        functools.partial(_hadamard_encode, a[i:j], block, i, k0, k1, c, scale, o[i // block * k : -(-j // block) * k])
        for i, j in pool.chunks(x.numel(), block)
    ]
    pool.run(tasks)


@_kernel("void(float32[::1], int64, int64, int64, int64, int32[::1], float32, float32[::1], float32)")
def _hadamard_accumulate(values, block, first, k0, k1, chosen, scale, into, alpha):
    k0, k1 = np.uint32(k0), np.uint32(k1)
    scratch = np.empty(block, np.float32)
    raw = scratch.view(np.uint32)
    for start in range(0, into.size, block):
        scratch[:] = 0.0
        source, piece = values[start // block * chosen.size :], into[start : start + block]
        for j in range(chosen.size):
            scratch[chosen[j]] = source[j]
        _hadamard(scratch)
        _flip_signs(raw[: piece.size], np.uint32(first + start), k0, k1)
        for i in range(piece.size):
            piece[i] += scratch[i] * scale * alpha


def hadamard_accumulate(values: Tensor, block: int, bits: int, chosen: Tensor, into: Tensor, alpha: float) -> None:
    """See `gradwire.kernels.lowrank.hadamard_accumulate`."""
    v, c, o, (k0, k1) = _array(values), _array(chosen), _array(into), uniform_words(bits)
    scale, k, run = np.float32(block**-0.5), chosen.numel(), _hadamard_accumulate
    factor = np.float32(alpha)
    tasks = [
        functools.partial(run, v[i // block * k : -(-j // block) * k], block, i, k0, k1, c, scale, o[i:j], factor)
        for i, j in pool.chunks(into.numel(), block)
    ]
    pool.run(tasks)


# Half-precision memory --------------------------------------------------------------------------------------


@_kernel("void(float32[::1], uint16[::1], float32)")
def _add_bf16(x, r, alpha):
    scratch = np.empty(_TILE, np.uint32)
    terms = scratch.view(np.float32)
    for start in range(0, x.size, _TILE):
        into, halves = x[start : start + _TILE], r[start : start + _TILE]
        for i in range(into.size):
            scratch[i] = np.uint32(np.uint32(halves[i]) << np.uint32(16))
        for i in range(into.size):
            into[i] += terms[i] * alpha


def add_bf16_(x: Tensor, r: Tensor, alpha: float) -> None:
    """See `gradwire.kernels.lowrank.add_bf16_`."""
    a, h = _array(x), _array(r.view(torch.int16)).view(np.uint16)
    pool.run([functools.partial(_add_bf16, a[i:j], h[i:j], np.float32(alpha)) for i, j in pool.chunks(x.numel())])


@_kernel("void(float32[::1], float32[::1], float32)")
def _add_scaled(into, x, alpha):
    for i in range(into.size):
        into[i] += x[i] * alpha


def add_scaled_(into: Tensor, x: Tensor, alpha: float) -> None:
    """See `gradwire.kernels.lowrank.add_scaled_`."""
    a, b = _array(into.view(-1)), _array(x.view(-1))
    tasks = [functools.partial(_add_scaled, a[i:j], b[i:j], np.float32(alpha)) for i, j in pool.chunks(into.numel())]
    pool.run(tasks)


@_kernel("void(uint32[::1], uint16[::1], int64, int64, int64)")
def _round_bf16(raw, out, first, k0, k1):
    k0, k1, first = np.uint32(k0), np.uint32(k1), np.uint32(first)
    for i in range(raw.size):
        word = np.uint32(raw[i])
        noise = _mix(np.uint32(_mix(np.uint32(np.uint32(first + np.uint32(i)) ^ k0)) ^ k1)) >> np.uint32(16)
        up = np.uint32(np.uint32(word + noise) >> np.uint32(16))
        cut = np.uint32(word >> np.uint32(16))
        quiet = np.uint32(0x40) if (word & np.uint32(0x7FFFFFFF)) > np.uint32(0x7F800000) else np.uint32(0)
        finite = (up & np.uint32(0x7F80)) != np.uint32(0x7F80) and (cut & np.uint32(0x7F80)) != np.uint32(0x7F80)
        out[i] = np.uint16(up if finite else cut | quiet)


def round_bf16(x: Tensor, bits: int, out: Tensor) -> None:
    """See `gradwire.kernels.lowrank.round_bf16`."""
    raw, h, words = _array(x).view(np.uint32), _array(out.view(torch.int16)).view(np.uint16), uniform_words(bits)
    pool.run([functools.partial(_round_bf16, raw[i:j], h[i:j], i, *words) for i, j in pool.chunks(x.numel())])
