# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""QSGD on GPUs, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.random.reference import uniform_words
from gradwire.kernels.triton.blocks import (
    NORM,
    decode_blocks,
    given_sum,
    inverse_of,
    qsgd_codes,
    qsgd_values,
    row_sum,
    step_of,
)
from gradwire.kernels.triton.launch import codes_meta, launch, signed, tiling
from gradwire.kernels.triton.tiles import code_tile, load_tile, store_codes, store_tile, word


@triton.jit(do_not_specialize=["k0", "k1"])
def _qsgd_encode(
    x,
    packed,
    norms,
    given,
    numel,
    blocks,
    k0,
    k1,
    LEVELS: tl.constexpr,
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
        wide = tile.to(tl.float64)
        squares = row_sum(wide * wide)
    else:
        squares = tl.load(given + block)
    inverse, usable, stored = inverse_of(tl.sqrt(squares).to(tl.float32), LEVELS)
    counter = start.to(tl.uint32) + local.to(tl.uint32)
    codes = qsgd_codes(tile, inverse, usable, counter, word(k0), word(k1), LEVELS, BITS)
    codes = tl.where(valid, codes, 0)
    store_codes(packed + start // 8 * BITS, group, codes, left, inside, full, BITS, BYTES)
    tl.store(norms + block, stored, mask=(block < blocks) & (tl.program_id(0) % PARTS == 0))
    if KEEP:
        store_tile(x + start, local, tile - qsgd_values(codes, step_of(stored, LEVELS), BITS), valid, full)


def qsgd_encode(
    x: Tensor, levels: int, block: int, key: int, packed: Tensor, norms: Tensor, keep: bool = False
) -> None:
    tiles = tiling(x.numel(), block)
    given = given_sum(x, tiles, squares=True)
    launch(
        _qsgd_encode,
        tiles.programs,
        x.device,
        *(x, packed, norms, norms if given is None else given),
        *(x.numel(), tiles.blocks, *signed(uniform_words(key))),
        LEVELS=levels,
        KEEP=keep,
        **codes_meta(levels.bit_length() + 1),
        **tiles.meta,
    )


def qsgd_decode(
    packed: Tensor, norms: Tensor, levels: int, block: int, out: Tensor, weight: float | None = None
) -> None:
    decode_blocks(NORM, packed, norms, levels.bit_length() + 1, levels, block, out, weight)
