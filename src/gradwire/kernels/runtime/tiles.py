# pyright: basic
"""What kernels of blocks share: tiles, largest magnitudes and sums of blocks, and how decoded values are delivered.

Codes pass through a scratch of one tile, which stays in the nearest cache, and are packed from there eight at a time.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import CompiledKernel, array_of, inline, sum_in_any_order
from gradwire.kernels.runtime.vectors import prefetch, store_16_past_caches, use_widest_vectors

CHUNK = 256
"""Elements between which a pass that computes asks for what comes next, so that memory does not wait for it."""

AHEAD = 1024
"""Elements by which a pass that reads as it computes asks ahead: a few microseconds of memory."""


@inline
def prefetch_range(x, start, stop):
    """Ask for the lines of x[start:stop], of which none need exist."""
    use_widest_vectors()
    for i in range(start, stop, 16):
        prefetch(x, np.uintp(i))


RANDOM_ACCESS_WEIGHT = 16
"""The weight of an element that is drawn, or found at random in memory."""


@inline
def max_magnitude(raw, start, stop):
    """The bits of the largest magnitude from `start` to `stop`."""
    use_widest_vectors()
    # As integers: NaN is the greatest, and a maximum of integers needs no leave to be reordered.
    largest = np.uint32(0)
    for i in range(start, stop):
        largest = max(largest, np.uint32(raw[np.uintp(i)] & np.uint32(0x7FFFFFFF)))
    return largest


# A slice of an array counts a reference, which costs as much as a small block. So blocks are pairs (start, stop)
# within a tile of several, and are indexed by unsigned integers, which numba does not check for being negative.
TILE = 4096


@inline
def tile_of_blocks(block):
    """The size of a tile of whole blocks: one block at least."""
    return max(1, TILE // block) * block


# Decoders write to a tile, which is then added, or moved where it belongs.
PAST_CACHES = 1 << 18
"""From this size on (1 MiB of float32) who reads a result will not find it in the nearest caches anyway."""


@inline
def deliver(values, into, start, stop, alpha, overwrite, past_caches):
    """into += alpha * values, or into = values, from `start` to `stop`."""
    use_widest_vectors()
    if not overwrite:
        for i in range(start, stop):
            into[np.uintp(i)] += values[np.uintp(i)] * alpha
    elif past_caches:
        _move_past_caches(values, into, start, stop)
    else:
        for i in range(start, stop):
            into[np.uintp(i)] = values[np.uintp(i)]


@inline
def delivered(values, into, start, stop, alpha, overwrite, past_caches):
    """Deliver what is a chunk or the end; return where it ends. Memory takes one chunk while the next is computed."""
    if stop - start < CHUNK and stop < into.size:
        return start
    deliver(values, into, start, stop, alpha, overwrite, past_caches)
    return stop


@inline
def _move_past_caches(values, into, start, stop):
    """into = values. A cache would read each line first, to no purpose: all of it is overwritten."""
    use_widest_vectors()
    if np.uintp(into.ctypes.data) & np.uintp(3):  # no float begins at a line
        for i in range(start, stop):
            into[np.uintp(i)] = values[np.uintp(i)]
        return
    unaligned = ((np.uintp(into.ctypes.data) >> np.uintp(2)) + np.uintp(start)) & np.uintp(15)
    head = min(start + np.int64((np.uintp(16) - unaligned) & np.uintp(15)), stop)
    whole = head + (stop - head) // 16 * 16
    for i in range(start, head):
        into[np.uintp(i)] = values[np.uintp(i)]
    for i in range(head, whole, 16):
        store_16_past_caches(into, np.uintp(i), values, np.uintp(i))
    for i in range(whole, stop):
        into[np.uintp(i)] = values[np.uintp(i)]


@inline
def end_of_block(at, origin, block, size):
    """Where within a tile the block ends that `at` is in."""
    return min(((origin + at) // block + 1) * block - origin, size)


def decode_blocks(
    kernel: CompiledKernel,
    packed: Tensor,
    scales: Tensor,
    bits: int,
    parameter: int,
    block: int,
    into: Tensor,
    alpha: float | None,
) -> None:
    """Spread a decoder over the pool, cut at blocks; overwrite where alpha is None."""
    p, s, o, factor = array_of(packed), array_of(scales), array_of(into), np.float32(alpha or 0.0)
    pool.run(
        [
            functools.partial(
                kernel,
                *(p[i // 8 * bits :], s[i // block : -(-j // block)], parameter, block),
                *(o[i:j], factor, alpha is None),
            )
            for i, j in pool.chunks(o.size, block)
        ]
    )


@sum_in_any_order
def sum_magnitudes(x, start, stop):
    """The sum of |x| from `start` to `stop`, in float64."""
    use_widest_vectors()
    total = 0.0
    for i in range(start, stop):
        total += np.float64(abs(x[np.uintp(i)]))
    return total


@sum_in_any_order
def sum_squares(x, start, stop):
    """The sum of x^2 from `start` to `stop`, in float64."""
    use_widest_vectors()
    total = 0.0
    for i in range(start, stop):
        total += np.float64(x[np.uintp(i)]) * np.float64(x[np.uintp(i)])
    return total


SMALL_TILE = 1024
Array = np.ndarray[Any, Any]


def spread_over_threads(numel: int, granule: int, task: Callable[[int, int], functools.partial[Any]]) -> None:
    """Run `task(start, stop)` over the pool."""
    pool.run([task(i, j) for i, j in pool.chunks(numel, granule)])
