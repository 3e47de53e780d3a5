# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""Integers with a scale for each block on GPUs."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.triton.blocks import (
    INTEGER,
    block_int_levels,
    decode_blocks,
    each,
    given_largest,
    inverse_of,
    row_largest,
    step_of,
)
from gradwire.kernels.triton.launch import codes_meta, launch, signed, tiling
from gradwire.kernels.triton.tiles import code_tile, load_tile, store_codes, store_tile, word


@triton.jit(do_not_specialize=["k0", "k1"])
def _block_int_encode(
    x,
    packed,
    scales,
    given,
    numel,
    blocks,
    k0,
    k1,
    LEVELS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    KEEP: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start, left, full, group, inside, local, valid, block = code_tile(numel, BLOCK, WIDTH, ROWS, PARTS)

    tile = load_tile(x + start, local, valid, full)
    if PARTS == 1:
        largest = row_largest(tile)
    else:
        largest = tl.load(given + block)
    inverse, usable, stored = inverse_of(largest, LEVELS)
    counter = start.to(tl.uint32) + local.to(tl.uint32)
    q = block_int_levels(tile, inverse, usable, counter, word(k0), word(k1), LEVELS, STOCHASTIC)
    codes = tl.where(valid, q + LEVELS, 0)
    store_codes(packed + start // 8 * BITS, group, codes, left, inside, full, BITS, BYTES)
    tl.store(scales + block, stored, mask=(block < blocks) & (tl.program_id(0) % PARTS == 0))
    if KEEP:
        store_tile(x + start, local, tile - q.to(tl.float32) * each(step_of(stored, LEVELS)), valid, full)


def block_int_encode(
    x: Tensor, bits: int, block: int, key: int | None, packed: Tensor, scales: Tensor, keep: bool = False
) -> None:
    tiles = tiling(x.numel(), block)
    given = given_largest(x, tiles)
    words = (0, 0) if key is None else signed(uniform_words(key))
    launch(
        _block_int_encode,
        tiles.programs,
        x.device,
        *(x, packed, scales, scales if given is None else given, x.numel(), tiles.blocks, *words),
        LEVELS=2 ** (bits - 1) - 1,
        STOCHASTIC=key is not None,
        KEEP=keep,
        **codes_meta(bits),
        **tiles.meta,
    )


def block_int_decode(
    packed: Tensor, scales: Tensor, bits: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    decode_blocks(INTEGER, packed, scales, bits, 2 ** (bits - 1) - 1, block, out, weight)
