# pyright: basic, reportGeneralTypeIssues=false
"""The owner's part of a quantised two-shot: decode n payloads, add, encode the mean, in one pass."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.cuda.launch import TILE, codes_meta, launch, signed, tiling
from gradwire.kernels.cuda.rounding import block_int_levels, each, inverse_of, row_largest, step_of
from gradwire.kernels.cuda.tiles import code_tile, load_codes, load_tile, store_codes, store_tile, word
from gradwire.kernels.reference import uniform_words


@triton.jit(do_not_specialize=["k0", "k1", "rows"])
def _block_int_reduce(
    received,
    received_scales,
    owner,
    packed,
    scales,
    rows,
    packed_stride,
    scale_stride,
    numel,
    blocks,
    k0,
    k1,
    alpha,
    OWNER: tl.constexpr,
    LEVELS_IN: tl.constexpr,
    BITS_IN: tl.constexpr,
    SPAN_IN: tl.constexpr,
    LEVELS: tl.constexpr,
    STOCHASTIC: tl.constexpr,
    BITS: tl.constexpr,
    BYTES: tl.constexpr,
    SPAN: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
):
    start, left, full, group, inside, local, valid, block = code_tile(numel, BLOCK, WIDTH, ROWS, PARTS)
    mine = block < blocks

    mean = tl.zeros([ROWS, WIDTH // 8, 8], tl.float32)
    for row in range(rows):
        scale = tl.load(received_scales + row * scale_stride + block, mask=mine, other=0.0)
        codes = load_codes(received + row * packed_stride + start // 8 * BITS_IN, group, valid, full, BITS_IN, SPAN_IN)
        mean += (codes.to(tl.float32) - LEVELS_IN) * each(step_of(scale, LEVELS_IN)) * alpha
    if OWNER:
        mean += load_tile(owner + start, local, valid, full)
    mean = tl.where(valid, mean, 0.0)

    inverse, usable, stored = inverse_of(row_largest(mean), LEVELS)
    counter = start.to(tl.uint32) + local.to(tl.uint32)
    q = block_int_levels(mean, inverse, usable, counter, word(k0), word(k1), LEVELS, STOCHASTIC)
    codes = tl.where(valid, q + LEVELS, 0)
    store_codes(packed + start // 8 * BITS, group, codes, left, inside, full, BITS, BYTES)
    tl.store(scales + block, stored, mask=mine)
    if OWNER:
        store_tile(owner + start, local, mean - q.to(tl.float32) * each(step_of(stored, LEVELS)), valid, full)


def fits(block: int) -> bool:
    """Whether a program sees a whole block, without which the mean cannot be encoded as it is made."""
    return block <= TILE


def block_int_reduce(
    received: Tensor,
    received_scales: Tensor,
    bits: int,
    block: int,
    owner: Tensor | None,
    out_bits: int,
    key: int | None,
    packed: Tensor,
    scales: Tensor,
    numel: int,
    alpha: float,
) -> None:
    """See `gradwire.kernels.fused.block_int_reduce`; blocks that `fits` refuses are the caller's to refuse."""
    tiles, read, write = tiling(numel, block), codes_meta(bits), codes_meta(out_bits)
    words = (0, 0) if key is None else signed(uniform_words(key))
    launch(
        _block_int_reduce,
        tiles.programs,
        received.device,
        *(received, received_scales, packed if owner is None else owner, packed, scales, received.shape[0]),
        *(received.stride(0), received_scales.stride(0), numel, tiles.blocks, *words, float(alpha)),
        OWNER=owner is not None,
        LEVELS_IN=2 ** (bits - 1) - 1,
        BITS_IN=read["BITS"],
        SPAN_IN=read["SPAN"],
        LEVELS=2 ** (out_bits - 1) - 1,
        STOCHASTIC=key is not None,
        **write,
        **tiles.meta,
    )
