# pyright: basic
"""Count sketches on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.random.cpu import mix
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled, inline
from gradwire.kernels.sketch.reference import sketch_words

SMALL_TILE = 1024


@inline
def _hash(words, first, columns, k0, k1):
    """Columns of a tile's elements, with the sign in the lowest bit."""
    for i in range(words.size):
        word = mix(np.uint32(mix(np.uint32(np.uint32(first + i) ^ k0)) ^ k1))
        column = np.uint32((np.uint64(word >> np.uint32(1)) * np.uint64(columns)) >> np.uint64(31))
        words[i] = np.uint32((column << np.uint32(1)) | (word & np.uint32(1)))


@compiled("void(float32[::1], float32[::1], int64, int64)")
def _count_sketch(x, row, k0, k1):
    k0, k1, columns = np.uint32(k0), np.uint32(k1), np.uint32(row.size)
    words = np.empty(SMALL_TILE, np.uint32)
    row[:] = 0.0
    for start in range(0, x.size, SMALL_TILE):
        tile = words[: min(SMALL_TILE, x.size - start)]
        _hash(tile, start, columns, k0, k1)
        for i in range(tile.size):
            value = x[start + i]
            row[tile[i] >> np.uint32(1)] += -value if tile[i] & np.uint32(1) else value


def count_sketch(x: Tensor, seed: int, sketch: Tensor) -> None:
    rows = zip(array_of(sketch), sketch_words(seed, sketch.shape[0]), strict=True)
    tasks = [functools.partial(_count_sketch, array_of(x), row, *words) for row, words in rows]
    _run(tasks, x.numel())


def _run(tasks, numel):
    if numel > pool.SERIAL_NUMEL:
        pool.run(tasks)
    else:
        for task in tasks:
            task()


@inline
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


@inline
def _median_of_3(a, b, c):
    low, high = (a, b) if a < b else (b, a)
    middle = c if c > low else low
    middle = middle if middle < high else high
    return middle if a == a and b == b and c == c else np.float32(np.nan)


@inline
def _estimates(row, words, first, k0, k1, out):
    _hash(words, first, np.uint32(row.size), k0, k1)
    for i in range(words.size):
        value = row[words[i] >> np.uint32(1)]
        out[i] = -value if words[i] & np.uint32(1) else value


@compiled("void(float32[:,::1], uint32[:,::1], int64, float32[::1])")
def _count_unsketch(sketch, keys, first, out):
    rows = sketch.shape[0]
    words = np.empty(SMALL_TILE, np.uint32)
    found = np.empty((rows, SMALL_TILE), np.float32)
    values = np.empty(rows, np.float32)
    for start in range(0, out.size, SMALL_TILE):
        stop = min(start + SMALL_TILE, out.size)
        for j in range(rows):
            _estimates(sketch[j], words[: stop - start], first + start, keys[j, 0], keys[j, 1], found[j])
        for i in range(stop - start):
            if rows == 3:
                out[start + i] = _median_of_3(found[0, i], found[1, i], found[2, i])
            else:
                for j in range(rows):
                    values[j] = found[j, i]
                out[start + i] = _median(values)


def count_unsketch(sketch: Tensor, seed: int, out: Tensor) -> None:
    s, o, keys = array_of(sketch), array_of(out), np.array(sketch_words(seed, sketch.shape[0]), np.uint32)
    pool.run([functools.partial(_count_unsketch, s, keys, i, o[i:j]) for i, j in pool.chunks(out.numel())])
