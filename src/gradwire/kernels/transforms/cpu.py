# pyright: basic
"""Transforms on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.random.cpu import mix
from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.runtime.torch_blocks import CANONICAL_NAN


@inline
def _largest(ranks):
    largest = np.int64(-1)
    for i in range(ranks.size):
        largest = max(largest, ranks[i])
    return largest


@compiled("void(float32[:,::1], uint32[:,::1], int64, float32[::1], uint8[::1])")
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
    a, v, c = array_of(x), array_of(values), array_of(codes)
    raw, columns = a.view(np.uint32), x.shape[1]
    rows = [(i // columns, j // columns) for i, j in pool.chunks(x.numel(), columns)]
    pool.run([functools.partial(_topk_rows, a[i:j], raw[i:j], k, v[i * k : j * k], c[i * k : j * k]) for i, j in rows])


@compiled("void(float32[::1], uint8[::1], float32[:,::1], float32[:,::1])")
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
    v, c, b, o = array_of(values), array_of(codes), array_of(basis), array_of(out)
    k, columns = values.numel() // max(1, out.shape[0]), out.shape[1]
    rows = [(i // columns, j // columns) for i, j in pool.chunks(out.numel(), columns)]
    pool.run([functools.partial(_combine_rows, v[i * k : j * k], c[i * k : j * k], b, o[i:j]) for i, j in rows])


@inline
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


@inline
def _hadamard_stage(x, half):
    for start in range(0, x.size, 2 * half):
        # Slices start at 0: an index that might be negative would not be vectorised.
        upper, lower = x[start : start + half], x[start + half : start + 2 * half]
        for i in range(upper.size):
            a, b = upper[i], lower[i]
            upper[i], lower[i] = a + b, a - b


@inline
def _hadamard(x):
    half = 1
    if x.size >= 8:
        _hadamard_8(x)
        half = 8
    while half < x.size:
        _hadamard_stage(x, half)
        half *= 2


@inline
def _flip_signs(raw, first, k0, k1):
    """Negate where uniform is a half or more: where its word's highest bit is set."""
    for i in range(raw.size):
        word = mix(np.uint32(mix(np.uint32(np.uint32(first + np.uint32(i)) ^ k0)) ^ k1))
        raw[i] = np.uint32(raw[i] ^ np.uint32(word & np.uint32(0x80000000)))


@compiled("void(float32[::1], int64, int64, int64, int64, int32[::1], float32, float32[::1])")
def _hadamard_encode(x, block, first, k0, k1, chosen, scale, out):
    k0, k1 = np.uint32(k0), np.uint32(k1)
    scratch = np.empty(block, np.float32)
    raw = scratch.view(np.uint32)
    for start in range(0, x.size, block):
        piece = x[start : start + block]
        for i in range(piece.size):
            scratch[i] = piece[i]
        scratch[piece.size :] = 0.0
        _flip_signs(raw[: piece.size], np.uint32(first + start), k0, k1)
        _hadamard(scratch)
        target = out[start // block * chosen.size :]
        for j in range(chosen.size):
            target[j] = scratch[chosen[j]] * scale


def hadamard_encode(x: Tensor, block: int, seed: int, chosen: Tensor, out: Tensor) -> None:
    a, c, o, (k0, k1) = array_of(x), array_of(chosen), array_of(out), uniform_words(seed)
    scale, k = np.float32(block**-0.5), chosen.numel()
    tasks = [
        functools.partial(_hadamard_encode, a[i:j], block, i, k0, k1, c, scale, o[i // block * k : -(-j // block) * k])
        for i, j in pool.chunks(x.numel(), block)
    ]
    pool.run(tasks)


@compiled("void(float32[::1], int64, int64, int64, int64, int32[::1], float32, float32[::1], float32)")
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


def hadamard_accumulate(values: Tensor, block: int, seed: int, chosen: Tensor, into: Tensor, alpha: float) -> None:
    v, c, o, (k0, k1) = array_of(values), array_of(chosen), array_of(into), uniform_words(seed)
    scale, k, run = np.float32(block**-0.5), chosen.numel(), _hadamard_accumulate
    factor = np.float32(alpha)
    tasks = [
        functools.partial(run, v[i // block * k : -(-j // block) * k], block, i, k0, k1, c, scale, o[i:j], factor)
        for i, j in pool.chunks(into.numel(), block)
    ]
    pool.run(tasks)
