# pyright: basic
"""What kernels of blocks share: tiles, largest magnitudes and sums of blocks, and how decoded values are written.

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

RANDOM_ACCESS_WEIGHT = 16
"""The weight of an element that is drawn, or found at random in memory."""


@inline
def max_magnitude(raw, start, stop):
    """The bits of the largest magnitude from `start` to `stop`."""
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


@inline
def write_or_add_at(value, into, i, alpha, overwrite):
    """into[i] += alpha * value, where the product is rounded first, or into[i] = value."""
    into[i] = value if overwrite else into[i] + value * alpha


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
    """Spread a decoder over the pool, cut at blocks; overwrite where alpha is None.

    `kernel` is called as kernel(packed, scales, parameter, block, into, alpha, overwrite). `bits` are those of a code,
    by which `packed` is cut; `parameter` is what the kernel wants to know of its codes, such as their bits or levels.
    """
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
    total = 0.0
    for i in range(start, stop):
        total += np.float64(abs(x[np.uintp(i)]))
    return total


@sum_in_any_order
def sum_squares(x, start, stop):
    """The sum of x^2 from `start` to `stop`, in float64."""
    total = 0.0
    for i in range(start, stop):
        total += np.float64(x[np.uintp(i)]) * np.float64(x[np.uintp(i)])
    return total


Array = np.ndarray[Any, Any]


def spread_over_threads(numel: int, granule: int, task: Callable[[int, int], functools.partial[Any]]) -> None:
    """Run the calls that `task(start, stop)` returns over the pool, for pieces cut at multiples of `granule`."""
    pool.run([task(i, j) for i, j in pool.chunks(numel, granule)])
