# pyright: basic
"""Signs with two means, and votes, on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.packing.cpu import choose_by_bits, pack_at_least
from gradwire.kernels.runtime.compiling import array_of, compiled, inline, sum_in_any_order
from gradwire.kernels.runtime.tiles import (
    TILE,
    end_of_block,
    spread_over_threads,
    tile_of_blocks,
    write_or_add_at,
)
from gradwire.kernels.runtime.vectors import bits_of, count_ones, float_of


@sum_in_any_order
def _sums_of_halves(x, start, stop):
    """The sum of those that are at least 0, and of all others."""
    up = down = 0.0
    for i in range(start, stop):
        # Masks and no choices: of two on one condition LLVM makes a branch, which takes three times as long.
        value = x[np.uintp(i)]
        bits, keep = bits_of(value), np.uint32(np.uint32(0) - np.uint32(value >= np.float32(0)))
        up += np.float64(float_of(np.uint32(bits & keep)))
        down += np.float64(float_of(np.uint32(bits & np.uint32(~keep))))
    return up, down


@sum_in_any_order
def _count_ones(bits, start, stop):
    count = 0
    for j in range(start, stop):
        count += np.int64(count_ones(np.uint64(bits[np.uintp(j)])))
    return count


@compiled("void(float32[::1], int64, uint8[::1], float32[::1])")
def _one_bit_encode(x, block, packed, means):
    tile = tile_of_blocks(block)
    for origin in range(0, x.size, tile):
        piece, bits = x[origin : origin + tile], packed[origin // 8 :]
        pack_at_least(piece, np.float32(0), bits)
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), (origin + start) // block
            count, (up, down) = _count_ones(bits, start // 8, -(-stop // 8)), _sums_of_halves(piece, start, stop)
            means[np.uintp(2 * b)] = np.float32(up / np.float64(max(count, 1)))
            means[np.uintp(2 * b + 1)] = np.float32(down / np.float64(max(stop - start - count, 1)))


def one_bit_encode(x: Tensor, block: int, packed: Tensor, means: Tensor) -> None:
    a, p, m = array_of(x), array_of(packed), array_of(means)
    spread_over_threads(
        a.size,
        block,
        lambda i, j: functools.partial(
            _one_bit_encode, a[i:j], block, p[i // 8 :], m[2 * (i // block) : -2 * (-j // block)]
        ),
    )


@compiled("void(uint8[::1], float32[::1], int64, float32[::1], float32, boolean)")
def _one_bit_decode(packed, means, block, into, alpha, overwrite):
    values = np.empty(TILE, np.float32)
    for origin in range(0, into.size, TILE):
        piece, start = into[origin : origin + TILE], 0
        while start < piece.size:
            b, stop = (origin + start) // block, end_of_block(start, origin, block, piece.size)
            up, down = means[np.uintp(2 * b)], means[np.uintp(2 * b + 1)]
            choose_by_bits(packed[origin // 8 :], start, stop, up, down, values)
            start = stop
        for i in range(piece.size):
            write_or_add_at(values[i], piece, i, alpha, overwrite)


def one_bit_decode(packed: Tensor, means: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    p, m, o, factor = array_of(packed), array_of(means), array_of(out), np.float32(weight or 0.0)
    spread_over_threads(
        o.size,
        block,
        lambda i, j: functools.partial(
            _one_bit_decode,
            *(p[i // 8 :], m[2 * (i // block) : -2 * (-j // block)], block),
            *(o[i:j], factor, weight is None),
        ),
    )


@inline
def _bytes_of_bits(byte):
    """Bit i of a byte in byte i of a word: see `packing.cpu.unpack_codes`."""
    w = (np.uint64(byte) * np.uint64(0x0101010101010101)) & np.uint64(0x8040201008040201)
    return ((w + np.uint64(0x00406070787C7E7F)) >> np.uint64(7)) & np.uint64(0x0101010101010101)


@compiled("void(uint8[:, ::1], int64, int64, int64, uint8[::1])")
def _majority(ballots, casting, start, stop, out):
    voters = ballots.shape[0]
    # A byte that counts more than `voters` reaches 128 with this added.
    margin = np.uint64(127 - voters) * np.uint64(0x0101010101010101)
    counts = np.empty(min(TILE, stop - start), np.uint64)
    for origin in range(start, stop, TILE):
        size = min(TILE, stop - origin)
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
    """See `gradwire.kernels.majority`. For up to 127 voters, who fit the counters of a byte."""
    b, o = array_of(ballots), array_of(out)
    spread_over_threads(o.size, 1, lambda i, j: functools.partial(_majority, b, casting, i, j, o))
