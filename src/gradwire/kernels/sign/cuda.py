# pyright: basic, reportGeneralTypeIssues=false, reportAssignmentType=false, reportOperatorIssue=false
"""Signs on GPUs, in Triton."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from gradwire.kernels.triton.blocks import SIGN, decode_blocks, each, given_sum, negated_where, row_sum
from gradwire.kernels.triton.launch import codes_meta, launch, tiling
from gradwire.kernels.triton.tiles import code_tile, load_tile, store_codes, store_tile


@triton.jit
def _sign_encode(
    x,
    packed,
    scales,
    given,
    numel,
    blocks,
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
        total = row_sum(tl.abs(tile).to(tl.float64))
    else:
        total = tl.load(given + block)
    count = tl.maximum(tl.minimum(numel - block.to(tl.int64) * BLOCK, BLOCK), 1)
    scale = (total / count.to(tl.float64)).to(tl.float32)
    codes = ((tile >= 0) & valid).to(tl.int32)
    store_codes(packed + start // 8, group, codes, left, inside, full, BITS, BYTES)
    tl.store(scales + block, scale, mask=(block < blocks) & (tl.program_id(0) % PARTS == 0))
    if KEEP:
        store_tile(x + start, local, tile - negated_where(codes == 0, each(scale)), valid, full)


def sign_encode(x: Tensor, block: int, packed: Tensor, scales: Tensor, keep: bool = False) -> None:
    tiles = tiling(x.numel(), block)
    given = given_sum(x, tiles, squares=False)
    launch(
        _sign_encode,
        tiles.programs,
        x.device,
        *(x, packed, scales, scales if given is None else given, x.numel(), tiles.blocks),
        KEEP=keep,
        **codes_meta(1),
        **tiles.meta,
    )


def sign_decode(packed: Tensor, scales: Tensor, block: int, out: Tensor, weight: float | None = None) -> None:
    decode_blocks(SIGN, packed, scales, 1, 1, block, out, weight)
