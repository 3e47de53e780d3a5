# pyright: basic
"""Signs on CPUs, in numba."""

from __future__ import annotations

import functools

import numpy as np
from torch import Tensor

from gradwire.kernels.packing.cpu import choose_by_bits, pack_at_least
from gradwire.kernels.runtime import pool
from gradwire.kernels.runtime.compiling import array_of, compiled
from gradwire.kernels.runtime.tiles import (
    TILE,
    decode_blocks,
    end_of_block,
    sum_magnitudes,
    tile_of_blocks,
    write_or_add_at,
)
from gradwire.kernels.sign.one_bit_cpu import majority, one_bit_decode, one_bit_encode

__all__ = [
    "majority",
    "one_bit_decode",
    "one_bit_encode",
    "sign_decode",
    "sign_encode",
]


@compiled("void(float32[::1], int64, uint8[::1], float32[::1], boolean)")
def _sign_encode(x, block, packed, scales, keep):
    tile = tile_of_blocks(block)
    values = np.empty(tile, np.float32)
    for origin in range(0, x.size, tile):
        piece, bits = x[origin : origin + tile], packed[origin // 8 :]
        pack_at_least(piece, np.float32(0), bits)  # a 1 for -0.0 too, and none for NaN
        for start in range(0, piece.size, block):
            stop, b = min(start + block, piece.size), np.uintp((origin + start) // block)
            up = np.float32(sum_magnitudes(piece, start, stop) / np.float64(stop - start))
            scales[b] = up
            if keep:
                choose_by_bits(bits, start, stop, up, -up, values)
        if keep:
            for i in range(piece.size):
                piece[i] -= values[i]


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    a, p, s = array_of(x), array_of(packed), array_of(scales)
    pool.run(
        [
            functools.partial(_sign_encode, a[i:j], block, p[i // 8 :], s[i // block : -(-j // block)], keep)
            for i, j in pool.chunks(x.numel(), block)
        ]
    )


@compiled("void(uint8[::1], float32[::1], int64, int64, float32[::1], float32, boolean)")
def _sign_decode(packed, scales, bits, block, into, alpha, overwrite):
    values = np.empty(TILE, np.float32)
    for origin in range(0, into.size, TILE):
        piece, start = into[origin : origin + TILE], 0
        while start < piece.size:
            up, stop = scales[np.uintp((origin + start) // block)], end_of_block(start, origin, block, piece.size)
            choose_by_bits(packed[origin // 8 :], start, stop, up, -up, values)
            start = stop
        for i in range(piece.size):
            write_or_add_at(values[i], piece, i, alpha, overwrite)


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    decode_blocks(_sign_decode, packed, scales, 1, 1, block, out, weight)
